"""Every refusal of ModelConfig and RopeConfig says field, value, rule and a value that works, and that value works."""

from __future__ import annotations

import dataclasses
import re

import pytest

from jax_ep import CommConfig, ConfigError, ModelConfig, MoEConfig, OverlapConfig, RopeConfig, RouterConfig

MOE = MoEConfig(hidden_size=16, intermediate_size=8, num_experts=8, router=RouterConfig(top_k=2))
SIZES = {"vocab_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "moe": MOE}
CLASSES = {c.__name__: c for c in (RouterConfig, CommConfig, OverlapConfig, MoEConfig, RopeConfig)}
NOT_INTEGERS = (0, -1, 1.0, True, "2", None)
NOT_NUMBERS = (0, -1.0, float("inf"), float("nan"), "1", True)
NOT_FLAGS = (1, 0, None, "yes")
INTEGER, NUMBER, FLAG = "must be an integer of at least 1", "must be a finite number above 0", "must be True or False"
YARN = {"scaling": "yarn", "original_max_position": 4096}


def model(**changes):
    return ModelConfig(**{**SIZES, **changes})


# (maker, field, value, other arguments, what the message says of the rule): maker(**{field: value}, **others) raises.
REFUSALS = [
    *[
        (model, field, bad, {}, INTEGER)
        for field in ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position")
        for bad in NOT_INTEGERS
    ],
    *[(model, "num_kv_heads", bad, {}, "must divide num_heads=4") for bad in (3, 8)],
    *[(model, "head_dim", bad, {}, "must be even") for bad in (1, 7)],
    *[(model, "moe", bad, {}, "must be a MoEConfig") for bad in (None, RouterConfig(2), {})],
    *[(model, "rope", bad, {}, "must be a RopeConfig") for bad in (None, 10000.0, MOE)],
    *[
        (model, field, bad, {}, FLAG)
        for field in ("qkv_bias", "output_bias", "attention_sinks", "tie_embeddings")
        for bad in NOT_FLAGS
    ],
    *[
        (model, field, bad, {}, NUMBER)
        for field in ("norm_eps", "embedding_multiplier", "residual_multiplier", "logits_divisor")
        for bad in (*NOT_NUMBERS, None)
    ],
    *[(model, field, bad, {}, NUMBER) for field in ("attention_multiplier", "qkv_clip") for bad in NOT_NUMBERS],
    *[(model, "balance_loss_coef", bad, {}, NUMBER) for bad in NOT_NUMBERS[1:] if bad != 0],
    *[(model, "qk_norm", bad, {}, "must be one of head, projection") for bad in ("layer", True, 1)],
    *[(model, "recompute", bad, {}, "must be one of none, selective, full") for bad in ("some", None, False)],
    *[(model, "kv_coship", bad, {}, "must be one of contiguous, zigzag") for bad in ("ring", True, 1)],
    *[(model, "window", bad, {}, INTEGER) for bad in NOT_INTEGERS[:-1]],
    (model, "window_layers", (True, False), {}, "there is no window"),
    *[(model, "window_layers", bad, {"window": 8}, "must be a sequence") for bad in (5, "TF", True)],
    *[(model, "stop_tokens", bad, {}, "must be a sequence") for bad in (5, "5", None)],
    (model, "balance_loss_coef", False, {}, NUMBER),
    *[
        (model, "window_layers", bad, {"window": 8}, "must hold a bool for each of num_layers=2")
        for bad in ((), (True,), (True, False, True), (1, 0), ("full", "sliding"))
    ],
    *[
        (model, "stop_tokens", bad, {}, "must be ids in [0, vocab_size=32)")
        for bad in ((32,), (-1,), (1, 2.0), (True,), ("</s>",), (None,))
    ],
    *[(model, "overlap_moe_expert_parallel_comm", bad, {}, "must be True or False") for bad in (1, None)],
    *[(RopeConfig, "scaling", bad, {}, "must be one of default, linear, llama3, yarn") for bad in ("dynamic", None)],
    *[
        (RopeConfig, field, bad, {}, NUMBER)
        for field in ("theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
        for bad in (*NOT_NUMBERS, None)
    ],
    *[(RopeConfig, "theta", bad, {}, "must be above 1") for bad in (1.0, 1e-60)],
    (
        RopeConfig,
        "high_freq_factor",
        1.0,
        {"scaling": "llama3", "original_max_position": 8},
        "must be above low_freq_factor",
    ),
    *[(RopeConfig, "truncate", bad, {}, FLAG) for bad in NOT_FLAGS],
    *[(RopeConfig, "attention_factor", bad, YARN, NUMBER) for bad in NOT_NUMBERS],
    *[
        (RopeConfig, "original_max_position", bad, {"scaling": scaling}, INTEGER)
        for scaling in ("llama3", "yarn")
        for bad in NOT_INTEGERS
    ],
    *[
        (RopeConfig, "original_max_position", 4096, {"scaling": scaling}, f"scaling {scaling!r} does not read it")
        for scaling in ("default", "linear")
    ],
]


def _name(case):
    maker, field, value, others, _ = case
    return "-".join([maker.__name__, field, repr(value)[:40], *(f"{n}={v}" for n, v in others.items())])


@pytest.mark.parametrize("case", REFUSALS, ids=_name)
def test_refusal_names_field_value_rule_and_a_value_that_works(case):
    maker, field, value, others, rule = case
    with pytest.raises(ConfigError) as refusal:
        maker(**{**others, field: value})
    message = str(refusal.value)
    parsed = re.fullmatch(rf"{field}=(?P<value>.*?): (?P<rule>.*); {field}=(?P<works>.*) works", message)
    assert parsed, message
    assert parsed["value"] == repr(value)
    assert rule in parsed["rule"]
    works = eval(parsed["works"], CLASSES)
    assert works != value or type(works) is not type(value)
    assert getattr(maker(**{**others, field: works}), field) == works


@pytest.mark.parametrize(("maker", "cls"), [(model, ModelConfig), (RopeConfig, RopeConfig)])
def test_every_field_has_a_refusal_here(maker, cls):
    assert {f.name for f in dataclasses.fields(cls)} == {field for made, field, *_ in REFUSALS if made is maker}


def test_what_may_be_off_may_be_off():
    config = model(balance_loss_coef=0, qk_norm=None, window=None, qkv_clip=None, attention_multiplier=None)
    assert (config.balance_loss_coef, config.stop_tokens, config.window_layers) == (0, (), None)
    assert RopeConfig(**YARN).attention_factor is None


def test_lists_become_tuples_so_that_a_config_can_be_hashed():
    config = model(window=8, window_layers=[True, False], stop_tokens=[1, 2])
    assert (config.window_layers, config.stop_tokens) == ((True, False), (1, 2))
    assert hash(config) == hash(model(window=8, window_layers=(True, False), stop_tokens=(1, 2)))


@pytest.mark.parametrize("config", [model(), RopeConfig()], ids=lambda c: type(c).__name__)
def test_configs_are_frozen_and_validated_again_by_replace(config):
    field = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, field, 3)
    with pytest.raises(ConfigError, match=field):
        dataclasses.replace(config, **{field: "nothing that works"})
