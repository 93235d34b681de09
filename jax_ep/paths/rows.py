"""Rows between token order and a home buffer, forward and backward by gathers alone, so that no order of adding is
left to chance.

Letters: T tokens, K top_k, H hidden, N = T*K assignments, n home rows, W what stands beside a row.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.plan import Home


def _take(a: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of `a`; zeros where the index is past its end."""
    return a.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def spread(x: jax.Array, home: Home) -> jax.Array:
    """x [T, H] -> [n, H]: each home row is its assignment's token; zeros where it has none."""
    top_k = home.slot.shape[1]
    return _take(x, home.assignment // top_k)  # [n, H]


def _spread_forward(x: jax.Array, home: Home) -> Any:
    return spread(x, home), home


def _spread_backward(home: Home, d_rows: jax.Array) -> Any:
    total = sum(_take(d_rows, home.slot[:, k]).astype(jnp.float32) for k in range(home.slot.shape[1]))  # [T, H]
    return jnp.asarray(total).astype(d_rows.dtype), None


spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def place(values: jax.Array, home: Home) -> jax.Array:
    """values [T, K, W] -> [n, W]: what stands beside each home row; zeros where it has no assignment."""
    return _take(values.reshape(-1, values.shape[2]), home.assignment)


def _place_forward(values: jax.Array, home: Home) -> Any:
    return place(values, home), home


def _place_backward(home: Home, d_rows: jax.Array) -> Any:
    if d_rows.dtype == jax.dtypes.float0:
        return None, None
    return _take(d_rows, home.slot), None  # [T, K, W]


place.defvjp(_place_forward, _place_backward)


@jax.custom_vjp
def collect(rows: jax.Array, weights: jax.Array, home: Home) -> jax.Array:
    """rows [n, H], weights [T, K] -> [T, H] float32: the weighted sum of each token's rows, those that stand in the
    buffer.
    """
    total = jnp.zeros((home.slot.shape[0], rows.shape[1]), jnp.float32)
    for k in range(home.slot.shape[1]):
        here = jnp.where(home.slot[:, k] < rows.shape[0], weights[:, k], 0)  # an infinite weight is for its own row
        total += here[:, None] * _take(rows, home.slot[:, k]).astype(jnp.float32)  # [T, H]
    return total


def _collect_forward(rows: jax.Array, weights: jax.Array, home: Home) -> Any:
    return collect(rows, weights, home), (rows, weights, home)


def _collect_backward(saved: Any, d_total: jax.Array) -> Any:
    rows, weights, home = saved
    top_k = home.slot.shape[1]
    weight = _take(weights.reshape(-1), home.assignment)  # [n]
    d_rows = weight[:, None] * _take(d_total, home.assignment // top_k)  # [n, H]
    d_weights = [(_take(rows, home.slot[:, k]).astype(jnp.float32) * d_total).sum(1) for k in range(top_k)]
    return d_rows.astype(rows.dtype), jnp.stack(d_weights, 1), None


collect.defvjp(_collect_forward, _collect_backward)
