"""Files of a folder that strangers filled: regular ones alone, no links out of it, JSON that says everything once."""

from __future__ import annotations

import collections
import json
import os
import reprlib
import stat
from pathlib import Path
from typing import Any

import numpy as np

from jax_ep.config import refuse

HEADER_LIMIT = 100_000_000  # bytes of JSON; the limit of the safetensors format
_MOST = 160  # characters of a value in an error message
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _MOST
_BRIEF.maxlist, _BRIEF.maxdict, _BRIEF.maxlevel = 8, 8, 3


class _Said(str):
    """What an error message says of a value: its own repr."""

    def __repr__(self) -> str:
        return str(self)


def short(value: Any) -> str:
    """A value for an error message, cut where it is long: what came from a file may be of any size."""
    return _Said(_BRIEF.repr(bytes(value[:_MOST]) if isinstance(value, bytes) else value))


def _real_path(folder: Path, name: str) -> str:
    """The file that `name` is, links not followed: except the hub's own, snapshots/REVISION/name -> blobs/HASH."""
    path = os.path.join(folder, name)
    try:
        is_link = stat.S_ISLNK(os.lstat(path).st_mode)
    except (OSError, ValueError) as error:
        refuse("folder", str(folder), f"{name!r} cannot be opened: {why(error)}", f"a folder with {name}")
    if is_link:
        target, here = os.path.realpath(path), Path(os.path.realpath(folder))
        blobs = here.parent.parent / "blobs"
        if here.parent.name != "snapshots" or Path(target).parent != blobs:
            rule = f"is a link, to {target!r}; links are followed only from the hub's snapshots/ to its blobs/"
            refuse("file", path, rule, "the file itself")
        return target
    return path


def why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def open_regular(folder: Path, name: str) -> int:
    """A file descriptor, for reading, of a regular file of this folder.

    Raises:
      ConfigError: there is none, it cannot be opened, or it is a link, a folder or a device.
    """
    path = _real_path(folder, name)
    try:  # a pipe must not block, and what became a link meanwhile must not be followed
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        refuse("folder", str(folder), f"{name!r} cannot be opened: {why(error)}", "a folder one may read")
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        refuse("file", path, "must be a regular file", "the file itself")
    return fd


def read_at(fd: int, offset: int, out: np.ndarray[Any, Any]) -> int:
    """Fills the contiguous `out` with the file's bytes from `offset` on; returns how many there were."""
    view = out.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done : done + (1 << 30)]], offset + done)
        if not got:
            break
        done += got
    return done


def read_json(folder: Path, name: str, limit: int = HEADER_LIMIT) -> dict[str, Any]:
    """A JSON object in a regular file of this folder, every key of it once."""
    fd = open_regular(folder, name)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            refuse(name, f"{size} bytes", f"is no {name}: those have at most {limit} bytes", f"{limit} bytes")
        raw = np.empty(size, np.uint8)
        raw = raw[: read_at(fd, 0, raw)]
    finally:
        os.close(fd)
    return parse_json(name, raw.tobytes())


def parse_json(what: str, raw: bytes) -> dict[str, Any]:
    """A JSON object in UTF-8, every key of it once."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice, _ = collections.Counter(name for name, _ in pairs).most_common(1)[0]
            raise ValueError(f"the key {short(twice)} is there twice")
        return found

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        refuse(what, short(raw), f"is no JSON object in UTF-8 ({short(str(error))})", "{...}")
    if not isinstance(value, dict):
        refuse(what, short(value), "must be a JSON object", "{...}")
    return value
