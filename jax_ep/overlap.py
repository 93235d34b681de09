"""What lets a compiler run exchanges beside products: an order between operations that no value asks for.

A scheduler starts a collective as soon as its operands are there and waits for it as late as it may. Several exchanges
that depend on nothing of each other all start first, one after the other, and nothing is left to run beside the last.
`after` holds one back until another has ended. It changes no value.
"""

from __future__ import annotations

import re
from typing import TypeVar

import jax

from jax_ep.config import MoEConfig, refuse

_First = TypeVar("_First")
_Then = TypeVar("_Then")

# Of meshes: axes that hold stages of a pipeline, by the names that people give them.
_PIPELINE = ("pipe", "pipeline", "stage", "pp")


def after(first: _First, then: _Then) -> tuple[_First, _Then]:
    """Both pytrees as they are; what takes an array of one waits for all of the other. In the backward, cotangents do.

    Args:
      first: what is to be ready.
      then: what is to wait, integers too: what one rank tells others may hang on them, and a collective in the wrong
        place holds up all that leads to it.
    """
    return jax.lax.optimization_barrier((first, then))


@jax.custom_vjp
def together_in_backward(first: _First, second: _Then) -> tuple[_First, _Then]:
    """Both pytrees of floating-point arrays as they are, in the backward as by `after`.

    What the gradient of one comes from can then run beside what that of the other does, and nothing moves in the
    forward.
    """
    return first, second


together_in_backward.defvjp(lambda first, second: ((first, second), None), lambda _, cotangents: after(*cotangents))


def check_overlap(config: MoEConfig, ranks: int, mesh_axes: tuple[str, ...]) -> None:
    """Refuses switches that would do nothing on this mesh, or that are not made for it.

    Args:
      config: the layer.
      ranks: of the expert axis.
      mesh_axes: all axes of the mesh.

    Raises:
      ConfigError: a switch is on, and there is one rank, or a pipeline.
    """
    for field in ("delay_wgrad_compute", "moe_shared_expert_overlap"):
        if getattr(config.overlap, field):
            refuse_useless(field, ranks, mesh_axes)


def refuse_useless(field: str, ranks: int, mesh_axes: tuple[str, ...]) -> None:
    """Raises ConfigError where an overlap switch that is on has no exchange to work with."""
    if ranks < 2:
        refuse(field, True, "there is no exchange on an expert axis of size 1; make_mesh(expert=2) has one", False)
    if pipeline := [axis for axis in mesh_axes if axis in _PIPELINE]:
        refuse(field, True, f"is not made for pipelines, and the mesh has an axis {pipeline[0]!r}", False)


def check_flags(xla_flags: str) -> None:
    """Refuses XLA_FLAGS under which collectives become part of command buffers (CUDA graphs).

    What is inside one is not scheduled beside products.

    Raises:
      ConfigError: they do.
    """
    recorded, given = False, None
    for value in re.findall(r"--xla_gpu_enable_command_buffer=(\S*)", xla_flags):
        kinds = value.upper().split(",")
        if value.startswith(("+", "-")):  # of XLA's own list, which has no collectives
            recorded = (recorded or "+COLLECTIVES" in kinds) and "-COLLECTIVES" not in kinds
        else:
            recorded = "COLLECTIVES" in kinds
        given = value
    if recorded:
        assert given is not None
        kept = [kind for kind in given.split(",") if kind.upper().lstrip("+-") != "COLLECTIVES"]
        kept += ["-COLLECTIVES"] * given.startswith(("+", "-"))
        rule = "collectives in command buffers are not scheduled beside products"
        refuse("xla_gpu_enable_command_buffer", given, rule, ",".join(kept))
