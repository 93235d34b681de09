"""Dense all_to_all of q rows a pair, with integers riding in header rows of the same buffer.

Letters: R ranks, q rows a pair, W columns, h header rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ep.transport.parts import from_columns, header_rows, to_columns


def swap(buffer: jax.Array, axis_name: str, ranks: int) -> jax.Array:
    """[R * q, W] -> [R * q, W]: the q rows for each rank become the q rows from each rank. Its own transpose."""
    return jax.lax.all_to_all(buffer.reshape(ranks, -1, buffer.shape[1]), axis_name, 0, 0).reshape(buffer.shape)


def swap_with_header(buffer: jax.Array, header: jax.Array, axis_name: str, ranks: int) -> tuple[jax.Array, jax.Array]:
    """As swap, and header [R, k] int32 becomes what each rank's header said of this one, [R, k]; one collective."""
    unit, columns = buffer.dtype.itemsize, buffer.shape[1]
    integers = header.shape[1]
    h = header_rows(integers, columns, unit)
    flat = to_columns(header, unit)  # [R, k * 4 / unit]
    flat = jnp.pad(flat, ((0, 0), (0, h * columns - flat.shape[1]))).reshape(ranks, h, columns)
    whole = jnp.concatenate([flat, buffer.reshape(ranks, -1, columns)], 1)
    whole = jax.lax.all_to_all(whole, axis_name, 0, 0)  # [R, h + q, W]
    told = whole[:, :h].reshape(ranks, -1)[:, : integers * 4 // unit]
    return whole[:, h:].reshape(buffer.shape), from_columns(told, integers, jnp.dtype(jnp.int32))
