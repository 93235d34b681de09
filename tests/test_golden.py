"""MoE blocks of five published families, reproduced from their checkpoints on one device and on expert meshes.

tests/golden/README.md says where the reference values come from.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import CommConfig, MoEConfig, RouterConfig, make_mesh, moe, route, router_logits
from jax_ep.experts import deinterleave

FOLDER = pathlib.Path(__file__).parent / "golden"
Tensors = dict[str, np.ndarray]


def read_safetensors(path: pathlib.Path) -> Tensors:
    """The format in full: a length of 8 bytes, a JSON header, then the bytes. Float32 is all that is here."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        assert entry["dtype"] == "F32", f"{name} is {entry['dtype']}"
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(raw[begin:end], "<f4").reshape(entry["shape"])
    return tensors


def stacked(tensors: Tensors, prefix: str, experts: int, names: tuple[str, str, str]) -> dict[str, np.ndarray]:
    """Experts in one tensor each, [out, in] on disk -> gate, up [E, H, I] and down [E, I, H]."""
    each = [[tensors[f"{prefix}.experts.{e}.{name}.weight"].T for e in range(experts)] for name in names]
    return dict(zip(("gate", "up", "down"), map(np.stack, each), strict=True))


def mixtral(t: Tensors, block: str, c: MoEConfig) -> dict[str, Any]:
    return {
        "router": {"kernel": t[f"{block}.gate.weight"].T},
        "experts": stacked(t, block, c.num_experts, ("w1", "w3", "w2")),
    }


def qwen_like(t: Tensors, block: str, c: MoEConfig) -> dict[str, Any]:
    return {
        "router": {"kernel": t[f"{block}.gate.weight"].T},
        "experts": stacked(t, block, c.num_experts, ("gate_proj", "up_proj", "down_proj")),
    }


def deepseek_v3(t: Tensors, block: str, c: MoEConfig) -> dict[str, Any]:
    params = qwen_like(t, block, c)
    params["router"]["selection_bias"] = t[f"{block}.gate.e_score_correction_bias"]
    params["shared"] = {n: t[f"{block}.shared_experts.{n}_proj.weight"].T for n in ("gate", "up", "down")}
    return params


def gpt_oss(t: Tensors, block: str, c: MoEConfig) -> dict[str, Any]:
    """Fused, [in, out], gate and up alternating, biases everywhere."""
    e = f"{block}.experts"
    gate, up = deinterleave(t[f"{e}.gate_up_proj"])
    gate_bias, up_bias = deinterleave(t[f"{e}.gate_up_proj_bias"])
    biases = {"gate_bias": gate_bias, "up_bias": up_bias, "down_bias": t[f"{e}.down_proj_bias"]}
    return {
        "router": {"kernel": t[f"{block}.router.weight"].T, "bias": t[f"{block}.router.bias"]},
        "experts": {"gate": gate, "up": up, "down": t[f"{e}.down_proj"], **biases},
    }


@dataclasses.dataclass(frozen=True)
class Family:
    """How a family's configuration and checkpoint become a MoEConfig and parameters."""

    layers: tuple[int, ...]
    block: str
    experts: str
    width: str
    router: Callable[[dict[str, Any]], dict[str, Any]]
    layer: Callable[[dict[str, Any]], dict[str, Any]]
    params: Callable[[Tensors, str, MoEConfig], dict[str, Any]]


def _groups(c: dict[str, Any]) -> dict[str, Any]:
    return {
        "score_function": "sigmoid",
        "normalize_weights": c["norm_topk_prob"],
        "num_groups": c["n_group"],
        "top_k_groups": c["topk_group"],
        "group_score": "top2_sum",
        "scale": c["routed_scaling_factor"],
        "selection_bias": True,
    }


def _nothing(_: dict[str, Any]) -> dict[str, Any]:
    return {}


def _norm(c: dict[str, Any]) -> dict[str, Any]:
    return {"normalize_weights": c["norm_topk_prob"]}


FAMILIES = {
    "mixtral": Family(
        (0, 1), "block_sparse_moe", "num_local_experts", "intermediate_size", _nothing, _nothing, mixtral
    ),
    "olmoe": Family((0, 1), "mlp", "num_experts", "intermediate_size", _norm, _nothing, qwen_like),
    "qwen3_moe": Family((0, 1), "mlp", "num_local_experts", "moe_intermediate_size", _norm, _nothing, qwen_like),
    "gpt_oss": Family(
        (0, 1),
        "mlp",
        "num_local_experts",
        "intermediate_size",
        lambda _: {"softmax_after_top_k": True, "logit_bias": True},
        lambda _: {"activation": "gpt_oss", "expert_bias": True},
        gpt_oss,
    ),
    "deepseek_v3": Family(
        (1,),
        "mlp",
        "n_routed_experts",
        "moe_intermediate_size",
        _groups,
        lambda c: {"num_shared_experts": c["n_shared_experts"]},
        deepseek_v3,
    ),
}
BLOCKS = [(family, layer) for family, entry in FAMILIES.items() for layer in entry.layers]
PLACES = {
    "one device": (1, CommConfig()),
    "packed on 2": (2, CommConfig()),
    "packed on 4": (4, CommConfig(recv_rows_factor=None)),
    "padded on 2": (2, CommConfig(mode="padded")),
    "padded on 4": (4, CommConfig(mode="padded")),
}
run_moe = jax.jit(moe, static_argnames=("config", "mesh"))
run_route = jax.jit(route, static_argnums=1)
blocks = pytest.mark.parametrize(("family", "layer"), BLOCKS, ids=lambda v: str(v))


@functools.cache
def load(family: str, layer: int) -> tuple[MoEConfig, dict[str, Any], dict[str, np.ndarray]]:
    """A block's configuration, parameters and reference values."""
    entry, folder = FAMILIES[family], FOLDER / family
    published = json.loads((folder / "config.json").read_text())
    assert published["model_type"] == family
    config = MoEConfig(
        hidden_size=published["hidden_size"],
        intermediate_size=published[entry.width],
        num_experts=published[entry.experts],
        router=RouterConfig(top_k=published["num_experts_per_tok"], **entry.router(published)),
        **entry.layer(published),
    )
    tensors = read_safetensors(folder / "model.safetensors")
    params = entry.params(tensors, f"model.layers.{layer}.{entry.block}", config)
    with np.load(folder / f"moe_layer{layer}.npz") as saved:
        reference = dict(saved)
    return config, jax.tree.map(jnp.asarray, params), reference


def close(got: Any, want: np.ndarray) -> None:
    """Norm-wise: the largest difference is at most 1e-5 of the largest value."""
    assert got.shape == want.shape
    assert np.abs(np.asarray(got) - want).max() <= 1e-5 * np.abs(want).max()


def test_every_block_of_every_family_is_compared():
    found = {(p.parent.name, int(p.stem.removeprefix("moe_layer"))) for p in FOLDER.glob("*/moe_layer*.npz")}
    assert found == set(BLOCKS)


@blocks
def test_router_chooses_the_same_experts_with_the_same_weights(family, layer):
    config, params, reference = load(family, layer)
    router = params["router"]
    logits = router_logits(reference["input"], router["kernel"], router.get("bias"))
    close(logits, reference["router_logits"])
    routing = run_route(logits, config.router, selection_bias=router.get("selection_bias"))
    by_id = np.argsort(routing.experts, axis=1)
    assert np.array_equal(np.take_along_axis(np.asarray(routing.experts), by_id, 1), reference["topk_indices"])
    close(np.take_along_axis(np.asarray(routing.weights), by_id, 1), reference["topk_weights"])


@blocks
@pytest.mark.parametrize("place", PLACES)
def test_block_output(family, layer, place):
    config, params, reference = load(family, layer)
    ranks, comm = PLACES[place]
    config = dataclasses.replace(config, comm=comm)
    y, stats = run_moe(params, reference["input"], config, mesh=None if ranks == 1 else make_mesh(ranks))
    close(y, reference["output"])
    load_of_experts = np.bincount(reference["topk_indices"].reshape(-1), minlength=config.num_experts)
    assert stats.counts.tolist() == load_of_experts.tolist()
    assert int(stats.tokens) == 24
    assert int(stats.dropped_rows) == 0


@blocks
def test_block_output_is_not_that_of_a_neighbouring_reading(family, layer):
    """The comparison would notice a wrong reading: gate and up exchanged move the output far beyond the tolerance."""
    config, params, reference = load(family, layer)
    experts = params["experts"]
    swapped = {**experts, "gate": experts["up"], "up": experts["gate"]}
    y, _ = run_moe({**params, "experts": swapped}, reference["input"], config)
    assert np.abs(np.asarray(y) - reference["output"]).max() > 1e-2 * np.abs(reference["output"]).max()
