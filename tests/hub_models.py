"""Configurations as the hub has them, published and tiny, and random checkpoints for them. Helpers of tests."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from test_golden import FOLDER, read_safetensors

from jax_ep.models.families import config_from_hub
from jax_ep.models.tensors import tensor_map, to_ours

Hub = dict[str, Any]

# config.json of mistralai/Mixtral-8x7B-v0.1, allenai/OLMoE-1B-7B-0924, Qwen/Qwen1.5-MoE-A2.7B, Qwen/Qwen3-30B-A3B,
# openai/gpt-oss-20b (without its quantization_config) and ibm-granite/granite-3.0-1b-a400m-base.
PUBLISHED: dict[str, Hub] = {
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    },
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": None,
        "eos_token_id": 50279,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0",
        "use_cache": True,
        "vocab_size": 50304,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.39.0.dev0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.55.0.dev0",
        "use_cache": True,
        "vocab_size": 201088,
    },
    "granitemoe": {
        "architectures": ["GraniteMoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_multiplier": 0.015625,
        "bos_token_id": 0,
        "embedding_multiplier": 12.0,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 512,
        "logits_scaling": 6.0,
        "max_position_embeddings": 4096,
        "model_type": "granitemoe",
        "num_attention_heads": 16,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "pad_token_id": 0,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000,
        "router_aux_loss_coef": 0.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.46.0.dev0",
        "use_cache": True,
        "vocab_size": 49155,
    },
}


SWITCHES = {  # what a family can say beside what its published model says
    "mixtral": {"sliding_window": 5},
    "olmoe": {"clip_qkv": 0.7, "attention_bias": True},
    "qwen2_moe": {"qkv_bias": False, "norm_topk_prob": True},
    "qwen3_moe": {"attention_bias": True, "norm_topk_prob": False},
    "gpt_oss": {"attention_bias": False, "layer_types": ["full_attention", "sliding_attention"]},
    "granitemoe": {"attention_bias": True, "tie_word_embeddings": False},
}

# Families with reference values under tests/golden.
GOLDEN = ("mixtral", "olmoe", "qwen3_moe", "gpt_oss")


def golden_model(family: str) -> tuple[Hub, dict[str, np.ndarray]]:
    """The config.json and the checkpoint under tests/golden."""
    folder = FOLDER / family
    return json.loads((folder / "config.json").read_text()), read_safetensors(folder / "model.safetensors")


def tiny(family: str, **changes: Any) -> Hub:
    """The published configuration with tiny sizes, 2 layers, 6 experts, and changes; a value of ... drops a key."""
    small = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "intermediate_size": 24,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 40,
        "num_experts": 6,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "experts_per_token": 3,
        "head_dim": 16,
        "torch_dtype": "float32",
        "eos_token_id": 2,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "rope_theta": 1000.0,
    }
    hub = {**PUBLISHED[family], **{key: value for key, value in small.items() if key in PUBLISHED[family]}}
    if family == "mixtral":
        hub["sliding_window"] = None
    return {key: value for key, value in {**hub, **changes}.items() if value is not ...}


def random_tensors(hub: Hub, seed: int = 0) -> dict[str, np.ndarray]:
    """A float32 checkpoint in the hub's names, of numbers large enough for routers and softmaxes to choose clearly."""
    numbers = np.random.default_rng(seed)
    tensors = {}
    for entry in tensor_map(hub["model_type"], config_from_hub(hub)):
        name = entry.name
        mean, deviation = (1.0, 0.2) if "norm" in name else (0.0, 0.5 if "bias" in name or "sinks" in name else 0.25)
        tensors[name] = numbers.normal(mean, deviation, entry.shape).astype(np.float32)
    return tensors


def params_of(hub: Hub, tensors: dict[str, np.ndarray], ranks: int = 1) -> dict[str, Any]:
    """Parameters of a decoder from a checkpoint in memory, experts padded to divide over `ranks`."""
    config = config_from_hub(hub)
    padded = config.moe.padded_experts(ranks)
    flat: dict[tuple[str, ...], np.ndarray] = {}
    for entry in tensor_map(hub["model_type"], config):
        for path, part in zip(entry.paths, to_ours(entry, tensors[entry.name]), strict=True):
            if entry.layer is None:
                flat[path] = part
                continue
            experts = "experts" in path
            shape = part.shape[1:] if entry.stacked else part.shape
            whole = (config.num_layers, padded, *shape) if experts else (config.num_layers, *shape)
            leaf = flat.setdefault(path, np.zeros(whole, part.dtype))
            if entry.expert is not None:
                leaf[entry.layer, entry.expert] = part
            elif experts:
                leaf[entry.layer, : len(part)] = part
            else:
                leaf[entry.layer] = part
    params: dict[str, Any] = {}
    for path, leaf in flat.items():
        place = params
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = leaf
    return params
