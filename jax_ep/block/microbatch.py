"""Two microbatches half a layer apart, so that each exchange of one has the other's attention or experts beside it.

    combine of b, for the layer before    beside attention of a, and its routing
    dispatch of a                         beside attention of b, and its routing
    dispatch of b                         beside experts of a
    combine of a                          beside experts of b

and after the last layer one more combine of b: as many collectives as the microbatches take one after the other, and
the same maths. Each line waits for the one before, in the backward from last to first. Sequences are whole on a rank,
so attention exchanges nothing. (`sequential` is the form whose sequences are split.)

Letters: Y layers, b sequences here, s = S positions, H hidden.
"""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, Mesh

from jax_ep import sharding
from jax_ep.attention import rms_norm
from jax_ep.block import rank
from jax_ep.block.coship import Form, run
from jax_ep.block.rank import Params, Pending, Sequences, Setting, cross
from jax_ep.block.sequential import Halves, both_stats, halves_through
from jax_ep.local import Begun
from jax_ep.model_config import ModelConfig
from jax_ep.overlap import after, refuse_useless
from jax_ep.paths import packed
from jax_ep.routing import MoEStats


def microbatch_stack(
    layers: Params,
    x: jax.Array,
    config: ModelConfig,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    segment_ids: jax.Array | None = None,
    token_mask: jax.Array | None = None,
) -> tuple[jax.Array, MoEStats]:
    """Y layers x = x + attention(norm(x)), x = x + moe(norm(x)), on the halves of each rank's sequences.

    Works under jit and grad; recomputes in the backward as config.recompute says.

    Args:
      layers: those of init_decoder's "layers", with their leading Y.
      x: [B, S, H], B an even number for each rank.
      config: with overlap_moe_expert_parallel_comm.
      mesh: with the layer's token axes alone, two ranks or more; None: the ambient one.
      segment_ids: [B, S] integers. A query sees keys of its own run of equal ones, from whose beginning rotary
        positions count. None: one run.
      token_mask: [B, S] bool. Those at False go to no experts and count nowhere.

    Returns:
      x [B, S, H] in the layer's dtype and MoEStats stacked [Y, ...], as of the whole batch.

    Raises:
      ConfigError: shapes, meshes or configs that do not go with it.
    """
    ambient = sharding.ambient_mesh()
    whole = ambient if mesh is None else mesh
    ranks = sharding.layer_axes(config.moe, whole).ranks
    refuse_useless("overlap_moe_expert_parallel_comm", ranks, () if whole is None else whole.axis_names)
    form = Form("microbatches", _on_rank, stacked=True, whole=True)
    return run(form, layers, (x, segment_ids, token_mask), config, mesh)


def _on_rank(
    layers: Params,
    x: jax.Array,
    segment_ids: jax.Array | None,
    token_mask: jax.Array | None,
    setting: Setting,
) -> tuple[jax.Array, MoEStats]:
    """x [b, s, H], b even; layers [Y, ...], experts those held here; segment_ids and token_mask [b, s]."""
    config = setting.config

    def one(layer: Params, a: Sequences, b: Sequences, x_a: jax.Array, pending_b: Pending) -> Halves:
        def attended(x: jax.Array, of: Sequences) -> tuple[jax.Array, Begun]:
            rows = rank.project_rows(layer, rms_norm(x, layer["attention_norm"], config.norm_eps), of, setting)
            x = x + rank.attend(layer, rows, None, of, setting)
            return x, rank.choose_experts(layer, rms_norm(x, layer["moe_norm"], config.norm_eps), of, setting)

        def dispatched(begun: Begun) -> tuple[rank.Arrived, rank.Routed]:
            # Counts cross here, and not beside the other's exchange: schedulers run one collective at a time.
            routed = rank.plan_tokens(begun, setting)
            (arrived,) = cross([rank.dispatch_send(routed, setting)], setting)
            assert arrived is not None
            parts, plan = arrived
            return (packed.named(parts), plan), routed  # named before anything waits, so that a policy can keep them

        (back_b,) = cross([rank.combine_send(pending_b, setting)], setting)
        x_b, (x_a, begun_a) = after(rank.finish(pending_b, back_b, setting), attended(x_a, a))

        (here_a, routed_a), (x_b, begun_b) = after(dispatched(begun_a), attended(x_b, b))

        here_b, routed_b = dispatched(begun_b)
        pending_a, stats_a = rank.through_experts(layer, x_a, routed_a, here_a, setting)
        (here_b, routed_b), rows_a = after((here_b, routed_b), pending_a.rows)
        pending_a = pending_a._replace(rows=rows_a)

        (back_a,) = cross([rank.combine_send(pending_a, setting)], setting)
        pending_b, stats_b = rank.through_experts(layer, x_b, routed_b, here_b, setting)
        x_a, rows_b = after(rank.finish(pending_a, back_a, setting), pending_b.rows)
        return x_a, pending_b._replace(rows=rows_b), both_stats(stats_a, stats_b)

    return halves_through(one, layers, x, segment_ids, token_mask, setting)
