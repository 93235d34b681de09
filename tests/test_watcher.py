"""What a rank's watch concludes from the signs of life of all, with a clock and files of the test's own; and what the
program that watches leaves of its files."""

import json
import os
import subprocess
import sys
import time

import pytest

from jax_ep import watcher
from jax_ep.watcher import (
    DIED,
    DONE,
    FAILED,
    GONE,
    JUDGED,
    LOOK_S,
    LOST,
    QUIET_S,
    RUNS,
    SETTLE_S,
    Sign,
    Verdict,
    Watch,
    file_of,
    read,
)

pytestmark = pytest.mark.slow

DEADLINE = 20


class Files:
    """The files of a job of three ranks, and rank 1's watch over them."""

    def __init__(self, folder, rank=1, before=None):
        self.folder, self.now = folder, 0.0
        self.signs = {r: Sign(host=f"h{r}", pid=100 + r) for r in range(3)}
        for r, text in (before or {}).items():
            file_of(folder, r).write_text(text)
        self.watch = Watch(rank, 3, DEADLINE, self.now, self.read())

    def read(self):
        return {r: read(self.folder, r) for r in range(3)}

    def say(self, rank, **changes):
        self.signs[rank] = self.signs[rank]._replace(**changes)

    def run(self, seconds, still=(), lost=(), steps=False):
        """Lets time pass, second by second, each a stage if `steps`. Files of ranks in `still` stay as they are, and
        those of ranks in `lost` away.

        Returns:
          the first verdict, or None.
        """
        for _ in range(seconds):
            self.now += 1
            for rank, sign in self.signs.items():
                if rank not in (*still, *lost):
                    self.say(rank, tick=sign.tick + 1, beats=sign.beats + steps)
                    file_of(self.folder, rank).write_text(json.dumps(self.signs[rank]._asdict()))
            verdict = self.watch.look(self.now, self.read())
            if verdict is not None:
                return verdict
        return None

    def beat(self, *ranks, stage, beats):
        for rank in ranks:
            self.say(rank, stage=stage, beats=beats)


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


def test_ranks_that_go_on_are_left_alone(files):
    for beats in range(1, 10):
        files.beat(0, 1, 2, stage="step", beats=beats)
        assert files.run(DEADLINE - 1) is None


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_without_signs_of_life_is_silent(files, rank):
    files.beat(0, 1, 2, stage="data", beats=0)
    assert files.run(5, steps=True) is None
    assert files.run(DEADLINE, still=[rank], steps=True) is None
    verdict = files.run(1, still=[rank], steps=True)
    assert verdict.ranks == (rank,)
    want = f"rank {rank} (host h{rank}, pid 10{rank}) is silent: no sign of life for 21.0 s, last in stage 5 'data'"
    assert verdict.line == want


def test_a_rank_that_never_comes_is_named(files):
    assert files.run(DEADLINE, lost=[2]) is None
    verdict = files.run(1, lost=[2])
    assert verdict.ranks == (2,)
    assert "rank 2 has not come: no sign of life for 21.0 s in the folder that all hosts share" in verdict.line


@pytest.mark.parametrize("state", ["failed", "gone", "judged", "done", "runs"])
def test_files_of_an_earlier_job_say_nothing(tmp_path, state):
    stale = json.dumps(Sign(tick=900, beats=50, stage="old", state=state, said="old", blames=(0,), pid=7)._asdict())
    files = Files(tmp_path, before=dict.fromkeys(range(3), stale))
    assert files.run(DEADLINE, still=[2]) is None
    verdict = files.run(1, still=[2])
    assert verdict.ranks == (2,) and "has not come" in verdict.line
    late = Files(tmp_path, before=dict.fromkeys(range(3), stale))
    assert late.run(DEADLINE - 1, still=[2]) is None
    late.beat(0, 1, 2, stage="step 1", beats=1)
    assert late.run(DEADLINE) is None


def test_the_deadline_counts_from_the_first_sign(tmp_path):
    stale = json.dumps(Sign(tick=1, pid=7)._asdict())
    files = Files(tmp_path, before=dict.fromkeys(range(3), stale))
    assert files.run(15, lost=[0, 1, 2]) is None
    assert files.run(DEADLINE) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"tick": 1, "unknown": 2}', "\x00"])
def test_a_file_half_written_is_as_if_unchanged(files, text):
    assert files.run(3, steps=True) is None
    file_of(files.folder, 2).write_text(text)
    assert files.run(DEADLINE, still=[2], steps=True) is None
    verdict = files.run(1, still=[2], steps=True)
    assert verdict.ranks == (2,) and "(host h2, pid 102) is silent" in verdict.line


def test_a_rank_behind_the_others_hangs(files):
    files.beat(0, 1, 2, stage="step 1", beats=1)
    assert files.run(10) is None
    files.beat(0, 1, stage="step 1 wait", beats=2)
    assert files.run(DEADLINE - 9) is None
    verdict = files.run(3)
    assert verdict.ranks == (2,)
    want = "hangs: in stage 1 'step 1' for 21.0 s, while others are in stage 2 'step 1 wait'"
    assert verdict.line == f"rank 2 (host h2, pid 102) {want}"


def test_the_deadline_counts_from_the_last_stage(files):
    files.beat(0, 1, stage="step 9", beats=9)
    for beats in range(1, 9):
        files.beat(2, stage="slow", beats=beats)
        assert files.run(DEADLINE) is None


def test_two_ranks_behind_are_both_named(files):
    files.beat(1, stage="b", beats=2)
    files.beat(0, stage="a", beats=1)
    files.run(10)
    files.beat(2, stage="a", beats=1)
    assert files.run(DEADLINE) is None
    verdict = files.run(2)
    assert verdict.ranks == (0, 2)
    assert verdict.line.count("hangs: in stage 1 'a' for 21.0 s") == 2


def test_ranks_that_all_stand_still_end(files):
    files.beat(0, 1, 2, stage="compile", beats=4)
    verdict = files.run(DEADLINE + 2)
    assert verdict.ranks == (0, 1, 2)
    assert verdict.line == "no rank has moved for 21.0 s: all are in stage 4 'compile'"


def test_an_error_is_named_after_others_had_time_for_their_own(files):
    files.run(2)
    files.say(0, state=FAILED, said="ValueError: on purpose")
    files.beat(0, stage="data", beats=3)
    assert files.run(int(SETTLE_S)) is None
    verdict = files.run(1)
    assert verdict.ranks == (0,)
    assert verdict.line == "rank 0 (host h0, pid 100) failed in stage 3 'data': ValueError: on purpose"


def test_a_process_that_is_gone_is_named(files):
    files.run(2)
    files.say(2, state=GONE)
    verdict = files.run(int(SETTLE_S) + 1)
    assert verdict.ranks == (2,) and "is gone" in verdict.line


def test_of_processes_that_are_gone_the_coordinator_is_named(files):
    files.run(2)
    files.say(2, state=GONE)
    files.say(0, state=GONE)
    assert files.run(int(SETTLE_S) + 1).ranks == (0,)


def test_an_error_comes_before_the_end_of_a_process(files):
    files.run(2)
    files.say(0, state=GONE)
    files.say(2, state=FAILED, said="ValueError")
    assert files.run(int(SETTLE_S) + 1).ranks == (2,)


def test_anothers_verdict_is_taken_over(files):
    files.run(2)
    files.say(0, state=JUDGED, said="rank 2 is silent", blames=(2,))
    verdict = files.run(1, still=[2])
    assert tuple(verdict.ranks) == (2,) and verdict.line == "rank 2 is silent"


def test_all_done_is_a_good_end(files):
    files.beat(0, 1, 2, stage="last", beats=9)
    files.say(1, state=DONE)
    files.say(0, state=DONE)
    assert files.run(DEADLINE) is None
    files.say(2, state=DONE)
    verdict = files.run(1)
    assert verdict.all_done and not verdict.ranks and not verdict.line


def test_a_rank_that_leaves_early_is_named(files):
    files.beat(0, 1, 2, stage="step 1", beats=1)
    files.say(2, state=DONE)
    files.run(1)
    files.beat(0, 1, stage="step 2", beats=2)
    verdict = files.run(DEADLINE + 2)
    assert verdict.ranks == (2,)
    assert "left early, after stage 1 'step 1', while others are in stage 2 'step 2'" in verdict.line


def test_a_rank_that_does_not_leave_is_named(files):
    files.beat(0, 1, 2, stage="last", beats=5)
    files.run(1)
    for rank in (0, 1):
        files.say(rank, state=DONE)
    verdict = files.run(DEADLINE + 2)
    assert verdict.ranks == (2,) and "hangs: in stage 5 'last'" in verdict.line


# After an error that another rank may have caused, and when this rank's process has ended.


SICK = {
    "failed": dict(state=FAILED, said="ValueError: on purpose"),
    "gone": dict(state=GONE),
    "judged": dict(state=JUDGED, said="rank 0", blames=(0,)),
}


@pytest.mark.parametrize("state", [LOST, DIED])
@pytest.mark.parametrize("how", SICK)
def test_the_cause_of_trouble_is_named_at_once(files, state, how):
    files.run(3)
    files.say(1, state=state)
    assert files.run(1) is None
    files.say(0, **SICK[how])
    assert tuple(files.run(1).ranks) == (0,)


@pytest.mark.parametrize("state", [LOST, DIED])
def test_in_trouble_a_short_silence_says_enough(files, state):
    files.run(3)
    files.say(1, state=state)
    assert files.run(int(QUIET_S), still=[0]) is None
    verdict = files.run(1, still=[0])
    assert verdict.ranks == (0,) and "is silent: no sign of life for 6.0 s" in verdict.line


def test_in_trouble_a_rank_that_has_not_come_yet_is_not_silent(files):
    files.say(1, state=LOST)
    assert files.run(int(LOOK_S), lost=[0]) is None
    assert files.run(2) == Verdict("", (1,))


def test_trouble_without_a_cause_is_this_ranks_own(files):
    files.run(3)
    files.say(1, state=LOST)
    assert files.run(int(LOOK_S)) is None
    assert files.run(2) == Verdict("", (1,))


def test_a_dead_process_is_at_fault_once_the_coordinator_outlives_it(files):
    files.run(3)
    files.say(1, state=DIED)
    assert files.run(2) is None
    assert files.run(1) == Verdict("", (1,))


# The program.


class Programs:
    """Those of a job of two ranks, whose processes this one plays."""

    def __init__(self, folder):
        folder.mkdir()
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        command = [sys.executable, "-I", "-S", watcher.__file__, folder]
        self.folder = folder
        self.of = [subprocess.Popen([*map(str, (*command, rank, 2, DEADLINE, 0))], **pipes) for rank in range(2)]
        limit = time.monotonic() + 30
        while not all(file_of(folder, rank).exists() for rank in range(2)):
            assert time.monotonic() < limit
            time.sleep(0.05)

    def say(self, rank, state):
        line = json.dumps(dict(beats=3, stage="step", state=state, said="on purpose"))
        self.of[rank].stdin.write(line.encode() + b"\n")
        self.of[rank].stdin.flush()

    def end(self):
        """What each printed."""
        return [one.communicate(timeout=60) for one in self.of]


def test_jobs_in_one_folder_do_not_notice_each_other(tmp_path):
    good, bad = Programs(tmp_path / "good"), Programs(tmp_path / "bad")
    for job in (good, bad):
        job.say(0, RUNS)
        job.say(1, RUNS)
    good.say(1, DONE)
    bad.say(1, FAILED)
    assert bad.of[0].stdout.readline() == b"end 75\n"
    said = bad.end()
    good.say(0, DONE)
    assert [one.stdout.readline() for one in good.of] == [b"done\n"] * 2
    assert [one.poll() for one in good.of] == [None] * 2  # its process is still there
    assert good.end() == [(b"", b"")] * 2
    assert not good.folder.exists()
    assert "rank 1 (host" in said[0][1].decode()
    assert sorted(os.listdir(bad.folder)) == ["rank0.json", "rank1.json"]


def test_a_file_stays_until_all_have_seen_that_all_are_done(tmp_path):
    job = Programs(tmp_path / "job")
    job.of[1].kill()  # the test writes its file from now on
    job.of.pop().communicate()
    job.say(0, DONE)
    other = Sign(tick=1, state=DONE)
    file_of(job.folder, 1).write_text(json.dumps(other._asdict()))
    assert job.of[0].stdout.readline() == b"done\n"
    with pytest.raises(subprocess.TimeoutExpired):
        job.of[0].communicate(timeout=2)
    assert read(job.folder, 0).over
    file_of(job.folder, 1).unlink()
    assert job.end() == [(b"", b"")]
    assert not job.folder.exists()
