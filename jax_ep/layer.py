"""moe(): the pure layer. MoELayer: its thin nnx owner.

Letters: B batch, S sequence, T tokens, K top_k, E experts, H hidden, R ranks, D data-parallel replicas.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import paths, sharding
from jax_ep import plan as planning
from jax_ep.config import MoEConfig, refuse
from jax_ep.experts import apply_experts, init_expert_params, init_shared_params, shared_mlp
from jax_ep.paths import dense, packed
from jax_ep.routing import MoEStats, Routing, route, router_logits
from jax_ep.sharding import Axes

Params = dict[str, Any]

# Data-centre cards reach each other's memory inside one host, which XLA's one-shot ragged kernel needs; consumer cards do not.
_PEER_ACCESS = ("A100", "A800", "H100", "H200", "H800", "H20", "B100", "B200", "GB200", "B300", "GB300")
_ONE_SHOT_RANKS = 8


def init_params(config: MoEConfig, key: jax.Array, ranks: int = 1) -> Params:
    """Parameters of one layer.

    Args:
      config: the layer.
      key: a PRNG key.
      ranks: R of the mesh the layer will run on: experts are padded with empty (all-zero) ones until it divides them.

    Returns:
      {"router": {"kernel" [H, E], "bias" [E]?, "selection_bias" [E] float32?},
       "experts": {"gate" [E', H, I]?, "up" [E', H, I], "down" [E', I, H], "gate_bias" [E', I]?, "up_bias" [E', I]?, "down_bias" [E', H]?},
       "shared": {...}?}, with E' the padded E.
    """
    router_key, expert_key, shared_key = jax.random.split(key, 3)
    h, e = config.hidden_size, config.num_experts
    router: dict[str, jax.Array] = {
        "kernel": (jax.random.normal(router_key, (h, e)) * h**-0.5).astype(config.param_dtype)
    }
    if config.router.logit_bias:
        router["bias"] = jnp.zeros(e, config.param_dtype)
    if config.router.selection_bias:
        router["selection_bias"] = jnp.zeros(e, jnp.float32)
    params: Params = {"router": router, "experts": init_expert_params(config, expert_key, config.padded_experts(ranks))}
    if config.num_shared_experts:
        params["shared"] = init_shared_params(config, shared_key)
    return params


def param_shardings(config: MoEConfig, mesh: Mesh) -> Any:
    """NamedShardings in the structure of init_params(config, key, ranks=R of mesh)."""
    axes = sharding.layer_axes(config, mesh)
    shapes = jax.eval_shape(functools.partial(init_params, config, ranks=axes.ranks), jax.random.key(0))
    specs = sharding.param_specs(config, shapes)
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, P))


def resolve_transport(config: MoEConfig, mesh: Mesh | AbstractMesh | None) -> str:
    """The transport that "auto" stands for on these devices: ragged where it runs without waiting for the host.

    That is TPUs, and up to eight data-centre GPUs of one host along the expert axis; everything else gets all_to_all.
    """
    if config.comm.transport != "auto":
        return config.comm.transport
    devices = getattr(mesh, "devices", None)
    if not isinstance(devices, np.ndarray):
        return "all_to_all"
    first = devices.flat[0]
    if first.platform == "tpu":
        return "ragged"
    ranks = dict(mesh.shape).get(config.expert_axis, 1) if mesh is not None else 1
    one_host = len({d.process_index for d in devices.flat}) == 1
    peers = any(name in first.device_kind.split() for name in _PEER_ACCESS) or any(
        f"{name}-" in first.device_kind for name in _PEER_ACCESS
    )
    return "ragged" if first.platform == "gpu" and one_host and peers and ranks <= _ONE_SHOT_RANKS else "all_to_all"


def moe(
    params: Params,
    x: jax.Array,
    config: MoEConfig,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    token_mask: jax.Array | None = None,
    routing: Routing | None = None,
) -> tuple[jax.Array, MoEStats]:
    """One mixture-of-experts layer, tokens and experts spread over `mesh`.

    Works under jit, grad, jax.checkpoint and scan. What travels and the activations of the experts carry checkpoint names
    (`CHECKPOINT_NAMES`): a policy that keeps them all adds no collective to the backward. Inside a shard_map whose manual axes
    include the expert axis, x and the experts are this rank's own, and the stats are summed over the layer's token axes.

    Args:
      params: as `init_params` gives them; experts may also be unpadded.
      x: [T, H] or [B, S, H]. T may be anything: what the mesh does not divide is padded and masked inside.
      config: the layer.
      mesh: takes the ambient mesh when None; without one, everything runs on one device.
      token_mask: bool, x's leading shape. False rows are routed nowhere, count nowhere and come back as zeros.
      routing: experts and weights of x's leading shape + [K], computed elsewhere; the router is then not run.

    Returns:
      y, x's shape in config.dtype, and MoEStats, global sums. Every path equals the dense one to rounding, unless capacity_factor is set.

    Raises:
      ConfigError: shapes, axes or parameters that do not fit the config.
    """
    mesh = sharding.ambient_mesh() if mesh is None else mesh
    axes = sharding.layer_axes(config, mesh)
    _check(params, x, config, token_mask, routing)
    run = functools.partial(_local, config=config, axes=axes)
    if mesh is None:
        return run(params, x, token_mask, routing, transport="all_to_all", group_tokens=math.prod(x.shape[:-1]))
    transport = resolve_transport(config, mesh)
    manual = set(getattr(mesh, "manual_axes", ()))
    if axes.expert in manual:
        axes = axes._replace(outer=tuple(a for a in axes.outer if a in manual))
        tokens = math.prod(x.shape[:-1]) * axes.ranks
        return _local(params, x, token_mask, routing, config, axes, transport=transport, group_tokens=tokens)

    params = _fit_experts(params, config, axes)
    shape, tokens = x.shape, math.prod(x.shape[:-1])
    lead = sharding.token_spec(config, axes, x)
    whole = (x, token_mask, routing)
    if lead is None:  # nothing divides: one row of tokens, padded
        lead = P(axes.tokens)
        whole, token_mask, routing = _flatten_and_pad(whole, axes, mesh)
        x = whole[0]
    else:
        whole = sharding.place(whole, jax.tree.map(lambda _: lead, whole), mesh)
        x, token_mask, routing = whole
    # A rank of a padded mesh may hold no token of its own; capacity is counted in the tokens there really are.
    group_tokens = -(-tokens // axes.replicas)
    specs = sharding.param_specs(config, params)
    params = sharding.place(params, specs, mesh)
    y_spec = P(*lead, None)
    names = set(axes.tokens)
    y, stats = jax.shard_map(
        functools.partial(run, transport=transport, group_tokens=group_tokens),
        mesh=mesh,
        in_specs=(specs, y_spec, lead, jax.tree.map(lambda _: lead, routing)),
        out_specs=(y_spec, P()),
        axis_names=names,
        check_vma=False,
    )(params, x, token_mask, routing)
    if y.shape != shape:
        y = sharding.place(y, P(), mesh)[:tokens].reshape(shape)
    return y, stats


CHECKPOINT_NAMES = ("moe_dispatched", "moe_combined", "moe_counts", "moe_weights", "moe_gate", "moe_up")


def _check(params: Params, x: jax.Array, config: MoEConfig, mask: jax.Array | None, routing: Routing | None) -> None:
    h, e, k = config.hidden_size, config.num_experts, config.router.top_k
    if x.ndim not in (2, 3) or x.shape[-1] != h:
        refuse("x", list(x.shape), f"must be [T, {h}] or [B, S, {h}], as hidden_size={h}", [64, h])
    if not jnp.issubdtype(x.dtype, jnp.floating):
        refuse("x", x.dtype.name, "must be floating point", config.dtype)
    lead = x.shape[:-1]
    if mask is not None and (mask.shape != lead or mask.dtype != jnp.bool_):
        refuse("token_mask", f"{mask.dtype.name}{list(mask.shape)}", "must be bool of x's leading shape", f"bool{list(lead)}")
    if routing is not None:
        for name, value in (("experts", routing.experts), ("weights", routing.weights)):
            if value.ndim != len(lead) + 1 or value.shape[:-1] != lead or value.shape != routing.experts.shape:
                refuse(f"routing.{name}", list(value.shape), "must be x's leading shape + [K]", [*lead, k])
        if not jnp.issubdtype(routing.experts.dtype, jnp.integer):
            refuse("routing.experts", routing.experts.dtype.name, "must be integers", "int32")
        for name, value, want in (("probs", routing.probs, (*lead, e)), ("logsumexp", routing.logsumexp, lead)):
            if value is not None and value.shape != want:
                refuse(f"routing.{name}", list(value.shape), "does not fit x and num_experts", list(want))
    elif params["router"]["kernel"].shape != (h, e):
        shape = list(params["router"]["kernel"].shape)
        refuse("params['router']['kernel']", shape, "must be [hidden_size, num_experts]", [h, e])


def _fit_experts(params: Params, config: MoEConfig, axes: Axes) -> Params:
    """Experts padded to divide over the ranks. Layers made for this mesh hold them so already, and nothing is copied."""
    wanted = config.padded_experts(axes.ranks)
    have = params["experts"]["up"].shape[0]
    if have == wanted or (have >= config.num_experts and have % axes.ranks == 0):
        return params
    if have != config.num_experts:
        rule = f"{axes.ranks} ranks need num_experts={config.num_experts} padded with empty ones"
        refuse("params['experts'] experts", have, rule, wanted)
    return {**params, "experts": {n: sharding.pad_rows(w, wanted) for n, w in params["experts"].items()}}


def _flatten_and_pad(whole: Any, axes: Axes, mesh: Mesh | AbstractMesh) -> Any:
    """(x, token_mask, routing) as one row of tokens each, padded until the mesh divides it, the padding masked."""
    x, mask, routing = whole
    tokens = math.prod(x.shape[:-1])
    size = axes.ranks * axes.replicas
    padded = -(-tokens // size) * size
    mask = jnp.ones(x.shape[:-1], jnp.bool_) if mask is None else mask
    lead = x.ndim - 1
    whole = sharding.place((x, mask, routing), jax.tree.map(lambda _: P(), (x, mask, routing)), mesh)
    flat = jax.tree.map(lambda a: sharding.pad_rows(a.reshape(tokens, *a.shape[lead:]), padded), whole)
    flat = sharding.place(flat, jax.tree.map(lambda _: P(axes.tokens), flat), mesh)
    return flat, flat[1], flat[2]


def _local(
    params: Params,
    x: jax.Array,
    token_mask: jax.Array | None,
    routing: Routing | None,
    config: MoEConfig,
    axes: Axes,
    transport: str,
    group_tokens: int,
) -> tuple[jax.Array, MoEStats]:
    """One rank's layer: x [t, H] or [b, s, H], its own experts."""
    shape, h = x.shape, config.hidden_size
    x = x.reshape(-1, h).astype(config.dtype)
    mask = None if token_mask is None else token_mask.reshape(-1)
    if mask is not None:
        x = jnp.where(mask[:, None], x, 0)  # whatever stands in a masked row, NaN included, reaches nothing
    with jax.named_scope("route"):
        if routing is None:
            router = params["router"]
            logits = router_logits(x, router["kernel"], router.get("bias"))
            routing = route(logits, config.router, selection_bias=router.get("selection_bias"))
        else:
            routing = jax.tree.map(lambda a: a.reshape(x.shape[0], *a.shape[len(shape) - 1 :]), routing)
        routing, sums = _tidy(routing, mask, config)
        routing, dropped = _apply_capacity(routing, config, axes, group_tokens)
    if config.comm.mode == "dense":
        with jax.named_scope("experts"):
            y = dense.run(x, routing.experts, routing.weights, params["experts"], config)
        rounds = wire = jnp.int32(0)
    else:
        y, rounds, wire = _routed(params["experts"], x, routing, config, axes, transport)
    if config.num_shared_experts:
        with jax.named_scope("shared_experts"):
            y = y + shared_mlp(x, params["shared"], config)
    if mask is not None:
        y = jnp.where(mask[:, None], y, 0)
    stats = _reduce(sums._replace(dropped_rows=dropped, rounds=rounds, wire_rows=wire), axes)
    return y.astype(config.dtype).reshape(shape), stats


def _routed(
    expert_params: Any, x: jax.Array, routing: Routing, config: MoEConfig, axes: Axes, transport: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """plan, dispatch, experts, combine: y [t, H] float32, rounds, rows on the wire."""
    # Buffers have slack; this many rows are to be expected on each rank.
    expected = routing.experts.size

    def expert_fn(rows: jax.Array, index: jax.Array, sizes: jax.Array, weights: jax.Array | None, p: Any) -> jax.Array:
        return apply_experts(rows, index, sizes, weights, p, config, expected_rows=expected)

    with jax.named_scope("plan"):
        plan = paths.make_plan(routing.experts, config, axis_name=axes.expert, transport=transport)
    with jax.named_scope("dispatch"):
        dispatched = paths.dispatch(x, routing, plan, config)
    with jax.named_scope("experts"):
        rows = expert_fn(dispatched.rows, dispatched.index, dispatched.group_sizes, dispatched.weights, expert_params)
    with jax.named_scope("combine"):
        y = paths.combine(rows, dispatched, routing, config)
    plan, g = dispatched.plan, dispatched.plan.geometry
    if g.ranks == 1:
        return y, jnp.int32(0), jnp.int32(0)
    if config.comm.mode == "allgather":
        return y, jnp.int32(1), jnp.int32((g.ranks - 1) * g.tokens)
    if config.comm.mode == "padded":
        return y, jnp.int32(1), jnp.int32((g.ranks - 1) * g.quota)
    with jax.named_scope("extra_rounds"):
        more = packed.extra_rounds(x, routing.weights, expert_params, plan, expert_fn)
    assert plan.rounds is not None
    if g.ragged:
        wire = plan.send_counts.sum() - plan.send_counts[plan.rank]
    else:
        wire = plan.rounds * ((g.ranks - 1) * g.quota)
    return (y if more is None else y + more), plan.rounds, wire.astype(jnp.int32)


def _tidy(routing: Routing, mask: jax.Array | None, config: MoEConfig) -> tuple[Routing, MoEStats]:
    """Masked and out-of-range assignments go nowhere with weight 0; and this rank's sums."""
    e = config.num_experts
    experts = routing.experts.astype(jnp.int32)
    real = (experts >= 0) & (experts < e)
    tokens = jnp.int32(experts.shape[0])
    probs, lse = routing.probs, routing.logsumexp
    if mask is not None:
        real &= mask[:, None]
        tokens = mask.sum(dtype=jnp.int32)
        probs = None if probs is None else jnp.where(mask[:, None], probs, 0)
        lse = None if lse is None else jnp.where(mask, lse, 0)
    nowhere = jnp.iinfo(jnp.int32).max
    experts = jnp.where(real, experts, nowhere)
    weights = jnp.where(real, routing.weights.astype(jnp.float32), 0)
    counts = planning.count(experts.reshape(-1), e)
    prob_sum = jnp.zeros(e, jnp.float32) if probs is None else probs.astype(jnp.float32).sum(0)
    lse_sq = jnp.float32(0) if lse is None else jnp.square(lse.astype(jnp.float32)).sum()
    zero = jnp.int32(0)
    return Routing(experts, weights), MoEStats(tokens, counts, prob_sum, lse_sq, zero, zero, zero)


def _apply_capacity(routing: Routing, config: MoEConfig, axes: Axes, group_tokens: int) -> tuple[Routing, jax.Array]:
    """Drops what exceeds ceil(c * tokens * K / E) rows of an expert, counted over the ranks of one expert axis."""
    c = config.comm.capacity_factor
    if c is None:
        return routing, jnp.int32(0)
    e = config.num_experts
    experts = routing.experts
    capacity = max(1, math.ceil(c * group_tokens * experts.shape[1] / e))
    ahead = jnp.zeros(e, jnp.int32)
    if axes.ranks > 1:
        counts = planning.count(experts.reshape(-1), e)
        everyone = jax.lax.all_gather(counts, axes.expert)  # [R, E]
        ahead = planning.before(everyone)[jax.lax.axis_index(axes.expert)]
    kept = planning.kept_under_capacity(experts, e, ahead, capacity)
    dropped = ((experts < e) & ~kept).sum(dtype=jnp.int32)
    nowhere = jnp.iinfo(jnp.int32).max
    return Routing(jnp.where(kept, experts, nowhere), jnp.where(kept, routing.weights, 0)), dropped


def _reduce(stats: MoEStats, axes: Axes) -> MoEStats:
    """Sums over all token axes in one collective; rounds are the largest of the replicas.

    Counts cross as two floats of 12 and more bits, so that one float32 reduction holds them exactly.
    """
    if not axes.tokens:
        return stats
    integers = jnp.concatenate([stats.counts, jnp.stack([stats.tokens, stats.dropped_rows, stats.wire_rows])])
    replica = jax.lax.axis_index(axes.outer) if axes.outer else 0
    first = jax.lax.axis_index(axes.expert) == 0
    rounds = jnp.where(first & (jnp.arange(axes.replicas) == replica), stats.rounds, 0)
    low, high = integers % 4096, integers // 4096
    floats = [low, high, rounds, stats.prob_sum, stats.lse_sq_sum[None]]
    total = jax.lax.psum(jnp.concatenate([f.astype(jnp.float32) for f in floats]), axes.tokens)
    low, high, rounds, prob_sum, lse = jnp.split(total, np.cumsum([f.shape[0] for f in floats])[:-1])
    whole = low.astype(jnp.int32) + 4096 * high.astype(jnp.int32)
    e = stats.counts.shape[0]
    return MoEStats(
        whole[e], whole[:e], prob_sum, lse[0], whole[e + 1], rounds.max().astype(jnp.int32), whole[e + 2]
    )


class RouterBias(nnx.Variable):
    """A router bias that no gradient trains (deepseek_v3): not an nnx.Param, so optimisers leave it alone."""


class MoELayer(nnx.Module):
    """`moe` with its parameters.

    Parameters are nnx.Param attributes `router`, `experts` and `shared` (dicts, see `init_params`), created on their devices;
    an untrained selection bias is a `RouterBias`. Where R does not divide E, the experts are stored padded with empty ones.

    Example:
      mesh = jax_ep.make_mesh(expert=8)
      layer = jax_ep.MoELayer(config, mesh, rngs=nnx.Rngs(0))
      y, stats = layer(x)
      loss = loss + 0.01 * jax_ep.balance_loss(stats)
    """

    def __init__(self, config: MoEConfig, mesh: Mesh | None = None, *, rngs: nnx.Rngs):
        self.config = config
        self.mesh = mesh
        ranks = sharding.layer_axes(config, mesh).ranks
        create = functools.partial(init_params, config, ranks=ranks)
        if mesh is not None:
            create = jax.jit(create, out_shardings=param_shardings(config, mesh))
        params = create(rngs.params())
        self.router = nnx.Dict(
            {n: (RouterBias if n == "selection_bias" else nnx.Param)(w) for n, w in params["router"].items()}
        )
        self.experts = nnx.Dict({n: nnx.Param(w) for n, w in params["experts"].items()})
        self.shared = nnx.Dict({n: nnx.Param(w) for n, w in params["shared"].items()}) if "shared" in params else None

    def params(self) -> Params:
        """The parameters as plain arrays, as `moe` takes them."""
        groups = {"router": self.router, "experts": self.experts, "shared": self.shared}
        return {
            name: {n: w[...] for n, w in group.items()} for name, group in groups.items() if group is not None
        }

    def __call__(
        self, x: jax.Array, token_mask: jax.Array | None = None, routing: Routing | None = None
    ) -> tuple[jax.Array, MoEStats]:
        """x [T, H] or [B, S, H] -> (y of that shape, MoEStats); arguments as of `moe`."""
        return moe(self.params(), x, self.config, mesh=self.mesh, token_mask=token_mask, routing=routing)
