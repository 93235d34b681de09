"""Every tensor of every family's checkpoints has its place in the parameters, and comes back to the same bytes."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from hub_models import GOLDEN, PUBLISHED, SWITCHES, golden_model, params_of, random_tensors, tiny

from jax_ep import ConfigError, init_params
from jax_ep.models.families import FAMILIES, config_from_hub
from jax_ep.models.tensors import LAYOUTS, tensor_map, to_hub, to_ours

# I = H, where gate, up and down have one shape, and 2I = H, where a fused gate and up looks like its own transpose.
SQUARE = [{"intermediate_size": size, "moe_intermediate_size": size, "hidden_size": 32} for size in (32, 16)]
families = pytest.mark.parametrize("family", FAMILIES)


def expected_tree(config):
    """Shapes of the whole tree, from the layer's own and the attention's."""
    layers, h, v = config.num_layers, config.moe.hidden_size, config.vocab_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    moe = jax.eval_shape(lambda: init_params(config.moe, jax.random.key(0)))
    tree = {"attention_norm": (h,), "q": (h, q), "k": (h, kv), "v": (h, kv), "o": (q, h), "moe_norm": (h,)}
    if config.qkv_bias:
        tree |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if config.output_bias:
        tree |= {"o_bias": (h,)}
    if config.qk_norm:
        sizes = (config.head_dim, config.head_dim) if config.qk_norm == "head" else (q, kv)
        tree |= dict(zip(("q_norm", "k_norm"), [(size,) for size in sizes]))
    if config.attention_sinks:
        tree |= {"sinks": (config.num_heads,)}
    tree = {name: (layers, *shape) for name, shape in tree.items()}
    tree["moe"] = {
        group: {name: (layers, *leaf.shape) for name, leaf in leaves.items()} for group, leaves in moe.items()
    }
    whole = {"embed": (v, h), "layers": tree, "final_norm": (h,)}
    return whole if config.tie_embeddings else {**whole, "lm_head": (h, v)}


def check_map(hub, tensors):
    """Names exactly those of the checkpoint; every leaf filled once and wholly; back to the same bytes."""
    config = config_from_hub(hub)
    entries = tensor_map(hub["model_type"], config)
    names = [entry.name for entry in entries]
    assert sorted(names) == sorted(tensors)
    filled: dict = {}
    for entry in entries:
        tensor = tensors[entry.name]
        assert tensor.shape == entry.shape
        assert entry.layout in LAYOUTS
        parts = to_ours(entry, tensor)
        for path, part in zip(entry.paths, parts, strict=True):
            filled[path] = filled.get(path, 0) + part.size
        back = to_hub(entry, tuple(parts))
        assert (back.dtype, back.tobytes()) == (tensor.dtype, tensor.tobytes()), entry.name
    shapes = jax.tree_util.tree_leaves_with_path(expected_tree(config), is_leaf=lambda s: isinstance(s, tuple))
    assert filled == {tuple(key.key for key in path): int(np.prod(shape)) for path, shape in shapes}


@pytest.mark.parametrize("family", GOLDEN)
def test_every_tensor_of_a_golden_checkpoint_has_its_place(family):
    check_map(*golden_model(family))


@families
@pytest.mark.parametrize("changes", [{}, *SQUARE], ids=["tiny", "I = H", "2I = H"])
@pytest.mark.parametrize("switched", [False, True], ids=["published", "switched"])
def test_every_tensor_of_every_family_has_its_place(family, changes, switched):
    hub = tiny(family)
    hub |= {key: value for key, value in changes.items() if key in hub}
    hub |= SWITCHES[family] if switched else {}
    check_map(hub, random_tensors(hub))


def test_names_of_the_families_without_a_golden_checkpoint():
    """As on the hub: Qwen/Qwen1.5-MoE-A2.7B and ibm-granite/granite-3.0-1b-a400m-base."""
    qwen = {entry.name: entry.shape for entry in tensor_map("qwen2_moe", config_from_hub(PUBLISHED["qwen2_moe"]))}
    assert len(qwen) == 24 * (2 + 4 + 3 + 1 + 3 * 60 + 3 + 1) + 3
    assert qwen["model.layers.23.mlp.experts.59.down_proj.weight"] == (2048, 1408)
    assert qwen["model.layers.0.mlp.shared_expert.gate_proj.weight"] == (5632, 2048)
    assert qwen["model.layers.0.mlp.shared_expert_gate.weight"] == (1, 2048)
    assert qwen["model.layers.0.mlp.gate.weight"] == (60, 2048)
    assert qwen["model.layers.0.self_attn.q_proj.bias"] == (2048,)
    granite = {entry.name: entry.shape for entry in tensor_map("granitemoe", config_from_hub(PUBLISHED["granitemoe"]))}
    assert len(granite) == 24 * 9 + 2
    assert granite["model.layers.0.block_sparse_moe.input_linear.weight"] == (32, 1024, 1024)
    assert granite["model.layers.0.block_sparse_moe.output_linear.weight"] == (32, 1024, 512)
    assert granite["model.layers.0.block_sparse_moe.router.layer.weight"] == (32, 1024)
    assert "lm_head.weight" not in granite


@pytest.mark.parametrize("family", ["gpt_oss", "granitemoe"])
@pytest.mark.parametrize("changes", [{}, *SQUARE], ids=["tiny", "I = H", "2I = H"])
def test_fused_experts_come_apart(family, changes):
    hub = tiny(family)
    hub |= {key: value for key, value in changes.items() if key in hub}
    tensors = random_tensors(hub)
    experts = params_of(hub, tensors)["layers"]["moe"]["experts"]
    e, width = 4, hub["intermediate_size"]
    if family == "gpt_oss":
        both, down = (tensors[f"model.layers.1.mlp.experts.{name}"][e] for name in ("gate_up_proj", "down_proj"))
        gate, up = both[:, ::2], both[:, 1::2]
        biases = tensors["model.layers.1.mlp.experts.gate_up_proj_bias"][e]
        assert np.array_equal(experts["gate_bias"][1, e], biases[::2])
        assert np.array_equal(experts["up_bias"][1, e], biases[1::2])
    else:
        block = "model.layers.1.block_sparse_moe."
        both, down = (tensors[f"{block}{name}_linear.weight"][e] for name in ("input", "output"))
        gate, up, down = both[:width].T, both[width:].T, down.T
    for name, want in (("gate", gate), ("up", up), ("down", down)):
        assert np.array_equal(experts[name][1, e], want)
    assert experts["gate"].shape == (2, 6, 32, width)


@pytest.mark.parametrize("family", ["gpt_oss", "granitemoe"])
def test_a_rank_may_read_its_own_experts_alone(family):
    hub = tiny(family)
    tensors = random_tensors(hub)
    stacked = [entry for entry in tensor_map(family, config_from_hub(hub)) if entry.stacked]
    assert len(stacked) == hub["num_hidden_layers"] * (4 if family == "gpt_oss" else 2)
    for entry in stacked:
        whole, mine = to_ours(entry, tensors[entry.name]), to_ours(entry, tensors[entry.name][2:4])
        for a, b in zip(whole, mine, strict=True):
            assert np.array_equal(a[2:4], b)
        assert np.array_equal(to_hub(entry, mine), tensors[entry.name][2:4])


@families
def test_a_tensor_of_another_shape_is_refused_by_name(family):
    hub = tiny(family)
    for entry in tensor_map(family, config_from_hub(hub)):
        for shape in ((*entry.shape[:-1], entry.shape[-1] + 1), (*entry.shape, 1), ()):
            with pytest.raises(ConfigError, match=rf"^{re.escape(entry.name)} shape=.*does not fit the config"):
                to_ours(entry, np.zeros(shape, np.float32))
        parts = to_ours(entry, np.zeros(entry.shape, np.float32))
        with pytest.raises(ConfigError, match=rf"^{re.escape(entry.name)} shape="):
            to_hub(entry, tuple(part[..., :-1] for part in parts))


@pytest.mark.parametrize("family", ["llama", None, 3])
def test_unknown_family_of_a_tensor_map_is_refused(family):
    with pytest.raises(ConfigError, match=r"^family=.*must be one of mixtral"):
        tensor_map(family, config_from_hub(tiny("mixtral")))
