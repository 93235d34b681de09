"""Devices one does not own, to compile for. Needs the compiler of their platform (extra `aot`), and none of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from jax.experimental import topologies

from jax_ep.config import positive_int, refuse
from jax_ep.grouped.pallas_compat import know_card


def cards() -> list[str]:
    """Names of the cards that are described in this package: an XLA GpuTargetConfig each, as text."""
    files = (resources.files("jax_ep") / "aot" / "cards").iterdir()
    return sorted(file.name.removesuffix(".textproto") for file in files if file.name.endswith(".textproto"))


def described_devices(card: str, count: int) -> Sequence[Any]:
    """`count` devices of one host, for a Mesh to lower and compile for. They cannot run anything.

    Args:
      card: one of `cards()`.
      count: how many.

    Raises:
      ConfigError: an unknown card, or no compiler for it here.
    """
    if card not in cards():
        refuse("card", card, f"must be one of {', '.join(cards())}", cards()[0])
    positive_int("count", count, 8)
    target = (resources.files("jax_ep") / "aot" / "cards" / f"{card}.textproto").read_text()
    name = _found(r'device_description_str: "(.*)"', target)
    know_card(name, _found(r"capability \{ major: (\d+) minor: (\d+)", target))
    try:
        described = topologies.get_topology_desc(platform="cuda", target_config=target, topology=f"1x1x{count}")
    except Exception as error:  # JAX raises what the plugin that is not there makes it raise
        refuse(
            "jax's CUDA compiler", None, f"it is not here ({type(error).__name__}: {error})", "pip install jax[cuda13]"
        )
    return list(described.devices)


def _found(pattern: str, target: str) -> str:
    """The groups of a pattern that the text has, joined by dots."""
    match = re.search(pattern, target)
    assert match is not None, pattern
    return ".".join(match.groups())
