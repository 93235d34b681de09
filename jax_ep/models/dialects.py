"""What each published family says in a config.json beyond the common fields, read and written.

The meaning of every key is that of HF transformers 5.24.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax_ep.attention import attention_scale
from jax_ep.config import refuse
from jax_ep.model_config import ModelConfig
from jax_ep.models.hub_fields import HubFields

# Fields of the MoEConfig, of its RouterConfig and of the ModelConfig.
_Read = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Family:
    """How one family spells its configuration.

    Attributes:
      architecture: transformers' class.
      experts: the key of E that is written; any of the two spellings is read.
      width: the key of I.
      read: what else the file says -> (fields of the MoEConfig, of the RouterConfig, of the ModelConfig).
      write: the inverse, keys of the file.
      head_dim: the family has this key, and it is written always, not only where hidden_size does not say it.
    """

    architecture: str
    experts: str
    width: str
    read: Callable[[HubFields, int], _Read]
    write: Callable[[ModelConfig], dict[str, Any]]
    head_dim: bool = False


def layer_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """The window of each layer, None where it has none."""
    has = (True,) * config.num_layers if config.window_layers is None else config.window_layers
    return tuple(config.window if w else None for w in has)


def _read_mixtral(fields: HubFields, layers: int) -> _Read:
    window = None if fields.get("sliding_window") is None else fields.integer("sliding_window")
    return {}, {}, {"window": window}


def _read_olmoe(fields: HubFields, layers: int) -> _Read:
    clip = None if fields.get("clip_qkv") is None else fields.number("clip_qkv")
    model = {"qk_norm": "projection", "qkv_clip": clip, **_biases(fields, missing=False)}
    return {}, _norm_topk(fields), model


def _read_qwen2_moe(fields: HubFields, layers: int) -> _Read:
    _every_layer_alike(fields, layers)
    width = fields.integer("shared_expert_intermediate_size")
    moe = {"num_shared_experts": 1, "shared_intermediate_size": width, "shared_gate": True}
    return moe, _norm_topk(fields), {"qkv_bias": fields.flag("qkv_bias", missing=True)}


def _read_qwen3_moe(fields: HubFields, layers: int) -> _Read:
    _every_layer_alike(fields, layers)
    return {}, _norm_topk(fields), {"qk_norm": "head", **_biases(fields, missing=False)}


def _read_gpt_oss(fields: HubFields, layers: int) -> _Read:
    fields.only("swiglu_alpha", 1.702, "no other slope of the activation is supported", missing=1.702)
    fields.only("swiglu_limit", 7.0, "no other limit of the activation is supported", missing=7.0)
    kinds = fields.layer_types(layers, ("sliding_attention", "full_attention"))
    model: dict[str, Any] = {"attention_sinks": True, **_biases(fields, missing=True)}
    fields.get("sliding_window")
    if "sliding_attention" in kinds:
        model["window"] = fields.integer("sliding_window")
        model["window_layers"] = tuple(kind == "sliding_attention" for kind in kinds)
    return {"activation": "gpt_oss", "expert_bias": True}, {"softmax_after_top_k": True, "logit_bias": True}, model


def _read_granitemoe(fields: HubFields, layers: int) -> _Read:
    model = {
        "attention_multiplier": fields.number("attention_multiplier"),
        "embedding_multiplier": fields.number("embedding_multiplier"),
        "residual_multiplier": fields.number("residual_multiplier"),
        "logits_divisor": fields.number("logits_scaling"),
    }
    return {}, {"softmax_after_top_k": True}, {**model, **_biases(fields, missing=False)}


def _norm_topk(fields: HubFields) -> dict[str, Any]:
    return {"normalize_weights": fields.flag("norm_topk_prob")}


def _biases(fields: HubFields, missing: bool) -> dict[str, Any]:
    """attention_bias stands for the biases of all four products."""
    bias = fields.flag("attention_bias", missing=missing)
    return {"qkv_bias": bias, "output_bias": bias}


def _every_layer_alike(fields: HubFields, layers: int) -> None:
    """Refuses the dense layers and windows that the qwen families can have. What they leave unread is set aside."""
    fields.only("use_sliding_window", False, "which layers have the window differs between releases", missing=False)
    fields.only("decoder_sparse_step", 1, "dense layers between are not supported", missing=1)
    if (dense := fields.get("mlp_only_layers")) not in (None, []):
        refuse("mlp_only_layers", dense, "dense layers between are not supported", [])
    if fields.get("layer_types") is not None:
        fields.layer_types(layers, ("full_attention",))
    for unread in ("sliding_window", "max_window_layers", "intermediate_size"):
        fields.get(unread)


def _write_mixtral(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": config.window}


def _write_qwen2_moe(config: ModelConfig) -> dict[str, Any]:
    shared = config.moe.shared_width
    return {**_write_qwen(config), "qkv_bias": config.qkv_bias, "shared_expert_intermediate_size": shared}


def _write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    return {**_write_qwen(config), "attention_bias": config.qkv_bias}


def _write_qwen(config: ModelConfig) -> dict[str, Any]:
    return {
        "norm_topk_prob": config.moe.router.normalize_weights,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": None,
        "intermediate_size": config.moe.shared_width or config.moe.intermediate_size,
    }


def _write_gpt_oss(config: ModelConfig) -> dict[str, Any]:
    windows = layer_windows(config)
    return {
        "attention_bias": config.qkv_bias,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in windows],
        "sliding_window": config.window or 128,  # transformers asks for one also where no layer has it
        "swiglu_limit": 7.0,
    }


def _write_granitemoe(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.qkv_bias,
        "attention_multiplier": attention_scale(config),
        "embedding_multiplier": config.embedding_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "logits_scaling": config.logits_divisor,
    }


def _write_olmoe(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.qkv_bias,
        "clip_qkv": config.qkv_clip,
        "norm_topk_prob": config.moe.router.normalize_weights,
    }


FAMILIES = {
    "mixtral": Family("MixtralForCausalLM", "num_local_experts", "intermediate_size", _read_mixtral, _write_mixtral),
    "olmoe": Family("OlmoeForCausalLM", "num_experts", "intermediate_size", _read_olmoe, _write_olmoe),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM", "num_experts", "moe_intermediate_size", _read_qwen2_moe, _write_qwen2_moe
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", "num_experts", "moe_intermediate_size", _read_qwen3_moe, _write_qwen3_moe, head_dim=True
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM", "num_local_experts", "intermediate_size", _read_gpt_oss, _write_gpt_oss, head_dim=True
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM", "num_local_experts", "intermediate_size", _read_granitemoe, _write_granitemoe
    ),
}
