"""Attention, rotary positions and windows against loops and published values."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import TINY, tiny_model

from jax_ep import RopeConfig, attention
from jax_ep.models.decoder import layer_windows


def close(got: Any, want: Any) -> None:
    """Norm-wise: the largest difference is at most 1e-5 of the largest value."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


ROPES = {  # HF transformers 5.24's modeling_rope_utils, head_dim 16
    RopeConfig(scaling="linear", factor=4.0): (
        [0.25, 0.07905694, 0.025, 0.007905695, 0.0025, 0.0007905695, 0.00025, 7.905695e-05],
        1.0,
    ),
    RopeConfig(500000.0, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0): (
        [1.0, 0.1939228, 0.03760603, 0.007292665, 0.000524846, 3.428102e-05, 6.64787e-06, 1.289173e-06],
        1.0,
    ),
    RopeConfig(150000.0, "yarn", 32.0, 4096, truncate=False): (
        [1.0, 0.225418, 0.05081327, 0.006794959, 0.0004564839, 1.818834e-05, 4.099978e-06, 9.24209e-07],
        1.3465735902799727,
    ),
    RopeConfig(scaling="yarn", factor=4.0, original_max_position=4096): (
        [1.0, 0.3162278, 0.1, 0.02569351, 0.00625, 0.001383497, 0.00025, 7.905695e-05],
        1.138629436111989,
    ),
    RopeConfig(scaling="yarn", factor=4.0, original_max_position=64, attention_factor=1.25): (
        [1.0, 0.2371708, 0.05, 0.007905695, 0.0025, 0.0007905695, 0.00025, 7.905695e-05],
        1.25,
    ),
}


@pytest.mark.parametrize("rope", ROPES, ids=lambda r: f"{r.scaling}-{r.original_max_position}")
def test_rope_frequencies(rope):
    frequencies, factor = attention.rope_frequencies(rope, 16)
    wanted, wanted_factor = ROPES[rope]
    np.testing.assert_allclose(frequencies, wanted, rtol=2e-6)
    assert factor == pytest.approx(wanted_factor, rel=1e-12)
    cos, sin = attention.rope_tables(
        tiny_model(TINY["mixtral"].moe.router, rope=rope, head_dim=16), jnp.array([[0, 7]])
    )
    np.testing.assert_allclose(cos[0, 1], np.cos(7 * np.array(wanted)) * factor, atol=1e-5)
    assert cos[0, 0].tolist() == pytest.approx([factor] * 8) and sin[0, 0].tolist() == [0.0] * 8


@pytest.mark.parametrize("blocked", [False, True])
def test_attention_against_loops(blocked, monkeypatch):
    """Shared heads, masks, windows and sinks, also where queries go in blocks that do not divide them."""
    if blocked:
        monkeypatch.setattr(attention, "_QUERY_BLOCK", 3)
    rng = np.random.default_rng(3)
    b, s, z, heads, shared, d = 2, 8, 10, 6, 2, 4
    q = rng.normal(size=(b, s, heads, d)).astype(np.float32)
    k, v = rng.normal(size=(2, b, z, shared, d)).astype(np.float32)
    at, keys_at = np.arange(s)[None] + np.array([[2], [1]]), np.arange(z)[None].repeat(b, 0)
    there = rng.random((b, z)) < 0.8
    there[:, :2] = True
    sinks = rng.normal(size=heads).astype(np.float32)
    for window, sink in ((attention.NO_WINDOW, None), (4, sinks)):
        want = np.zeros((b, s, heads, d))
        for i, j, h in np.ndindex(b, s, heads):
            seen = [n for n in range(z) if there[i, n] and 0 <= at[i, j] - keys_at[i, n] < window]
            logits = [0.3 * q[i, j, h] @ k[i, n, h // (heads // shared)] for n in seen]
            logits += [] if sink is None else [sink[h]]
            weights = np.exp(logits - max(logits)) / np.exp(logits - max(logits)).sum()
            want[i, j, h] = sum(w * v[i, n, h // (heads // shared)] for w, n in zip(weights, seen))
        args = [jnp.asarray(a) for a in (q, k, v, at, keys_at, there)]
        run = functools.partial(attention.attend, window=window, sinks=sink, scale=0.3)
        close(run(*args), want.reshape(b, s, -1))


def test_blocks_have_the_same_gradients(monkeypatch):
    rng = np.random.default_rng(4)
    q, k, v = (jnp.asarray(a, jnp.float32) for a in rng.normal(size=(3, 2, 8, 2, 4)))
    at = jnp.arange(8)[None].repeat(2, 0)

    @functools.partial(jax.grad, argnums=(0, 1, 2))
    def grads(*rows: jax.Array) -> jax.Array:
        return jnp.square(attention.attend(*rows, at, at, None, 5, jnp.ones(2), 0.3)).sum()

    whole = grads(q, k, v)
    monkeypatch.setattr(attention, "_QUERY_BLOCK", 3)
    jax.tree.map(close, grads(q, k, v), whole)


def test_a_query_that_sees_nothing_is_finite():
    ones = jnp.ones((1, 1, 2, 4))
    at, nobody = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), bool)
    for sinks in (None, jnp.zeros(2)):
        assert jnp.isfinite(attention.attend(ones, ones, ones, at, at, nobody, 4, sinks, 1.0)).all()


def test_windows_of_layers():
    every = dataclasses.replace(TINY["mixtral"], window=5)
    assert layer_windows(every).tolist() == [5, 5]
    assert layer_windows(TINY["gpt_oss"]).tolist() == [8, attention.NO_WINDOW]
    assert layer_windows(TINY["olmoe"]).tolist() == [attention.NO_WINDOW] * 2
