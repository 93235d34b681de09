"""Steady-state times of compiled calls that are compared with one another."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jax_ep.config import refuse


@dataclasses.dataclass(frozen=True)
class Timing:
    """Wall-clock times of one function.

    Attributes:
      runs_ms: milliseconds of every timed run, in the order they ran.
    """

    runs_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.runs_ms)

    @property
    def min_ms(self) -> float:
        return min(self.runs_ms)

    @property
    def max_ms(self) -> float:
        return max(self.runs_ms)


def compare_runs(
    functions: Mapping[str, Callable[[], Any]],
    *,
    warmup: int,
    runs: int,
    on_run: Callable[[str], None] | None = None,
) -> dict[str, Timing]:
    """Times functions side by side, so that whatever slows the machine for a while slows all of them.

    A round runs every function once, in another order each time (see `turns`). A run is one call, from calling it until
    all its results are ready.

    Args:
      functions: name -> a function of nothing, usually one call of a compiled program.
      warmup: rounds that are run and not timed; with 0, whatever a first call costs is in the first time.
      runs: rounds that are timed.
      on_run: called with the function's name after each of its runs, warm-up included, outside the timed region.

    Returns:
      name -> Timing, in the order of `functions`.

    Raises:
      ConfigError: warmup or runs is no count, or there is nothing to time.
    """
    if not functions:
        refuse("functions", {}, "must hold at least one function", {"layer": "a function of nothing"})
    for field, value, least in (("warmup", warmup, 0), ("runs", runs, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            refuse(field, value, f"must be an integer of at least {least}", 5)
    names = list(functions)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warmup + runs):
        for name in turns(names, turn):
            start = time.perf_counter()
            jax.block_until_ready(functions[name]())
            elapsed_ms = (time.perf_counter() - start) * 1e3
            if turn >= warmup:
                times[name].append(elapsed_ms)
            if on_run is not None:
                on_run(name)
    return {name: Timing(tuple(runs_ms)) for name, runs_ms in times.items()}


def turns(names: Sequence[str], turn: int) -> list[str]:
    """The order of round `turn`: over 2n rounds (n if even), each of n names follows each other one equally often.

    Whoever runs after a program of large buffers pays for memory that went back to the system; were that always the
    same one, it would count as its own time. The zigzag of Williams (1949), shifted by one a round.
    """
    zigzag = [i // 2 + 1 if i % 2 else -(i // 2) for i in range(len(names))]
    if len(names) % 2 and turn % 2:
        zigzag.reverse()
    return [names[(turn + step) % len(names)] for step in zigzag]
