"""How tokens meet experts: plan, dispatch, experts, combine, each callable inside a caller's own shard_map.

Letters: T tokens, K top_k, H hidden, M rows beside the experts.

    plan = make_plan(routing.experts, config, axis_name="expert")
    dispatched = dispatch(x, routing, plan, config)
    rows = expert_fn(dispatched.rows, dispatched.index, dispatched.group_sizes, dispatched.weights, params)
    y = combine(rows, dispatched, routing, config)

Where config allows packed several rounds, packed.extra_rounds gives what the later ones add.

One rank (axis_name None, or an axis of size 1) exchanges nothing, in any mode.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ep import plan as planning
from jax_ep.config import MoEConfig, refuse
from jax_ep.paths import allgather, packed, padded
from jax_ep.paths.common import Dispatched, ExpertFn, geometry, grouped
from jax_ep.plan import Plan
from jax_ep.routing import Routing
from jax_ep.transport import share_counts

__all__ = ["Dispatched", "ExpertFn", "combine", "dispatch", "make_plan"]


def make_plan(experts: jax.Array, config: MoEConfig, *, axis_name: str | None, transport: str = "all_to_all") -> Plan:
    """experts [T, K] of this rank -> Plan. On the ragged transport this is where the counts are shared.

    Args:
      experts: int32 expert ids; outside [0, padded num_experts) goes nowhere.
      config: its comm says the path; mode "dense" has no plan.
      axis_name: the expert axis of the surrounding shard_map; None on one device.
      transport: "ragged", "all_to_all" or "all_gather"; packed only.
    """
    if config.comm.mode == "dense":
        refuse("mode", "dense", "every expert runs on every token, there is nothing to plan", "packed")
    ranks = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    tokens, top_k = experts.shape
    g = geometry(config.comm, tokens, top_k, config.padded_experts(ranks), ranks, transport)
    rank = jnp.int32(0) if axis_name is None else jax.lax.axis_index(axis_name)
    plan = planning.start_plan(experts, g, rank, axis_name)
    return share_counts(plan) if ranks > 1 and config.comm.mode == "packed" else plan


def dispatch(x: jax.Array, routing: Routing, plan: Plan, config: MoEConfig) -> Dispatched:
    """x [T, H] -> rows beside their experts (of packed, the first round's)."""
    if plan.geometry.ranks == 1:
        return grouped(x, routing.experts, routing.weights, plan, plan.geometry.num_experts)
    if config.comm.mode == "allgather":
        return allgather.dispatch(x, routing.experts, routing.weights, plan)
    if config.comm.mode == "padded":
        return padded.dispatch(x, routing.experts, plan)
    return packed.dispatch(x, plan)


def combine(rows: jax.Array, dispatched: Dispatched, routing: Routing, config: MoEConfig) -> jax.Array:
    """Expert rows [M, H] -> y [T, H] at home, summed in float32 and not yet rounded."""
    if dispatched.plan.geometry.ranks == 1:
        return rows.astype(jnp.float32)
    if config.comm.mode == "allgather":
        return allgather.combine(rows.astype(config.dtype), dispatched)
    if config.comm.mode == "padded":
        return padded.combine(rows, dispatched, routing.weights)
    return packed.combine(rows, dispatched, routing.weights)
