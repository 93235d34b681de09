"""Parts of a packed buffer: arrays of any dtype, laid side by side in columns of one unsigned integer dtype.

Letters: n rows, W columns of the buffer. Integers, because a collective on bit-cast floats may quieten a NaN or flush a
denormal, and small counts seen as floats are denormals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

_UNITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


class Part(NamedTuple):
    """One thing that travels in an exchange.

    Attributes:
      rows: [n, width], any dtype of 1, 2, 4 or 8 bytes. All parts of one exchange share the plan's n rows.
    """

    rows: jax.Array


def unit_bytes(parts: Sequence[jax.ShapeDtypeStruct | jax.Array]) -> int:
    """Bytes of a column: what divides every part's item size, at most 4."""
    return math.gcd(4, *(p.dtype.itemsize for p in parts))


def to_columns(a: jax.Array, unit: int) -> jax.Array:
    """[..., width] of any dtype -> [..., columns] unsigned integers of `unit` bytes, bit for bit."""
    if a.dtype == jnp.bool_:
        a = a.astype(jnp.uint8)
    cast = jax.lax.bitcast_convert_type(a, _UNITS[unit])
    return cast if a.dtype.itemsize == unit else cast.reshape(*a.shape[:-1], -1)


def from_columns(columns: jax.Array, width: int, dtype: jnp.dtype) -> jax.Array:
    """The inverse of to_columns."""
    if dtype == jnp.bool_:
        return columns.astype(jnp.bool_)
    per = dtype.itemsize // columns.dtype.itemsize
    if per > 1:
        columns = columns.reshape(*columns.shape[:-1], width, per)
    return jax.lax.bitcast_convert_type(columns, dtype)


def pack(parts: Sequence[jax.Array]) -> jax.Array:
    """Parts [n, width_i] -> one buffer [n, W]."""
    unit = unit_bytes(parts)
    columns = [to_columns(p, unit) for p in parts]
    return columns[0] if len(columns) == 1 else jnp.concatenate(columns, 1)


def unpack(buffer: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """The inverse of pack; `like` gives widths and dtypes. The buffer may have another number of rows."""
    out, at = [], 0
    for p in like:
        width = p.shape[1] * p.dtype.itemsize // buffer.dtype.itemsize
        out.append(from_columns(buffer[:, at : at + width], p.shape[1], p.dtype))
        at += width
    return out


def header_rows(integers: int, columns: int, unit: int) -> int:
    """Buffer rows that hold `integers` int32 values."""
    return -(-integers * 4 // (columns * unit))
