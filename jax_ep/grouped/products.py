"""What a grouped backend supplies, and the gathers, activations and scatters around it.

Letters: M rows, A assignments (positions), G groups (experts), H hidden, I intermediate;
K and N are the sides of a plain grouped product's weights.

The first sum(group_sizes) positions are filled. What inputs hold past them is never read into a result, and products
come back as exact zeros there.

JAX traces every platform's branch of a program, also where it is lowered for one alone. So the functions here are
jitted: each shape is traced once in a process, however many programs it appears in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from jax_ep.overlap import after

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


class Rows(NamedTuple):
    """One row a position.

    Attributes:
      values: [A, K], or [M, K] with `at`.
      at: [A] int32, the row of each position, or None: position n is row n.
    """

    values: jax.Array
    at: jax.Array | None = None

    @property
    def positions(self) -> int:
        return (self.values if self.at is None else self.at).shape[0]

    def gathered(self) -> jax.Array:
        """[A, K], of any content where nothing is filled."""
        if self.at is None:
            return self.values
        return self.values.at[self.at].get(mode="clip", wrap_negative_indices=False)  # [A, K]


class Products(Protocol):
    """The grouped products of a backend, accumulated in float32 and rounded once."""

    def hidden(
        self, x: Rows, experts: ExpertWeights, group_sizes: jax.Array, activation: Activation, save: bool
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """h = activation(x @ gate + gate_bias, x @ up + up_bias) [A, I] in x's dtype, gate and up rounded to it first.

        Returns:
          h, and with save the pre-activations gate (None without one) and up [A, I], else None for both.
        """
        ...

    def product(
        self,
        pairs: Sequence[tuple[Rows, jax.Array]],
        group_sizes: jax.Array,
        dtype: jax.typing.DTypeLike,
        transposed: bool = False,
    ) -> jax.Array:
        """The sum over the pairs of each group's rows [A, K] times its matrix of weights [G, K, N], as [A, N] in dtype.

        transposed: weights are [G, N, K], and their matrices are turned round.
        """
        ...

    def weight_gradient(self, x: Rows, d: Rows, group_sizes: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """x.T @ d over each group's positions, [G, K, N] in dtype; exact zeros for a group without any."""
        ...


_MaybeArray = TypeVar("_MaybeArray", jax.Array, jax.Array | None)


def to_float32(array: _MaybeArray) -> _MaybeArray:
    return None if array is None else array.astype(jnp.float32)


def filled(group_sizes: jax.Array, positions: int) -> jax.Array:
    """[A, 1] bool: positions that hold a row."""
    return (jnp.arange(positions, dtype=jnp.int32) < group_sizes.sum())[:, None]


def only(mask: jax.Array, values: jax.Array) -> jax.Array:
    """`values` where the mask holds, exact zeros elsewhere."""
    return jnp.where(mask, values, jnp.zeros((), values.dtype))


def group_of(group_sizes: jax.Array, positions: int) -> jax.Array:
    """[A]: the group of each position, G where nothing is filled."""
    ends = jnp.cumsum(group_sizes)  # [G]
    return jnp.searchsorted(ends, jnp.arange(positions), side="right", method="compare_all")


def biased(product: jax.Array, bias: jax.Array | None, group_sizes: jax.Array) -> jax.Array:
    """product [A, N] with the bias of the position's group, zeros where nothing is filled."""
    if bias is None:
        return product
    group = group_of(group_sizes, product.shape[0])
    return only((group < bias.shape[0])[:, None], product + to_float32(bias)[jnp.minimum(group, bias.shape[0] - 1)])


# ---------------------------------------------------------------------------------------------- plain grouped product


@functools.partial(jax.jit, static_argnums=0)
def matmul_forward(products: Products, rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """[M, K] x [G, K, N] -> [M, N]."""
    return products.product([(Rows(rows), weights)], group_sizes, rows.dtype)


@functools.partial(jax.jit, static_argnums=0)
def matmul_backward(
    products: Products, rows: jax.Array, weights: jax.Array, group_sizes: jax.Array, d_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of rows [M, K] and weights [G, K, N]."""
    d_rows = products.product([(Rows(d_out), weights)], group_sizes, rows.dtype, transposed=True)
    return d_rows, products.weight_gradient(Rows(rows), Rows(d_out), group_sizes, weights.dtype)


# --------------------------------------------------------------------------------------------------- fused expert MLP


def _added_up(
    values: jax.Array, index: jax.Array, mask: jax.Array, rows: int, unique: bool, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """values [A, H] added up in the rows [M, H] they belong to; written where every row has one position."""
    at = jnp.zeros((rows, values.shape[1]), dtype).at[jnp.where(mask[:, 0], index, rows)]
    write = at.set if unique else at.add
    return write(values.astype(dtype), mode="drop", wrap_negative_indices=False)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("activation", "save"))
def mlp_forward(
    products: Products,
    rows: jax.Array,
    index: jax.Array,
    group_sizes: jax.Array,
    weights: jax.Array | None,
    experts: ExpertWeights,
    *,
    activation: Activation,
    save: bool,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Output [M, H] and, with save, the pre-activations gate and up [A, I], else None for both."""
    mask = filled(group_sizes, index.shape[0])
    h, gate, up = products.hidden(Rows(rows, index), experts, group_sizes, activation, save)
    y = products.product([(Rows(h), experts.down)], group_sizes, jnp.float32)  # [A, H]
    y = biased(y, experts.down_bias, group_sizes)
    if weights is None:
        return _added_up(y, index, mask, rows.shape[0], True, rows.dtype), gate, up
    y = y * only(mask, weights[:, None])
    return _added_up(y, index, mask, rows.shape[0], False, jnp.float32), gate, up


@functools.partial(jax.jit, static_argnums=0, static_argnames=("activation", "delay_wgrad"))
def mlp_backward(
    products: Products,
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
    delay_wgrad: bool = False,
) -> tuple[jax.Array, jax.Array | None, ExpertWeights]:
    """Gradients of rows [M, H], weights [A] (None without) and experts.

    The factors of the positions go to h, so that the products read x and d_out where they lie, row by row. With
    delay_wgrad, what the gradients of the experts are computed from waits for those of the rows.
    """
    dtype = rows.dtype
    mask = filled(group_sizes, index.shape[0])
    x, d_y = Rows(rows, index), Rows(d_out.astype(dtype), index)
    d_h = products.product([(d_y, experts.down)], group_sizes, dtype, transposed=True)  # [A, I]
    gate = None if gate is None else only(mask, gate)
    h, pull = jax.vjp(activation, to_float32(gate), to_float32(only(mask, up)))
    d_h, h = to_float32(d_h), only(mask, h)
    factor = jnp.float32(1) if weights is None else only(mask, weights[:, None])  # [A, 1]
    d_weights = None
    if weights is not None:
        d_weights = (h * d_h).sum(1)
        if experts.down_bias is not None:
            along = products.product([(d_y, experts.down_bias[:, :, None])], group_sizes, jnp.float32)  # [A, 1]
            d_weights += along[:, 0]
    d_gate, d_up = pull(d_h * factor)
    d_up = d_up.astype(dtype)
    pairs = [(Rows(d_up), experts.up)]
    if d_gate is not None:
        d_gate = d_gate.astype(dtype)
        pairs.append((Rows(d_gate), experts.gate))
    d_x = products.product(pairs, group_sizes, jnp.float32, transposed=True)  # [A, H]
    unique = weights is None
    d_rows = _added_up(d_x, index, mask, rows.shape[0], unique, dtype if unique else jnp.float32).astype(dtype)
    h = (h * factor).astype(dtype)
    if delay_wgrad:
        d_rows, (x, d_y, h, d_gate, d_up) = after(d_rows, (x, d_y, h, d_gate, d_up))

    def gradient(x: Rows, d: Rows, like: jax.Array | None) -> jax.Array | None:
        return None if like is None else products.weight_gradient(x, d, group_sizes, like.dtype)

    def bias_gradient(d: Rows, factor: jax.Array, like: jax.Array | None) -> jax.Array | None:
        """Of [G, N]: the rows of each group added up, as a product with a column of factors."""
        if like is None:
            return None
        return products.weight_gradient(Rows(factor.astype(dtype)), d, group_sizes, like.dtype)[:, 0]

    ones = jnp.ones((index.shape[0], 1))
    d_experts = ExpertWeights(
        gate=gradient(x, Rows(d_gate), experts.gate),
        up=gradient(x, Rows(d_up), experts.up),
        down=gradient(Rows(h), d_y, experts.down),
        gate_bias=bias_gradient(Rows(d_gate), ones, experts.gate_bias),
        up_bias=bias_gradient(Rows(d_up), ones, experts.up_bias),
        down_bias=bias_gradient(d_y, factor * ones, experts.down_bias),
    )
    return d_rows, d_weights, d_experts
