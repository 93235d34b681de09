"""Which tiles a grouped product on a GPU is cut into, and which group each belongs to.

Letters: A positions, G groups, V visits; K is the side that products add over, N the columns of the result.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

_LEAST = 16  # Triton's dot takes no smaller side


class Tiles(NamedTuple):
    """Sides of one program's tile, and how it runs.

    Attributes:
      rows: positions. In a weight gradient: of one turn of its loop.
      columns: of the result.
      depth: what one turn of the loop adds over. In a weight gradient: rows of the result.
      band: visits that share each column of weights while it is in the cache.
      warps, stages: Triton's num_warps and num_stages.
    """

    rows: int
    columns: int
    depth: int
    band: int
    warps: int
    stages: int


def side(size: int, at_most: int) -> int:
    """The smallest power of two that Triton takes and that holds `size`, but no more than `at_most`."""
    return min(at_most, max(_LEAST, 1 << (max(size, 1) - 1).bit_length()))


def product_tiles(mean_rows: float, columns: int, depth: int, bits: int, matrices: int = 1) -> Tiles:
    """Tiles of x @ w, by the rows that a group has on average.

    From 96 rows a group on, 128 x 128 results: 64 additions a loaded 16-bit element keep the tensor cores of sm_80 to
    sm_90 busy, and three stages of 128 x 64 and 64 x 128 take 96 KiB of shared memory, of which the smallest of these
    cards lend 99. Fewer rows take shorter tiles, since a tile costs the same however few of its rows are filled; the
    product is then bound by reading weights, and needs fewer warps. In float32, which has no tensor core product of
    full precision, 64 x 64 results keep the accumulators in registers.

    Args:
      mean_rows: A / G.
      columns: N.
      depth: K.
      bits: of one element, 16 or 32.
      matrices: weights of one program with an accumulator each; they share the columns.
    """
    if bits > 16:
        rows, wide, deep, stages = 64, 64 // matrices, 32, 2
    else:
        rows, wide, deep, stages = 128, 128 // matrices, 64, 3
    rows = min(rows, side(math.ceil(mean_rows * 4 / 3), rows))
    warps = 8 if rows == 128 else 4
    return Tiles(rows, side(columns, wide), side(depth, deep), 8, warps, stages)


def gradient_tiles(mean_rows: float, rows: int, columns: int, bits: int) -> Tiles:
    """Tiles of x.T @ d: the same sizes as above, the loop now over positions.

    Args:
      mean_rows: A / G.
      rows: K, of the result.
      columns: N.
      bits: of one element, 16 or 32.
    """
    if bits > 16:
        return Tiles(side(math.ceil(mean_rows), 32), side(columns, 64), side(rows, 64), 1, 4, 2)
    return Tiles(side(math.ceil(mean_rows), 64), side(columns, 128), side(rows, 128), 1, 8, 3)


class Visits(NamedTuple):
    """One program's rows each, sorted by group; then visits with no rows, which write nothing.

    Attributes:
      group: [V] int32; G for positions past the sum of the sizes.
      first: [V] int32, first position.
      count: [V] int32, positions, at most the rows of a tile.
    """

    group: jax.Array
    first: jax.Array
    count: jax.Array


def visits(group_sizes: jax.Array, positions: int, tile_rows: int, band: int) -> Visits:
    """Every position in one visit, and every visit in one group; positions past the sum are a group more.

    Args:
      group_sizes: [G] int32.
      positions: A.
      tile_rows: positions that a visit has room for.
      band: V is a multiple of it.
    """
    sizes = jnp.append(group_sizes, positions - group_sizes.sum()).astype(jnp.int32)  # [G + 1]
    groups = sizes.shape[0]
    most = (positions + min(groups, positions) * (tile_rows - 1)) // tile_rows
    tiles = (sizes + tile_rows - 1) // tile_rows
    last, ends = jnp.cumsum(tiles), jnp.cumsum(sizes)
    visit = jnp.arange(math.ceil(most / band) * band, dtype=jnp.int32)
    group = jnp.searchsorted(last, visit, side="right", method="compare_all").astype(jnp.int32)
    real = jnp.minimum(group, groups - 1)
    first = ends[real] - sizes[real] + (visit - (last[real] - tiles[real])) * tile_rows
    count = jnp.where(group < groups, jnp.clip(ends[real] - first, 0, tile_rows), 0)
    return Visits(real, jnp.where(count > 0, first, 0), count)
