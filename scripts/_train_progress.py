"""What a run has told so far: progress.jsonl, one JSON object a line, and the lines that a person reads meanwhile.

Three kinds of records, in the order of their steps: "start" (each start of the run), "step", "validation".
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from _common import UsageError
from _compare_report import size

Record = dict[str, Any]
FILE = "progress.jsonl"
_BEGINS = b'{"kind": "start"'
_QUIET_S = 5.0  # without a terminal, a line of a plain step at most this often
_COLUMNS = (
    ("step", 8),
    ("loss", 9),
    ("validation", 12),
    ("tokens/s", 10),
    ("TFLOP/s/dev", 13),
    ("load entropy", 14),
    ("max/mean", 10),
    ("worst layer", 13),
    ("dropped", 9),
    ("rounds", 8),
    ("memory", 10),
    ("skipped", 9),
)


def refuse_foreign(folder: Path) -> None:
    """Raises UsageError where `folder` has a progress.jsonl that no run began: a run would cut it off."""
    path = folder / FILE
    try:
        with path.open("rb") as file:
            ours = _BEGINS.startswith(file.read(len(_BEGINS)))  # a start, half of one, or nothing
    except FileNotFoundError:
        return
    except OSError as error:
        rule = f"{path} cannot be read: {error.strerror}"
        raise UsageError(f"out={str(folder)!r}: {rule}; --out another folder works") from None
    if not ours:
        raise UsageError(f"out={str(folder)!r}: {path} is not of a run of train.py; --out another folder works")


class ProgressFile:
    """DIR/progress.jsonl, held by one run at a time."""

    def __init__(self, folder: Path):
        """Opens it, made where missing; what it holds stays until `start`.

        Raises:
          UsageError: another run holds it, or it cannot be written to.
        """
        self.path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b", buffering=0)
        except OSError as error:
            raise _unwritable(folder, error) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            rule = "another run is writing there; --out another folder works"
            raise UsageError(f"out={str(folder)!r}: {rule}") from None
        except OSError:  # file systems without locks
            pass

    def add(self, record: Record) -> None:
        """Appends a line. A "start" cuts off what comes after its step, which will be done again."""
        try:
            if record["kind"] == "start":
                self._file.truncate(_end(self.path, record["step"]))
            line = (json.dumps(_finite(record), allow_nan=False) + "\n").encode()
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise _unwritable(self.path.parent, error) from None

    def close(self) -> None:
        self._file.close()


def _unwritable(folder: Path, error: OSError) -> UsageError:
    rule = f"{FILE} cannot be written: {error.strerror}; --out a folder with room works"
    return UsageError(f"out={str(folder)!r}: {rule}")


def read_records(path: Path) -> list[Record]:
    """The whole lines of a progress.jsonl, up to the first that is none."""
    return [record for record, _ in _lines(path)]


def _end(path: Path, step: int) -> int:
    """Bytes that the records of steps up to `step` take."""
    end = 0
    for record, after in _lines(path):
        if record["step"] > step:
            break
        end = after
    return end


def _lines(path: Path) -> Iterator[tuple[Record, int]]:
    """Records and where each ends, until the file does or a line is broken: the last one of a killed run may be."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line)
            try:
                record = json.loads(line)
            except ValueError:
                return
            if not line.endswith(b"\n") or not isinstance(record, dict) or not isinstance(record.get("step"), int):
                return
            yield record, end


def _finite(value: Any) -> Any:
    """JSON has no word for NaN and infinities: null."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Display:
    """Lines of a table as a run goes on, and a bar below them where a terminal is there."""

    def __init__(self, console: Console, steps: int):
        """`steps`: of the whole run."""
        self._console, self._steps = console, steps
        self._step: Record | None = None  # not shown yet
        self._validation: float | None = None
        self._said = 0.0  # when the last line was; 0: none yet
        self._bar: Progress | None = None
        if console.is_terminal:
            parts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*parts, console=console, transient=True)
            self._task = self._bar.add_task("compiling", total=steps)

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._flush()
            if self._bar is not None:
                self._bar.stop()

    def add(self, record: Record) -> None:
        """Steps that were skipped and those with a validation have a line; others where some time has passed."""
        kind = record["kind"]
        if kind == "start":
            for line in record["says"]:
                self._console.print(line, highlight=False, soft_wrap=True)
            self._move(record["step"], "compiling")
        elif kind == "validation":
            self._validation = record["loss"]
            self._flush()
        else:
            if self._step is not None and (self._step["skipped"] or time.monotonic() - self._said > _QUIET_S):
                self._flush()
            self._step = record  # a validation may follow
            self._move(record["step"], f"loss {_number(record['loss'], 4)}, {record['tokens_per_s']:.0f} tokens/s")

    def _move(self, step: int, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)

    def _flush(self) -> None:
        """The line of the last step, if it has not been shown, with the validation that followed it."""
        if self._step is None:
            return
        if not self._said:
            self._console.print("".join(name.rjust(width) for name, width in _COLUMNS), style="bold", soft_wrap=True)
        cells = _cells(self._step, self._validation)
        line = "".join(cell.rjust(width) for cell, (_, width) in zip(cells, _COLUMNS, strict=True))
        self._console.print(line, highlight=False, soft_wrap=True)
        if self._step["skipped"]:
            skipped = f"    step {self._step['step']} was skipped: {self._step['where']}"
            self._console.print(skipped, highlight=False, soft_wrap=True)
        self._said, self._step, self._validation = time.monotonic(), None, None


def _cells(step: Record, validation: float | None) -> list[str]:
    return [
        str(step["step"]),
        _number(step["loss"], 4),
        "" if validation is None else _number(validation, 4),
        f"{step['tokens_per_s']:.0f}",
        f"{step['tflops_per_device']:.3g}",
        _number(step["load_entropy"], 3),
        _number(step["load_max_over_mean"], 2),
        str(step["load_worst_layer"]),
        str(step["dropped_rows"]),
        str(step["rounds"]),
        size(step["peak_bytes"]),
        str(step["skipped_steps"]),
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"
