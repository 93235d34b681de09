"""A training step: its state, what it does when something is not finite and how that is told, the optimiser's schedule,
half precision, biases that balance, and operations counted. Gradients are test_training_gradients.py's.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep import CommConfig, ModelConfig, MoEConfig, RouterConfig, bias_update, make_mesh
from jax_ep.models.decoder import decoder_shapes, forward, loss, place_params
from jax_ep.training.config import OptimizerConfig, TrainConfig
from jax_ep.training.diagnose import first_not_finite
from jax_ep.training.flops import model_flops
from jax_ep.training.optimizer import decays, make_optimizer, schedule
from jax_ep.training.step import (
    batch_sharding,
    gradient,
    init_state,
    make_evaluate,
    make_step,
    rows_sharding,
    state_shapes,
    state_shardings,
)

B, S, VOCAB, LAYERS = 4, 8, 32, 3
ROUTER = RouterConfig(2, score_function="sigmoid", selection_bias=True)
MODEL = ModelConfig(VOCAB, LAYERS, 2, 1, 8, MoEConfig(16, 12, 4, ROUTER), balance_loss_coef=0.01)
CONFIG = TrainConfig(
    model=MODEL,
    batch_size=B,
    sequence_length=S,
    steps=20,
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=3),
    accumulation=2,
    z_loss_coef=1e-3,
    bias_update_rate=0.01,
)
IDS = np.random.default_rng(0).integers(0, VOCAB - 1, (2, B // 2, S)).astype(np.int32)
RARE = VOCAB - 1


@functools.cache
def mesh() -> jax.sharding.Mesh:
    return make_mesh(1)


@functools.cache
def step() -> Any:
    return make_step(CONFIG, mesh())


@functools.cache
def start() -> Any:
    """A fresh state on the host."""
    return jax.device_get(init_state(CONFIG, mesh()))


def changed(params: Any, path: str, change: Any) -> Any:
    """Parameters with `change` of those at a dotted path."""
    name, _, rest = path.partition(".")
    return {**params, name: changed(params[name], rest, change) if rest else change(params[name])}


def updates(state: Any) -> set[int]:
    """Updates made, as the optimiser counts them."""
    return {int(count) for _, count in optax.tree.get_all_with_path(state.opt_state, "count")}


def test_a_fresh_state():
    state = init_state(CONFIG, mesh())
    assert jax.tree.map(lambda a: a.sharding, state) == state_shardings(CONFIG, mesh())
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state)
    assert shapes == state_shapes(CONFIG, mesh())
    assert {state.step.dtype, state.sequences.dtype, state.skipped.dtype, state.skipped_in_row.dtype} == {
        jnp.dtype("int32")
    }
    router = optax.tree.get(state.opt_state, "mu")["layers"]["moe"]["router"]
    assert set(router) == {"kernel"} and "selection_bias" in state.params["layers"]["moe"]["router"]
    other = init_state(dataclasses.replace(CONFIG, seed=1), mesh()).params
    assert not np.array_equal(state.params["embed"], other["embed"])


def test_a_run_goes_on_from_its_state():
    """Positions advance, the loss falls, the schedule is followed, one program does it all, and the state given is
    used up.
    """
    state, told = init_state(CONFIG, mesh()), []
    for i in range(CONFIG.steps):
        given = state
        state, metrics = step()(state, IDS)
        assert float(metrics.learning_rate) == pytest.approx(float(schedule(CONFIG)(i)), rel=1e-6)
        told.append(float(metrics.loss))
    assert all(a.is_deleted() for a in jax.tree.leaves(given))
    assert (int(state.step), int(state.sequences), int(state.skipped)) == (20, 20 * B, 0)
    assert updates(state) == {20}
    assert told[-1] < told[0] - 0.5
    assert step()._cache_size() == 1
    parts = metrics.cross_entropy + 0.01 * metrics.balance + 1e-3 * metrics.z
    assert float(metrics.loss) == pytest.approx(float(parts), rel=1e-6)
    assert metrics.stats.counts.shape == (LAYERS, 4) and metrics.stats.tokens.tolist() == [B * S] * LAYERS


BAD = {
    "loss": lambda params: changed(params, "embed", lambda a: a * np.float32(np.nan)),
    # Logits stay what they are and the gradient of lm_head is finite, but not the sum of its squares.
    "gradient": lambda params: changed(
        changed(params, "final_norm", lambda a: a * np.float32(1e24)), "lm_head", lambda a: a * np.float32(1e-24)
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_step_changes_nothing_and_is_counted(kind):
    lies = state_shardings(CONFIG, mesh())
    good, metrics = step()(jax.device_put(start(), lies), IDS)
    assert not metrics.skipped
    good = jax.device_get(good)
    state = jax.device_put(good._replace(params=BAD[kind](good.params)), lies)
    for row in (1, 2):
        before = jax.device_get(state)
        state, metrics = step()(state, IDS)
        assert metrics.skipped and bool(np.isfinite(metrics.loss)) == (kind == "gradient")
        assert not np.isfinite(metrics.grad_norm)
        jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), (before.params, before.opt_state))
        assert (int(state.skipped), int(state.skipped_in_row)) == (row, row)
        assert (int(state.step), int(state.sequences)) == (1 + row, (1 + row) * B)
    state, metrics = step()(state._replace(params=jax.device_put(good.params, lies.params)), IDS)
    assert not metrics.skipped
    assert (int(state.skipped), int(state.skipped_in_row), int(state.step)) == (2, 0, 4)
    assert updates(state) == {2}
    assert float(metrics.learning_rate) == pytest.approx(float(schedule(CONFIG)(1)))  # its second update
    assert step()._cache_size() == 1


def test_an_update_that_is_not_finite_is_skipped_too():
    config = dataclasses.replace(CONFIG, accumulation=1, optimizer=OptimizerConfig(weight_decay=1e38))
    state = jax.device_put(start(), state_shardings(config, mesh()))
    state, metrics = make_step(config, mesh())(state, IDS.reshape(1, B, S))
    assert metrics.skipped and np.isfinite(metrics.loss) and np.isfinite(metrics.grad_norm)
    before = start()
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), (before.params, before.opt_state))
    said = first_not_finite(CONFIG, mesh(), state, IDS)
    assert said.startswith("the update, of a gradient that is finite: its parts are finite, up to ")


def test_selection_bias_moves_towards_balance_and_by_nothing_else():
    state, metrics = step()(jax.device_put(start(), state_shardings(CONFIG, mesh())), IDS)
    moved = state.params["layers"]["moe"]["router"]["selection_bias"]
    counts = np.asarray(metrics.stats.counts)
    np.testing.assert_array_equal(moved, bias_update(counts, 0.01))
    want = 0.01 * np.sign(counts.mean(-1, keepdims=True) - counts)
    np.testing.assert_allclose(moved, want, rtol=1e-6)
    assert np.abs(moved).max() > 0
    still = jax.eval_shape(lambda s: gradient(s.params, IDS, CONFIG, mesh())[2], start())
    assert "selection_bias" not in still["layers"]["moe"]["router"]


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("constant", {0: 0.25, 2: 0.75, 3: 1, 4: 1, 54: 1, 104: 1}),
        ("linear", {0: 0.25, 3: 1, 4: 1, 54: 0.6, 104: 0.2, 200: 0.2}),
        ("cosine", {0: 0.25, 3: 1, 4: 1, 54: 0.6, 29: 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2, 104: 0.2, 200: 0.2}),
    ],
)
def test_schedules(name, at):
    optimizer = OptimizerConfig(learning_rate=2.0, warmup_steps=4, schedule=name, final_fraction=0.2)
    rate = schedule(dataclasses.replace(CONFIG, steps=104, optimizer=optimizer))
    for count, fraction in at.items():
        assert float(rate(count)) == pytest.approx(2 * fraction, rel=1e-6), count
    without = dataclasses.replace(optimizer, warmup_steps=0)
    assert float(schedule(dataclasses.replace(CONFIG, steps=10, optimizer=without))(0)) == 2.0
    all_warm = dataclasses.replace(CONFIG, steps=4, optimizer=optimizer)
    assert [float(schedule(all_warm)(i)) for i in range(4)] == [0.5, 1, 1.5, 2]


def test_what_decays():
    """Matrices, one a layer or an expert; vectors do not."""
    moe = MoEConfig(16, 12, 4, RouterConfig(2, logit_bias=True), expert_bias=True, num_shared_experts=1)
    model = ModelConfig(VOCAB, 2, 2, 1, 8, moe, qk_norm="head", qkv_bias=True, output_bias=True, attention_sinks=True)
    flat = jax.tree.leaves_with_path(decays(decoder_shapes(model)))
    named = {jax.tree_util.keystr(path, simple=True, separator="."): decays for path, decays in flat}
    vector = lambda name: name.endswith(("norm", "bias", "sinks"))
    assert len(named) == 27 and named == {name: not vector(name) for name in named}


def test_no_clipping_and_no_decay_are_plain_adam():
    plain = OptimizerConfig(learning_rate=0.1, schedule="constant", clip_norm=None, weight_decay=0)
    config = dataclasses.replace(CONFIG, optimizer=plain)
    params = {"embed": jnp.array([[1.0, -2.0]])}
    optimizer, adam = make_optimizer(config), optax.adam(0.1, b1=0.9, b2=0.95)
    grads = {"embed": jnp.array([[3.0, 40.0]])}
    got, _ = optimizer.update(grads, optimizer.init(params), params)
    want, _ = adam.update(grads, adam.init(params), params)
    np.testing.assert_allclose(got["embed"], want["embed"], rtol=1e-6)


def test_half_precision_with_masters_in_float32():
    """Products are taken in bfloat16; parameters, gradients and the optimiser's state stay in float32; it learns."""
    half = dataclasses.replace(MODEL, moe=dataclasses.replace(MODEL.moe, dtype="bfloat16"))
    config = dataclasses.replace(CONFIG, model=half, accumulation=1)
    state, ids = init_state(config, mesh()), IDS.reshape(1, B, S)
    loss, _, grads = jax.eval_shape(lambda s: gradient(s.params, ids, config, mesh()), state)
    floats = [a for a in jax.tree.leaves((state, loss, grads)) if not jnp.issubdtype(a.dtype, jnp.integer)]
    assert {a.dtype.name for a in floats} == {"float32"} and len(floats) > 40
    run, told = make_step(config, mesh()), []
    lowered = run.lower(state, ids).as_text()
    products = [line for line in lowered.splitlines() if "dot_general" in line and "bf16>" in line]
    assert len(products) > 10
    for _ in range(15):
        state, metrics = run(state, ids)
        told.append(float(metrics.loss))
    assert told[-1] < told[0] - 0.5 and run._cache_size() == 1
    floats = [a for a in jax.tree.leaves(state) if not jnp.issubdtype(a.dtype, jnp.integer)]
    assert {a.dtype.name for a in floats} == {"float32"}


def test_experts_held_at_zero():
    """The loss is that of experts which give nothing, and nothing trains them."""
    lies = state_shardings(CONFIG, mesh())
    run = make_step(dataclasses.replace(CONFIG, zero_experts=True), mesh())
    state, metrics = run(jax.device_put(start(), lies), IDS)
    gone = start()._replace(params=changed(start().params, "layers.moe.experts.down", np.zeros_like))
    _, want = step()(jax.device_put(gone, lies), IDS)
    _, other = step()(jax.device_put(start(), lies), IDS)
    assert float(metrics.loss) == pytest.approx(float(want.loss), rel=1e-6)
    assert abs(float(metrics.loss - other.loss)) > 0.01
    moments = optax.tree.get(state.opt_state, "nu")["layers"]["moe"]
    assert not any(a.any() for a in moments["experts"].values()) and moments["router"]["kernel"].any()


def test_evaluation_is_the_mean_surprise_of_any_number_of_sequences():
    config = dataclasses.replace(CONFIG, shard_weights=True)
    ids, four = IDS.reshape(B, S)[:3], make_mesh(2, 2)
    params = jax.device_put(place_params(start().params, MODEL, four), state_shardings(config, four).params)
    total, count = make_evaluate(config, four)(params, ids)
    assert (total.dtype, count.dtype, int(count)) == (jnp.float32, jnp.int32, 3 * (S - 1))
    _, parts = jax.jit(lambda p: loss(p, ids, MODEL))(start().params)
    assert float(total / count) == pytest.approx(float(parts.cross_entropy), rel=1e-5)


def test_how_a_batch_lies():
    eight = make_mesh(4, 2)
    lies = lambda **changes: batch_sharding(dataclasses.replace(CONFIG, **changes), eight).spec
    assert lies(batch_size=16) == P(None, ("data", "expert"))
    assert lies(batch_size=4) == P(None, ("data",), "expert")  # by sequences over data and by positions over expert
    assert lies(batch_size=2) == P(None, None)  # one sequence a microbatch
    assert rows_sharding(CONFIG, eight, 8).spec == P(("data", "expert"))


# Where what is not finite begins.

DIAGNOSED = dataclasses.replace(CONFIG, shard_weights=True)


def at(layer: int, value: float) -> Any:
    """One layer's parameters multiplied by a number."""
    return lambda a: np.concatenate([a[:layer], a[layer : layer + 1] * np.float32(value), a[layer + 1 :]])


def rare(a: np.ndarray) -> np.ndarray:
    """The embedding of a token that only the second microbatch has is not finite."""
    return np.where(np.arange(VOCAB)[:, None] == RARE, np.float32(np.nan), a)


def sharp(a: np.ndarray) -> np.ndarray:
    """Larger logits, and so a larger gradient of what comes before them."""
    return a * 1000


BEGINS = [
    ({"embed": rare}, "microbatch 2 of 2: the embedding"),
    ({"layers.q": at(1, np.nan)}, "microbatch 1 of 2: layer 1, attention"),
    ({"layers.attention_norm": at(0, np.inf)}, "microbatch 1 of 2: layer 0, attention"),
    ({"layers.moe.experts.down": at(2, np.inf)}, "microbatch 1 of 2: layer 2, experts"),
    ({"layers.moe.router.kernel": at(0, np.nan)}, "microbatch 1 of 2: layer 0, experts"),
    ({"layers.moe.router.kernel": at(0, np.nan), "layers.q": at(1, np.nan)}, "microbatch 1 of 2: layer 0, experts"),
    ({"lm_head": lambda a: a * np.float32(np.nan)}, "microbatch 1 of 2: the logits"),
    ({"layers.moe.router.kernel": at(1, 1e22)}, "microbatch 1 of 2: the loss"),  # its z-loss
    (
        {"layers.moe.experts.up": at(1, 1e-37), "layers.moe.experts.down": at(1, 2e38), "lm_head": sharp},
        "microbatch 1 of 2: the gradient of layer 1, experts (the backward runs from the last layer to the first)",
    ),
    (
        {"layers.v": at(2, 1e-37), "layers.o": at(2, 2e38), "lm_head": sharp},
        "microbatch 1 of 2: the gradient of layer 2, attention (the backward runs from the last layer to the first)",
    ),
    (
        {"final_norm": lambda a: a * np.float32(1e-36), "lm_head": lambda a: np.sign(a) * np.float32(3e38)},
        "microbatch 1 of 2: the gradient of final_norm (the backward runs from the last layer to the first)",
    ),
    (
        {"final_norm": lambda a: a * np.float32(1e24), "lm_head": lambda a: a * np.float32(1e-24)},
        "the norm of the gradient: its parts are finite, up to 2.52e+23 in lm_head",
    ),
]


@pytest.mark.parametrize(("changes", "where"), BEGINS, ids=["+".join(changes) for changes, _ in BEGINS])
def test_where_what_is_not_finite_begins(changes, where):
    two = make_mesh(2)
    params = functools.reduce(lambda p, item: changed(p, *item), changes.items(), start().params)
    ids = IDS.copy()
    ids[1, 0, 3] = RARE
    state = jax.device_put(start()._replace(params=params), state_shardings(DIAGNOSED, two))
    assert first_not_finite(DIAGNOSED, two, state, ids) == where


# Operations.


def test_operations_counted_by_hand():
    """Two layers, one of them with a window, on 2 sequences of 5."""
    moe = MoEConfig(6, 7, 4, RouterConfig(3), num_shared_experts=2, shared_gate=True)
    model = ModelConfig(11, 2, 4, 2, 8, moe, window=3, window_layers=(True, False))
    token = 6 * 32 + 2 * 6 * 16 + 32 * 6  # queries, keys and values, output
    token += 6 * 4 + 3 * (3 * 6 * 7) + 3 * 6 * 14 + 6  # router, three experts, shared experts and their gate
    seen = (1 + 2 + 3 + 3 + 3) + (1 + 2 + 3 + 4 + 5)  # of the window's layer, of the other
    forward = 2 * (2 * 5 * (2 * token + 6 * 11) + 2 * (2 * 4 * 8) * seen)
    assert model_flops(model, 2, 5) == 3 * forward
    ungated = dataclasses.replace(model, moe=dataclasses.replace(moe, activation="gelu"))
    assert model_flops(model, 2, 5) - model_flops(ungated, 2, 5) == 3 * 2 * (2 * 5) * 2 * (3 * 6 * 7 + 6 * 14)


def test_operations_are_those_of_the_compiler():
    """Of a forward with one expert, which computes what it masks: every query with every key."""
    moe = MoEConfig(128, 256, 1, RouterConfig(1), comm=CommConfig(mode="dense"), num_shared_experts=1)
    model = ModelConfig(512, 1, 4, 2, 32, moe)
    ids = jax.ShapeDtypeStruct((2, 32), jnp.int32)
    lowered = jax.jit(lambda p, ids: forward(p, ids, model)).lower(decoder_shapes(model), ids)
    unseen = 2 * (2 * 4 * 32) * 2 * (32 * 31 // 2)
    want = model_flops(model, 2, 32) / 3 + unseen
    assert 1 <= lowered.compile().cost_analysis()["flops"] / want < 1.05
