"""What scripts/inspect_host.py compiles: one layer, or a few with attention, for a host that is not here."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from _described import expert_mesh, lowered_layer
from jax_ep.aot.fits import batch_shape, with_layers
from jax_ep.aot.hosts import Host, described_devices, flags_for
from jax_ep.config import MoEConfig
from jax_ep.layer import resolve_transport
from jax_ep.model_config import ModelConfig
from jax_ep.models import decoder

_SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"


@dataclasses.dataclass(frozen=True)
class Asked:
    """What to look at.

    Attributes:
      host, config: the host, with as many devices as are used, and the model.
      moe: the layer: the model's, or with switches that a layer alone may have.
      config_name: what the model is called.
      task: "train", "prefill" or "decode".
      tokens: of one device at a time.
      context: positions a sequence has in decode's cache.
      flags: whether the host's flags are set.
      layers: None: the MoE layer alone; else so many whole layers, with attention, embedding and logits.
    """

    host: Host
    config: ModelConfig
    moe: MoEConfig
    config_name: str
    task: str
    tokens: int
    context: int
    flags: bool
    layers: int | None


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program's text, bytes of temporaries a device, the transport that "auto" became, and the flags in force."""

    text: str
    temporaries: int
    transport: str
    flags: dict[str, bool]


def host_mesh(host: Host) -> Mesh:
    """All devices of a described host on the expert axis."""
    return expert_mesh(described_devices(host))


def compile_for(asked: Asked, mesh: Mesh) -> Compiled:
    """Lowers and compiles; nothing is run."""
    transport = resolve_transport(asked.moe, mesh)
    flags = flags_for(asked.host, transport)
    if not asked.flags and _SCHEDULER in flags:
        flags[_SCHEDULER] = False
    if asked.layers is None:
        lowered = lowered_layer(asked.moe, mesh, asked.tokens, asked.task == "train")
    else:
        lowered = _decoder(asked, mesh)
    compiled = lowered.compile(compiler_options=dict(flags))
    return Compiled(compiled.as_text(), int(compiled.memory_analysis().temp_size_in_bytes), transport, flags)


def _decoder(asked: Asked, mesh: Mesh) -> Any:
    assert asked.layers is not None
    config = with_layers(asked.config, asked.layers)
    shapes = decoder.decoder_shapes(config, asked.host.devices)
    ids = jax.ShapeDtypeStruct(batch_shape(asked.tokens, asked.host.devices), jnp.int32)

    def forward(params: Any, ids: jax.Array) -> Any:
        return decoder.forward(params, ids, config, mesh=mesh)

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        return decoder.loss(params, ids, config, mesh=mesh)[0]

    run = jax.value_and_grad(loss) if asked.task == "train" else forward
    layout = (decoder.decoder_shardings(config, mesh), NamedSharding(mesh, P(("data", "expert"))))
    return jax.jit(run, in_shardings=layout).lower(shapes, ids)
