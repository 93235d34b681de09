"""Ragged all-to-all: XLA's where it exists, an emulation on CPU, and a transpose that is right.

Letters: n rows of operand, M rows of output, R ranks, u slices a peer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.config import refuse
from jax_ep.plan import Travel, before, lay_runs, segment_index
from jax_ep.transport.all_gather import emulated_ragged_all_to_all


def native_or_emulated(operand: jax.Array, output: jax.Array, *slices: jax.Array, axis_name: str) -> jax.Array:
    """XLA's ragged-all-to-all; on CPU, which has none, the emulation. Chosen where the program is lowered, not where
    it is traced.
    """
    emulated = functools.partial(emulated_ragged_all_to_all, axis_name=axis_name)

    def native(*args: jax.Array) -> jax.Array:
        # JAX does not mark its result as different on each rank, which shard_map with check_vma=True insists on.
        return varying(jax.lax.ragged_all_to_all(*args, axis_name=axis_name), axis_name)

    return jax.lax.platform_dependent(operand, output, *slices, cpu=emulated, default=native)


def varying(a: jax.Array, axis_name: str) -> jax.Array:
    """`a`, marked as different on each rank for shard_map's check_vma. Nothing happens at run time, or without the
    check.
    """
    marked = axis_name in jax.typeof(a).manual_axis_type.varying
    return a if marked else jax.lax.pcast(a, axis_name, to="varying")


def ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: str,
) -> jax.Array:
    """`jax.lax.ragged_all_to_all`, on CPU meshes as well, with gradients that hold for slices of size zero.

    Rows operand[input_offsets[j] : + send_sizes[j]] of this rank become rows output_offsets[j] onwards of peer j's
    result; rows that nobody writes keep `output`. With u slices a peer, slice i for peer j is entry j * u + i.
    On CPU the rows are all-gathered and selected (R times the bytes). Inside shard_map or pmap.

    Args:
      operand: [n, ...] rows to send.
      output: [M, ...] what the result holds where nothing arrives; same trailing shape and dtype.
      input_offsets, send_sizes: [R * u] int32, in rows of `operand`.
      output_offsets: [R * u] int32, in rows of the receiver's `output`.
      recv_sizes: [R * u] int32, rows that arrive from each peer.
      axis_name: the mesh axis, of size R.

    Returns:
      [M, ...] the result. Differentiable in operand and output, in operand where the slices sent do not overlap: a row
      sent twice would get one of its two cotangents.

    Raises:
      ConfigError: shapes or dtypes that do not fit together.
    """
    ranks = jax.lax.axis_size(axis_name)
    if operand.ndim < 1 or operand.shape[1:] != output.shape[1:] or operand.dtype != output.dtype:
        rule = f"must have the operand's trailing shape and dtype, {operand.shape[1:]} {operand.dtype.name}"
        refuse("output", f"{output.dtype.name}{list(output.shape)}", rule, f"jnp.zeros((rows, *{operand.shape[1:]}))")
    slices = dict(
        input_offsets=input_offsets, send_sizes=send_sizes, output_offsets=output_offsets, recv_sizes=recv_sizes
    )
    for name, value in slices.items():
        if value.ndim != 1 or value.shape[0] % ranks or not value.shape[0] or value.shape != input_offsets.shape:
            refuse(name, list(value.shape), f"must be one length, a multiple of the axis size {ranks}", [ranks])
        if not jnp.issubdtype(value.dtype, jnp.integer):
            refuse(name, value.dtype.name, "must be integers", "int32")
    if not operand.shape[0] or not output.shape[0]:
        return output
    everything = (varying(a, axis_name) for a in (operand, output, *slices.values()))
    return _differentiable(axis_name, *everything)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(axis_name: str, operand: jax.Array, output: jax.Array, *slices: jax.Array) -> jax.Array:
    return native_or_emulated(operand, output, *slices, axis_name=axis_name)


def _forward(axis_name: str, operand: jax.Array, output: jax.Array, *slices: jax.Array) -> Any:
    return _differentiable(axis_name, operand, output, *slices), (
        jnp.zeros_like(operand, shape=(0, *operand.shape)),
        slices,
    )


def _backward(axis_name: str, saved: Any, cotangent: jax.Array) -> Any:
    """The rows go back: each rank learns, in one small all_to_all, where its peers took and put the slices it
    received.
    """
    like, (input_offsets, send_sizes, output_offsets, recv_sizes) = saved
    ranks = jax.lax.axis_size(axis_name)
    told = jnp.stack([input_offsets, output_offsets], 1).reshape(ranks, -1, 2)  # [R, u, 2]
    theirs = jax.lax.all_to_all(told, axis_name, 0, 0).reshape(-1, 2)  # [R * u, 2]
    taken, put = theirs[:, 0], theirs[:, 1]
    zeros = jnp.zeros(like.shape[1:], cotangent.dtype)
    d_operand = native_or_emulated(cotangent, zeros, put, recv_sizes, taken, send_sizes, axis_name=axis_name)
    rows = cotangent.shape[0]
    edges = jnp.zeros(rows + 1, jnp.int32).at[put].add(1, mode="drop").at[put + recv_sizes].add(-1, mode="drop")
    written = (jnp.cumsum(edges)[:rows] > 0).reshape(-1, *(1,) * (cotangent.ndim - 1))
    return d_operand, jnp.where(written, jnp.zeros_like(cotangent), cotangent), None, None, None, None


_differentiable.defvjp(_forward, _backward)


def move_runs(
    buffers: Sequence[jax.Array],
    ways: Sequence[Travel],
    out_rows: Sequence[int],
    rank: jax.Array,
    *,
    axis_name: str,
    simulated: bool = False,
) -> list[jax.Array]:
    """Runs of rows of each buffer to their receivers, all in one ragged all-to-all; zeros where none arrives.

    Several buffers are first laid into one of rows of a common width, sorted by receiver, so that one message goes to
    each; one buffer is sent as it lies.

    Args:
      buffers: [n_i, W_i] each, one dtype.
      ways: the runs of each; of one message only where there are several buffers.
      out_rows: rows of each result.
      rank: this rank.
      axis_name: the mesh axis.
      simulated: by all_gather on every platform.

    Returns:
      [out_rows_i, W_i] each.
    """
    if len(buffers) == 1:
        return [_send(buffers[0], ways[0], out_rows[0], rank, axis_name, simulated)]
    width = math.gcd(*(b.shape[1] for b in buffers))
    per = [b.shape[1] // width for b in buffers]  # common rows that a row makes
    whole = jnp.concatenate([b.reshape(-1, width) for b in buffers])
    sizes = jnp.concatenate([w.sizes * m for w, m in zip(ways, per)], 2)  # [sender, receiver, buffer]
    starts, first = [], 0
    for b, way, m in zip(buffers, ways, per):
        starts.append(first + m * way.out[rank])  # [receiver, 1]
        first += b.shape[0] * m
    index = segment_index(sizes[rank].reshape(-1), jnp.concatenate(starts, 1).reshape(-1), first)
    whole = whole.at[index].get(mode="fill", fill_value=0)

    def offsets(sizes: jax.Array) -> jax.Array:
        return before(sizes.reshape(sizes.shape[0], -1), 1).reshape(sizes.shape)

    out = offsets(sizes)
    into = offsets(sizes.swapaxes(0, 1)).swapaxes(0, 1)
    together = Travel(sizes.sum(2, keepdims=True, dtype=jnp.int32), out[:, :, :1], into[:, :, :1])
    arrived = _send(whole, together, sum(n * m for n, m in zip(out_rows, per)), rank, axis_name, simulated)
    parts = [
        lay_runs(arrived, sizes[:, rank, i], into[:, rank, i], m * way.into[:, rank, 0], rows * m)
        for i, (way, m, rows) in enumerate(zip(ways, per, out_rows))
    ]
    return [part.reshape(rows, b.shape[1]) for part, rows, b in zip(parts, out_rows, buffers)]


def _send(buffer: jax.Array, way: Travel, out_rows: int, rank: jax.Array, axis_name: str, simulated: bool) -> jax.Array:
    """Runs for this rank itself are copied, and are empty slices to the collective."""
    if not buffer.shape[0] or not out_rows:
        return jnp.zeros((out_rows, buffer.shape[1]), buffer.dtype)
    ranks = way.sizes.shape[0]
    own = lay_runs(buffer, way.sizes[rank, rank], way.out[rank, rank], way.into[rank, rank], out_rows)
    others = jnp.where(jnp.arange(ranks)[:, None] == rank, 0, 1)  # [R, 1]
    slices = (way.out[rank], way.sizes[rank] * others, way.into[rank], way.sizes[:, rank] * others)
    through = emulated_ragged_all_to_all if simulated else native_or_emulated
    return through(buffer, own, *(s.reshape(-1) for s in slices), axis_name=axis_name)
