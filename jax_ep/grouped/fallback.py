"""Grouped products from two primitives, with the gathers, masks, activations and scatters around them.

Letters: M rows, A assignments (positions), G groups (experts), H hidden, I intermediate;
K and N are the sides of a plain grouped product's weights.

Runs on every platform. A backend with kernels of its own supplies another `Products`; what is around them stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Activation = Callable[[jax.Array | None, jax.Array], jax.Array]


class ExpertWeights(NamedTuple):
    """The matrices of G experts, and their biases where they have them.

    Attributes:
      gate: [G, H, I]; None where the activation has no gate.
      up: [G, H, I].
      down: [G, I, H].
      gate_bias, up_bias: [G, I] or None.
      down_bias: [G, H] or None.
    """

    gate: jax.Array | None
    up: jax.Array
    down: jax.Array
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


class Products(NamedTuple):
    """The two grouped products of a backend. Both accumulate in, and return, float32.

    Attributes:
      gmm: (rows [A, K], weights [G, K, N], group_sizes [G]) -> [A, N], each group's rows times its matrix. Rows past
        the sum of the sizes are zeros on the way in and may be anything on the way out.
      tgmm: (rows [A, K], d_rows [A, N], group_sizes [G]) -> [G, K, N], rows.T @ d_rows of each group; exact zeros for a
        group without rows. Rows past the sum are zeros in both.
    """

    gmm: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    tgmm: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _ragged_gmm(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot(rows, weights, group_sizes, preferred_element_type=jnp.float32)


def _ragged_tgmm(rows: jax.Array, d_rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return lax.ragged_dot_general(rows, d_rows, group_sizes, dimensions, preferred_element_type=jnp.float32)


RAGGED_DOT = Products(_ragged_gmm, _ragged_tgmm)

_MaybeArray = TypeVar("_MaybeArray", jax.Array, jax.Array | None)


def to_float32(array: _MaybeArray) -> _MaybeArray:
    return None if array is None else array.astype(jnp.float32)


def _present(group_sizes: jax.Array, positions: int) -> jax.Array:
    """[A, 1] bool: positions that hold a row."""
    return (jnp.arange(positions, dtype=jnp.int32) < group_sizes.sum())[:, None]


def _only(present: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.where(present, values, jnp.zeros((), values.dtype))


def _transposed(weights: jax.Array) -> jax.Array:
    return jnp.swapaxes(weights, 1, 2)


# ---------------------------------------------------------------------------------------------- plain grouped product


def matmul_forward(
    rows: jax.Array, weights: jax.Array, group_sizes: jax.Array, products: Products = RAGGED_DOT
) -> jax.Array:
    """[M, K] x [G, K, N] -> [M, N]."""
    present = _present(group_sizes, rows.shape[0])
    return _only(present, products.gmm(_only(present, rows), weights, group_sizes)).astype(rows.dtype)


def matmul_backward(
    rows: jax.Array, weights: jax.Array, group_sizes: jax.Array, d_out: jax.Array, products: Products = RAGGED_DOT
) -> tuple[jax.Array, jax.Array]:
    """Gradients of rows [M, K] and weights [G, K, N]."""
    present = _present(group_sizes, rows.shape[0])
    d = _only(present, d_out)
    d_rows = _only(present, products.gmm(d, _transposed(weights), group_sizes))
    d_weights = products.tgmm(_only(present, rows), d, group_sizes)
    return d_rows.astype(rows.dtype), d_weights.astype(weights.dtype)


# --------------------------------------------------------------------------------------------------- fused expert MLP


class _Positions(NamedTuple):
    """What the forward and the backward both need to know of the positions."""

    present: jax.Array  # [A, 1] bool
    index: jax.Array  # [A], the number of rows where nothing is present
    group: jax.Array  # [A], 0 where nothing is present

    @staticmethod
    def of(index: jax.Array, group_sizes: jax.Array, rows: int) -> _Positions:
        present = _present(group_sizes, index.shape[0])
        ends = jnp.cumsum(group_sizes)  # [G]
        group = jnp.searchsorted(ends, jnp.arange(index.shape[0]), side="right", method="compare_all")  # [A]
        return _Positions(present, jnp.where(present[:, 0], index, rows), jnp.where(present[:, 0], group, 0))

    def gather(self, rows: jax.Array) -> jax.Array:
        """[M, H] -> [A, H], zeros where nothing is present."""
        return rows.at[self.index].get(mode="fill", fill_value=0, wrap_negative_indices=False)  # [A, H]

    def scatter(self, values: jax.Array, rows: int, unique: bool, dtype: jax.typing.DTypeLike) -> jax.Array:
        """[A, H] -> [M, H], added up; written where every row has one position."""
        out = jnp.zeros((rows, values.shape[1]), dtype).at[self.index]
        if unique:
            return out.set(values.astype(dtype), mode="drop", wrap_negative_indices=False)
        return out.add(values.astype(dtype), mode="drop", wrap_negative_indices=False)

    def biased(self, product: jax.Array, bias: jax.Array | None) -> jax.Array:
        """product [A, N], zeros where nothing is present, else with the bias of the position's expert."""
        return _only(self.present, product if bias is None else product + to_float32(bias)[self.group])  # [A, N]

    def per_group(self, values: jax.Array, bias: jax.Array | None) -> jax.Array | None:
        """values [A, N] summed over each expert's positions, the gradient of a bias [G, N]. A product, not atomics."""
        if bias is None:
            return None
        member = (self.group[:, None] == jnp.arange(bias.shape[0])[None]) & self.present  # [A, G]
        return jnp.einsum("ag,an->gn", member.astype(values.dtype), values).astype(bias.dtype)


def mlp_forward(
    rows: jax.Array,
    index: jax.Array,
    group_sizes: jax.Array,
    weights: jax.Array | None,
    experts: ExpertWeights,
    *,
    activation: Activation,
    products: Products = RAGGED_DOT,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Output [M, H] and the pre-activations gate and up [A, I]."""
    dtype = rows.dtype
    at = _Positions.of(index, group_sizes, rows.shape[0])
    x = at.gather(rows)  # [A, H]
    gate = None
    if experts.gate is not None:
        gate = at.biased(products.gmm(x, experts.gate, group_sizes), experts.gate_bias).astype(dtype)  # [A, I]
    up = at.biased(products.gmm(x, experts.up, group_sizes), experts.up_bias).astype(dtype)  # [A, I]
    h = _only(at.present, activation(to_float32(gate), to_float32(up)).astype(dtype))
    y = at.biased(products.gmm(h, experts.down, group_sizes), experts.down_bias)  # [A, H]
    if weights is None:
        return at.scatter(y, rows.shape[0], True, dtype), gate, up
    y = y * _only(at.present, weights[:, None])
    return at.scatter(y, rows.shape[0], False, jnp.float32), gate, up


def mlp_backward(
    rows: jax.Array,
    index: jax.Array,
    group_sizes: jax.Array,
    weights: jax.Array | None,
    experts: ExpertWeights,
    gate: jax.Array | None,
    up: jax.Array,
    d_out: jax.Array,
    *,
    activation: Activation,
    products: Products = RAGGED_DOT,
) -> tuple[jax.Array, jax.Array | None, ExpertWeights]:
    """Gradients of rows [M, H], weights [A] (None without) and experts."""
    dtype = rows.dtype
    at = _Positions.of(index, group_sizes, rows.shape[0])
    x, d_y = at.gather(rows), at.gather(d_out)  # [A, H]
    d_h = _only(at.present, products.gmm(d_y.astype(dtype), _transposed(experts.down), group_sizes))  # [A, I]
    gate = None if gate is None else _only(at.present, gate)
    h, pull = jax.vjp(activation, to_float32(gate), to_float32(_only(at.present, up)))
    h = _only(at.present, h)
    d_weights = None
    if weights is not None:
        d_weights = (h * d_h).sum(1)
        if experts.down_bias is not None:
            d_weights += (to_float32(d_y) * to_float32(experts.down_bias)[at.group]).sum(1)
        factor = _only(at.present, weights[:, None])  # [A, 1]
        d_h, d_y = d_h * factor, to_float32(d_y) * factor
    d_gate, d_up = pull(d_h)

    def weight_gradient(left: jax.Array, right: jax.Array, like: jax.Array) -> jax.Array:
        return products.tgmm(left.astype(dtype), right.astype(dtype), group_sizes).astype(like.dtype)

    d_x = products.gmm(d_up.astype(dtype), _transposed(experts.up), group_sizes)  # [A, H]
    if experts.gate is not None:
        d_x += products.gmm(d_gate.astype(dtype), _transposed(experts.gate), group_sizes)
    d_experts = ExpertWeights(
        gate=None if experts.gate is None else weight_gradient(x, d_gate, experts.gate),
        up=weight_gradient(x, d_up, experts.up),
        down=weight_gradient(h, d_y, experts.down),
        gate_bias=at.per_group(d_gate, experts.gate_bias),
        up_bias=at.per_group(d_up, experts.up_bias),
        down_bias=at.per_group(to_float32(d_y), experts.down_bias),
    )
    unique = weights is None
    d_rows = at.scatter(d_x, rows.shape[0], unique, dtype if unique else jnp.float32).astype(dtype)
    return d_rows, d_weights, d_experts
