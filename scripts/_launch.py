"""Ranks of a job as processes of this machine that meet on the loopback interface: started, named when they fail, ended
together.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jax_ep.distributed import ADDRESS, AT_FAULT, COUNT, ENDED, INDEX, LEFT_WAITING

HOST = "127.0.0.1"
PROGRAM = Path(__file__).resolve().parent / "_rank.py"
SETTLE_S = 10.0  # from the first sign of failure, for other ranks to end or to name the one at fault
NOISE = "[Gloo] Rank "  # begins a line of each process and each group of them
COORDINATOR_LOST = "the JAX distributed service detected fatal errors"
VERDICT = re.compile(r"^rank \d+ ends: (.*)", re.MULTILINE)  # of jax_ep.distributed.Watchdog
# What would join other processes than ours.
_FOREIGN = ("SLURM_", "JAX_COORDINATOR", COUNT, INDEX, "JAX_LOCAL_DEVICE_IDS")


class RankFailure(AssertionError):
    """A job that did not end well. `ranks`: those at fault."""

    def __init__(self, message: str, ranks: list[int]):
        super().__init__(message)
        self.ranks = ranks


def free_port() -> int:
    """Below the ports that systems hand out by themselves, so that nobody takes it before rank 0 does."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)):
                return port
    raise RuntimeError("no free port among 100 between 20000 and 32000")


def environment(devices: int, **more: str) -> dict[str, str]:
    """Ours, with that many simulated devices, and nothing in it that joins other processes or goes through a proxy."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN) and "proxy" not in k.lower()}
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", kept.get("XLA_FLAGS", ""))
    return kept | {
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}".strip(),
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        **more,
    }


def joining(index: int, count: int, port: int) -> dict[str, str]:
    """What tells a rank where to meet the others."""
    return {ADDRESS: f"{HOST}:{port}", COUNT: str(count), INDEX: str(index)}


class Started:
    """One rank, seen from the process that started it.

    Args:
      index: which.
      command: a script and its arguments.
      environment: of the process.
      log: a file for its output.
      options: of Python.
    """

    def __init__(
        self, index: int, command: Sequence[str], environment: Mapping[str, str], log: Path, options: Sequence[str] = ()
    ):
        self.index, self.log = index, log
        self.ended: float | None = None
        with log.open("wb") as out:
            # A session of its own, to be killed with all it starts. The pipe tells it that this process is gone.
            self.process = subprocess.Popen(
                [sys.executable, "-u", *options, str(PROGRAM), *command],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.begun = time.monotonic()

    def look(self) -> None:
        """Brings what is known of it up to date."""
        if self.process.poll() is not None and self.ended is None:
            self.ended = time.monotonic()

    def kill(self) -> None:
        """SIGKILL: JAX catches SIGTERM."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        assert self.process.stdin
        self.process.stdin.close()

    @property
    def code(self) -> int | None:
        """Its exit code, or minus the signal that killed it."""
        return self.process.returncode

    @property
    def died(self) -> bool:
        return self.ended is not None and self.code != 0

    @property
    def blames_another(self) -> bool:
        """Whether it ended because of another one, as far as its output says."""
        return self.code == ENDED or COORDINATOR_LOST in self.text or bool(LEFT_WAITING.search(self.tail(1)))

    @property
    def became(self) -> str:
        """How it ended, if it has."""
        if self.code is None:
            return "runs"
        if self.code == ENDED:
            return "ended because of another rank"
        if self.code == AT_FAULT:
            return "was found at fault by its watchdog, and ended"
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"exited with code {self.code}"

    def state(self) -> str:
        """What became of it, and how long after its start."""
        now = time.monotonic() if self.ended is None else self.ended
        return f"{self.became}, {now - self.begun:.1f} s after its start"

    @property
    def text(self) -> str:
        return self.log.read_bytes().decode(errors="replace")

    def tail(self, lines: int) -> str:
        """The last lines of its output, without noise and stack addresses."""
        kept = [line for line in self.text.splitlines() if line.strip() and not line.startswith((NOISE, "    @ "))]
        return "\n".join(f"    {line[:400]}" for line in kept[-lines:]) or "    (nothing)"


def end(ranks: Sequence[Started]) -> None:
    """None is left when this returns."""
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.process.wait()


def wait(
    ranks: Sequence[Started], deadline: float | None, every: Callable[[], None], shown: Sequence[Started] = ()
) -> None:
    """Until all ranks have exited with code 0.

    Args:
      deadline: seconds for that; None lets them run for as long as they like.
      every: called now and then, and after the last has ended.
      shown: those whose output needs no repeating.

    Raises:
      RankFailure: one ended otherwise, or the deadline passed.
    """
    begun = time.monotonic()
    failed: float | None = None
    while any(rank.ended is None for rank in ranks):
        time.sleep(0.05)
        every()
        for rank in ranks:
            rank.look()
        now = time.monotonic()
        if failed is None and any(rank.died for rank in ranks):
            failed = now
        if failed is not None and now - failed > SETTLE_S:
            break
        if failed is None and deadline is not None and now - begun > deadline:
            raise _failure(ranks, f"the job was not done {deadline:.0f} s after its start", shown)
    every()
    if any(rank.died for rank in ranks):
        raise _failure(ranks, "the job failed", shown)


def _failure(ranks: Sequence[Started], what: str, shown: Sequence[Started]) -> RankFailure:
    guilty = _at_fault(ranks)
    for rank in guilty:
        show_stack(rank)
    verdicts = [found[1] for rank in ranks if (found := VERDICT.search(rank.text))]
    return RankFailure(describe(what, ranks, guilty, verdicts[:1], shown), [rank.index for rank in guilty])


def _at_fault(ranks: Sequence[Started]) -> list[Started]:
    """The cause among what is seen: who ended by itself, else who left early, else who is silent."""
    died = sorted((rank for rank in ranks if rank.died), key=lambda rank: rank.ended or 0)
    by_itself = [rank for rank in died if not rank.blames_another]
    if by_itself:
        return [rank for rank in by_itself if rank.code == AT_FAULT == by_itself[0].code] or by_itself[:1]
    left = [rank for rank in ranks if rank.code == 0] if died else []
    return left or [rank for rank in ranks if rank.code is None] or died[:1]


def show_stack(rank: Started) -> None:
    """A rank that runs adds to its output where it is."""
    if rank.process.poll() is None:
        os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(0.3)


def describe(
    what: str,
    ranks: Sequence[Started],
    guilty: Sequence[Started],
    verdicts: Sequence[str] = (),
    shown: Sequence[Started] = (),
) -> str:
    """What happened, which ranks are at fault, what became of each, and how the output ends of those not shown."""
    one = len(guilty) == 1
    said = [f"{what}: {' and '.join(f'rank {rank.index}' for rank in guilty)} {'is' if one else 'are'} at fault"]
    if not one:
        said[0] += ", none known to be behind another"
    said += [f"   their watchdog: {verdict}" for verdict in verdicts]
    for rank in ranks:
        said.append(f"{'->' if rank in guilty else '  '} rank {rank.index} of {len(ranks)} {rank.state()}")
    for rank in sorted((rank for rank in ranks if rank not in shown), key=lambda rank: rank not in guilty):
        said += [f"output of rank {rank.index} ends:", rank.tail(25 if rank in guilty else 4)]
    return "\n".join(said)
