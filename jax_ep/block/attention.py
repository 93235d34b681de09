"""Attention over rows that come in pieces: each piece gives a result and the logarithm of its weights' sum, and those
of several pieces make one. Nothing of queries by keys is kept; the backward computes each block again.

Letters: B batch, S queries of a sequence, Z keys, Q query heads, N key/value heads, G = Q/N query heads that share a
key/value head, D head_dim, z keys of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep.config import positive_int, refuse

BLOCK = 512  # keys that stand beside all queries at a time
_UNROLLED = 4  # more blocks than this go through one loop
_NOTHING = -0.7 * float(jnp.finfo(jnp.float32).max)  # log of the weights' sum of a query that sees nothing


class Partial(NamedTuple):
    """Attention over some of the keys.

    Attributes:
      out: [B, S, Q, D] float32; 0 where a query sees none of them.
      lse: [B, S, Q] float32, the logarithm of the sum of exp(logit); very low, and finite, where it sees none.
    """

    out: jax.Array
    lse: jax.Array


class _Mask(NamedTuple):
    """Who sees whom; a leading 1 where all sequences are alike.

    Attributes:
      queries, keys: positions [1 or B, S], [1 or B, Z].
      query_runs, key_runs: [B, S], [B, Z] or None.
      window: int32 or None.
    """

    queries: jax.Array
    keys: jax.Array
    query_runs: jax.Array | None
    key_runs: jax.Array | None
    window: jax.Array | None


class _Static(NamedTuple):
    scale: float
    block: int


def attend_rows(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    *,
    query_runs: jax.Array | None = None,
    key_runs: jax.Array | None = None,
    window: jax.Array | int | None = None,
    scale: float,
    block: int = BLOCK,
) -> Partial:
    """Causal softmax attention of queries to these keys alone, in float32, a block of keys at a time (Milakov &
    Gimelshein 2018, arXiv:1805.02867; the backward as Dao et al. 2022, arXiv:2205.14135).

    Args:
      queries: [B, S, Q, D].
      keys, values: [B, Z, N, D], N dividing Q.
      query_positions, key_positions: [S] or [B, S], [Z] or [B, Z] integers; a query sees keys at its own and at earlier
        positions.
      query_runs, key_runs: [B, S], [B, Z] integers: keys of other runs are not seen. None: all are.
      window: how many positions a query sees, its own among them; may be traced. None: all.
      scale: factor on the logits.
      block: keys of a block.

    Returns:
      The partial result. Differentiable in queries, keys and values, through out and lse.

    Raises:
      ConfigError: shapes that do not go with one another; runs of queries alone, or of keys.
    """
    b, s, heads, d = queries.shape
    z = keys.shape[1]
    given = {"query_positions": (query_positions, s), "key_positions": (key_positions, z)}
    given |= {"query_runs": (query_runs, s), "key_runs": (key_runs, z)}
    _check(queries, keys, values, given)
    positive_int("block", block, BLOCK)
    rows = lambda a: jnp.asarray(a, jnp.int32).reshape(-1, a.shape[-1])
    as_int = lambda a: None if a is None else jnp.asarray(a, jnp.int32)
    mask = _Mask(rows(query_positions), rows(key_positions), as_int(query_runs), as_int(key_runs), as_int(window))
    grouped = queries.reshape(b, s, keys.shape[2], -1, d)  # [B, S, N, G, D]
    out, lse = _attend(_Static(scale, block), grouped, keys, values, mask)
    lse = jnp.moveaxis(lse, 3, 1)  # [B, S, N, G]
    return Partial(out.reshape(queries.shape), lse.reshape(b, s, heads))


def _check(queries: jax.Array, keys: jax.Array, values: jax.Array, of_rows: dict[str, tuple[Any, int]]) -> None:
    """of_rows: name of a position or run -> what was given, and how many there have to be."""
    (b, _, heads, d), (z, n) = queries.shape, keys.shape[1:3]
    if not z or keys.shape != (b, z, n, d) or heads % n or values.shape != keys.shape:
        have, rule = [list(keys.shape), list(values.shape)], f"must be [{b}, Z, N, {d}], Z from 1, N dividing {heads}"
        refuse("keys, values", have, rule, [[b, max(1, z), heads, d]] * 2)
    for name, (each, rows) in of_rows.items():
        if each is not None and each.shape not in [(b, rows)] + [(rows,)] * ("runs" not in name):
            refuse(name, list(each.shape), "must have one a row", [b, rows])
    if len({each is None for name, (each, _) in of_rows.items() if "runs" in name}) > 1:
        refuse("query_runs, key_runs", "one of them", "rows of both have runs, or of neither", (None, None))


def merge(partials: Sequence[Partial], sinks: jax.Array | None = None) -> jax.Array:
    """Attention over the keys of all partials: [B, S, Q, D] float32; 0 where a query sees none.

    Args:
      partials: over different keys each.
      sinks: [Q], a logit a head that takes part in the softmax and is dropped; None: none.
    """
    most = functools.reduce(jnp.maximum, [p.lse for p in partials])  # [B, S, Q]
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, 1, -1)
        most = jnp.maximum(most, sink)
    most = jax.lax.stop_gradient(most)
    weights = [jnp.exp(p.lse - most) for p in partials]
    total = functools.reduce(jnp.add, weights)
    if sinks is not None:
        total = total + jnp.exp(sink - most)
    return functools.reduce(jnp.add, [p.out * (w / total)[..., None] for p, w in zip(partials, weights)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    static: _Static, queries: jax.Array, keys: jax.Array, values: jax.Array, mask: _Mask
) -> tuple[jax.Array, jax.Array]:
    """queries [B, S, N, G, D] -> out [B, S, N, G, D] and lse [B, N, G, S], float32."""
    b, s, n, g, d = queries.shape

    def step(carry: Any, block: _Block) -> Any:
        (total, most, out), (k, v, seen, _) = carry, block
        logits = jnp.where(seen, _logits(static, queries, k), _NOTHING)  # [B, N, G, S, z]
        higher = jnp.maximum(most, logits.max(-1))
        shrink = jnp.exp(most - higher)
        weights = jnp.where(seen, jnp.exp(logits - higher[..., None]), 0)
        more = _product("bngsz,bznd->bngsd", weights.astype(v.dtype), v)
        return total * shrink + weights.sum(-1), higher, out * shrink[..., None] + more

    zeros = jnp.zeros((b, n, g, s), jnp.float32)
    start = (zeros, zeros + _NOTHING, jnp.zeros((b, n, g, s, d), jnp.float32))
    total, most, out = _over_blocks(static, keys, values, mask, step, start)
    some = total > 0
    out = out / jnp.where(some, total, 1)[..., None]
    lse = jnp.where(some, most + jnp.log(jnp.where(some, total, 1)), _NOTHING)
    return jnp.moveaxis(out, 3, 1), lse


def _attend_forward(static: _Static, queries: Any, keys: Any, values: Any, mask: _Mask) -> Any:
    out, lse = _attend(static, queries, keys, values, mask)
    return (out, lse), (queries, keys, values, mask, out, lse)


def _attend_backward(static: _Static, saved: Any, cotangents: Any) -> Any:
    queries, keys, values, mask, out, lse = saved
    d_out, d_lse = cotangents
    less = jnp.moveaxis((out * d_out).sum(-1), 1, 3) - d_lse  # [B, N, G, S]
    d_out = d_out.astype(values.dtype)

    def step(carry: Any, block: _Block) -> Any:
        (d_queries, d_keys, d_values), (k, v, seen, first) = carry, block
        weights = jnp.where(seen, jnp.exp(_logits(static, queries, k) - lse[..., None]), 0)  # [B, N, G, S, z]
        d_weights = _product("bsngd,bznd->bngsz", d_out, v)
        d_logits = (weights * (d_weights - less[..., None]) * static.scale).astype(k.dtype)
        d_queries = d_queries + _product("bngsz,bznd->bsngd", d_logits, k)
        d_keys = _add_at(d_keys, _product("bngsz,bsngd->bznd", d_logits, queries), first)
        d_values = _add_at(d_values, _product("bngsz,bsngd->bznd", weights.astype(v.dtype), d_out), first)
        return d_queries, d_keys, d_values

    start = tuple(jnp.zeros(a.shape, jnp.float32) for a in (queries, keys, values))
    sums = _over_blocks(static, keys, values, mask, step, start)
    return *(total.astype(a.dtype) for total, a in zip(sums, (queries, keys, values))), None


_attend.defvjp(_attend_forward, _attend_backward)


class _Block(NamedTuple):
    """Some of the keys.

    Attributes:
      keys, values: [B, z, N, D].
      seen: [1 or B, 1, 1, S, z] bool, who sees whom.
      first: the first key's place.
    """

    keys: jax.Array
    values: jax.Array
    seen: jax.Array
    first: Any


def _over_blocks(
    static: _Static, keys: jax.Array, values: jax.Array, mask: _Mask, step: Callable[[Any, _Block], Any], carry: Any
) -> Any:
    """carry = step(carry, block) of every block of the keys."""
    count = -(-keys.shape[1] // static.block)
    if count > _UNROLLED:
        body = lambda c, at: (step(c, _block(static, keys, values, mask, at)), None)
        return jax.lax.scan(body, carry, jnp.arange(count, dtype=jnp.int32))[0]
    for at in range(count):
        if at:  # one after another, so that the temporaries of one block stand in memory
            carry, keys, values = jax.lax.optimization_barrier((carry, keys, values))
        carry = step(carry, _block(static, keys, values, mask, at))
    return carry


def _block(static: _Static, keys: jax.Array, values: jax.Array, mask: _Mask, at: Any) -> _Block:
    """Blocks are of one size; the last one starts earlier instead, and what the one before had is seen by nobody."""
    rows = keys.shape[1]
    size = -(-rows // -(-rows // static.block))
    first = min(at * size, rows - size) if isinstance(at, int) else jnp.minimum(at * size, rows - size)
    cut = lambda a: jax.lax.dynamic_slice_in_dim(a, first, size, 1)
    distance = mask.queries[:, :, None] - cut(mask.keys)[:, None]  # [1 or B, S, z]
    seen = (distance >= 0) & (first + jnp.arange(size, dtype=jnp.int32) >= at * size)[None, None]
    if mask.window is not None:
        seen &= distance < mask.window
    if mask.query_runs is not None and mask.key_runs is not None:
        seen = seen & (mask.query_runs[:, :, None] == cut(mask.key_runs)[:, None])  # [B, S, z]
    return _Block(cut(keys), cut(values), seen[:, None, None], first)


def _logits(static: _Static, queries: jax.Array, keys: jax.Array) -> jax.Array:
    """[B, N, G, S, z] float32"""
    return _product("bsngd,bznd->bngsz", queries, keys) * static.scale


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _add_at(sums: jax.Array, more: jax.Array, first: Any) -> jax.Array:
    """sums [B, Z, ...] + more [B, z, ...] at rows first..first+z."""
    there = jax.lax.dynamic_slice_in_dim(sums, first, more.shape[1], 1)
    return jax.lax.dynamic_update_slice_in_dim(sums, there + more, first, 1)
