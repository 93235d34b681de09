"""Ragged all-to-all out of all_gather and a select: exact on every platform, moves R times too much. For simulation.

Letters: n rows of operand, M rows of output, R ranks, u slices a peer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def emulated_ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: str,
) -> jax.Array:
    """What `jax.lax.ragged_all_to_all` computes; recv_sizes are implied by the senders' sizes."""
    del recv_sizes
    ranks = jax.lax.axis_size(axis_name)
    me = jax.lax.axis_index(axis_name)
    slices = jnp.stack([input_offsets, send_sizes, output_offsets])  # [3, R * u]
    theirs = jax.lax.all_gather(slices, axis_name).reshape(ranks, 3, ranks, -1)  # [source, 3, destination, u]
    mine = jax.lax.dynamic_index_in_dim(theirs, me, 2, keepdims=False)  # [source, 3, u]
    begin, size, there = (mine[:, i].reshape(-1, 1) for i in range(3))  # [R * u, 1]
    at = jnp.arange(output.shape[0], dtype=begin.dtype)[None]  # [1, M]
    inside = (at >= there) & (at < there + size)  # [R * u, M]
    which = jnp.argmax(inside, 0)  # [M], the slice that writes the row, if any
    source = which // mine.shape[2]
    row = jnp.clip(at[0] + (begin - there)[which, 0], 0, operand.shape[0] - 1)
    everything = jax.lax.all_gather(operand, axis_name)  # [R, n, ...]
    written = inside.any(0).reshape(-1, *(1,) * (output.ndim - 1))
    return jnp.where(written, everything[source, row], output)  # [M, ...]
