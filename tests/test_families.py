"""Families: configurations read, written and refused; the place of every tensor; the oracle against HF transformers."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest
from hub_models import GOLDEN, PUBLISHED, SWITCHES, golden_model, tiny
from numpy_decoder import logits
from test_golden import FOLDER

from _common import load_config, override
from jax_ep import CommConfig, ConfigError
from jax_ep.model_config import RopeConfig
from jax_ep.models.families import FAMILIES, config_from_hub, config_to_hub
from jax_ep.models.tensors import tensor_map

CONFIGS = {
    "mixtral_8x7b": "mixtral",
    "olmoe_1b_7b": "olmoe",
    "qwen1_5_moe_a2_7b": "qwen2_moe",
    "qwen3_30b_a3b": "qwen3_moe",
    "gpt_oss_20b": "gpt_oss",
}
families = pytest.mark.parametrize("family", FAMILIES)
golden = pytest.mark.parametrize("family", GOLDEN)


# The oracle.


@golden
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
def test_oracle_gives_the_logits_of_transformers(family, masked):
    hub, tensors = golden_model(family)
    folder = FOLDER / family
    mask = np.load(folder / "attention_mask.npy") if masked else None
    want = np.load(folder / ("logits_masked.npy" if masked else "logits.npy"))
    got = logits(hub, tensors, np.load(folder / "input_ids.npy"), mask)
    assert got.shape == want.shape
    assert np.abs(got - want).max() < 1e-5  # of logits with a deviation of 1


# Configurations.


@pytest.mark.parametrize(("name", "family"), CONFIGS.items())
def test_configs_hold_the_published_models(name, family):
    path = pathlib.Path(__file__).parents[1] / "configs" / f"{name}.py"
    scope: dict = {}
    exec(path.read_text(), scope)
    assert scope["get_model_config"]() == config_from_hub(PUBLISHED[family])
    workload = load_config(name)
    assert workload.moe == scope["get_model_config"]().moe
    assert workload.batch_size * workload.sequence_length == 16384
    assert override(workload, ["hidden_size=64", "dtype=float32"]).moe.hidden_size == 64


def test_published_models_have_the_published_number_of_parameters():
    """Billions, as the model cards say them: 46.7, 6.92, 14.3, 30.5, 20.9, 1.33."""
    billions = {}
    for family, hub in PUBLISHED.items():
        entries = tensor_map(family, config_from_hub(hub))
        billions[family] = round(sum(int(np.prod(e.shape)) for e in entries) / 1e9, 2)
    assert billions == {
        "mixtral": 46.7,
        "olmoe": 6.92,
        "qwen2_moe": 14.32,
        "qwen3_moe": 30.53,
        "gpt_oss": 20.91,
        "granitemoe": 1.33,
    }


@golden
def test_newer_spelling_of_a_file_says_the_same_as_the_older(family):
    """transformers 5 writes rope_parameters, dtype and num_local_experts."""
    newer = golden_model(family)[0]
    older = {**newer, **newer["rope_parameters"], "torch_dtype": f"torch.{newer['dtype']}", "rope_scaling": None}
    for key in ("rope_parameters", "dtype", "rope_type"):
        del older[key]
    if "num_local_experts" in older and family == "qwen3_moe":
        older["num_experts"] = older.pop("num_local_experts")
    assert set(older) != set(newer)
    assert config_from_hub(older) == config_from_hub(newer)


@families
@pytest.mark.parametrize("switched", [False, True], ids=["published", "switched"])
def test_a_config_written_and_read_is_the_same(family, switched):
    for hub in (PUBLISHED[family], tiny(family)):
        changes = SWITCHES[family] if switched else {}
        if "layer_types" in changes:
            changes = {**changes, "layer_types": changes["layer_types"] * (hub["num_hidden_layers"] // 2)}
        config = config_from_hub({**hub, **changes})
        written = config_to_hub(config, family)
        assert config_from_hub(json.loads(json.dumps(written))) == config
        assert switched == (config != config_from_hub(hub))


@families
def test_a_written_config_says_what_the_published_one_says(family):
    """No key of the family gets lost, and no value changes, but for keys without a meaning here."""
    hub = PUBLISHED[family]
    written = config_to_hub(config_from_hub(hub), family)
    unsaid = {"bos_token_id", "pad_token_id", "initializer_range", "output_router_logits", "transformers_version"}
    unsaid |= {"use_cache", "max_window_layers", "experts_per_token", "initial_context_length"}
    unread = {"intermediate_size", "sliding_window"} if family.startswith("qwen") else set()
    assert set(hub) - set(written) <= unsaid
    assert {key for key in set(hub) & set(written) if hub[key] != written[key]} <= unread


def test_dtype_and_comm_may_be_chosen():
    config = config_from_hub(PUBLISHED["mixtral"], comm=CommConfig(mode="padded"), dtype="float32")
    assert (config.moe.dtype, config.moe.param_dtype, config.moe.comm.mode) == ("float32", "float32", "padded")
    config = config_from_hub(tiny("mixtral", torch_dtype="float16"))
    assert (config.moe.dtype, config.moe.param_dtype, config.moe.comm) == ("float16", "float16", CommConfig())
    assert config_from_hub(tiny("mixtral", torch_dtype=...)).moe.dtype == "float32"


@pytest.mark.parametrize(
    ("said", "rope"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, RopeConfig(1000.0, "linear", 4.0)),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 2.0,
                    "original_max_position_embeddings": 32,
                }
            },
            RopeConfig(1000.0, "llama3", 8.0, 32, 1.0, 2.0),
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 8.0}}, RopeConfig(1000.0, "yarn", 8.0, 64)),
        (
            {"rope_scaling": {"rope_type": "yarn", "type": "yarn", "original_max_position_embeddings": 16}},
            RopeConfig(1000.0, "yarn", 4.0, 16),
        ),
        (
            {
                "rope_theta": ...,
                "rope_parameters": {
                    "rope_theta": 500.0,
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "attention_factor": 1.5,
                    "beta_fast": 16.0,
                    "beta_slow": 2.0,
                    "truncate": False,
                    "mscale": None,
                    "partial_rotary_factor": 1.0,
                },
            },
            RopeConfig(500.0, "yarn", 2.0, 64, beta_fast=16.0, beta_slow=2.0, truncate=False, attention_factor=1.5),
        ),
    ],
    ids=["linear", "llama3", "yarn", "yarn by positions", "yarn in the newer spelling"],
)
def test_rotary_scalings(said, rope):
    config = config_from_hub(tiny("qwen3_moe", **said))
    assert config.rope == rope
    assert config_from_hub(config_to_hub(config, "qwen3_moe")).rope == rope


def test_stop_tokens_may_be_several_or_none():
    assert config_from_hub(tiny("mixtral", eos_token_id=[2, 5])).stop_tokens == (2, 5)
    assert config_from_hub(tiny("mixtral", eos_token_id=None)).stop_tokens == ()
    for stop in ((2, 5), ()):
        config = dataclasses.replace(config_from_hub(tiny("mixtral")), stop_tokens=stop)
        assert config_from_hub(config_to_hub(config, "mixtral")) == config


def test_keys_of_other_tools_are_let_through_where_they_are_off():
    extra = {"unsloth_fixed": True, "some_new_switch": False, "another": None, "third": [], "attention_dropout": 0.1}
    assert config_from_hub({**PUBLISHED["mixtral"], **extra}) == config_from_hub(PUBLISHED["mixtral"])


# (family, changes to the tiny config.json, field, what the message says): the value offered works.
REFUSALS = [
    ("mixtral", {"model_type": "llama"}, "model_type", "must be one of mixtral, olmoe, qwen2_moe"),
    ("mixtral", {"model_type": ["mixtral"]}, "model_type", "must be one of"),
    ("mixtral", {"model_type": ...}, "model_type", "must be one of"),
    ("mixtral", {"model_type": "deepseek_v3"}, "model_type", "multi-head latent attention comes later"),
    ("mixtral", {"kv_lora_rank": 16}, "kv_lora_rank", "multi-head latent attention comes later"),
    ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config", "MXFP4 files come later"),
    ("mixtral", {"quantization_config": {"quant_method": "awq"}}, "quantization_config", "files quantised with awq"),
    ("mixtral", {"quantization_config": "fp8"}, "quantization_config", "files quantised with fp8"),
    *[("mixtral", {"hidden_act": bad}, "hidden_act", "no other activation") for bad in ("gelu", True)],
    *[
        ("mixtral", {key: ...}, key, "a config.json of mixtral has to say it")
        for key in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "num_local_experts",
            "num_experts_per_tok",
            "vocab_size",
            "max_position_embeddings",
            "rms_norm_eps",
            "rope_theta",
        )
    ],
    *[
        ("mixtral", {key: bad}, key, "must be an integer of at least 1")
        for key in ("hidden_size", "num_local_experts", "num_key_value_heads", "sliding_window", "vocab_size")
        for bad in (0, 2.0, True, "8")
    ],
    ("gpt_oss", {"num_hidden_layers": 1001}, "num_hidden_layers", "must be at most 1000"),
    ("mixtral", {"num_local_experts": 4097}, "num_local_experts", "must be at most 4096"),
    ("mixtral", {"num_hidden_layers": 1000, "num_local_experts": 201}, "num_hidden_layers", "more than 200000"),
    *[
        ("mixtral", {key: 10**400}, key, "a finite number")
        for key in ("rms_norm_eps", "router_aux_loss_coef", "rope_theta")
    ],
    *[("gpt_oss", {"layer_types": [bad] * 2}, "layer_types", "must hold sliding_attention") for bad in ([], {}, None)],
    ("mixtral", {"vocab_size": 2**31}, "vocab_size", "must be at most 2147483647"),
    *[("mixtral", {"rms_norm_eps": bad}, "rms_norm_eps", "a finite number above 0") for bad in (0, -1, "1", True)],
    *[("olmoe", {"clip_qkv": bad}, "clip_qkv", "a finite number above 0") for bad in (0, "8", float("nan"))],
    ("mixtral", {"router_aux_loss_coef": -0.1}, "router_aux_loss_coef", "a finite number of at least 0"),
    ("mixtral", {"tie_word_embeddings": 1}, "tie_word_embeddings", "must be true or false"),
    ("mixtral", {"head_dim": 8.0}, "head_dim", "must be an integer"),
    ("mixtral", {"num_attention_heads": 6}, "num_attention_heads", "must divide hidden_size=32"),
    *[("mixtral", {"torch_dtype": bad}, "torch_dtype", "must be one of float32") for bad in ("float8_e4m3fn", 16)],
    ("mixtral", {"torch_dtype": ..., "dtype": "auto"}, "dtype", "must be one of float32, bfloat16, float16"),
    ("mixtral", {"dtype": "bfloat16"}, "dtype", "torch_dtype is another spelling of it and says 'float32'"),
    ("mixtral", {"num_experts": 8}, "num_experts", "num_local_experts is another spelling of it and says 6"),
    ("gpt_oss", {"experts_per_token": 2}, "experts_per_token", "num_experts_per_tok is another spelling"),
    ("olmoe", {"norm_topk_prob": ...}, "norm_topk_prob", "a config.json of olmoe has to say it"),
    ("olmoe", {"norm_topk_prob": 1}, "norm_topk_prob", "must be true or false"),
    ("olmoe", {"head_dim": 16}, "head_dim", "norms need 4 heads to make up hidden_size=32"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size", "at least 1"),
    ("qwen2_moe", {"layer_types": ["sliding_attention"] * 2}, "layer_types", "must hold full_attention for each of 2"),
    *[
        change
        for family in ("qwen2_moe", "qwen3_moe")
        for change in (
            (family, {"use_sliding_window": True}, "use_sliding_window", "which layers have the window"),
            (family, {"mlp_only_layers": [0]}, "mlp_only_layers", "dense layers between are not supported"),
            (family, {"decoder_sparse_step": 2}, "decoder_sparse_step", "dense layers between are not supported"),
        )
    ],
    ("gpt_oss", {"swiglu_limit": 10.0}, "swiglu_limit", "no other limit"),
    ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha", "no other slope"),
    ("gpt_oss", {"layer_types": ...}, "layer_types", "has to say it"),
    ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types", "for each of 2 layers"),
    ("gpt_oss", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types", "sliding_attention or full"),
    ("gpt_oss", {"sliding_window": None}, "sliding_window", "has to say it"),
    *[
        ("granitemoe", {key: ...}, key, "a config.json of granitemoe has to say it")
        for key in ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    ],
    *[
        ("mixtral", {key: value}, key, "no key of mixtral that is known here")
        for key, value in (("attention_bias", True), ("clip_qkv", 8.0), ("use_qk_norm", True), ("logits_scaling", 6.0))
    ],
    ("granitemoe", {"sliding_window": 8}, "sliding_window", "no key of granitemoe that is known here"),
    ("mixtral", {"rope_theta": 0}, "rope_theta", "a finite number above 0"),
    ("mixtral", {"rope_scaling": "yarn"}, "rope_scaling", "must be an object or null"),
    ("mixtral", {"rope_parameters": {"rope_theta": 5.0}}, "rope_theta", "rope_parameters says 5.0"),
    ("mixtral", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type", "must be one of"),
    ("mixtral", {"rope_scaling": {"rope_type": ["yarn"]}}, "rope_scaling.rope_type", "must be one of"),
    ("mixtral", {"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "rope_scaling.type", "says 'yarn'"),
    ("mixtral", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor", "scaling 'linear' needs it"),
    ("mixtral", {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.factor", "scaling 'llama3' needs it"),
    ("mixtral", {"rope_scaling": {"rope_type": "yarn", "mscale": 0.7}}, "rope_scaling.mscale", "is not supported"),
    ("mixtral", {"rope_scaling": {"factor": 4.0}}, "rope_scaling.factor", "scaling 'default' does not read it"),
    ("mixtral", {"rope_parameters": {"full": {"factor": 4}}}, "rope_parameters.full", "'default' does not read it"),
    (
        "mixtral",
        {"rope_scaling": {"partial_rotary_factor": 0.5}},
        "rope_scaling.partial_rotary_factor",
        "is not supported",
    ),
    (
        "mixtral",
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"factor": 2.0}},
        "rope_parameters.factor",
        "rope_scaling says 4.0",
    ),
]


def _mended(hub, field, works):
    """The config.json with the value of the refusal in place."""
    *outer, key = field.split(".")
    if not outer:
        return {**hub, key: works}
    inner = {name: value for name, value in hub[outer[0]].items() if name != "type" or key != "rope_type"}
    return {**hub, outer[0]: {**inner, key: works}}


@pytest.mark.parametrize("case", REFUSALS, ids=lambda c: f"{c[0]}-{c[1]}"[:90])
def test_refusal_names_the_key_and_a_value_that_gets_further(case):
    family, changes, field, rule = case
    hub = tiny(family, **changes)
    with pytest.raises(ConfigError) as refusal:
        config_from_hub(hub)
    parsed = re.fullmatch(rf"{field}=(?P<value>.*?): (?P<rule>.*); {field}=(?P<works>.*) works", str(refusal.value))
    assert parsed, str(refusal.value)
    assert rule in parsed["rule"]
    works = eval(parsed["works"], {"nan": float("nan")})
    again = None
    try:
        config_from_hub(_mended(hub, field, works))
    except ConfigError as error:  # another key may be wrong as well
        again = str(error).partition("=")[0]
    assert again != field


def test_a_file_that_is_no_object_is_refused():
    with pytest.raises(ConfigError, match="must be one object"):
        config_from_hub(["mixtral"])


@pytest.mark.parametrize(
    ("family", "target", "field"),
    [
        ("olmoe", "mixtral", "qk_norm"),
        ("qwen2_moe", "mixtral", "qkv_bias"),
        ("gpt_oss", "qwen3_moe", "qk_norm"),
        ("granitemoe", "mixtral", "embedding_multiplier"),
        ("mixtral", "qwen2_moe", "family"),
        ("mixtral", "granitemoe", "moe.router.softmax_after_top_k"),
        ("qwen3_moe", "gpt_oss", "qk_norm"),
    ],
)
def test_what_a_family_cannot_say_is_refused_when_writing(family, target, field):
    config = config_from_hub(tiny(family, attention_multiplier=0.25) if family == "granitemoe" else tiny(family))
    with pytest.raises(ConfigError, match=rf"^{re.escape(field)}=.*(cannot say this|cannot hold such a model)"):
        config_to_hub(config, target)
    with pytest.raises(ConfigError, match=rf"^{re.escape(field)}="):
        tensor_map(target, config)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"attention_multiplier": 0.5}, "attention_multiplier"),
        ({"window": 8}, "window"),
        ({"attention_sinks": True}, "attention_sinks"),
        ({"rope": RopeConfig(scaling="linear", factor=2.0), "logits_divisor": 2.0}, "logits_divisor"),
    ],
)
def test_single_fields_that_cannot_be_written(changes, field):
    config = dataclasses.replace(config_from_hub(tiny("olmoe")), **changes)
    with pytest.raises(ConfigError, match=f"^{field}="):
        config_to_hub(config, "olmoe")


def test_windows_are_compared_by_what_they_mean():
    config = config_from_hub(tiny("mixtral", sliding_window=5))
    assert config_to_hub(dataclasses.replace(config, window_layers=(True, True)), "mixtral")["sliding_window"] == 5
    none = dataclasses.replace(config, window_layers=(False, False))
    with pytest.raises(ConfigError, match=r"^window_layers=.*cannot say this; window_layers=None works"):
        config_to_hub(none, "mixtral")
    oss = config_from_hub(tiny("gpt_oss"))
    assert config_to_hub(dataclasses.replace(oss, window=None, window_layers=None), "gpt_oss")["sliding_window"] == 128


@families
def test_nonsense_under_any_key_is_read_or_refused_and_nothing_else(family):
    hub = tiny(family)
    inner = ("rope_type", "type", "factor", "original_max_position_embeddings", "truncate", "beta_fast", "rope_theta")
    for value in (None, [], {}, "", "x", -1, 0, 1e400, float("nan"), True, 2**70, [1], [None], {"a": 1}, [[]], b"x"):
        for key in (*hub, "rope_parameters", "dtype", "num_experts", "anything", "use_sliding_window"):
            try_reading({**hub, key: value})
        for key in inner:
            for kind in ("default", "linear", "llama3", "yarn"):
                try_reading({**hub, "rope_scaling": {"rope_type": kind, "factor": 2.0, key: value}})


def try_reading(hub):
    try:
        config = config_from_hub(hub)
    except ConfigError:
        return
    hash(config)
