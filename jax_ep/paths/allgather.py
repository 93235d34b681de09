"""All-gather: every rank sees all tokens and runs its own experts on them; psum_scatter brings the sums home.

Letters: T tokens, K top_k, H hidden, R ranks, L local experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep.paths.common import Dispatched, grouped
from jax_ep.plan import Plan


def dispatch(x: jax.Array, experts: jax.Array, weights: jax.Array, plan: Plan) -> Dispatched:
    """x [T, H], experts and weights [T, K] -> all ranks' tokens [R * T, H] with the assignments to this rank's
    experts.
    """
    g, axis = plan.geometry, plan.axis_name
    everyone = checkpoint_name(jax.lax.all_gather(x, axis, tiled=True), "moe_dispatched")  # [R * T, H]
    ids = checkpoint_name(jax.lax.all_gather(experts, axis, tiled=True), "moe_counts")  # [R * T, K]
    gathered = checkpoint_name(jax.lax.all_gather(weights, axis, tiled=True), "moe_weights")  # [R * T, K]
    mine = ids // g.local_experts == plan.rank
    local = jnp.where(mine, ids % g.local_experts, g.local_experts)
    return grouped(everyone, local, gathered, plan, g.local_experts)


def combine(rows: jax.Array, dispatched: Dispatched) -> jax.Array:
    """Weighted rows [R * T, H] of this rank's experts -> sums over ranks [T, H], in the rows' dtype on the wire."""
    return jax.lax.psum_scatter(rows, dispatched.plan.axis_name, tiled=True).astype(jnp.float32)
