"""Whether a model fits on each device of a host: the sum, line by line.

Experts are spread over the devices; everything else lies whole on each, as this library holds it unless it is told to
split that as well. What is computed from shapes is exact; temporaries are those of one layer as compiled.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_ep.model_config import ModelConfig
from jax_ep.models import decoder

TASKS = ("train", "prefill", "decode")
XLA_SHARE = 0.75  # of a card's memory that JAX takes unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise


class Line(NamedTuple):
    """One line of the sum: which of the record's keys it belongs to, what, how it comes about, and bytes a device."""

    key: str
    what: str
    arithmetic: str
    bytes: int


class Saved(NamedTuple):
    """Bytes a device that a backward needs of its forward: of each layer, and of what comes before and after them."""

    layer: int
    outside: int


def parameter_lines(config: ModelConfig, ranks: int) -> list[Line]:
    """Parameters of a device."""
    moe, size = config.moe, jnp.dtype(config.moe.param_dtype).itemsize
    held = moe.padded_experts(ranks) // ranks
    experts, rest = _values(config, ranks)
    matrices = 3 if moe.gated else 2
    said = f"{config.num_layers} layers x {held} experts x {matrices} x {moe.hidden_size} x {moe.intermediate_size}"
    biases = " and biases" if moe.expert_bias else ""
    return [
        Line("parameters", f"experts, {held} of {moe.num_experts}", f"{said}{biases} x {size} B", experts * size),
        Line("parameters", "all else, whole on each device", f"{rest:,} values x {size} B", rest * size),
    ]


def _values(config: ModelConfig, ranks: int) -> tuple[int, int]:
    """Values of experts, and of everything else, that one device holds."""
    shapes = decoder.decoder_shapes(config, ranks)
    experts = _elements(shapes["layers"]["moe"]["experts"])
    return experts // ranks, _elements(shapes) - experts


def _elements(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def memory_lines(
    config: ModelConfig,
    ranks: int,
    task: str,
    tokens: int,
    temporaries: int,
    saved: Saved | None = None,
    context: int = 4096,
) -> list[Line]:
    """All that one device holds at once.

    Args:
      config: the model.
      ranks: devices that the experts are spread over.
      task: one of `TASKS`.
      tokens: of one device at a time; of "decode", the sequences it adds a token to.
      temporaries: bytes of one layer, as compiled.
      saved: of "train", as of `saved_bytes`.
      context: of "decode", positions of each sequence that the cache holds.
    """
    lines, layers, size = parameter_lines(config, ranks), config.num_layers, jnp.dtype(config.moe.dtype).itemsize
    vocab = config.vocab_size
    if task == "train":
        assert saved is not None
        values = sum(_values(config, ranks))
        lines += [
            Line("optimizer", "AdamW, two moments", f"{values:,} values x 2 x 4 B", values * 8),
            Line("gradients", "float32", f"{values:,} values x 4 B", values * 4),
            Line(
                "activations",
                f"kept for the backward, recompute={config.recompute}",
                f"{layers} layers x {saved.layer:,} B",
                layers * saved.layer,
            ),
            Line("activations", "kept of embedding and logits", "from their shapes", saved.outside),
            Line("activations", "gradient of the logits", f"{tokens} x {vocab} x 4 B", tokens * vocab * 4),
        ]
    else:
        positions = tokens * context if task == "decode" else tokens
        heads = config.num_kv_heads * config.head_dim
        said = f"{positions} positions x {layers} layers x 2 x {heads} x {size} B"
        rows = tokens if task == "decode" else 1
        hidden = config.moe.hidden_size
        lines += [
            Line("kv_cache", "keys and values", said, positions * layers * 2 * heads * size),
            Line("activations", "a layer's input", f"{tokens} x {hidden} x {size} B", tokens * hidden * size),
            Line("activations", "logits of last tokens", f"{rows} x {vocab} x 4 B", rows * vocab * 4),
        ]
    what = "one layer, forward and backward" if task == "train" else "one layer"
    return [*lines, Line("temporaries", what, "as compiled", temporaries)]


def bytes_by_key(lines: list[Line]) -> dict[str, int]:
    """The record's sums."""
    sums = dict.fromkeys(("parameters", "optimizer", "gradients", "activations", "kv_cache", "temporaries"), 0)
    for line in lines:
        sums[line.key] += line.bytes
    return sums


def saved_bytes(config: ModelConfig, mesh: Mesh, tokens: int) -> Saved:
    """What the backward of training keeps, from the shapes that the traced forward returns to it.

    Args:
      config: the model, with its `recompute`.
      mesh: the devices.
      tokens: of one device.
    """
    one, two = (_kept(with_layers(config, count), mesh, tokens) for count in (1, 2))
    return Saved(two - one, max(0, 2 * one - two))


def _kept(config: ModelConfig, mesh: Mesh, tokens: int) -> int:
    ranks = mesh.shape[config.moe.expert_axis]
    shapes = decoder.decoder_shapes(config, ranks)
    ids = jax.ShapeDtypeStruct(batch_shape(tokens, mesh.size), jnp.int32)

    def backward(params: Any, ids: jax.Array) -> Any:
        return jax.vjp(lambda params: decoder.loss(params, ids, config, mesh=mesh)[0], params)[1]

    experts = {leaf.shape for leaf in jax.tree.leaves(shapes["layers"]["moe"]["experts"])}
    params = Counter((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes))
    whole = {leaf.shape for leaf in jax.tree.leaves(shapes)} - experts
    total = 0
    for leaf in jax.tree.leaves(jax.eval_shape(backward, shapes, ids)):
        if params[leaf.shape, leaf.dtype]:  # held already; in another dtype it is kept beside that
            params[leaf.shape, leaf.dtype] -= 1
        else:
            total += leaf.size * leaf.dtype.itemsize // (1 if leaf.shape in whole else mesh.size)
    return total


def batch_shape(tokens: int, devices: int) -> tuple[int, int]:
    """[B, S]: two sequences a device where the tokens are even, as two microbatches need."""
    return (2 * devices, tokens // 2) if tokens % 2 == 0 else (devices, tokens)


def with_layers(config: ModelConfig, count: int) -> ModelConfig:
    """The model's first layers alone, or its layers again where it has fewer."""
    windows = config.window_layers and (config.window_layers * count)[:count]
    return dataclasses.replace(config, num_layers=count, window_layers=windows)
