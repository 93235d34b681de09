"""How much of a profile's communication ran beside computation: unions of intervals, never sums of kernels' times.

Intervals are pairs (start, end) of integers, nanoseconds, half-open. Kernels on several streams or threads overlap, so
their summed time is no elapsed time; the length of their union is.

What a trace does not tell: which computation waited for which communication. So `DeviceTrace.hideable_ns` is a bound.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from jax_ep.config import ConfigError, refuse

Interval = tuple[int, int]

_KINDS = (
    "ragged-all-to-all",
    "all-to-all",
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)
# XLA names an instruction by its kind, or by the JAX primitive it came from.
_PRIMITIVES = (
    "psum",
    "pmax",
    "pmin",
    "ppermute",
    "pbroadcast",
    "psum-scatter",
    "psum-invariant",
    "all-gather-invariant",
)
_NAMES = frozenset(_KINDS) | frozenset(_PRIMITIVES)
_ENCLOSING = frozenset(("while", "conditional", "call", "async-start", "async-update", "async-done"))
# Kernels of NCCL and NVSHMEM, XLA's own one-shot kernels, and copies from card to card.
_KERNELS = re.compile(
    r"^(nccl|nvshmem)|^memcpyp2p|(ragged_?all_?to_?all|all_?reduce|all_?gather|all_?to_?all|reduce_?scatter)\w*kernel",
    re.IGNORECASE,
)
_HOST_COPIES = re.compile(r"^memcpy(h2d|d2h|h2h)|^memory(alloc|free)", re.IGNORECASE)
_GPU_PLANE = re.compile(r"^/device:GPU:\d+$")
_STREAM = re.compile(r"^Stream #")
_CPU_PLANE = "/host:CPU"
_DEFINITION = re.compile(
    rf"^\s*(?:ROOT\s+)?%?([\w.\-]+) = .*?\s(?:{'|'.join(_KINDS)})(?:-start|-done)?\(", re.MULTILINE
)


# Intervals.


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as sorted intervals that neither overlap nor touch. Empty ones vanish.

    Raises:
      ConfigError: an interval ends before it starts.
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end < start:
            refuse("interval", (start, end), "must not end before it starts", (end, start))
        if end == start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> int:
    """How long at least one of them lasts: of their union, whatever they are."""
    return sum(end - start for start, end in union(intervals))


def intersection(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """The union of the points that some interval of `a` and some interval of `b` hold."""
    a, b = union(a), union(b)
    both: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            both.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return both


def hidden_fraction(communication: Iterable[Interval], computation: Iterable[Interval]) -> float | None:
    """|communication and computation| / |communication|; None where there is no communication."""
    communication = union(communication)
    whole = length(communication)
    return length(intersection(communication, computation)) / whole if whole else None


@dataclasses.dataclass(frozen=True)
class DeviceTrace:
    """What one device did.

    Attributes:
      communication, computation: unions.
    """

    communication: tuple[Interval, ...]
    computation: tuple[Interval, ...]

    @property
    def communication_ns(self) -> int:
        return length(self.communication)

    @property
    def computation_ns(self) -> int:
        return length(self.computation)

    @property
    def hidden_ns(self) -> int:
        """Communication beside computation."""
        return length(intersection(self.communication, self.computation))

    @property
    def hideable_ns(self) -> int:
        """No schedule hides more: min(|communication|, |computation|). Where computation has to wait for
        communication, it is less, which a trace does not tell.
        """
        return min(self.communication_ns, self.computation_ns)

    @property
    def hidden_fraction(self) -> float | None:
        return hidden_fraction(self.communication, self.computation)

    @property
    def span_ns(self) -> int:
        """From the first start to the last end, gaps included."""
        every = self.communication + self.computation
        return max((end for _, end in every), default=0) - min((start for start, _ in every), default=0)

    def figures(self) -> dict[str, Any]:
        """All of these, by name, for a record."""
        names = ("communication_ns", "computation_ns", "hidden_ns", "hideable_ns", "span_ns", "hidden_fraction")
        figures = {name: getattr(self, name) for name in names}
        return figures | {"hidden_of_hideable": self.hidden_ns / self.hideable_ns if self.hideable_ns else None}


# Traces.


def collective_names(text: str) -> frozenset[str]:
    """The instructions of a compiled program (`compiled.as_text()`) that are collectives, by name, however named."""
    return frozenset(_DEFINITION.findall(text))


def read_trace(path: str | Path, text: str | None = None) -> dict[str, DeviceTrace]:
    """Communication and computation of every device in a trace of `jax.profiler.trace`.

    Recognised are NVIDIA GPUs and XLA:CPU. What a device runs and is neither communication nor left out is computation:
    products, packing, copies within the device. The rules for GPUs are written from XLA's names and tested on made-up
    traces: no trace of a GPU has been read yet.

    GPUs: kernels and copies on the lines "Stream #..." of planes "/device:GPU:n". Communication: kernels of NCCL
    ("nccl...") and NVSHMEM, kernels that XLA says belong to a collective (the stat hlo_op), XLA's one-shot kernels of
    collectives, copies from card to card. It lasts as long as its kernel, in which NCCL waits for its peers; the window
    between a start and its done is none. Left out: copies from and to the host, and derived lines ("XLA Ops", "XLA
    Modules", "Steps"), which show the same again or enclose it. Kernels in a CUDA graph carry no hlo_op: collectives
    of XLA's own are then known by their kernels' names alone.

    XLA:CPU: events of the plane "/host:CPU" with a stat hlo_op. One process simulates all devices on threads that they
    share; an event's stat device_ordinal says whose it is, and events without one make up a device "all". A collective
    lasts until the slowest device has come, so that most of it is waiting for a core. Left out: while, conditional and
    call, which enclose others; Python; thread pools; and what an operation leaves to a pool after its call has returned
    (its "end: ..." event may come after long waiting for a thread, which is no work).

    TPUs have never been looked at and are refused.

    Args:
      path: an .xplane.pb, or a folder with exactly one somewhere below it.
      text: the compiled program that ran, as `compiled.as_text()`: collectives are then those of the program,
        whatever they are called. None: they are told by name, as "all-to-all.4", "all-gather-start" or JAX's "psum.31",
        and one that is called otherwise counts as computation.

    Returns:
      "GPU:0" or "CPU:0" -> DeviceTrace, in order.

    Raises:
      ConfigError: no such file, no trace, one of TPUs, or one in which nothing is recognised.
    """
    file = _one_file(Path(path))
    named = None if text is None else collective_names(text)
    with warnings.catch_warnings():
        # Of jax 0.12 on Python 3.12, about a type without __module__; where warnings are errors the process ends in it.
        warnings.simplefilter("ignore", DeprecationWarning)
        planes, events = _events(file, named)
    if not events or any(name.startswith("/device:TPU") for name in planes):
        rule = "no kernel of a GPU and no operation of XLA:CPU is in it"
        seen = ", ".join(planes) or "none"
        raise ConfigError(f"trace={str(file)!r}: {rule} (planes: {seen}); {_WORKS}")
    order = sorted(events, key=lambda name: (len(name), name))
    return {name: DeviceTrace(*(tuple(union(part)) for part in events[name])) for name in order}


_WORKS = "a trace that jax.profiler.trace wrote while a compiled program ran on GPUs or CPU devices works"


def _one_file(path: Path) -> Path:
    if path.is_dir():
        found = sorted(path.rglob("*.xplane.pb"))
        if len(found) != 1:
            names = ", ".join(str(file.relative_to(path)) for file in found) or "none"
            raise ConfigError(f"trace={str(path)!r}: must hold one .xplane.pb, and there are: {names}; a file works")
        return found[0]
    if not path.is_file():
        raise ConfigError(f"trace={str(path)!r}: there is no such file; {_WORKS}")
    return path


_Events = dict[str, tuple[list[Interval], list[Interval]]]


def _events(file: Path, named: frozenset[str] | None) -> tuple[list[str], _Events]:
    """Names of the planes; communication and computation of each device, as they come."""
    try:
        planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
    except RuntimeError as error:
        raise ConfigError(f"trace={str(file)!r}: cannot be read: {str(error).splitlines()[0]}; {_WORKS}") from error
    gpus = [plane for plane in planes if _GPU_PLANE.match(plane.name)]
    return [plane.name for plane in planes], _gpu_events(gpus, named) if gpus else _cpu_events(planes, named)


def _kind(name: str) -> str:
    """What XLA called an instruction before it made the name unique: "all-to-all" of "all-to-all.4"."""
    return re.sub(r"(\.\d+|\.clone|\.remat\d*)+$", "", name).replace("_", "-")


def _is_communication(name: str, named: frozenset[str] | None) -> bool:
    """Whether an XLA instruction of this name is a collective."""
    kind = re.sub(r"-(start|done)$", "", _kind(name))
    return name in named or kind in _KINDS if named is not None else kind in _NAMES


def _gpu_events(planes: Iterable[Any], named: frozenset[str] | None) -> _Events:
    events: _Events = {}
    for plane in planes:
        device = plane.name.removeprefix("/device:")
        for line in plane.lines:
            if not _STREAM.match(line.name):
                continue
            for event in line.events:
                if _HOST_COPIES.match(event.name):
                    continue
                op = str(dict(event.stats).get("hlo_op", ""))
                communicates = bool(_KERNELS.search(event.name)) or (bool(op) and _is_communication(op, named))
                both = events.setdefault(device, ([], []))
                both[0 if communicates else 1].append((int(event.start_ns), int(event.end_ns)))
    return events


def _cpu_events(planes: Iterable[Any], named: frozenset[str] | None) -> _Events:
    events: _Events = {}
    for plane in planes:
        if plane.name != _CPU_PLANE:
            continue
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                op = str(stats.get("hlo_op", ""))
                if not op or _kind(op) in _ENCLOSING:
                    continue
                both = events.setdefault(f"CPU:{stats.get('device_ordinal', 'all')}", ([], []))
                both[0 if _is_communication(op, named) else 1].append((int(event.start_ns), int(event.end_ns)))
    return events
