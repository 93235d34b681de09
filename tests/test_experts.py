"""Activations, parameters, shared experts and apply_experts. What the fused product computes is test_grouped's."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import experts
from jax_ep.config import ACTIVATIONS, ConfigError, MoEConfig, RouterConfig

H, I, E = 6, 5, 3


def config(**changes: Any) -> MoEConfig:
    return MoEConfig(H, I, E, RouterConfig(2), **changes)


def test_gpt_oss_of_interleaved_pre_activations_is_the_published_value() -> None:
    gate, up = experts.deinterleave(jnp.asarray([-20.0, 3.0, 9.0, -9.0]))
    np.testing.assert_array_equal(gate, [-20, 9])
    np.testing.assert_array_equal(up, [3, -9])
    expected = [-1.3173640965597499e-13, -41.99971876981991]
    np.testing.assert_allclose(experts.gpt_oss(gate, up), expected, rtol=1e-5, atol=1e-5)


def test_gpt_oss_clamps_gate_above_only_and_up_on_both_sides() -> None:
    gate, up = jnp.asarray([100.0, 7.0, -100.0]), jnp.asarray([2.0, 50.0, -50.0])
    np.testing.assert_array_equal(
        experts.gpt_oss(gate, up)[:2], experts.gpt_oss(jnp.full(2, 7.0), jnp.asarray([2.0, 7.0]))
    )
    lower = experts.gpt_oss(jnp.asarray([-10.0]), jnp.asarray([-50.0]))
    np.testing.assert_allclose(lower, -6 * -10 / (1 + math.exp(17.02)), rtol=1e-5)
    d_gate, d_up = jax.grad(lambda g, u: experts.gpt_oss(g, u).sum(), (0, 1))(gate, up)
    assert d_gate[0] == 0
    assert d_up[1] == 0
    assert d_up[2] == 0


def test_gelu_is_the_exact_one() -> None:
    x = np.linspace(-4, 4, 17)
    expected = [0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x]
    np.testing.assert_allclose(experts.gelu(None, jnp.asarray(x, jnp.float32)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_activations_in_16_bits_round_once(name: str, dtype: str) -> None:
    gate, up = (jax.random.normal(jax.random.key(seed), (257,), dtype) * 3 for seed in (0, 1))
    act = experts.activation_fn(name)
    gate_or_none = None if name == "gelu" else gate
    wide_gate = None if name == "gelu" else gate.astype(jnp.float32)
    got = act(gate_or_none, up)
    assert got.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(got, act(wide_gate, up.astype(jnp.float32)).astype(dtype))


def test_activations_refuse_a_missing_or_unwanted_gate_and_unknown_names() -> None:
    x = jnp.ones(3)
    for name in ("swiglu", "gpt_oss"):
        with pytest.raises(ConfigError, match="gate=None"):
            experts.activation_fn(name)(None, x)
    with pytest.raises(ConfigError, match="has no gate"):
        experts.gelu(x, x)
    with pytest.raises(ConfigError, match=r"activation='relu'.*swiglu, gelu, gpt_oss"):
        experts.activation_fn("relu")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_expert_params_have_their_shapes_and_padded_experts_are_zero(activation: str, biased: bool) -> None:
    made = config(activation=activation, expert_bias=biased, param_dtype="bfloat16")
    params = experts.init_expert_params(made, jax.random.key(3), 4)
    shapes = {"gate": (4, H, I), "up": (4, H, I), "down": (4, I, H)}
    if biased:
        shapes |= {"gate_bias": (4, I), "up_bias": (4, I), "down_bias": (4, H)}
    if activation == "gelu":
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith("gate")}
    assert {name: value.shape for name, value in params.items()} == shapes
    assert {value.dtype.name for value in params.values()} == {"bfloat16"}
    for name, value in params.items():
        real, padded = np.asarray(value[:E], float), np.asarray(value[E:], float)
        assert not padded.any()
        assert real.all() != name.endswith("_bias")
    unpadded = experts.init_expert_params(made, jax.random.key(3), E)
    for name, value in unpadded.items():
        np.testing.assert_array_equal(value, params[name][:E])


def test_expert_params_are_scaled_by_fan_in() -> None:
    wide = MoEConfig(256, 64, 2, RouterConfig(1), num_shared_experts=2, shared_gate=True)
    params = experts.init_expert_params(wide, jax.random.key(0), 2)
    for name, fan_in in (("gate", 256), ("up", 256), ("down", 64)):
        assert float(params[name].std()) == pytest.approx(fan_in**-0.5, rel=0.05)
    assert not np.array_equal(params["gate"], params["up"])
    shared = experts.init_shared_params(wide, jax.random.key(0))
    assert float(shared["down"].std()) == pytest.approx(128**-0.5, rel=0.05)
    with pytest.raises(ConfigError, match="num_experts_padded=1"):
        experts.init_expert_params(wide, jax.random.key(0), 1)


@pytest.mark.parametrize(
    ("activation", "gated"), [("swiglu", True), ("swiglu", False), ("gelu", True), ("gpt_oss", False)]
)
def test_shared_mlp_is_its_formula(activation: str, gated: bool) -> None:
    made = config(activation=activation, num_shared_experts=2, shared_gate=gated)
    params = experts.init_shared_params(made, jax.random.key(1))
    names = {"up", "down"} | ({"gate"} if activation != "gelu" else set()) | ({"shared_gate"} if gated else set())
    assert set(params) == names
    assert params["up"].shape == (H, 2 * I)
    x = jax.random.normal(jax.random.key(2), (7, H))
    x64, p64 = np.asarray(x, np.float64), {name: np.asarray(value, np.float64) for name, value in params.items()}
    gate = None if activation == "gelu" else jnp.asarray(x64 @ p64["gate"], jnp.float32)
    h = np.asarray(experts.activation_fn(activation)(gate, jnp.asarray(x64 @ p64["up"], jnp.float32)), np.float64)
    expected = h @ p64["down"]
    if gated:
        expected = expected / (1 + np.exp(-x64 @ p64["shared_gate"]))
    np.testing.assert_allclose(experts.shared_mlp(x, params, made), expected, rtol=1e-4, atol=1e-5)


def test_shared_mlp_in_bfloat16_comes_back_in_float32() -> None:
    made = config(num_shared_experts=1, shared_gate=True, dtype="bfloat16")
    params = experts.init_shared_params(made, jax.random.key(1))
    x = jax.random.normal(jax.random.key(2), (7, H))
    y = experts.shared_mlp(x.astype("bfloat16"), params, made)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(
        y, experts.shared_mlp(x, params, config(num_shared_experts=1, shared_gate=True)), atol=0.05
    )


def test_no_shared_experts_have_no_parameters() -> None:
    assert experts.init_shared_params(config(), jax.random.key(0)) == {}


def test_apply_experts_casts_parameters_and_sums_what_comes_home() -> None:
    made = config(expert_bias=True, dtype="bfloat16")
    params = experts.init_expert_params(made, jax.random.key(0), E)
    params = {name: value + 0.1 for name, value in params.items()}
    rows = jax.random.normal(jax.random.key(1), (4, H), "bfloat16")
    index, sizes = jnp.asarray([0, 1, 1, 3, 4], jnp.int32), jnp.asarray([2, 0, 2])
    weights = jnp.asarray([0.5, 0.25, 0.75, 1.0, 9.0])
    out = experts.apply_experts(rows, index, sizes, weights, params, made)
    assert out.dtype == jnp.float32
    expected = np.zeros((4, H))
    for n, expert in enumerate((0, 0, 2, 2)):
        one = {name: np.asarray(value[expert], np.float64) for name, value in params.items()}
        x = np.asarray(rows[index[n]], np.float64)
        gate, up = x @ one["gate"] + one["gate_bias"], x @ one["up"] + one["up_bias"]
        y = (gate / (1 + np.exp(-gate)) * up) @ one["down"] + one["down_bias"]
        expected[index[n]] += float(weights[n]) * y
    np.testing.assert_allclose(out, expected, atol=0.02 * np.abs(expected).max())
    assert not out[2].any()
    plain = experts.apply_experts(rows, jnp.asarray([0, 1, 3, 9, 9], jnp.int32), sizes.at[0].set(1), None, params, made)
    assert plain.dtype == jnp.bfloat16
