"""Decoders of the published families against reference logits, losses and gradients, on one device and on meshes.

tests/golden/README.md says where the reference values come from.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jax_ep import CommConfig, make_mesh
from jax_ep.models.decoder import forward, loss_of_logits
from jax_ep.models.families import config_from_hub
from jax_ep.models.loading import load_params
from jax_ep.models.tensors import tensor_map, to_hub

GOLDEN = pathlib.Path(__file__).parent / "golden"
PACKED, PADDED = CommConfig(recv_rows_factor=None), CommConfig(mode="padded")
# Two sequences of 12: a mesh of 2 splits the batch, one of 4 the sequence, one of 8 neither.
PLACES = [
    ("mixtral", 1, PACKED),
    ("mixtral", 2, PADDED),
    ("mixtral", 4, PACKED),
    ("olmoe", 1, PADDED),
    ("olmoe", 2, PACKED),
    ("olmoe", 4, PADDED),
    ("qwen3_moe", 1, PACKED),
    ("qwen3_moe", 4, PACKED),
    ("qwen3_moe", 8, PADDED),
    ("gpt_oss", 1, PADDED),
    ("gpt_oss", 4, PADDED),
    ("gpt_oss", 8, PACKED),
]
run_forward = jax.jit(forward, static_argnames=("config", "mesh"))


@functools.partial(jax.jit, static_argnames=("config", "mesh"))
def evaluate(params: Any, ids: jax.Array, mask: jax.Array, config: Any, mesh: Mesh | None) -> tuple[Any, ...]:
    """(total loss, (its parts, logits)), gradients: one program for all that is compared."""

    def run(params: Any) -> Any:
        logits, stats = forward(params, ids, config, mesh=mesh, attention_mask=mask)
        total, parts = loss_of_logits(logits, stats, ids, config, attention_mask=mask)
        return total, (parts, logits)

    return jax.value_and_grad(run, has_aux=True)(params)


def close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Norm-wise: the largest difference is at most tolerance * the largest value."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


def golden(family: str, name: str) -> Any:
    path = GOLDEN / family / name
    return json.loads(path.read_text()) if path.suffix == ".json" else np.load(path)


@pytest.mark.parametrize(("family", "ranks", "comm"), PLACES, ids=lambda v: getattr(v, "mode", str(v)))
def test_golden_logits_loss_and_gradients(family, ranks, comm):
    config = config_from_hub(golden(family, "config.json"), comm=comm)
    mesh = None if ranks == 1 else make_mesh(ranks)
    params = load_params(GOLDEN / family, config, family, mesh)
    ids, mask = golden(family, "input_ids.npy").astype(np.int32), golden(family, "attention_mask.npy") != 0
    meta = golden(family, "meta.json")

    (total, (parts, logits)), grads = evaluate(params, ids, np.ones_like(mask), config, mesh)
    close(logits, golden(family, "logits.npy"))
    for ours, theirs in ((total, "total_loss"), (parts.cross_entropy, "ce_loss"), (parts.balance, "aux_loss")):
        close(ours, meta[theirs])
    with golden(family, "grads.npz") as saved:
        wanted = dict(saved)
    got = fused_gradients(grads, family, config)
    assert wanted.keys() <= got.keys() and len(wanted) == len(meta["grad_keys"])
    for name in wanted:
        close(got[name], wanted[name])

    (_, (parts, logits)), _ = evaluate(params, ids, mask, config, mesh)  # the same program
    close(np.asarray(logits)[mask], golden(family, "logits_masked.npy")[mask])
    close(parts.balance, meta["aux_loss_masked"])
    assert parts.stats.tokens.tolist() == [mask.sum()] * 2
    assert parts.stats.counts.sum(-1).tolist() == [mask.sum() * config.moe.router.top_k] * 2


def fused_gradients(grads: Any, family: str, config: Any) -> dict[str, np.ndarray]:
    """Gradients under the hub's names, the experts' fused as newer releases of transformers hold them."""
    experts = config.moe.num_experts
    grads["layers"]["moe"]["experts"] = jax.tree.map(lambda a: a[:, :experts], grads["layers"]["moe"]["experts"])
    found = {}
    for entry in tensor_map(family, config):
        leaves = [functools.reduce(lambda tree, name: tree[name], path, grads) for path in entry.paths]
        at = tuple(i for i in (entry.layer, entry.expert) if i is not None)
        found[entry.name.replace("block_sparse_moe", "mlp")] = to_hub(entry, tuple(np.asarray(a)[at] for a in leaves))
    if family == "gpt_oss":
        return found
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    each = [f"model.layers.0.mlp.experts.{e}." for e in range(experts)]
    pairs = [np.concatenate([found[f"{e}{gate}.weight"], found[f"{e}{up}.weight"]]) for e in each]
    found["model.layers.0.mlp.experts.gate_up_proj"] = np.stack(pairs)
    found["model.layers.0.mlp.experts.down_proj"] = np.stack([found[f"{e}{down}.weight"] for e in each])
    return found


def test_the_golden_comparison_would_notice_wrong_readings():
    """Windows, norms and clips that the goldens' lengths and values exercise move the logits beyond the tolerance."""
    ids = golden("gpt_oss", "input_ids.npy").astype(np.int32)
    config = config_from_hub(golden("gpt_oss", "config.json"))
    params = load_params(GOLDEN / "gpt_oss", config, "gpt_oss")
    right = golden("gpt_oss", "logits.npy")
    neighbours = [
        {"window": 7},
        {"window_layers": (True, True)},
        {"rope": dataclasses.replace(config.rope, theta=1e4)},
    ]
    for fields in neighbours:
        logits, _ = run_forward(params, ids, dataclasses.replace(config, **fields))
        assert np.abs(np.asarray(logits) - right).max() > 1e-3 * np.abs(right).max(), fields
