"""scripts/train.py on two and four processes gives the losses of one, and ends when a rank dies in training."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import TESTS, assert_none_left, run_script

import train
from _launch import RankFailure
from _train_progress import FILE
from jax_ep.watcher import read

pytestmark = pytest.mark.slow

STEPS = 6
LAUNCHES = {"2x2": (2, 2), "4x1": (4, 1)}  # processes, devices of each
KILLED = "2x2", 1  # this rank of it, after STEPS of many steps


def arguments(folder, steps):
    """The learning rate of a step must not depend on how many there are."""
    mesh = ("expert_parallel=2", "data_parallel=2")
    often = () if steps == STEPS else ("evaluate_every=1000000", "checkpoint_every=1000000")
    files = ("--config", str(TESTS / "tiny_training.py"), "--data", str(TESTS.parent / "jax_ep" / "layer.py"))
    return [*files, "--out", str(folder), "schedule=constant", f"steps={steps}", *mesh, *often]


def records(folder, kind):
    """step -> record."""
    if not (folder / FILE).exists():
        return {}
    lines = (folder / FILE).read_text().split("\n")[:-1]
    return {record["step"]: record for record in map(json.loads, lines) if record["kind"] == kind}


def run(name, folder):
    """Trains; where a rank is killed, returns what that is called."""
    to_kill = [KILLED[1]] if name == KILLED[0] else []

    def kill():
        if to_kill and len(records(folder, "step")) >= STEPS:
            os.kill(read(next(folder.glob("signs_of_life-*")), to_kill.pop()).pid, signal.SIGKILL)

    command = [str(TESTS.parent / "scripts" / "train.py"), *arguments(folder, 1000000 if to_kill else STEPS)]
    try:
        run_script(command, *LAUNCHES[name], folder.parent, every=kill)
    except RankFailure as failure:
        return failure
    return None


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """name -> folder, and what became of it. On one process, which is this one, as "1x4"."""
    folders = {name: tmp_path_factory.mktemp(name) / "out" for name in (*LAUNCHES, "1x4")}
    with ThreadPoolExecutor(len(LAUNCHES)) as pool:
        ends = {name: pool.submit(run, name, folders[name]) for name in LAUNCHES}
        train.main(arguments(folders["1x4"], STEPS))
        return {name: (folder, ends[name].result() if name in ends else None) for name, folder in folders.items()}


@pytest.mark.parametrize("name", LAUNCHES)
def test_losses_are_those_of_one_process(runs, name):
    folder, failure = runs[name]
    if name != KILLED[0]:
        assert failure is None, failure
        want, got = (records(f, "validation")[STEPS]["loss"] for f in (runs["1x4"][0], folder))
        assert got == pytest.approx(want, rel=1e-5)
        assert (folder / "train.json").exists()
    want, got = (records(f, "step") for f in (runs["1x4"][0], folder))
    assert list(want) == list(range(1, STEPS + 1)) and want[STEPS]["loss"] < want[1]["loss"] - 0.3
    for step in want:
        for figure in ("loss", "grad_norm"):
            assert got[step][figure] == pytest.approx(want[step][figure], rel=1e-5), (step, figure)
        assert got[step]["load_entropy"] == pytest.approx(want[step]["load_entropy"])


def test_a_rank_that_is_killed_in_training_is_named_and_none_is_left(runs):
    name, rank = KILLED
    failure = runs[name][1]
    assert failure is not None and failure.ranks == [rank]
    assert f"-> rank {rank} of 2 was killed by SIGKILL" in str(failure)
    assert f"their watchdog: rank {rank} (host" in str(failure) and "is gone: its process was killed" in str(failure)
    assert "rank 0 of 2 ended because of another rank" in str(failure)
    for name in LAUNCHES:
        assert_none_left(runs[name][0])
