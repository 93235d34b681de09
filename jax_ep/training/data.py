"""Text to train on: documents as bytes, whole ones held out for validation, and windows in a seeded order that a
resumed run enters anywhere.

The vocabulary is the 256 values of a byte. Byte 0 ends every document, so no document may hold one.

Letters: A microbatches of a step, B sequences of a step, S positions, n windows of an epoch.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from jax_ep.config import ConfigError, positive_int, refuse
from jax_ep.training.config import TrainConfig

VOCABULARY = 256
SEPARATOR = b"\0"
_PART = 10  # one byte in this many is held out
_NAMED = 8  # names that a sentence lists
_CHUNK = 2**16


class Document(NamedTuple):
    """A file's bytes, and its name without the folder, so that nothing depends on where it lies."""

    name: str
    data: bytes


class Documents(NamedTuple):
    """What there is to read, in order of name, and a sentence on where it comes from."""

    files: tuple[Document, ...]
    source: str


class Split(NamedTuple):
    """Documents cut in two.

    Attributes:
      train, validation: uint8 [bytes], documents in order of name, byte 0 after each.
      facts: what makes another text another one, as strings and integers: "files", "held_out" (a sentence), and of both
        halves their "_bytes" and "_sha256". A checkpoint keeps them and refuses to go on with other ones.
    """

    train: np.ndarray
    validation: np.ndarray
    facts: dict[str, Any]


def read_documents(paths: Sequence[str] | None = None, field: str = "data") -> Documents:
    """Files as bytes, whatever their encoding.

    Files of equal contents count once: of two, one could be held out and the other trained on.

    Args:
      paths: the files. None: the Python standard library's own modules (its folder's .py files, none below it), which
        every machine has.
      field: what a refusal calls them.

    Raises:
      ConfigError: no file, or one that is missing, a folder, unreadable or empty; it names the file.
    """
    instead = "without it, the Python standard library's sources are read"
    default = paths is None
    if paths is None:
        instead = "files of yours work"
        folder = Path(sysconfig.get_paths()["stdlib"])
        paths = [str(file) for file in folder.glob("*.py") if file.is_file()]
        if not paths:
            raise ConfigError(f"{field}: this Python has no standard library sources in {folder}; {instead}")
    elif isinstance(paths, str) or not paths:
        refuse(field, paths, "must be a list of at least one file", ["notes.txt"])
    found: dict[bytes, Document] = {}
    for path in sorted(paths, key=lambda path: (Path(path).name, path)):
        document = Document(Path(path).name, _read(path, field, instead))
        found.setdefault(hashlib.sha256(document.data).digest(), document)
    # Of equal names in several folders the contents decide, not the folders' names.
    files = tuple(found[digest] for digest in sorted(found, key=lambda digest: (found[digest].name, digest)))
    size = sum(len(file.data) for file in files)
    if default:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        where = f"source files of Python {version}'s standard library, {len(files)} files"
    else:
        where = files[0].name if len(files) == 1 else f"{len(files)} files ({_names(files)})"
    return Documents(files, f"{where}, {size} bytes")


def _read(path: str, field: str, instead: str) -> bytes:
    file = Path(path)
    try:
        if file.is_dir():
            wrong = f"is a folder, and files are needed: {file / 'FILE'} works"
        elif contents := file.read_bytes():
            return contents
        else:
            wrong = "is empty"
    except OSError as error:
        wrong = f"cannot be read: {error.strerror}"
    raise ConfigError(f"{field}={str(path)!r}: {wrong}; {instead}")


def _names(files: Sequence[Document]) -> str:
    named = ", ".join(file.name for file in files[:_NAMED])
    return f"{named}, ..." if len(files) > _NAMED else named


def split(documents: Documents, sequence_length: int, seed: int = 0) -> Split:
    """Holds out whole files for validation, as many as make up a tenth of the bytes.

    A seeded hash of a file's name decides its turn, so that every process, order of the files and machine comes to the
    same. Where no file fits into a tenth, the smallest is held out. Of one file alone it is the last tenth.

    Args:
      documents: of `read_documents`.
      sequence_length: S, of the windows that both halves have to fill.
      seed: of the hash.

    Raises:
      ConfigError: a document holds byte 0, or one half is shorter than a window.
    """
    positive_int("sequence_length", sequence_length, 128)
    files = documents.files
    for file in files:
        if (at := file.data.find(SEPARATOR)) >= 0:
            rule = f"holds byte 0, at {at}, which ends a document here (UTF-16 is full of them); the same text in UTF-8"
            raise ConfigError(f"data={file.name!r}: {rule} works")
    if len(files) == 1:
        whole = _joined(files)
        cut = len(whole) - len(whole) // _PART
        train, validation = whole[:cut], whole[cut:]
        held_out = f"the last tenth of {files[0].name}"
    else:
        held = _held_out(files, sequence_length, seed)
        train = _joined([file for at, file in enumerate(files) if at not in held])
        validation = _joined([files[at] for at in sorted(held)])
        held_out = f"{len(held)} of {len(files)} files: {_names([files[at] for at in sorted(held)])}"
    for name, half in {"validation": validation, "training": train}.items():
        if len(half) < sequence_length:
            left = f"{len(half)} bytes are left for {name}, and sequence_length={sequence_length} needs as many"
            works = f"{_PART * sequence_length} bytes of text"
            if len(files) > 1:  # whole ones are held out, so it is not the sum that counts
                short = "too short" if name == "validation" else "too much"
                left += f": what is held out, {held_out}, is {short}"
                works = "larger files"
            works += f" or sequence_length={len(half)} work" if len(half) > 1 else " work"
            raise ConfigError(f"data ({documents.source}): {left}; {works}")
    facts: dict[str, Any] = {"files": len(files), "held_out": held_out}
    for name, half in {"train": train, "validation": validation}.items():
        facts |= {f"{name}_bytes": len(half), f"{name}_sha256": hashlib.sha256(half.data).hexdigest()}
    return Split(train, validation, facts)


def _held_out(files: Sequence[Document], least: int, seed: int) -> set[int]:
    """Which of several files are held out: in their turn those that fit, and small ones until there are `least`
    bytes.
    """
    sizes = [len(file.data) + 1 for file in files]
    named = [f"{seed} {file.name}".encode(errors="surrogateescape") for file in files]
    turn = [(hashlib.sha256(name).digest(), file.data) for name, file in zip(named, files)]
    held: set[int] = set()
    room = sum(sizes) // _PART
    for at in sorted(range(len(files)), key=lambda at: turn[at]):
        if sizes[at] <= room:
            held.add(at)
            room -= sizes[at]
    for at in sorted(range(len(files)), key=lambda at: (sizes[at], turn[at])):
        if sum(sizes[i] for i in held) < least and len(held) < len(files) - 1:
            held.add(at)
    return held


def _joined(files: Sequence[Document]) -> np.ndarray:
    return np.frombuffer(b"".join(part for file in files for part in (file.data, SEPARATOR)), np.uint8)


def unigram_entropy(data: np.ndarray) -> float:
    """Entropy of single bytes, in nats: the loss of a model that knows how frequent each is, and nothing else."""
    chunks = (data[at : at + _CHUNK] for at in range(0, len(data), _CHUNK))  # bincount widens what it is given
    counts = sum((np.bincount(chunk, minlength=VOCABULARY) for chunk in chunks), np.zeros(VOCABULARY, np.int64))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


class Windows:
    """Tokens in windows of S that do not overlap, in an order without an end: every epoch has each window once, in
    another seeded permutation. What follows the last whole window is left out.

    The window at a position is a pure function of (tokens, sequence_length, seed, position), so that a run resumes with
    nothing but the number of sequences it has had, with any batch size and number of processes.

    Attributes:
      sequence_length: S.
      seed: of the order.

    Raises:
      ConfigError: fewer tokens than a window.
    """

    def __init__(self, tokens: np.ndarray, sequence_length: int, seed: int = 0):
        positive_int("sequence_length", sequence_length, 128)
        positive_int("seed", seed, 0, least=0)
        count = len(tokens) // sequence_length
        if not count:
            rule = f"there are {len(tokens)} tokens, fewer than one window"
            refuse("sequence_length", sequence_length, rule, max(1, len(tokens)))
        self.sequence_length = sequence_length
        self.seed = seed
        self._windows = tokens[: count * sequence_length].reshape(count, sequence_length)  # [n, S]

    def __len__(self) -> int:
        """Windows of an epoch, n."""
        return len(self._windows)

    def rows(self, first: int, count: int) -> np.ndarray:
        """The windows at positions first, ..., first + count - 1: int32 [count, S]."""
        positive_int("first", first, 0, least=0)
        positive_int("count", count, 8, least=0)
        return self.at(int(first) + np.arange(count))

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The windows at positions [...], integers from 0: int32 [..., S]."""
        epochs, places = np.divmod(positions, len(self))
        for epoch in np.unique(epochs):
            here = epochs == epoch
            places[here] = _order(self.seed, int(epoch), len(self))[places[here]]
        return self._windows[places].astype(np.int32)  # [..., S]


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    """A permutation of `count`: of Philox' raw bits, which NumPy promises to keep, as it does not for its shuffles."""
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(count)
    order = np.argsort(bits, kind="stable")
    order.flags.writeable = False
    return order


def batch(windows: Windows, position: int, config: TrainConfig, sharding: Sharding) -> jax.Array:
    """The sequences of one step: positions position, ..., position + B - 1 of `windows`.

    Returns:
      int32 [A, B/A, S], a global array; each process makes only the rows of its own devices.
    """
    lead = (config.accumulation, config.batch_size // config.accumulation)
    return place_rows(windows, position, lead, sharding)


def place_rows(windows: Windows, first: int, lead: tuple[int, ...], sharding: Sharding) -> jax.Array:
    """The windows from position `first` on as int32 [*lead, S], a global array laid out as `sharding` says."""
    positions = int(first) + np.arange(math.prod(lead)).reshape(lead)
    make = lambda index: windows.at(positions[index[:-1]])[..., index[-1]]
    return jax.make_array_from_callback((*lead, windows.sequence_length), sharding, make)
