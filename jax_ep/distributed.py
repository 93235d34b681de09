"""Several processes, on one host or many: joining them, and ending all when one is silent, dead or has failed.

    join()                               # before anything looks at devices
    with Watchdog(folder, 600) as watchdog:
        watchdog.beat("step 1")          # the same stages in the same order in every process

Of a process that the watchdog ends the exit code is ENDED (75) where another rank was at fault, AT_FAULT (76) where it
was itself, and a line on standard error names the rank at fault.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import ipaddress
import itertools
import json
import math
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_ep import watcher
from jax_ep.config import ConfigError, refuse
from jax_ep.watcher import AT_FAULT, DONE, ENDED, FAILED, LAST_S, LOOK_S, LOST, RUNS, TICK_S

__all__ = ["AT_FAULT", "ENDED", "JoinError", "Watchdog", "join"]

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
JAX_LIMIT_S = 3600  # until JAX ends a job of which a process is silent, naming nobody: the watchdog comes first
DEADLINES_S = 3, 3000  # shortest, longest
GRACE_S = 3.0  # that a rank which raised has to end; JAX would let it wait for the others
# What an error says that another process may have caused.
LEFT_WAITING = re.compile(r"connection (closed|reset|refused)|timed out|DEADLINE_EXCEEDED|barrier", re.IGNORECASE)


class JoinError(ConfigError):
    """The processes of a job did not come together. The message says which are missing."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Where the processes of a job meet, and which of them this one is."""

    address: str
    count: int
    index: int
    detection: str  # jax.distributed's cluster_detection_method

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def on_loopback(self) -> bool:
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"


def join(wait: float = 120.0) -> None:
    """Joins this process with the others of its job, if there are any. Before anything looks at devices.

    Under Slurm, in a step of several tasks, nothing else is needed. Elsewhere each process has JAX_COORDINATOR_ADDRESS
    ("host:port" of rank 0, the same for all), JAX_NUM_PROCESSES and JAX_PROCESS_ID (its rank, from 0) in its
    environment; they come before Slurm's. A job that jax.distributed.initialize has joined already is left as it is.

    Args:
      wait: seconds for the others to come.

    Raises:
      ConfigError: variables that are missing or cannot be read.
      JoinError: not all came.
    """
    job = job_of(os.environ)
    if job is None or jax.distributed.is_initialized():
        return
    global _name
    _name = meet(job, wait)
    bind = None
    if job.on_loopback:
        bind = job.address
        _keep_gloo_on(job.host)
    jax.distributed.initialize(
        job.address,
        job.count,
        job.index,
        cluster_detection_method=job.detection,
        coordinator_bind_address=bind,
        initialization_timeout=math.ceil(wait),
        heartbeat_timeout_seconds=JAX_LIMIT_S,
    )


def job_of(environment: Mapping[str, str]) -> Job | None:
    """What the environment says; None for one process alone."""
    slurm = _slurm(environment)
    given = {name: environment.get(name) or slurm.get(name) for name in (ADDRESS, COUNT, INDEX)}
    missing = [name for name, value in given.items() if not value]
    if len(missing) == len(given):
        return None
    examples = {ADDRESS: "10.0.0.1:12345", COUNT: "2", INDEX: "0"}
    for name in missing:
        there = " and ".join(other for other in given if other not in missing)
        refuse(name, None, f"must be set where {there} {'is' if len(missing) == 2 else 'are'}", examples[name])
    count, index = (_integer(name, given[name] or "") for name in (COUNT, INDEX))
    if count < 1:
        refuse(COUNT, count, "must be at least 1", 2)
    if not 0 <= index < count:
        refuse(INDEX, index, f"must be from 0 to {COUNT} - 1, which is {count - 1}", count - 1)
    address = given[ADDRESS] or ""
    if not re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+):\d{1,5}", address):
        refuse(ADDRESS, address, 'must be "host:port"', examples[ADDRESS])
    return Job(address, count, index, "slurm" if slurm else "deactivate") if count > 1 else None


def _slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Slurm's variables of a step of several tasks as ours, the address as JAX would choose it."""
    if not all(environment.get(name) for name in SLURM) or environment["SLURM_NTASKS"] == "1":
        return {}
    nodes = re.match(r"([^\[,]+)(?:\[(\d+))?", environment["SLURM_STEP_NODELIST"])  # node[001-004,007],other
    first = "".join(part or "" for part in nodes.groups()) if nodes else ""
    port = environment.get("JAX_COORDINATOR_PORT") or 61440 + _integer(SLURM[0], environment[SLURM[0]]) % 4096
    return {
        ADDRESS: f"{first}:{port}",
        COUNT: environment["SLURM_NTASKS"],
        INDEX: environment["SLURM_PROCID"],
    }


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        refuse(name, text, "must be an integer", 2)


def _keep_gloo_on(host: str) -> None:
    """Lets Gloo, which JAX uses between CPUs, listen on `host`.

    It listens on what this machine's name resolves to, which may be no address of this machine, or one that all see.
    JAX has no option for that.
    """
    from jax._src.lib import _jax

    make = getattr(_jax, "make_gloo_tcp_collectives", None)
    if make is not None:
        _jax.make_gloo_tcp_collectives = functools.partial(make, hostname=host)


# The roll call. JAX aborts a process whose job is not complete in time, and does not say who is missing.

_COMPLETE = "complete "  # the job's name follows
_name = ""  # of the job that this process joined by `join`


def meet(job: Job, wait: float) -> str:
    """Returns in every process of the job once all are there; rank 0 hears them where its coordinator will listen.

    Returns:
      a name that no other job has, the same in all processes.
    """
    answer = _call_roll(job, wait) if job.index == 0 else _answer_roll(job, wait)
    if not answer.startswith(_COMPLETE):
        raise JoinError(answer)
    return answer.removeprefix(_COMPLETE)


def _name_of_job() -> str:
    """As `meet` returns it. Waits for the others where the job was not joined by `join`."""
    return _name or _name_of(int(multihost_utils.broadcast_one_to_all(np.int32(secrets.randbits(31)))))


def _name_of(number: int) -> str:
    return f"{number:08x}"


def _call_roll(job: Job, wait: float) -> str:
    there: set[int] = set()
    peers: list[socket.socket] = []
    problem = ""
    end = time.monotonic() + wait
    with contextlib.ExitStack() as stack:
        try:
            with _listening(job) as server:
                while len(there) < job.count - 1 and not problem and (left := end - time.monotonic()) > 0:
                    server.settimeout(left)
                    with contextlib.suppress(OSError, ValueError):  # too late, or somebody else
                        peers.append(stack.enter_context(server.accept()[0]))
                        peers[-1].settimeout(2)
                        index, count = map(int, _line(peers[-1]).split())
                        problem = _odd(job, there, index, count)
                        there.add(index)
        except OSError as error:
            return f"{ADDRESS}={job.address!r}: rank 0 cannot listen there: {error}; another port works"
        missing = [rank for rank in range(1, job.count) if rank not in there]
        if missing and not problem:
            problem = _missing(job, missing, wait)
        answer = problem or _COMPLETE + _name_of(secrets.randbits(31))
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.sendall(f"{answer}\n".encode())
    return answer


def _listening(job: Job) -> socket.socket:
    if job.on_loopback:
        family = socket.AF_INET6 if ":" in job.host else socket.AF_INET
        return socket.create_server((job.host, job.port), family=family, backlog=job.count)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", job.port), family=socket.AF_INET6, backlog=job.count, dualstack_ipv6=True)
    return socket.create_server(("", job.port), backlog=job.count)


def _odd(job: Job, there: Set[int], index: int, count: int) -> str:
    if count != job.count:
        return f"{COUNT}={count} in rank {index} and {job.count} in rank 0: must be the same in all processes"
    if index in there or not 0 < index < count:
        return f"{INDEX}={index}: two processes say so; each needs another one, from 0 to {count - 1}"
    return ""


def _missing(job: Job, missing: list[int], wait: float) -> str:
    names = ", ".join(f"rank {rank}" for rank in missing[:8]) + (" and others" if len(missing) > 8 else "")
    verb = "is" if len(missing) == 1 else "are"
    return f"{job.count - len(missing)} of {job.count} processes joined in {wait:.0f} s; {names} {verb} missing"


def _answer_roll(job: Job, wait: float) -> str:
    end = time.monotonic() + wait
    answer, problem = "", "it hung up"
    while not answer and time.monotonic() < end:
        try:
            with socket.create_connection((job.host, job.port), timeout=5) as peer:
                peer.sendall(f"{job.index} {job.count}\n".encode())
                peer.settimeout(wait + 5)  # rank 0's own wait began before
                answer = _line(peer)
        except OSError as error:
            problem = str(error)
        time.sleep(0.02)
    # JAX sleeps a second between its tries to reach the coordinator, which rank 0 starts now.
    while answer.startswith(_COMPLETE) and time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection((job.host, job.port), timeout=5):
            break
        time.sleep(0.02)
    asked = f"rank {job.index} of {job.count} asked rank 0 at {ADDRESS}={job.address!r}"
    return answer or f"{asked} for {wait:.0f} s in vain: {problem}"


def _line(peer: socket.socket) -> str:
    with peer.makefile("r") as lines:
        return lines.readline(1000).strip()


class Watchdog:
    """Ends every process of a job when one of them is silent, dead or has failed, and names that one.

    It watches while its block runs; all leave the block together, the first when the last is done. It speaks of

    - a rank that raised: at once, with its error;
    - one whose process was killed or crashed: at once, or after the deadline where its whole host is gone;
    - one that is stopped, or whose host is: after the deadline;
    - one whose main thread stays in a stage which the others have left: after the deadline, counted from its last
      `beat`; so stages are the same in all, and each has the deadline for itself, compilation included;
    - all, where none moves for the deadline.

    A rank that this watchdog ends itself first prints where its main thread is, if it is the one at fault. An error
    that another rank may have caused, as a connection that closed, only leaves the block when no other is at fault.
    Where there is one process it does nothing.

    Args:
      folder: of the run, which every host sees; made where missing. Signs of life are written below it, in a folder of
        this job alone, which goes once all have left the block without an error.
      deadline: seconds.

    Raises:
      ConfigError: a deadline shorter than a few signs of life take, or as long as JAX's own.
    """

    _turns = itertools.count()  # of this process: the same in all

    def __init__(self, folder: Path, deadline: float = 300.0):
        least, most = DEADLINES_S
        if not least <= deadline <= most:
            refuse("deadline", deadline, f"must be from {least} to {most} seconds", 300.0)
        self._folder, self._deadline = folder, deadline
        self._program: subprocess.Popen[bytes] | None = None
        self._says: dict[str, Any] = dict(beats=0, stage="start", state=RUNS, said="")
        self._news, self._answered = threading.Event(), threading.Event()
        self._sending, self._over = threading.Lock(), False

    def beat(self, stage: str) -> None:
        """The main thread enters a stage. Costs microseconds."""
        self._says = self._says | dict(beats=self._says["beats"] + 1, stage=stage[:200])
        self._news.set()

    def __enter__(self) -> Watchdog:
        if jax.process_count() == 1:
            return self
        folder = self._folder / f"signs_of_life-{_name_of_job()}-{next(self._turns)}"
        folder.mkdir(parents=True, exist_ok=True)
        what = (folder, jax.process_index(), jax.process_count(), self._deadline, os.getpid())
        self._program = subprocess.Popen(
            [sys.executable, "-I", "-S", watcher.__file__, *map(str, what)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        _start(self._tell)
        _start(self._listen)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._program is None:
            return
        if error is None:
            self._say(DONE)
            self._answered.wait()
        elif _may_be_anothers(error):
            self._say(LOST, error)
            self._answered.wait(2 * LOOK_S)
        else:
            self._say(FAILED, error)
        self._over = True
        if error is not None:  # the program keeps the error for the others to read
            _start(_end_soon, error)
            return
        assert self._program.stdin
        with self._sending:
            self._program.stdin.close()
        self._program.wait()

    def _say(self, state: str, error: BaseException | None = None) -> None:
        said = f"{type(error).__name__}: {error}".splitlines()[0][:300] if error else ""
        self._says = self._says | dict(state=state, said=said)
        self._send()

    def _send(self) -> None:
        assert self._program and self._program.stdin
        with self._sending, contextlib.suppress(OSError, ValueError):  # `_listen` sees that the program is gone
            self._program.stdin.write(json.dumps(self._says).encode() + b"\n")
            self._program.stdin.flush()

    def _tell(self) -> None:
        while not self._over:
            self._send()
            time.sleep(TICK_S / 20)  # of fast stages some are left out
            self._news.wait(TICK_S)
            self._news.clear()

    def _listen(self) -> None:
        assert self._program and self._program.stdout
        with self._program.stdout as lines:
            for line in lines:
                word, *code = line.split()
                if word == b"end":
                    _end(int(code[0]))
                self._answered.set()
        if not self._over:
            print("the program that watches this process is gone; this process ends", file=sys.stderr)
            _end(AT_FAULT)


def _start(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, name=f"watchdog {work.__name__}", daemon=True).start()


def _may_be_anothers(error: BaseException) -> bool:
    """Whether another process' end can have caused an error, or what that one came from."""
    cause: BaseException | None = error
    while cause is not None:
        of_runtime = isinstance(cause, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(cause)
        if of_runtime or LEFT_WAITING.search(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _end(code: int) -> None:
    """Ends this process at once; JAX would wait for the others."""
    if code == AT_FAULT:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        print(
            f"rank {jax.process_index()}: its main thread is at:\n" + "".join(traceback.format_stack(frame)),
            file=sys.stderr,
        )
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _end_soon(error: BaseException) -> None:
    """Leaves time to say what went wrong."""
    time.sleep(GRACE_S + (LAST_S if jax.process_index() == 0 else 0))
    code = error.code if isinstance(error, SystemExit) else 1
    os._exit(code if isinstance(code, int) else 1)
