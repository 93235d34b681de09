"""Expert MLPs on grouped rows, their activations and parameters; shared experts. Pure.

Letters: T tokens, M rows, A assignments (positions), E experts, G experts held here, H hidden, I intermediate,
W width of the shared experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jax_ep.config import MoEConfig, refuse
from jax_ep.grouped import Activation, ExpertWeights, expert_mlp

_GPT_OSS_LIMIT = 7.0
_GPT_OSS_SLOPE = 1.702


def swiglu(gate: jax.Array | None, up: jax.Array) -> jax.Array:
    """silu(gate) * up, in float32 inside (Shazeer 2020, arXiv:2002.05202)."""
    gate = _required("swiglu", gate)
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(up.dtype)


def gelu(gate: jax.Array | None, up: jax.Array) -> jax.Array:
    """up * Phi(up) with the exact normal distribution, in float32 inside. There is no gate."""
    if gate is not None:
        refuse("gate", tuple(gate.shape), 'activation "gelu" has no gate', None)
    return jax.nn.gelu(up.astype(jnp.float32), approximate=False).astype(up.dtype)


def gpt_oss(gate: jax.Array | None, up: jax.Array) -> jax.Array:
    """(up + 1) * gate * sigmoid(1.702 * gate) with gate <= 7 and up in [-7, 7], in float32 inside."""
    gate = _required("gpt_oss", gate)
    clamped = jnp.minimum(gate.astype(jnp.float32), _GPT_OSS_LIMIT)
    limited = jnp.clip(up.astype(jnp.float32), -_GPT_OSS_LIMIT, _GPT_OSS_LIMIT)
    return ((limited + 1) * clamped * jax.nn.sigmoid(_GPT_OSS_SLOPE * clamped)).astype(up.dtype)


def _required(name: str, gate: jax.Array | None) -> jax.Array:
    if gate is None:
        refuse("gate", None, f"activation {name!r} has a gate", "an array shaped as up")
    return gate


def activation_fn(name: str) -> Activation:
    """The function (gate, up) -> h behind MoEConfig.activation.

    Raises:
      ConfigError: no activation has this name.
    """
    functions: dict[str, Activation] = {"swiglu": swiglu, "gelu": gelu, "gpt_oss": gpt_oss}
    if name not in functions:
        refuse("activation", name, f"must be one of {', '.join(functions)}", "swiglu")
    return functions[name]


def deinterleave(gate_up: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., 2I] -> gate [..., I] and up [..., I], which alternate in gpt_oss checkpoints: gate first."""
    return gate_up[..., ::2], gate_up[..., 1::2]


def init_expert_params(config: MoEConfig, key: jax.Array, num_experts_padded: int) -> dict[str, jax.Array]:
    """Fresh parameters: normal with deviation 1/sqrt(fan-in), zero biases.

    The values of real experts do not depend on the padding; padded experts are exactly zero.

    Returns:
      gate, up [E, H, I] and down [E, I, H] with E padded, gate_bias, up_bias [E, I] and down_bias [E, H] with
      config.expert_bias, all in config.param_dtype. The "gelu" activation has no gate.

    Raises:
      ConfigError: num_experts_padded is below config.num_experts.
    """
    experts, hidden, intermediate = config.num_experts, config.hidden_size, config.intermediate_size
    if num_experts_padded < experts:
        refuse("num_experts_padded", num_experts_padded, f"cannot be below num_experts={experts}", experts)
    dtype = jnp.dtype(config.param_dtype)
    params: dict[str, jax.Array] = {}
    for name, at in zip(("gate", "up", "down"), jax.random.split(key, 3), strict=True):
        if name == "gate" and not config.gated:
            continue
        fan_in, fan_out = (intermediate, hidden) if name == "down" else (hidden, intermediate)
        real = jax.random.normal(at, (experts, fan_in, fan_out), jnp.float32) * fan_in**-0.5
        params[name] = jnp.pad(real.astype(dtype), ((0, num_experts_padded - experts), (0, 0), (0, 0)))
        if config.expert_bias:
            params[f"{name}_bias"] = jnp.zeros((num_experts_padded, fan_out), dtype)
    return params


def init_shared_params(config: MoEConfig, key: jax.Array) -> dict[str, jax.Array]:
    """Fresh parameters of the shared experts: normal with deviation 1/sqrt(fan-in).

    Returns:
      gate, up [H, W], down [W, H] and, with config.shared_gate, shared_gate [H, 1], in config.param_dtype. The "gelu"
      activation has no gate. Empty without shared experts.
    """
    hidden, width = config.hidden_size, config.shared_width
    shapes = {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden), "shared_gate": (hidden, 1)}
    if not config.gated:
        del shapes["gate"]
    if not config.shared_gate:
        del shapes["shared_gate"]
    if not width:
        return {}
    keys = dict(zip(("gate", "up", "down", "shared_gate"), jax.random.split(key, 4), strict=True))
    return {
        name: (jax.random.normal(keys[name], shape, jnp.float32) * shape[0] ** -0.5).astype(config.param_dtype)
        for name, shape in shapes.items()
    }


def shared_mlp(x: jax.Array, params: Mapping[str, jax.Array], config: MoEConfig) -> jax.Array:
    """The MLP that every token goes through.

    activation(x @ gate, x @ up) @ down, times sigmoid(x @ shared_gate) with config.shared_gate (qwen2_moe). Products
    take config.dtype and accumulate in float32; the sigmoid is computed in float32.

    Args:
      x: [T, H].
      params: as from `init_shared_params`.
      config: the MoEConfig.

    Returns:
      [T, H] float32.
    """
    dtype = jnp.dtype(config.dtype)
    x = x.astype(dtype)

    def product(rows: jax.Array, name: str) -> jax.Array:
        return jnp.matmul(rows, params[name].astype(dtype), preferred_element_type=jnp.float32)

    gate = product(x, "gate").astype(dtype) if config.gated else None  # [T, W]
    h = activation_fn(config.activation)(gate, product(x, "up").astype(dtype))  # [T, W]
    y = product(h, "down")  # [T, H]
    return y * jax.nn.sigmoid(product(x, "shared_gate")) if config.shared_gate else y


def apply_experts(
    rows: jax.Array,
    index: jax.Array,
    group_sizes: jax.Array,
    weights: jax.Array | None,
    params: Mapping[str, jax.Array],
    config: MoEConfig,
    expected_rows: int | None = None,
    loops: bool = True,
) -> jax.Array:
    """Rows through their experts with the layer's parameters; `expert_mlp` says what exactly.

    Args:
      rows: [M, H] in config.dtype.
      index: [A] int32, the row of each position, positions sorted by expert.
      group_sizes: [G] integers, positions of each expert.
      weights: [A] float32, or None for factors of 1 and one position a row.
      params: as from `init_expert_params`, of the G experts held here; cast to config.dtype.
      config: the MoEConfig.
      expected_rows: how many positions are expected to be filled. Changes speed only.
      loops: False where the compiler partitions the program further, see `expert_mlp`.

    Returns:
      [M, H], float32 with weights, config.dtype without.
    """
    fields = {name: params[name].astype(config.dtype) if name in params else None for name in ExpertWeights._fields}
    experts = ExpertWeights(**fields)  # type: ignore[arg-type]
    how = {"expected_rows": expected_rows, "loops": loops, "backend": config.grouped_backend}
    how["delay_wgrad"] = config.overlap.delay_wgrad_compute
    return expert_mlp(rows, index, group_sizes, weights, experts, activation=activation_fn(config.activation), **how)
