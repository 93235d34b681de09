"""Fields of a hub config.json, read one by one, so that what nobody read can be refused. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from jax_ep.config import DTYPES, one_of, positive_int, refuse
from jax_ep.model_config import ROPE_SCALINGS, RopeConfig

_REQUIRED = object()

# Keys that change nothing here: names and versions, special tokens, dropout and noise of a training run (not applied
# here), what a library returns beside the logits.
HARMLESS = frozenset(
    """
    _attn_implementation_autoset _name_or_path architectures attention_dropout auto_map bos_token_id finetuning_task
    id2label initial_context_length initializer_range is_decoder label2id model_type output_attentions
    output_hidden_states output_router_logits pad_token_id prefix pretraining_tp problem_type return_dict
    router_jitter_noise sep_token_id task_specific_params tokenizer_class torchscript transformers_version unsloth_fixed
    unsloth_version use_cache
    """.split()  # noqa: SIM905
)

# Values that work where a file has none, for the refusal: transformers' own defaults.
_EXAMPLES: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "vocab_size": 32000,
    "intermediate_size": 1024,
    "moe_intermediate_size": 768,
    "shared_expert_intermediate_size": 5632,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-06,
    "norm_topk_prob": False,
    "sliding_window": 128,
    "clip_qkv": None,
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "rope_theta": 10000.0,
}


class HubFields:
    """The keys of a config.json, with a record of those that were read.

    Every method takes a key and further spellings of it; two that say different things are refused.
    """

    def __init__(self, hub: Mapping[str, Any], family: str):
        self.hub = hub
        self.family = family
        self.read: set[str] = set()

    def get(self, key: str) -> Any:
        """The value, None where there is none."""
        self.read.add(key)
        return self.hub.get(key)

    def null(self, key: str) -> bool:
        """Whether the key is there and says null, which is not the same as not being there."""
        self.read.add(key)
        return key in self.hub and self.hub[key] is None

    def either(self, *keys: str) -> Any:
        """The value under one of several spellings."""
        said = {key: value for key in keys if (value := self.get(key)) is not None}
        first = next(iter(said), keys[0])
        for key, value in said.items():
            if key != first and value != said[first]:
                refuse(key, value, f"{first} is another spelling of it and says {said[first]!r}", said[first])
        return said.get(first)

    def _present(self, keys: tuple[str, ...], missing: Any) -> Any:
        value = self.either(*keys)
        if value is None and missing is _REQUIRED:
            refuse(keys[0], None, f"a config.json of {self.family} has to say it", _EXAMPLES[keys[0]])
        return missing if value is None else value

    def integer(self, *keys: str, missing: Any = _REQUIRED, most: int = 2**31 - 1) -> int:
        """An integer of at least 1, and at most `most`: nobody should wait for what a broken file asks for."""
        value = self._present(keys, missing)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            refuse(self._spelling(keys), value, "must be an integer of at least 1", _EXAMPLES[keys[0]] or 1)
        if value > most:
            refuse(self._spelling(keys), value, f"must be at most {most}", _EXAMPLES[keys[0]] or 1)
        return value

    def number(self, *keys: str, missing: Any = _REQUIRED, zero: bool = False) -> float:
        """A finite number above 0; with `zero`, 0 as well."""
        value = self._present(keys, missing)
        good = not isinstance(value, bool) and isinstance(value, int | float) and abs(value) <= sys.float_info.max
        if not good or value < 0 or (value == 0 and not zero):
            rule = f"must be a finite number {'of at least' if zero else 'above'} 0"
            refuse(self._spelling(keys), value, rule, _EXAMPLES.get(keys[0], 0.001) or 1.0)
        return float(value)

    def flag(self, *keys: str, missing: Any = _REQUIRED) -> bool:
        value = self._present(keys, missing)
        if not isinstance(value, bool):
            refuse(self._spelling(keys), value, "must be true or false", _EXAMPLES.get(keys[0], False))
        return value

    def only(self, key: str, allowed: Any, rule: str, missing: Any) -> None:
        """Refuses every value but one."""
        value = self._present((key,), missing)
        if value != allowed or isinstance(value, bool) != isinstance(allowed, bool):
            refuse(key, value, rule, allowed)

    def dtype(self, *keys: str) -> str:
        """The name of a dtype, float32 where there is none."""
        value = self._present(keys, "float32")
        name = value.removeprefix("torch.") if isinstance(value, str) else value
        one_of(self._spelling(keys), name, DTYPES)
        return str(name)

    def tokens(self, key: str) -> tuple[int, ...]:
        """Token ids: none, one or a list of them."""
        value = self.get(key)
        return () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)

    def layer_types(self, layers: int, allowed: tuple[str, ...]) -> list[str]:
        """The kind of attention of each layer."""
        value = self.get("layer_types")
        works = [allowed[i % len(allowed)] for i in range(layers)]
        if value is None:
            refuse("layer_types", None, f"a config.json of {self.family} has to say it", works)
        if not isinstance(value, list | tuple) or len(value) != layers or not all(v in allowed for v in value):
            refuse("layer_types", value, f"must hold {' or '.join(allowed)} for each of {layers} layers", works)
        return list(value)

    def refuse_unknown(self) -> None:
        """Refuses the first key that was not read and may change what is computed."""
        for key, value in self.hub.items():
            if key not in self.read | HARMLESS and value not in (None, False, [], {}, ""):
                refuse(key, value, f"no key of {self.family} that is known here, and it may change the maths", None)

    def _spelling(self, keys: tuple[str, ...]) -> str:
        return next((key for key in keys if self.hub.get(key) is not None), keys[0])


# Keys of the rotary positions that each scaling reads, and the field each becomes.
_ROPE_FIELDS = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_position",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_position",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
    },
}


def read_rope(fields: HubFields, max_position: int) -> RopeConfig:
    """The rotary positions, from rope_theta and rope_scaling or from rope_parameters.

    As in transformers, llama3 and yarn take max_position_embeddings where original_max_position_embeddings is missing.
    """
    said: dict[str, Any] = {}
    spelling = "rope_scaling"  # of the group that a refusal names
    for group in ("rope_scaling", "rope_parameters"):
        value = fields.get(group)
        spelling = group if value else spelling
        if value is not None and not isinstance(value, Mapping):
            refuse(group, value, "must be an object or null", None)
        for key, item in (value or {}).items():
            if item is not None and said.setdefault(key, item) != item:
                refuse(f"{group}.{key}", item, f"rope_scaling says {said[key]!r}", said[key])
    theta, inner = fields.get("rope_theta"), said.pop("rope_theta", None)
    if theta is not None and inner is not None and theta != inner:
        refuse("rope_theta", theta, f"rope_parameters says {inner!r}", inner)
    theta = HubFields({"rope_theta": inner if theta is None else theta}, fields.family).number("rope_theta")
    older, scaling = said.pop("type", None), said.pop("rope_type", None)
    if older is not None and scaling is not None and older != scaling:
        refuse(f"{spelling}.type", older, f"rope_type says {scaling!r}", scaling)
    scaling = scaling or older or "default"
    if scaling not in ROPE_SCALINGS:
        refuse(f"{spelling}.rope_type", scaling, f"must be one of {', '.join(ROPE_SCALINGS)}", "default")
    if said.get("partial_rotary_factor") == 1:
        del said["partial_rotary_factor"]
    names = _ROPE_FIELDS[scaling]
    for key, value in said.items():
        if key not in names and value not in (False, 0):
            refuse(f"{spelling}.{key}", value, f"scaling {scaling!r} does not read it, or it is not supported", None)
    given = {field: said[key] for key, field in names.items() if key in said}
    if scaling in ("llama3", "yarn"):
        given.setdefault("original_max_position", max_position)
        positive_int(f"{spelling}.original_max_position_embeddings", given["original_max_position"], max_position)
    if scaling == "yarn":
        given.setdefault("factor", max_position / given["original_max_position"])
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    for key in needed.get(scaling, ()):
        if key not in given:
            refuse(f"{spelling}.{key}", None, f"scaling {scaling!r} needs it", 1.0 if key == "low_freq_factor" else 4.0)
    return RopeConfig(theta=theta, scaling=scaling, **given)


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """The inverse of `read_rope`, in the older spelling."""
    if rope.scaling == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling = {key: getattr(rope, field) for key, field in _ROPE_FIELDS[rope.scaling].items()}
    scaling = {key: value for key, value in scaling.items() if value is not None}
    return {"rope_theta": rope.theta, "rope_scaling": {"rope_type": rope.scaling, **scaling}}
