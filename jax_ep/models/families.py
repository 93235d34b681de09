"""Published families of mixture-of-experts decoders: from a hub config.json to a ModelConfig, and back.

What the families compute is what HF transformers 5.24 computes. Nothing of a file is passed over in silence: a key is
used, is known to change nothing that is computed here (`hub_fields.HARMLESS`), or is refused. A key that nobody knows
is let through only where it is off (null, false, 0 or empty): files carry switches of tools and of releases to come,
which are off where the model does not need them. A key that decides what is computed has to be there, as it is in every
published file: releases of transformers have differed in what they take for a missing one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_ep.attention import attention_scale
from jax_ep.config import CommConfig, ConfigError, MoEConfig, RouterConfig, refuse
from jax_ep.model_config import ModelConfig
from jax_ep.models.dialects import FAMILIES, layer_windows
from jax_ep.models.hub_fields import HubFields, read_rope, write_rope

Hub = Mapping[str, Any]

# Families whose attention keeps latent keys and values.
_LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe_lite", "longcat_flash")

_MOST_EXPERTS = 200_000  # over all layers: nobody should wait for what a hostile file says

# Fields with several ways to say the same, compared by what they mean, and fields that are no part of a model.
_SAID_OTHERWISE = ("attention_multiplier", "window", "window_layers")
_HOW_IT_RUNS = ("recompute", "kv_coship", "overlap_moe_expert_parallel_comm")
_SHARED = ("num_shared_experts", "shared_intermediate_size")
_PLACES = ("expert_axis", "token_axes", "shard_sequence", "grouped_backend")


def config_from_hub(hub: Hub, *, comm: CommConfig | None = None, dtype: Any = None) -> ModelConfig:
    """A ModelConfig from the contents of a hub config.json.

    Both spellings of the rotary positions (rope_theta and rope_scaling, or rope_parameters), of the dtype (torch_dtype
    or dtype) and of the number of experts are read.

    Args:
      hub: the parsed file.
      comm: how tokens reach their experts.
      dtype: of parameters and computation; None: the file's, float32 where it names none.

    Raises:
      ConfigError: a family that is not supported, a key that is missing or has no meaning, or one that changes what the
        model computes and is not supported.
    """
    name = family_of(hub)
    family, fields = FAMILIES[name], HubFields(hub, name)
    if fields.get("quantization_config") is not None:
        how = hub["quantization_config"]
        method = how.get("quant_method") if isinstance(how, Mapping) else how
        later = "MXFP4 files come later" if method == "mxfp4" else f"files quantised with {method} are not read"
        refuse("quantization_config", how, f"{later}; take the model's bfloat16 files", None)
    fields.only("hidden_act", "silu", "no other activation is supported", missing="silu")
    hidden = fields.integer("hidden_size")
    layers = fields.integer("num_hidden_layers", most=1000)
    heads = fields.integer("num_attention_heads")
    kv_heads = heads if fields.null("num_key_value_heads") else fields.integer("num_key_value_heads")
    if (head_dim := fields.get("head_dim")) is not None:
        head_dim = fields.integer("head_dim")
    elif hidden % heads:
        refuse("num_attention_heads", heads, f"must divide hidden_size={hidden}, as there is no head_dim", 1)
    else:
        head_dim = hidden // heads
    max_position = fields.integer("max_position_embeddings")
    their_dtype = fields.dtype("torch_dtype", "dtype")
    dtype = their_dtype if dtype is None else dtype
    experts = fields.integer("num_local_experts", "num_experts", most=4096)
    if layers * experts > _MOST_EXPERTS:
        rule = f"with {experts} experts a layer the model has more than {_MOST_EXPERTS}"
        refuse("num_hidden_layers", layers, rule, max(1, _MOST_EXPERTS // experts))
    moe, router, model = family.read(fields, layers)
    config = ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        moe=MoEConfig(
            hidden_size=hidden,
            intermediate_size=fields.integer(family.width),
            num_experts=experts,
            router=RouterConfig(top_k=fields.integer("num_experts_per_tok", "experts_per_token"), **router),
            comm=CommConfig() if comm is None else comm,
            dtype=dtype,
            param_dtype=dtype,
            **moe,
        ),
        norm_eps=fields.number("rms_norm_eps"),
        rope=read_rope(fields, max_position),
        tie_embeddings=fields.flag("tie_word_embeddings", missing=False),
        max_position=max_position,
        balance_loss_coef=fields.number("router_aux_loss_coef", missing=0.01 if name == "olmoe" else 0.001, zero=True),
        stop_tokens=fields.tokens("eos_token_id"),
        **model,
    )
    if name == "olmoe" and heads * head_dim != hidden:
        rule = f"olmoe's norms need {heads} heads to make up hidden_size={hidden}"
        refuse("head_dim", head_dim, rule, hidden // heads)
    fields.refuse_unknown()
    return config


def family_of(hub: Hub) -> str:
    """The model_type of a config.json, refused unless it is a key of `FAMILIES`."""
    if not isinstance(hub, Mapping):
        refuse("config.json", hub, "must be one object", {"model_type": "mixtral"})
    name = hub.get("model_type")
    later = "multi-head latent attention comes later"
    if name in _LATENT:
        refuse("model_type", name, later, "qwen3_moe")
    if hub.get("kv_lora_rank") is not None:
        refuse("kv_lora_rank", hub["kv_lora_rank"], later, None)
    return _known("model_type", name)


def config_to_hub(config: ModelConfig, family: str) -> dict[str, Any]:
    """The contents of a config.json from which `config_from_hub`, and transformers, get this model again.

    Written in the older spelling (rope_theta, torch_dtype), which older and newer releases of transformers read.
    How tokens travel and what is recomputed are not part of a model and are not written; torch_dtype is the
    parameters' dtype.

    Raises:
      ConfigError: no such family, or one that has no word for what this model does.
    """
    entry = FAMILIES[_known("family", family)]
    moe, stop = config.moe, config.stop_tokens
    hub: dict[str, Any] = {
        "architectures": [entry.architecture],
        "model_type": family,
        "attention_dropout": 0.0,
        "eos_token_id": None if not stop else stop[0] if len(stop) == 1 else list(stop),
        "hidden_act": "silu",
        "hidden_size": moe.hidden_size,
        entry.width: moe.intermediate_size,
        "max_position_embeddings": config.max_position,
        "num_attention_heads": config.num_heads,
        "num_experts_per_tok": moe.router.top_k,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        entry.experts: moe.num_experts,
        "rms_norm_eps": config.norm_eps,
        "router_aux_loss_coef": config.balance_loss_coef,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": moe.param_dtype,
        "vocab_size": config.vocab_size,
        **write_rope(config.rope),
        **entry.write(config),
    }
    if entry.head_dim or config.num_heads * config.head_dim != moe.hidden_size:
        hub["head_dim"] = config.head_dim
    _refuse_what_differs(config, _read_back(hub, config, family), family)
    return hub


def _known(field: str, name: Any) -> str:
    if not isinstance(name, str) or name not in FAMILIES:
        refuse(field, name, f"must be one of {', '.join(FAMILIES)}", "mixtral")
    return str(name)


def _read_back(hub: Hub, config: ModelConfig, family: str) -> ModelConfig:
    try:
        return config_from_hub(hub)
    except ConfigError as error:
        refuse("family", family, f"cannot hold such a model: {error}", _other_family(config))


def _other_family(config: ModelConfig) -> str:
    """A family whose checkpoints have this model's peculiarities, or the plainest."""
    moe = config.moe
    if moe.activation == "gpt_oss":
        return "gpt_oss"
    if moe.num_shared_experts:
        return "qwen2_moe"
    if moe.router.softmax_after_top_k:
        return "granitemoe"
    return {"head": "qwen3_moe", "projection": "olmoe"}.get(str(config.qk_norm), "mixtral")


def _refuse_what_differs(config: ModelConfig, read: ModelConfig, family: str) -> None:
    """Refuses the first field that does not survive being written. Fields that are not the model's are left out."""
    pairs: list[tuple[str, Any, Any, set[str]]] = [
        ("", config, read, {"moe", "rope", *_HOW_IT_RUNS, *_SAID_OTHERWISE}),
        ("moe.", config.moe, read.moe, {"comm", "overlap", "dtype", "router", *_PLACES, *_SHARED}),
        ("moe.router.", config.moe.router, read.moe.router, set()),
        ("rope.", config.rope, read.rope, set()),
    ]
    rule = f"a config.json of {family} cannot say this"
    for prefix, ours, theirs, free in pairs:
        for name in (f.name for f in dataclasses.fields(ours) if f.name not in free):
            if getattr(ours, name) != getattr(theirs, name):
                refuse(prefix + name, getattr(ours, name), rule, getattr(theirs, name))
    if config.moe.shared_width != read.moe.shared_width:
        refuse("moe.num_shared_experts", config.moe.num_shared_experts, rule, read.moe.num_shared_experts)
    if attention_scale(config) != attention_scale(read):
        refuse("attention_multiplier", config.attention_multiplier, rule, read.attention_multiplier)
    if layer_windows(config) != layer_windows(read):
        field = "window" if config.window_layers is None or read.window is None else "window_layers"
        refuse(field, getattr(config, field), rule, getattr(read, field))
