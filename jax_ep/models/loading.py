"""Parameters of a decoder from the hub's safetensors files, straight to each device's shard.

A process reads the bytes of its own devices' shards and no others: of the experts, its own. On the host there is never
more than the shards of one kind of matrix for one device; CPU devices take that memory over as it is.

Letters: Y layers, E experts, padded to E' on a mesh.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ep import sharding
from jax_ep.config import DTYPES, one_of, refuse
from jax_ep.model_config import ModelConfig
from jax_ep.models import safetensors_io as files
from jax_ep.models import shards
from jax_ep.models.decoder import Params, decoder_shapes, decoder_shardings
from jax_ep.models.safetensors_io import Checkpoint
from jax_ep.models.shards import Leaf, Ranges
from jax_ep.models.tensors import TensorEntry, tensor_map, to_ours

_ALIGNMENT = 64  # bytes; CPU devices then take a NumPy array over without a copy


class Read(NamedTuple):
    """Bytes read from a file: of which tensor, from which of its bytes on, how many, and the ids of the devices whose
    shard they are part of (none without a mesh).
    """

    tensor: str
    offset: int
    nbytes: int
    devices: tuple[int, ...]


def load_params(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    family: str,
    mesh: Mesh | None = None,
    dtype: str | None = None,
    *,
    reads: list[Read] | None = None,
) -> Params:
    """Parameters as `init_decoder` gives them, from model.safetensors or the files of its index.

    Everything that the files claim is checked before the first tensor is read. In a job of several processes each loads
    its own devices' shards; they exchange nothing.

    Args:
      folder: with the files. Links in it are refused, except those of the hub's own cache (snapshots/ to blobs/).
      config: of the model.
      family: whose names the tensors have, a key of `families.FAMILIES`.
      mesh: where the parameters shall lie, as `decoder_shardings` says; None: on the default device.
      dtype: of the parameters: "float32", "bfloat16" or "float16"; tensors of another of these are converted. None:
        moe.param_dtype, and a tensor of another is refused.
      reads: takes what was read, in order.

    Raises:
      ConfigError: a tensor that is missing, not the family's, or of another shape or dtype; a file that is missing, a
        link, truncated, or whose header or index lies. Nothing is loaded then.
    """
    if dtype is not None:
        one_of("dtype", dtype, DTYPES[::-1])
        config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, param_dtype=dtype))
    ranks = sharding.layer_axes(config.moe, mesh).ranks
    shapes = shards.flatten(decoder_shapes(config, ranks))
    places = None if mesh is None else shards.flatten(decoder_shardings(config, mesh))
    groups = shards.group(tensor_map(family, config), shapes)
    log: list[Read] = []
    with files.open_checkpoint(Path(folder)) as checkpoint:
        _check_tensors(
            checkpoint, [e for group in groups.values() for e in group], shapes, family, convert=dtype is not None
        )
        loaded: dict[Leaf, jax.Array] = {}
        for leaves, entries in groups.items():
            like = [shapes[leaf] for leaf in leaves]
            place = None if places is None else places[leaves[0]]
            arrays = _load_group(checkpoint, entries, like, place, config.moe.num_experts, log)
            loaded.update(zip(leaves, arrays, strict=True))
    if reads is not None:
        reads.extend(log)
    return shards.nest(loaded)


def _check_tensors(
    checkpoint: Checkpoint, entries: list[TensorEntry], shapes: Mapping[Leaf, Any], family: str, convert: bool
) -> None:
    """The files have the family's tensors, no more and no fewer, in shapes and dtypes that fit."""
    wanted = {entry.name: entry for entry in entries}
    for name in sorted(wanted.keys() - checkpoint.files.keys()):
        rule = f"a {family} model of this config has it, and no file does"
        refuse(f"tensor {name!r}", "missing", rule, list(wanted[name].shape))
    for name in sorted(checkpoint.files.keys() - wanted.keys()):
        rule = f"a {family} model of this config has no such tensor"
        refuse(checkpoint.where(name), list(checkpoint.tensor(name).shape), rule, "absent")
    for name, entry in wanted.items():
        tensor, where = checkpoint.tensor(name), checkpoint.where(name)
        if tensor.shape != entry.shape:
            rule = f"a {family} model of this config has another shape"
            refuse(f"{where}.shape", list(tensor.shape), rule, list(entry.shape))
        have = files.dtype_of(tensor.dtype)
        if have is None:
            refuse(f"{where}.dtype", tensor.dtype, f"parameters are {', '.join(DTYPES)}", files.code_of("bfloat16"))
        dtype = shapes[entry.paths[0]].dtype
        if not convert and have != dtype:
            rule = f"the config says {dtype.name}, and dtype={dtype.name!r} would convert it"
            refuse(f"{where}.dtype", tensor.dtype, rule, files.code_of(dtype))


def _load_group(
    checkpoint: Checkpoint,
    entries: list[TensorEntry],
    like: list[jax.ShapeDtypeStruct],
    place: jax.sharding.NamedSharding | None,
    num_experts: int,
    log: list[Read],
) -> list[jax.Array]:
    """The leaves, alike in shape, that `entries` fill, shard by shard. Devices with the same shard share the read."""
    shape = like[0].shape
    held: dict[Ranges, list[Any]] = {}
    if place is None:
        held[shards.ranges_of((), shape)] = [None]
    else:
        for device, index in place.addressable_devices_indices_map(shape).items():
            held.setdefault(shards.ranges_of(index, shape), []).append(device)
    arrays: list[list[jax.Array]] = [[] for _ in like]
    for ranges, devices in held.items():
        buffers = [_aligned(tuple(map(len, ranges)), leaf.dtype) for leaf in like]
        if shards.of_experts(entries[0]):
            for buffer in buffers:  # [Y, experts, ...]; empty ones are zeros
                buffer[:, max(0, num_experts - ranges[1].start) :] = 0
        ids = tuple(device.id for device in devices if device is not None)
        for entry in entries:
            if (read := _fill(checkpoint, buffers, entry, ranges, num_experts, ids)) is not None:
                log.append(read)
        for parts, buffer in zip(arrays, buffers):
            parts += [jax.device_put(buffer, device) for device in devices]
        jax.block_until_ready(arrays)  # an accelerator has it, and the next shard may take the host's memory
    if place is None:
        return [parts[0] for parts in arrays]
    return [jax.make_array_from_single_device_arrays(shape, place, parts) for parts in arrays]


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised array at an address that CPU devices take over."""
    nbytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % _ALIGNMENT
    return raw[skip : skip + nbytes].view(dtype).reshape(shape)


def _fill(
    checkpoint: Checkpoint,
    buffers: list[np.ndarray],
    entry: TensorEntry,
    ranges: Ranges,
    num_experts: int,
    ids: tuple[int, ...],
) -> Read | None:
    """Reads what of a tensor lies in a shard, into the shard's buffers; None: nothing does."""
    found = shards.within(entry, ranges, num_experts)
    if found is None:
        return None
    at, rows = found
    targets = [buffer[at] for buffer in buffers]
    tensor, file = checkpoint.tensor(entry.name), checkpoint.files[entry.name]
    dtype = files.dtype_of(tensor.dtype)
    assert dtype is not None  # _check_tensors
    row = tensor.nbytes // tensor.shape[0]
    read = Read(entry.name, rows.start * row, len(rows) * row, ids)
    if entry.layout == "as is" and dtype == targets[0].dtype:
        file.read(entry.name, read.offset, targets[0])
        return read
    for block in shards.blocks(rows, row, entry):
        part = np.empty((len(block), *tensor.shape[1:]), dtype)
        file.read(entry.name, block.start * row, part)
        here = slice(block.start - rows.start, block.stop - rows.start)
        which: Any = (..., here) if shards.rows_last(entry) else here
        for target, source in zip(targets, to_ours(dataclasses.replace(entry, shape=part.shape), part)):
            if not shards.put(target[which], source):
                rule = "has finite values that float16 does not"
                refuse(f"{checkpoint.where(entry.name)} in dtype", "float16", rule, dtype.name)
    return read
