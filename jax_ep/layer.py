"""moe(): the pure layer. MoELayer: its thin nnx owner.

Letters: B batch, S sequence, T tokens, K top_k, E experts, H hidden, R ranks, D data-parallel replicas.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import sharding
from jax_ep.config import MoEConfig, refuse
from jax_ep.experts import init_expert_params, init_shared_params
from jax_ep.local import one_rank
from jax_ep.overlap import check_overlap
from jax_ep.routing import MoEStats, Routing, no_stats
from jax_ep.sharding import Axes

Params = dict[str, Any]

# Data-centre cards reach each other's memory inside one host, which XLA's one-shot ragged kernel needs; consumer cards
# do not.
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
       "experts": {"gate" [E', H, I]?, "up" [E', H, I], "down" [E', I, H], "gate_bias" [E', I]?, "up_bias" [E', I]?,
       "down_bias" [E', H]?},
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
    if mesh is None:
        return "all_to_all"
    if isinstance(mesh, AbstractMesh):  # the ambient mesh inside jit: it knows its kind of device, not each of them
        device, one_host = mesh.abstract_device, jax.process_count() == 1
    else:
        device, one_host = mesh.devices.flat[0], len({d.process_index for d in mesh.devices.flat}) == 1
    if device is None or device.platform == "cpu":
        return "all_to_all"
    if device.platform == "tpu":
        return "ragged"
    peer_access = any(re.search(rf"\b{name}\b", device.device_kind) for name in _PEER_ACCESS)
    return "ragged" if one_host and peer_access and mesh.shape[config.expert_axis] <= _ONE_SHOT_RANKS else "all_to_all"


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

    Works under jit, grad, jax.checkpoint and scan. What travels and the activations of the experts carry checkpoint
    names (`jax_ep.CHECKPOINT_NAMES`): a policy that keeps them all adds no collective to the backward. Inside a
    shard_map (with check_vma=False) whose manual axes include the expert axis, x and the experts are this rank's own,
    and the stats are summed over the layer's token axes.

    Args:
      params: as `init_params` gives them, for this or any other number of ranks.
      x: [T, H] or [B, S, H]. T may be anything: what the mesh does not divide is padded and masked inside.
      config: the layer.
      mesh: takes the ambient mesh when None; without one, everything runs on one device.
      token_mask: bool, x's leading shape. False rows are routed nowhere, count nowhere and come back as zeros.
      routing: experts and weights of x's leading shape + [K], computed elsewhere; the router is then not run.

    Returns:
      y, x's shape in config.dtype, and MoEStats, global sums. Every path equals the dense one to rounding, unless
      capacity_factor is set.

    Raises:
      ConfigError: shapes, axes or parameters that do not fit the config.
    """
    ambient = sharding.ambient_mesh()
    mesh = ambient if mesh is None else mesh
    manual = frozenset() if ambient is None else frozenset(ambient.manual_axes)
    axes = sharding.layer_axes(config, mesh, manual)
    check_overlap(config, axes.ranks, () if mesh is None else mesh.axis_names)
    _check(x, config, token_mask, routing)
    _check_params(params, config, router=routing is None)
    if axes.expert in manual and axes.expert in jax.typeof(x).manual_axis_type.varying:
        refuse("check_vma", True, "the layer's own gradients are not typed for shard_map's check", False)
    shape, tokens = x.shape, math.prod(x.shape[:-1])
    if not tokens:
        return x.astype(config.dtype), no_stats(config.num_experts)
    transport = resolve_transport(config, mesh)
    split = 1 if config.comm.mode == "dense" else axes.ranks
    params = _fit_experts(params, config, split, here=axes.expert in manual)
    if mesh is None or axes.expert in manual:
        return _alone(params, x, token_mask, routing, config, axes, transport)

    if manual:  # a shard_map around this one: its mesh knows which axes are taken
        mesh = ambient
    assert mesh is not None
    lead = sharding.token_spec(config, axes, x)
    whole = (x, token_mask, routing)
    if lead is None:  # nothing divides: one row of tokens, padded
        lead = P(axes.tokens)
        whole = _flatten_and_pad(whole, axes, mesh)
    else:
        whole = sharding.place(whole, jax.tree.map(lambda _: lead, whole), mesh)
    params = sharding.place(params, sharding.param_specs(config, params), mesh)
    y, stats = _on_mesh(params, *whole, config, axes, transport, mesh, lead)
    if y.shape != shape:
        y = sharding.place(y, P(), mesh)[:tokens].reshape(shape)
    return y, stats


# Compiled once for a configuration, also where the caller does not jit.
_alone = jax.jit(one_rank, static_argnames=("config", "axes", "transport"))


@functools.partial(jax.jit, static_argnames=("config", "axes", "transport", "mesh", "lead"))
def _on_mesh(
    params: Params,
    x: jax.Array,
    token_mask: jax.Array | None,
    routing: Routing | None,
    config: MoEConfig,
    axes: Axes,
    transport: str,
    mesh: Mesh | AbstractMesh,
    lead: P,
) -> tuple[jax.Array, MoEStats]:
    """one_rank on every rank of the mesh: leading dimensions split as `lead` says."""
    y_spec = P(*lead, None)
    names = set(axes.tokens)
    theirs = sharding.explicit_axes(mesh, besides=names)
    run = jax.shard_map(
        functools.partial(one_rank, config=config, axes=axes, transport=transport),
        mesh=None if theirs else mesh,
        in_specs=(sharding.param_specs(config, params), y_spec, lead, jax.tree.map(lambda _: lead, routing)),
        out_specs=(y_spec, P()),
        axis_names=names,
        check_vma=False,
    )
    if theirs:  # inside, the compiler spreads the work over the user's other axes, as it does over Auto ones
        outs = tuple(sharding.explicit_sharding(mesh, spec) for spec in (y_spec, P()))
        run = jax.sharding.auto_axes(run, axes=theirs, out_sharding=outs)
    return run(params, x, token_mask, routing)


def _check(x: jax.Array, config: MoEConfig, mask: jax.Array | None, routing: Routing | None) -> None:
    h, e, k = config.hidden_size, config.num_experts, config.router.top_k
    if x.ndim not in (2, 3) or x.shape[-1] != h:
        refuse("x", list(x.shape), f"must be [T, {h}] or [B, S, {h}], as hidden_size={h}", [64, h])
    if not jnp.issubdtype(x.dtype, jnp.floating):
        refuse("x", x.dtype.name, "must be floating point", config.dtype)
    lead = x.shape[:-1]
    if mask is not None and (mask.shape != lead or mask.dtype != jnp.bool_):
        refuse(
            "token_mask",
            f"{mask.dtype.name}{list(mask.shape)}",
            "must be bool of x's leading shape",
            f"bool{list(lead)}",
        )
    if routing is not None:
        for name, value in (("experts", routing.experts), ("weights", routing.weights)):
            if value.ndim != len(lead) + 1 or value.shape[:-1] != lead or value.shape != routing.experts.shape:
                refuse(f"routing.{name}", list(value.shape), "must be x's leading shape + [K]", [*lead, k])
        if not jnp.issubdtype(routing.experts.dtype, jnp.integer):
            refuse("routing.experts", routing.experts.dtype.name, "must be integers", "int32")
        for name, value, want in (("probs", routing.probs, (*lead, e)), ("logsumexp", routing.logsumexp, lead)):
            if value is not None and value.shape != want:
                refuse(f"routing.{name}", list(value.shape), "does not fit x and num_experts", list(want))
        if not routing.experts.shape[-1]:
            refuse("routing.experts", list(routing.experts.shape), "must name at least one expert a token", [*lead, k])


@functools.lru_cache(maxsize=128)
def _param_shapes(config: MoEConfig) -> Any:
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def _check_params(params: Params, config: MoEConfig, router: bool) -> None:
    """Names and shapes as init_params gives them; the number of experts is for _fit_experts."""
    for group, wanted in _param_shapes(config).items():
        have = params.get(group, {})
        if set(have) != set(wanted) and (router or group != "router"):
            refuse(f"params[{group!r}] names", sorted(have), "must be those of init_params(config)", sorted(wanted))
        for name in set(have) & set(wanted):
            first = 1 if group == "experts" else 0
            shape = tuple(wanted[name].shape)
            if have[name].ndim != len(shape) or have[name].shape[first:] != shape[first:]:
                refuse(f"params[{group!r}][{name!r}]", list(have[name].shape), "does not fit the config", list(shape))


def _fit_experts(params: Params, config: MoEConfig, ranks: int, here: bool = False) -> Params:
    """Experts cut or padded to divide over the ranks, also where they were made for another number of them.

    A layer made for this mesh holds them so already, and nothing is copied. `here`: params are one rank's share.
    """
    wanted = config.padded_experts(ranks)
    each = {n: w.shape[0] for n, w in params["experts"].items()}
    least = wanted // ranks if here else config.num_experts
    if len(set(each.values())) > 1 or min(each.values()) < least or (here and max(each.values()) > least):
        rule = f"num_experts={config.num_experts} on {ranks} ranks needs {'' if here else 'at least '}{least} in each"
        refuse("params['experts'] experts", each, rule, least)
    if here or set(each.values()) == {wanted}:
        return params
    return {**params, "experts": {n: sharding.pad_rows(w[:wanted], wanted) for n, w in params["experts"].items()}}


def _flatten_and_pad(whole: Any, axes: Axes, mesh: Mesh | AbstractMesh) -> Any:
    """x, token_mask and routing as one row of tokens each, padded until the mesh divides it, the padding masked."""
    x, mask, routing = whole
    tokens = math.prod(x.shape[:-1])
    size = axes.ranks * axes.replicas
    padded = -(-tokens // size) * size
    mask = jnp.ones(x.shape[:-1], jnp.bool_) if mask is None else mask
    lead = x.ndim - 1
    whole = sharding.place((x, mask, routing), jax.tree.map(lambda _: P(), (x, mask, routing)), mesh)
    flat = jax.tree.map(lambda a: sharding.pad_rows(a.reshape(tokens, *a.shape[lead:]), padded), whole)
    return sharding.place(flat, jax.tree.map(lambda _: P(axes.tokens), flat), mesh)


@functools.lru_cache(maxsize=128)
def _creator(config: MoEConfig, mesh: Mesh | None) -> Callable[[jax.Array], Params]:
    """init_params onto the mesh; kept, so that the layers of a model compile it once."""
    create = functools.partial(init_params, config, ranks=sharding.layer_axes(config, mesh).ranks)
    return create if mesh is None else jax.jit(create, out_shardings=param_shardings(config, mesh))


class RouterBias(nnx.Variable):
    """A router bias that no gradient trains (deepseek_v3): not an nnx.Param, so optimisers leave it alone."""


class MoELayer(nnx.Module):
    """`moe` with its parameters.

    Parameters are nnx.Param attributes `router`, `experts` and `shared` (dicts, see `init_params`), created on their
    devices; an untrained selection bias is a `RouterBias`. Where R does not divide E, the experts are stored padded
    with empty ones.

    Example:
      mesh = jax_ep.make_mesh(expert=8)
      layer = jax_ep.MoELayer(config, mesh, rngs=nnx.Rngs(0))
      y, stats = layer(x)
      loss = loss + 0.01 * jax_ep.balance_loss(stats)
    """

    def __init__(self, config: MoEConfig, mesh: Mesh | None = None, *, rngs: nnx.Rngs):
        self.config = config
        self.mesh = mesh
        params = _creator(config, mesh)(rngs.params())
        self.router = nnx.Dict(
            {n: (RouterBias if n == "selection_bias" else nnx.Param)(w) for n, w in params["router"].items()}
        )
        self.experts = nnx.Dict({n: nnx.Param(w) for n, w in params["experts"].items()})
        self.shared = nnx.Dict({n: nnx.Param(w) for n, w in params["shared"].items()}) if "shared" in params else None

    def params(self) -> Params:
        """The parameters as plain arrays, as `moe` takes them."""
        groups = {"router": self.router, "experts": self.experts, "shared": self.shared}
        return {name: {n: w[...] for n, w in group.items()} for name, group in groups.items() if group is not None}

    def __call__(
        self, x: jax.Array, token_mask: jax.Array | None = None, routing: Routing | None = None
    ) -> tuple[jax.Array, MoEStats]:
        """x [T, H] or [B, S, H] -> (y of that shape, MoEStats); arguments as of `moe`."""
        return moe(self.params(), x, self.config, mesh=self.mesh, token_mask=token_mask, routing=routing)
