"""The decoder on meshes, with padding, in training, and as a module. test_golden_models.py has reference values."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from tiny_models import TINY, tiny_model, with_comm

import depth
from jax_ep import CommConfig, ConfigError, make_mesh
from jax_ep.aot.compiled import count_collectives
from jax_ep.layer import RouterBias
from jax_ep.models.decoder import (
    IGNORED,
    Decoder,
    decoder_shapes,
    decoder_shardings,
    forward,
    init_decoder,
    loss,
    place_params,
)

PACKED = CommConfig(recv_rows_factor=None)
run_forward = jax.jit(forward, static_argnames=("config", "mesh"))
run_loss = jax.jit(loss, static_argnames=("config", "mesh"))


def close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Norm-wise: the largest difference is at most tolerance * the largest value."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


def ids_of(batch: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 96, (batch, length)).astype(np.int32)


@functools.cache
def params_of(family: str) -> Any:
    return init_decoder(TINY[family], jax.random.key(1))


def test_data_and_expert_axes_together():
    """Replicas and ranks, a batch that lies on both, on the replicas alone, and on neither."""
    config, params = TINY["qwen3_moe"], params_of("qwen3_moe")
    mesh = make_mesh(expert=2, data=2)
    placed, ids = place_params(params, config, mesh), ids_of(4, 6)
    want, want_stats = run_forward(params, ids, config)
    for batch, length in ((4, 6), (2, 6), (3, 5)):
        got, stats = run_forward(placed, ids[:batch, :length], config, mesh=mesh)
        close(got, want[:batch, :length])
        assert stats.tokens.tolist() == [batch * length] * 2
        assert batch * length < 24 or np.array_equal(stats.counts, want_stats.counts)


def test_padding_on_either_side_changes_nothing():
    config, params = TINY["gpt_oss"], params_of("gpt_oss")
    ids, short = ids_of(1, 9), 9
    alone, alone_stats = run_forward(params, ids, config)
    padded, mask = ids_of(3, 12, seed=5), np.zeros((3, 12), np.int32)
    for row, begin in enumerate((0, 3, 1)):  # after, before, on both sides
        padded[row, begin : begin + short] = ids
        mask[row, begin : begin + short] = 1
    logits, stats = run_forward(params, padded, config, attention_mask=mask)
    assert np.isfinite(logits).all()
    for row, begin in enumerate((0, 3, 1)):
        close(logits[row, begin : begin + short], alone[0])
    assert np.array_equal(stats.counts, 3 * alone_stats.counts)
    assert stats.tokens.tolist() == [3 * short] * 2

    total, parts = run_loss(params, padded, config, attention_mask=mask)
    alone_total, _ = run_loss(params, ids, config)
    close(total, alone_total)
    by_hand = jnp.where(mask == 1, padded, IGNORED)
    assert run_loss(params, padded, config, attention_mask=mask, labels=by_hand)[0] == total
    assert parts.cross_entropy == total  # no coefficient, no balance loss in it


def test_labels_that_are_ignored_take_no_part():
    config, params = TINY["mixtral"], params_of("mixtral")
    ids = ids_of(2, 8)
    logits, _ = run_forward(params, ids, config)
    labels = np.full_like(ids, IGNORED)
    labels[0, 3], labels[1, 7], labels[1, 0] = 5, 11, 2  # nothing predicts the first
    _, parts = run_loss(params, ids, config, labels=labels)
    log_probs = jax.nn.log_softmax(logits)
    close(parts.cross_entropy, -(log_probs[0, 2, 5] + log_probs[1, 6, 11]) / 2)
    _, parts = run_loss(params, ids, config, labels=np.full_like(ids, IGNORED))
    assert parts.cross_entropy == 0


def test_recomputing_changes_no_gradient():
    """And keeping what the layer names adds no collective to the backward, where recomputing all does."""
    mesh, config = make_mesh(4), with_comm(TINY["mixtral"], PACKED)
    params = place_params(params_of("mixtral"), config, mesh)
    grads, exchanges = {}, {}
    for how in ("none", "selective", "full"):
        run = functools.partial(loss, config=dataclasses.replace(config, recompute=how), mesh=mesh)
        compiled = jax.jit(jax.grad(run, has_aux=True)).lower(params, ids_of(4, 8)).compile()
        grads[how], _ = compiled(params, ids_of(4, 8))
        exchanges[how] = sum(count_collectives(compiled.as_text())["all_to_all"])
    for how in ("selective", "full"):
        jax.tree.map(close, grads[how], grads["none"])
    assert exchanges["full"] > exchanges["selective"] == exchanges["none"] > 0


def test_programs_do_not_grow_with_depth():
    """What is traced for forward, gradients and decoding is the same for 4 and 32 layers but for a few numbers, and so
    is what the compiler makes of it. (scripts/depth.py shows the times.)
    """
    shallow, deep = (depth.programs(depth.at_depth(TINY["mixtral"], layers), make_mesh(4)) for layers in (4, 32))
    for name, (function, arguments) in shallow.items():
        other, others = deep[name]
        lowered, lowered_deep = function.lower(*arguments), other.lower(*others)
        assert len(lowered.as_text().splitlines()) == len(lowered_deep.as_text().splitlines())
        if name == "decoding step":
            lines, lines_deep = (len(low.compile().as_text().splitlines()) for low in (lowered, lowered_deep))
            assert abs(lines - lines_deep) <= 0.02 * lines


def test_parameters_do_not_depend_on_the_mesh():
    """The same model on any number of ranks: real experts alike, empty ones zero; and back again."""
    config = TINY["qwen3_moe"]
    one, four = params_of("qwen3_moe"), init_decoder(config, jax.random.key(1), ranks=4)
    assert four["layers"]["moe"]["experts"]["up"].shape == (2, 12, 32, 24)
    mesh = make_mesh(4)
    placed = place_params(one, config, mesh)
    jax.tree.map(np.testing.assert_array_equal, placed, four)
    assert jax.tree.map(lambda a: a.sharding, placed) == decoder_shardings(config, mesh)
    jax.tree.map(np.testing.assert_array_equal, place_params(placed, config, make_mesh(1)), one)
    dense = with_comm(config, CommConfig(mode="dense"))
    assert decoder_shardings(dense, mesh)["layers"]["moe"]["experts"]["up"].spec == P(None)


def test_decoder_owns_its_parameters():
    config = TINY["qwen2_moe"]
    mesh = make_mesh(4)
    decoder = Decoder(config, mesh, rngs=nnx.Rngs(3))
    assert jax.tree.structure(decoder.params()) == jax.tree.structure(decoder_shapes(config, 4))
    assert decoder.layers.moe.experts.up.sharding.spec == P(None, "expert")
    logits, stats = decoder(ids_of(2, 8))
    assert logits.shape == (2, 8, 96) and logits.dtype == jnp.float32 and stats.counts.shape == (2, 6)
    again = Decoder(config, params=jax.device_get(decoder.params()))
    close(again(ids_of(2, 8))[0], logits)
    bias = tiny_model(dataclasses.replace(config.moe.router, score_function="sigmoid", selection_bias=True))
    biased = Decoder(bias, rngs=nnx.Rngs(0))
    assert isinstance(biased.layers.moe.router.selection_bias, RouterBias)
    assert "selection_bias" not in str(nnx.state(biased, nnx.Param))


def test_gradients_through_the_module():
    decoder = Decoder(TINY["granitemoe"], rngs=nnx.Rngs(0))
    ids = ids_of(2, 6)

    @nnx.jit
    def grads_of(decoder: Decoder) -> Any:
        return nnx.grad(lambda d: jnp.square(d(ids)[0]).mean())(decoder)

    grads = grads_of(decoder)
    assert jnp.abs(grads["embed"][...]).max() > 0
    assert jnp.abs(grads["layers"]["moe"]["router"]["kernel"][...]).max() > 0


def test_an_ambient_mesh_is_taken():
    config, mesh = TINY["mixtral"], make_mesh(4)
    want, _ = run_forward(params_of("mixtral"), ids_of(2, 8), config)
    placed = place_params(params_of("mixtral"), config, mesh)
    with jax.set_mesh(mesh):
        got, stats = jax.jit(lambda p, ids: forward(p, ids, config))(placed, ids_of(2, 8))
    close(got, want)
    assert stats.rounds.min() >= 1


def test_half_precision_stays_near():
    config = TINY["qwen3_moe"]
    half = dataclasses.replace(config, moe=dataclasses.replace(config.moe, dtype="bfloat16"))
    want, _ = run_forward(params_of("qwen3_moe"), ids_of(2, 8), config)
    got, _ = run_forward(params_of("qwen3_moe"), ids_of(2, 8), half)
    assert got.dtype == jnp.float32
    assert 1e-4 < np.linalg.norm(got - want) / np.linalg.norm(want) < 0.1


def test_refusals_name_what_is_wrong():
    config, params = TINY["mixtral"], params_of("mixtral")
    ids = ids_of(2, 8)
    wrong = [
        (lambda: forward(params, ids[0], config), "input_ids"),
        (lambda: forward(params, ids[:, :0], config), "input_ids"),
        (lambda: forward(params, ids.astype(np.float32), config), "input_ids"),
        (lambda: forward(params, ids, config, attention_mask=np.ones((2, 7), bool)), "attention_mask"),
        (lambda: forward(params, ids, config, attention_mask=np.ones((2, 8), np.float32)), "attention_mask"),
        (lambda: loss(params, ids, config, labels=ids[:, 1:]), "labels"),
        (lambda: Decoder(config), "rngs"),
        (lambda: Decoder(config, rngs=nnx.Rngs(0), params=params), "rngs"),
        (lambda: Decoder(config, params=params)(ids + 90), "input_ids"),
        (lambda: forward(params, ids, config, mesh=Mesh(np.array(jax.devices()), ("model",))), "expert_axis"),
    ]
    for call, field in wrong:
        with pytest.raises(ConfigError, match=f"^{field}"):
            call()
    explicit = Mesh(np.array(jax.devices()[:2]), ("expert",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ConfigError, match="axis_types"):
        forward(params, ids, config, mesh=explicit)


@pytest.mark.parametrize("given", ["ids", "labels"])
def test_loss_of_narrow_unsigned_ids(given):
    """-100, which marks what takes no part, is 156 in uint8."""
    config = dataclasses.replace(TINY["mixtral"], vocab_size=256)
    params = init_decoder(config, jax.random.key(0))
    ids = np.array([[1, 156, 3, 156]], np.int32)
    want = loss(params, ids, config)[0]
    narrow = ids.astype(np.uint8)
    got = loss(params, narrow, config)[0] if given == "ids" else loss(params, ids, config, labels=narrow)[0]
    assert float(got) == float(want)


@pytest.mark.parametrize(("ids", "message"), [([[5000]], "input_ids holds=5000"), ([[-5]], "input_ids holds=-5")])
def test_the_module_refuses_ids_outside_the_vocabulary(ids, message):
    decoder = Decoder(TINY["mixtral"], rngs=nnx.Rngs(0))
    for array in (np.array(ids), jnp.array(ids)):
        with pytest.raises(ConfigError, match=message):
            decoder(array)
    with pytest.raises(ConfigError, match="must be arrays"):
        decoder([[1, 2]])
