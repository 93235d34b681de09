"""Dense all_to_all: q rows a message, and whatever else goes to each rank beside them in the same buffer.

Letters: R ranks, M messages a (source, destination), q rows of a message, W columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def swap(buffers: Sequence[jax.Array], messages: Sequence[int], axis_name: str, ranks: int) -> list[jax.Array]:
    """Each buffer [R * M * q, W]: the rows for each rank become the rows from each rank. Its own transpose.

    One collective for the first messages of all buffers, which lie one after another in it, and one for each further
    message of a buffer. All buffers have one dtype.
    """
    split = [b.reshape(ranks, m, -1, b.shape[1]) for b, m in zip(buffers, messages, strict=True)]
    first = _swap_together([b[:, 0] for b in split], axis_name)
    moved = []
    for one, b, m in zip(first, split, messages, strict=True):
        rest = [jax.lax.all_to_all(b[:, i], axis_name, 0, 0) for i in range(1, m)]
        moved.append(jnp.stack([one, *rest], 1) if rest else one)
    return [m.reshape(b.shape) for m, b in zip(moved, buffers, strict=True)]


def _swap_together(buffers: list[jax.Array], axis_name: str) -> list[jax.Array]:
    """Buffers [R, q_i, W_i]."""
    if len(buffers) == 1:
        return [jax.lax.all_to_all(buffers[0], axis_name, 0, 0)]
    flat = [b.reshape(b.shape[0], -1) for b in buffers]
    whole = jax.lax.all_to_all(jnp.concatenate(flat, 1), axis_name, 0, 0)
    ends = [sum(f.shape[1] for f in flat[: i + 1]) for i in range(len(flat) - 1)]
    return [part.reshape(b.shape) for part, b in zip(jnp.split(whole, ends, 1), buffers, strict=True)]
