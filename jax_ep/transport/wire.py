"""Quantised rows: 8-bit codes and one float32 scale a block of 128 values.

Letters: n rows, H hidden, G = ceil(H / 128) blocks.

A block's scale is its largest magnitude over the largest code (127 of int8, 448 of float8_e4m3fn), so

- a block of zeros comes back as zeros, exactly;
- beside one huge value, values below half a step of it (1/254 of it in int8, 1/458752 of it in float8) come back as 0;
- a block that holds an infinity or a NaN comes back as NaN in every value: nothing finite is made up for it. Other
  blocks of its row are not touched;
- scales below float32's smallest normal number are that number: smaller values come back as 0.

The dtype's largest number comes back finite.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

BLOCK = 128
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def blocks(width: int) -> int:
    """G"""
    return -(-width // BLOCK)


def encode(rows: jax.Array, wire_dtype: str) -> tuple[jax.Array, jax.Array]:
    """rows [n, H] of a floating dtype -> codes [n, H] of wire_dtype, scales [n, G] float32."""
    n, width = rows.shape
    count, largest = blocks(width), _LARGEST[wire_dtype]
    values = jnp.pad(rows.astype(jnp.float32), ((0, 0), (0, count * BLOCK - width))).reshape(n, count, BLOCK)
    peak = jnp.abs(values).max(2)  # [n, G]
    scales = jnp.where(jnp.isfinite(peak), jnp.maximum(peak / largest, jnp.finfo(jnp.float32).tiny), jnp.nan)
    scaled = values / scales[..., None]
    if wire_dtype == "int8":
        scaled = jnp.round(jnp.where(jnp.isnan(scaled), 0, scaled))  # their scale says that they are none
    codes = jnp.clip(scaled, -largest, largest).astype(wire_dtype)
    return codes.reshape(n, -1)[:, :width], scales


def decode(codes: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """The rows [n, H] that codes and scales stand for, in `dtype`. Codes and scales of 0 are zeros."""
    n, width = codes.shape
    count = blocks(width)
    values = jnp.pad(codes.astype(jnp.float32), ((0, 0), (0, count * BLOCK - width))).reshape(n, count, BLOCK)
    return (values * scales[..., None]).reshape(n, -1)[:, :width].astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def rounded(rows: jax.Array, wire_dtype: str) -> jax.Array:
    """rows [n, H] as they would arrive; gradients pass straight through."""
    return decode(*encode(rows, wire_dtype), rows.dtype)


rounded.defvjp(lambda rows, wire_dtype: (rounded(rows, wire_dtype), None), lambda wire_dtype, _, d_rows: (d_rows,))
