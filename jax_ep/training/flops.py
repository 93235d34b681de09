"""Floating-point operations of a model's training, counted by formula: what has to be computed, whoever computes it how
often. Recomputed activations, padding and masked-out attention do not count.

Letters: T tokens, H hidden, V vocabulary, K top_k, E experts, I intermediate, W width of the shared experts, Q query
heads, D head_dim.
"""

from __future__ import annotations

from jax_ep.model_config import ModelConfig
from jax_ep.models.decoder import attention_widths


def model_flops(config: ModelConfig, batch: int, sequence: int) -> int:
    """Of the forward and backward of `batch` whole sequences, over all devices: a multiplication and an addition for
    every weight that a token meets and every pair of query and key that see each other, three times: forward, gradient
    of inputs, gradient of weights.
    """
    moe, tokens = config.moe, batch * sequence
    h, layers = moe.hidden_size, config.num_layers
    matrices = 3 if moe.gated else 2
    weights = sum(rows * columns for rows, columns in attention_widths(config).values())
    weights += h * moe.num_experts  # router
    weights += moe.router.top_k * matrices * h * moe.intermediate_size
    weights += matrices * h * moe.shared_width + h * moe.shared_gate
    windowed = config.window_layers or (config.window is not None,) * layers
    pairs = batch * sum(_pairs(sequence, config.window if has else None) for has in windowed)
    attention = 2 * config.num_heads * config.head_dim * pairs  # queries x keys, weights x values
    return 3 * 2 * (tokens * (layers * weights + h * config.vocab_size) + attention)


def _pairs(sequence: int, window: int | None) -> int:
    """How many pairs of query and key see each other."""
    seen = min(sequence, window or sequence)
    return seen * (seen + 1) // 2 + (sequence - seen) * seen
