"""Attention at the expert's rank equals the block on one device, values and gradients; what travels is what is read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import tiny_model

from jax_ep import CommConfig, ConfigError, RouterConfig, make_mesh, moe
from jax_ep.aot import count_collectives
from jax_ep.attention import attention_scale, linear, project, rms_norm, rope_tables
from jax_ep.block import at_expert
from jax_ep.block.at_expert import block_at_experts, context_counts
from jax_ep.models.decoder import init_decoder

B, S, R = 8, 12, 4
COMM = dict(dedup=True, recv_rows_factor=None)
SEGMENTS = np.repeat([[0, 1, 2, 3], [4, 4, 4, 4], [0, 0, 5, 5], [1, 2, 2, 1]] * 2, 3, axis=1).astype(np.int32)
SEGMENTS[3, 5:] = 9
# name: (fields of the model, comm, data axis, segments, mask)
CASES = {
    "all_to_all": (dict(), dict(transport="all_to_all"), 2, False, False),
    "ragged": (dict(window=3), dict(transport="all_gather"), 1, True, False),
    "window_wider_than_all": (dict(window=50, num_kv_heads=4), dict(transport="all_gather"), 2, False, True),
    "segments": (
        dict(attention_sinks=True, output_bias=True, num_kv_heads=1),
        dict(transport="all_to_all"),
        1,
        True,
        True,
    ),
    "norms": (dict(qk_norm="head", residual_multiplier=0.5, window=2), dict(transport="all_to_all"), 2, True, False),
}


def model(fields, comm, **layer):
    config = tiny_model(RouterConfig(3, logit_bias=True), dict(num_shared_experts=1, **layer), num_layers=1, **fields)
    return dataclasses.replace(config, moe=dataclasses.replace(config.moe, comm=CommConfig(**comm)))


def reference(params, x, segment_ids, mask, config):
    """On one device, with every query's row of [S, S] logits."""
    b, s, _ = x.shape
    dense = dataclasses.replace(config.moe, comm=CommConfig(mode="dense"))
    n = rms_norm(x, params["attention_norm"], config.norm_eps)
    at = jnp.broadcast_to(jnp.arange(s), (b, s))
    q, k, v = project(params, n, *rope_tables(config, at), config)
    k, v = (jnp.repeat(a, config.num_heads // config.num_kv_heads, 2) for a in (k, v))
    logits = jnp.einsum("bsqd,bzqd->bqsz", q, k) * attention_scale(config)
    apart = at[:, :, None] - at[:, None]
    seen = (apart >= 0) & (apart < (config.window or s))
    if segment_ids is not None:
        runs = np.cumsum(np.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0, 1)
        seen &= runs[:, :, None] == runs[:, None]
    logits = jnp.where(seen[:, None], logits, -1e30)
    if "sinks" in params:
        sink = jnp.broadcast_to(params["sinks"][None, :, None, None], (*logits.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([logits, sink], 3), 3)[..., :-1]
    else:
        weights = jax.nn.softmax(logits, 3)
    out = linear(jnp.einsum("bqsz,bzqd->bsqd", weights, v).reshape(b, s, -1), params["o"], params.get("o_bias"))
    if mask is not None:
        out = jnp.where(mask[..., None], out, 0)
    y, stats = moe(params["moe"], n, dense, token_mask=mask)
    return x + (out + y) * config.residual_multiplier, stats


def inputs(config, skew=0.0, seed=0):
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda a: a[0], init_decoder(config, jax.random.key(seed))["layers"])
    drawn = lambda a: a + jnp.asarray(rng.standard_normal(a.shape) / 4, a.dtype)
    params = jax.tree.map(drawn, params)
    params["moe"]["router"]["bias"] += skew * jnp.arange(config.moe.num_experts)
    return params, jnp.asarray(rng.standard_normal((B, S, config.moe.hidden_size)), "f4")


def value_and_grad(block):
    """(params, x) -> y, stats and gradients, compiled once."""

    def loss(params, x):
        y, stats = block(params, x)
        return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum(), (y, stats)

    run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))

    def results(params, x):
        (_, out), grads = run(params, x)
        return *out, grads

    return results


def close(got, want, tolerance):
    scale = max(np.abs(want).max(), 1e-3)
    np.testing.assert_allclose(np.asarray(got) / scale, np.asarray(want) / scale, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name):
    fields, comm, data, with_segments, with_mask = CASES[name]
    config = model(fields, {**COMM, **comm})
    segments = SEGMENTS if with_segments else None
    mask = jnp.asarray(np.random.default_rng(3).random((B, S)) < 0.8) if with_mask else None
    mesh = make_mesh(R, data)
    run = value_and_grad(lambda p, x: block_at_experts(p, x, config, mesh=mesh, segment_ids=segments, token_mask=mask))
    whole = value_and_grad(lambda p, x: reference(p, x, segments, mask, config))
    for skew in (0.0, 2.0):  # the second: nearly all tokens to one rank
        params, x = inputs(config, skew)
        y, stats, grads = run(params, x)
        wanted, want_stats, want_grads = whole(params, x)
        close(y, wanted, 1e-5)
        np.testing.assert_array_equal(stats.counts, want_stats.counts)
        assert int(stats.rounds) == 1
        jax.tree.map(lambda g, w: close(g, w, 1e-4), grads, want_grads)
        del grads[0]["moe_norm"]  # not read
        assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


def test_one_rank_exchanges_nothing():
    config = model(dict(window=5), COMM)
    params, x = inputs(config)
    for mesh in (None, make_mesh(1, 2)):
        y, _ = block_at_experts(params, x, config, mesh=mesh, segment_ids=SEGMENTS)
        close(y, reference(params, x, SEGMENTS, None, config)[0], 1e-5)


@pytest.mark.parametrize("transport", ["ragged", "all_to_all"])
def test_two_payload_collectives_and_as_many_backward(transport):
    config = model(dict(), {**COMM, "transport": transport})
    params, x = inputs(config)
    run = lambda p, x: block_at_experts(p, x, config, mesh=make_mesh(R, 2))[0].sum()
    kind = {"ragged": "ragged_all_to_all"}.get(transport, transport)
    for f, expected in ((run, 2), (jax.value_and_grad(run, (0, 1)), 4)):
        text = jax.jit(f).trace(params, x).lower(lowering_platforms=("cuda",)).as_text()
        found = count_collectives(text)
        assert found[kind].straight == expected
        assert found["all_gather"].straight == (
            2 if transport == "ragged" else 0
        )  # counts: of hidden rows, of contexts


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("with_segments", [False, True])
def test_context_counts_are_the_rows_that_some_query_reads(window, with_segments):
    rng = np.random.default_rng(5)
    to = rng.integers(0, R + 1, (R, 2, S))
    segments = rng.integers(0, 2, (R, 2, S)).cumsum(2) if with_segments else None
    wanted = np.zeros((R, R), int)
    for r, d, b, key in np.ndindex(R, R, 2, S):
        wanted[r, d] += any(
            to[r, b, q] == d
            and q - key < (window or S)
            and (segments is None or segments[r, b, q] == segments[r, b, key])
            for q in range(key, S)
        )
    np.testing.assert_array_equal(context_counts(to, R, window, segments), wanted)
    assert wanted.sum() > 0


def test_what_it_cannot_do_is_refused():
    config = model(dict(), COMM)
    params, x = inputs(config)
    run = lambda x, **comm: block_at_experts(params, x, model(dict(), {**COMM, **comm}), mesh=make_mesh(R))
    for field, value, works in (("dedup", False, True), ("recv_rows_factor", 2.0, None), ("num_chunks", 2, 1)):
        with pytest.raises(ConfigError, match=rf"{field}={value}.*{field}={works} works"):
            run(x, **{field: value})
    with pytest.raises(ConfigError, match="wire_dtype='int8'"):
        run(x, wire_dtype="int8")
    with pytest.raises(
        ConfigError, match=r"batch=7: must be a multiple of 4: 1 replica, whole sequences.*batch=8 works"
    ):
        run(x[:7])
    segments = jnp.zeros((B, S - 1), jnp.int32)
    with pytest.raises(ConfigError, match=r"segment_ids='int32\[8, 11\]'"):
        block_at_experts(params, x, config, mesh=make_mesh(R), segment_ids=segments)
    with pytest.raises(ConfigError, match=r"token_mask='int32\[8, 11\]'"):
        block_at_experts(params, x, config, mesh=make_mesh(R), token_mask=segments)
    with pytest.raises(ConfigError, match="shard_sequence=True: sequences are whole"):
        block_at_experts(params, x, model(dict(), COMM, shard_sequence=True), mesh=make_mesh(R))
    with pytest.raises(ConfigError, match=r"to=\[4, 2\]: must be \[ranks, B, S\]"):
        context_counts(np.zeros((4, 2), int), 4)
    with pytest.raises(ConfigError, match="window=0"):
        context_counts(np.zeros((4, 2, 8), int), 4, 0)


def test_the_layers_own_window_and_experts_made_for_other_ranks():
    """A model's window is none of a layer that has not got it; which layer this is nobody says where they differ."""
    config = model(dict(window=2, window_layers=(False,)), COMM)
    params, x = inputs(config)
    plain = dataclasses.replace(config, window=None, window_layers=None)
    experts = jax.tree.map(lambda a: jnp.concatenate([a, jnp.zeros_like(a[:1])]), params["moe"]["experts"])
    padded = {**params, "moe": {**params["moe"], "experts": experts}}
    y, _ = block_at_experts(padded, x, config, mesh=make_mesh(R))
    close(y, reference(params, x, None, None, plain)[0], 1e-5)
    two = dataclasses.replace(config, num_layers=2, window_layers=(True, False))
    with pytest.raises(ConfigError, match="window=None: window_layers has it differ"):
        block_at_experts(params, x, two, mesh=make_mesh(R))


def test_compiles_once(monkeypatch):
    """Also where the caller does not jit."""
    config = model(dict(norm_eps=2e-6), COMM)
    params, x = inputs(config)
    traced, merge = [], at_expert.merge
    monkeypatch.setattr(at_expert, "merge", lambda *a: traced.append(1) or merge(*a))
    for _ in range(2):
        block_at_experts(params, x, config, mesh=make_mesh(R))
    assert traced == [1]
