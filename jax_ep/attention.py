"""Grouped-query attention of the published families, and what surrounds it: RMSNorm, rotary positions. Pure.

Letters: B batch, S positions of queries, Z positions of keys, H hidden, Q query heads, N key/value heads,
G = Q/N query heads that share a key/value head, D head_dim, C blocks of queries.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.model_config import ModelConfig, RopeConfig

NO_WINDOW = 2**30  # a window that is wider than any sequence
_QUERY_BLOCK = 1024  # more queries than this go block by block, so that no [B, Q, S, Z] stands in memory


class Queries(NamedTuple):
    """What `project` gives: queries [B, S, Q, D], keys and values [B, S, N, D], rotated, in the layer's dtype."""

    queries: jax.Array
    keys: jax.Array
    values: jax.Array


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32 inside (Zhang & Sennrich 2019,
    arXiv:1910.07467). x [..., n], weight [n] -> x's shape and dtype.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * _row(weight, x.ndim).astype(jnp.float32)).astype(x.dtype)


def rope_frequencies(config: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Angles a position [D/2], float64, and the factor on cos and sin, as HF transformers' modeling_rope_utils has
    them.
    """
    steps = np.arange(0, head_dim, 2) / head_dim
    plain = config.theta**-steps  # [D/2]
    if config.scaling == "default":
        return plain, 1.0
    if config.scaling == "linear":
        return plain / config.factor, 1.0
    trained = config.original_max_position
    assert trained is not None  # RopeConfig sees to it
    if config.scaling == "llama3":
        turns = trained * plain / (2 * math.pi)  # over the positions first trained on
        low, high = config.low_freq_factor, config.high_freq_factor
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        return (1 - smooth) * plain / config.factor + smooth * plain, 1.0

    def dimension(rotations: float) -> float:
        """The (fractional) pair that turns this often over the positions first trained on."""
        return head_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    ramp = np.clip((np.arange(head_dim // 2) - low) / width, 0, 1)
    frequencies = plain / config.factor * ramp + plain * (1 - ramp)
    if config.attention_factor is not None:
        return frequencies, config.attention_factor
    return frequencies, 0.1 * math.log(config.factor) + 1 if config.factor > 1 else 1.0


def rope_tables(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B, S, D/2] float32 of positions [B, S]."""
    frequencies, factor = rope_frequencies(config.rope, config.head_dim)
    angles = positions.astype(jnp.float32)[..., None] * frequencies.astype(np.float32)[None, None]  # [B, S, D/2]
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [B, S, n, D] turned by its positions; pair i is dimensions i and i + D/2. Float32 inside."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]  # [B, S, 1, D/2]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def project(params: dict[str, Any], x: jax.Array, cos: jax.Array, sin: jax.Array, config: ModelConfig) -> Queries:
    """x [B, S, H], normed, to queries, keys and values: products, biases, norms, clip, rotation, in that order.

    Args:
      params: one layer's; see `decoder.init_decoder`.
      cos, sin: [B, S, D/2] float32, of `rope_tables`.
    """
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    rows = {}
    for name, count in heads.items():
        y = linear(x, params[name], params.get(f"{name}_bias"))  # [B, S, n*D]
        norm = params.get(f"{name}_norm")
        if norm is not None and config.qk_norm == "projection":
            y = rms_norm(y, norm, config.norm_eps)
        if config.qkv_clip is not None:
            y = jnp.clip(y, -config.qkv_clip, config.qkv_clip)
        y = y.reshape(*y.shape[:2], count, config.head_dim)  # [B, S, n, D]
        if norm is not None and config.qk_norm == "head":
            y = rms_norm(y, norm, config.norm_eps)
        rows[name] = y
    return Queries(rotate(rows["q"], cos, sin), rotate(rows["k"], cos, sin), rows["v"])


def attention_scale(config: ModelConfig) -> float:
    """The factor on the logits of attention."""
    return config.head_dim**-0.5 if config.attention_multiplier is None else config.attention_multiplier


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    query_positions: jax.Array,
    key_positions: jax.Array,
    key_mask: jax.Array | None,
    window: jax.Array | int,
    sinks: jax.Array | None,
    scale: float,
) -> jax.Array:
    """Softmax attention in float32. A query sees keys at its own and the `window` - 1 positions before it.

    More than 1024 queries go block by block, and each block is computed again in the backward.

    Args:
      queries: [B, S, Q, D].
      keys, values: [B, Z, N, D], N dividing Q.
      query_positions, key_positions: [B, S], [B, Z] integers.
      key_mask: bool [B, Z]; nobody sees False ones. None: all are there.
      window: how many positions a query sees; `NO_WINDOW` for all.
      sinks: [Q], a logit a head that takes part in the softmax and is dropped; None: none.
      scale: factor on the logits.

    Returns:
      [B, S, Q*D] in the queries' dtype. A query that sees nothing gets finite values that mean nothing.
    """
    b, s = queries.shape[:2]
    block = functools.partial(
        _attend,
        keys=keys,
        values=values,
        key_positions=key_positions,
        key_mask=key_mask,
        window=window,
        sinks=sinks,
        scale=scale,
    )
    if s <= _QUERY_BLOCK:
        return block(queries, query_positions)
    blocks = -(-s // _QUERY_BLOCK)
    short = -s % blocks
    queries = jnp.pad(queries, ((0, 0), (0, short), (0, 0), (0, 0)))
    query_positions = jnp.pad(query_positions, ((0, 0), (0, short)))
    # A block takes every C-th query, so that positions spread over devices stay spread in every block.
    apart = lambda a: jnp.moveaxis(a.reshape(b, -1, blocks, *a.shape[2:]), 2, 0)  # [C, B, S/C, ...]
    out = jax.lax.map(jax.checkpoint(lambda at: block(*at)), (apart(queries), apart(query_positions)))
    return jnp.moveaxis(out, 0, 2).reshape(b, s + short, -1)[:, :s]  # [B, S, Q*D]


def _attend(
    queries: jax.Array,
    query_positions: jax.Array,
    *,
    keys: jax.Array,
    values: jax.Array,
    key_positions: jax.Array,
    key_mask: jax.Array | None,
    window: jax.Array | int,
    sinks: jax.Array | None,
    scale: float,
) -> jax.Array:
    b, s, heads, d = queries.shape
    n = keys.shape[2]
    grouped = queries.reshape(b, s, n, heads // n, d)  # [B, S, N, G, D]
    logits = jnp.einsum("bsngd,bznd->bngsz", grouped, keys, preferred_element_type=jnp.float32) * scale
    distance = query_positions[:, :, None] - key_positions[:, None, :]  # [B, S, Z]
    seen = (distance >= 0) & (distance < window)
    if key_mask is not None:
        seen &= key_mask[:, None, :]
    logits = jnp.where(seen[:, None, None], logits, jnp.finfo(jnp.float32).min)
    if sinks is None:
        weights = jax.nn.softmax(logits, axis=-1)
    else:
        sink = sinks.astype(jnp.float32).reshape(1, n, heads // n, 1, 1)
        most = jax.lax.stop_gradient(jnp.maximum(logits.max(-1, keepdims=True), sink))
        weights = jnp.exp(logits - most)
        weights = weights / (weights.sum(-1, keepdims=True) + jnp.exp(sink - most))
    out = jnp.einsum("bngsz,bznd->bsngd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return out.astype(queries.dtype).reshape(b, s, heads * d)  # [B, S, Q*D]


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [..., n] @ weight [n, m] (+ bias [m]) with float32 sums, in x's dtype."""
    y = jnp.matmul(x, weight.astype(x.dtype), preferred_element_type=jnp.float32)
    return (y if bias is None else y + _row(bias, y.ndim).astype(jnp.float32)).astype(x.dtype)


def _row(vector: jax.Array, ndim: int) -> jax.Array:
    """A vector with leading axes of 1, `ndim` axes in all."""
    return vector.reshape(*(1,) * (ndim - 1), -1)
