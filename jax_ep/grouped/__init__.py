"""Rows grouped by expert times one matrix per expert, and the fused gated MLP.

Letters: M rows, A assignments (positions), G groups (experts), H hidden, I intermediate;
K and N are the sides of a plain grouped product's weights.

The platform a program is lowered for chooses the backend, not the one it is traced on: loops of dense products on CPU
(`cpu`), kernels on NVIDIA GPUs (`gpu`), jax.lax.ragged_dot elsewhere (`fallback`). All compute the same residuals.
Reverse-mode derivatives only, of first order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep.config import DTYPES, GROUPED_BACKENDS, one_of, refuse
from jax_ep.grouped import cpu, fallback, gpu, products
from jax_ep.grouped.products import Activation, ExpertWeights

__all__ = ["Activation", "ExpertWeights", "expert_mlp", "grouped_matmul"]


def _by_platform(backend: str, loops: bool, on_cpu: Callable[..., Any], elsewhere: Callable[..., Any]) -> Any:
    """A function of arrays: `on_cpu`, or `elsewhere` with the Products that backend and platform call for."""
    ragged_dot = functools.partial(elsewhere, fallback.RAGGED_DOT)
    if backend == "tokamax":
        return functools.partial(elsewhere, fallback.tokamax())
    if backend == "ragged_dot" or not loops:
        return ragged_dot
    kernels = functools.partial(elsewhere, gpu.Kernels())
    return lambda *args: jax.lax.platform_dependent(*args, cpu=on_cpu, cuda=kernels, default=ragged_dot)


# ---------------------------------------------------------------------------------------------- plain grouped product


@functools.partial(jax.jit, static_argnames="backend")
def grouped_matmul(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array, *, backend: str = "auto") -> jax.Array:
    """Each group's rows times its own matrix, accumulated in float32.

    Group g owns the group_sizes[g] rows after those of groups 0 .. g-1. Rows past the sum of the sizes come back as
    exact zeros whatever they hold, NaN included; their gradient is exactly zero and they add nothing to the weights'
    gradients. A group without rows gets exactly zero weight gradients. Inside shard_map, with check_vma=False.

    Args:
      rows: [M, K] float32, bfloat16 or float16.
      weights: [G, K, N] of the same dtype.
      group_sizes: [G] integers of at least 0, with a sum of at most M.
      backend: as MoEConfig.grouped_backend.

    Returns:
      [M, N] in rows.dtype. Differentiable in rows and weights.

    Raises:
      ConfigError: shapes or dtypes that do not fit together, or a backend that is unknown or not installed.

    Example:
      >>> grouped_matmul(jnp.ones((8, 4)), jnp.ones((3, 4, 2)), jnp.array([2, 0, 3])).sum(1)
      Array([8., 8., 8., 8., 8., 0., 0., 0.], dtype=float32)
    """
    _check_array("rows", rows, 2, "[M, K]")
    _check_array("weights", weights, 3, "[G, K, N]", rows.dtype)
    if weights.shape[1] != rows.shape[1]:
        rule = f"must be [G, K, N] with the K={rows.shape[1]} of rows"
        refuse("weights.shape", weights.shape, rule, (weights.shape[0], rows.shape[1], weights.shape[2]))
    _check_sizes(group_sizes, weights.shape[0], "weights")
    one_of("backend", backend, GROUPED_BACKENDS, works="auto")
    if rows.shape[0] == 0 or weights.shape[0] == 0:
        return jnp.zeros((rows.shape[0], weights.shape[2]), rows.dtype)
    return _matmul(backend, rows, weights, group_sizes.astype(jnp.int32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(backend: str, rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    run = _by_platform(backend, True, cpu.matmul_forward, products.matmul_forward)
    return run(rows, weights, group_sizes)


_Saved = tuple[jax.Array, jax.Array, jax.Array]


def _matmul_fwd(backend: str, rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> tuple[jax.Array, _Saved]:
    return _matmul(backend, rows, weights, group_sizes), (rows, weights, group_sizes)


def _matmul_bwd(backend: str, saved: _Saved, d_out: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    run = _by_platform(backend, True, cpu.matmul_backward, products.matmul_backward)
    d_rows, d_weights = run(*saved, d_out)
    return d_rows, d_weights, None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


# --------------------------------------------------------------------------------------------------- fused expert MLP


@functools.partial(jax.jit, static_argnames=("activation", "expected_rows", "loops", "backend", "delay_wgrad"))
def expert_mlp(
    rows: jax.Array,
    index: jax.Array,
    group_sizes: jax.Array,
    weights: jax.Array | None,
    experts: ExpertWeights,
    *,
    activation: Activation,
    expected_rows: int | None = None,
    loops: bool = True,
    backend: str = "auto",
    delay_wgrad: bool = False,
) -> jax.Array:
    """Rows through the experts they are assigned to, added up where they came from.

    Position n < sum(group_sizes) is one assignment: row index[n] goes to the expert e(n) whose group n falls into, and

        out[m] = sum over n with index[n] == m of weights[n] * mlp_e(n)(rows[m])
        mlp_e(x) = activation(x @ gate_e + gate_bias_e, x @ up_e + up_bias_e) @ down_e + down_bias_e.

    Positions past the sum are ignored, whatever index and weights hold there. A row that no index points to may hold
    NaN: its output and its gradient are exactly 0. Products take rows.dtype and accumulate in float32. The
    pre-activations are kept for the backward pass under the checkpoint names "moe_gate" and "moe_up"; expert outputs
    are not kept.

    Args:
      rows: [M, H] float32, bfloat16 or float16.
      index: [A] int32, the row of each position, positions sorted by expert.
      group_sizes: [G] integers, positions of each expert, with a sum of at most A.
      weights: [A] float32, the factor of each position. None: every factor is 1, and no row has two positions.
      experts: the ExpertWeights, in rows.dtype.
      activation: (gate [n, I] or None, up [n, I]) -> [n, I], elementwise, hashable. With a gate it is part of a GPU's
        kernel, whose operations are fewer: there is no erf.
      expected_rows: how many positions are expected to be filled; None: all. Changes speed only.
      loops: False where the compiler partitions the program further (other Auto axes of a mesh): then no loop turns as
        often as the data say, since devices would leave it at different times, and wait for each other in collectives
        that the partitioner put inside. All platforms take ragged_dot then: no kernel can be partitioned either.
      backend: as MoEConfig.grouped_backend.
      delay_wgrad: the backward computes the gradient of rows before those of the experts, which wait for it. On CPU one
        loop computes both.

    Returns:
      [M, H], float32 with weights (the caller rounds once), rows.dtype without. Differentiable in rows, weights and
      experts.

    Raises:
      ConfigError: shapes or dtypes that do not fit together, or a backend that is unknown or not installed.
    """
    _check_mlp(rows, index, group_sizes, weights, experts, expected_rows)
    one_of("backend", backend, GROUPED_BACKENDS, works="auto")
    if 0 in (rows.shape[0], index.shape[0], experts.up.shape[0]):
        return jnp.zeros(rows.shape, rows.dtype if weights is None else jnp.float32)
    index, group_sizes = index.astype(jnp.int32), group_sizes.astype(jnp.int32)
    how = _How(activation, expected_rows, loops, backend, delay_wgrad)
    return _mlp(how, rows, index, group_sizes, weights, experts)


_MlpArgs = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, ExpertWeights]
_MlpSaved = tuple[_MlpArgs, jax.Array | None, jax.Array]


class _How(NamedTuple):
    """What of expert_mlp is static."""

    activation: Activation
    expected_rows: int | None
    loops: bool
    backend: str
    delay_wgrad: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(
    how: _How,
    rows: jax.Array,
    index: jax.Array,
    group_sizes: jax.Array,
    weights: jax.Array | None,
    experts: ExpertWeights,
) -> jax.Array:
    return _mlp_forward(how, (rows, index, group_sizes, weights, experts), save=False)[0]


def _mlp_forward(how: _How, args: _MlpArgs, save: bool) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    on_cpu = functools.partial(cpu.mlp_forward, activation=how.activation, expected_rows=how.expected_rows, save=save)
    elsewhere = functools.partial(products.mlp_forward, activation=how.activation, save=save)
    return _by_platform(how.backend, how.loops, on_cpu, elsewhere)(*args)


def _mlp_fwd(
    how: _How,
    rows: jax.Array,
    index: jax.Array,
    group_sizes: jax.Array,
    weights: jax.Array | None,
    experts: ExpertWeights,
) -> tuple[jax.Array, _MlpSaved]:
    args = (rows, index, group_sizes, weights, experts)
    out, gate, up = _mlp_forward(how, args, save=True)
    gate = None if gate is None else checkpoint_name(gate, "moe_gate")
    return out, (args, gate, checkpoint_name(up, "moe_up"))


def _mlp_bwd(
    how: _How, saved: _MlpSaved, d_out: jax.Array
) -> tuple[jax.Array, None, None, jax.Array | None, ExpertWeights]:
    args, gate, up = saved
    on_cpu = functools.partial(cpu.mlp_backward, activation=how.activation, expected_rows=how.expected_rows)
    elsewhere = functools.partial(products.mlp_backward, activation=how.activation, delay_wgrad=how.delay_wgrad)
    run = _by_platform(how.backend, how.loops, on_cpu, elsewhere)
    d_rows, d_weights, d_experts = run(*args, gate, up, d_out)
    return d_rows, None, None, d_weights, d_experts


_mlp.defvjp(_mlp_fwd, _mlp_bwd)


# ------------------------------------------------------------------------------------------------------------- checks


def _check_array(
    field: str, array: jax.Array, rank: int, letters: str, dtype: jax.typing.DTypeLike | None = None
) -> None:
    if array.ndim != rank:
        refuse(f"{field}.shape", tuple(array.shape), f"must be {letters}", (8,) * rank)
    if dtype is None and array.dtype.name not in DTYPES:
        refuse(f"{field}.dtype", array.dtype.name, f"must be one of {', '.join(DTYPES)}", "float32")
    if dtype is not None and array.dtype != dtype:
        refuse(f"{field}.dtype", array.dtype.name, "must be the dtype of rows", jnp.dtype(dtype).name)


def _check_shape(
    field: str, array: jax.Array, shape: tuple[int, ...], letters: str, dtype: jax.typing.DTypeLike
) -> None:
    if tuple(array.shape) != shape:
        refuse(f"{field}.shape", tuple(array.shape), f"must be {letters}", shape)
    _check_array(field, array, len(shape), letters, dtype)


def _check_integers(field: str, array: jax.Array) -> None:
    if not jnp.issubdtype(array.dtype, jnp.integer):
        refuse(f"{field}.dtype", array.dtype.name, "must be an integer dtype", "int32")


def _check_sizes(group_sizes: jax.Array, groups: int, source: str) -> None:
    if tuple(group_sizes.shape) != (groups,):
        refuse("group_sizes.shape", tuple(group_sizes.shape), f"must be [G] with the G of {source}", (groups,))
    _check_integers("group_sizes", group_sizes)


def _check_mlp(
    rows: jax.Array,
    index: jax.Array,
    group_sizes: jax.Array,
    weights: jax.Array | None,
    experts: ExpertWeights,
    expected_rows: int | None,
) -> None:
    _check_array("rows", rows, 2, "[M, H]")
    _check_array("experts.up", experts.up, 3, "[G, H, I]", rows.dtype)
    hidden, (groups, _, intermediate) = rows.shape[1], experts.up.shape
    wide, narrow = (groups, intermediate), (groups, hidden)
    matrix = (groups, hidden, intermediate)
    _check_shape("experts.up", experts.up, matrix, "[G, H, I] with the H of rows", rows.dtype)
    _check_shape("experts.down", experts.down, (groups, intermediate, hidden), "[G, I, H]", rows.dtype)
    optional = {
        "gate": (experts.gate, matrix, "[G, H, I], as up"),
        "gate_bias": (experts.gate_bias, wide, "[G, I]"),
        "up_bias": (experts.up_bias, wide, "[G, I]"),
        "down_bias": (experts.down_bias, narrow, "[G, H]"),
    }
    for name, (array, shape, letters) in optional.items():
        if array is not None:
            _check_shape(f"experts.{name}", array, shape, letters, rows.dtype)
    if experts.gate is None and experts.gate_bias is not None:
        refuse("experts.gate_bias", experts.gate_bias.shape, "experts.gate is None", None)
    if index.ndim != 1:
        refuse("index.shape", tuple(index.shape), "must be [A]", (rows.shape[0],))
    _check_integers("index", index)
    if weights is not None:
        _check_shape("weights", weights, (index.shape[0],), "[A], one a position of index", jnp.float32)
    _check_sizes(group_sizes, groups, "experts.up")
    if expected_rows is not None and (not isinstance(expected_rows, int) or expected_rows < 1):
        refuse("expected_rows", expected_rows, "must be an integer of at least 1, or None", index.shape[0])
