"""Several JAX processes on this machine, joined over Gloo on the loopback interface, and ended together.

`launch` starts the ranks of a job and waits for them. Where one dies, raises or stays silent until the deadline, all
are killed and RankFailure names the one at fault: in a collective the others hang or fail with it. This file is also
the program that a rank runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _launch import (
    COORDINATOR_LOST,
    RankFailure,
    Started,
    describe,
    end,
    environment,
    free_port,
    joining,
    show_stack,
    wait,
)
from jax_ep.distributed import LEFT_WAITING, join

TESTS = Path(__file__).resolve().parent
PATHS = {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS.parent / "scripts")])}
START_S = 150.0  # until all ranks have met
SETTLE_S = 0.7  # after the first sign of failure, for the signs of other ranks
MET, DONE = "met", "done"


def launch(job: str, count: int, devices: int, deadline: float, folder: Path, **arguments: Any) -> None:
    """Runs a job on `count` processes with `devices` simulated devices each; none is left when this returns or raises.

    Args:
      job: "module:function", of a module beside this one. Called as function(rank, **arguments) in each process; every
        rank must report the same stages in the same order.
      deadline: seconds for the job, counted from when all ranks have met.
      folder: where outputs and reports go, and the job's files.
      arguments: JSON values.

    Raises:
      RankFailure: a rank died or raised, or the deadline passed.
    """
    port, ranks = free_port(), []
    try:
        for index in range(count):
            rank = Rank(index, count, str(folder), START_S + deadline + 60)
            ranks.append(_Reporting(rank, job, arguments, environment(devices, **joining(index, count, port), **PATHS)))
        _wait(ranks, deadline)
    finally:
        end(ranks)


def run_script(
    command: Sequence[str],
    count: int,
    devices: int,
    folder: Path,
    limit: float = 200.0,
    every: Callable[[], None] = lambda: None,
) -> None:
    """Runs a script, with its arguments, on `count` processes with `devices` devices each, as scripts/launch.py does.

    Args:
      folder: for outputs.
      limit: seconds.
      every: called now and then.

    Raises:
      RankFailure: as `_launch.wait`.
    """
    port, ranks = free_port(), []
    try:
        for index in range(count):
            variables = environment(devices, **joining(index, count, port), **PATHS)
            ranks.append(Started(index, command, variables, folder / f"{index}.log", ["-W", "error"]))
        wait(ranks, limit, every)
    finally:
        end(ranks)


def with_argument(argument: Path) -> list[str]:
    """Processes that have it in one of their arguments."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(argument).encode() in (process / "cmdline").read_bytes():
                found.append(process.name)
    return found


def assert_none_left(argument: Path) -> None:
    """Of the processes with that argument, after some seconds."""
    limit = time.monotonic() + 10
    while with_argument(argument) and time.monotonic() < limit:
        time.sleep(0.1)
    assert with_argument(argument) == []


class _Reporting(Started):
    """One rank of a job, seen from the process that started it."""

    def __init__(self, rank: Rank, job: str, arguments: dict[str, Any], variables: dict[str, str]):
        self.reports: list[dict[str, Any]] = []
        self.report_file = rank.report_file
        self.report_file.write_text("")
        command = [__file__, json.dumps(dataclasses.asdict(rank)), job, json.dumps(arguments)]
        super().__init__(rank.index, command, variables, self.report_file.with_suffix(".log"), ["-W", "error"])

    def look(self) -> None:
        """Brings `reports` up to date as well."""
        super().look()
        lines = self.report_file.read_text().split("\n")[:-1]
        self.reports = [json.loads(line) for line in lines]

    @property
    def stages(self) -> list[str]:
        return [r["stage"] for r in self.reports if "stage" in r]

    @property
    def raised(self) -> str | None:
        return next((r["raised"] for r in self.reports if "raised" in r), None)

    @property
    def succeeded(self) -> bool:
        return self.code == 0 and self.stages[-1:] == [DONE]

    @property
    def died(self) -> bool:
        return self.ended is not None and not self.succeeded

    def state(self) -> str:
        """What became of it, its last stage, and how long ago that was."""
        if self.succeeded:
            became = "ended well"
        elif self.code is None:
            became = f"raised {self.raised}" if self.raised else "is silent"
        else:
            became = self.became
        now = time.monotonic() if self.ended is None else self.ended
        if not self.reports:
            return f"{became}; no report in {now - self.begun:.1f} s"
        stage = f"{len(self.stages)} {self.stages[-1]!r}"
        if self.code is None and not self.raised:
            return f"{became} since stage {stage}, {now - self.reports[-1]['at']:.1f} s ago"
        at = self.reports[-1]["at"] if self.raised else now
        entered = [r["at"] for r in self.reports if "stage" in r][-1]
        return f"{became} in stage {stage}, {at - entered:.1f} s after entering it"


def _wait(ranks: list[_Reporting], deadline: float) -> None:
    begun, met = time.monotonic(), None
    while not all(rank.succeeded for rank in ranks):
        time.sleep(0.05)
        for rank in ranks:
            rank.look()
        now = time.monotonic()
        if any(rank.died or rank.raised for rank in ranks):
            time.sleep(SETTLE_S)
            for rank in ranks:
                rank.look()
            raise _failure(ranks, "the job failed")
        if met is None and all(MET in rank.stages for rank in ranks):
            met = now
        if met is None and now - begun > START_S:
            raise _failure(ranks, f"the ranks did not meet within {START_S:.0f} s")
        if met is not None and now - met > deadline:
            raise _failure(ranks, f"the job was not done {deadline:.0f} s after the ranks had met")


def _failure(ranks: list[_Reporting], what: str) -> RankFailure:
    guilty = _at_fault(ranks)
    for rank in guilty:
        if rank.reports and not rank.raised:
            show_stack(rank)
    return RankFailure(describe(what, ranks, guilty), [rank.index for rank in guilty])


def _at_fault(ranks: list[_Reporting]) -> list[_Reporting]:
    """The cause among what is seen. A rank that raised stays, its connections open, so that it breaks no other; one
    that died breaks all.
    """
    died = [rank for rank in ranks if rank.died]
    if died:
        by_itself = [rank for rank in died if COORDINATOR_LOST not in rank.text]
        return [min(by_itself or died, key=lambda rank: rank.ended)]
    first = lambda ranks: min(ranks, key=lambda rank: rank.reports[-1]["at"])
    by_itself = [rank for rank in ranks if rank.raised and not LEFT_WAITING.search(rank.raised)]
    if by_itself:
        return [first(by_itself)]
    least = min(len(rank.stages) for rank in ranks)
    behind = [rank for rank in ranks if len(rank.stages) == least]
    return [rank for rank in behind if not rank.raised] or [first(behind)]


@dataclasses.dataclass(frozen=True)
class Rank:
    """A process of a job, as the job sees it.

    Attributes:
      index, count: which, of how many.
      folder: for files of the job.
      limit: seconds after which it ends itself, should nobody else do so.
    """

    index: int
    count: int
    folder: str
    limit: float

    @property
    def report_file(self) -> Path:
        return Path(self.folder) / f"rank{self.index}.reports"

    def report(self, stage: str) -> None:
        """Says that a stage begins."""
        self._write(stage=stage)

    def _write(self, **what: str) -> None:
        with self.report_file.open("a") as file:
            file.write(json.dumps({"at": time.monotonic(), **what}) + "\n")

    def run(self, job: str, arguments: dict[str, Any]) -> None:
        module, function = job.split(":")
        try:
            self._join()
            getattr(importlib.import_module(module), function)(self, **arguments)
            self._leave()
        except BaseException as error:
            traceback.print_exc()
            self._write(raised=f"{type(error).__name__}: {error}".splitlines()[0][:300])
            threading.Event().wait()  # leaving would break the others; `launch` ends them all

    def _join(self) -> None:
        self.report("start")
        import jax
        from jax.experimental import multihost_utils

        self.report("join")
        join(self.limit)  # longer than our own limits, which say who was late
        self.report("meet")
        assert jax.process_count() == self.count, "jax.distributed did not join the processes"
        assert len(jax.devices()) == self.count * jax.local_device_count()
        multihost_utils.sync_global_devices(MET)  # a collective: now all are connected
        self.report(MET)

    def _leave(self) -> None:
        import jax

        self.report("leave")
        jax.distributed.shutdown()
        self.report(DONE)


def main() -> None:
    setting, job, arguments = sys.argv[1:]
    rank = Rank(**json.loads(setting))
    faulthandler.dump_traceback_later(rank.limit, exit=True)
    rank.run(job, json.loads(arguments))


if __name__ == "__main__":
    main()
