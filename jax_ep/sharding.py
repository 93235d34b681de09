"""Axis names, meshes, and how a layer's arrays lie on them.

Letters: B batch, S sequence, T tokens, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep.config import ConfigError, MoEConfig, positive_int, refuse


def make_mesh(expert: int, data: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with axes ("data", "expert"), axis types Auto.

    Args:
      expert: ranks that the experts are spread over, R.
      data: replicas of that, D.
      devices: data * expert devices in row-major order; None takes the first ones there are.

    Raises:
      ConfigError: a size below 1, or more devices asked for than there are.
    """
    positive_int("expert", expert, 1)
    positive_int("data", data, 1)
    have = list(jax.devices() if devices is None else devices)
    need = data * expert
    if need > len(have) or (devices is not None and need != len(have)):
        fits = data <= len(have) if devices is None else len(have) % data == 0
        works = f"expert={len(have) // data}, data={data}" if fits else f"expert={len(have)}, data=1"
        simulate = f" (XLA_FLAGS=--xla_force_host_platform_device_count={need} simulates them on a CPU)"
        raise ConfigError(
            f"expert={expert!r}, data={data!r}: the mesh needs {need} devices and {len(have)} are "
            f"{'there' if devices is None else 'given'}; {works} works{simulate if devices is None else ''}"
        )
    grid = np.array(have[:need]).reshape(data, expert)
    return Mesh(grid, ("data", "expert"), axis_types=(AxisType.Auto, AxisType.Auto))


class Axes(NamedTuple):
    """The axes of one mesh that a layer uses.

    Attributes:
      expert: the expert axis' name; None on one device without a mesh.
      outer: the other token axes that the mesh has.
      ranks: size of the expert axis, R.
      replicas: product of the outer sizes, D.
      others: the mesh has further axes that are not manual here, over which the compiler partitions the layer's work.
    """

    expert: str | None
    outer: tuple[str, ...]
    ranks: int
    replicas: int
    others: bool = False

    @property
    def tokens(self) -> tuple[str, ...]:
        return self.outer + ((self.expert,) if self.expert else ())


ONE_DEVICE = Axes(None, (), 1, 1)


def ambient_mesh() -> AbstractMesh | None:
    """The mesh of `jax.set_mesh`, or of the shard_map one is in; None where there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def layer_axes(config: MoEConfig, mesh: Mesh | AbstractMesh | None, manual: frozenset[str] = frozenset()) -> Axes:
    """Which axes of `mesh` the layer uses. token_axes that the mesh lacks count as size 1.

    `manual` axes are those of the shard_map one is in. Where the expert axis is among them, so are all axes of the
    layer; else the layer spreads its tokens over the others.
    """
    if mesh is None:
        return ONE_DEVICE
    sizes = dict(mesh.shape)
    if config.expert_axis not in sizes:
        rule = f"the mesh has no such axis; its axes are {tuple(sizes)}"
        refuse("expert_axis", config.expert_axis, rule, ("expert", *sizes)[-1])
    outer = tuple(a for a in config.token_axes if a in sizes and a != config.expert_axis)
    outer = tuple(a for a in outer if (a in manual) == (config.expert_axis in manual))
    others = any(size > 1 for a, size in sizes.items() if a not in (*outer, config.expert_axis, *manual))
    return Axes(config.expert_axis, outer, sizes[config.expert_axis], math.prod(sizes[a] for a in outer), others)


def param_specs(config: MoEConfig, params: Any) -> Any:
    """PartitionSpecs for a layer's parameters: experts over the expert axis on their first dimension, the rest whole.

    The dense path reads every expert everywhere, so there nothing is split.
    """
    whole = P()
    expert = whole if config.comm.mode == "dense" else P(config.expert_axis)
    return {n: jax.tree.map(lambda _: whole, sub) for n, sub in params.items()} | {
        "experts": jax.tree.map(lambda _: expert, params["experts"])
    }


def token_spec(config: MoEConfig, axes: Axes, x: jax.Array) -> P | None:
    """How x [T, H] or [B, S, H] is split: the spec of its leading dimensions, None where it has to be flattened and
    padded.
    """
    size = axes.ranks * axes.replicas
    if x.ndim == 2:
        return P(axes.tokens) if x.shape[0] % size == 0 else None
    leading, by_sequence = P(axes.tokens, None), P(axes.outer or None, axes.expert)
    fits = {
        True: x.shape[0] % axes.replicas == 0 and x.shape[1] % axes.ranks == 0,
        False: x.shape[0] % size == 0,
    }
    wanted = config.shard_sequence
    if wanted is None and config.comm.capacity_factor is not None:
        wanted = False  # who comes first must not depend on what can be seen of x
    elif wanted is None:
        on_batch, on_sequence = (axes.expert in names for names in _visible_axes(x)[:2])
        wanted = on_sequence or (fits[True] and not on_batch)
    return {True: by_sequence, False: leading}[wanted] if fits[wanted] else None


def _visible_axes(x: jax.Array) -> list[tuple[str, ...]]:
    """Mesh axes of each dimension of a concrete array or an Explicit-axes tracer; none where they cannot be seen
    (Auto axes in jit).
    """
    at = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    entries = list(at.spec) if isinstance(at, NamedSharding) else []
    entries += [None] * (x.ndim - len(entries))
    return [e if isinstance(e, tuple) else (e,) for e in entries]


def explicit_axes(mesh: Mesh | AbstractMesh, besides: set[str] | None = None) -> tuple[str, ...]:
    """Axes of Explicit type, without those in `besides`."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(n for n, kind in kinds if kind == AxisType.Explicit and n not in (besides or ()))


def explicit_sharding(mesh: Mesh | AbstractMesh, spec: P) -> NamedSharding:
    """What `spec` says of Explicit axes; that of axes of another type is left to the compiler."""
    explicit = explicit_axes(mesh)

    def entry(names: Any) -> Any:
        several = names if isinstance(names, tuple) else (names,)
        return tuple(n for n in several if n in explicit) or None

    return NamedSharding(mesh, P(*(entry(names) for names in spec)))


def place(tree: Any, specs: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Moves arrays to `specs` where the mesh has Explicit axes, which shard_map insists on; elsewhere changes
    nothing.
    """
    if not explicit_axes(mesh):
        return tree
    return jax.tree.map(lambda a, spec: jax.sharding.reshard(a, explicit_sharding(mesh, spec)), tree, specs)


def pad_rows(a: jax.Array, rows: int, value: Any = 0, axis: int = 0) -> jax.Array:
    """Appends rows of `value` so that a dimension, the leading one if not another is named, becomes `rows`."""
    extra = rows - a.shape[axis]
    if not extra:
        return a
    return jnp.concatenate([a, jnp.full((*a.shape[:axis], extra, *a.shape[axis + 1 :]), value, a.dtype)], axis)
