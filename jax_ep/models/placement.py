"""How a decoder's activations, and weights that are split to save memory, lie on a mesh.

Letters: B batch, S positions, H hidden, R expert ranks, D data-parallel replicas.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import sharding
from jax_ep.config import MoEConfig, refuse


class Placement(NamedTuple):
    """Where the activations of one batch lie.

    Attributes:
      moe: the layer's config with shard_sequence decided, so that what the decoder lays out is what the layer takes.
      mesh: of the constraints; None: none are made (one device, or inside somebody's shard_map).
      tokens: spec of [B, S, ...].
      whole_sequences: spec of [B, ...] where every position of a sequence has to be at hand: keys and values.
      split: the axes that weights outside the experts lie split over, as `split_spec` says, and are gathered from where
        they are used; None: they are whole.
    """

    moe: MoEConfig
    mesh: Mesh | AbstractMesh | None
    tokens: P | None
    whole_sequences: P | None
    split: sharding.Axes | None = None


def placement(
    moe: MoEConfig,
    mesh: Mesh | AbstractMesh | None,
    batch: int,
    positions: int,
    by_batch: bool = False,
    split_weights: bool = False,
) -> Placement:
    """The batch over all token axes where they divide it; else the batch over the replicas and the sequence over the
    expert axis where those divide; else what is left of it. moe.shard_sequence decides where it is set.

    Args:
      by_batch: the sequence is never split (decoding with a cache).
      split_weights: weights lie as `split_spec` says. Where the mesh has other axes, whose split of a weight is not
        known here, it is left to the compiler when to gather them.
    """
    ambient = sharding.ambient_mesh()
    mesh = ambient if mesh is None else mesh
    if mesh is None or (ambient is not None and ambient.manual_axes):
        return Placement(moe, mesh, None, None)
    if sharding.explicit_axes(mesh):
        rule = "a decoder leaves the sharding between its layers to the compiler: axes of type Auto, as make_mesh gives"
        refuse("mesh axis_types", mesh.axis_types, rule, "(AxisType.Auto, AxisType.Auto)")
    axes = sharding.layer_axes(moe, mesh)
    assert axes.expert is not None
    by_rank, by_replica = batch % (axes.ranks * axes.replicas) == 0, batch % axes.replicas == 0
    split = by_replica and positions % axes.ranks == 0 and not by_batch
    wanted = moe.shard_sequence
    if wanted is None:
        wanted = split and not by_rank and moe.comm.capacity_factor is None
        moe = dataclasses.replace(moe, shard_sequence=wanted)
    if wanted and split:
        tokens, whole = P(axes.outer or None, axes.expert), P(axes.outer or None)
    elif by_rank and not wanted:
        tokens = whole = P(axes.tokens)
    else:
        tokens = whole = P(axes.outer or None) if by_replica else P(None)
    return Placement(moe, mesh, tokens, whole, axes if split_weights and not axes.others else None)


def constrain(x: jax.Array, spec: P | None, mesh: Mesh | AbstractMesh | None) -> jax.Array:
    """Asks the compiler to have x lie so; nothing without a spec."""
    if spec is None or mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def split_spec(shape: tuple[int, ...], axes: sharding.Axes, stacked: bool) -> P:
    """A weight over all token axes: its largest dimension that they divide, the stacked one of layers apart; whole
    where there is none.
    """
    devices = axes.ranks * axes.replicas
    fit = [i for i in range(int(stacked), len(shape)) if shape[i] % devices == 0]
    if not fit:
        return P()
    at = max(fit, key=lambda i: shape[i])
    return P(*(None,) * at, axes.tokens)


def narrow(params: Any, place: Placement) -> Any:
    """A decoder's split matrices in the dtype they are used in, so that no more than that is gathered. Others as they
    are; routers stay in float32.
    """
    if place.split is None:
        return params
    axes = place.split

    def of(path: tuple[Any, ...], a: jax.Array) -> jax.Array:
        stacked = path[0].key == "layers"
        if a.ndim - stacked < 2 or _names(path) & {"experts", "router"}:
            return a
        return constrain(a.astype(place.moe.dtype), split_spec(a.shape, axes, stacked), place.mesh)

    return jax.tree.map_with_path(of, params)


def gather(weights: Any, place: Placement) -> Any:
    """Split weights whole on every device, experts apart."""
    if place.split is None:
        return weights
    whole = lambda path, a: a if "experts" in _names(path) else constrain(a, P(), place.mesh)
    return jax.tree.map_with_path(whole, weights)


def _names(path: tuple[Any, ...]) -> set[str]:
    return {key.key for key in path}
