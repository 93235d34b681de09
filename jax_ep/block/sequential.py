"""The sequential block of two microbatches half a layer apart: a stack of layers on one rank.

    X3 {keys and values of a, combine of b for the layer before}   attention of a, then its routing
    X1 {dispatch of a, keys and values of b}                       experts of a; attention of b, then its routing
    X2 {combine of a, dispatch of b}                               experts of b, whose rows wait for the next layer's X3

and after the last layer one more combine of b. Each X is one collective; the maths is that of one microbatch after the
other.

Letters: Y layers, b sequences here, s positions here, S positions of a sequence, H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import local
from jax_ep.attention import NO_WINDOW, rms_norm
from jax_ep.block import rank
from jax_ep.block.rank import Params, Pending, Sequences, Setting, cross
from jax_ep.model_config import ModelConfig
from jax_ep.routing import MoEStats

# x [b/2, s, H] of the one half, what is pending of the other, and the layer's statistics.
Halves: TypeAlias = tuple[jax.Array, Pending, MoEStats]


def stack_on_rank(
    layers: Params,
    x: jax.Array,
    segment_ids: jax.Array | None,
    token_mask: jax.Array | None,
    setting: Setting,
) -> tuple[jax.Array, MoEStats]:
    """x [b, s, H], b even; layers [Y, ...], experts those held here; segment_ids and token_mask [b, S]."""
    config = setting.config

    def one(layer: Params, a: Sequences, b: Sequences, x_a: jax.Array, pending_b: Pending) -> Halves:
        norm = lambda which, x: rms_norm(x, layer[f"{which}_norm"], config.norm_eps)

        rows_a = rank.project_rows(layer, norm("attention", x_a), a, setting)
        kv_a, back_b = cross([rank.kv_send(rows_a, a, setting), rank.combine_send(pending_b, setting)], setting)
        x_b = rank.finish(pending_b, back_b, setting)
        x_a = x_a + rank.attend(layer, rows_a, kv_a, a, setting)
        routed_a = rank.route_tokens(layer, norm("moe", x_a), a, setting)

        rows_b = rank.project_rows(layer, norm("attention", x_b), b, setting)
        here_a, kv_b = cross([rank.dispatch_send(routed_a, setting), rank.kv_send(rows_b, b, setting)], setting)
        pending_a, stats_a = rank.through_experts(layer, x_a, routed_a, here_a, setting)
        x_b = x_b + rank.attend(layer, rows_b, kv_b, b, setting)
        routed_b = rank.route_tokens(layer, norm("moe", x_b), b, setting)

        back_a, here_b = cross([rank.combine_send(pending_a, setting), rank.dispatch_send(routed_b, setting)], setting)
        x_a = rank.finish(pending_a, back_a, setting)
        pending_b, stats_b = rank.through_experts(layer, x_b, routed_b, here_b, setting)
        return x_a, pending_b, both_stats(stats_a, stats_b)

    return halves_through(one, layers, x, segment_ids, token_mask, setting)


def halves_through(
    one: Callable[[Params, Sequences, Sequences, jax.Array, Pending], Halves],
    layers: Params,
    x: jax.Array,
    segment_ids: jax.Array | None,
    token_mask: jax.Array | None,
    setting: Setting,
) -> tuple[jax.Array, MoEStats]:
    """The halves of x [b, s, H] through a scan of `one` over layers, and the last combine of the second.

    Args:
      one: a layer, of what is known of either half, x of the first, and what is pending of the second.
      layers, x, segment_ids, token_mask, setting: as of `stack_on_rank`.
    """
    config = setting.config
    positions = x.shape[1] * (1 if setting.split is None else setting.axes.ranks)
    halves = lambda a: (None, None) if a is None else jnp.split(a, 2)
    control = list(zip(halves(segment_ids), halves(token_mask)))
    shared, windows = layer_windows(config)

    def known(window: rank.Window) -> list[Sequences]:
        return [rank.sequences(x.shape[0] // 2, positions, *c, window, setting) for c in control]

    everywhere = None if windows is not None else known(shared)

    def body(carry: tuple[jax.Array, Pending], at: Any) -> tuple[Any, MoEStats]:
        layer, window = at
        a, b = known(window) if everywhere is None else everywhere
        x_a, pending_b, stats = one(layer, a, b, *carry)
        return (x_a, pending_b), stats

    x_a, x_b = halves(x.astype(config.moe.dtype))
    start = (x_a, rank.nothing_pending(x_b, setting))
    (x_a, pending_b), stats = jax.lax.scan(local.recomputing(body, config.recompute), start, (layers, windows))
    (back_b,) = cross([rank.combine_send(pending_b, setting)], setting)
    reduce = lambda stats: local.reduce_stats(stats, setting.axes)
    return jnp.concatenate([x_a, rank.finish(pending_b, back_b, setting)]), jax.vmap(reduce)(stats)


def layer_windows(config: ModelConfig) -> tuple[int | None, np.ndarray | None]:
    """The window that all layers share, or of each layer [Y] int32 where they differ. One that is known before any
    token is makes buffers smaller.
    """
    windowed = config.window_layers or (config.window is not None,)
    if len(set(windowed)) == 1:
        return config.window if windowed[0] else None, None
    return None, np.array([config.window if has else NO_WINDOW for has in windowed], np.int32)


def both_stats(a: MoEStats, b: MoEStats) -> MoEStats:
    """This rank's sums of both microbatches."""
    total = jax.tree.map(jnp.add, a, b)
    return total._replace(rounds=jnp.maximum(a.rounds, b.rounds))
