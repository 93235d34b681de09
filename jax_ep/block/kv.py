"""Key/value rows as a part of an exchange, and attention of a rank's queries to local and received rows. Inside
shard_map.

    plan = plan_kv("zigzag", batch, sequence, ranks, rank, segments=segments, layout="all_to_all")
    (hidden, rows), moe_plan = exchange([Part(home_rows), kv_part(keys, values, plan)], moe_plan, with_counts=True)
    attended = attend_split(queries, keys, values, received(rows, plan, keys.shape[2]), plan, scale=scale)

`attend_gathered` and `attend_ring` are the same attention with collectives of its own.

Letters: B batch, S positions of a sequence, R ranks, s = S/R positions here, M chunks of a rank, Z places for received
rows of a sequence, Q query heads, N key/value heads, D head_dim, W = 2*N*D numbers of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep.block.attention import BLOCK, Partial, attend_rows, merge
from jax_ep.block.ranges import KVPlan, positions
from jax_ep.transport import Part

_QUERY_BLOCKS = 8  # pieces of a rank's queries at most; each sees no key after it


class KVRows(NamedTuple):
    """Keys and values [B, Z, N, D] of received rows, at plan.away_positions; zeros where nothing was received."""

    keys: jax.Array
    values: jax.Array


def kv_part(keys: jax.Array, values: jax.Array, plan: KVPlan) -> Part:
    """Keys (normed, rotated) and values, both [B, s, N, D] of one dtype, as what `exchange` takes: rows
    [home rows, 2*N*D].
    """
    return Part(_moved(_rows(keys, values), plan.home, plan.slot), plan.counts, plan.capacity)


def received(part: Part, plan: KVPlan, heads: int) -> KVRows:
    """What came back from the exchange, sequence by sequence.

    Args:
      part: its rows [away rows, 2*N*D].
      plan: of `kv_part`.
      heads: N.
    """
    batch = plan.source.shape[0]
    rows = _moved(part.rows, plan.source.reshape(-1), plan.arrived[None])  # [B*Z, W]
    return KVRows(*_apart(rows.reshape(batch, -1, rows.shape[1]), heads))


def attend_local(
    queries: jax.Array, keys: jax.Array, values: jax.Array, plan: KVPlan, *, scale: float, block: int = BLOCK
) -> Partial:
    """Attention of this rank's queries [B, s, Q, D] to its own keys and values [B, s, N, D]; needs nothing that
    travels.

    Rows are in order of positions, so that a piece of the queries sees no key past its own end, and none further back
    than the window.
    """
    here, runs = plan.positions, _runs_at(plan, plan.positions)
    s = queries.shape[1]
    size = max(block, -(-s // _QUERY_BLOCKS))
    pieces = []
    for first in range(0, s, size):
        earliest = max(0, first - plan.window + 1) if isinstance(plan.window, int) else 0
        mine, seen = slice(first, first + size), slice(earliest, first + size)
        pieces.append(
            attend_rows(
                queries[:, mine],
                keys[:, seen],
                values[:, seen],
                here[mine],
                here[seen],
                query_runs=None if runs is None else runs[:, mine],
                key_runs=None if runs is None else runs[:, seen],
                window=plan.window,
                scale=scale,
                block=block,
            )
        )
    return _join(pieces)


def attend_received(queries: jax.Array, rows: KVRows, plan: KVPlan, *, scale: float, block: int = BLOCK) -> Partial:
    """Attention of this rank's queries [B, s, Q, D] to received rows. Queries of a chunk skip the regions that hold
    only later rows.
    """
    runs, away_runs = _runs_at(plan, plan.positions), plan.away_runs
    size, end, pieces = queries.shape[1] // len(plan.regions), 0, []
    for m, room in enumerate(plan.regions):
        end += room
        mine = slice(m * size, (m + 1) * size)
        pieces.append(
            attend_rows(
                queries[:, mine],
                rows.keys[:, :end],
                rows.values[:, :end],
                plan.positions[mine],
                plan.away_positions[:, :end],
                query_runs=None if runs is None else runs[:, mine],
                key_runs=None if away_runs is None else away_runs[:, :end],
                window=plan.window,
                scale=scale,
                block=block,
            )
        )
    return _join(pieces)


def attend_split(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    rows: KVRows | None,
    plan: KVPlan,
    *,
    sinks: jax.Array | None = None,
    scale: float,
    block: int = BLOCK,
) -> jax.Array:
    """Attention of this rank's queries to its own and received rows.

    Args:
      queries: [B, s, Q, D].
      keys, values: [B, s, N, D], this rank's.
      rows: what `received` gives; None: nothing was, as on one rank.
      plan: of `kv_part`.
      sinks: [Q], a logit a head that takes part in the softmax and is dropped; None: none.
      scale: factor on the logits.
      block: keys of a block.

    Returns:
      [B, s, Q*D] in the queries' dtype.
    """
    partials = [attend_local(queries, keys, values, plan, scale=scale, block=block)]
    if rows is not None:
        partials.append(attend_received(queries, rows, plan, scale=scale, block=block))
    return finish(partials, sinks, queries)


def finish(partials: list[Partial], sinks: jax.Array | None, queries: jax.Array) -> jax.Array:
    """Partials of queries [B, s, Q, D] merged: [B, s, Q*D] in their dtype."""
    out = merge(partials, sinks)
    return out.astype(queries.dtype).reshape(*out.shape[:2], -1)  # [B, s, Q*D]


def attend_gathered(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    plan: KVPlan,
    axis_name: str,
    *,
    sinks: jax.Array | None = None,
    scale: float,
    block: int = BLOCK,
) -> jax.Array:
    """`attend_split` by one all_gather of all keys and values over `axis_name`, for comparison."""
    rows = jax.lax.all_gather(_rows(keys, values, flat=False), axis_name, axis=1, tiled=True)  # [B, S, W]
    everyone = [positions(plan.split, plan.sequence, plan.ranks, r) for r in range(plan.ranks)]
    there = jnp.concatenate(everyone)  # [S]
    partial = attend_rows(
        queries,
        *_apart(rows, keys.shape[2]),
        plan.positions,
        there,
        query_runs=_runs_at(plan, plan.positions),
        key_runs=_runs_at(plan, there),
        window=plan.window,
        scale=scale,
        block=block,
    )
    return finish([partial], sinks, queries)


def attend_ring(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    plan: KVPlan,
    axis_name: str,
    *,
    sinks: jax.Array | None = None,
    scale: float,
    block: int = BLOCK,
) -> jax.Array:
    """`attend_split` by R-1 ppermutes of all keys and values round `axis_name`, a partial attention beside each (Liu et
    al. 2023, arXiv:2310.01889, unrolled), for comparison.
    """
    ranks = plan.ranks
    partials = [attend_local(queries, keys, values, plan, scale=scale, block=block)]
    rows = _rows(keys, values, flat=False)  # [B, s, W]
    for step in range(1, ranks):
        rows = jax.lax.ppermute(rows, axis_name, [(r, (r + 1) % ranks) for r in range(ranks)])
        there = positions(plan.split, plan.sequence, ranks, (plan.rank - step) % ranks)
        partials.append(
            attend_rows(
                queries,
                *_apart(rows, keys.shape[2]),
                plan.positions,
                there,
                query_runs=_runs_at(plan, plan.positions),
                key_runs=_runs_at(plan, there),
                window=plan.window,
                scale=scale,
                block=block,
            )
        )
    return finish(partials, sinks, queries)


def _rows(keys: jax.Array, values: jax.Array, flat: bool = True) -> jax.Array:
    """[B*s, W] or [B, s, W]"""
    b, s = keys.shape[:2]
    rows = jnp.concatenate([keys.reshape(b, s, -1), values.reshape(b, s, -1)], 2)
    return rows.reshape(b * s, -1) if flat else rows


def _apart(rows: jax.Array, heads: int) -> tuple[jax.Array, jax.Array]:
    """[B, n, W] -> keys and values [B, n, N, D]"""
    keys, values = jnp.split(rows, 2, 2)
    shape = (*rows.shape[:2], heads, -1)
    return keys.reshape(shape), values.reshape(shape)


def _runs_at(plan: KVPlan, where: jax.Array) -> jax.Array | None:
    """[B, n], the segments at positions [n]."""
    return None if plan.runs is None else plan.runs[:, where]


def _join(pieces: list[Partial]) -> Partial:
    return Partial(*(jnp.concatenate(each, 1) for each in zip(*pieces))) if len(pieces) > 1 else pieces[0]


def _take(a: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of `a`; zeros where the index is past its end."""
    return a.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _moved(rows: jax.Array, source: jax.Array, went: jax.Array) -> jax.Array:
    """rows [n, W] -> [m, W]: those at source [m]; went [k, n]: where each is then, up to k times, and m where not."""
    return _take(rows, source)


def _moved_forward(rows: Any, source: Any, went: Any) -> Any:
    return _moved(rows, source, went), went


def _moved_backward(went: Any, d_moved: Any) -> Any:
    total = sum(_take(d_moved, to).astype(jnp.float32) for to in went)  # [n, W]
    return jnp.asarray(total).astype(d_moved.dtype), None, None


_moved.defvjp(_moved_forward, _moved_backward)
