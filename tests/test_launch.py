"""Real processes: the rank at fault is named, by the watchdog and by the launcher, and none is left.

This file is also the script that is launched here.
"""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from processes import PATHS, TESTS, assert_none_left, run_script, with_argument

import launch
from _common import UsageError
from _launch import RankFailure
from jax_ep.distributed import INDEX, Watchdog, join

pytestmark = pytest.mark.slow

NAMED_S = 8  # deadline of the watchdog below


def job(folder, culprit, how):
    """Two ranks; the culprit does not enter a collective, but does `how` instead."""
    rank = int(os.environ[INDEX])
    join(60)
    with Watchdog(Path(folder), NAMED_S if how != "interrupted" else 600) as watchdog:
        watchdog.beat("meet")
        multihost_utils.sync_global_devices("met")
        watchdog.beat("stumble")
        if rank == culprit:
            time.sleep(0.5)  # until the others wait for it
            (Path(folder) / "stumbles").write_text("")
            {
                "works": lambda: None,
                "sleeps": lambda: time.sleep(600),
                "interrupted": lambda: time.sleep(600),
                "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
                "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
                "first killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
                "raises": lambda: int("on purpose"),
                "exits": lambda: os._exit(0),
                "leaves": lambda: None,
            }[how]()
        if rank != culprit or how != "leaves":
            watchdog.beat("gather")
            print("sum", multihost_utils.process_allgather(np.float32(rank + 1)).sum(), jax.device_count())


# how: culprit, what became of it, what the watchdog says; it has no say where JAX has ended all.
ENDS = {
    "sleeps": (1, "was found at fault", "hangs: in stage 2 'stumble' for"),
    "stopped": (1, "was killed by SIGKILL", "is silent: no sign of life for"),
    "killed": (1, "was killed by SIGKILL", "is gone: its process was killed, crashed or left in stage 2 'stumble'"),
    "first killed": (0, "was killed by SIGKILL", None),
    "raises": (1, "exited with code 1", "failed in stage 2 'stumble': ValueError: invalid literal for int()"),
    "exits": (1, "exited with code 0", "is gone: its process was killed, crashed or left in stage 2 'stumble'"),
    "leaves": (1, "was found at fault", "left early, after stage 2 'stumble', while others are in stage 3 'gather'"),
}
# How scripts/launch.py itself is ended; by itself where None.
LAUNCHES = {"works": None, "SIGINT": signal.SIGINT, "SIGKILL": signal.SIGKILL}
LIMIT_S = 150  # until a launcher has ended, on a busy machine


def failure(folder, how):
    """Runs `job` to its bad end, and returns what that is called."""
    with pytest.raises(RankFailure) as caught:
        run_script([__file__, str(folder), str(ENDS[how][0]), how], 2, 2, folder)
    return caught.value


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """name -> folder, and a failure to be or a launcher. All at once, as they sleep most of the time."""
    folders = {name: tmp_path_factory.mktemp(name.replace(" ", "_")) for name in (*ENDS, *LAUNCHES)}
    launchers = []
    with ThreadPoolExecutor(len(ENDS)) as pool:
        started = {how: (folders[how], pool.submit(failure, folders[how], how)) for how in ENDS}
        for name in LAUNCHES:
            how = "works" if name == "works" else "interrupted"
            command = [TESTS.parent / "scripts" / "launch.py", "--devices", "2", __file__, folders[name], "1", how]
            with (folders[name] / "out").open("w") as out:
                variables = os.environ | PATHS
                launchers.append(subprocess.Popen([sys.executable, *command], env=variables, stdout=out, stderr=out))
            started[name] = folders[name], launchers[-1]
        try:
            yield started
        finally:
            for launcher in launchers:
                launcher.kill()
                launcher.wait()


@pytest.mark.parametrize("name", LAUNCHES)
def test_nothing_outlives_the_launcher(jobs, name):
    folder, launcher = jobs[name]
    if LAUNCHES[name] is not None:
        limit = time.monotonic() + LIMIT_S
        while not (folder / "stumbles").exists():
            assert launcher.poll() is None and time.monotonic() < limit, (folder / "out").read_text()
            time.sleep(0.1)
        there = with_argument(folder)
        assert len(there) == 5  # the launcher, two ranks, two that watch
        for pid in there:
            if b"watcher.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGTERM)  # as a scheduler sends to all; it is for the ranks
        time.sleep(0.5)
        assert with_argument(folder) == there
        launcher.send_signal(LAUNCHES[name])
    want = {"works": (0, "sum 3.0 4\n"), "SIGINT": (130, "launch.py: interrupted; all ranks were ended\n")}
    assert (launcher.wait(LIMIT_S), (folder / "out").read_text()) == want.get(name, (-signal.SIGKILL, ""))
    assert_none_left(folder)


@pytest.mark.parametrize("how", ENDS)
def test_the_rank_at_fault_is_named_and_none_is_left(jobs, how):
    culprit, became, verdict = ENDS[how]
    folder, ending = jobs[how]
    failed = ending.result()
    said = str(failed)
    assert failed.ranks == [culprit], said
    assert f"the job failed: rank {culprit} is at fault" in said
    assert f"-> rank {culprit} of 2 {became}" in said
    if verdict is not None:
        assert re.search(rf"their watchdog: rank {culprit} \(host .*, pid \d+\) {re.escape(verdict)}", said), said
    if how == "sleeps":
        assert re.search(r"rank 1: its main thread is at:.*in <lambda>", said, re.DOTALL), said
    if how == "raises":
        assert "Traceback" in said
    assert_none_left(folder)


def test_launch_names_the_rank_at_fault(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint('here')\nsys.exit(3 * int(os.environ['JAX_PROCESS_ID']))\n")
    with pytest.raises(SystemExit) as caught:
        launch.main(["--processes", "3", "--verbose", str(script)])
    assert caught.value.code == 1
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[1] here", "[2] here", "here"]
    assert re.match(r"launch.py: the job failed: rank [12] is at fault\n", err)
    assert "-> rank 1 of 3 exited with code 3" in err or "-> rank 2 of 3 exited with code 6" in err


def test_launch_ends_by_its_deadline(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text("import os, time\nif os.environ['JAX_PROCESS_ID'] == '1': time.sleep(600)\n")
    with pytest.raises(SystemExit):
        launch.main(["--deadline", "2", str(script)])
    err = capfd.readouterr().err
    assert "the job was not done 2 s after its start: rank 1 is at fault" in err
    assert "-> rank 1 of 2 runs" in err and 'script.py", line 2 in <module>' in err
    assert_none_left(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--processes", "0", __file__], "processes=0: must be at least 1"),
        (["--devices", "0", __file__], "devices=0: must be at least 1"),
        (["--deadline", "nan", __file__], "deadline=nan: must be seconds above 0"),
        (["scripts/no_such.py"], "script='scripts/no_such.py': there is no such file; scripts/train.py works"),
        (["--verbos", __file__], "--verbos"),
        ([], "script"),
    ],
)
def test_launching_nothing_is_refused(arguments, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        launch.main(arguments)


if __name__ == "__main__":
    job(sys.argv[1], int(sys.argv[2]), sys.argv[3])
