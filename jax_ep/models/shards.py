"""Which part of a hub tensor lies in which shard of a decoder's parameters, and how it gets there. Pure NumPy.

Letters: Y layers, E experts, padded to E' on a mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jax_ep.models.tensors import TensorEntry

Leaf = tuple[str, ...]  # names of the nested dicts down to an array
Ranges = tuple[range, ...]  # what a shard has of each axis of its leaf
_CHUNK_BYTES = 1 << 20  # handled at once where a matrix is turned on the way
_TILE = 16  # columns that are turned at once: as many cache lines are written in turn


def flatten(tree: Any, at: Leaf = ()) -> dict[Leaf, Any]:
    """Nested dicts as one, from paths to leaves."""
    if not isinstance(tree, Mapping):
        return {at: tree}
    return {leaf: value for name, sub in tree.items() for leaf, value in flatten(sub, (*at, name)).items()}


def nest(flat: Mapping[Leaf, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for (*groups, name), value in flat.items():
        at = tree
        for group in groups:
            at = at.setdefault(group, {})
        at[name] = value
    return tree


def group(entries: list[TensorEntry], shapes: Mapping[Leaf, Any]) -> dict[tuple[Leaf, ...], list[TensorEntry]]:
    """The leaves that tensors fill together, one or two, and those tensors in order."""
    groups: dict[tuple[Leaf, ...], list[TensorEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.paths, []).append(entry)
    filled = [leaf for leaves in groups for leaf in leaves]
    assert sorted(filled) == sorted(shapes), f"tensors fill {sorted(filled)} and the decoder has {sorted(shapes)}"
    return groups


def ranges_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Ranges:
    """What an index selects of each axis."""
    index = (*index, *[slice(None)] * (len(shape) - len(index)))
    return tuple(range(*part.indices(size)) for part, size in zip(index, shape, strict=True))


def of_experts(entry: TensorEntry) -> bool:
    """Whether its leaves are [Y, E', ...]."""
    return entry.stacked or entry.expert is not None


def within(entry: TensorEntry, ranges: Ranges, num_experts: int) -> tuple[Any, range] | None:
    """Where in a shard a tensor lies, and which of its rows those are. None: not in this shard.

    The rows of a tensor go along its first axis: of a stacked one, they are experts.
    """
    at: tuple[Any, ...] = ()
    for index, have in zip((entry.layer, entry.expert), ranges):
        if index is not None:
            if index not in have:
                return None
            at += (index - have.start,)
    if not entry.stacked:
        return at, range(entry.shape[0])
    rows = range(ranges[1].start, min(ranges[1].stop, num_experts))
    return ((*at, slice(len(rows))), rows) if rows else None


def rows_last(entry: TensorEntry) -> bool:
    """Whether the rows of a tensor are the last axis of its leaf, its first one here otherwise."""
    return entry.layout == "transposed" and not entry.stacked


def blocks(rows: range, row: int, entry: TensorEntry, most: int = _CHUNK_BYTES) -> Iterator[range]:
    """Rows of `row` bytes in pieces of about `most` bytes; all together where a layout cannot be cut along them."""
    apart = entry.stacked or entry.layout in ("as is", "transposed")
    step = max(1, most // max(row, 1)) if apart else max(len(rows), 1)
    for start in range(rows.start, rows.stop, step):
        yield rows[start - rows.start : start - rows.start + step]


def put(target: np.ndarray, source: np.ndarray) -> bool:
    """target[...] = source, bits as they are where the dtypes agree. False: a finite value became an infinite one."""
    if target.dtype == source.dtype:
        bits = f"u{target.itemsize}"
        _tiled(target.view(bits), source.view(bits))
        return True
    with np.errstate(over="ignore"):
        _tiled(target, source)
    return target.dtype != np.float16 or not bool((np.isinf(target) & np.isfinite(source)).any())


def _tiled(target: np.ndarray, source: np.ndarray) -> None:
    """target[...] = source; in tiles where one is transposed against the other, which is several times faster."""
    if source.ndim < 2 or abs(source.strides[-1]) <= abs(source.strides[-2]):
        target[...] = source
        return
    for column in range(0, source.shape[-1], _TILE):
        target[..., column : column + _TILE] = source[..., column : column + _TILE]
