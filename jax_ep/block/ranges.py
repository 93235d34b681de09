"""Which key/value rows travel when the positions of sequences are split over ranks, and where each stands on its way.
Pure integers; no collective.

Letters: B batch, S positions of a sequence, R ranks, s = S/R positions on a rank, M chunks of a rank (1 contiguous,
2 zigzag), C = M*R chunks of a sequence, c = S/C positions of a chunk, Z places for received rows of a sequence.

Chunks are in the order of positions; rank r holds chunk r, with zigzag also chunk 2R-1-r. Attention is causal, so of a
chunk the queries of a later one see a suffix: what is no earlier than the run of equal segment ids that the first of
those queries is in, and not before its window. Where a rank has two later chunks the nearer one sees more. So what
travels for each (sequence, chunk, rank) is one suffix, and every row of it is read.

"Home" is the rank a row lives on, "away" a rank whose queries see it. Buffers hold a run for each (sequence, chunk):

  layout        home buffer                                    away buffer
  ragged        [destination][sequence][chunk], no gaps        [home][sequence][chunk], no gaps
  all_to_all    [destination, q], each [sequence][chunk]       [home, q], each [sequence][chunk]

Away, each sequence's rows then have Z places: region 0 for the rows of chunks 0..R-1, region 1 for those of chunks
R..2R-1, each in order of positions. Queries of a rank's first chunk see nothing of region 1.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.config import one_of, positive_int, refuse
from jax_ep.plan import before

SPLITS = ("contiguous", "zigzag")
LAYOUTS = ("ragged", "all_to_all")


def check_split(split: str, sequence: int, ranks: int) -> None:
    """Refuses what cannot be split evenly."""
    one_of("split", split, SPLITS)
    positive_int("ranks", ranks, 4)
    positive_int("sequence", sequence, ranks)
    chunks = _chunks(split, ranks).size
    if sequence % chunks:
        rule = f"{split} over {ranks} ranks cuts it into {chunks} equal chunks"
        refuse("sequence", sequence, rule, -(-sequence // chunks) * chunks)


def _chunks(split: str, ranks: int) -> np.ndarray:
    """[R, M], the chunks of each rank."""
    first = np.arange(ranks)
    return first[:, None] if split == "contiguous" else np.stack([first, 2 * ranks - 1 - first], 1)


def positions(split: str, sequence: int, ranks: int, rank: jax.Array | int) -> jax.Array:
    """[s] int32, the position of each row of `rank`, rising.

    Raises:
      ConfigError: a sequence that does not divide; a rank that is none.
    """
    check_split(split, sequence, ranks)
    if isinstance(rank, int | np.integer) and not 0 <= rank < ranks:
        refuse("rank", rank, f"must be below ranks={ranks}, from 0", 0)
    chunks = _chunks(split, ranks)
    size = sequence // chunks.size
    first = jnp.asarray(chunks * size, jnp.int32)[rank]  # [M]
    return (first[:, None] + jnp.arange(size, dtype=jnp.int32)[None]).reshape(-1)  # [s]


def reorder(x: jax.Array, split: str, ranks: int, axis: int, inverse: bool = False) -> jax.Array:
    """Puts the positions along `axis` in the order in which equal consecutive shares are the ranks' rows; with
    inverse=True puts them back. For whole arrays, outside shard_map.

    Raises:
      ConfigError: an axis that does not divide.
    """
    check_split(split, x.shape[axis], ranks)
    if split == "contiguous":
        return x
    chunks = _chunks(split, ranks).reshape(-1)
    order = np.argsort(chunks) if inverse else chunks
    axis %= x.ndim
    apart = x.reshape(*x.shape[:axis], chunks.size, -1, *x.shape[axis + 1 :])
    return jnp.take(apart, order, axis).reshape(x.shape)


def suffixes(
    split: str, batch: int, sequence: int, ranks: int, window: Any = None, segments: Any = None, xp: Any = np
) -> Any:
    """[B, C, R] int32: rows of each chunk of each sequence that each rank receives, the last ones of the chunk.

    Args:
      split: one of SPLITS.
      batch, sequence, ranks: B, S, R.
      window: positions that a query sees, its own among them; None: all.
      segments: [B, S] integers; a query sees keys of its own run of equal ones. None: one run.
      xp: numpy, or jax.numpy where window or segments are traced.
    """
    chunks = _chunks(split, ranks)
    count = chunks.size
    size = sequence // count
    first = xp.arange(count, dtype=xp.int32)[None] * size  # [1, C]
    seen = xp.zeros((batch, count), xp.int32)  # the first position that a chunk's first query sees
    if window is not None:
        seen = xp.maximum(seen, first - window + 1)
    if segments is not None:
        seen = xp.maximum(seen, _run_starts(segments, count, xp))
    owner = np.argsort(chunks.reshape(-1)) // chunks.shape[1]
    later = [[[j for j in chunks[d] if j > i] for d in range(ranks)] for i in range(count)]
    nearest = np.array([[min(js, default=-1) for js in row] for row in later])  # [C, R], whose queries see most
    travels = (nearest >= 0) & (owner[:, None] != np.arange(ranks)[None])
    end = first[:, :, None] + size
    rows = xp.clip(end - seen[:, nearest], 0, size)  # [B, C, R]
    return xp.where(xp.asarray(travels)[None], rows, 0).astype(xp.int32)


def _run_starts(segments: Any, chunks: int, xp: Any) -> Any:
    """[B, C], where the run begins that the first position of each chunk is in."""
    batch, sequence = segments.shape
    new = new_runs(segments, xp)
    begins = xp.where(new, xp.arange(sequence, dtype=xp.int32)[None], 0).reshape(batch, chunks, -1)  # [B, C, c]
    earlier = np.tri(chunks, k=-1, dtype=bool)[None]
    before_it = xp.where(earlier, begins.max(2)[:, None], 0).max(2)
    return xp.maximum(before_it, begins[:, :, 0])


def new_runs(segments: Any, xp: Any = jnp) -> Any:
    """[B, S] bool, whether a run of equal ids begins after the first."""
    first = xp.zeros((segments.shape[0], 1), bool)
    return xp.concatenate([first, segments[:, 1:] != segments[:, :-1]], 1)


def run_numbers(segments: Any, xp: Any = jnp) -> Any:
    """[B, S] int32, the number of the run of equal ids that each position is in."""
    return xp.cumsum(new_runs(segments, xp), 1, dtype=xp.int32)


def counts_of(
    split: str, batch: int, sequence: int, ranks: int, window: int | None = None, segments: Any = None
) -> np.ndarray:
    """[R, R] int64: key/value rows that each home rank sends each away rank, without devices.

    Raises:
      ConfigError: as `plan_kv`.
    """
    check_split(split, sequence, ranks)
    window = _check(batch, sequence, window, segments)
    return _by_rank(suffixes(split, batch, sequence, ranks, window, segments), split, ranks).sum((0, 2))


def _by_rank(rows: Any, split: str, ranks: int) -> Any:
    """[B, C, R] -> [B, R, M, R], chunks as their ranks hold them."""
    return rows[:, _chunks(split, ranks)]


class Rooms(NamedTuple):
    """Rows for which there must be room, whatever the segments are.

    Attributes:
      home, away: of the buffers.
      regions: of each sequence away; they sum up to Z.
    """

    home: int
    away: int
    regions: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def rooms(split: str, batch: int, sequence: int, ranks: int, window: int | None, layout: str) -> Rooms:
    """Rows that causality and a static window can ask for; at least one."""
    most = suffixes(split, 1, sequence, ranks, window)[0]  # [C, R]
    regions = most.reshape(-1, ranks, ranks).sum(1).max(1)  # [M]
    pairs = batch * counts_of(split, 1, sequence, ranks, window)
    if layout == "all_to_all":
        home = away = ranks * max(1, pairs.max())
    else:
        home, away = max(1, pairs.sum(1).max()), max(1, pairs.sum(0).max())
    return Rooms(int(home), int(away), (max(1, int(regions[0])), *map(int, regions[1:])))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVPlan:
    """Where this rank's key/value rows go, and what arrives. A local row is b*s + i, a place away b*Z + z.

    Attributes:
      counts: [R, R] int32, rows of each (home, away) pair, the same on every rank; none on the diagonal.
      home: [home rows] int32, the local row standing there; B*s where nobody's.
      slot: [R, B*s] int32, where a local row stands in the home buffer for each destination; home rows where it does
        not travel.
      source: [B, Z] int32, the row of the away buffer for each place; away rows where none.
      arrived: [away rows] int32, the place of each row; B*Z where nobody's.
      positions: [s] int32, of this rank's rows, rising.
      away_positions: [B, Z] int32, of the received rows; S where none, which no query sees.
      runs: [B, S] int32, the number of each position's segment; None: one.
      window: positions that a query sees; None: all.
      rank: int32.
      split, sequence, ranks, layout: static.
      regions: static, places of each region; they sum up to Z.
    """

    counts: jax.Array
    home: jax.Array
    slot: jax.Array
    source: jax.Array
    arrived: jax.Array
    positions: jax.Array
    away_positions: jax.Array
    runs: jax.Array | None
    window: jax.Array | int | None
    rank: jax.Array | int
    split: str = dataclasses.field(metadata={"static": True})
    sequence: int = dataclasses.field(metadata={"static": True})
    ranks: int = dataclasses.field(metadata={"static": True})
    layout: str = dataclasses.field(metadata={"static": True})
    regions: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def capacity(self) -> int:
        """Rows of the away buffer."""
        return self.arrived.shape[0]

    @property
    def away_runs(self) -> jax.Array | None:
        """[B, Z]"""
        return None if self.runs is None else jnp.take_along_axis(self.runs, self.away_positions, 1, mode="clip")


def plan_kv(
    split: str,
    batch: int,
    sequence: int,
    ranks: int,
    rank: jax.Array | int,
    *,
    window: jax.Array | int | None = None,
    segments: jax.Array | None = None,
    layout: str,
) -> KVPlan:
    """Which key/value rows travel, from what every rank knows: no collective. jit-able, inside shard_map or outside.

    Args:
      split: one of SPLITS.
      batch, sequence, ranks: B, S, R.
      rank: this rank, an integer or traced.
      window: positions that a query sees, its own among them: an integer, which makes buffers smaller, or a traced
        int32 scalar. None: all.
      segments: [B, S] integers, whole on every rank; a query sees keys of its own run of equal ones. None: all.
      layout: "ragged" (transports ragged and all_gather) or "all_to_all".

    Raises:
      ConfigError: a sequence that does not divide; another split or layout; a rank that is none; segments of another
        shape; a window below 1, or a traced one that is no integer.
    """
    check_split(split, sequence, ranks)
    one_of("layout", layout, LAYOUTS)
    window = _check(batch, sequence, window, segments)
    room = rooms(split, batch, sequence, ranks, None if isinstance(window, jax.Array) else window, layout)
    chunks = _chunks(split, ranks)  # [R, M]
    rows = suffixes(split, batch, sequence, ranks, window, segments, jnp)  # [B, C, R]
    ours = _by_rank(rows, split, ranks)  # [B, R, M, R]
    size = sequence // chunks.size

    out = jnp.moveaxis(ours[:, rank], 2, 0)  # [R, B, M]
    place = jnp.arange(size, dtype=jnp.int32).reshape(1, 1, 1, -1) - (size - out[..., None])  # within its run
    slot = jnp.where(place >= 0, _begins(out, room.home, layout)[..., None] + place, room.home)  # [R, B, M, c]
    slot = slot.reshape(ranks, -1)
    home = _inverse(slot, slot.shape[1], room.home)

    begins = _begins(jnp.moveaxis(ours[..., rank], 1, 0), room.away, layout)  # [R, B, M]
    begins = jnp.moveaxis(begins, 0, 1).reshape(batch, -1)[:, np.argsort(chunks.reshape(-1))]  # [B, C]
    ends = (jnp.arange(chunks.size, dtype=jnp.int32)[None] + 1) * size
    regions = [jnp.split(a, chunks.shape[1], 1) for a in (rows[..., rank], begins, ends)]
    placed = [_places(*runs) for runs in zip(*regions, room.regions)]
    source, away_positions, filled = (jnp.concatenate(a, 1) for a in zip(*placed))  # [B, Z]
    source = jnp.where(filled, source, room.away)
    arrived = _inverse(source.reshape(1, -1), source.size, room.away)

    runs = None if segments is None else run_numbers(segments)
    return KVPlan(
        counts=ours.sum((0, 2), dtype=jnp.int32),
        home=home,
        slot=slot,
        source=source,
        arrived=arrived,
        positions=positions(split, sequence, ranks, rank),
        away_positions=jnp.where(filled, away_positions, sequence),
        runs=runs,
        window=window,
        rank=rank,
        split=split,
        sequence=sequence,
        ranks=ranks,
        layout=layout,
        regions=room.regions,
    )


def _check(batch: int, sequence: int, window: Any, segments: Any) -> Any:
    """The window, one of integers no wider than the sequence."""
    positive_int("batch", batch, 1)
    if isinstance(window, jax.Array):
        if window.ndim or not jnp.issubdtype(window.dtype, jnp.integer):
            refuse("window", f"{window.dtype.name}{list(window.shape)}", "must be one integer", "int32[]")
        window = window.astype(jnp.int32)
    elif window is not None:
        positive_int("window", window, sequence)
        window = min(int(window), sequence)
    if segments is not None:
        whole = hasattr(segments, "dtype") and jnp.issubdtype(segments.dtype, jnp.integer)
        if not whole or segments.shape != (batch, sequence):
            have = f"{segments.dtype.name}{list(segments.shape)}" if hasattr(segments, "dtype") else segments
            refuse("segments", have, "must be integers, one a position", f"int32{[batch, sequence]}")
    return window


def _begins(sizes: jax.Array, rows: int, layout: str) -> jax.Array:
    """sizes [R, B, M] of a buffer's runs -> where each begins."""
    if layout == "ragged":
        return before(sizes.reshape(-1)).reshape(sizes.shape)
    ranks = sizes.shape[0]
    base = (jnp.arange(ranks, dtype=jnp.int32) * (rows // ranks)).reshape(-1, 1, 1)
    return before(sizes.reshape(ranks, -1), 1).reshape(sizes.shape) + base


def _places(
    sizes: jax.Array, begins: jax.Array, ends: jax.Array, places: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The places of a region, in which the rows of its chunks stand one after another: the row of the away buffer, the
    position, and whether there is any, [B, places] each.

    Args:
      sizes: [B, R], rows of each chunk.
      begins: [B, R], where they begin in the away buffer.
      ends: [1, R], the position past the chunk's last.
      places: how many.
    """
    stops = jnp.cumsum(sizes, 1, dtype=jnp.int32)
    at = jnp.arange(places, dtype=jnp.int32)[None]
    chunk = (stops[:, None] <= at[..., None]).sum(2, dtype=jnp.int32)  # [B, places]
    of_chunk = lambda a: jnp.take_along_axis(a, chunk, 1, mode="clip")  # [B, places]
    return at + of_chunk(begins + sizes - stops), at + of_chunk(ends - stops), chunk < sizes.shape[1]


def _inverse(index: jax.Array, rows: int, length: int) -> jax.Array:
    """index [n, rows] -> [length] int32: where it points, the row that it belongs to; `rows` where none does."""
    row = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32)[None], index.shape)
    return jnp.full(length, rows, jnp.int32).at[index].set(row, mode="drop")  # [length]
