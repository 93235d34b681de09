"""Several JAX processes on this machine, joined over Gloo on the loopback interface, and ended together.

`launch` starts the ranks of a job and waits for them. Where one dies, raises or stays silent until the deadline, all
are killed and RankFailure names the one at fault: in a collective the others hang or fail with it. This file is also
the program that a rank runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import importlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
TESTS = Path(__file__).resolve().parent
START_S = 150.0  # until all ranks have met
SETTLE_S = 0.7  # after the first sign of failure, for the signs of other ranks
MET, DONE = "met", "done"
# What a rank raises because of another one.
LEFT_WAITING = re.compile(r"connection (closed|reset)|timed out|DEADLINE_EXCEEDED|barrier", re.IGNORECASE)
COORDINATOR_LOST = "the JAX distributed service detected fatal errors"


class RankFailure(AssertionError):
    """A job that did not end well. `ranks`: those at fault."""

    def __init__(self, message: str, ranks: list[int]):
        super().__init__(message)
        self.ranks = ranks


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
    port, ranks = _free_port(), []
    try:
        for index in range(count):
            setting = dict(index=index, count=count, port=port, folder=str(folder), limit=START_S + deadline + 60)
            ranks.append(_Started(setting, job, devices, arguments))
        _wait(ranks, deadline)
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.process.wait()


def _free_port() -> int:
    """Below the ports that systems hand out by themselves, so that nobody takes it before rank 0 does."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        if not _listening(port):
            return port
    raise RuntimeError("no free port among 100 between 20000 and 32000")


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


class _Started:
    """One rank, seen from the process that started it."""

    def __init__(self, setting: dict[str, Any], job: str, devices: int, arguments: dict[str, Any]):
        self.index: int = setting["index"]
        self.reports: list[dict[str, Any]] = []
        self.ended: float | None = None
        files = Path(setting["folder"]) / f"rank{self.index}"
        self.log, self.report_file = files.with_suffix(".log"), files.with_suffix(".reports")
        self.report_file.write_text("")
        command = [sys.executable, "-u", "-W", "error", __file__, json.dumps(setting), job, json.dumps(arguments)]
        with self.log.open("wb") as out:
            # A session of its own, to be killed with all it starts. The pipe tells it that this process is gone.
            self.process = subprocess.Popen(
                command,
                env=_environment(devices),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.begun = time.monotonic()

    def look(self) -> None:
        """Brings `reports` and `ended` up to date."""
        if self.process.poll() is not None and self.ended is None:
            self.ended = time.monotonic()
        lines = self.report_file.read_text().split("\n")[:-1]
        self.reports = [json.loads(line) for line in lines]

    def kill(self) -> None:
        """SIGKILL: JAX catches SIGTERM."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.stdin.close()

    @property
    def stages(self) -> list[str]:
        return [r["stage"] for r in self.reports if "stage" in r]

    @property
    def raised(self) -> str | None:
        return next((r["raised"] for r in self.reports if "raised" in r), None)

    @property
    def succeeded(self) -> bool:
        return self.process.returncode == 0 and self.stages[-1:] == [DONE]

    @property
    def died(self) -> bool:
        return self.ended is not None and not self.succeeded

    def state(self) -> str:
        """What became of it, its last stage, and how long ago that was."""
        code = self.process.returncode
        if self.succeeded:
            became = "ended well"
        elif code is None:
            became = f"raised {self.raised}" if self.raised else "is silent"
        else:
            became = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        now = time.monotonic() if self.ended is None else self.ended
        if not self.reports:
            return f"{became}; no report in {now - self.begun:.1f} s"
        stage = f"{len(self.stages)} {self.stages[-1]!r}"
        if code is None and not self.raised:
            return f"{became} since stage {stage}, {now - self.reports[-1]['at']:.1f} s ago"
        at = self.reports[-1]["at"] if self.raised else now
        entered = [r["at"] for r in self.reports if "stage" in r][-1]
        return f"{became} in stage {stage}, {at - entered:.1f} s after entering it"

    def tail(self, lines: int) -> str:
        """The last lines of its output, without stack addresses."""
        text = self.log.read_bytes().decode(errors="replace")
        kept = [line for line in text.splitlines() if line.strip() and not line.startswith("    @ ")]
        return "\n".join(f"    {line[:400]}" for line in kept[-lines:]) or "    (nothing)"


def _environment(devices: int) -> dict[str, str]:
    """Ours, with that many devices, and nothing in it that would join other processes or go through a proxy."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_") and "proxy" not in k.lower()}
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", kept.get("XLA_FLAGS", ""))
    return kept | {
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}".strip(),
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "PYTHONPATH": str(TESTS.parent),
    }


def _wait(ranks: list[_Started], deadline: float) -> None:
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


def _failure(ranks: list[_Started], what: str) -> RankFailure:
    guilty = _at_fault(ranks)
    for rank in guilty:  # a rank that runs adds to its output where it is
        if rank.reports and rank.process.returncode is None and not rank.raised:
            os.kill(rank.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
    one = len(guilty) == 1
    said = [f"{what}: {' and '.join(f'rank {rank.index}' for rank in guilty)} {'is' if one else 'are'} at fault"]
    if not one:
        said[0] += ", none being behind another"
    for rank in ranks:
        said.append(f"{'->' if rank in guilty else '  '} rank {rank.index} of {len(ranks)} {rank.state()}")
    for rank in sorted(ranks, key=lambda rank: rank not in guilty):
        said += [f"output of rank {rank.index} ends:", rank.tail(25 if rank in guilty else 4)]
    return RankFailure("\n".join(said), [r.index for r in guilty])


def _at_fault(ranks: list[_Started]) -> list[_Started]:
    """The cause among what is seen. A rank that raised stays, its connections open, so that it breaks no other; one
    that died breaks all.
    """
    died = [rank for rank in ranks if rank.died]
    if died:
        by_itself = [rank for rank in died if COORDINATOR_LOST not in rank.log.read_bytes().decode(errors="replace")]
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
      port: of the coordinator, on HOST.
      folder: for files of the job.
      limit: seconds after which it ends itself, should nobody else do so.
    """

    index: int
    count: int
    port: int
    folder: str
    limit: float

    def report(self, stage: str) -> None:
        """Says that a stage begins."""
        self._write(stage=stage)

    def _write(self, **what: str) -> None:
        with (Path(self.folder) / f"rank{self.index}.reports").open("a") as file:
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
        self.report("import jax")
        import jax
        from jax._src.lib import _jax
        from jax.experimental import multihost_utils

        if not hasattr(_jax, "make_gloo_tcp_collectives"):
            raise RuntimeError(f"jaxlib of jax {jax.__version__} has no Gloo collectives; these tests need them")
        # Gloo binds to what the host name resolves to, if it does, and JAX has no option for that.
        _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, hostname=HOST)
        self.report("join")
        while self.index and not _listening(self.port):  # JAX sleeps a second between its tries
            time.sleep(0.02)
        limit = int(self.limit)  # longer than ours, which say who was late
        jax.distributed.initialize(
            f"{HOST}:{self.port}",
            self.count,
            self.index,
            cluster_detection_method="deactivate",
            coordinator_bind_address=f"{HOST}:{self.port}",
            initialization_timeout=limit,
            heartbeat_timeout_seconds=limit,
            shutdown_timeout_seconds=limit,
        )
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


def _end_with_parent() -> None:
    """Waits for the end of a pipe that only the process which started this one holds."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    setting, job, arguments = sys.argv[1:]
    rank = Rank(**json.loads(setting))
    faulthandler.register(signal.SIGUSR1)
    faulthandler.dump_traceback_later(rank.limit, exit=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    rank.run(job, json.loads(arguments))


if __name__ == "__main__":
    main()
