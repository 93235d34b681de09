"""Mixture-of-experts layers for JAX and Flax, experts spread over devices with explicit packed exchanges."""

from jax_ep.config import CommConfig, ConfigError, MoEConfig, OverlapConfig, RouterConfig, WorkloadConfig
from jax_ep.grouped import grouped_matmul
from jax_ep.layer import MoELayer, init_params, moe, param_shardings
from jax_ep.ledger import byte_ledger, count_routing
from jax_ep.local import CHECKPOINT_NAMES
from jax_ep.model_config import ModelConfig, RopeConfig
from jax_ep.paths import Dispatched, combine, dispatch, extra_rounds, make_plan, run_experts
from jax_ep.plan import Plan
from jax_ep.routing import MoEStats, Routing, balance_loss, balanced_routing, bias_update, route, router_logits, z_loss
from jax_ep.sharding import make_mesh
from jax_ep.transport import Part, exchange, ragged_all_to_all

__all__ = [
    "CHECKPOINT_NAMES",
    "CommConfig",
    "ConfigError",
    "Dispatched",
    "MoEConfig",
    "MoELayer",
    "MoEStats",
    "ModelConfig",
    "OverlapConfig",
    "Part",
    "Plan",
    "RopeConfig",
    "RouterConfig",
    "Routing",
    "WorkloadConfig",
    "balance_loss",
    "balanced_routing",
    "bias_update",
    "byte_ledger",
    "combine",
    "count_routing",
    "dispatch",
    "exchange",
    "extra_rounds",
    "grouped_matmul",
    "init_params",
    "make_mesh",
    "make_plan",
    "moe",
    "param_shardings",
    "ragged_all_to_all",
    "route",
    "router_logits",
    "run_experts",
    "z_loss",
]
