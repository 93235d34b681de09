"""Dense: every expert on every token. No dispatch, no plan: the oracle.

Letters: T tokens, K top_k, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.config import MoEConfig
from jax_ep.experts import activation_fn


def combine_matrix(experts: jax.Array, weights: jax.Array, num_experts: int) -> jax.Array:
    """experts, weights [T, K] -> [T, E] float32; ids outside [0, E) weigh nothing."""
    hit = experts[..., None] == jnp.arange(num_experts, dtype=experts.dtype)[None, None]  # [T, K, E]
    return (hit * weights[..., None]).sum(1)


def run(x: jax.Array, experts: jax.Array, weights: jax.Array, params: Any, config: MoEConfig) -> jax.Array:
    """x [T, H] -> [T, H] float32: act(x W_gate, x W_up) W_down for all experts, weighted by the [T, E] matrix."""
    p = {name: w.astype(config.dtype) for name, w in params.items()}
    matrix = combine_matrix(experts, weights, p["up"].shape[0])  # [T, E]

    def product(name: str) -> jax.Array | None:
        if name not in p:
            return None
        out = jnp.einsum("th,ehi->tei", x, p[name])
        return out + p[f"{name}_bias"][None] if f"{name}_bias" in p else out

    up = product("up")
    assert up is not None
    hidden = activation_fn(config.activation)(product("gate"), up)  # [T, E, I]
    y = jnp.einsum("tei,eih->teh", hidden, p["down"])
    if "down_bias" in p:
        y += p["down_bias"][None]
    return jnp.einsum("teh,te->th", y.astype(jnp.float32), matrix, precision=jax.lax.Precision.HIGHEST)
