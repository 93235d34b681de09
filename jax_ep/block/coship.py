"""Blocks of attention and experts whose key/value rows travel in the same collectives as hidden rows: the parallel
block, and the sequential one in two microbatches half a layer apart.

    form          payload collectives a layer                       the same with kv="separate"
    parallel      2: {dispatch, keys and values}, {combine}         3
    sequential    3 for two microbatches, and 1 for the stack       6, and 1

Positions of each sequence are split over the expert axis as `ranges.reorder` puts them: x and y are in that order.
What every rank knows of whole sequences, segment_ids and token_mask, is in order of positions.

    x = reorder(x, "zigzag", ranks, axis=1)
    y, stats = parallel_block(params, x, config, mesh=mesh, segment_ids=segment_ids, split="zigzag")
    y = reorder(y, "zigzag", ranks, axis=1, inverse=True)

Letters: B batch, S positions of a sequence, H hidden, Y layers, E experts, R ranks, D data-parallel replicas.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jax_ep import local, sharding
from jax_ep.attention import rms_norm
from jax_ep.block import rank
from jax_ep.block.ranges import check_split
from jax_ep.block.rank import Params, Setting, Window, cross
from jax_ep.block.sequential import layer_windows, stack_on_rank
from jax_ep.config import one_of, refuse
from jax_ep.layer import resolve_transport
from jax_ep.model_config import ModelConfig, check_microbatches
from jax_ep.routing import MoEStats
from jax_ep.sharding import Axes

# How key/value rows reach the queries of other ranks: beside hidden rows; the same rows in exchanges of their own; or,
# for comparison, all of them by all_gather or round a ring. All but the first give every send a collective of its own.
KV_WAYS = ("coship", "separate", "all_gather", "ring")


def parallel_block(
    params: Params,
    x: jax.Array,
    config: ModelConfig,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    segment_ids: jax.Array | None = None,
    token_mask: jax.Array | None = None,
    window: Window = None,
    split: str = "contiguous",
    kv: str = "coship",
) -> tuple[jax.Array, MoEStats]:
    """y = x + attention(n) + moe(n), n = norm(x), in two payload collectives.

    Works under jit, grad, jax.checkpoint and scan. What arrives carries checkpoint names (`jax_ep.CHECKPOINT_NAMES`),
    but for that of "all_gather" and "ring".

    Args:
      params: of one layer, as init_decoder has them in "layers" without the leading Y. The one norm is
        "attention_norm"; "moe_norm" is not read.
      x: [B, S, H], S in the order of `split`.
      config: its moe.comm has mode "packed" without chunks and capacity.
      mesh: with the layer's token axes alone; None: the ambient one, or one device.
      segment_ids: [B, S] integers, in order of positions. A query sees keys of its own run of equal ones, from whose
        beginning rotary positions count. Padding is a segment too. None: one run.
      token_mask: [B, S] bool, in order of positions. Those at False go to no experts and count nowhere; for attention
        they are like any other.
      window: positions that a query sees, its own among them; may be a traced int32 (then buffers have room for all).
        None: config.window.
      split: of the positions over the expert axis, "contiguous" or "zigzag".
      kv: one of KV_WAYS.

    Returns:
      y [B, S, H] in the layer's dtype, in the order of x, and MoEStats.

    Raises:
      ConfigError: shapes, splits, meshes or a CommConfig that do not go with it.
    """
    traced = window if isinstance(window, jax.Array) else None
    if traced is None:
        window = one_window(config) if window is None else window
        config = dataclasses.replace(config, window=window, window_layers=None)
    form = Form("parallel", _parallel_on_rank)
    return run(form, params, (x, segment_ids, token_mask, traced), config, mesh, split, kv)


def sequential_stack(
    layers: Params,
    x: jax.Array,
    config: ModelConfig,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    segment_ids: jax.Array | None = None,
    token_mask: jax.Array | None = None,
    split: str = "contiguous",
    kv: str = "coship",
) -> tuple[jax.Array, MoEStats]:
    """Y layers x = x + attention(norm(x)), x = x + moe(norm(x)), on two microbatches half a layer apart: three payload
    collectives a layer, and one for the stack.

    The microbatches are the halves of each replica's sequences. Recomputes in the backward as config.recompute says.

    Args:
      layers: those of init_decoder's "layers", with their leading Y.
      x: [B, S, H], S in the order of `split`; B an even number for each replica.
      config, mesh, segment_ids, token_mask, split, kv: as of `parallel_block`. Windows are config's.

    Returns:
      x [B, S, H] in the layer's dtype, in the order it came, and MoEStats stacked [Y, ...], as of the whole batch.

    Raises:
      ConfigError: as of `parallel_block`.
    """
    form = Form("sequential", stack_on_rank, stacked=True)
    return run(form, layers, (x, segment_ids, token_mask), config, mesh, split, kv)


def _parallel_on_rank(
    params: Params,
    x: jax.Array,
    segment_ids: jax.Array | None,
    token_mask: jax.Array | None,
    window: jax.Array | None,
    setting: Setting,
) -> tuple[jax.Array, MoEStats]:
    config = setting.config
    x = x.astype(config.moe.dtype)
    known = rank.sequences(
        x.shape[0],
        x.shape[1] * setting.axes.ranks,
        segment_ids,
        token_mask,
        config.window if window is None else window,
        setting,
    )
    normed = rms_norm(x, params["attention_norm"], config.norm_eps)
    rows = rank.project_rows(params, normed, known, setting)
    routed = rank.route_tokens(params, normed, known, setting)
    arrived, kv = cross([rank.dispatch_send(routed, setting), rank.kv_send(rows, known, setting)], setting)
    pending, stats = rank.through_experts(params, x, routed, arrived, setting)
    (back,) = cross([rank.combine_send(pending, setting)], setting)
    attended = rank.attend(params, rows, kv, known, setting)
    return rank.finish(pending, back, setting) + attended, local.reduce_stats(stats, setting.axes)


class Form(NamedTuple):
    """A block as one rank runs it.

    Attributes:
      name: "parallel", "sequential", "at_expert" or "microbatches".
      on_rank: (params, *inputs, setting) -> y and MoEStats.
      stacked: of several layers.
      whole: sequences are whole on a rank, and the batch is split over the expert axis as well.
    """

    name: str
    on_rank: Callable[..., tuple[jax.Array, MoEStats]]
    stacked: bool = False
    whole: bool = False


_Inputs: TypeAlias = tuple[Any, ...]  # x, segment_ids, token_mask, and of the parallel block a traced window


def run(
    form: Form,
    params: Params,
    inputs: _Inputs,
    config: ModelConfig,
    mesh: Mesh | AbstractMesh | None,
    split: str = "contiguous",
    kv: str = "coship",
) -> tuple[jax.Array, MoEStats]:
    """Checks, and the form on every rank of the mesh."""
    ambient = sharding.ambient_mesh()
    mesh = ambient if mesh is None else mesh
    if ambient is not None and ambient.manual_axes:
        refuse("mesh manual axes", tuple(ambient.manual_axes), "a block makes its own shard_map, over whole arrays", ())
    axes = sharding.layer_axes(config.moe, mesh)
    one_of("kv", kv, KV_WAYS, works="coship")
    check_config(config, form.name, form.whole)
    _check_mesh(mesh, axes, form.name)
    x, segment_ids, token_mask = inputs[:3]
    _check_inputs(x, segment_ids, token_mask, config, axes, split, form)
    _check_params(params, config, form.stacked)
    setting = Setting(config, axes, resolve_transport(config.moe, mesh), None if form.whole else split, kv)
    params = _fit_experts(params, config, axes.ranks, int(form.stacked))
    if mesh is None:
        return _alone(form, params, inputs, setting)
    return _on_mesh(form, params, inputs, setting, mesh)


def one_window(config: ModelConfig) -> int | None:
    """The window of a layer that is any of the model's."""
    window, differ = layer_windows(config)
    if differ is not None:
        rule = "window_layers has it differ between layers, and which of them this is nobody says"
        refuse("window", None, rule, config.window)
    return window


def check_config(config: ModelConfig, form: str, whole: bool = False) -> None:
    """Refuses what a form does not do."""
    if config.moe.overlap.moe_shared_expert_overlap:
        refuse("moe_shared_expert_overlap", True, "in a block shared experts stand beside its other exchanges", False)
    if form == "microbatches":
        check_microbatches(config)
        return
    one = "a block sends one packed buffer, one message a rank"
    order = "who comes first is decided in the order of whole sequences, and here ranks hold pieces of them"
    wanted: dict[str, tuple[Any, str]] = {
        "mode": ("packed", "key/value rows travel beside packed rows"),
        "num_chunks": (1, one),
        "messages": ("rank", one),
        "capacity_factor": (None, order),
    }
    rule = "positions are split over the expert axis"
    if form == "at_expert":
        home = "attention at the expert's rank comes back in the one row that a token has there"
        works = {"capacity_factor": None, "dedup": True, "recv_rows_factor": None, "wire_dtype": None}
        wanted |= {field: (value, home) for field, value in works.items()}
        rule = "sequences are whole, and the batch is split over the expert axis"
    for field, (value, why) in wanted.items():
        if getattr(config.moe.comm, field) != value:
            refuse(field, getattr(config.moe.comm, field), why, value)
    if config.moe.shard_sequence is whole:
        refuse("shard_sequence", whole, rule, not whole)


def _check_mesh(mesh: Mesh | AbstractMesh | None, axes: Axes, form: str) -> None:
    if mesh is None:
        return
    if axes.others and form != "at_expert":
        others = tuple(a for a, size in mesh.shape.items() if a not in axes.tokens and size > 1)
        refuse("mesh axes besides token_axes", others, "a block's loops turn as often as each rank needs", ())
    if sharding.explicit_axes(mesh):
        rule = "a block's arrays are placed by the compiler: axes of type Auto, as make_mesh gives"
        refuse("mesh axis_types", mesh.axis_types, rule, "(AxisType.Auto, AxisType.Auto)")


def _check_inputs(
    x: jax.Array,
    segment_ids: jax.Array | None,
    token_mask: jax.Array | None,
    config: ModelConfig,
    axes: Axes,
    split: str,
    form: Form,
) -> None:
    h = config.moe.hidden_size
    if x.ndim != 3 or x.shape[2] != h or not x.shape[0] or not jnp.issubdtype(x.dtype, jnp.floating):
        have = f"{x.dtype.name}{list(x.shape)}"
        refuse("x", have, f"must be floating point [B, S, hidden_size={h}]", f"{config.moe.dtype}{[2, 64, h]}")
    b, s, _ = x.shape
    check_split(split, s, 1 if form.whole else axes.ranks)
    many, words = {
        "parallel": (1, ""),
        "sequential": (2, ", two microbatches each"),
        "at_expert": (axes.ranks, f", whole sequences on each of {axes.ranks} ranks"),
        "microbatches": (2 * axes.ranks, f", two microbatches of whole sequences on each of {axes.ranks} ranks"),
    }[form.name]
    each = axes.replicas * many
    if b % each:
        rule = f"must be a multiple of {each}: {axes.replicas} replica{'s' * (axes.replicas > 1)}{words}"
        refuse("batch", b, rule, -(-b // each) * each)
    if segment_ids is not None and (segment_ids.shape != (b, s) or not jnp.issubdtype(segment_ids.dtype, jnp.integer)):
        have = f"{segment_ids.dtype.name}{list(segment_ids.shape)}"
        refuse("segment_ids", have, "must be integers, one a position", f"int32{[b, s]}")
    if token_mask is not None and (token_mask.shape != (b, s) or token_mask.dtype != jnp.bool_):
        have = f"{token_mask.dtype.name}{list(token_mask.shape)}"
        refuse("token_mask", have, "must be bools, one a position", f"bool{[b, s]}")


def _check_params(params: Params, config: ModelConfig, stacked: bool) -> None:
    """Refuses parameters of another configuration: a name too many is an option that would do nothing."""
    optional = {"sinks": config.attention_sinks, "o_bias": config.output_bias}
    optional |= {f"{name}_bias": config.qkv_bias for name in "qkv"}
    optional |= {f"{name}_norm": config.qk_norm is not None for name in "qk"}
    wanted = {"attention_norm", "moe_norm", "q", "k", "v", "o", "moe", *(name for name, has in optional.items() if has)}
    if set(params) | {"moe_norm"} != wanted:
        refuse("params names", sorted(params), "must be those of init_decoder(config)['layers']", sorted(wanted))
    norm = params["attention_norm"].shape
    shape = (config.num_layers,) * stacked + (config.moe.hidden_size,)
    if norm != shape:
        rule = "a stack's have a leading num_layers" if stacked else "one layer's have no leading axis of layers"
        refuse("params['attention_norm']", list(norm), rule, list(shape))


def _fit_experts(params: Params, config: ModelConfig, ranks: int, axis: int) -> Params:
    """Experts cut or padded to divide over the ranks, where they were made for another number of them."""
    experts, wanted = params["moe"]["experts"], config.moe.padded_experts(ranks)
    have = {n: w.shape[axis] for n, w in experts.items()}
    if min(have.values()) < config.moe.num_experts:
        refuse("params experts", have, "num_experts needs at least as many in each", config.moe.num_experts)
    if set(have.values()) == {wanted}:
        return params
    cut = lambda w: jax.lax.slice_in_dim(w, 0, min(wanted, w.shape[axis]), axis=axis)
    fitted = {n: sharding.pad_rows(cut(w), wanted, axis=axis) for n, w in experts.items()}
    return {**params, "moe": {**params["moe"], "experts": fitted}}


# Compiled once for a configuration, also where the caller does not jit.
@functools.partial(jax.jit, static_argnames=("form", "setting"))
def _alone(form: Form, params: Params, inputs: _Inputs, setting: Setting) -> tuple[jax.Array, MoEStats]:
    return form.on_rank(params, *inputs, setting)


@functools.partial(jax.jit, static_argnames=("form", "setting", "mesh"))
def _on_mesh(
    form: Form, params: Params, inputs: _Inputs, setting: Setting, mesh: Mesh | AbstractMesh
) -> tuple[jax.Array, MoEStats]:
    axes, moe = setting.axes, setting.config.moe
    specs: Any = jax.tree.map(lambda _: P(), params)
    expert = P(None, moe.expert_axis) if form.stacked else P(moe.expert_axis)
    specs["moe"]["experts"] = jax.tree.map(lambda _: expert, params["moe"]["experts"])
    rows = P(axes.outer or None)
    tokens = P(*rows, axes.expert)
    if form.whole:
        rows = tokens = P(axes.tokens)
    return jax.shard_map(
        lambda params, inputs: form.on_rank(params, *inputs, setting),
        mesh=mesh,
        in_specs=(specs, (tokens, rows, rows, P())[: len(inputs)]),
        out_specs=(tokens, P()),
        axis_names=set(axes.tokens),
        check_vma=False,
    )(params, inputs)
