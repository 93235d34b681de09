"""Parts of a packed buffer: arrays of any dtype, laid side by side in columns of one unsigned integer dtype.

Letters: n rows, W columns of the buffer, R ranks. Integers, because a collective on bit-cast floats may quieten a NaN
or flush a denormal, and small counts seen as floats are denormals.
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
      rows: [n, width], any dtype of 1, 2, 4 or 8 bytes.
      counts: None: the part moves the plan's rows. [R, R] int32, the same on every rank: rows of each (home rank, away
        rank) that this part moves by itself, always whole; not with messages="expert". On the ragged layout (transports
        ragged and all_gather) its home buffer holds a run a
        destination, one after another, and its away buffer a run a source; on all_to_all both are [R * q, width], a run
        of at most q rows a rank. Parts with the very same array share a layout.
      capacity: with counts, rows of the buffer on the other side; runs past its end are cut off. Needed on the ragged
        layout; on all_to_all it is n. Of a part that came back, what sends it home.
      wire_dtype: None, or what floating rows travel as on this way, with scales beside them: see `wire`. Their
        cotangents travel unquantised.
    """

    rows: jax.Array
    counts: jax.Array | None = None
    capacity: int | None = None
    wire_dtype: str | None = None


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


def pack(parts: Sequence[jax.Array], unit: int) -> jax.Array:
    """Parts [n, width_i] -> one buffer [n, W] of columns of `unit` bytes."""
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
