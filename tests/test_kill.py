"""A run that is killed again and again ends as one that never was: the same losses of every step, the same weights.

Processes are killed with SIGKILL at seeded random moments: while they start, between steps, and while checkpoints are
written.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import _test_flags

from _train_progress import FILE, read_records
from jax_ep.training.loop import CHECKPOINTS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
KILLS, STARTING = 10, 2  # of them before the first step
STEPS = 600
LIMIT_S = 300.0
START, STEP = b'"kind": "start"', b'"kind": "step"'


@pytest.fixture
def start(tmp_path):
    """start(folder): a process of scripts/train.py on a small text, with programs compiled once for all of them."""
    text = tmp_path / "text.txt"
    rng = random.Random(3)
    text.write_text(" ".join(rng.choice(["def", "return", "x", "y", "(", ")", ":\n"]) for _ in range(2000)))
    flags = _test_flags("").replace("device_count=8", "device_count=2")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    config = [f"steps={STEPS}", "evaluate_every=100", "checkpoint_every=8"]
    started: list[subprocess.Popen[str]] = []

    def start(folder: Path) -> subprocess.Popen[str]:
        command = [sys.executable, str(ROOT / "scripts/train.py"), "--config", str(ROOT / "tests/tiny_training.py")]
        command += [*config, "--data", str(text), "--out", str(folder)]
        with (tmp_path / f"{folder.name}.log").open("a") as log:
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def newest_checkpoint(folder: Path) -> int:
    return max((int(path.name) for path in (folder / CHECKPOINTS).glob("*") if path.name.isdecimal()), default=0)


def wait_for_steps(folder: Path, process: subprocess.Popen[str], starts: int, steps: int) -> None:
    """Until progress.jsonl has had so many starts, and so many steps since the last."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end and process.poll() is None:
        parts = read(folder / FILE).split(START)
        if len(parts) > starts and parts[-1].count(STEP) >= steps:
            return
        time.sleep(0.002)
    pytest.fail(f"the run did not come to {steps} steps: {(folder.parent / f'{folder.name}.log').read_text()[-2000:]}")


def test_killed_ten_times_it_ends_as_if_it_had_not_been(tmp_path, start):
    seed = int(os.environ.get("KILL_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"KILL_SEED={seed}")
    rng = random.Random(seed)
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    whole = start(unbroken)
    wait_for_steps(unbroken, whole, 1, 1)  # what it compiles, the others find
    early = rng.sample(range(1, KILLS), STARTING)
    begun, startup = time.monotonic(), 0.0
    for kill in range(KILLS):
        starts, newest = read(broken / FILE).count(START), newest_checkpoint(broken)
        launched = time.monotonic()
        process = start(broken)
        if kill in early:
            time.sleep(rng.uniform(0.2, 1) * startup)
        else:
            wait_for_steps(broken, process, starts + 1, 1)
            startup = time.monotonic() - launched
            assert [r["step"] for r in read_records(broken / FILE) if r["kind"] == "start"][-1] == newest
            wait_for_steps(broken, process, starts + 1, rng.randrange(1, 40))
            time.sleep(rng.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, f"kill {kill} came too late: the run had ended"
        print(f"kill {kill} at {time.monotonic() - begun:.1f} s, {read(broken / FILE).count(STEP)} steps done")
    assert start(broken).wait(LIMIT_S) == 0, (tmp_path / "broken.log").read_text()[-2000:]
    assert whole.wait(LIMIT_S) == 0, (tmp_path / "unbroken.log").read_text()[-2000:]
    print(f"all took {time.monotonic() - begun:.1f} s")

    told, wanted = (read_records(folder / FILE) for folder in (broken, unbroken))
    starts_at = [record for record in told if record["kind"] == "start"]
    print([record["step"] for record in starts_at])
    assert len({record["step"] for record in starts_at}) >= 3 and starts_at[-1]["step"] > 0
    for record in starts_at:
        assert not any("not whole" in line for line in record["says"])
        assert not record["step"] or record["says"][-1].endswith(f"{CHECKPOINTS}/{record['step']}")
    of = lambda records, kind: [(record["step"], record["loss"]) for record in records if record["kind"] == kind]
    assert [step for step, _ in of(told, "step")] == list(range(1, STEPS + 1))
    assert of(told, "step") == of(wanted, "step")
    assert of(told, "validation") == of(wanted, "validation")
    weights = [(folder / "model/model.safetensors").read_bytes() for folder in (broken, unbroken)]
    assert weights[0] == weights[1]
