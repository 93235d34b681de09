"""Attention at the expert's rank: the keys and values of a token's context travel with it to the rank of its
highest-weighted expert, attention is computed there, added to the token's row, and comes back with it.

An exact form of the parallel block, kept because the idea is published. It moves far more than attention at home does
(`context_counts` counts it), and can pay only where few tokens of long, shared contexts are at work.

Letters: B batch and S positions here, T = B*S tokens, R ranks, J = min(K, R) rows of a token, C receive rows,
H hidden, Q query heads, N key/value heads, D head_dim, G = R*B*S places of all sequences.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh

from jax_ep import local
from jax_ep.attention import NO_WINDOW, attention_scale, linear, project, rms_norm, rope_tables
from jax_ep.block.attention import attend_rows, merge
from jax_ep.block.coship import Form, one_window, run
from jax_ep.block.ranges import run_numbers
from jax_ep.block.rank import Params, Setting
from jax_ep.config import positive_int, refuse
from jax_ep.experts import apply_experts
from jax_ep.model_config import ModelConfig
from jax_ep.paths import make_plan, packed, run_experts
from jax_ep.paths.common import grouped
from jax_ep.paths.rows import place
from jax_ep.plan import Plan, home
from jax_ep.routing import MoEStats, Routing
from jax_ep.sharding import Axes
from jax_ep.transport import Part, exchange


def block_at_experts(
    params: Params,
    x: jax.Array,
    config: ModelConfig,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    segment_ids: jax.Array | None = None,
    token_mask: jax.Array | None = None,
) -> tuple[jax.Array, MoEStats]:
    """y = x + attention(n) + moe(n), n = norm(x), with attention computed where a token's first expert is.

    Two payload collectives. The result is that of `parallel_block`, summed in another order: attention and the experts
    of that rank are rounded to the layer's dtype together.

    Args:
      params: one layer's, as of `parallel_block`.
      x: [B, S, H], whole sequences, the batch over all token axes.
      config: the block, with the window of its attention, which window_layers may not have differ. Its moe.comm must
        have mode="packed", dedup=True and recv_rows_factor=None.
      mesh: None: the ambient one, or one device.
      segment_ids: [B, S] integers: a query sees keys of its own run of equal ones.
      token_mask: [B, S] bool; those at False travel nowhere and come back as they were. Others see them unless
        segment_ids part them.

    Returns:
      y [B, S, H] in the layer's dtype, and MoEStats.

    Raises:
      ConfigError: another CommConfig, or shapes or meshes that do not go with it.
    """
    config = dataclasses.replace(config, window=one_window(config), window_layers=None)
    return run(Form("at_expert", _one_rank, whole=True), params, (x, segment_ids, token_mask), config, mesh)


def _one_rank(
    params: Params,
    x: jax.Array,
    segment_ids: jax.Array | None,
    token_mask: jax.Array | None,
    setting: Setting,
) -> tuple[jax.Array, MoEStats]:
    config, axes, transport = setting.config, setting.axes, setting.transport
    moe = config.moe
    b, s, _ = x.shape
    x = x.astype(moe.dtype)
    normed = rms_norm(x, params["attention_norm"], config.norm_eps)
    begun = local.begin(params["moe"], normed, token_mask, None, moe, axes)
    positions = jnp.broadcast_to(jnp.arange(s), (b, s))
    with jax.named_scope("attention"):
        rows = project(params, normed, *rope_tables(config, positions), config)
    runs = None if segment_ids is None else run_numbers(segment_ids)
    plan = make_plan(begun.routing.experts, moe, axis_name=axes.expert, transport=transport)
    keys_values = jnp.concatenate([a.reshape(b * s, -1) for a in rows[1:]], 1)  # [T, 2ND]

    loops = not axes.others

    def expert_fn(rows: jax.Array, index: jax.Array, sizes: jax.Array, weights: jax.Array | None, p: Any) -> jax.Array:
        return apply_experts(rows, index, sizes, weights, p, moe, loops=loops)

    experts = lambda dispatched: run_experts(expert_fn, dispatched, params["moe"]["experts"], loops)
    if plan.geometry.ranks == 1:
        from_experts = experts(grouped(begun.x, begun.routing.experts, begun.routing.weights, plan, moe.num_experts))
        both = None if runs is None else (runs, runs)
        seen = _attend(params, rows.queries, keys_values.reshape(b, s, -1), both, config)
        total = from_experts.astype(jnp.float32) + linear(seen, params["o"], params.get("o_bias")).astype(jnp.float32)
        rounds = wire = jnp.int32(0)
    else:
        to = _first_rank(begun.routing, moe.padded_experts(axes.ranks) // axes.ranks, axes.ranks)  # [T]
        names = _names(plan, b * s, runs)
        mine = jnp.where((plan.destination == to[:, None])[..., None], names[:, None], 0)  # [T, J, 1 or 2]
        sent = [*packed.outgoing(begun.x, begun.routing, plan, moe), Part(place(mine, home(plan)))]
        needed = contexts(to.reshape(b, s), axes.ranks, config.window, runs)  # [R, B, S]
        context = _context_parts(keys_values, names, needed.reshape(axes.ranks, b * s), plan)
        arrived, plan = exchange([*sent, *context], plan, with_counts=True)
        *rows_beside, theirs, kv, kv_names = (part.rows for part in arrived)
        dispatched = packed.incoming(arrived[: len(rows_beside)], plan, moe)
        seen = _at_expert(
            params, dispatched.rows, theirs, checkpoint_name(kv, "kv_arrived"), kv_names, (b, s), config, axes
        )
        out = experts(dispatched).astype(jnp.float32) + seen
        back, _ = exchange(packed.returning(out, moe), plan, reverse=True)
        total = packed.returned(back, plan, begun.routing.weights, moe)
        assert plan.rounds is not None
        rounds, wire = plan.rounds, local.wire_rows(plan)
    y, stats = local.end(params["moe"], begun, total, rounds, wire, moe)
    return x + y.reshape(x.shape) * config.residual_multiplier, local.reduce_stats(stats, axes)


def _first_rank(routing: Routing, local_experts: int, ranks: int) -> jax.Array:
    """[T], the rank of each token's highest-weighted expert; R of a token that goes nowhere."""
    top = jnp.take_along_axis(routing.experts, jnp.argmax(routing.weights, 1, keepdims=True), 1)[:, 0]
    return jnp.minimum(top // local_experts, ranks)


def _names(plan: Plan, tokens: int, runs: jax.Array | None) -> jax.Array:
    """[T, 1 or 2] int32: 1 + the place of a token among those of all ranks; and its run."""
    place = 1 + plan.rank * tokens + jnp.arange(tokens, dtype=jnp.int32)
    return place[:, None] if runs is None else jnp.stack([place, runs.reshape(-1)], 1)


def contexts(to: Any, ranks: int, window: int | None = None, runs: Any = None, xp: Any = jnp) -> Any:
    """[R, B, S] bool: whether some query that goes to a rank sees the keys and values of a position.

    Args:
      to: [B, S] integers, the rank of each query; others go nowhere.
      ranks: R.
      window: positions that a query sees, its own among them; None: all before it.
      runs: [B, S], the number of each position's segment; None: one.
      xp: numpy or jax.numpy.
    """
    s = to.shape[1]
    at = xp.arange(s)[None, None]
    here = to[None] == xp.arange(ranks)[:, None, None]  # [R, B, S]
    query = xp.where(here, at, s)
    backwards = query[..., ::-1]
    least = np.minimum.accumulate(backwards, 2) if xp is np else jax.lax.cummin(backwards, 2)
    following = least[
        ..., ::-1
    ]  # the next query at or after each position: the one that sees most of what is before it
    seen = following < s
    if window is not None:
        seen = seen & (following - at < window)
    if runs is not None:
        there = xp.take_along_axis(xp.broadcast_to(runs[None], here.shape), xp.minimum(following, s - 1), 2)
        seen = seen & (there == runs[None])
    return seen


def context_counts(
    to: np.ndarray, ranks: int, window: int | None = None, segment_ids: np.ndarray | None = None
) -> np.ndarray:
    """[R, R] int64: key/value rows that each rank sends each, its own to itself included.

    Args:
      to: [R, B, S], the rank of each token's highest-weighted expert.
      ranks, window: as of `contexts`.
      segment_ids: [R, B, S].

    Raises:
      ConfigError: shapes that differ, or a window below 1.
    """
    if np.ndim(to) != 3 or len(to) != ranks:
        refuse("to", list(np.shape(to)), "must be [ranks, B, S]", [ranks, 2, 64])
    if segment_ids is not None and segment_ids.shape != to.shape:
        refuse("segment_ids", list(segment_ids.shape), "must be as many as tokens", list(to.shape))
    if window is not None:
        positive_int("window", window, to.shape[2])
    runs = [None] * ranks if segment_ids is None else [run_numbers(ids, np) for ids in segment_ids]
    return np.stack([contexts(of, ranks, window, run, np).sum((1, 2)) for of, run in zip(to, runs)])


def _context_parts(keys_values: jax.Array, names: jax.Array, needed: jax.Array, plan: Plan) -> list[Part]:
    """Rows [T, 2ND] and names [T, k] for each rank that needs them [R, T], as parts with counts of their own."""
    g = plan.geometry
    tokens = needed.shape[1]
    flat = needed.reshape(-1)
    row = jnp.where(flat, jnp.tile(jnp.arange(tokens), g.ranks), tokens)  # [R * T]
    if g.ragged:  # runs one after another
        assert plan.axis_name is not None
        counts = jax.lax.all_gather(needed.sum(1, dtype=jnp.int32), plan.axis_name)  # [R, R]
        at = jnp.where(flat, jnp.cumsum(flat) - 1, flat.size)
        row = jnp.full(flat.size, tokens, row.dtype).at[at].set(row, mode="drop", unique_indices=True)
    else:  # every rank's run has room for all, and names tell which came
        counts = jnp.zeros((g.ranks, g.ranks), jnp.int32)
    take = lambda a: a.at[row].get(mode="fill", fill_value=0)
    return [Part(take(a), counts, flat.size) for a in (keys_values, names)]


def _at_expert(
    params: Params,
    hidden: jax.Array,
    names: jax.Array,
    kv: jax.Array,
    kv_names: jax.Array,
    shape: tuple[int, int],
    config: ModelConfig,
    axes: Axes,
) -> jax.Array:
    """Attention [C, H] float32 of the hidden rows [C, H] that are named; zeros of the others."""
    b, s = axes.ranks * shape[0], shape[1]
    spread = lambda rows, names: _grid(rows, names[:, 0], b * s).reshape(b, s, *rows.shape[1:])
    positions = jnp.maximum(names[:, 0] - 1, 0)[None] % s  # [1, C]
    with jax.named_scope("attention"):
        queries = project(params, hidden[None], *rope_tables(config, positions), config).queries[0]  # [C, Q, D]
    runs = None
    if names.shape[1] > 1:
        runs = [spread(n[:, 1:], n)[..., 0] for n in (names, kv_names)]
    seen = _attend(params, spread(queries, names), spread(kv, kv_names), runs, config)
    rows = linear(seen.at[names[:, 0] - 1].get(mode="clip"), params["o"], params.get("o_bias"))  # [C, H]
    return jnp.where(names[:, :1] > 0, rows, 0).astype(jnp.float32)


def _grid(rows: jax.Array, names: jax.Array, places: int) -> jax.Array:
    """Rows to their places among `places`; zeros elsewhere."""
    index = jnp.where(names > 0, names - 1, places)
    return jnp.zeros((places, *rows.shape[1:]), rows.dtype).at[index].set(rows, mode="drop", unique_indices=True)


def _attend(params: Params, queries: jax.Array, keys_values: jax.Array, runs: Any, config: ModelConfig) -> jax.Array:
    """Queries [B, S, Q, D] over keys and values [B, S, 2ND] of the same positions: [B*S, Q*D].

    runs: those of queries and of keys, [B, S] each; None: one.
    """
    b, s = queries.shape[:2]
    keys, values = (a.reshape(b, s, config.num_kv_heads, config.head_dim) for a in jnp.split(keys_values, 2, 2))
    of_queries, of_keys = (None, None) if runs is None else runs
    at = jnp.broadcast_to(jnp.arange(s), (b, s))
    window = NO_WINDOW if config.window is None else config.window
    with jax.named_scope("attention"):
        partial = attend_rows(
            queries,
            keys,
            values,
            at,
            at,
            query_runs=of_queries,
            key_runs=of_keys,
            window=window,
            scale=attention_scale(config),
        )
        return merge([partial], params.get("sinks")).astype(queries.dtype).reshape(b * s, -1)
