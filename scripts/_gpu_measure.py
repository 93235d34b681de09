"""Compiled calls on one device: what they need, whether they fit, how long they take. For bench_gpu.py.

A cell is what is known of one contestant: its times, or the reason why there are none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jax_ep.bench import Timing, compare_runs

LEAST_MS = 20.0  # a timed run is as many calls as fill this: launching one from Python takes about 0.1 ms
MOST_CALLS = 100
SLOW_MS = 1000.0  # a call slower than this is timed once
OUT_OF_TIME = "skipped: out of time"

Cell = dict[str, Any]
Contestants = Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]]


@dataclasses.dataclass
class Budget:
    """Seconds for the whole script, and where they went.

    Attributes:
      seconds: after these, nothing more is begun.
      sections: name -> seconds it took.
      skipped: what was not begun.
    """

    seconds: float
    began: float = dataclasses.field(default_factory=time.monotonic)
    sections: dict[str, float] = dataclasses.field(default_factory=dict)
    skipped: list[str] = dataclasses.field(default_factory=list)

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.began)

    def allows(self, what: str) -> bool:
        if self.left() > 0:
            return True
        self.skipped.append(what)
        return False

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.sections[name] = self.sections.get(name, 0.0) + time.monotonic() - start


@dataclasses.dataclass(frozen=True)
class How:
    """How every contestant is timed.

    Attributes:
      warmup, runs: untimed and timed runs.
      device: the device they run on; the first of several.
      budget: what time is left.
      rehearse: shapes are tiny, and times mean nothing.
    """

    warmup: int
    runs: int
    device: Any
    budget: Budget
    rehearse: bool


def installed(module: str) -> bool:
    """Whether a package is there, without importing it."""
    return importlib.util.find_spec(module) is not None


def forward_and_backward(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """(cotangent, args, *rest) -> the result of function(*args, *rest) and the gradients of all args."""

    def run(cotangent: jax.Array, args: tuple[Any, ...], *rest: Any) -> Any:
        y, pull = jax.vjp(lambda *args: function(*args, *rest), *args)
        return y, pull(cotangent)

    return run


def measure(label: str, contestants: Contestants, flops: float, how: How) -> dict[str, Cell]:
    """Compiles every contestant, sees whether it fits, and times those that do in turns.

    Args:
      label: what they all do, for the list of what was skipped.
      contestants: name -> function and its arguments, which lie on the device. One function is compiled once, and
        takes arguments of the same shapes under other names.
      flops: of one call, the same for all.

    Returns:
      name -> cell.
    """
    cells: dict[str, Cell] = {}
    calls: dict[str, Callable[[], Any]] = {}
    programs: dict[Callable[..., Any], tuple[Any, Cell]] = {}
    for name, (function, args) in contestants.items():
        if not how.budget.allows(f"{label}, {name}"):
            cells[name] = {"reason": OUT_OF_TIME}
            continue
        cells[name], call = _prepared(function, args, programs, how.device)
        if call is not None:
            calls[name] = call
    for name, timing in _timings(calls, cells, how).items():
        each = cells[name]["calls_a_run"]
        runs_ms = [ms / each for ms in timing.runs_ms]
        cells[name] |= times(runs_ms, flops)
    return cells


def times(runs_ms: list[float], flops: float) -> Cell:
    """Median, least and most, how far apart these are, and the rate of the median."""
    timing = Timing(tuple(runs_ms))
    return {
        "median_ms": timing.median_ms,
        "min_ms": timing.min_ms,
        "max_ms": timing.max_ms,
        "spread": (timing.max_ms - timing.min_ms) / timing.median_ms,
        "runs_ms": runs_ms,
        "tflops": flops / timing.median_ms / 1e9,
    }


def _prepared(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    programs: dict[Callable[..., Any], tuple[Any, Cell]],
    device: Any,
) -> tuple[Cell, Callable[[], Any] | None]:
    """What compiling one contestant and calling it twice tells, and its call where it ran."""
    cell: Cell = {}
    try:
        if function not in programs:
            start = time.perf_counter()
            program = jax.jit(function).lower(*args).compile()
            programs[function] = program, {"compile_s": time.perf_counter() - start, **_memory(program)}
        program, told = programs[function]
        cell |= told
        if (reason := _too_large(cell, device)) is not None:
            return {**cell, "reason": reason}, None
        call = lambda: program(*args)
        jax.block_until_ready(call())
        start = time.perf_counter()
        jax.block_until_ready(call())
        cell["once_ms"] = (time.perf_counter() - start) * 1e3
    except Exception as error:  # one that cannot run is a cell of the table, not the end of it
        return {**cell, "reason": said(error)}, None
    cell["calls_a_run"] = min(MOST_CALLS, max(1, math.ceil(LEAST_MS / cell["once_ms"])))
    return cell, call


def _timings(calls: Mapping[str, Callable[[], Any]], cells: dict[str, Cell], how: How) -> dict[str, Timing]:
    """Interleaved; alone where something fails then, as two large programs in turns can."""
    slow = {name for name in calls if cells[name]["once_ms"] > SLOW_MS}
    timings = {name: Timing((cells[name]["once_ms"],)) for name in slow}
    quick = {name: _several(call, cells[name]["calls_a_run"]) for name, call in calls.items() if name not in slow}
    if not quick:
        return timings
    try:
        return timings | compare_runs(quick, warmup=how.warmup, runs=how.runs)
    except Exception:  # found out which below
        for name, call in quick.items():
            try:
                timings |= compare_runs({name: call}, warmup=how.warmup, runs=how.runs)
                cells[name]["alone"] = True
            except Exception as error:
                cells[name]["reason"] = said(error)
    return timings


def _several(call: Callable[[], Any], count: int) -> Callable[[], Any]:
    """Calls queued one after the other; the last one's results are ready when all are."""

    def run() -> Any:
        result = None
        for _ in range(count):
            result = call()
        return result

    return run


def _memory(program: Any) -> Cell:
    """Bytes of temporaries and results, where the compiler tells."""
    memory = program.memory_analysis()
    if memory is None:
        return {"temp_bytes": None, "output_bytes": None}
    return {"temp_bytes": int(memory.temp_size_in_bytes), "output_bytes": int(memory.output_size_in_bytes)}


def _too_large(cell: Cell, device: Any) -> str | None:
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats or cell["temp_bytes"] is None:
        return None
    need, free = cell["temp_bytes"] + cell["output_bytes"], stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return f"out of memory: needs {gib(need)}, {gib(free)} are free" if need > free else None


def said(error: Exception) -> str:
    """A reason in a few words."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return "out of memory"
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"failed: {type(error).__name__}: {line[:160]}"


def gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


def peak_bytes(device: Any) -> int | None:
    """The most this process has had on the device so far; None where the device does not tell."""
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return None if peak is None else int(peak)
