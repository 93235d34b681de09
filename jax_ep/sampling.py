"""How the next token is chosen: greedy, temperature, top-p, each sequence with its own seed. Pure.

Letters: B sequences, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.config import positive_int, positive_number, refuse

SEEDS = 2**32  # seeds are below


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a sequence goes on, and when it ends.

    Attributes:
      max_new_tokens: at most this many.
      temperature: logits are divided by it; 0: always the likeliest token.
      top_p: draw among the likeliest tokens that together have at least this probability (Holtzman et al. 2019,
        arXiv:1904.09751), after the temperature.
      seed: of the draws, in [0, 2**32). A sequence's draws depend on nothing but its seed and its logits: neither on
        its place in a batch nor on the others.
      stop_tokens: ids that end it, as its last token; None: the model's.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        positive_int("max_new_tokens", self.max_new_tokens, 64)
        if self.temperature != 0:
            positive_number("temperature", self.temperature, 0.7)
            if not 1e-30 <= self.temperature <= 1e30:
                refuse("temperature", self.temperature, "must be 0, or within 1e-30 and 1e30", 0.7)
        positive_number("top_p", self.top_p, 0.9)
        if self.top_p > 1:
            refuse("top_p", self.top_p, "is a probability, above 0 and at most 1", 0.9)
        positive_int("seed", self.seed, 0, least=0)
        if self.seed >= SEEDS:
            refuse("seed", self.seed, f"must be below {SEEDS}", self.seed % SEEDS)
        if self.stop_tokens is not None:
            if not isinstance(self.stop_tokens, Sequence):
                refuse("stop_tokens", self.stop_tokens, "must be a sequence of ids, or None", (2,))
            object.__setattr__(self, "stop_tokens", tuple(self.stop_tokens))
            for token in self.stop_tokens:
                positive_int("stop_tokens", token, 2, least=0)


class Settings(NamedTuple):
    """`Sampling`s as arrays: limits [B] int32, temperatures, top_ps [B] float32, seeds [B] uint32, stops [B, n] int32,
    filled up with -1.
    """

    limits: jax.Array
    temperatures: jax.Array
    top_ps: jax.Array
    seeds: jax.Array
    stops: jax.Array


def sample(
    logits: jax.Array, settings: Settings, counts: jax.Array, *, draws: bool = True, nucleus: bool = True
) -> jax.Array:
    """The next token of each sequence. Pure.

    Args:
      logits: [B, V] float32.
      settings: whose temperatures, top_ps and seeds are read. At temperature 0 it is the likeliest token, of equals
        the first.
      counts: [B], which token of its sequence this is: token n draws with fold_in(key(seed), n).
      draws, nucleus: False where no temperature is above 0, no top_p below 1: less work, same tokens.

    Returns:
      [B] int32.
    """
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if not draws:
        return likeliest
    drawn_at = settings.temperatures > 0
    logits = logits - logits.max(-1, keepdims=True)  # so that nothing overflows at a low temperature
    logits = logits / jnp.where(drawn_at, settings.temperatures, 1)[:, None]
    if nucleus:
        logits = jax.vmap(_nucleus)(logits, settings.top_ps)

    def draw(row: jax.Array, seed: jax.Array, count: jax.Array) -> jax.Array:
        return jax.random.categorical(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), count), row)

    drawn = jax.vmap(draw)(logits, settings.seeds, counts).astype(jnp.int32)
    return jnp.where(drawn_at, drawn, likeliest)


def _nucleus(logits: jax.Array, top_p: jax.Array) -> jax.Array:
    """-inf for all but the likeliest tokens that together have at least top_p; those that equal the last one stay."""
    falling = jnp.sort(logits, descending=True)  # [V]
    probs = jax.nn.softmax(falling)
    kept = ((jnp.cumsum(probs) - probs < top_p) | (top_p >= 1)).at[0].set(True)  # a top_p may be 0 in float32
    least = jnp.min(jnp.where(kept, falling, jnp.inf))
    return jnp.where(logits >= least, logits, -jnp.inf)


def settings_of(samplings: Sequence[Sampling], rows: int, stop_tokens: tuple[int, ...]) -> Settings:
    """As arrays, on the host; rows past the last are of sequences that take no part.

    Args:
      samplings: of the sequences.
      rows: B.
      stop_tokens: the model's, for those that name none.
    """
    stops = [stop_tokens if s.stop_tokens is None else s.stop_tokens for s in samplings]
    table = np.full((rows, max(len(s) for s in stops)), -1, np.int32)
    for i, ids in enumerate(stops):
        table[i, : len(ids)] = ids
    filled = lambda values, dtype: np.array([*values, *[0] * (rows - len(samplings))], dtype)
    return Settings(
        limits=filled([s.max_new_tokens for s in samplings], np.int32),
        temperatures=filled([s.temperature for s in samplings], np.float32),
        top_ps=filled([s.top_p for s in samplings], np.float32),
        seeds=filled([s.seed for s in samplings], np.uint32),
        stops=table,
    )
