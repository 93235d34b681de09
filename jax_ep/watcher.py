"""Watches the ranks of a job for one of them: a small program, without JAX, beside each rank's process.

It outlives that process, whatever ends it: JAX aborts all processes when rank 0's is gone. It tells the others what its
rank is doing, in a file of one line that it writes anew every second, reads theirs, and names the one at fault. Files
are only ever compared with what they were before, on this process' own clock: hosts need not agree on the time. The
folder is of one watchdog's block of one job. After a good end each removes its file, and the last of them the folder.

`jax_ep.distributed.Watchdog` starts it, writes lines of {"beats", "stage", "state", "said"} to its standard input, the
end of which is the end of that process, and reads verdicts from its standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TICK_S = 1.0  # between two signs of life
SETTLE_S = 2.0  # from another's failure to the verdict: this rank may be about to fail or to end by itself
QUIET_S = 5.0  # a silence that says enough once something is known to be wrong
LOOK_S = 12.0  # for the rank at fault, after an error that may be another's doing; for the others, after a good end
LINGER_S = 5.0  # that last words are kept alive for the others to read
KILL_S = 3.0  # that a process told to end may take
LAST_S = 2.0  # that rank 0 stays longer: JAX aborts the others when it goes
ENDED, AT_FAULT = 75, 76  # exit codes: another rank was at fault, this one was

# States of a rank. DONE: it left the watchdog's block and waits for the others. LOST: it raised what another may have
# caused. DIED: its process ended, which rank 0's end may have caused. JUDGED: it found the rank at fault, and ends.
RUNS, DONE, FAILED, LOST, DIED, GONE, JUDGED = "runs", "done", "failed", "lost", "died", "gone", "judged"


class Sign(NamedTuple):
    """What the file of a rank says.

    Attributes:
      tick: grows while the rank's process can run Python.
      beats: stages that its main thread has entered; `stage`: the last of them.
      state: one of the above; `said`: the error, or the verdict.
      blames: ranks at fault, by its verdict.
      host, pid: of the rank's process.
      over: it has seen that all are done, and needs no other's file any more.
    """

    tick: int = 0
    beats: int = 0
    stage: str = "start"
    state: str = RUNS
    said: str = ""
    blames: Sequence[int] = ()
    host: str = ""
    pid: int = 0
    over: bool = False

    @property
    def progress(self) -> tuple[int, bool]:
        """Grows from stage to stage."""
        return self.beats, self.state == DONE

    @property
    def where(self) -> str:
        return f"stage {self.beats} {self.stage!r}"


class Verdict(NamedTuple):
    """What the watching came to.

    Attributes:
      line: names the ranks at fault and says why. Empty where all ranks are done, or nobody is found.
      ranks: at fault.
      all_done: every rank has left the block.
    """

    line: str
    ranks: Sequence[int] = ()
    all_done: bool = False


class _Seen:
    """What is known of a rank, and since when."""

    def __init__(self, sign: Sign | None, now: float):
        self.sign, self.of_this_job = sign, False
        self.ticked = self.moved = now
        self.ill: float | None = None

    def update(self, sign: Sign | None, now: float) -> None:
        if sign is None or sign == self.sign:
            return
        before = self.sign if self.of_this_job else None
        self.ticked = now
        if before is None or (sign.progress, sign.state) != (before.progress, before.state):
            self.moved = now
        self.sign, self.of_this_job = sign, True
        if self.ill is None and sign.state in (FAILED, GONE):
            self.ill = now

    @property
    def now(self) -> Sign | None:
        """The sign, if it is of this job."""
        return self.sign if self.of_this_job else None


class Watch:
    """Finds the rank at fault in the signs of all. Has neither files nor a clock: times are seconds of any clock.

    Args:
      rank: whose watch this is; count: of ranks.
      deadline: seconds that a rank may stand still.
      now: the time.
      signs: by rank, what the files say before this job is known to have written to them.
    """

    def __init__(self, rank: int, count: int, deadline: float, now: float, signs: Mapping[int, Sign | None]):
        self._rank, self._deadline = rank, deadline
        self._seen = {other: _Seen(signs.get(other), now) for other in range(count)}
        self._trouble: float | None = None  # since when this rank is LOST or DIED
        self._first_tick = 0  # rank 0's, then

    def look(self, now: float, signs: Mapping[int, Sign | None]) -> Verdict | None:
        """Takes in what the files say now; None where there is nothing to say yet."""
        for rank, seen in self._seen.items():
            seen.update(signs.get(rank), now)
        own = self._seen[self._rank].now
        state = own.state if own else RUNS
        if state in (LOST, DIED) and self._trouble is None:
            self._trouble, self._first_tick = now, self._tick_of_coordinator()
        return (
            self._judged()
            or self._failed(now)
            or self._gone(now)
            or self._silent(now)
            or self._stuck(now)
            or self._done()
            or self._nobody(now, state)
        )

    def _judged(self) -> Verdict | None:
        """Another's verdict is this rank's too."""
        for seen in self._seen.values():
            if seen.now and seen.now.state == JUDGED:
                return Verdict(seen.now.said, seen.now.blames)
        return None

    def _failed(self, now: float) -> Verdict | None:
        failed = self._ill(FAILED, now)
        say = lambda rank, sign: f"{self._name(rank)} failed in {sign.where}: {sign.said}"
        return self._verdict(failed, say)

    def _gone(self, now: float) -> Verdict | None:
        gone = self._ill(GONE, now)
        say = lambda rank, sign: f"{self._name(rank)} is gone: its process was killed, crashed or left in {sign.where}"
        return self._verdict([0] if 0 in gone else gone, say)

    def _ill(self, state: str, now: float) -> list[int]:
        settled = 0.0 if self._trouble is not None else SETTLE_S
        return [
            rank
            for rank, seen in self._seen.items()
            if seen.ill is not None and now - seen.ill >= settled and seen.sign and seen.sign.state == state
        ]

    def _silent(self, now: float) -> Verdict | None:
        in_trouble = min(self._deadline, QUIET_S) if self._trouble is not None else self._deadline
        late = [
            rank
            for rank, seen in self._seen.items()
            if now - seen.ticked > (in_trouble if seen.of_this_job else self._deadline)
        ]

        def say(rank: int, sign: Sign) -> str:
            still = now - self._seen[rank].ticked
            if not self._seen[rank].of_this_job:
                return f"rank {rank} has not come: no sign of life for {still:.1f} s in the folder that all hosts share"
            return f"{self._name(rank)} is silent: no sign of life for {still:.1f} s, last in {sign.where}"

        return self._verdict(late, say)

    def _stuck(self, now: float) -> Verdict | None:
        """Those behind all others, or all where none is, once they have stood still for long enough."""
        signs = {rank: seen.now or Sign(beats=-1) for rank, seen in self._seen.items()}
        least, most = min(s.progress for s in signs.values()), max(s.progress for s in signs.values())
        behind = [rank for rank, sign in signs.items() if sign.progress == least]
        still = now - max(self._seen[rank].moved for rank in behind)
        if still <= self._deadline:
            return None
        if least == most:
            return Verdict(f"no rank has moved for {still:.1f} s: all are in {signs[0].where}", tuple(signs))
        ahead = next(sign for sign in signs.values() if sign.progress == most)

        def say(rank: int, sign: Sign) -> str:
            if sign.state == DONE:
                return f"{self._name(rank)} left early, after {sign.where}, while others are in {ahead.where}"
            return f"{self._name(rank)} hangs: in {sign.where} for {still:.1f} s, while others are in {ahead.where}"

        return self._verdict(behind, say)

    def _done(self) -> Verdict | None:
        all_done = all(seen.now and seen.now.state == DONE for seen in self._seen.values())
        return Verdict("", all_done=True) if all_done else None

    def _nobody(self, now: float, state: str) -> Verdict | None:
        """This rank itself, where nobody else can be at fault."""
        if self._trouble is None:
            return None
        alive_since = self._seen[0].of_this_job and self._tick_of_coordinator() >= self._first_tick + 2
        if now - self._trouble > LOOK_S or (state == DIED and alive_since):
            return Verdict("", (self._rank,))
        return None

    def _verdict(self, ranks: Sequence[int], say: Callable[[int, Sign], str]) -> Verdict | None:
        if not ranks:
            return None
        lines = [say(rank, self._seen[rank].sign or Sign()) for rank in ranks]
        return Verdict("; ".join(lines), tuple(ranks))

    def _name(self, rank: int) -> str:
        sign = self._seen[rank].sign or Sign()
        return f"rank {rank} (host {sign.host}, pid {sign.pid})"

    def _tick_of_coordinator(self) -> int:
        sign = self._seen[0].sign
        return sign.tick if sign else 0


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def read(folder: Path, rank: int) -> Sign | None:
    """What a rank's file says; None where there is none, or it is being written."""
    try:
        return Sign(**json.loads(file_of(folder, rank).read_text()))
    except (OSError, ValueError, TypeError):
        return None


class _Clock:
    """Seconds during which this process could run: those for which it, or the machine, was stopped do not count."""

    def __init__(self) -> None:
        self._last, self.now = time.monotonic(), 0.0

    def advance(self) -> float:
        last, self._last = self._last, time.monotonic()
        self.now += min(self._last - last, 2 * TICK_S)
        return self.now


class _Inbox:
    """What the rank's process says, line by line, until it ends."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}
        self.fresh, self.ended = False, False
        self._rest = b""

    def wait(self, seconds: float) -> None:
        if self.ended:
            time.sleep(seconds)
        elif select.select([0], [], [], seconds)[0]:
            data = os.read(0, 65536)
            self.ended = not data
            *lines, self._rest = (self._rest + data).split(b"\n")
            if lines:
                self.last, self.fresh = json.loads(lines[-1]), True


class _Program:
    """The watching of one rank, from its start to its end."""

    def __init__(self, folder: Path, rank: int, count: int, deadline: float, pid: int):
        self._folder, self._rank, self._others = folder, rank, [r for r in range(count) if r != rank]
        self._pid = pid
        self._clock, self._inbox = _Clock(), _Inbox()
        self._sign = Sign(host=socket.gethostname(), pid=pid)
        self._watch = Watch(rank, count, deadline, self._clock.now, self._read())
        self._all_done = self._complained = False

    def run(self) -> None:
        while not (self._all_done and self._inbox.ended):
            self._take_in()
            if self._sign.state in (FAILED, GONE):
                return self._linger()
            verdict = self._watch.look(self._clock.advance(), self._read() | {self._rank: self._sign})
            if self._all_done or verdict is None:
                continue
            if verdict.line:
                return self._end(verdict)
            if verdict.all_done:
                self._all_done = True
                self._sign = self._sign._replace(over=True)
                self._write()
                self._answer("done")
            else:  # this rank itself is at fault; if its process is there, it says so
                self._sign = self._sign._replace(state=GONE if self._inbox.ended else FAILED)
                self._answer("nobody")
        self._remove()

    def _take_in(self) -> None:
        """Waits for a tick, or for what should not wait so long; then writes the file."""
        known, until = self._inbox.ended, time.monotonic() + TICK_S
        while (left := until - time.monotonic()) > 0:
            self._inbox.wait(left)
            if self._inbox.ended != known or (not known and self._inbox.last.get("state", RUNS) != self._sign.state):
                break
        if self._inbox.fresh:
            self._inbox.fresh = False
            self._sign = self._sign._replace(tick=self._sign.tick + 1, **self._inbox.last)
        elif self._inbox.ended and not self._all_done:
            self._sign = self._sign._replace(tick=self._sign.tick + 1)
            if self._sign.state in (RUNS, LOST, DONE):
                self._sign = self._sign._replace(state=DIED if self._rank else GONE)
        self._write()

    def _read(self) -> dict[int, Sign | None]:
        return {rank: read(self._folder, rank) for rank in self._others}

    def _write(self) -> None:
        try:
            file_of(self._folder, self._rank).write_text(json.dumps(self._sign._asdict()) + "\n")
        except OSError as error:  # the others hear nothing of this rank now, and will say so
            if not self._complained:
                self._complained = True
                self._print(f"cannot be watched: {error}")

    def _remove(self) -> None:
        """Removes the file once no other needs it. One that is away was removed: its rank has seen all others over."""
        until = time.monotonic() + LOOK_S
        while not all((s and s.over) or not file_of(self._folder, r).exists() for r, s in self._read().items()):
            if time.monotonic() > until:
                return
            time.sleep(TICK_S / 10)
        with contextlib.suppress(OSError):
            file_of(self._folder, self._rank).unlink()
            self._folder.rmdir()

    def _answer(self, what: str) -> None:
        with contextlib.suppress(OSError):
            os.write(1, f"{what}\n".encode())

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"rank {self._rank} {text}\n".encode())

    def _end(self, verdict: Verdict) -> None:
        """Says the verdict, and ends the rank's process."""
        guilty = self._rank in verdict.ranks
        self._print(f"ends: {verdict.line}")
        self._sign = self._sign._replace(state=JUDGED, said=verdict.line, blames=verdict.ranks)
        self._write()
        if self._rank == 0 and not self._inbox.ended:
            time.sleep(LAST_S)
        self._answer(f"end {AT_FAULT if guilty else ENDED}")
        until = time.monotonic() + KILL_S
        while not self._inbox.ended and time.monotonic() < until:
            self._inbox.wait(0.1)
        if not self._inbox.ended and os.getppid() == self._pid:
            os.kill(self._pid, signal.SIGKILL)
        self._linger()

    def _linger(self) -> None:
        """Keeps the last words alive until the others have surely read them."""
        until = time.monotonic() + LINGER_S
        while time.monotonic() < until:
            self._sign = self._sign._replace(tick=self._sign.tick + 1)
            self._write()
            time.sleep(TICK_S)


def main(argv: Sequence[str]) -> None:
    for signum in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # they are for the rank's process, which this outlives
        signal.signal(signum, signal.SIG_IGN)
    folder, rank, count, deadline, pid = argv
    _Program(Path(folder), int(rank), int(count), float(deadline), int(pid)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
