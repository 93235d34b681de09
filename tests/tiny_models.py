"""Tiny decoders of every published family: what a family differs in, at sizes that compile in a second."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_ep import CommConfig, ModelConfig, MoEConfig, RopeConfig, RouterConfig

VOCAB = 96


def tiny_model(
    router: RouterConfig, layer: dict[str, Any] | None = None, experts: int = 8, **model: Any
) -> ModelConfig:
    """Two layers, four heads of 8 that share two of keys and values."""
    moe = MoEConfig(hidden_size=32, intermediate_size=24, num_experts=experts, router=router, **(layer or {}))
    fields = {"vocab_size": VOCAB, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, **model}
    return ModelConfig(moe=moe, **fields)


_YARN = RopeConfig(theta=150000.0, scaling="yarn", factor=32.0, original_max_position=64, truncate=False)
_SHARED = {"num_shared_experts": 1, "shared_intermediate_size": 40, "shared_gate": True}
_GRANITE = {
    "embedding_multiplier": 0.25,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.5,
    "logits_divisor": 2.0,
}

TINY = {
    "mixtral": tiny_model(RouterConfig(2), rope=RopeConfig(theta=1e6), window=12),
    "olmoe": tiny_model(RouterConfig(3, normalize_weights=False), qk_norm="projection", qkv_clip=1.5),
    "qwen2_moe": tiny_model(RouterConfig(4, normalize_weights=False), _SHARED, experts=6, qkv_bias=True),
    "qwen3_moe": tiny_model(RouterConfig(4), experts=10, qk_norm="head", head_dim=16),
    "gpt_oss": tiny_model(
        RouterConfig(4, softmax_after_top_k=True, logit_bias=True),
        {"activation": "gpt_oss", "expert_bias": True},
        rope=_YARN,
        qkv_bias=True,
        output_bias=True,
        attention_sinks=True,
        window=8,
        window_layers=(True, False),
    ),
    "granitemoe": tiny_model(RouterConfig(2, softmax_after_top_k=True), tie_embeddings=True, **_GRANITE),
}


def with_comm(config: ModelConfig, comm: CommConfig) -> ModelConfig:
    return dataclasses.replace(config, moe=dataclasses.replace(config.moe, comm=comm))
