"""All-gather: every rank sees all tokens and runs its own experts on them; psum_scatter brings the sums home.

Letters: T tokens, K top_k, H hidden, R ranks, L local experts.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep.paths.common import Dispatched, grouped
from jax_ep.plan import Plan
from jax_ep.transport.parts import pack, unit_bytes, unpack


def dispatch(x: jax.Array, experts: jax.Array, weights: jax.Array, plan: Plan) -> Dispatched:
    """x [T, H], experts and weights [T, K] -> all ranks' tokens [R * T, H] with the assignments to this rank's
    experts.
    """
    g = plan.geometry
    everyone, ids, gathered = _gather(plan.axis_name, x, experts, weights)
    ids = checkpoint_name(ids, "moe_counts")  # [R * T, K]
    mine = ids // g.local_experts == plan.rank
    local = jnp.where(mine, ids % g.local_experts, g.local_experts)
    rows, gathered = checkpoint_name(everyone, "moe_dispatched"), checkpoint_name(gathered, "moe_weights")
    return grouped(rows, local, gathered, plan, g.local_experts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(axis: Any, x: jax.Array, experts: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
    """Everybody's rows of all three, in one all_gather of one packed buffer."""
    parts = (x, experts, weights)
    return tuple(unpack(jax.lax.all_gather(pack(parts, unit_bytes(parts)), axis, tiled=True), parts))


def _gather_forward(axis: Any, *parts: jax.Array) -> Any:
    return _gather(axis, *parts), None


def _gather_backward(axis: Any, _: None, cotangents: Any) -> Any:
    d_x, _, d_weights = cotangents
    home = functools.partial(jax.lax.psum_scatter, axis_name=axis, tiled=True)
    return home(d_x), None, home(d_weights)


_gather.defvjp(_gather_forward, _gather_backward)


def combine(rows: jax.Array, dispatched: Dispatched) -> jax.Array:
    """Weighted rows [R * T, H] of this rank's experts -> sums over ranks [T, H], in the rows' dtype on the wire."""
    return jax.lax.psum_scatter(rows, dispatched.plan.axis_name, tiled=True).astype(jnp.float32)
