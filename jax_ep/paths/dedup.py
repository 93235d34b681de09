"""Deduplicated rows: one a (token, destination rank). Its local experts and their weights travel beside it, and one sum
of its experts' outputs comes back.

Letters: T tokens, K top_k, R ranks, L local experts, J = min(K, R) destinations of a token, S = min(K, L) slots of a
row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Slots(NamedTuple):
    """What stands beside the rows of each token.

    Attributes:
      destination: [T, J] int32, the ranks that a token's experts live on; R past the last.
      experts: [T, J, S] int32, its experts there, as local ids; L past the last.
      weights: [T, J, S] float32, their weights.
    """

    destination: jax.Array
    experts: jax.Array
    weights: jax.Array


def slots(experts: jax.Array, weights: jax.Array, num_experts: int, ranks: int) -> Slots:
    """experts, weights [T, K] -> Slots. An expert that a token names several times has one slot, with the sum of the
    weights; ids outside [0, num_experts) have none.
    """
    tokens, top_k = experts.shape
    local = num_experts // ranks
    most, per_row = min(top_k, ranks), min(top_k, local)
    known = (experts >= 0) & (experts < num_experts)
    to = jnp.where(known, experts // local, ranks)
    k = jnp.arange(top_k)[None]
    same_rank = to[:, :, None] == to[:, None, :]  # [T, K, K]
    rank_first = jnp.argmax(same_rank, 2)  # [T, K], the first choice that goes to the same rank
    expert_first = jnp.argmax(experts[:, :, None] == experts[:, None, :], 2)
    number = jnp.cumsum((rank_first == k) & known, 1) - 1  # of distinct ranks
    row = jnp.take_along_axis(number, rank_first, 1)  # [T, K]
    earlier = same_rank & (expert_first == k)[:, None] & (k[:, None] < k[:, :, None])
    slot = jnp.take_along_axis(earlier.sum(2), expert_first, 1)  # [T, K], distinct experts of the rank before it
    token = jnp.arange(tokens)[:, None]
    at = (token, jnp.where(known, row, most), slot)
    return Slots(
        jnp.full((tokens, most), ranks, jnp.int32).at[at[:2]].set(to.astype(jnp.int32), mode="drop"),
        jnp.full((tokens, most, per_row), local, jnp.int32)
        .at[at]
        .set((experts % local).astype(jnp.int32), mode="drop"),
        jnp.zeros((tokens, most, per_row), jnp.float32).at[at].add(weights, mode="drop"),
    )
