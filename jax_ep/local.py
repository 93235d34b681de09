"""One rank's layer: route, plan, dispatch, experts, combine, and its share of the statistics. Runs inside shard_map,
or alone.

Letters: t tokens here, b, s batch and sequence here, K top_k, E experts, H hidden, C receive rows, I intermediate,
R ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_ep import paths
from jax_ep import plan as planning
from jax_ep.config import MoEConfig
from jax_ep.experts import apply_experts, shared_mlp
from jax_ep.overlap import after, together_in_backward
from jax_ep.paths import dense, packed
from jax_ep.paths.pieces import in_turn
from jax_ep.plan import Plan
from jax_ep.routing import MoEStats, Routing, route, router_logits
from jax_ep.sharding import Axes

CHECKPOINT_NAMES = (
    "moe_dispatched",  # rows beside their experts [C, H]
    "moe_gate",  # pre-activations there [C, I]
    "moe_up",
    "moe_combined",  # expert rows back home [T*K, H]
    "moe_output",  # y [T, H]
    "kv_arrived",  # other ranks' keys and values, as they came
    "moe_counts",  # small: what was learnt of other ranks' counts, weights, sums
    "moe_weights",
    "moe_stats",
)


def recomputing(body: Callable[..., Any], how: str) -> Callable[..., Any]:
    """A scan's body that keeps for the backward what `how` (ModelConfig.recompute) says."""
    if how == "none":
        return body
    keep = jax.checkpoint_policies
    policy = keep.nothing_saveable if how == "full" else keep.save_only_these_names(*CHECKPOINT_NAMES)
    return jax.checkpoint(body, policy=policy, prevent_cse=False)  # a scan's body is compiled apart from its backward


class Begun(NamedTuple):
    """A layer's tokens once they know their experts.

    Attributes:
      x: [t, H] in config.dtype, zeros where masked.
      mask: bool [t], or None.
      routing: where they go, after masks and capacity; experts and weights alone.
      stats: this rank's sums, without what an exchange adds.
    """

    x: jax.Array
    mask: jax.Array | None
    routing: Routing
    stats: MoEStats


def one_rank(
    params: dict[str, Any],
    x: jax.Array,
    token_mask: jax.Array | None,
    routing: Routing | None,
    config: MoEConfig,
    axes: Axes,
    transport: str,
) -> tuple[jax.Array, MoEStats]:
    """One rank's layer: x [t, H] or [b, s, H], its own experts."""
    begun = begin(params, x, token_mask, routing, config, axes)
    beside = _shared(params, begun, config) if config.overlap.moe_shared_expert_overlap else None
    if config.comm.mode == "dense":
        with jax.named_scope("experts"):
            y = dense.run(begun.x, begun.routing.experts, begun.routing.weights, params["experts"], config)
        rounds = wire = jnp.int32(0)
    else:
        y, rounds, wire, beside = routed(params["experts"], begun.x, begun.routing, config, axes, transport, beside)
    y, stats = end(params, begun, y, rounds, wire, config, beside)
    return y.reshape(x.shape), reduce_stats(stats, axes)


def begin(
    params: dict[str, Any],
    x: jax.Array,
    token_mask: jax.Array | None,
    routing: Routing | None,
    config: MoEConfig,
    axes: Axes,
) -> Begun:
    """Routes x [t, H] or [b, s, H]."""
    shape = x.shape
    x = x.reshape(-1, config.hidden_size).astype(config.dtype)
    mask = None if token_mask is None else token_mask.reshape(-1)
    if mask is not None:
        x = jnp.where(mask[:, None], x, 0)  # whatever stands in a masked row, NaN included, reaches nothing
    with jax.named_scope("route"):
        if routing is None:
            router = params["router"]
            logits = router_logits(x, router["kernel"], router.get("bias"))
            routing = route(logits, config.router, selection_bias=router.get("selection_bias"))
        else:
            routing = jax.tree.map(lambda a: a.reshape(x.shape[0], *a.shape[len(shape) - 1 :]), routing)
        routing, sums = tidy(routing, mask, config)
        routing, dropped = apply_capacity(routing, sums, config, axes)
    return Begun(x, mask, routing, sums._replace(dropped_rows=dropped))


def end(
    params: dict[str, Any],
    begun: Begun,
    y: jax.Array,
    rounds: jax.Array,
    wire: jax.Array,
    config: MoEConfig,
    shared: jax.Array | None = None,
) -> tuple[jax.Array, MoEStats]:
    """Sums y [t, H] float32 of the routed experts -> the layer's [t, H], and this rank's statistics.

    shared: [t, H] float32, what the shared experts add, where that is known already.
    """
    if config.num_shared_experts:
        y = y + (_shared(params, begun, config) if shared is None else shared)
    if begun.mask is not None:
        y = jnp.where(begun.mask[:, None], y, 0)
    return checkpoint_name(y.astype(config.dtype), "moe_output"), begun.stats._replace(rounds=rounds, wire_rows=wire)


def _shared(params: dict[str, Any], begun: Begun, config: MoEConfig) -> jax.Array:
    with jax.named_scope("shared_experts"):
        return shared_mlp(begun.x, params["shared"], config)


def routed(
    expert_params: Any,
    x: jax.Array,
    routing: Routing,
    config: MoEConfig,
    axes: Axes,
    transport: str,
    beside: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """plan, dispatch, experts, combine: y [t, H] float32, rounds, rows on the wire, and `beside`.

    What computes `beside` (floating point) stands beside the first dispatch. In pieces, a rank's own experts stand
    beside the last combine.
    """
    comm, loops = config.comm, not axes.others
    exchanged = comm.mode == "packed" and axes.ranks > 1
    sizes = planning.pieces(x.shape[0], comm.num_chunks) if exchanged else x.shape[:1]
    cuts = np.cumsum(sizes)[:-1]
    xs, routings = jnp.split(x, cuts), [Routing(*both) for both in zip(*(jnp.split(a, cuts) for a in routing[:2]))]
    # Buffers have slack; this many rows are to be expected on each rank: of one piece, and of its own experts.
    own = exchanged and comm.num_chunks > 1
    expected = max(1, routing.experts.size * (axes.ranks - own) // (axes.ranks * len(sizes)))
    expected_own = max(1, routing.experts.size // axes.ranks)

    def expert_fn(rows: jax.Array, index: jax.Array, sizes: jax.Array, weights: jax.Array | None, p: Any) -> jax.Array:
        return apply_experts(rows, index, sizes, weights, p, config, expected_rows=expected, loops=loops)

    def own_fn(rows: jax.Array, index: jax.Array, sizes: jax.Array, weights: jax.Array | None, p: Any) -> jax.Array:
        return apply_experts(rows, index, sizes, weights, p, config, expected_rows=expected_own, loops=loops)

    with jax.named_scope("plan"):
        ids = [r.experts for r in routings]
        plans = paths.make_plans(ids, config, axis_name=axes.expert, transport=transport, own=not own)
    x_own, first_params = x, expert_params
    if config.overlap.delay_wgrad_compute:  # the last exchange of the backward is that of the first rows
        xs[0], first_params = together_in_backward(xs[0], expert_params)
    if len(xs) > 1:
        experts = lambda i, d: paths.run_experts(expert_fn, d, expert_params if i else first_params, loops)
        ys, plans, beside, x_own = in_turn(xs, routings, plans, experts, config, beside, x)
    else:
        with jax.named_scope("dispatch"):
            arrived = paths.dispatch(xs[0], routings[0], plans[0], config)
        plans = [arrived.plan]
        if beside is not None:
            rows, beside = after(arrived.rows, beside)
            arrived = arrived.with_rows(rows)
        with jax.named_scope("experts"):
            rows = paths.run_experts(expert_fn, arrived, first_params, loops)
        if own:
            rows, x_own = after(rows, x)
        with jax.named_scope("combine"):
            ys = [paths.combine(rows, arrived, routings[0], config)]
    g = plans[0].geometry
    if g.ranks == 1:
        return ys[0], jnp.int32(0), jnp.int32(0), beside
    if comm.mode == "allgather":
        return ys[0], jnp.int32(1), jnp.int32((g.ranks - 1) * g.tokens), beside
    if comm.mode == "padded":
        return ys[0], jnp.int32(1), jnp.int32((g.ranks - 1) * g.quota), beside
    if axes.others and axes.outer and any(plan.geometry.max_rounds > 1 for plan in plans):
        # The compiler may put collectives over all devices into the loop of rounds: all have to take the same number.
        most = jax.lax.pmax(jnp.stack([plan.rounds for plan in plans]), axes.outer)
        plans = [dataclasses.replace(plan, rounds=most[i]) for i, plan in enumerate(plans)]
    with jax.named_scope("extra_rounds"):
        for i, piece in enumerate(zip(xs, routings)):
            more = paths.extra_rounds(*piece, expert_params, plans[i], expert_fn, config, loops)
            ys[i] = ys[i] if more is None else ys[i] + more
    y = jnp.concatenate(ys)
    if own:
        with jax.named_scope("own_experts"):
            here = packed.own_experts(x_own, routing, plans[0], config)
            y = y + paths.run_experts(own_fn, here, expert_params, loops)
    rounds = jnp.stack([plan.rounds for plan in plans])
    wire = [wire_rows(plan) for plan in plans]
    return y, rounds.max(), sum(wire[1:], wire[0]), beside


def wire_rows(plan: Plan) -> jax.Array:
    """Rows that this rank's dispatches hand to collectives for other ranks, empty ones included."""
    g = plan.geometry
    assert plan.rounds is not None
    if g.ragged:
        return (plan.send_counts.sum() - plan.send_counts[plan.rank]).astype(jnp.int32)
    return (plan.rounds * ((g.ranks - 1) * g.messages * g.quota)).astype(jnp.int32)


def tidy(routing: Routing, mask: jax.Array | None, config: MoEConfig) -> tuple[Routing, MoEStats]:
    """Masked and out-of-range assignments go nowhere with weight 0; and this rank's sums."""
    e = config.num_experts
    real = (routing.experts >= 0) & (routing.experts < e)  # before the cast, which may wrap
    experts = routing.experts.astype(jnp.int32)
    tokens = jnp.int32(experts.shape[0])
    probs, lse = routing.probs, routing.logsumexp
    if mask is not None:
        real &= mask[:, None]
        tokens = mask.sum(dtype=jnp.int32)
        probs = None if probs is None else jnp.where(mask[:, None], probs, 0)
        lse = None if lse is None else jnp.where(mask, lse, 0)
    experts = jnp.where(real, experts, packed.NOWHERE)
    weights = jnp.where(real, routing.weights.astype(jnp.float32), 0)
    counts = planning.count(experts.reshape(-1), e)
    prob_sum = jnp.zeros(e, jnp.float32) if probs is None else probs.astype(jnp.float32).sum(0)
    lse_sq = jnp.float32(0) if lse is None else jnp.square(lse.astype(jnp.float32)).sum()
    zero = jnp.int32(0)
    return Routing(experts, weights), MoEStats(tokens, counts, prob_sum, lse_sq, zero, zero, zero)


def apply_capacity(routing: Routing, sums: MoEStats, config: MoEConfig, axes: Axes) -> tuple[Routing, jax.Array]:
    """Drops what exceeds an expert's capacity, counted over the tokens and ranks of one expert axis."""
    factor, e = config.comm.capacity_factor, config.num_experts
    if factor is None:
        return routing, jnp.int32(0)
    experts, tokens, ahead = routing.experts, sums.tokens, jnp.zeros(e, jnp.int32)
    if axes.ranks > 1:
        everyone = jax.lax.all_gather(jnp.append(sums.counts, sums.tokens), axes.expert)  # [R, E + 1]
        tokens = everyone[:, e].sum()
        ahead = planning.before(everyone[:, :e])[jax.lax.axis_index(axes.expert)]
    capacity = planning.capacity(factor, tokens, experts.shape[1], e)
    kept = planning.kept_under_capacity(experts, e, ahead, capacity)
    dropped = ((experts < e) & ~kept).sum(dtype=jnp.int32)
    return Routing(jnp.where(kept, experts, packed.NOWHERE), jnp.where(kept, routing.weights, 0)), dropped


def reduce_stats(stats: MoEStats, axes: Axes) -> MoEStats:
    """Sums over all token axes in one collective; rounds are the largest of the replicas.

    Counts cross as two floats of 12 and more bits, so that one float32 reduction holds them exactly.
    """
    if not axes.tokens:
        return stats
    integers = jnp.concatenate([stats.counts, jnp.stack([stats.tokens, stats.dropped_rows, stats.wire_rows])])
    replica = jax.lax.axis_index(axes.outer) if axes.outer else 0
    first = jax.lax.axis_index(axes.expert) == 0
    rounds = jnp.where(first & (jnp.arange(axes.replicas) == replica), stats.rounds, 0)
    low, high = integers % 4096, integers // 4096
    floats = [low, high, rounds, stats.prob_sum, stats.lse_sq_sum[None]]
    mine = jnp.concatenate([f.astype(jnp.float32) for f in floats])
    total = checkpoint_name(jax.lax.psum(mine, axes.tokens), "moe_stats")
    low, high, rounds, prob_sum, lse = jnp.split(total, np.cumsum([f.shape[0] for f in floats])[:-1])
    whole = low.astype(jnp.int32) + 4096 * high.astype(jnp.int32)
    e = stats.counts.shape[0]
    return MoEStats(whole[e], whole[:e], prob_sum, lse[0], whole[e + 1], rounds.max().astype(jnp.int32), whole[e + 2])
