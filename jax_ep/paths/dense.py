"""Dense: every expert on every token. No dispatch, no plan: the oracle, and the baseline of benchmarks.

Letters: T tokens, K top_k, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.config import MoEConfig
from jax_ep.experts import activation_fn


def combine_matrix(experts: jax.Array, weights: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """experts, weights [T, K] -> (weights [T, E] float32, chosen [T, E] bool); ids outside [0, E) weigh nothing."""
    hit = experts[..., None] == jnp.arange(num_experts, dtype=experts.dtype)[None, None]  # [T, K, E]
    return jnp.where(hit, weights[..., None], 0).sum(1), hit.any(1)


def run(x: jax.Array, experts: jax.Array, weights: jax.Array, params: Any, config: MoEConfig) -> jax.Array:
    """x [T, H] -> [T, H] float32: the experts' outputs, weighted by the [T, E] matrix.

    One expert after the other: on CPU products over all experts at once transpose the weights first, and take longer.
    """
    matrices = {name: w.astype(config.dtype) for name, w in params.items()}
    weight, chosen = combine_matrix(experts, weights, matrices["up"].shape[0])
    activation = activation_fn(config.activation)

    def one(y: jax.Array, expert: tuple[dict[str, jax.Array], jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        p, weight, chosen = expert
        mine = jnp.where(chosen[:, None], x, 0)  # what overflows in an expert that nobody asked adds 0, not NaN

        def product(rows: jax.Array, name: str) -> jax.Array:
            out = rows @ p[name]
            return out + p[f"{name}_bias"][None] if f"{name}_bias" in p else out

        hidden = activation(product(mine, "gate") if "gate" in p else None, product(mine, "up"))  # [T, I]
        out = product(hidden, "down").astype(jnp.float32)
        return y + jnp.where(chosen[:, None], weight[:, None] * out, 0), None

    return jax.lax.scan(one, jnp.zeros(x.shape, jnp.float32), (matrices, weight.T, chosen.T))[0]
