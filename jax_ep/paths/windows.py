"""Experts over windows of positions: a routing that fills more than one takes a loop, not more memory.

Letters: M rows, H hidden, A positions, P positions of a window, L local experts.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.overlap import after
from jax_ep.paths.common import Dispatched, ExpertFn, add, as_gradients, no_sums
from jax_ep.plan import before


def run_experts(expert_fn: ExpertFn, dispatched: Dispatched, params: Any, loops: bool = True) -> jax.Array:
    """Dispatched rows through their experts, [M, H] as expert_fn gives them.

    Args:
      expert_fn: (rows, index, group_sizes, weights, params) -> [M, H], as `grouped.expert_mlp`.
      dispatched: from `dispatch`.
      params: of the experts held here.
      loops: False where no loop may turn as often as the data say (see `grouped.expert_mlp`): all positions at once.
    """
    d, window = dispatched, dispatched.window
    if window is None or window >= d.index.shape[0] or not loops:
        return expert_fn(d.rows, d.index, d.group_sizes, d.weights, params)
    assert d.weights is not None, "what is summed up over windows is weighted"
    first = expert_fn(d.rows, *_window(d.index, d.group_sizes, d.weights, window, 0), params)
    # In turn, so that no scheduler takes a loop that does not turn for work to put beside an exchange.
    first, rows = after(first, d.rows)
    return first + _later(expert_fn, window, rows, d.index, d.group_sizes, d.weights, params)


def _window(
    index: jax.Array, group_sizes: jax.Array, weights: jax.Array, window: int, step: jax.Array | int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The index [P], group sizes [L] and weights [P] of positions step*P .. (step+1)*P."""
    low = step * window
    begin = before(group_sizes) - low
    sizes = jnp.clip(begin + group_sizes, 0, window) - jnp.clip(begin, 0, window)
    spare = -index.shape[0] % window
    cut = lambda a: jax.lax.dynamic_slice_in_dim(jnp.pad(a, (0, spare)), low, window)
    return cut(index), sizes, cut(weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _later(
    expert_fn: ExpertFn,
    window: int,
    rows: jax.Array,
    index: jax.Array,
    group_sizes: jax.Array,
    weights: jax.Array,
    params: Any,
) -> jax.Array:
    """What the windows after the first add, [M, H] float32. Nothing of them is kept; the backward recomputes."""

    def one(step: jax.Array, total: jax.Array) -> jax.Array:
        return total + expert_fn(rows, *_window(index, group_sizes, weights, window, step), params)

    count = -(-group_sizes.sum() // window)
    return jax.lax.fori_loop(1, count, one, jnp.zeros(rows.shape, jnp.float32))


def _later_forward(expert_fn: ExpertFn, window: int, *args: Any) -> Any:
    return _later(expert_fn, window, *args), args


def _later_backward(expert_fn: ExpertFn, window: int, saved: Any, d_total: jax.Array) -> Any:
    rows, index, group_sizes, weights, params = saved
    count = -(-group_sizes.sum() // window)
    spare = -weights.shape[0] % window

    def one(step: jax.Array, carry: Any) -> Any:
        sums, d_weights = carry
        at, sizes, weight = _window(index, group_sizes, weights, window, step)
        _, pull = jax.vjp(lambda r, w, p: expert_fn(r, at, sizes, w, p), rows, weight, params)
        d_rows, more, d_params = pull(d_total)
        d_weights = jax.lax.dynamic_update_slice_in_dim(d_weights, more, step * window, 0)
        return add(sums, (d_rows, d_params)), d_weights

    start = (no_sums((rows, params)), jnp.zeros(weights.shape[0] + spare, jnp.float32))
    sums, d_weights = jax.lax.fori_loop(1, count, one, start)
    d_rows, d_params = as_gradients(sums, (rows, params))
    return d_rows, None, None, d_weights[: weights.shape[0]], d_params


_later.defvjp(_later_forward, _later_backward)
