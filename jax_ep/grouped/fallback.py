"""Grouped products by a ragged_dot: on every platform, and partitioned by the compiler where it has to be.

Letters as in `products`. XLA lowers jax.lax.ragged_dot to masked dense products on CPU and GPU: G times the FLOPs.
tokamax, an optional package, has kernels under the same signature, and picks by the device that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.config import refuse
from jax_ep.grouped.products import Activation, ExpertWeights, Rows, biased, filled, only, to_float32


def _numbers(rows: int, weights: int, groups: list[int]) -> lax.RaggedDotDimensionNumbers:
    return lax.RaggedDotDimensionNumbers((((rows,), (weights,)), ((), ())), [0], groups)


_FORWARD, _TRANSPOSED, _WEIGHT_GRADIENT = _numbers(1, 1, [0]), _numbers(1, 2, [0]), _numbers(0, 0, [])


def _filled_rows(x: Rows, group_sizes: jax.Array) -> jax.Array:
    """[A, K] with zeros where nothing is filled: masked products would make NaN of NaN there."""
    return only(filled(group_sizes, x.positions), x.gathered())


class RaggedDot(NamedTuple):
    """The `Products` of this backend.

    Attributes:
      general: has the signature of jax.lax.ragged_dot_general.
    """

    general: Callable[..., jax.Array]

    def product(
        self,
        pairs: Sequence[tuple[Rows, jax.Array]],
        group_sizes: jax.Array,
        dtype: jax.typing.DTypeLike,
        transposed: bool = False,
    ) -> jax.Array:
        """`Products.product`."""
        numbers = _TRANSPOSED if transposed else _FORWARD
        total = jnp.float32(0)
        for x, weights in pairs:
            total += self._dot(_filled_rows(x, group_sizes), weights, group_sizes, numbers)
        return only(filled(group_sizes, pairs[0][0].positions), total).astype(dtype)

    def hidden(
        self, x: Rows, experts: ExpertWeights, group_sizes: jax.Array, activation: Activation, save: bool
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """`Products.hidden`."""
        dtype = x.values.dtype
        gate = None
        if experts.gate is not None:
            gate = self.product([(x, experts.gate)], group_sizes, jnp.float32)
            gate = biased(gate, experts.gate_bias, group_sizes).astype(dtype)
        up = self.product([(x, experts.up)], group_sizes, jnp.float32)
        up = biased(up, experts.up_bias, group_sizes).astype(dtype)
        h = activation(to_float32(gate), to_float32(up)).astype(dtype)
        h = only(filled(group_sizes, x.positions), h)
        return (h, gate, up) if save else (h, None, None)

    def weight_gradient(self, x: Rows, d: Rows, group_sizes: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """`Products.weight_gradient`."""
        left, right = _filled_rows(x, group_sizes), _filled_rows(d, group_sizes)
        return self._dot(left, right, group_sizes, _WEIGHT_GRADIENT).astype(dtype)

    def _dot(
        self, left: jax.Array, right: jax.Array, group_sizes: jax.Array, numbers: lax.RaggedDotDimensionNumbers
    ) -> jax.Array:
        return self.general(left, right, group_sizes, numbers, preferred_element_type=jnp.float32)


RAGGED_DOT = RaggedDot(lax.ragged_dot_general)


def tokamax() -> RaggedDot:
    """Raises ConfigError where the package is not installed."""
    try:
        import tokamax as package
    except ImportError as error:
        refuse("backend", "tokamax", f"is not here ({error}); pip install tokamax, Python 3.12 or newer", "auto")
    return RaggedDot(package.ragged_dot_general)
