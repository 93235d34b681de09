"""A whole decoder in loops and float64, straight from a hub config.json and hub tensors: the oracle of the models.

It shares no line with the library: names, layouts, rotary positions, attention, routing and experts are written down
once more, token by token and expert by expert. tests/test_families.py holds it against logits of HF transformers, and
during development so it was for all six families, with fused square experts and every rotary scaling: the largest
difference was 8e-6, transformers' own float32 rounding.

Letters: B batch, S sequence, V vocabulary, H hidden, N query heads, M key/value heads, D head_dim, E experts, K top_k,
I intermediate.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Hub = dict[str, Any]
Tensors = dict[str, np.ndarray]


def logits(hub: Hub, tensors: Tensors, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """ids [B, S] -> logits [B, S, V] float64. Keys where mask is 0 are not seen; positions count from 0 all the same.

    A query that sees neither a key nor a sink gives NaN: nothing defines it.
    """
    tensors = {name: array.astype(np.float64) for name, array in tensors.items()}
    rows = [_sequence(hub, tensors, ids[b], None if mask is None else mask[b]) for b in range(len(ids))]
    return np.stack(rows)


def blocks(hub: Hub, tensors: Tensors, layer: int, x: np.ndarray) -> np.ndarray:
    """x [T, H] through the mixture of experts of one layer -> [T, H] float64."""
    tensors = {name: array.astype(np.float64) for name, array in tensors.items()}
    return np.stack([_moe(hub, tensors, f"model.layers.{layer}.", row.astype(np.float64)) for row in x])


def _sequence(hub: Hub, t: Tensors, ids: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    eps = hub["rms_norm_eps"]
    residual = hub.get("residual_multiplier", 1.0)
    x = [t["model.embed_tokens.weight"][token] * hub.get("embedding_multiplier", 1.0) for token in ids]
    for layer in range(hub["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        normed = [_rms_norm(row, t[prefix + "input_layernorm.weight"], eps) for row in x]
        mixed = _attention(hub, t, layer, normed, mask)
        x = [row + residual * out for row, out in zip(x, mixed)]
        normed = [_rms_norm(row, t[prefix + "post_attention_layernorm.weight"], eps) for row in x]
        x = [row + residual * _moe(hub, t, prefix, n) for row, n in zip(x, normed)]
    head = t["model.embed_tokens.weight"] if hub.get("tie_word_embeddings") else t["lm_head.weight"]
    x = [_rms_norm(row, t["model.norm.weight"], eps) for row in x]
    return np.stack([head @ row / hub.get("logits_scaling", 1.0) for row in x])


def _rms_norm(row: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return row / math.sqrt(float(np.mean(row * row)) + eps) * weight


# Attention.


def _attention(hub: Hub, t: Tensors, layer: int, x: list[np.ndarray], mask: np.ndarray | None) -> list[np.ndarray]:
    """One layer's attention over the rows of a sequence, head by head, query by query, key by key."""
    heads, kv_heads = hub["num_attention_heads"], hub["num_key_value_heads"] or hub["num_attention_heads"]
    size = hub.get("head_dim") or hub["hidden_size"] // heads
    prefix = f"model.layers.{layer}.self_attn."
    queries = [_heads(hub, t, prefix, "q", row, heads, size) for row in x]  # S of [N, D]
    keys = [_heads(hub, t, prefix, "k", row, kv_heads, size) for row in x]
    values = [_heads(hub, t, prefix, "v", row, kv_heads, size) for row in x]
    queries = [[_rotate(hub, head, position, size) for head in row] for position, row in enumerate(queries)]
    keys = [[_rotate(hub, head, position, size) for head in row] for position, row in enumerate(keys)]
    factor = hub.get("attention_multiplier", size**-0.5)
    window = _window(hub, layer)
    outputs = []
    for i in range(len(x)):
        seen = [j for j in range(i + 1) if (window is None or i - j < window) and (mask is None or mask[j])]
        mixed = []
        for head in range(heads):
            kv = head // (heads // kv_heads)
            scores = [factor * float(queries[i][head] @ keys[j][kv]) for j in seen]
            sink = float(t[prefix + "sinks"][head]) if prefix + "sinks" in t else None
            scores = scores if sink is None else [*scores, sink]
            weights = _softmax(scores)[: len(seen)] if scores else []
            start = np.full(size, 0.0 if scores else np.nan)
            mixed.append(sum((w * values[j][kv] for w, j in zip(weights, seen)), start))
        outputs.append(_linear(t, prefix + "o_proj", np.concatenate(mixed)))
    return outputs


def _heads(hub: Hub, t: Tensors, prefix: str, letter: str, row: np.ndarray, heads: int, size: int) -> list[np.ndarray]:
    """The projected row, normed and clipped as the family does, cut into heads."""
    projected = _linear(t, f"{prefix}{letter}_proj", row)
    norm, eps = t.get(f"{prefix}{letter}_norm.weight"), hub["rms_norm_eps"]
    if hub["model_type"] == "olmoe":
        projected = projected if norm is None else _rms_norm(projected, norm, eps)
        if hub.get("clip_qkv") is not None:
            projected = np.clip(projected, -hub["clip_qkv"], hub["clip_qkv"])
    cut = [projected[h * size : (h + 1) * size] for h in range(heads)]
    if hub["model_type"] == "qwen3_moe" and norm is not None:
        cut = [_rms_norm(head, norm, eps) for head in cut]
    return cut


def _linear(t: Tensors, name: str, row: np.ndarray) -> np.ndarray:
    out = t[name + ".weight"] @ row
    return out + t[name + ".bias"] if name + ".bias" in t else out


def _window(hub: Hub, layer: int) -> int | None:
    if hub["model_type"] == "gpt_oss":
        return hub["sliding_window"] if hub["layer_types"][layer] == "sliding_attention" else None
    return hub.get("sliding_window") if hub["model_type"] == "mixtral" else None


def _softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    each = [math.exp(score - top) for score in scores]
    return [one / sum(each) for one in each]


def _rotate(hub: Hub, head: np.ndarray, position: int, size: int) -> np.ndarray:
    """Dimension d turns with dimension d + D/2."""
    turned, half = np.empty(size), size // 2
    for d in range(half):
        frequency, factor = rotary(hub, size, d)
        cos, sin = math.cos(position * frequency) * factor, math.sin(position * frequency) * factor
        turned[d] = head[d] * cos - head[d + half] * sin
        turned[d + half] = head[d + half] * cos + head[d] * sin
    return turned


def rotary(hub: Hub, size: int, d: int) -> tuple[float, float]:
    """Radians a position of the d-th pair of D dimensions, and the factor on cos and sin."""
    rope = {"rope_theta": hub.get("rope_theta"), **(hub.get("rope_scaling") or hub.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    plain = rope["rope_theta"] ** (-2 * d / size)
    if kind == "default":
        return plain, 1.0
    factor = rope["factor"]
    if kind == "linear":
        return plain / factor, 1.0
    trained = rope.get("original_max_position_embeddings", hub["max_position_embeddings"])
    if kind == "llama3":
        wavelength = 2 * math.pi / plain
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        if wavelength < trained / high:
            return plain, 1.0
        if wavelength > trained / low:
            return plain / factor, 1.0
        smooth = (trained / wavelength - low) / (high - low)
        return (1 - smooth) * plain / factor + smooth * plain, 1.0
    assert kind == "yarn"
    ends = []
    for rotations in (rope.get("beta_fast", 32), rope.get("beta_slow", 1)):
        ends.append(size * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope["rope_theta"])))
    low, high = ends
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = min(max((d - low) / (high - low if high != low else 0.001), 0.0), 1.0)
    scale = rope.get("attention_factor") or (0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
    return plain / factor * ramp + plain * (1 - ramp), scale


# The mixture of experts.


def _moe(hub: Hub, t: Tensors, prefix: str, row: np.ndarray) -> np.ndarray:
    """One row [H] through its experts, and the shared one where there is one."""
    family = hub["model_type"]
    out = np.zeros_like(row)
    for expert, weight in _route(hub, _router_logits(t, prefix, family, row)):
        if family == "gpt_oss":
            out = out + weight * _gpt_oss_expert(t, prefix + "mlp.experts.", expert, row)
        elif family == "granitemoe":
            both = t[prefix + "block_sparse_moe.input_linear.weight"][expert] @ row  # [2I]
            half = len(both) // 2
            hidden = _silu(both[:half]) * both[half:]
            out = out + weight * (t[prefix + "block_sparse_moe.output_linear.weight"][expert] @ hidden)
        elif family == "mixtral":
            block = f"{prefix}block_sparse_moe.experts.{expert}."
            out = out + weight * _mlp(t, block + "w1", block + "w3", block + "w2", row)
        else:
            block = f"{prefix}mlp.experts.{expert}."
            out = out + weight * _mlp(t, block + "gate_proj", block + "up_proj", block + "down_proj", row)
    if family == "qwen2_moe":
        block = prefix + "mlp.shared_expert."
        gate = 1 / (1 + math.exp(-float(t[prefix + "mlp.shared_expert_gate.weight"][0] @ row)))
        out = out + gate * _mlp(t, block + "gate_proj", block + "up_proj", block + "down_proj", row)
    return out


def _router_logits(t: Tensors, prefix: str, family: str, row: np.ndarray) -> np.ndarray:
    name = {
        "mixtral": "block_sparse_moe.gate",
        "granitemoe": "block_sparse_moe.router.layer",
        "gpt_oss": "mlp.router",
    }.get(family, "mlp.gate")
    return _linear(t, prefix + name, row)


def _route(hub: Hub, scores: np.ndarray) -> list[tuple[int, float]]:
    """(expert, weight) of the K best experts; of equals the lower."""
    best = sorted(range(len(scores)), key=lambda e: (-scores[e], e))[: hub["num_experts_per_tok"]]
    if hub["model_type"] in ("gpt_oss", "granitemoe"):
        return list(zip(best, _softmax([float(scores[e]) for e in best])))
    probabilities = _softmax([float(score) for score in scores])
    weights = [probabilities[e] for e in best]
    if hub["model_type"] == "mixtral" or hub["norm_topk_prob"]:
        weights = [weight / sum(weights) for weight in weights]
    return list(zip(best, weights))


def _mlp(t: Tensors, gate: str, up: str, down: str, row: np.ndarray) -> np.ndarray:
    return _linear(t, down, _silu(_linear(t, gate, row)) * _linear(t, up, row))


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _gpt_oss_expert(t: Tensors, block: str, expert: int, row: np.ndarray) -> np.ndarray:
    """Gate and up alternate, gate first; matrices are [in, out]; the activation is clamped."""
    both = row @ t[block + "gate_up_proj"][expert] + t[block + "gate_up_proj_bias"][expert]
    hidden = np.empty(len(both) // 2)
    for i in range(len(hidden)):
        gate, up = min(both[2 * i], 7.0), min(max(both[2 * i + 1], -7.0), 7.0)
        hidden[i] = (up + 1) * gate / (1 + math.exp(-1.702 * gate))
    return hidden @ t[block + "down_proj"][expert] + t[block + "down_proj_bias"][expert]
