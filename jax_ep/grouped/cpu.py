"""Grouped products on CPU: work in proportion to the rows that are there, at the speed of dense products.

Letters: M rows, A assignments (positions), G groups (experts), H hidden, I intermediate, n rows of one loop body;
K and N are the sides of a plain grouped product's weights.

A product needs a static number of rows, and a group's size is known only at run time. So every group runs in the
smallest step of a ladder of row counts that holds it: one while loop a step, over the groups that round up to it.
Its body reads n positions from the group's first on and masks those that are not the group's. Groups above the ladder
run in pieces. Loops that no group needs cost nothing. (lax.switch over the steps would copy every buffer its branches
write on older XLA.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.grouped.products import Activation, ExpertWeights, to_float32

# Up to these many floating-point operations in padded rows, a loop body more costs more to compile than it saves.
_ONE_STEP_FLOPS = 1e8
_FEW_STEPS_FLOPS = 4e8
_MULTIPLE = 8
# In units of the balanced group. Steps below _FINE_FROM are few: what rounding up adds to small groups is small.
_SMALL_STEPS = (0.125, 0.25, 0.45)
_FINE_FROM, _FINE_TO = 0.7, 1.35
# Ratios of neighbouring fine steps: smaller ones waste fewer rows and take longer to compile, bigger bodies more so.
_PLAIN_FINE, _MLP_FINE = 1.06, 1.12


class Ladder(NamedTuple):
    """The row counts that loop bodies exist for.

    Attributes:
      steps: rising; a group runs in the smallest one that holds it.
      piece: a group above the last step runs in pieces of this many rows; None where there is no such group.
    """

    steps: tuple[int, ...]
    piece: int | None


def ladder(positions: int, groups: int, expected: int, row_flops: float, fine: float) -> Ladder:
    """Fine steps around the balanced expected/groups, coarse ones below, few or one where rounding up is cheap.

    Args:
      positions: A, the most rows one group can have.
      groups: G.
      expected: rows expected in all groups together.
      row_flops: floating-point operations one row costs.
      fine: the ratio of neighbouring fine steps.
    """
    if groups * positions * row_flops <= _ONE_STEP_FLOPS:
        return Ladder((positions,), None)
    mean = min(expected, positions) / groups

    def rounded(count: float) -> int:
        return min(positions, math.ceil(count / _MULTIPLE) * _MULTIPLE)

    count = math.ceil(math.log(_FINE_TO / _FINE_FROM, fine))
    wanted = [*_SMALL_STEPS, *(_FINE_FROM * fine**i for i in range(count + 1))]
    if positions * row_flops <= _FEW_STEPS_FLOPS:
        wanted = wanted[-1:]
    steps = sorted({rounded(step * mean) for step in wanted})
    return Ladder(tuple(steps), None if steps[-1] == positions else rounded(_FINE_FROM * mean))


class _Window(NamedTuple):
    """n consecutive positions, of which some are one group's."""

    start: jax.Array  # []
    mask: jax.Array  # [n, 1] bool

    def read(self, array: jax.Array) -> jax.Array:
        """[A, ...] -> [n, ...], other groups' rows included."""
        return lax.dynamic_slice_in_dim(array, self.start, self.mask.shape[0])

    def write(self, array: jax.Array, values: jax.Array) -> jax.Array:
        """`array` with the group's rows replaced."""
        mask = self.mask.reshape(self.mask.shape[:1] + (1,) * (array.ndim - 1))
        kept = jnp.where(mask, values.astype(array.dtype), self.read(array))
        return lax.dynamic_update_slice_in_dim(array, kept, self.start, 0)

    def only(self, values: jax.Array) -> jax.Array:
        """[n, width] with zeros where the row is not the group's."""
        return jnp.where(self.mask, values, jnp.zeros((), values.dtype))


_Carry = TypeVar("_Carry")
# (window, group, carry) -> carry, and a tree of the group's sums over its positions, float32.
_Body = Callable[[_Window, jax.Array, _Carry], tuple[_Carry, Any]]


def _each_group(
    group_sizes: jax.Array, rungs: Ladder, positions: int, carry: _Carry, sums: Any, body: _Body[_Carry]
) -> tuple[_Carry, Any]:
    """Runs `body` over the positions of every group.

    Args:
      group_sizes: [G].
      rungs: how many rows the bodies take.
      positions: A.
      carry: what the bodies hand on.
      sums: a tree of arrays [G, ...] of any content, in the dtypes that the sums are to have.
      body: the body; a group without rows may go through it with nothing in its mask, or not at all.

    Returns:
      The last carry, and `sums` with every group's sums, zeros where a group has no rows.
    """
    starts = jnp.cumsum(group_sizes) - group_sizes  # [G]

    def run(n: int, group: jax.Array, first: jax.Array, size: jax.Array, carry: _Carry) -> tuple[_Carry, Any]:
        start = jnp.minimum(first, positions - n)
        offset = start + jnp.arange(n, dtype=jnp.int32) - first  # [n]
        return body(_Window(start, ((offset >= 0) & (offset < size))[:, None]), group, carry)

    def whole(n: int, group: jax.Array, state: tuple[_Carry, Any]) -> tuple[_Carry, Any]:
        carry, added = run(n, group, starts[group], group_sizes[group], state[0])
        return carry, _put(state[1], added, group)

    def in_pieces(n: int, group: jax.Array, state: tuple[_Carry, Any]) -> tuple[_Carry, Any]:
        first, size = starts[group], group_sizes[group]

        def one(piece: jax.Array, inner: tuple[_Carry, Any]) -> tuple[_Carry, Any]:
            done = piece * n
            carry, added = run(n, group, first + done, jnp.minimum(size - done, n), inner[0])
            return carry, jax.tree.map(jnp.add, inner[1], added)

        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape[1:], jnp.float32), state[1])
        carry, added = lax.fori_loop(0, (size + n - 1) // n, one, (state[0], zeros))
        return carry, _put(state[1], added, group)

    def empty(group: jax.Array, state: tuple[_Carry, Any]) -> tuple[_Carry, Any]:
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape[1:], jnp.float32), state[1])
        return state[0], _put(state[1], zeros, group)

    state = (carry, sums)
    if len(rungs.steps) == 1 and rungs.piece is None:
        return lax.fori_loop(0, group_sizes.shape[0], lambda g, s: whole(positions, g, s), state)
    # The loop a group runs in: 0 without rows, else 1 + the number of steps that are too small.
    loop = (group_sizes > 0).astype(jnp.int32)
    for n in rungs.steps:
        loop += group_sizes > n
    bodies = [empty, *(functools.partial(whole, n) for n in rungs.steps)]
    if rungs.piece is not None:
        bodies.append(functools.partial(in_pieces, rungs.piece))
    order = jnp.argsort(loop).astype(jnp.int32)  # [G]
    ends = (loop[None, :] <= jnp.arange(len(bodies))[:, None]).sum(1, dtype=jnp.int32)  # [loops]
    begin = jnp.zeros((), jnp.int32)
    for j, one in enumerate(bodies):
        if j or jax.tree.leaves(sums):
            state = lax.fori_loop(begin, ends[j], lambda i, s, one=one: one(order[i], s), state)
        begin = ends[j]
    return state


def _put(slots: Any, values: Any, group: jax.Array) -> Any:
    """The tree `slots` [G, ...] with one group's values."""
    return jax.tree.map(lambda s, v: lax.dynamic_update_index_in_dim(s, v.astype(s.dtype), group, 0), slots, values)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """[n, a] @ [a, b], float32."""
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _dot_transposed(a: jax.Array, b: jax.Array) -> jax.Array:
    """[n, b] @ [a, b].T, float32."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _transposed(a: jax.Array) -> jax.Array:
    """a.T behind a barrier that keeps the transpose out of the product that takes it, whose fast kernel needs that."""
    return lax.optimization_barrier(a.T)


def _of(weights: jax.Array, group: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(weights, group, 0, keepdims=False)


_Like = TypeVar("_Like")


def _unwritten(like: _Like) -> _Like:
    """The tree with arrays of any content: every element that is read is written first."""
    return jax.tree.map(lambda a: lax.empty(a.shape, a.dtype), like)


# ---------------------------------------------------------------------------------------------- plain grouped product


def matmul_forward(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """[M, K] x [G, K, N] -> [M, N]."""
    count, (groups, k, n) = rows.shape[0], weights.shape
    rungs = ladder(count, groups, count, 2.0 * k * n, _PLAIN_FINE)

    def body(window: _Window, group: jax.Array, out: jax.Array) -> tuple[jax.Array, None]:
        return window.write(out, _dot(window.read(rows), _of(weights, group))), None

    return _each_group(group_sizes, rungs, count, jnp.zeros((count, n), rows.dtype), None, body)[0]


def matmul_backward(
    rows: jax.Array, weights: jax.Array, group_sizes: jax.Array, d_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of rows [M, K] and weights [G, K, N]."""
    count, (groups, k, n) = rows.shape[0], weights.shape
    rungs = ladder(count, groups, count, 4.0 * k * n, _PLAIN_FINE)

    def body(window: _Window, group: jax.Array, d_rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, d = window.only(window.read(rows)), window.only(window.read(d_out))  # [n, K], [n, N]
        return window.write(d_rows, _dot_transposed(d, _of(weights, group))), _dot(_transposed(x), d)

    return _each_group(group_sizes, rungs, count, jnp.zeros_like(rows), _unwritten(weights), body)


# --------------------------------------------------------------------------------------------------- fused expert MLP


def _mlp_ladder(index: jax.Array, experts: ExpertWeights, expected_rows: int | None, products: int) -> Ladder:
    groups, hidden, intermediate = experts.up.shape
    positions = index.shape[0]
    matrices = 2 if experts.gate is None else 3
    row_flops = 2.0 * products * matrices * hidden * intermediate
    return ladder(positions, groups, positions if expected_rows is None else expected_rows, row_flops, _MLP_FINE)


def _gather(rows: jax.Array, index: jax.Array, window: _Window) -> jax.Array:
    """[n, H]: rows[index] where the position is the group's, zeros elsewhere."""
    inside = jnp.where(window.mask[:, 0], index, 0)
    return window.only(rows.at[inside].get(mode="promise_in_bounds", wrap_negative_indices=False))  # [n, H]


def _scatter(out: jax.Array, index: jax.Array, window: _Window, values: jax.Array, unique: bool) -> jax.Array:
    """`out` with values [n, H] added at the group's rows, or written where every row has one position."""
    target = jnp.where(window.mask[:, 0], index, out.shape[0])
    at = out.at[target]
    if unique:
        return at.set(values.astype(out.dtype), mode="drop", wrap_negative_indices=False)
    return at.add(values.astype(out.dtype), mode="drop", wrap_negative_indices=False)


def _with_bias(product: jax.Array, bias: jax.Array | None, group: jax.Array) -> jax.Array:
    return product if bias is None else product + _of(bias, group).astype(jnp.float32)[None]


def mlp_forward(
    rows: jax.Array,
    index: jax.Array,
    group_sizes: jax.Array,
    weights: jax.Array | None,
    experts: ExpertWeights,
    *,
    activation: Activation,
    expected_rows: int | None,
    save: bool,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Output [M, H] and, with `save`, the pre-activations gate and up [A, I]; positions past the sum are anything."""
    (count, hidden), positions, dtype = rows.shape, index.shape[0], rows.dtype
    rungs = _mlp_ladder(index, experts, expected_rows, 1)
    out_dtype = dtype if weights is None else jnp.float32

    def body(window: _Window, group: jax.Array, carry: Any) -> Any:
        out, gates, ups = carry
        at = window.read(index)  # [n]
        x = _gather(rows, at, window)  # [n, H]
        gate = None
        if experts.gate is not None:
            gate = _with_bias(_dot(x, _of(experts.gate, group)), experts.gate_bias, group).astype(dtype)  # [n, I]
        up = _with_bias(_dot(x, _of(experts.up, group)), experts.up_bias, group).astype(dtype)  # [n, I]
        h = activation(to_float32(gate), to_float32(up)).astype(dtype)
        y = _with_bias(_dot(h, _of(experts.down, group)), experts.down_bias, group)  # [n, H]
        if weights is not None:
            y = y * window.only(window.read(weights)[:, None])
        out = _scatter(out, at, window, y, unique=weights is None)
        if save:
            gates = None if gate is None else window.write(gates, gate)
            ups = window.write(ups, up)
        return (out, gates, ups), None

    saved = jax.ShapeDtypeStruct((positions, experts.up.shape[2]), dtype) if save else None
    gates, ups = _unwritten((None if experts.gate is None else saved, saved))
    carry = (jnp.zeros((count, hidden), out_dtype), gates, ups)
    return _each_group(group_sizes, rungs, positions, carry, None, body)[0]


_Gradients = tuple[jax.Array, jax.Array | None]


def mlp_backward(
    rows: jax.Array,
    index: jax.Array,
    group_sizes: jax.Array,
    weights: jax.Array | None,
    experts: ExpertWeights,
    gates: jax.Array | None,
    ups: jax.Array,
    d_out: jax.Array,
    *,
    activation: Activation,
    expected_rows: int | None,
) -> tuple[jax.Array, jax.Array | None, ExpertWeights]:
    """Gradients of rows [M, H], weights [A] (None without) and experts."""
    (count, hidden), positions, dtype = rows.shape, index.shape[0], rows.dtype
    rungs = _mlp_ladder(index, experts, expected_rows, 2)

    def body(window: _Window, group: jax.Array, carry: _Gradients) -> tuple[_Gradients, ExpertWeights]:
        d_rows, d_weights = carry
        at = window.read(index)  # [n]
        x, d_y = _gather(rows, at, window), _gather(d_out, at, window)  # [n, H]
        d_h = _dot_transposed(d_y.astype(dtype), _of(experts.down, group))  # [n, I], without the factor
        gate, up = None if gates is None else window.only(window.read(gates)), window.only(window.read(ups))  # [n, I]
        h, pull = jax.vjp(activation, to_float32(gate), to_float32(up))
        d_y = to_float32(d_y)
        if weights is not None and d_weights is not None:
            d_weight = (h * d_h).sum(1)
            if experts.down_bias is not None:
                d_weight += (d_y * to_float32(_of(experts.down_bias, group))[None]).sum(1)
            d_weights = window.write(d_weights, d_weight)
            factor = window.only(window.read(weights)[:, None])  # [n, 1]
            d_h, d_y = d_h * factor, d_y * factor
        d_gate, d_up = pull(d_h)
        d_x = _dot_transposed(d_up.astype(dtype), _of(experts.up, group))  # [n, H]
        if experts.gate is not None:
            d_x += _dot_transposed(d_gate.astype(dtype), _of(experts.gate, group))
        d_rows = _scatter(d_rows, at, window, d_x, unique=weights is None)
        x_t = _transposed(x)  # [H, n]
        sums = ExpertWeights(
            gate=None if experts.gate is None else _dot(x_t, d_gate.astype(dtype)),
            up=_dot(x_t, d_up.astype(dtype)),
            down=_dot(_transposed(h.astype(dtype)), d_y.astype(dtype)),
            gate_bias=None if experts.gate_bias is None else d_gate.sum(0),
            up_bias=None if experts.up_bias is None else d_up.sum(0),
            down_bias=None if experts.down_bias is None else d_y.sum(0),
        )
        return (d_rows, d_weights), sums

    d_rows = jnp.zeros((count, hidden), dtype if weights is None else jnp.float32)
    d_weights = None if weights is None else jnp.zeros(positions, jnp.float32)
    carry = (d_rows, d_weights)
    (d_rows, d_weights), d_experts = _each_group(group_sizes, rungs, positions, carry, _unwritten(experts), body)
    return d_rows.astype(dtype), d_weights, d_experts
