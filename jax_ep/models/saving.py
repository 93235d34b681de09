"""Parameters of a decoder into safetensors files with the hub's names, all of them or none.

Letters: Y layers, E experts, padded to E' on a mesh.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_ep.config import ConfigError, positive_int, refuse
from jax_ep.model_config import ModelConfig
from jax_ep.models import safetensors_io as files
from jax_ep.models import shards
from jax_ep.models.decoder import Params, decoder_shapes
from jax_ep.models.folder_update import FolderUpdate, write_at
from jax_ep.models.shards import Leaf, Ranges
from jax_ep.models.tensors import TensorEntry, tensor_map, to_hub

MOST_FILE_BYTES = 5_000_000_000  # what the hub's tools split at
_WRITE_BYTES = 1 << 20  # turned and written at once
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_HEADS = (files.INDEX, files.SINGLE)  # without them a folder holds no model

# What a shard has on the host: of a layer, counted from the shard's first one, or all of a leaf without layers (None).
Pieces = dict[Ranges, Callable[[int | None], np.ndarray]]


def save_params(
    params: Params,
    config: ModelConfig,
    family: str,
    folder: str | os.PathLike[str],
    *,
    most_file_bytes: int = MOST_FILE_BYTES,
    beside: Mapping[str, bytes] | None = None,
) -> None:
    """Writes parameters under the hub's names: model.safetensors, or several files and their index.

    The files are written in a new folder inside `folder` and moved when all are whole, together with those `beside`:
    after an error the old ones are there untouched. Older model files of the folder go; other files stay.

    In a job of several processes every process calls this, and each writes its own experts into the same files: the
    folder has to be one that they share.

    Args:
      params: as `init_decoder` gives them, for any number of ranks, in config.moe.param_dtype. Empty experts that pad
        a mesh are left out.
      config: of the model.
      family: whose names the tensors get, a key of `families.FAMILIES`.
      folder: made where missing.
      most_file_bytes: of tensors in one file, where a tensor is not larger itself.
      beside: further files, name -> content.

    Raises:
      ConfigError: parameters that do not fit the config; a disk that is full; a folder that cannot be written to.
    """
    positive_int("most_file_bytes", most_file_bytes, MOST_FILE_BYTES)
    beside = dict(beside or {})
    flat = shards.flatten(params)
    _check_params(flat, config)
    entries = tensor_map(family, config)
    groups = shards.group(entries, flat)
    code = files.code_of(config.moe.param_dtype)
    plans, index = files.plan_files({entry.name: (code, entry.shape) for entry in entries}, most_file_bytes)
    if index is not None:
        beside[files.INDEX] = index
    contents = {**{plan.name: plan.header for plan in plans}, **beside}
    sizes = {plan.name: plan.size for plan in plans}
    update = FolderUpdate(Path(folder), _token())
    first = jax.process_index() == 0

    def begin() -> None:
        if first:
            update.begin()
            for name, content in contents.items():
                update.create(name, content, sizes.get(name))

    def write() -> None:
        with contextlib.ExitStack() as stack:
            starts: dict[str, tuple[int, int]] = {}  # tensor -> its file and its first byte there
            for plan in plans:
                fd = os.open(update.new / plan.name, os.O_WRONLY | os.O_CLOEXEC)
                stack.callback(os.close, fd)
                starts |= {name: (fd, offset) for name, offset in plan.offsets.items()}
            for leaves, group in groups.items():
                _write_group([flat[leaf] for leaf in leaves], group, config.moe.num_experts, starts)
            for fd in {fd for fd, _ in starts.values()}:
                os.fsync(fd)

    def commit() -> None:
        if first:
            update.commit(contents, lambda name: bool(_OURS.fullmatch(name)) or name in contents, _HEADS)

    try:
        for step in (begin, write, commit):
            _together(step, update)
    except BaseException:
        if first:
            update.abort()
        raise


def _check_params(flat: Mapping[Leaf, Any], config: ModelConfig) -> None:
    """Names, shapes and dtypes as init_decoder gives them; experts padded for any number of ranks."""
    wanted = shards.flatten(decoder_shapes(config))
    if flat.keys() != wanted.keys():
        names = sorted(".".join(leaf) for leaf in flat.keys() ^ wanted.keys())
        refuse("params", names, "are missing or too many: must be those of init_decoder(config)", [])
    of_experts = [leaf for leaf in wanted if leaf[-2:-1] == ("experts",)]
    padded = max(config.moe.num_experts, *(flat[leaf].shape[1] for leaf in of_experts if flat[leaf].ndim > 1), 0)
    for leaf, like in wanted.items():
        array, name = flat[leaf], f"params[{'.'.join(leaf)!r}]"
        shape = (like.shape[0], padded, *like.shape[2:]) if leaf in of_experts else like.shape
        if array.shape != shape:
            refuse(f"{name}.shape", list(array.shape), "does not fit the config and the others", list(shape))
        if array.dtype != like.dtype:
            refuse(f"{name}.dtype", array.dtype.name, "must be config.moe.param_dtype", like.dtype.name)


def _token() -> str:
    """A name that all processes of a job know and nobody else has."""
    token = np.uint32(secrets.randbits(32))
    if jax.process_count() > 1:
        token = multihost_utils.broadcast_one_to_all(token)
    return f"{int(token):08x}"


def _together(step: Callable[[], None], update: FolderUpdate) -> None:
    """Runs a step in every process; it fails in all where it fails in one."""
    error: Exception | None = None
    try:
        step()
    except Exception as failed:
        error = failed
    failures = 0 if error is None else 1
    if jax.process_count() > 1:
        failures = int(multihost_utils.process_allgather(np.int32(failures)).sum())
    if isinstance(error, OSError) or (error is None and failures):
        why = "another process failed" if error is None else getattr(error, "strerror", None) or str(error)
        works = "one with room for it, that this user may write to and all processes share"
        try:
            refuse("folder", str(update.folder), f"cannot be written to: {why}; {update.state}", works)
        except ConfigError as refusal:
            raise refusal from error
    if error is not None:
        raise error


def _write_group(
    leaves: list[Any], entries: list[TensorEntry], num_experts: int, starts: Mapping[str, tuple[int, int]]
) -> None:
    """Writes what this process owns of the tensors that `leaves`, alike in shape, make up. Raises OSError."""
    axes = 2 if shards.of_experts(entries[0]) else 1 if entries[0].layer is not None else 0
    pieces = [_pieces(leaf, axes) for leaf in leaves]
    if any(piece.keys() != pieces[0].keys() for piece in pieces):
        pieces = [_whole(leaf, axes) for leaf in leaves]
    for ranges in pieces[0]:
        for layer, group in itertools.groupby(entries, key=lambda entry: entry.layer):
            if layer is not None and layer not in ranges[0]:
                continue
            at = None if layer is None else layer - ranges[0].start
            arrays = [piece[ranges](at) for piece in pieces]
            arrays = [a.view(f"u{a.itemsize}") for a in arrays]
            for entry in group:
                found = shards.within(entry, ranges, num_experts)
                if found is not None:
                    here, rows = found
                    parts = [a[here[1:]] if layer is not None else a for a in arrays]
                    _write_tensor(parts, entry, rows, *starts[entry.name])


def _write_tensor(parts: list[np.ndarray], entry: TensorEntry, rows: range, fd: int, start: int) -> None:
    """Writes rows of a tensor, of which `parts` are what our leaves have."""
    row = parts[0].itemsize * math.prod(entry.shape[1:])
    for block in shards.blocks(rows, row, entry, _WRITE_BYTES):
        at = slice(block.start - rows.start, block.stop - rows.start)
        which: Any = (..., at) if shards.rows_last(entry) else at
        like = dataclasses.replace(entry, shape=(len(block), *entry.shape[1:]))
        write_at(fd, start + block.start * row, to_hub(like, tuple(part[which] for part in parts)))


def _pieces(leaf: Any, axes: int) -> Pieces:
    """The shards of an array that this process writes: each is one process's alone.

    `axes`: how many leading axes may be split; where others are, the array is taken as a whole.
    """
    if not isinstance(leaf, jax.Array):
        return _whole(leaf, axes)
    found: Pieces = {}
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            ranges = shards.ranges_of(shard.index, leaf.shape)
            if [len(have) for have in ranges[axes:]] != list(leaf.shape[axes:]):
                return _whole(leaf, axes)
            found[ranges] = functools.partial(_on_host, shard.data)
    return found


def _whole(leaf: Any, axes: int) -> Pieces:
    """An array as one piece, a layer at a time; process 0 writes what every process has."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        rule = "over several processes, parameters are split along layers and experts alone"
        refuse("params sharding", leaf.sharding, rule, "jax.device_put(params, decoder_shardings(config, mesh))")
    if jax.process_index():
        return {}
    return {shards.ranges_of((), leaf.shape): functools.partial(_on_host, leaf)}


def _on_host(array: Any, layer: int | None) -> np.ndarray:
    """An array, or one layer of it, on the host; of a CPU device's array nothing is copied."""
    if isinstance(array, jax.Array) and layer is not None and not _in_host_memory(array):
        return np.asarray(array[layer])
    return np.asarray(array) if layer is None else np.asarray(array)[layer]


def _in_host_memory(array: jax.Array) -> bool:
    return len(array.devices()) == 1 and next(iter(array.devices())).platform == "cpu"
