"""Every refusal of TrainConfig and OptimizerConfig says field, value, rule and a value that works, and that value
works.
"""

from __future__ import annotations

import dataclasses
import re

import pytest

from jax_ep import CommConfig, ConfigError, ModelConfig, MoEConfig, OverlapConfig, RopeConfig, RouterConfig
from jax_ep.training.config import OptimizerConfig, TrainConfig

MOE = MoEConfig(hidden_size=16, intermediate_size=8, num_experts=8, router=RouterConfig(top_k=2))
MODEL = ModelConfig(vocab_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, moe=MOE, max_position=48)
SIZES = {"model": MODEL, "batch_size": 8, "sequence_length": 16, "steps": 100}
CLASSES = {
    c.__name__: c
    for c in (RouterConfig, CommConfig, OverlapConfig, MoEConfig, RopeConfig, ModelConfig, OptimizerConfig)
}
NOT_INTEGERS = (0, -1, 1.0, True, "2", None)
NOT_NUMBERS = (0, -1.0, float("inf"), float("nan"), "1", True)
NOT_FLAGS = (1, 0, None, "yes")
INTEGER, NUMBER, FLAG = "must be an integer of at least 1", "must be a finite number above 0", "must be True or False"
FROM_ZERO = "must be a finite number of at least 0"


def train(**changes):
    return TrainConfig(**{**SIZES, **changes})


COSHIP = {"model": dataclasses.replace(MODEL, kv_coship="zigzag")}

# (maker, field, value, other arguments, what the message says of the rule): maker(**{field: value}, **others) raises.
REFUSALS = [
    *[(OptimizerConfig, field, bad, {}, NUMBER) for field in ("learning_rate", "eps") for bad in (*NOT_NUMBERS, None)],
    *[(OptimizerConfig, "clip_norm", bad, {}, NUMBER) for bad in NOT_NUMBERS],
    *[
        (OptimizerConfig, field, bad, {}, FROM_ZERO)
        for field in ("weight_decay", "final_fraction", "b1", "b2")
        for bad in (*NOT_NUMBERS[1:], None)
    ],
    (OptimizerConfig, "final_fraction", 1.5, {}, "must be at most 1"),
    *[(OptimizerConfig, field, 1e-300, {}, "is 0 in float32") for field in ("learning_rate", "eps", "clip_norm")],
    *[(OptimizerConfig, field, 1e300, {}, "is inf in float32") for field in ("learning_rate", "eps", "weight_decay")],
    *[(OptimizerConfig, field, 0.99999999, {}, "is 1 in float32") for field in ("b1", "b2")],
    (
        train,
        "batch_size",
        6,
        COSHIP | {"data_parallel": 2},
        "must be a multiple of 2 * data_parallel * accumulation = 4",
    ),
    (train, "shard_weights", True, COSHIP, "on whole weights"),
    *[(OptimizerConfig, field, bad, {}, "must be below 1") for field in ("b1", "b2") for bad in (1, 1.0, 2)],
    *[(OptimizerConfig, "warmup_steps", bad, {}, "integer of at least 0") for bad in NOT_INTEGERS[1:]],
    *[(OptimizerConfig, "schedule", bad, {}, "must be one of constant, linear, cosine") for bad in ("wsd", None, 1)],
    *[(train, "model", bad, {}, "must be a ModelConfig") for bad in (None, MOE, {})],
    *[(train, "optimizer", bad, {}, "must be a OptimizerConfig") for bad in (None, "adamw", MODEL)],
    *[
        (train, field, bad, {}, INTEGER)
        for field in ("batch_size", "sequence_length", "steps", "accumulation", "max_bad_steps", "expert_parallel")
        for bad in NOT_INTEGERS
    ],
    *[
        (train, field, bad, {}, INTEGER)
        for field in ("data_parallel", "evaluate_every", "evaluate_sequences", "checkpoint_every", "keep_checkpoints")
        for bad in NOT_INTEGERS
    ],
    (train, "batch_size", 0, {"accumulation": 6}, INTEGER),
    (train, "steps", 0, {"optimizer": OptimizerConfig(warmup_steps=500)}, INTEGER),
    *[(train, "sequence_length", bad, {}, "must be from 2") for bad in (1, 49, 10**6)],
    *[(train, "accumulation", bad, {}, "must divide batch_size=8") for bad in (3, 7, 9, 16)],
    *[(train, "steps", bad, {}, "must be below 2147483648") for bad in (2**28, 2**40)],
    (train, "batch_size", 2**31, {"steps": 1}, "must be below 2147483648"),
    *[(train, "z_loss_coef", bad, {}, FROM_ZERO) for bad in (*NOT_NUMBERS[1:], None)],
    *[(train, "bias_update_rate", bad, {}, FROM_ZERO) for bad in (*NOT_NUMBERS[1:], None)],
    (train, "bias_update_rate", 1e-3, {}, "the router has no bias to move"),
    *[(train, field, bad, {}, FLAG) for field in ("shard_weights", "zero_experts") for bad in NOT_FLAGS],
    *[(train, "seed", bad, {}, "must be an integer of at least 0") for bad in NOT_INTEGERS[1:]],
    *[(train, "seed", bad, {}, "must be below 4294967296") for bad in (2**32, 2**64 + 1)],
]


def _name(case):
    maker, field, value, others, _ = case
    return "-".join([maker.__name__, field, repr(value)[:40], *(f"{n}={str(v)[:40]}" for n, v in others.items())])


@pytest.mark.parametrize("case", REFUSALS, ids=_name)
def test_refusal_names_field_value_rule_and_a_value_that_works(case):
    maker, field, value, others, rule = case
    with pytest.raises(ConfigError) as refusal:
        maker(**{**others, field: value})
    works = _works(str(refusal.value), field, value, rule)
    assert getattr(maker(**{**others, field: works}), field) == works


def _works(message: str, field: str, value: object, rule: str) -> object:
    """The value that the message says works; asserts its form."""
    parsed = re.fullmatch(rf"{field}=(?P<value>.*?): (?P<rule>.*); {field}=(?P<works>.*) works", message)
    assert parsed, message
    assert parsed["value"] == repr(value)
    assert rule in parsed["rule"]
    works = eval(parsed["works"], CLASSES)
    assert works != value or type(works) is not type(value)
    return works


# Of a config inside the TrainConfig: the path, what is refused there, and the rule.
INSIDE = [
    ("model.moe.param_dtype", "bfloat16", "what is trained is kept in float32"),
    ("model.moe.dtype", "float16", "small gradients vanish in it"),
    ("model.max_position", 1, "must be at least 2"),
    ("optimizer.warmup_steps", 101, "must not be above steps=100"),
]


@pytest.mark.parametrize(("path", "value", "rule"), INSIDE, ids=[case[0] for case in INSIDE])
def test_refusals_of_what_lies_inside(path, value, rule):
    base = train(sequence_length=2)
    with pytest.raises(ConfigError) as refusal:
        _inside(base, path.split("."), value)
    _inside(base, path.split("."), _works(str(refusal.value), path, value, rule))


def _inside(config, names, value):
    """dataclasses.replace of a field some configs down."""
    name, *rest = names
    return dataclasses.replace(config, **{name: _inside(getattr(config, name), rest, value) if rest else value})


@pytest.mark.parametrize(("maker", "cls"), [(train, TrainConfig), (OptimizerConfig, OptimizerConfig)])
def test_every_field_has_a_refusal_here(maker, cls):
    assert {f.name for f in dataclasses.fields(cls)} == {field for made, field, *_ in REFUSALS if made is maker}


def test_what_may_be_off_may_be_off():
    config = train(optimizer=OptimizerConfig(clip_norm=None, weight_decay=0, final_fraction=0, b1=0, b2=0))
    assert config.optimizer.clip_norm is None
    biased = dataclasses.replace(MOE, router=RouterConfig(2, score_function="sigmoid", selection_bias=True))
    assert train(model=dataclasses.replace(MODEL, moe=biased), bias_update_rate=1e-3).bias_update_rate == 1e-3


def test_configs_are_frozen_and_can_be_hashed():
    config = train()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 3
    assert hash(config) == hash(train())
