"""Bytes of a block that compare.py --block runs, counted from its own routing.

Letters: D replicas, R ranks, B sequences of the whole batch, S positions, K top_k, T tokens of a rank (of a
microbatch).
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import route
from jax_ep.attention import rms_norm
from jax_ep.block.at_expert import context_counts
from jax_ep.block.coship import sequential_stack
from jax_ep.block.ledger import add_figures, block_ledger
from jax_ep.block.ranges import reorder
from jax_ep.ledger import count_routing
from jax_ep.model_config import ModelConfig
from jax_ep.routing import router_logits


class Where(NamedTuple):
    """How a block lies on its devices.

    Attributes:
      form, split: of the block.
      replicas, ranks: D, R.
      transport: resolved.
    """

    form: str
    split: str
    replicas: int
    ranks: int
    transport: str


class Chosen(NamedTuple):
    """What a layer's router chose, in order of positions: experts and weights [B, S, K]."""

    experts: np.ndarray
    weights: np.ndarray


def windows(config: ModelConfig) -> list[int | None]:
    """Of each layer."""
    windowed = config.window_layers or (config.window is not None,) * config.num_layers
    return [config.window if has else None for has in windowed]


def chosen_experts(form: str, config: ModelConfig, params: Any, x: np.ndarray, ids: Any) -> list[Chosen]:
    """Of each layer, for x [B, S, H] and segment ids [B, S] or None: the block once more, on one device.

    The router of a sequential layer sees x + attention, which is what the layer gives with its experts at zero.
    """
    if form == "parallel":
        return [_chosen(params, "attention", jnp.asarray(x), config)]
    chosen, states = [], jnp.asarray(x)
    for at, window in enumerate(windows(config)):
        one = dataclasses.replace(config, num_layers=1, window=window, window_layers=None)
        layer = jax.tree.map(operator.itemgetter(slice(at, at + 1)), params)
        zeros = {n: jax.tree.map(jnp.zeros_like, layer["moe"][n]) for n in ("experts", "shared") if n in layer["moe"]}
        attended, _ = sequential_stack({**layer, "moe": {**layer["moe"], **zeros}}, states, one, segment_ids=ids)
        chosen.append(_chosen(jax.tree.map(operator.itemgetter(0), layer), "moe", attended, config))
        states, _ = sequential_stack(layer, states, one, segment_ids=ids)
    return chosen


def _chosen(layer: Any, norm: str, x: jax.Array, config: ModelConfig) -> Chosen:
    normed = rms_norm(x, layer[f"{norm}_norm"], config.norm_eps)
    router = layer["moe"]["router"]
    kernel = jnp.asarray(router["kernel"])[..., : config.moe.num_experts]
    logits = router_logits(normed.reshape(-1, x.shape[2]), kernel, router.get("bias"))
    routing = route(logits, config.moe.router, selection_bias=router.get("selection_bias"))
    by_position = lambda a: np.asarray(a).reshape(*x.shape[:2], -1)
    return Chosen(by_position(routing.experts), by_position(routing.weights))


def count_bytes(where: Where, kv: str, config: ModelConfig, chosen: list[Chosen], ids: np.ndarray | None) -> Any:
    """{"bytes": of all layers and what their stack has besides, "layer": of the first, "rounds", "transport"}."""
    many = 2 if where.form == "sequential" else 1
    rows, sequence, k = chosen[0].experts.shape
    batch = rows // where.replicas
    known: dict[str, Any] = {"form": where.form, "kv": kv, "split": where.split, "segment_ids": ids}
    known |= {"batch": batch, "sequence": sequence, "ranks": where.ranks, "replicas": where.replicas}
    ledgers = []
    for layer, window in zip(chosen, windows(config), strict=True):
        held = np.asarray(reorder(jnp.asarray(layer.experts), where.split, where.ranks, axis=1))
        held = held.reshape(where.replicas, many, batch // many, where.ranks, -1, k)
        halves = held.transpose(1, 0, 3, 2, 4, 5).reshape(
            many, where.replicas, where.ranks, -1, k
        )  # [many, D, R, T, K]
        counts = [count_routing(half, config.moe, ranks=where.ranks, replicas=where.replicas) for half in halves]
        known |= {"window": sequence if window is None else window, "transport": where.transport}
        ledgers.append(block_ledger(config, counts if many == 2 else counts[0], **known))
    return {
        "bytes": add_figures([*(ledger["layer"] for ledger in ledgers), ledgers[0]["stack"]]),
        "layer": ledgers[0]["layer"],
        "rounds": max(ledger["rounds"] for ledger in ledgers),
        "transport": ledgers[0]["transport"],
    }


def count_at_expert(where: Where, config: ModelConfig, chosen: Chosen, ids: np.ndarray | None) -> Any:
    """A layer's figures of attention at the expert's rank for the parallel block's routing; None for another form, on
    one rank, and where whole sequences do not divide over the devices.
    """
    rows, sequence, k = chosen.experts.shape
    replicas, ranks = where.replicas, where.ranks
    if where.form != "parallel" or ranks == 1 or rows % (replicas * ranks):
        return None
    comm = dataclasses.replace(config.moe.comm, dedup=True, recv_rows_factor=None, wire_dtype=None)
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, comm=comm))
    top = np.take_along_axis(chosen.experts, chosen.weights.argmax(2)[..., None], 2)[..., 0]  # [B, S]
    by_rank = lambda a: a.reshape(replicas, ranks, -1, sequence)
    first = by_rank(top // (config.moe.padded_experts(ranks) // ranks))
    each = [None] * replicas if ids is None else list(by_rank(ids))
    context = [context_counts(first[d], ranks, config.window, each[d]) for d in range(replicas)]
    experts = chosen.experts.reshape(replicas, ranks, -1, k)
    known: dict[str, Any] = {"batch": rows // replicas, "sequence": sequence, "ranks": ranks, "replicas": replicas}
    known |= {"segment_ids": ids, "context": np.stack(context), "transport": where.transport}
    counts = count_routing(experts, config.moe, ranks=ranks, replicas=replicas)
    return block_ledger(config, counts, form="at_expert", **known)["layer"]
