"""The cached form of a decoder: prefill and decode append tokens to each sequence's keys and values. Pure.

Letters: B batch, S new positions, Z positions of the cache, H hidden, V vocabulary, Y layers, N key/value heads,
D head_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep.attention import Queries, attend, attention_scale, rope_tables
from jax_ep.config import refuse
from jax_ep.model_config import ModelConfig
from jax_ep.models.decoder import Params, check_ids, embed, layer_windows, logits_of, run_layer
from jax_ep.models.placement import constrain, placement
from jax_ep.routing import MoEStats

# Rows [B, S, N, D] at (layer, slot) of a cache [Y, B, Z, N, D]. B is a batching dimension, so that devices which hold
# their own sequences write them without asking others.
_WRITE = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(2, 3),
    inserted_window_dims=(0, 2),
    scatter_dims_to_operand_dims=(0, 2),
    operand_batching_dims=(1,),
    scatter_indices_batching_dims=(0,),
)


class KVCache(NamedTuple):
    """Keys (rotated) and values of all layers, and how many positions of each sequence they hold.

    Position p of a sequence is slot p; slots past its length hold nothing that anybody reads.

    Attributes:
      keys, values: [Y, B, Z, N, D] in the layer's dtype.
      lengths: [B] int32.
    """

    keys: jax.Array
    values: jax.Array
    lengths: jax.Array


def init_cache(config: ModelConfig, batch: int, length: int) -> KVCache:
    """An empty cache for `batch` sequences of up to `length` positions."""
    shape = (config.num_layers, batch, length, config.num_kv_heads, config.head_dim)
    keys, values = (jnp.zeros(shape, config.moe.dtype) for _ in range(2))
    return KVCache(keys, values, jnp.zeros(batch, jnp.int32))


def cache_shardings(config: ModelConfig, mesh: Mesh, batch: int) -> KVCache:
    """How `forward_cached` has a cache lie: sequences over the token axes where they divide the batch."""
    rows = placement(config.moe, mesh, batch, 1, by_batch=True).whole_sequences
    assert rows is not None
    keys = NamedSharding(mesh, P(None, *rows))
    return KVCache(keys, keys, NamedSharding(mesh, rows))


def forward_cached(
    params: Params,
    input_ids: jax.Array,
    cache: KVCache,
    config: ModelConfig,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    new: jax.Array | None = None,
    span: int | None = None,
    last_only: bool = False,
) -> tuple[jax.Array, KVCache, MoEStats]:
    """Appends up to S tokens to each sequence of a cache: prefill (S the longest prompt), or decode (S = 1).

    Give the cache away when compiling (donate_argnames), and it is updated in place.

    Args:
      params, config, mesh: as of `forward`.
      input_ids: [B, S] integers. Sequence b's are input_ids[b, :new[b]]; what follows is padding, which travels
        nowhere and is not kept.
      cache: with room for them; a token that finds none is not kept, and later ones do not see it.
      new: [B] int32 in [0, S]; None: S for all. A sequence with 0 takes no part.
      span: how many slots of the cache are looked at, from the first; at least the largest new length. None: all. Less
        is less work: a prefill into an empty cache needs S.
      last_only: only the logits of each sequence's last new token.

    Returns:
      logits [B, S, V] float32, or [B, V] with last_only (meaningless where there is no new token); the cache with the
      tokens in it; MoEStats stacked [Y, ...].
    """
    check_ids(input_ids, None)
    (b, s), room = input_ids.shape, cache.keys.shape[2]
    if cache.keys.shape[1] != b:
        held = cache.keys.shape[1]
        refuse("input_ids", list(input_ids.shape), f"the cache holds {held} sequences", [held, s])
    span = room if span is None else span
    if not 1 <= span <= room:
        refuse("span", span, f"must be in [1, {room}], the positions of the cache", room)
    place = placement(config.moe, mesh, b, s, by_batch=True)
    new = jnp.full(b, s, jnp.int32) if new is None else new.astype(jnp.int32)
    steps = jnp.arange(s)[None]  # [1, S]
    mask = steps < new[:, None]  # [B, S]
    positions = cache.lengths[:, None] + steps
    slots = jnp.where(mask, positions, room + steps)  # [B, S]; past the end: written nowhere
    cos, sin = rope_tables(config, positions)
    looked_at, scale = jnp.arange(span)[None], attention_scale(config)
    rows = None if place.whole_sequences is None else P(None, *place.whole_sequences)

    def write(store: jax.Array, at: jax.Array, values: jax.Array) -> jax.Array:
        """[B, S, N, D] into layer `at` of [Y, B, Z, N, D], in place."""
        indices = jnp.stack([jnp.broadcast_to(at, slots.shape), slots], axis=-1)  # [B, S, 2]
        store = jax.lax.scatter(store, indices, values, _WRITE, unique_indices=True, mode="drop")
        return constrain(store, rows, place.mesh)

    def body(carry: tuple[jax.Array, ...], at: tuple[Params, jax.Array, jax.Array]) -> tuple[Any, MoEStats]:
        x, *stores = carry
        layer, window, index = at

        def attention(rows: Queries) -> tuple[jax.Array, list[jax.Array]]:
            kept = [write(store, index, a) for store, a in zip(stores, rows[1:])]
            keys, values = (jax.lax.dynamic_index_in_dim(a, index, keepdims=False)[:, :span] for a in kept)
            where = (positions, looked_at, None, window, layer.get("sinks"), scale)
            return attend(rows.queries, keys, values, *where), kept

        x, stats, stores = run_layer(layer, x, (cos, sin), config, place, mask, attention)
        return (x, *stores), stats

    x = embed(params, input_ids, config, place)
    layers = (params["layers"], layer_windows(config), jnp.arange(config.num_layers))
    (x, keys, values), stats = jax.lax.scan(body, (x, cache.keys, cache.values), layers)
    if last_only:
        last = jnp.maximum(new - 1, 0)[:, None, None]  # [B, 1, 1]
        x = jnp.take_along_axis(x, last, axis=1)[:, 0]  # [B, H]
    lengths = jnp.minimum(cache.lengths + new, room)
    return logits_of(params, x, config), KVCache(keys, values, lengths), stats
