"""A step on data 2 x expert 4 against one device: gradient of every class of parameter, their norm, the clipped update,
accumulation, split weights; and fifty steps of every way to the experts.

The reference of a step loops over its microbatches in Python, with jax.grad of the decoder's loss.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from tiny_models import with_comm

from jax_ep import CommConfig, ModelConfig, MoEConfig, RouterConfig, make_mesh, sharding, z_loss
from jax_ep.models.decoder import loss, place_params
from jax_ep.models.placement import split_spec
from jax_ep.training.config import OptimizerConfig, TrainConfig
from jax_ep.training.optimizer import decays
from jax_ep.training.step import init_state, make_step, state_shapes, state_shardings

pytestmark = pytest.mark.slow

B, S, VOCAB = 8, 8, 32
SPLIT = (8, 2)  # accumulation of the runs whose weights lie split
CLIP, RATE, EPS, DECAY, Z = 0.5, 0.1, 0.01, 0.1, 1e-2

# Six experts, so that four ranks hold two empty ones; every class of parameter there is.
MODEL = ModelConfig(
    vocab_size=VOCAB,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=8,
    moe=MoEConfig(
        hidden_size=16,
        intermediate_size=12,
        num_experts=6,
        router=RouterConfig(2, logit_bias=True),
        comm=CommConfig(recv_rows_factor=None),
        expert_bias=True,
        num_shared_experts=1,
        shared_intermediate_size=40,
        shared_gate=True,
    ),
    qk_norm="head",
    qkv_bias=True,
    output_bias=True,
    attention_sinks=True,
    balance_loss_coef=0.1,
)
CONFIG = TrainConfig(
    model=MODEL,
    batch_size=B,
    sequence_length=S,
    steps=50,
    optimizer=OptimizerConfig(learning_rate=RATE, schedule="constant", eps=EPS, weight_decay=DECAY, clip_norm=CLIP),
    z_loss_coef=Z,
)
IDS = np.random.default_rng(0).integers(0, VOCAB, (B, S)).astype(np.int32)


def close(got: Any, want: Any, tolerance: float = 1e-4) -> None:
    """Norm-wise, leaf by leaf: the largest difference is at most tolerance * the largest value."""

    def leaf(path: Any, got: Any, want: Any) -> None:
        got, want = np.asarray(got), np.asarray(want)
        assert got.shape == want.shape, jax.tree_util.keystr(path)
        off = np.abs(got - want).max() / np.abs(want).max()
        assert off <= tolerance, f"{jax.tree_util.keystr(path)} is off by {off:.2g}"

    jax.tree.map_with_path(leaf, got, want)


@functools.cache
def mesh() -> jax.sharding.Mesh:
    return make_mesh(4, 2)


@functools.cache
def start() -> Any:
    """Parameters with nothing at its special first value: norms that are not 1, biases and sinks that are not 0."""
    params = jax.device_get(init_state(CONFIG, make_mesh(1)).params)
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda a: a + 0.1 * rng.standard_normal(a.shape).astype(a.dtype), params)


@functools.partial(jax.jit, static_argnames="config")
def microbatch(params: Any, ids: jax.Array, config: ModelConfig = MODEL) -> Any:
    def total(params: Any) -> jax.Array:
        plain, parts = loss(params, ids, config)
        return plain + Z * z_loss(jax.tree.map(lambda a: a.sum(0), parts.stats))

    return jax.value_and_grad(total)(params)


@functools.cache
def reference(accumulation: int) -> tuple[float, Any]:
    """Loss and gradient of a step on one device."""
    each = [microbatch(start(), rows) for rows in np.split(IDS, accumulation)]
    losses, grads = zip(*each)
    return np.mean(losses), jax.tree.map(lambda *g: np.mean(g, axis=0, dtype=np.float64), *grads)


@functools.cache
def before() -> Any:
    """The state that steps on the mesh start from, on the host."""
    return jax.device_get(init_state(CONFIG, mesh())._replace(params=place_params(start(), MODEL, mesh())))


@functools.cache
def step_of(accumulation: int) -> tuple[Any, Any, Any]:
    """The compiled step on the mesh; the state after it, and its metrics, on the host."""
    config = config_of(accumulation)
    lies = state_shardings(config, mesh())
    state, ids = jax.device_put(before(), lies), IDS.reshape(accumulation, -1, S)
    compiled = make_step(config, mesh()).lower(state, ids).compile()
    after, metrics = compiled(state, ids)
    assert jax.tree.map(lambda a: a.sharding, after) == lies
    return compiled, *jax.device_get((after, metrics))


def config_of(accumulation: int) -> TrainConfig:
    """Whatever else does not change a step is spread over the runs."""
    model = dataclasses.replace(MODEL, recompute={8: "full", 4: "selective", 2: "none"}[accumulation])
    return dataclasses.replace(CONFIG, model=model, accumulation=accumulation, shard_weights=accumulation in SPLIT)


def real(params: Any) -> Any:
    """Without the empty experts."""
    moe = params["layers"]["moe"]
    experts = {n: a[:, : MODEL.moe.num_experts] for n, a in moe["experts"].items()}
    return {**params, "layers": {**params["layers"], "moe": {**moe, "experts": experts}}}


def moments(state: Any) -> tuple[Any, Any]:
    """Adam's, without those of empty experts."""
    return real(optax.tree.get(state.opt_state, "mu")), real(optax.tree.get(state.opt_state, "nu"))


@pytest.mark.parametrize("accumulation", [8, 4, 2])
def test_a_step_is_that_of_one_device(accumulation):
    """Loss, norm of the gradient, the gradient of every parameter after clipping (from Adam's first moment, which is a
    tenth of it), the second moment, and the update.
    """
    _, after, metrics = step_of(accumulation)
    want_loss, grads = reference(accumulation)
    norm = np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(grads)))
    assert norm > 2 * CLIP  # or nothing is clipped
    assert not metrics.skipped
    close(metrics.loss, want_loss)
    close(metrics.grad_norm, norm)
    assert metrics.stats.tokens.tolist() == [B * S] * 2 and metrics.stats.counts.sum() == 2 * B * S * 2
    assert metrics.stats.rounds.tolist() == [1, 1]  # the most of a microbatch, not their sum
    clipped = jax.tree.map(lambda g: g * CLIP / norm, grads)
    mu, nu = moments(after)
    close(jax.tree.map(lambda m: m / 0.1, mu), clipped)
    close(jax.tree.map(lambda m: np.sqrt(m / 0.05), nu), jax.tree.map(np.abs, clipped))
    decay = jax.tree.map(lambda matrix: DECAY * matrix, decays(start()))
    want = jax.tree.map(lambda p, g, d: p - RATE * (g / (np.abs(g) + EPS) + d * p), start(), clipped, decay)
    close(real(after.params), want)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), real(after.params), real(before().params))
    assert min(jax.tree.leaves(moved)) > 1e-3  # every parameter was trained


def test_empty_experts_stay_empty():
    _, after, _ = step_of(4)
    for tree in (before().params, after.params, optax.tree.get(after.opt_state, "nu")):
        for name, a in tree["layers"]["moe"]["experts"].items():
            assert a.shape[1] == 8 and not a[:, 6:].any(), name


def test_split_weights_lie_split_and_are_gathered_layer_by_layer():
    """What a device keeps, and that nowhere in the program it holds a matrix of all layers whole."""
    shapes, lies = (of(config_of(2), mesh()) for of in (state_shapes, state_shardings))
    kept = jax.tree.map(lambda a, s: a.size // int(np.prod(s.shard_shape(a.shape))), shapes.params, lies.params)
    layers = kept["layers"]
    assert {kept[name] for name in ("embed", "lm_head", "final_norm")} == {8}
    assert {layers[name] for name in ("q", "k", "v", "o", "q_bias", "q_norm", "attention_norm", "moe_norm")} == {8}
    assert (layers["sinks"], layers["moe"]["router"]["bias"]) == (1, 1)  # nothing that eight devices divide
    assert (set(layers["moe"]["experts"].values()), set(layers["moe"]["shared"].values())) == ({4}, {8})
    assert lies.params["layers"]["moe"]["shared"]["up"].spec == P(None, None, ("data", "expert"))
    assert optax.tree.get(lies.opt_state, "mu") == lies.params == optax.tree.get(lies.opt_state, "nu")

    arrays = zip(jax.tree.leaves(shapes), jax.tree.leaves(lies), strict=True)
    state_bytes = sum(int(np.prod(s.shard_shape(a.shape))) * a.dtype.itemsize for a, s in arrays)
    stacked = re.compile(r"\[2,(16,24|24,16|16,40|40,16)\]")  # queries, output, shared experts
    gathered = re.compile(r"= \w+\[(1,)?16,24\]\S* all-gather\(")  # queries of a layer
    assert stacked.search(step_of(4)[0].as_text()) and not gathered.search(step_of(4)[0].as_text())
    for compiled, microbatch_bytes in ((step_of(2)[0], IDS.nbytes // 8), (step_of(8)[0], IDS.nbytes)):
        assert compiled.memory_analysis().argument_size_in_bytes == state_bytes + microbatch_bytes
        assert gathered.search(compiled.as_text()) and not stacked.search(compiled.as_text())


def test_a_weight_is_split_where_the_devices_divide_it():
    """Its largest dimension, the first of two alike, and never that of the layers."""
    axes = sharding.layer_axes(MODEL.moe, mesh())
    over = ("data", "expert")
    wanted = {(16, 24): P(None, over), (24, 24): P(over), (24, 12): P(over), (7, 100): P(), (): P()}
    assert {shape: split_spec(shape, axes, stacked=False) for shape in wanted} == wanted
    stacked = {(64, 16, 12): P(None, over), (64, 9): P(), (8, 8, 16): P(None, None, over)}
    assert {shape: split_spec(shape, axes, stacked=True) for shape in stacked} == stacked


SMALL = TrainConfig(
    model=ModelConfig(VOCAB, 2, 2, 1, 8, MoEConfig(16, 16, 8, RouterConfig(2)), balance_loss_coef=0.01),
    batch_size=B,
    sequence_length=S,
    steps=50,
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5),
)


def losses(comm: CommConfig, mesh: jax.sharding.Mesh) -> np.ndarray:
    """Of fifty steps on text where every token follows from the one before, but for one in eight."""
    config = dataclasses.replace(SMALL, model=with_comm(SMALL.model, comm))
    step, state, rng = make_step(config, mesh), init_state(config, mesh), np.random.default_rng(2)
    told = []
    for _ in range(config.steps):
        ids = np.empty((1, B, S), np.int32)
        ids[..., 0] = rng.integers(0, VOCAB, (1, B))
        for at in range(1, S):
            chance = rng.integers(0, VOCAB, (1, B))
            ids[..., at] = np.where(rng.random((1, B)) < 0.125, chance, (5 * ids[..., at - 1] + 3) % VOCAB)
        state, metrics = step(state, ids)
        told.append(metrics.loss)
    assert step._cache_size() == 1  # the state comes back as it went in
    return np.array(jax.device_get(told))


@functools.cache
def losses_of_one_device() -> np.ndarray:
    return losses(CommConfig(), make_mesh(1))


@pytest.mark.parametrize(
    "comm",
    [CommConfig(mode="padded"), CommConfig(), CommConfig(dedup=True), CommConfig(mode="allgather")],
    ids=["padded", "packed", "packed with dedup", "allgather"],
)
def test_fifty_losses_are_those_of_one_device(comm):
    want, got = losses_of_one_device(), losses(comm, mesh())
    assert want[-5:].mean() < want[:5].mean() - 0.5  # it learns
    assert np.abs(got - want).max() <= 1e-4
