"""Every refusal of the configurations says field, value, rule and a value that works, and that value does work."""

from __future__ import annotations

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import CommConfig, ConfigError, ModelConfig, MoEConfig, OverlapConfig, RouterConfig, WorkloadConfig

ROUTER = RouterConfig(top_k=2)
LAYER = {"hidden_size": 16, "intermediate_size": 8, "num_experts": 8, "router": ROUTER}
CLASSES = {c.__name__: c for c in (RouterConfig, CommConfig, OverlapConfig, MoEConfig, WorkloadConfig)}


def layer(**changes):
    return MoEConfig(**{**LAYER, **changes})


def routed(field, value, **others):
    """A layer in which one field of the router has `value`."""
    router = {"top_k": 2, **{n: v for n, v in others.items() if n not in LAYER}, field: value}
    return layer(router=RouterConfig(**router), **{n: v for n, v in others.items() if n in LAYER})


def model(**changes):
    sizes = {"vocab_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "moe": layer()}
    return ModelConfig(**{**sizes, **changes})


def workload(**changes):
    return WorkloadConfig(**{"batch_size": 8, "sequence_length": 4, "moe": layer(), **changes})


# (maker, field, value, other arguments, what the message says of the rule): maker(**{field: value}, **others) raises.
REFUSALS = [
    *[
        (RouterConfig, "top_k", bad, {}, "must be an integer of at least 1")
        for bad in (0, -1, 1.0, True, "2", None, np.float32(2))
    ],
    (RouterConfig, "score_function", "relu", {"top_k": 2}, "must be one of sigmoid, softmax"),
    (RouterConfig, "group_score", "mean", {"top_k": 2}, "must be one of top2_sum, max"),
    *[(RouterConfig, "num_groups", bad, {"top_k": 2}, "an integer of at least 1") for bad in (0, 2.0, True)],
    *[(RouterConfig, "top_k_groups", bad, {"top_k": 2}, "an integer of at least 1") for bad in (0, 1.5)],
    (RouterConfig, "top_k_groups", 5, {"top_k": 2, "num_groups": 4}, "cannot exceed num_groups=4"),
    *[
        (RouterConfig, "scale", bad, {"top_k": 2}, "must be a finite number above 0")
        for bad in (0, -1.0, float("inf"), float("nan"), "1", True)
    ],
    *[
        (RouterConfig, field, bad, {"top_k": 2}, "must be True or False")
        for field in ("normalize_weights", "softmax_after_top_k", "logit_bias", "selection_bias")
        for bad in (1, None, "yes")
    ],
    (RouterConfig, "score_function", "sigmoid", {"top_k": 2, "softmax_after_top_k": True}, "softmax of the chosen"),
    (RouterConfig, "softmax_after_top_k", True, {"top_k": 2, "num_groups": 4}, "excludes num_groups=4"),
    (RouterConfig, "softmax_after_top_k", True, {"top_k": 2, "selection_bias": True}, "excludes selection_bias=True"),
    (CommConfig, "mode", "sparse", {}, "must be one of dense, allgather, padded, packed"),
    (CommConfig, "mode", None, {}, "must be one of"),
    (CommConfig, "transport", "nccl", {}, "must be one of auto, ragged, all_to_all, all_gather"),
    *[
        (CommConfig, field, bad, {}, "must be a finite number above 0")
        for field in ("recv_rows_factor", "capacity_factor")
        for bad in (0, -2.0, float("inf"), "2", True)
    ],
    *[
        (CommConfig, "transport", "ragged", {"mode": mode}, 'only mode="packed" reads it')
        for mode in ("dense", "allgather", "padded")
    ],
    *[
        (CommConfig, "recv_rows_factor", None, {"mode": mode}, 'only mode="packed" reads it')
        for mode in ("dense", "allgather", "padded")
    ],
    *[(CommConfig, "capacity_factor", 1.0, {"mode": mode}, "drops nothing") for mode in ("dense", "allgather")],
    *[
        (CommConfig, field, value, {"mode": mode}, 'only mode="packed" reads it')
        for field, value in (("dedup", True), ("num_chunks", 2), ("wire_dtype", "int8"), ("messages", "expert"))
        for mode in ("dense", "allgather", "padded")
    ],
    (CommConfig, "dedup", 1, {}, "must be True or False"),
    *[(CommConfig, "num_chunks", bad, {}, "must be an integer of at least 1") for bad in (0, -1, 2.0, True, None)],
    *[(CommConfig, "wire_dtype", bad, {}, "must be one of float8_e4m3fn, int8") for bad in ("int4", "bfloat16", 8)],
    (CommConfig, "messages", "token", {}, "must be one of rank, expert"),
    (CommConfig, "messages", "expert", {"dedup": True}, "a row serves several experts"),
    (OverlapConfig, "delay_wgrad_compute", 1, {}, "must be True or False"),
    *[
        (model, field, bad, {}, "must be an integer of at least 1")
        for field in ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for bad in (0, 1.5)
    ],
    (model, "num_kv_heads", 3, {}, "must divide num_heads=4"),
    (model, "moe", ROUTER, {}, "must be a MoEConfig"),
    (model, "overlap_moe_expert_parallel_comm", "on", {}, "must be True or False"),
    (OverlapConfig, "moe_shared_expert_overlap", "on", {}, "must be True or False"),
    *[
        (layer, field, bad, {}, "must be an integer of at least 1")
        for field in ("hidden_size", "intermediate_size", "num_experts")
        for bad in (0, -4, 8.0, True, "8")
    ],
    *[(layer, "router", bad, {}, "must be a RouterConfig") for bad in (2, None)],
    (layer, "comm", "packed", {}, "must be a CommConfig"),
    (layer, "overlap", True, {}, "must be a OverlapConfig"),
    (layer, "activation", "relu", {}, "must be one of swiglu, gelu, gpt_oss"),
    *[(layer, "grouped_backend", bad, {}, "must be one of auto, ragged_dot, tokamax") for bad in ("triton", None)],
    (layer, "expert_bias", 1, {}, "must be True or False"),
    (layer, "shared_gate", 1, {"num_shared_experts": 1}, "must be True or False"),
    *[(layer, "num_shared_experts", bad, {}, "must be an integer of at least 0") for bad in (-1, 1.0, True)],
    *[
        (layer, "shared_intermediate_size", bad, {"num_shared_experts": 1}, "must be an integer of at least 1")
        for bad in (0, 2.5)
    ],
    (layer, "shared_intermediate_size", 8, {}, "there are no shared experts"),
    (layer, "shared_gate", True, {}, "there are no shared experts"),
    (routed, "top_k", 9, {}, "cannot exceed num_experts=8"),
    (routed, "top_k", 3, {"num_groups": 4}, "1 groups of 2 experts hold fewer than that"),
    (routed, "num_groups", 3, {}, "must divide num_experts=8"),
    (routed, "group_score", "top2_sum", {"num_groups": 8, "top_k_groups": 4}, "groups of at least two experts"),
    *[
        (layer, field, bad, {}, "must be one of float16, bfloat16, float32")
        for field in ("dtype", "param_dtype")
        for bad in ("float64", "int32", "half precision")
    ],
    *[
        (layer, "token_axes", bad, {}, "name each axis once and expert_axis='expert' last")
        for bad in ((), ("data",), ("data", "expert", "data"), ("expert", "expert"), ("expert", "data"))
    ],
    (layer, "token_axes", ("data", "expert"), {"expert_axis": "ep"}, "expert_axis='ep' last"),
    *[(layer, "shard_sequence", bad, {}, "must be True or False") for bad in (0, "batch")],
    *[
        (workload, field, bad, {}, "must be an integer of at least 1")
        for field in ("batch_size", "sequence_length", "expert_parallel", "data_parallel", "runs")
        for bad in (0, 1.0, True)
    ],
    (workload, "warmup", -1, {}, "must be an integer of at least 0"),
    # The value offered has to fit the other fields as they are.
    (
        RouterConfig,
        "softmax_after_top_k",
        True,
        {"top_k": 2, "num_groups": 4, "top_k_groups": 2},
        "excludes num_groups=4",
    ),
    (CommConfig, "transport", "nccl", {"mode": "padded"}, "must be one of"),
    (CommConfig, "capacity_factor", -1.0, {"mode": "dense"}, "drops nothing"),
    (routed, "top_k", 9, {"num_groups": 8}, "cannot exceed num_experts=8"),
    (routed, "num_groups", 3, {"top_k_groups": 2}, "must divide num_experts=8"),
    (layer, "shared_intermediate_size", 0, {}, ""),
    (layer, "token_axes", ("expert",), {"expert_axis": "data"}, "expert_axis='data' last"),
    *[(layer, field, None, {}, "must be one of") for field in ("dtype", "param_dtype")],
]


def _name(case):
    maker, field, value, others, _ = case
    return "-".join([maker.__name__, field, repr(value), *(f"{n}={v}" for n, v in others.items())])


@pytest.mark.parametrize("case", REFUSALS, ids=_name)
def test_refusal_names_field_value_rule_and_a_value_that_works(case):
    maker, field, value, others, rule = case
    make = (lambda v: routed(field, v, **others)) if maker is routed else (lambda v: maker(**{**others, field: v}))
    with pytest.raises(ConfigError) as refusal:
        make(value)
    message = str(refusal.value)
    parsed = re.fullmatch(rf"{field}=(?P<value>.*?): (?P<rule>.*); {field}=(?P<works>.*) works", message)
    assert parsed, message
    assert parsed["value"] == repr(value)
    assert rule in parsed["rule"]
    works = eval(parsed["works"], {**CLASSES, "nan": float("nan"), "inf": float("inf")})
    assert works != value or type(works) is not type(value)
    made = make(works)
    assert getattr(made.router if maker is routed else made, field) == works


def test_every_field_that_can_be_wrong_has_a_refusal_here():
    refused = {(maker.__name__, field) for maker, field, *_ in REFUSALS}
    for name, cls in (("layer", MoEConfig), ("RouterConfig", RouterConfig), ("CommConfig", CommConfig)):
        missing = {f.name for f in dataclasses.fields(cls)} - {field for maker, field in refused if maker == name}
        assert missing <= {"expert_axis"}, f"{name}: {missing}"


def test_config_error_is_a_value_error():
    assert issubclass(ConfigError, ValueError)


def test_defaults_are_those_of_the_contract():
    c = layer()
    assert c.comm == CommConfig("packed", "auto", 2.0, False, 1, None, None, "rank")
    assert c.overlap == OverlapConfig(False, False)
    assert RouterConfig(2, "softmax", True, False, 1, 1, "max", 1.0, False, False) == ROUTER
    rest = (c.activation, c.expert_bias, c.num_shared_experts, c.shared_intermediate_size, c.shared_gate)
    assert rest == ("swiglu", False, 0, None, False)
    assert (c.dtype, c.param_dtype, c.expert_axis, c.token_axes) == (
        "float32",
        "float32",
        "expert",
        ("data", "expert"),
    )


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (jnp.bfloat16, "bfloat16"),
        (jnp.dtype("bfloat16"), "bfloat16"),
        ("bfloat16", "bfloat16"),
        (np.float16, "float16"),
        (jnp.float32, "float32"),
        (np.dtype("float32"), "float32"),
    ],
)
def test_dtypes_become_names(given, name):
    c = layer(dtype=given, param_dtype=given)
    assert (c.dtype, c.param_dtype) == (name, name)
    assert c == layer(dtype=name, param_dtype=name)


def test_token_axes_become_a_tuple():
    assert layer(token_axes=["data", "expert"]).token_axes == ("data", "expert")
    assert layer(token_axes="expert").token_axes == ("expert",)
    hash(layer(token_axes=["data", "expert"]))


CONFIGS = [ROUTER, CommConfig(), OverlapConfig(), layer(), model(), workload()]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_configs_are_frozen_hashable_and_validated_again_by_replace(config):
    field = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, field, 3)
    assert hash(config) == hash(dataclasses.replace(config))
    with pytest.raises(ConfigError, match=field):
        dataclasses.replace(config, **{field: "nothing that works"})


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        (6, "num_experts=6 <padded with empty experts to 8 on 4, 8 on 8>"),
        (60, "num_experts=60 <padded with empty experts to 64 on 8>"),
        (8, "num_experts=8, router"),
        (64, "num_experts=64, "),
    ],
)
def test_repr_says_how_experts_are_padded(experts, said):
    text = repr(layer(num_experts=experts))
    assert text.startswith("MoEConfig(hidden_size=16, intermediate_size=8, ")
    assert said in text
    assert ("padded" in text.replace('"padded"', "")) == ("padded" in said)
    assert "router=RouterConfig(top_k=2," in text


@pytest.mark.parametrize(("experts", "ranks", "padded"), [(6, 4, 8), (60, 8, 64), (8, 8, 8), (1, 4, 4), (5, 1, 5)])
def test_padded_experts(experts, ranks, padded):
    assert layer(num_experts=experts, router=RouterConfig(1)).padded_experts(ranks) == padded


def test_shared_width_and_gate():
    assert layer().shared_width == 0
    assert layer(num_shared_experts=2).shared_width == 16
    assert layer(num_shared_experts=1, shared_intermediate_size=5).shared_width == 5
    assert [layer(activation=a).gated for a in ("swiglu", "gelu", "gpt_oss")] == [True, False, True]
