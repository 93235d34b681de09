"""Decoders of every family against the loops of tests/numpy_decoder.py, from random checkpoints in the hub's names.

qwen2_moe and granitemoe, which have no golden data, on meshes and paths; switches, rotary scalings and square experts
of all families, which the golden data do not have, on one device.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hub_models import params_of, random_tensors, tiny
from numpy_decoder import logits as oracle

from jax_ep import CommConfig, make_mesh
from jax_ep.models.decoder import forward
from jax_ep.models.families import config_from_hub

TOLERANCE = 1e-4
IDS = np.random.default_rng(3).integers(0, 64, (2, 12)).astype(np.int32)
WHOLE = np.ones(IDS.shape, bool)
PADDED = np.array([[1] * 8 + [0] * 4, [0] * 3 + [1] * 9], bool)  # behind the others, and before them
PATHS = {"packed": CommConfig(recv_rows_factor=None), "padded": CommConfig(mode="padded")}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SQUARE = {"intermediate_size": 32, "moe_intermediate_size": 32}  # gate, up and down have one shape
FUSED_SQUARE = {"intermediate_size": 16}  # gate and up together have the shape of their transpose
VARIANTS = {
    "mixtral": {"sliding_window": 4, "rope_scaling": {"type": "linear", "factor": 4.0}, "intermediate_size": 32},
    "olmoe": {"clip_qkv": 0.7, "attention_bias": True, "rope_scaling": LLAMA3, "rope_theta": 100.0},
    "qwen2_moe": {"norm_topk_prob": True, "qkv_bias": False, "tie_word_embeddings": True, **SQUARE},
    "qwen3_moe": {"attention_bias": True, "norm_topk_prob": False, "rope_scaling": YARN, "moe_intermediate_size": 32},
    "gpt_oss": {"rope_scaling": {**YARN, "truncate": False}, "sliding_window": 3, **FUSED_SQUARE},
    "granitemoe": {"attention_bias": True, "tie_word_embeddings": False, **FUSED_SQUARE},
}
run = jax.jit(forward, static_argnames=("config", "mesh"))


@functools.cache
def wanted(family: str, varied: bool) -> tuple[dict, dict, np.ndarray, np.ndarray]:
    """The hub's config, its random checkpoint, and the oracle's logits of whole and padded sequences."""
    hub = tiny(family, **(VARIANTS[family] if varied else {}))
    tensors = random_tensors(hub, seed=5)
    return hub, tensors, oracle(hub, tensors, IDS), oracle(hub, tensors, IDS, PADDED)


def check(family: str, varied: bool, ranks: int, comm: CommConfig) -> None:
    hub, tensors, whole, padded = wanted(family, varied)
    config = config_from_hub(hub, comm=comm)
    mesh = None if ranks == 1 else make_mesh(ranks)
    params = params_of(hub, tensors, ranks)
    for mask, want in ((WHOLE, whole), (PADDED, padded)):
        got, stats = run(params, IDS, config, mesh=mesh, attention_mask=mask)
        assert got.shape == want.shape
        assert np.isfinite(got).all()
        assert np.abs(np.asarray(got) - want)[mask].max() <= TOLERANCE
        assert stats.tokens.tolist() == [mask.sum()] * config.num_layers
    assert np.abs(whole - padded)[PADDED].max() > 100 * TOLERANCE  # the padding does change what is compared


@pytest.mark.parametrize("family", ["qwen2_moe", "granitemoe"])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("path", PATHS)
def test_families_without_golden_data_on_meshes(family, ranks, path):
    check(family, False, ranks, PATHS[path])


@pytest.mark.parametrize("family", VARIANTS)
def test_what_a_family_can_say_beside_its_published_model(family):
    check(family, True, 1, PATHS["packed"])
