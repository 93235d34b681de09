"""Machines one does not own: what they are made of, and devices of theirs to compile for.

Compiling needs the compiler of their platform (extra `aot` for CUDA, the package libtpu for TPUs), and none of them.

Sources of the figures below. Compute: dense bfloat16 products with float32 sums, without sparsity. RTX 4090 165.2
TFLOP/s and 1008 GB/s (NVIDIA Ada GPU architecture whitepaper, V2.02, appendix A); RTX 3090 71 and 936 (NVIDIA Ampere
GA102 whitepaper, table 9); H100 SXM 989.4 and 3350, NVLink 4 with 450 GB/s one way (NVIDIA H100 data sheet); TPU v5e
197 and 819, 16 GB (Google Cloud, "TPU v5e"), 45 GB/s one way on each of its links (Austin et al. 2025, "How to Scale
Your Model", chapter 2).
Links: what all-to-alls get of a link, not what is printed on it: about 25 of PCIe 4.0 x16's 32 GB/s between cards that
reach each other and about 20 through host memory; of NVLink the same four fifths; the narrow cut of a 2x4 grid of v5e,
two links that carry half of everything for four chips, comes out at one link a chip. Latencies are round figures of
their order, those of a collective over NCCL (10-20 us) or a kernel's (5 us).
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from jax.experimental import topologies

from jax_ep.config import boolean, one_of, positive_int, positive_number, refuse
from jax_ep.grouped.pallas_compat import know_card

GB = 10**9
PLATFORMS = ("cuda", "tpu")
_TPU_GRIDS = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4"}
_COMPILERS = {"cuda": "pip install jax[cuda13]", "tpu": "pip install libtpu"}


@dataclasses.dataclass(frozen=True)
class Host:
    """One host, all of whose devices are alike.

    Attributes:
      name: of the host.
      devices: how many.
      platform: "cuda" or "tpu".
      card: what the compiler compiles for: one of `cards()`, a file with an XLA GpuTargetConfig as text, or a TPU's
        generation ("v5e").
      memory_bytes: of one device.
      tflops: dense bfloat16 products with float32 sums, in 10^12 operations a second.
      memory_rate: bytes a second of one device's memory.
      link: in words, what devices are joined by.
      link_rate: bytes a second that one device sends and, at the same time, receives.
      link_latency: seconds of a collective without bytes.
      peer_access: devices read each other's memory without the host. XLA's ragged exchange then needs no host either.
    """

    name: str
    devices: int
    platform: str
    card: str
    memory_bytes: int
    tflops: float
    memory_rate: float
    link: str
    link_rate: float
    link_latency: float
    peer_access: bool

    def __post_init__(self) -> None:
        one_of("platform", self.platform, PLATFORMS)
        for field in ("name", "card", "link"):
            if not isinstance(getattr(self, field), str) or not getattr(self, field):
                refuse(field, getattr(self, field), "must be a word", "rtx4090" if field == "card" else "mine")
        for field, works in (("devices", 8), ("memory_bytes", 24 * GB)):
            positive_int(field, getattr(self, field), works)
        for field, number in (("tflops", 165.2), ("memory_rate", 1e12), ("link_rate", 2e10), ("link_latency", 1e-5)):
            positive_number(field, getattr(self, field), number)
        boolean("peer_access", self.peer_access)


class Link(NamedTuple):
    """How the devices of one host are joined, as the fields of `Host` say it."""

    link: str
    link_rate: float
    link_latency: float
    peer_access: bool


LINKS = {
    "host memory": Link("PCIe 4.0 x16 through host memory", 20 * GB, 20e-6, False),
    "pcie4": Link("PCIe 4.0 x16, peer to peer", 25 * GB, 10e-6, True),
    "nvlink4": Link("NVLink 4", 360 * GB, 5e-6, True),
    "v5e": Link("ICI of TPU v5e, 2x4", 45 * GB, 2e-6, True),
}
# Name of a card -> platform, bytes of memory (as drivers report them), TFLOP/s, bytes of memory a second.
_CARDS: dict[str, tuple[str, int, float, float]] = {
    "rtx4090": ("cuda", 24564 * 2**20, 165.2, 1008 * GB),
    "rtx3090": ("cuda", 24576 * 2**20, 71.0, 936 * GB),
    "h100": ("cuda", 81559 * 2**20, 989.4, 3350 * GB),
    "v5e": ("tpu", 16 * 2**30, 197.0, 819 * GB),
}


def _host(name: str, devices: int, card: str, link: str) -> Host:
    platform, memory, tflops, rate = _CARDS[card]
    return Host(name, devices, platform, card, memory, tflops, rate, *LINKS[link])


_HOSTS = {
    host.name: host
    for host in (
        _host("2xrtx4090", 2, "rtx4090", "host memory"),
        _host("8xrtx4090", 8, "rtx4090", "host memory"),
        _host("2xrtx3090", 2, "rtx3090", "host memory"),
        _host("8xh100", 8, "h100", "nvlink4"),
        _host("tpu-v5e-8", 8, "v5e", "v5e"),
    )
}


def hosts() -> list[str]:
    """Names of the hosts that `get_host` knows."""
    return list(_HOSTS)


def get_host(name: str) -> Host:
    """A host by its name, or from a TOML file of one's own.

    The file has the fields of `Host`; with like = "8xrtx4090" it has only those that differ from that host's. A card
    that is a file is looked for beside it.

    Raises:
      ConfigError: no such host or file, or one that does not say what it must.
    """
    if name in _HOSTS:
        return _HOSTS[name]
    path = Path(name)
    if path.suffix != ".toml":
        near = difflib.get_close_matches(name, _HOSTS, n=3, cutoff=0.4)
        rule = f"must be one of {', '.join(_HOSTS)}, or a .toml file"
        refuse("host", name, rule + (f"; nearest: {', '.join(near)}" if near else ""), (near or list(_HOSTS))[0])
    try:
        said = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        refuse("host", name, f"cannot be read ({error})", "8xrtx4090")
    return _host_of(said, path)


def _host_of(said: dict[str, Any], path: Path) -> Host:
    fields = [field.name for field in dataclasses.fields(Host)]
    base = said.pop("like", None)
    have: dict[str, Any] = {"name": path.stem}
    if base is not None:
        if not isinstance(base, str) or base not in _HOSTS:
            refuse("like", base, f"must be one of {', '.join(_HOSTS)}", "8xrtx4090")
        have = dataclasses.asdict(_HOSTS[base]) | have
    for key in said:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.4)
            refuse(str(path), key, f"has a field that no host has; there are {', '.join(fields)}", (near or fields)[0])
    have |= said
    if missing := [field for field in fields if field not in have]:
        refuse(str(path), missing, 'lacks these fields; like = "8xrtx4090" fills them', 'like = "8xrtx4090"')
    if have["card"] not in (*cards(), *_CARDS) and (beside := path.parent / str(have["card"])).is_file():
        have["card"] = str(beside)
    return Host(**have)


def flags_for(host: Host, transport: str = "all_to_all") -> dict[str, bool]:
    """XLA's flags that a program needs on this host for its collectives to run beside its products.

    GPUs need the latency-hiding scheduler; TPUs have their own, which is always on. A ragged exchange between cards
    that do not reach each other's memory goes through NCCL, which XLA does from jax 0.11 only where it is told to.

    Args:
      host: the host.
      transport: how packed rows cross ("ragged" or another).

    Returns:
      Names without dashes, for `.compile(compiler_options=...)`; `xla_flags` writes them for XLA_FLAGS.
    """
    if host.platform != "cuda":
        return {}
    flags = {"xla_gpu_enable_latency_hiding_scheduler": True}
    if transport == "ragged" and not host.peer_access:
        flags["xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback"] = True
    return flags


def xla_flags(flags: Mapping[str, bool]) -> str:
    """Flags as the environment variable XLA_FLAGS has them."""
    return " ".join(f"--{name}={str(value).lower()}" for name, value in flags.items())


def cards() -> list[str]:
    """Names of the cards that are described in this package: an XLA GpuTargetConfig each, as text."""
    files = (resources.files("jax_ep") / "aot" / "cards").iterdir()
    return sorted(file.name.removesuffix(".textproto") for file in files if file.name.endswith(".textproto"))


def described_devices(card: str | Host, count: int | None = None) -> Sequence[Any]:
    """`count` devices of one host, for a Mesh to lower and compile for. They cannot run anything.

    Args:
      card: a Host, or one of `cards()`.
      count: how many; None: as many as the host has.

    Raises:
      ConfigError: an unknown card, no compiler for it here, or a number of TPUs that is no grid.
    """
    if isinstance(card, Host):
        count = card.devices if count is None else count
        if card.platform == "tpu":
            if count not in _TPU_GRIDS:
                refuse("devices", count, f"TPUs come as {', '.join(map(str, _TPU_GRIDS))}", 8)
            return _described("tpu", topology_name=f"{card.card}:{_TPU_GRIDS[count]}")
        card = card.card
    positive_int("count", count, 8)
    if card in cards():
        target = (resources.files("jax_ep") / "aot" / "cards" / f"{card}.textproto").read_text()
    elif Path(card).is_file():
        target = Path(card).read_text()
    else:
        refuse("card", card, f"must be one of {', '.join(cards())}", cards()[0])
    name = _found(r'device_description_str: "(.*)"', target)
    know_card(name, _found(r"capability \{ major: (\d+) minor: (\d+)", target))
    return _described("cuda", target_config=target, topology=f"1x1x{count}")


def _described(platform: str, **arguments: str) -> Sequence[Any]:
    try:
        return list(topologies.get_topology_desc(platform=platform, **arguments).devices)
    except Exception as error:  # JAX raises what the plugin that is not there makes it raise
        why = " ".join(f"{type(error).__name__}: {error}".split())
        what = "jax's CUDA compiler" if platform == "cuda" else "jax's TPU compiler"
        refuse(what, None, f"it is not here ({why[:200]})", _COMPILERS[platform])


def _found(pattern: str, target: str) -> str:
    """The groups of a pattern that the text has, joined by dots."""
    match = re.search(pattern, target)
    if match is None:
        refuse("card", target[:40], f"an XLA GpuTargetConfig has {pattern}", cards()[0])
    return ".".join(match.groups())
