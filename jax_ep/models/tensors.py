"""Which tensor of a hub checkpoint lies where in a decoder's parameters, and how it is turned. Pure NumPy.

Letters: V vocabulary, H hidden, N query heads, M key/value heads, D head_dim, E experts, I intermediate, W width of the
shared experts.

The hub keeps matrices [out, in], here they are [in, out]. Layouts are decided by name, never by shape: with I = H, or
2I = H, a gate, an up and a down matrix look alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from jax_ep.config import refuse
from jax_ep.model_config import ModelConfig
from jax_ep.models.families import config_to_hub

Path = tuple[str, ...]

# What a hub tensor's last axes become.
LAYOUTS = {
    "as is": "the same",
    "transposed": "the last two axes exchanged",
    "halves transposed": "[E, 2I, H], gate in the first I rows and up in the last -> gate [E, H, I], up [E, H, I]",
    "interleaved": "[..., 2I], gate in the even columns and up in the odd -> gate [..., I], up [..., I]",
}


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint.

    Attributes:
      name: the hub's.
      paths: the leaves of the parameters that it fills (wholly or in part): one, or gate and up of a fused tensor.
      layer: index on the leaves' leading axis; None: the leaf has none.
      expert: index on the axis after that; None: the leaf has none, or the tensor holds all experts (`stacked`).
      layout: a key of `LAYOUTS`.
      shape: on the hub.
      stacked: the tensor's first axis is all experts, E of them, so a rank may read its own rows alone.
    """

    name: str
    paths: tuple[Path, ...]
    layer: int | None
    expert: int | None
    layout: str
    shape: tuple[int, ...]
    stacked: bool = False


def to_ours(entry: TensorEntry, array: np.ndarray) -> tuple[np.ndarray, ...]:
    """A hub tensor as it lies in our leaves, an array a path: leaf[layer], leaf[layer, expert], leaf[layer, experts].

    Args:
      entry: the tensor.
      array: entry.shape, any dtype; of a stacked tensor any number of whole experts. Nothing is copied: views.

    Raises:
      ConfigError: the shape is another.
    """
    first = 1 if entry.stacked else 0
    if array.ndim != len(entry.shape) or array.shape[first:] != entry.shape[first:]:
        refuse(f"{entry.name} shape", list(array.shape), "does not fit the config", list(entry.shape))
    if entry.layout == "as is":
        return (array,)
    if entry.layout == "transposed":
        return (array.swapaxes(-1, -2),)
    if entry.layout == "interleaved":
        return array[..., ::2], array[..., 1::2]
    middle = entry.shape[-2] // 2
    return array[..., :middle, :].swapaxes(-1, -2), array[..., middle:, :].swapaxes(-1, -2)


def to_hub(entry: TensorEntry, arrays: tuple[np.ndarray, ...]) -> np.ndarray:
    """The inverse of `to_ours`, contiguous. Empty experts that pad a mesh have to be cut off before.

    Raises:
      ConfigError: the shape is not what the config says.
    """
    if entry.layout == "as is":
        (array,) = arrays
    elif entry.layout == "transposed":
        array = arrays[0].swapaxes(-1, -2)
    elif entry.layout == "interleaved":
        array = np.stack(arrays, axis=-1).reshape(*arrays[0].shape[:-1], -1)
    else:
        array = np.concatenate([part.swapaxes(-1, -2) for part in arrays], axis=-2)
    first = 1 if entry.stacked else 0
    if array.ndim != len(entry.shape) or array.shape[first:] != entry.shape[first:]:
        refuse(f"{entry.name} shape", list(array.shape), "does not fit the config", list(entry.shape))
    return np.ascontiguousarray(array)


def tensor_map(family: str, config: ModelConfig) -> list[TensorEntry]:
    """Every tensor of a checkpoint of this family and size, no more and no fewer, layer by layer.

    Names as of HF transformers (the files on the hub, not the fused parameters that its newer releases hold in memory).

    Args:
      family: a key of `families.FAMILIES`.
      config: of the model. With tie_embeddings there is no lm_head.weight.

    Raises:
      ConfigError: no such family, or one whose checkpoints cannot hold such a model.
    """
    config_to_hub(config, family)  # refuses what the family cannot express
    vocab, h = config.vocab_size, config.moe.hidden_size
    entries = [TensorEntry("model.embed_tokens.weight", (("embed",),), None, None, "as is", (vocab, h))]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        parts = [*_attention(config), *_MOE[family](config)]
        entries += [dataclasses.replace(e, name=prefix + e.name, layer=layer) for e in parts]
    entries.append(TensorEntry("model.norm.weight", (("final_norm",),), None, None, "as is", (h,)))
    if not config.tie_embeddings:
        entries.append(TensorEntry("lm_head.weight", (("lm_head",),), None, None, "transposed", (vocab, h)))
    return entries


def _attention(c: ModelConfig) -> Iterator[TensorEntry]:
    """Norms and attention of a layer, alike in all families."""
    h = c.moe.hidden_size
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    yield _whole("input_layernorm.weight", "attention_norm", (h,))
    for letter, width in (("q", queries), ("k", keys), ("v", keys)):
        yield _matrix(f"self_attn.{letter}_proj.weight", letter, (width, h))
        if c.qkv_bias:
            yield _whole(f"self_attn.{letter}_proj.bias", f"{letter}_bias", (width,))
    yield _matrix("self_attn.o_proj.weight", "o", (h, queries))
    if c.output_bias:
        yield _whole("self_attn.o_proj.bias", "o_bias", (h,))
    if c.qk_norm:
        for letter, width in (("q", queries), ("k", keys)):
            size = c.head_dim if c.qk_norm == "head" else width
            yield _whole(f"self_attn.{letter}_norm.weight", f"{letter}_norm", (size,))
    if c.attention_sinks:
        yield _whole("self_attn.sinks", "sinks", (c.num_heads,))
    yield _whole("post_attention_layernorm.weight", "moe_norm", (h,))


def _whole(name: str, leaf: str, shape: tuple[int, ...]) -> TensorEntry:
    return TensorEntry(name, (("layers", *leaf.split("/")),), None, None, "as is", shape)


def _matrix(name: str, leaf: str, shape: tuple[int, int]) -> TensorEntry:
    return TensorEntry(name, (("layers", *leaf.split("/")),), None, None, "transposed", shape)


def _expert_paths(*leaves: str) -> tuple[Path, ...]:
    return tuple(("layers", "moe", "experts", leaf) for leaf in leaves)


def _an_expert_each(block: str, gate: str, up: str, down: str) -> Callable[[ModelConfig], Iterator[TensorEntry]]:
    """A block whose experts are three matrices each."""

    def entries(c: ModelConfig) -> Iterator[TensorEntry]:
        h, i = c.moe.hidden_size, c.moe.intermediate_size
        yield _matrix(f"{block}.gate.weight", "moe/router/kernel", (c.moe.num_experts, h))
        for expert in range(c.moe.num_experts):
            for leaf, their, shape in (("gate", gate, (i, h)), ("up", up, (i, h)), ("down", down, (h, i))):
                name = f"{block}.experts.{expert}.{their}.weight"
                yield TensorEntry(name, _expert_paths(leaf), None, expert, "transposed", shape)

    return entries


def _qwen2_moe(c: ModelConfig) -> Iterator[TensorEntry]:
    h, w = c.moe.hidden_size, c.moe.shared_width
    yield from _an_expert_each("mlp", "gate_proj", "up_proj", "down_proj")(c)
    for leaf, shape in (("gate", (w, h)), ("up", (w, h)), ("down", (h, w))):
        yield _matrix(f"mlp.shared_expert.{leaf}_proj.weight", f"moe/shared/{leaf}", shape)
    yield _matrix("mlp.shared_expert_gate.weight", "moe/shared/shared_gate", (1, h))


def _gpt_oss(c: ModelConfig) -> Iterator[TensorEntry]:
    """Fused and [in, out] already, unlike all else on the hub."""
    h, e, i = c.moe.hidden_size, c.moe.num_experts, c.moe.intermediate_size
    yield _matrix("mlp.router.weight", "moe/router/kernel", (e, h))
    yield _whole("mlp.router.bias", "moe/router/bias", (e,))
    for name, leaves, layout, shape in (
        ("gate_up_proj", ("gate", "up"), "interleaved", (e, h, 2 * i)),
        ("gate_up_proj_bias", ("gate_bias", "up_bias"), "interleaved", (e, 2 * i)),
        ("down_proj", ("down",), "as is", (e, i, h)),
        ("down_proj_bias", ("down_bias",), "as is", (e, h)),
    ):
        yield TensorEntry(f"mlp.experts.{name}", _expert_paths(*leaves), None, None, layout, shape, stacked=True)


def _granitemoe(c: ModelConfig) -> Iterator[TensorEntry]:
    h, e, i = c.moe.hidden_size, c.moe.num_experts, c.moe.intermediate_size
    yield _matrix("block_sparse_moe.router.layer.weight", "moe/router/kernel", (e, h))
    for name, leaves, layout, shape in (
        ("input_linear", ("gate", "up"), "halves transposed", (e, 2 * i, h)),
        ("output_linear", ("down",), "transposed", (e, h, i)),
    ):
        paths = _expert_paths(*leaves)
        yield TensorEntry(f"block_sparse_moe.{name}.weight", paths, None, None, layout, shape, stacked=True)


_MOE: dict[str, Callable[[ModelConfig], Iterator[TensorEntry]]] = {
    "mixtral": _an_expert_each("block_sparse_moe", "w1", "w3", "w2"),
    "olmoe": _an_expert_each("mlp", "gate_proj", "up_proj", "down_proj"),
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _an_expert_each("mlp", "gate_proj", "up_proj", "down_proj"),
    "gpt_oss": _gpt_oss,
    "granitemoe": _granitemoe,
}
