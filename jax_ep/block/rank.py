"""One rank's share of a block, in stages between which rows travel. Inside shard_map, or alone on one device.

    rows = project_rows(params, x, sequences, setting)                       attention of a layer
    (kv,) = cross([kv_send(rows, sequences, setting)], setting)
    x = x + attend(params, rows, kv, sequences, setting)

    routed = route_tokens(params, x, sequences, setting)                     its experts
    (arrived,) = cross([dispatch_send(routed, setting)], setting)
    pending, stats = through_experts(params, x, routed, arrived, setting)
    (back,) = cross([combine_send(pending, setting)], setting)
    x = finish(pending, back, setting)

The forms differ in which sends cross together. Rows for the rank's own experts take no part in the exchanges, so that
they can be computed beside them, as attention to the rank's own keys can.

Letters: b sequences and s positions here, S positions of a sequence, t = b*s tokens, K top_k, H hidden, C receive rows,
R ranks, D head_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep import local, paths
from jax_ep import plan as planning
from jax_ep.attention import Queries, attention_scale, linear, project, rope_tables
from jax_ep.block import kv
from jax_ep.block.ranges import KVPlan, new_runs, plan_kv
from jax_ep.experts import apply_experts, shared_mlp
from jax_ep.local import Begun
from jax_ep.model_config import ModelConfig
from jax_ep.paths import packed
from jax_ep.plan import Geometry, Plan
from jax_ep.routing import MoEStats
from jax_ep.sharding import Axes
from jax_ep.transport import Part, Send, exchange_together

Params = dict[str, Any]
Window: TypeAlias = jax.Array | int | None
Arrived: TypeAlias = tuple[list[Part], Plan] | None


class Setting(NamedTuple):
    """What of a block is static.

    Attributes:
      config: the model's.
      axes: of the mesh.
      transport: of the exchanges, resolved.
      split: of the positions; None: sequences are whole on their rank, and no key or value travels.
      kv: how key/value rows travel, one of `coship.KV_WAYS`.
    """

    config: ModelConfig
    axes: Axes
    transport: str
    split: str | None
    kv: str


class Sequences(NamedTuple):
    """What every rank knows of some sequences.

    Attributes:
      kv: which of their key/value rows travel.
      tables: cos and sin [b or 1, s, D/2] of the positions here, which count from the beginning of their segment.
      mask: bool [b, s], tokens that go to experts; None: all.
    """

    kv: KVPlan
    tables: tuple[jax.Array, jax.Array]
    mask: jax.Array | None


def sequences(
    batch: int,
    positions: int,
    segment_ids: jax.Array | None,
    token_mask: jax.Array | None,
    window: Window,
    setting: Setting,
) -> Sequences:
    """Sequences of S `positions`; segment_ids and token_mask [b, S], all in order of positions."""
    axes, config, whole = setting.axes, setting.config, setting.split is None
    plan = plan_kv(
        setting.split or "contiguous",
        batch,
        positions,
        1 if whole else axes.ranks,
        jnp.int32(0) if whole else _rank(axes),
        window=window,
        segments=segment_ids,
        layout="all_to_all" if setting.transport == "all_to_all" else "ragged",
    )
    at = plan.positions[None]  # [1, s]
    if segment_ids is not None:
        at = at - _begins(segment_ids)[:, plan.positions]
    mask = None if token_mask is None else token_mask[:, plan.positions]
    return Sequences(plan, rope_tables(config, at), mask)


def _rank(axes: Axes) -> jax.Array:
    return jnp.int32(0) if axes.expert is None else jax.lax.axis_index(axes.expert)


def _begins(segment_ids: jax.Array) -> jax.Array:
    """[b, S] -> where the run of equal ids begins that each position is in."""
    at = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    return jax.lax.cummax(jnp.where(new_runs(segment_ids), at, 0), axis=1)


def cross(sends: list[Send | None], setting: Setting) -> list[Arrived]:
    """What arrives of each send: with "coship" in one collective for all of them, else in one each."""
    there = [send for send in sends if send is not None]
    if setting.kv == "coship":
        done = exchange_together(there) if there else []
    else:
        done = [exchange_together([send])[0] for send in there]
    arrived = iter(done)
    return [None if send is None else next(arrived) for send in sends]


def project_rows(params: Params, x: jax.Array, of: Sequences, setting: Setting) -> Queries:
    """x [b, s, H], normed, to queries, keys and values."""
    with jax.named_scope("attention"):
        return project(params, x, *of.tables, setting.config)


def kv_send(rows: Queries, of: Sequences, setting: Setting) -> Send | None:
    """The key/value rows that other ranks' queries see; None where they travel otherwise or not at all."""
    if setting.axes.ranks == 1 or setting.kv not in ("coship", "separate"):
        return None
    ranks = setting.axes.ranks
    bare = _no_assignments(Geometry(1, 1, ranks, ranks, 1, setting.transport), setting)
    return Send([kv.kv_part(rows.keys, rows.values, of.kv)], bare)


def attend(params: Params, rows: Queries, arrived: Arrived, of: Sequences, setting: Setting) -> jax.Array:
    """Attention of the queries here to the keys of all ranks, back in hidden width [b, s, H]."""
    config, axes = setting.config, setting.axes
    how: dict[str, Any] = {"sinks": params.get("sinks"), "scale": attention_scale(config)}
    with jax.named_scope("attention"):
        if axes.expert is not None and axes.ranks > 1 and setting.kv in ("all_gather", "ring"):
            through = kv.attend_gathered if setting.kv == "all_gather" else kv.attend_ring
            out = through(*rows, of.kv, axes.expert, **how)
        else:
            there = None
            if arrived is not None:
                (part,), _ = arrived
                named = part._replace(rows=checkpoint_name(part.rows, "kv_arrived"))
                there = kv.received(named, of.kv, config.num_kv_heads)
            out = kv.attend_split(*rows, there, of.kv, **how)
        return linear(out, params["o"], params.get("o_bias")) * config.residual_multiplier


class Routed(NamedTuple):
    """Tokens that know their experts, and the plan of those that leave."""

    begun: Begun
    plan: Plan


def choose_experts(params: Params, x: jax.Array, of: Sequences, setting: Setting) -> Begun:
    """x [b, s, H], normed. No rank hears of another's."""
    return local.begin(params["moe"], x, of.mask, None, setting.config.moe, setting.axes)


def plan_tokens(begun: Begun, setting: Setting) -> Routed:
    """On the ragged layout this shares the counts, in a control collective."""
    moe, axes = setting.config.moe, setting.axes
    with jax.named_scope("plan"):
        ids = [begun.routing.experts]
        (plan,) = paths.make_plans(ids, moe, axis_name=axes.expert, transport=setting.transport, own=False)
    return Routed(begun, plan)


def route_tokens(params: Params, x: jax.Array, of: Sequences, setting: Setting) -> Routed:
    """Both of the above."""
    return plan_tokens(choose_experts(params, x, of, setting), setting)


def dispatch_send(routed: Routed, setting: Setting) -> Send | None:
    """The tokens on their way to other ranks' experts."""
    begun, plan = routed
    if setting.axes.ranks == 1:
        return None
    with jax.named_scope("dispatch"):
        parts = packed.outgoing(begun.x, begun.routing, plan, setting.config.moe)
    return Send(parts, plan, with_counts=True)


class Pending(NamedTuple):
    """Tokens whose expert rows have yet to come home.

    Attributes:
      x: [b, s, H], what the experts' sums are added to.
      rest: [t, H] float32, of those sums what needs no first round: own and shared experts, further rounds.
      weights: [t, K] float32.
      rows: [C, H], other ranks' rows out of the experts here; None on one rank, as the plan is.
      plan: how they came.
    """

    x: jax.Array
    rest: jax.Array
    weights: jax.Array
    rows: jax.Array | None
    plan: Plan | None


def through_experts(
    params: Params, x: jax.Array, routed: Routed, arrived: Arrived, setting: Setting
) -> tuple[Pending, MoEStats]:
    """The experts here on what arrived, and what else they add to x [b, s, H]; with this rank's statistics."""
    moe, ranks = setting.config.moe, setting.axes.ranks
    begun, plan = routed
    experts, assignments = params["moe"]["experts"], begun.routing.experts.size

    def expert_fn(expected: int) -> paths.ExpertFn:
        def fn(rows: jax.Array, index: jax.Array, sizes: jax.Array, weights: jax.Array | None, p: Any) -> jax.Array:
            return apply_experts(rows, index, sizes, weights, p, moe, expected_rows=max(1, expected))

        return fn

    with jax.named_scope("own_experts"):
        own = packed.own_experts if ranks > 1 else paths.dispatch
        here = own(begun.x, begun.routing, plan, moe)
        rest = paths.run_experts(expert_fn(assignments // ranks), here, experts).astype(jnp.float32)
    if moe.num_shared_experts:
        with jax.named_scope("shared_experts"):
            rest = rest + shared_mlp(begun.x, params["moe"]["shared"], moe)
    if arrived is None:
        return Pending(x, rest, begun.routing.weights, None, None), begun.stats
    others = expert_fn(assignments * (ranks - 1) // ranks)
    with jax.named_scope("experts"):
        dispatched = packed.incoming(*arrived, moe)
        rows = paths.run_experts(others, dispatched, experts).astype(moe.dtype)
    plan = dispatched.plan
    with jax.named_scope("extra_rounds"):
        more = paths.extra_rounds(begun.x, begun.routing, experts, plan, others, moe)
    rest = rest if more is None else rest + more
    assert plan.rounds is not None
    stats = begun.stats._replace(rounds=plan.rounds, wire_rows=local.wire_rows(plan))
    return Pending(x, rest, begun.routing.weights, rows, plan), stats


def combine_send(pending: Pending, setting: Setting) -> Send | None:
    """Expert rows on their way home."""
    if pending.plan is None or pending.rows is None:
        return None
    return Send(packed.returning(pending.rows, setting.config.moe), pending.plan, reverse=True)


def finish(pending: Pending, back: Arrived, setting: Setting) -> jax.Array:
    """[b, s, H], with all that the experts add."""
    config = setting.config
    with jax.named_scope("combine"):
        y = pending.rest if back is None else pending.rest + packed.returned(*back, pending.weights, config.moe)
        y = checkpoint_name(y.astype(config.moe.dtype), "moe_output")
        return pending.x + y.reshape(pending.x.shape) * config.residual_multiplier


def nothing_pending(x: jax.Array, setting: Setting) -> Pending:
    """x [b, s, H] as if its experts had added nothing: what a first layer takes over from none. Of the same structure
    as what `through_experts` gives.
    """
    moe, axes = setting.config.moe, setting.axes
    tokens, top_k = x.shape[0] * x.shape[1], moe.router.top_k
    rest, weights = jnp.zeros((tokens, x.shape[2]), jnp.float32), jnp.zeros((tokens, top_k), jnp.float32)
    if axes.ranks == 1:
        return Pending(x, rest, weights, None, None)
    padded = moe.padded_experts(axes.ranks)
    g = planning.geometry(moe.comm, tokens, top_k, padded, axes.ranks, setting.transport, own=False)
    plan = _no_assignments(g, setting)
    if g.ragged:
        plan = planning.finish_ragged(plan, jnp.zeros((g.ranks, g.ranks, g.local_experts), jnp.int32))
    else:
        plan = planning.finish_all_to_all(plan, jnp.zeros((g.ranks, g.local_experts + 1), jnp.int32))
    return Pending(x, rest, weights, jnp.zeros((g.recv_rows, x.shape[2]), moe.dtype), plan)


def _no_assignments(g: Geometry, setting: Setting) -> Plan:
    nowhere = jnp.full((g.tokens, g.top_k), packed.NOWHERE, jnp.int32)
    return planning.start_plan(nowhere, g, _rank(setting.axes), setting.axes.expert)
