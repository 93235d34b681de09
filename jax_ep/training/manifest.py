"""checkpoint.json, which lies beside the arrays of a training checkpoint: the run that they are of, and what tells
whether they are as they were written. Nothing here knows who writes the arrays.

Letters: Y layers, E experts, padded to E' on a mesh.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.training.config import TrainConfig

NAME = "checkpoint.json"
Flat = dict[str, Any]  # a state's arrays by their dotted names
Manifest = dict[str, Any]
_FORMAT = 1
_SMALL = 1 << 20  # bytes of files that are read to check them; larger ones hold values, which have sums

# What may differ between a checkpoint and the run that goes on from it: how long it runs, how it is laid out and
# watched. Any other field says what is learnt, from what, or what the arrays mean.
_FREE = frozenset(
    [
        "batch_size",
        "steps",
        "accumulation",
        "shard_weights",
        "max_bad_steps",
        "expert_parallel",
        "data_parallel",
        "evaluate_every",
        "evaluate_sequences",
        "checkpoint_every",
        "keep_checkpoints",
        "model.max_position",
        "model.stop_tokens",
        "model.recompute",
        "model.kv_coship",
        "model.overlap_moe_expert_parallel_comm",
        *(f"model.moe.{name}" for name in ("comm", "overlap", "expert_axis", "token_axes", "shard_sequence")),
        "model.moe.grouped_backend",
    ]
)


def flatten(tree: Any) -> Flat:
    """A pytree's leaves by dotted names, in its order: "params.layers.moe.experts.up", "opt_state.1.mu.embed"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def of_experts(name: str) -> bool:
    """Whether an array holds experts, [Y, E', ...]."""
    return ".experts." in name


@functools.partial(jax.jit, static_argnames="num_experts")
def sums(flat: Flat, num_experts: int) -> jax.Array:
    """One uint32 an array, in the order of its name, that changes with any byte of it: the words of its values, each
    times an odd number of its place. Whole numbers add up the same in any order, so a sum depends on no mesh; nor on
    how experts are padded, for empty ones count nothing.
    """
    return jnp.stack([_sum(flat[name], num_experts if of_experts(name) else None) for name in sorted(flat)])


def _sum(a: jax.Array, num_experts: int | None) -> jax.Array:
    words = a.view(f"uint{8 * a.dtype.itemsize}").astype(jnp.uint32)
    place = jnp.zeros(a.shape, jnp.uint32)
    for axis in range(a.ndim):
        at = jax.lax.broadcasted_iota(jnp.uint32, a.shape, axis)
        place = (place + at) * jnp.uint32(0x9E3779B1)  # an odd constant that spreads neighbours (Knuth)
        if axis == 1 and num_experts is not None:
            words = jnp.where(at < num_experts, words, 0)
    return jnp.sum(words * (place << 1 | 1), dtype=jnp.uint32)


def manifest(config: TrainConfig, facts: Mapping[str, Any], flat: Flat) -> Manifest:
    """What can be said of a state before it is written. Works on every process, or on none: it adds up values.

    Args:
      config: of the run.
      facts: of its data, as JSON has them.
      flat: the state's arrays.
    """
    added = np.asarray(sums(flat, config.model.moe.num_experts)).tolist()
    arrays = {
        name: {"dtype": flat[name].dtype.name, "shape": list(flat[name].shape), "sum": total}
        for name, total in zip(sorted(flat), added, strict=True)
    }
    return as_json({"format": _FORMAT, "config": dataclasses.asdict(config), "data": facts, "arrays": arrays})


def as_json(value: Any) -> Any:
    """What comes back of a value that was written as JSON. Raises TypeError where it cannot be."""
    return json.loads(json.dumps(value))


def write(folder: Path, about: Manifest) -> None:
    """Writes `about`, with every file that is in `folder` by now. Raises OSError."""
    files = {str(path.relative_to(folder)): _seen(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    about = as_json({**about, "files": files})
    with open(folder / NAME, "w") as file:
        json.dump({**about, "crc32": _crc(about)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> tuple[Manifest, str | None]:
    """What `write` wrote in `folder`, and why `folder` is no longer whole: None where it is."""
    try:
        about = json.loads((folder / NAME).read_bytes())
        whole = about.pop("crc32") == _crc(about)
    except FileNotFoundError:
        return {}, f"it has no {NAME}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        return {}, f"{NAME} is damaged"
    if about["format"] != _FORMAT:
        return {}, f"{NAME} is of format {about['format']}, and this version reads {_FORMAT}"
    try:
        for name, (size, crc) in about["files"].items():
            now = _seen(folder / name)
            if now[0] != size:
                return about, f"{name} has {now[0]} bytes and was written with {size}"
            if now[1] != crc:
                return about, f"{name} is damaged"
    except FileNotFoundError:
        return about, f"{name} is missing"
    except OSError as error:
        return about, f"{name} cannot be read: {error.strerror}"
    return about, None


def differences(about: Manifest, config: TrainConfig, facts: Mapping[str, Any]) -> list[str]:
    """In words, each field in which the run of a checkpoint is not this one, with both values."""
    there = {**about["config"], "data": about["data"]}
    here = as_json({**dataclasses.asdict(config), "data": facts})
    there, here = (dict(_fields(fields)) for fields in (there, here))
    said = lambda fields, name: repr(fields[name]) if name in fields else "absent"
    names = [name for name in {**there, **here} if there.get(name, there) != here.get(name, here)]
    return [f"{name} is {said(there, name)} in it and {said(here, name)} here" for name in names]


def misfits(about: Manifest, shapes: Flat, num_experts: int) -> list[str]:
    """Names of arrays that a checkpoint and a state of `shapes` do not have in common, but for padding of experts."""

    def form(name: str, dtype: str, shape: list[int]) -> Any:
        padded = of_experts(name) and shape[1] >= num_experts
        return dtype, [shape[0], num_experts, *shape[2:]] if padded else shape

    there = {name: form(name, a["dtype"], a["shape"]) for name, a in about["arrays"].items()}
    here = {name: form(name, a.dtype.name, list(a.shape)) for name, a in shapes.items()}
    return [name for name in sorted({**there, **here}) if there.get(name) != here.get(name)]


def changed(about: Manifest, flat: Flat, num_experts: int) -> list[str]:
    """Names of arrays whose values are no longer those that were written. Every process calls this."""
    added = np.asarray(sums(flat, num_experts)).tolist()
    return [name for name, total in zip(sorted(flat), added, strict=True) if about["arrays"][name]["sum"] != total]


def _fields(fields: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of nested fields, without those that may differ."""
    for name, value in fields.items():
        dotted = before + name
        if dotted in _FREE:
            continue
        if isinstance(value, dict) and value:
            yield from _fields(value, f"{dotted}.")
        else:
            yield dotted, value


def _seen(path: Path) -> list[int | None]:
    """A file's size, and the CRC of a small one."""
    size = path.stat().st_size
    return [size, zlib.crc32(path.read_bytes()) if size <= _SMALL else None]


def _crc(about: Manifest) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())
