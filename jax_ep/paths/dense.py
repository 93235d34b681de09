"""Dense: every expert on every token. No dispatch, no plan: the oracle, and the baseline of benchmarks.

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
    """x [T, H] -> [T, H] float32: the experts' outputs, weighted by the [T, E] matrix.

    One expert after the other: on CPU products over all experts at once transpose the weights first, and take longer.
    """
    matrices = {name: w.astype(config.dtype) for name, w in params.items()}
    by_expert = combine_matrix(experts, weights, matrices["up"].shape[0]).T  # [E, T]
    activation = activation_fn(config.activation)

    def one(y: jax.Array, expert: tuple[dict[str, jax.Array], jax.Array]) -> tuple[jax.Array, None]:
        p, weight = expert

        def product(rows: jax.Array, name: str) -> jax.Array:
            out = rows @ p[name]
            return out + p[f"{name}_bias"][None] if f"{name}_bias" in p else out

        hidden = activation(product(x, "gate") if "gate" in p else None, product(x, "up"))  # [T, I]
        return y + weight[:, None] * product(hidden, "down").astype(jnp.float32), None

    return jax.lax.scan(one, jnp.zeros(x.shape, jnp.float32), (matrices, by_expert))[0]
