"""Padded: a chunk of T*K rows for every rank, full or not, with a mask; dense all_to_all. The published baseline.

Letters: T tokens, K top_k, H hidden, N = T*K assignments, R ranks, L local experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep import plan as planning
from jax_ep.paths.common import Dispatched
from jax_ep.paths.rows import collect, spread
from jax_ep.plan import Home, Plan
from jax_ep.transport import Part, exchange


def _home(plan: Plan) -> Home:
    """Assignment a stands in row a of its destination's chunk, and nowhere else."""
    g = plan.geometry
    a = jnp.arange(g.assignments, dtype=jnp.int32)
    to = plan.destination.reshape(-1)  # [N]
    mine = to[None] == jnp.arange(g.ranks, dtype=jnp.int32)[:, None]  # [R, N]
    slot = jnp.where(to < g.ranks, to * g.assignments + a, g.home_rows)
    return Home(jnp.where(mine, a[None], g.assignments).reshape(-1), slot.reshape(plan.destination.shape))


def dispatch(x: jax.Array, experts: jax.Array, plan: Plan) -> Dispatched:
    """x [T, H] -> chunks [R * N, H] from all ranks; the expert of each row travels beside it, L where the row is
    empty.
    """
    g, home = plan.geometry, _home(plan)
    # The mask and the expert are one integer.
    local = jnp.where(
        home.assignment < g.assignments, experts.reshape(-1)[home.assignment % g.assignments], g.num_experts
    )
    local = jnp.where(local < g.num_experts, local % g.local_experts, g.local_experts)[:, None]
    (rows, ids), _ = exchange([Part(spread(x, home)), Part(local.astype(jnp.int32))], plan)
    ids_away = checkpoint_name(ids.rows[:, 0], "moe_counts")
    order, sizes = planning.sort_by_expert(ids_away, g.local_experts)
    return Dispatched(checkpoint_name(rows.rows, "moe_dispatched"), order, sizes, None, plan)


def combine(rows: jax.Array, dispatched: Dispatched, weights: jax.Array) -> jax.Array:
    """Expert rows [R * N, H] -> weighted sums [T, H] at home, float32."""
    plan = dispatched.plan
    (back,), _ = exchange([Part(rows)], plan, reverse=True)
    return collect(checkpoint_name(back.rows, "moe_combined"), weights, _home(plan))
