"""A layer lowered for devices that are only described. For the scripts that compile for hosts that are not here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import MoEConfig, moe
from jax_ep.layer import init_params, param_shardings


def expert_mesh(devices: Sequence[Any]) -> Mesh:
    """All devices on the expert axis."""
    return Mesh(np.array(devices).reshape(1, -1), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)


def lowered_layer(config: MoEConfig, mesh: Mesh, tokens: int, backward: bool) -> Any:
    """One MoE layer on `tokens` of each device; backward: with the gradients of x and all parameters."""
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0), ranks=mesh.size))
    x = jax.ShapeDtypeStruct((tokens * mesh.size, config.hidden_size), jnp.dtype(config.dtype))

    def forward(params: Any, x: jax.Array) -> Any:
        return moe(params, x, config, mesh=mesh)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.square(forward(params, x)[0].astype(jnp.float32)).sum()

    run = jax.value_and_grad(loss, (0, 1)) if backward else forward
    layout = (param_shardings(config, mesh), NamedSharding(mesh, P(("data", "expert"))))
    return jax.jit(run, in_shardings=layout).lower(params, x)
