"""Packed: exactly the rows that must travel, one message a destination rank; more rounds when the buffer does not
hold them.

Letters: T tokens, K top_k, H hidden, R ranks, C receive rows, n home rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep import plan as planning
from jax_ep.paths.common import Dispatched, ExpertFn
from jax_ep.paths.rows import collect, spread
from jax_ep.plan import Plan
from jax_ep.transport import Part, exchange


def dispatch(x: jax.Array, plan: Plan) -> Dispatched:
    """x [T, H] -> the first round's rows at their experts' ranks."""
    (arrived,), plan = exchange([Part(spread(x, planning.home(plan)))], plan, with_counts=True)
    rows = checkpoint_name(arrived.rows, "moe_dispatched")
    index, sizes = planning.away(plan)
    return Dispatched(rows, index, sizes, None, plan)


def combine(rows: jax.Array, dispatched: Dispatched, weights: jax.Array) -> jax.Array:
    """Expert rows [C, H] of the first round -> weighted sums [T, H] at home, float32."""
    plan = dispatched.plan
    (back,), _ = exchange([Part(rows)], plan, reverse=True)
    return collect(checkpoint_name(back.rows, "moe_combined"), weights, planning.home(plan))


def extra_rounds(x: jax.Array, weights: jax.Array, params: Any, plan: Plan, expert_fn: ExpertFn) -> jax.Array | None:
    """What rounds 2.. add to the sums [T, H], float32; None where no routing can need them.

    A loop whose trip count every rank knows. Nothing of a round is kept: its backward sends the rows again, with their
    cotangents and weights beside them in one exchange, recomputes, and brings the gradients of rows and weights home
    in another.
    """
    if plan.geometry.max_rounds == 1:
        return None
    return _extra(expert_fn, x, weights, params, plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _extra(expert_fn: ExpertFn, x: jax.Array, weights: jax.Array, params: Any, plan: Plan) -> jax.Array:
    def one(step: jax.Array, total: jax.Array) -> jax.Array:
        home, (index, sizes) = planning.home(plan, step), planning.away(plan, step)
        (arrived,), _ = exchange([Part(spread(x, home))], plan, step=step)
        out = expert_fn(arrived.rows, index, sizes, None, params)
        (back,), _ = exchange([Part(out)], plan, reverse=True, step=step)
        return total + collect(back.rows, weights, home)

    return jax.lax.fori_loop(1, plan.rounds, one, jnp.zeros(x.shape, jnp.float32))


def _extra_forward(expert_fn: ExpertFn, x: jax.Array, weights: jax.Array, params: Any, plan: Plan) -> Any:
    return _extra(expert_fn, x, weights, params, plan), (x, weights, params, plan)


def _extra_backward(expert_fn: ExpertFn, saved: Any, d_total: jax.Array) -> Any:
    x, weights, params, plan = saved
    top_k = weights.shape[1]
    d_y = d_total.astype(x.dtype)
    f32 = functools.partial(jax.tree.map, lambda a: jnp.zeros(a.shape, jnp.float32))

    def one(step: jax.Array, carry: Any) -> Any:
        d_x, d_weights, d_params = carry
        home, (index, sizes) = planning.home(plan, step), planning.away(plan, step)
        weight = weights.reshape(-1).at[home.assignment].get(mode="fill", fill_value=0)[:, None]  # [n, 1]
        sent = [Part(spread(x, home)), Part(spread(d_y, home)), Part(weight)]
        (rows, d_out, weight_away), _ = exchange(sent, plan, step=step)
        out, pull = jax.vjp(lambda r, p: expert_fn(r, index, sizes, None, p), rows.rows, params)
        d_weight = (out.astype(jnp.float32) * d_out.rows.astype(jnp.float32)).sum(1, keepdims=True)  # [C, 1]
        d_rows, d_more = pull((weight_away.rows * d_out.rows).astype(out.dtype))
        (back, back_weight), _ = exchange([Part(d_rows), Part(d_weight)], plan, reverse=True, step=step)
        ones = jnp.ones((x.shape[0], top_k), jnp.float32)
        d_x = d_x + collect(back.rows, ones, home)
        got = back_weight.rows[:, 0].at[home.slot].get(mode="fill", fill_value=0)  # [T, K]
        return d_x, d_weights + got, jax.tree.map(lambda a, b: a + b.astype(jnp.float32), d_params, d_more)

    start = (jnp.zeros(x.shape, jnp.float32), jnp.zeros(weights.shape, jnp.float32), f32(params))
    d_x, d_weights, d_params = jax.lax.fori_loop(1, plan.rounds, one, start)
    d_params = jax.tree.map(lambda g, p: g.astype(p.dtype), d_params, params)
    return d_x.astype(x.dtype), d_weights.astype(weights.dtype), d_params, None


_extra.defvjp(_extra_forward, _extra_backward)
