"""scripts/compare.py in this process, on its simulated devices, with the bench that it makes kept."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import compare


@dataclasses.dataclass
class Run:
    """What one call of compare.py wrote, and the bench that it made."""

    record: dict[str, Any]
    png: bytes
    stdout: str
    bench: Any


def run_compare(folder: Path, name: str, bench: str, arguments: Sequence[str]) -> Run:
    """One short run in `folder`, which writes out/NAME/NAME.json and NAME.png and no more.

    Args:
      folder: an empty one, where it is started.
      name: of the comparison.
      bench: what compare.py calls the class of its bench.
      arguments: further ones.
    """
    made: list[Any] = []

    class Recorded(getattr(compare, bench)):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    (folder / "some.txt").write_bytes(bytes(range(32, 127)) * 3)
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.chdir(folder)
        patch.setenv("XLA_FLAGS", "")
        patch.setattr(compare, bench, Recorded)
        compare.main([*arguments, "--text", "some.txt", "--runs", "2", "--warmup", "0"])
    files = folder / "out" / name
    assert sorted(file.name for file in files.iterdir()) == [f"{name}.json", f"{name}.png"]
    record = json.loads((files / f"{name}.json").read_text())
    return Run(record, (files / f"{name}.png").read_bytes(), out.getvalue(), *made)
