"""How tokens meet experts: plan, dispatch, experts, combine, each callable inside a caller's own shard_map.

Letters: T tokens, K top_k, H hidden, M rows beside the experts.

    routing = route(router_logits(x, router_kernel), config.router)  # or a Routing of one's own
    plan = make_plan(routing.experts, config, axis_name="expert")
    dispatched = dispatch(x, routing, plan, config)
    rows = run_experts(expert_fn, dispatched, params)
    y = combine(rows, dispatched, routing, config)
    more = extra_rounds(x, routing, params, dispatched.plan, expert_fn, config)  # None: one round holds any routing
    y = (y if more is None else y + more).astype(config.dtype)

expert_fn takes (rows [M, H], index [A], group_sizes [L], weights [A] or None, params) to [M, H], as
`jax_ep.experts.apply_experts` does with a config; params are those of this rank's experts.

Several pieces (num_chunks) are several such plans over parts of the tokens; `moe` then leaves a rank's own rows out of
them (make_plans(own=False)) and adds packed.own_experts.

One rank (axis_name None, or an axis of size 1) exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_ep import plan as planning
from jax_ep.config import MoEConfig, refuse
from jax_ep.paths import allgather, packed, padded
from jax_ep.paths.common import Dispatched, ExpertFn, grouped
from jax_ep.paths.packed import extra_rounds
from jax_ep.paths.windows import run_experts
from jax_ep.plan import Plan
from jax_ep.routing import Routing
from jax_ep.transport import share_counts

__all__ = ["Dispatched", "ExpertFn", "combine", "dispatch", "extra_rounds", "make_plan", "make_plans", "run_experts"]


def make_plan(experts: jax.Array, config: MoEConfig, *, axis_name: str | None, transport: str | None = None) -> Plan:
    """experts [T, K] of this rank -> Plan, of one piece. On the ragged transport this is where the counts are shared.

    Args:
      experts: int32 expert ids; outside [0, padded num_experts) goes nowhere.
      config: its comm says the path; mode "dense" has no plan.
      axis_name: the expert axis of the surrounding shard_map; None on one device.
      transport: of packed, "ragged", "all_to_all" or "all_gather". None: config.comm.transport, with "auto" read as
        all_to_all: `moe` looks at the devices, and this does not.
    """
    return make_plans([experts], config, axis_name=axis_name, transport=transport)[0]


def make_plans(
    pieces: Sequence[jax.Array],
    config: MoEConfig,
    *,
    axis_name: str | None,
    transport: str | None = None,
    own: bool = True,
) -> list[Plan]:
    """A plan for each piece [T_i, K] of this rank's tokens, as `make_plan` does; their counts are shared together.

    own=False leaves out rows for the rank's own experts (of packed).
    """
    if config.comm.mode == "dense":
        refuse("mode", "dense", "every expert runs on every token, there is nothing to plan", "packed")
    if transport is None:
        transport = "all_to_all" if config.comm.transport == "auto" else config.comm.transport
    if transport not in ("ragged", "all_to_all", "all_gather"):
        refuse("transport", transport, "must be ragged, all_to_all or all_gather (`moe` resolves auto)", "all_to_all")
    for experts in pieces:
        if experts.ndim != 2 or 0 in experts.shape:
            refuse("experts", list(experts.shape), "must be [T, K] with at least one of each", [1, config.router.top_k])
    ranks = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    rank = jnp.int32(0) if axis_name is None else jax.lax.axis_index(axis_name)
    exchanged = ranks > 1 and config.comm.mode == "packed"
    plans = []
    for experts in pieces:
        tokens, top_k = experts.shape
        g = planning.geometry(config.comm, tokens, top_k, config.padded_experts(ranks), ranks, transport, own)
        rows = packed.row_experts(experts, config, ranks, rank, own) if exchanged else experts
        plans.append(planning.start_plan(rows, g, rank, axis_name))
    return share_counts(plans) if exchanged else plans


def dispatch(x: jax.Array, routing: Routing, plan: Plan, config: MoEConfig) -> Dispatched:
    """x [T, H] -> rows beside their experts (of packed, the first round's)."""
    if plan.geometry.ranks == 1:
        return grouped(x, routing.experts, routing.weights, plan, plan.geometry.num_experts)
    if config.comm.mode == "allgather":
        return allgather.dispatch(x, routing.experts, routing.weights, plan)
    if config.comm.mode == "padded":
        return padded.dispatch(x, routing.experts, plan)
    return packed.dispatch(x, routing, plan, config)


def combine(rows: jax.Array, dispatched: Dispatched, routing: Routing, config: MoEConfig) -> jax.Array:
    """Expert rows [M, H] -> y [T, H] at home, summed in float32 and not yet rounded; of packed, what the first round
    brought (see `extra_rounds`).
    """
    if dispatched.plan.geometry.ranks == 1:
        return rows.astype(jnp.float32)
    if config.comm.mode == "allgather":
        return allgather.combine(rows.astype(config.dtype), dispatched)
    if config.comm.mode == "padded":
        return padded.combine(rows, dispatched, routing.weights)
    return packed.combine(rows, dispatched, routing.weights, config)
