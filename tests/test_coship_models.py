"""Decoders whose layers run in two co-shipped microbatches: goldens, every family, and training, as without."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_golden_models import GOLDEN, close, evaluate, fused_gradients, golden
from tiny_models import TINY, tiny_model, with_comm

from jax_ep import CommConfig, ConfigError, RouterConfig, make_mesh
from jax_ep.block.ranges import SPLITS
from jax_ep.models.decoder import decoder_shardings, forward, init_decoder, loss
from jax_ep.models.families import config_from_hub
from jax_ep.models.loading import load_params

pytestmark = pytest.mark.slow

PACKED = CommConfig(recv_rows_factor=None)


@pytest.mark.parametrize(
    ("family", "ranks", "split"),
    [("mixtral", 2, "contiguous"), ("qwen3_moe", 4, "zigzag")],  # 12 positions: the latter are padded to 16
)
def test_goldens(family, ranks, split):
    config = config_from_hub(golden(family, "config.json"), comm=PACKED)
    config = dataclasses.replace(config, kv_coship=split)
    mesh = make_mesh(ranks)
    params = load_params(GOLDEN / family, config, family, mesh)
    ids, mask = golden(family, "input_ids.npy").astype(np.int32), golden(family, "attention_mask.npy") != 0
    meta = golden(family, "meta.json")
    (total, (parts, logits)), grads = evaluate(params, ids, np.ones_like(mask), config, mesh)
    close(logits, golden(family, "logits.npy"))
    for ours, theirs in ((total, "total_loss"), (parts.cross_entropy, "ce_loss"), (parts.balance, "aux_loss")):
        close(ours, meta[theirs])
    got = fused_gradients(grads, family, config)
    with golden(family, "grads.npz") as saved:
        assert set(saved) <= set(got)
        for name in saved:
            close(got[name], saved[name])
    (_, (parts, logits)), _ = evaluate(params, ids, mask, config, mesh)
    close(np.asarray(logits)[mask], golden(family, "logits_masked.npy")[mask])
    close(parts.balance, meta["aux_loss_masked"])
    assert parts.stats.tokens.tolist() == [mask.sum()] * 2


@pytest.mark.parametrize(
    ("family", "ranks", "split"),
    [("olmoe", 2, "zigzag"), ("qwen2_moe", 4, "contiguous"), ("gpt_oss", 4, "zigzag"), ("granitemoe", 2, "contiguous")],
)
def test_every_family(family, ranks, split):
    """Padding before and after, and a length that does not divide; 6 experts on 4 ranks."""
    plain = with_comm(TINY[family], PACKED)
    mesh = make_mesh(ranks)
    params = init_decoder(plain, jax.random.key(0))
    if plain.attention_sinks:
        params["layers"]["sinks"] += jnp.linspace(-1, 2, plain.num_heads)[None]
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, plain.vocab_size, (4, 21)), jnp.int32)
    mask = np.ones((4, 21), bool)
    mask[1, :6] = mask[2, 17:] = False
    run = jax.jit(forward, static_argnames=("config", "mesh"))
    want, wanted = run(params, ids, plain, attention_mask=jnp.asarray(mask))
    config = dataclasses.replace(plain, kv_coship=split)
    got, stats = run(params, ids, config, mesh=mesh, attention_mask=jnp.asarray(mask))
    close(np.asarray(got)[mask], np.asarray(want)[mask])
    assert np.isfinite(got).all() and stats.counts.tolist() == wanted.counts.tolist()


def test_fifty_steps_have_the_losses_of_training_without():
    plain = tiny_model(RouterConfig(2), {"comm": PACKED}, vocab_size=32, balance_loss_coef=0.01)
    rng = np.random.default_rng(0)
    text = np.cumsum(rng.integers(0, 2, (5, 4, 16)), axis=2) % 32  # learnable: the next of each is one of two
    losses = {}
    for split in (None, "zigzag"):
        config = dataclasses.replace(plain, kv_coship=split)
        mesh = None if split is None else make_mesh(2)
        losses[split] = train(config, mesh, jnp.asarray(text, jnp.int32), 50)
    assert losses[None][-1] < 0.5 * losses[None][0]
    np.testing.assert_allclose(losses["zigzag"], losses[None], atol=1e-3)


def train(config: Any, mesh: Any, text: jax.Array, steps: int) -> np.ndarray:
    optimizer = optax.adam(1e-2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, ids: jax.Array) -> Any:
        (total, _), grads = jax.value_and_grad(loss, has_aux=True)(params, ids, config, mesh=mesh)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, total

    params = init_decoder(config, jax.random.key(0))
    if mesh is not None:
        params = jax.device_put(params, decoder_shardings(config, mesh))
    state, losses = optimizer.init(params), []
    for at in range(steps):
        params, state, total = step(params, state, text[at % len(text)])
        losses.append(float(total))
    return np.array(losses)


def test_what_it_refuses():
    config = dataclasses.replace(TINY["mixtral"], kv_coship="zigzag")
    params = init_decoder(config, jax.random.key(0))
    ids = jnp.zeros((3, 8), jnp.int32)
    with pytest.raises(ConfigError, match=r"batch=3: must be a multiple of 2: .*batch=4 works"):
        forward(params, ids, config, mesh=make_mesh(2))
    with pytest.raises(ConfigError, match="mode='padded': key/value rows travel beside packed rows"):
        forward(params, ids, with_comm(config, CommConfig("padded")), mesh=make_mesh(2))
    with pytest.raises(ConfigError, match="split_weights=True: with kv_coship all layers"):
        forward(params, ids, config, mesh=make_mesh(2), split_weights=True)
    with pytest.raises(ConfigError, match=f"kv_coship='striped': must be one of {', '.join(SPLITS)}"):
        dataclasses.replace(config, kv_coship="striped")
