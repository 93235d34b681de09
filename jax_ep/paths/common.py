"""What every path hands to the experts, and back.

Letters: T tokens, K top_k, H hidden, M rows, A places for assignments (positions), L local experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep import plan as planning
from jax_ep.plan import Plan

# (rows [M, H], index [A], group_sizes [L], weights [A] | None, params) -> [M, H]
ExpertFn = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None, Any], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dispatched:
    """Rows beside their experts.

    Attributes:
      rows: [M, H] what arrived; rows that nobody sent are zeros.
      index: [A] int32, the row of each assignment, sorted by local expert.
      group_sizes: [L] int32, assignments of each local expert; what is past their sum in `index` means nothing.
      weights: [A] float32 where the experts' rank does the weighting, else None.
      plan: the Plan, complete.
      window: static: positions to take at a time, so that temporaries stay bounded; None: all.
    """

    rows: jax.Array
    index: jax.Array
    group_sizes: jax.Array
    weights: jax.Array | None
    plan: Plan
    window: int | None = dataclasses.field(default=None, metadata={"static": True})

    def with_rows(self, rows: jax.Array) -> Dispatched:
        return dataclasses.replace(self, rows=rows)


def no_sums(params: Any) -> Any:
    """Float32 zeros in the shapes of `params`: where a loop's gradients are added up."""
    return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)


def add(sums: Any, more: Any) -> Any:
    """Sums, with a step's gradients added in float32."""
    return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), sums, more)


def as_gradients(sums: Any, params: Any) -> Any:
    """Sums in the dtypes of `params`."""
    return jax.tree.map(lambda a, p: a.astype(p.dtype), sums, params)


def grouped(
    rows: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    plan: Plan,
    num_experts: int,
    window: int | None = None,
) -> Dispatched:
    """Dispatched for rows [M, H] that are here already: experts [M, K] local ids, weights [M, K] applied here."""
    order, sizes = planning.sort_by_expert(experts.reshape(-1), num_experts)
    sorted_weights = weights.reshape(-1)[order]  # [M * K]
    return Dispatched(rows, order // experts.shape[1], sizes, sorted_weights, plan, window)
