"""All paths of the layer on a mesh of several devices: checked against one device, then timed. For bench_gpu.py.

Letters: R devices, all of them ranks of one expert axis, T tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from _gpu_checks import LAYER, Check, dense_layer, full_precision, layer_cases, layer_differences, leave_nan_behind
from _gpu_layers import layer_config, layer_flops
from _gpu_measure import Cell, How, forward_and_backward, measure, said
from _gpu_products import TIMED
from jax_ep import CommConfig, MoEConfig, make_mesh, moe
from jax_ep.layer import init_params, param_shardings, resolve_transport

PATHS = {
    "dense": CommConfig(mode="dense"),
    "allgather": CommConfig(mode="allgather"),
    "padded": CommConfig(mode="padded"),
    "packed, all_to_all": CommConfig(transport="all_to_all"),
    "packed, ragged": CommConfig(transport="ragged"),  # last: where it cannot run it may not say so
}
WORKLOAD = "qwen3_30b_a3b"
TOKENS, TINY_TOKENS = 2048, 16  # of a device
CHECKED_TOKENS = 24  # of a device, and one token that the mesh does not divide


def may_fail(comm: CommConfig, mesh: Mesh) -> bool:
    """Whether this path is none that the library would take on these devices by itself."""
    return comm.transport == "ragged" and resolve_transport(LAYER, mesh) != "ragged"


def path_checks(name: str, devices: Sequence[Any]) -> list[Check]:
    """One path's y and gradients on the mesh against the dense layer on the first device, in float32."""
    mesh = make_mesh(len(devices), 1, list(devices))
    config = dataclasses.replace(LAYER, comm=PATHS[name])
    tokens = CHECKED_TOKENS * len(devices) + 1
    keys = jax.random.split(jax.random.key(2), 3)
    with jax.default_device(devices[0]):
        padded = init_params(config, keys[0], ranks=len(devices))
        x, cotangent = (jax.random.normal(key, (tokens, config.hidden_size)) for key in keys[1:])
        cases = layer_cases(config, tokens)
    everywhere = NamedSharding(mesh, P())
    shardings = param_shardings(config, mesh)

    @jax.jit
    def ours(params: Any, x: jax.Array, mask: jax.Array, cotangent: jax.Array) -> Any:
        with full_precision(config.dtype):
            y, pull = jax.vjp(lambda p, a: moe(p, a, config, mesh=mesh, token_mask=mask)[0], params, x)
            return y, pull(cotangent)

    checks: list[Check] = []
    for case, (bias, mask) in cases.items():
        params = {**padded, "router": {**padded["router"], "bias": bias}}
        leave_nan_behind()
        arrays = jax.device_put((x, mask, cotangent), everywhere)
        y, (d_params, d_x) = ours(jax.device_put(params, shardings), *arrays)
        got = jax.device_get((y, (_real(d_params), d_x)))
        want = jax.device_get(dense_layer(_real(params), x, mask, cotangent))
        checks += layer_differences(f"{name} on {len(devices)} devices, {case}", "float32", got, want)
    return checks


def _real(params: Any) -> Any:
    """Without the empty experts that pad them."""
    return {**params, "experts": {name: leaf[: LAYER.num_experts] for name, leaf in params["experts"].items()}}


def path_section(devices: Sequence[Any], left_out: dict[str, str], how: How) -> dict[str, Any]:
    """{what is timed: {path: cell}} of one layer, its tokens spread over all devices.

    Args:
      left_out: path -> why it could not be checked, and is not timed.
    """
    mesh = make_mesh(len(devices), 1, list(devices))
    config = layer_config(WORKLOAD, how.rehearse)
    tokens = len(devices) * (TINY_TOKENS if how.rehearse else TOKENS)
    rows = NamedSharding(mesh, P(("data", "expert")))
    keys = jax.random.split(jax.random.key(3), 3)
    make = jax.jit(lambda key: jax.random.normal(key, (tokens, config.hidden_size), jnp.bfloat16), out_shardings=rows)
    x, cotangent = make(keys[1]), make(keys[2])
    figures: dict[str, dict[str, Cell]] = {}
    flops = layer_flops(config, tokens)
    placed = {
        name: _params(dataclasses.replace(config, comm=comm), mesh, keys[0]) for name, comm in _distinct().items()
    }
    for timed, weight in zip(TIMED, (1, 3)):
        contestants: dict[str, Any] = {}
        for name, comm in PATHS.items():
            if name in left_out:
                continue
            one = dataclasses.replace(config, comm=comm)
            run = lambda params, x, one=one: moe(params, x, one, mesh=mesh)[0]
            params = placed["dense" if name == "dense" else "spread"]
            backward = timed != "forward"
            contestants[name] = (
                (forward_and_backward(run), (cotangent, (params, x))) if backward else (run, (params, x))
            )
        figures[timed] = measure(f"paths, {timed}", contestants, flops * weight, how)
        figures[timed] |= {name: {"reason": reason} for name, reason in left_out.items()}
    return {"workload": WORKLOAD, "devices": len(devices), "T": tokens, "figures": figures}


def _distinct() -> dict[str, CommConfig]:
    """Two ways in which parameters lie on the mesh."""
    return {"dense": PATHS["dense"], "spread": CommConfig()}


def _params(config: MoEConfig, mesh: Mesh, key: jax.Array) -> Any:
    create = lambda key: init_params(config, key, ranks=mesh.size)
    return jax.jit(create, out_shardings=param_shardings(config, mesh))(key)


def reason_left_out(name: str, devices: Sequence[Any], error: Exception) -> str | None:
    """Why a path that did not run may be left out; None where it should have run."""
    mesh = make_mesh(len(devices), 1, list(devices))
    return f"not taken on these devices, and did not run: {said(error)}" if may_fail(PATHS[name], mesh) else None
