"""overlap_ab.py: what it refuses, what it lets itself say, and one small run of each kind."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
from pathlib import Path

import pytest

import overlap_ab
from _common import UsageError, load_config
from _overlap import Outcome, judge, loss_difference, read_switch
from jax_ep.config import ConfigError

TRAINING = str(Path(__file__).resolve().parent / "tiny_training.py")


def side(label, runs, losses=(1.0, 1.0), skipped=0):
    return Outcome(label, tuple(map(float, runs)), tuple(losses), skipped)


SLOW, FAST = side("off", [10, 10.5, 10.2, 10.1]), side("on", [8, 8.1, 8.2, 8.1, 8.05, 8.15, 8, 8.2, 30])


def test_a_clear_win_is_told_and_one_slow_run_does_not_hide_it():
    verdict = judge(SLOW, FAST, "float32", 1e-7)
    assert verdict.told and verdict.speedup == pytest.approx(10.15 / 8.1)
    assert verdict.sentence.startswith("on is faster: 1.253 times the speed of off (8.10 ms against 10.15;")
    few = judge(SLOW, side("on", [8, 8.1, 8.2, 8.1, 30]), "float32", 1e-7)
    assert not few.told and "the runs of a side spread over 22 ms" in few.sentence
    verdict = judge(FAST, SLOW, "float32", None)
    assert verdict.told and verdict.sentence.startswith("off is slower: 0.798 times the speed of on")


@pytest.mark.parametrize(
    ("a", "b", "dtype", "gradient", "says"),
    [
        (SLOW, side("on", [9.8, 10.4, 9.0, 10.9]), "float32", 0.0, "no difference seen: the medians are 0.05 ms apart"),
        (SLOW, side("on", [8, 12, 5, 20]), "float32", 0.0, "no difference seen: the medians are 0.15 ms apart"),
        (SLOW, side("on", [8] * 4, (1.0, 1.00001)), "float32", 0.0, "losses differ by 1.0e-05 relative at step 2"),
        (SLOW, side("on", [8] * 4, (0.9, 1.0)), "bfloat16", 0.0, "at step 1, and 8e-03 is rounding in bfloat16"),
        (
            SLOW,
            side("on", [8] * 4, (1.0, math.nan)),
            "float32",
            0.0,
            "on has a loss that is not finite, first at step 2",
        ),
        (side("off", [10] * 4, (math.inf, 1.0)), FAST, "float32", 0.0, "off has a loss that is not finite"),
        (SLOW, side("on", [8] * 4, skipped=2), "float32", 0.0, "on skipped 2 steps"),
        (SLOW, FAST, "float32", 1e-3, "the gradients differ by 1.0e-03 relative, and 1e-05 is rounding in float32"),
        (SLOW, FAST, "float32", math.nan, "the gradients differ by nan"),
    ],
)
def test_no_speed_up_is_told(a, b, dtype, gradient, says):
    verdict = judge(a, b, dtype, gradient)
    assert not verdict.told and verdict.speedup is None and says in verdict.sentence
    assert verdict.sentence.startswith(("no speed-up is told: ", "no difference seen: "))


def test_rounding_is_no_difference_and_one_program_is_none():
    rounded = side("on", [8] * 4, (1.0, 1 + 5e-7))
    assert judge(SLOW, rounded, "float32", 5e-6).told
    assert judge(SLOW, side("on", [8] * 4, (1.0, 1.004)), "bfloat16", 0.01).told
    assert "same program" in judge(SLOW, rounded, "float32", 0.0, same_program=True).sentence


def test_loss_difference():
    assert loss_difference(side("a", [1], (2.0, 4.0)), side("b", [1], (2.0, 3.0))) == (0.25, 2)
    assert loss_difference(side("a", [1], (0.0, 4.0)), side("b", [1], (0.0, 4.0))).relative == 0
    assert loss_difference(side("a", [1], (0.0, 4.0)), side("b", [1], (1.0, 4.0))) == (math.inf, 1)
    assert math.isnan(loss_difference(side("a", [1], (1.0, 4.0)), side("b", [1], (1.5, math.nan))).relative)


def test_the_switch_may_be_written_both_ways():
    read = lambda *given: read_switch(given, (), load_config("tiny_cpu"), lambda field: True, "anything")
    assert read("num_chunks=1:2") == read("num_chunks=1,2")
    assert read("num_chunks=1:2") == ("moe.comm.num_chunks", ("1", "2"), ("num_chunks=1", "num_chunks=2"))
    assert read("moe.comm.dedup=off,on") == read("dedup=False:True")
    assert read("recv_rows_factor=none:1.25").labels == ("recv_rows_factor=None", "recv_rows_factor=1.25")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no switch: exactly one field may differ between the two runs; dedup=False:True works"),
        (["dedup=False:True", "num_chunks=1:2"], r"2 switches \(dedup=False:True, num_chunks=1:2\): exactly one"),
        (["num_chunks=1:2", "--switch", "dedup=off,on"], "2 switches .* run the script once for each"),
        (["dedupp=off:on"], "unknown key 'dedupp'; nearest: dedup"),
        (["dedup=off:on", "num_chunk=2"], "unknown key 'num_chunk'; nearest: num_chunks"),
        (["--switch", "dedup"], "'dedup' is no switch: it is written key=A:B"),
        (["dedup=False:"], "'dedup=False:' is no switch"),
        (["dedup=off:maybe"], "dedup=maybe: must be True or False"),
        (["dedup=on:True"], "both values are True, so that nothing differs"),
        (["dedup=off:on", "dedup=True"], "moe.comm.dedup is the switch"),
        (["batch_size=8:16"], "batch_size belongs to what both runs share; a field of a MoEConfig works"),
        (["--train", TRAINING, "steps=8:9"], "steps belongs to what both runs share"),
        (["expert_axis=expert:ep"], "set it with a config of your own"),
        (["num_experts=32:16"], "parameters of other shapes or dtypes"),
        (["dedup=off:on", "--train", TRAINING, "--layer", "tiny_cpu"], "--layer and --train: one of them"),
        (["dedup=off:on", "--train", TRAINING, "--routing", "balanced"], "in a model the routers choose"),
        (["dedup=off:on", "--routing", "skewed"], "routing='skewed': must be one of balanced, recorded"),
        (["dedup=off:on", "--runs", "2"], "runs=2: must be at least 3; --runs 3 works"),
        (["dedup=off:on", "--warmup", "0"], "warmup=0: must be at least 1"),
        (["dedup=off:on", "expert_parallel=16"], "needs 16 devices and there are 8"),
        (["num_chunks=1:0"], "num_chunks=0: must be an integer of at least 1"),
        (["messages=rank:expert", "dedup=True"], "messages='expert': with dedup a row serves several experts"),
    ],
)
def test_refusals_before_anything_runs(arguments, says, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(overlap_ab, "compare_runs", lambda *_, **__: pytest.fail("something ran"))
    with pytest.raises((UsageError, ConfigError), match=says):
        overlap_ab.main([*arguments, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_flags_that_take_collectives_from_the_scheduler_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=+COLLECTIVES")
    with pytest.raises(ConfigError, match="'-COLLECTIVES' works"):
        overlap_ab.main(["dedup=off:on", "--out", str(tmp_path / "out")])


def run(folder, *arguments):
    text = folder / "text.txt"
    text.write_text("what is written here is read in windows of a few bytes each; " * 40)
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
        options = ["--runs", "3", "--warmup", "1", "--text", str(text), "--out", str(folder / "out")]
        overlap_ab.main([*arguments, *options])
    return json.loads((folder / "out" / "overlap_ab.json").read_text()), said.getvalue()


def check_sides(record, devices):
    """What the record of every run has."""
    for told in record["sides"].values():
        assert len(told["runs_ms"]) == 3 and told["min_ms"] <= told["median_ms"] <= told["max_ms"]
        assert len(told["losses"]) == 5 and all(map(math.isfinite, told["losses"]))  # one before, 1 warm, 3 timed
        assert (told["nan_steps"], told["skipped_steps"], told["dropped_rows"]) == (0, 0, 0)
        assert told["model_tflops_per_device"] > 0 and told["compile_s"] > 0 and told["temp_bytes"] > 0
        assert any(sum(count.values()) for count in told["collectives"].values())
        assert list(told["profile"]["devices"]) == [f"CPU:{i}" for i in range(devices)]
        mean = told["profile"]["over_devices"]
        assert 0 < mean["communication_ms"] <= mean["span_ms"] and 0 < mean["computation_ms"] <= mean["span_ms"]
        assert 0 <= mean["hidden_fraction"] <= 1 and 0 <= mean["hidden_of_hideable"] <= 1
    environment, differs = record["environment"], record["differences"]
    assert (
        environment["simulated"]
        and environment["device_count"] == devices
        and "device_count=8" in environment["xla_flags"]
    )
    assert differs["loss"] <= 1e-6 and differs["gradient"] <= 1e-5 and not differs["same_program"]
    assert record["verdict"]["told"] == (record["verdict"]["speedup"] is not None)
    assert any("XLA:CPU hardly overlaps" in note for note in record["notes"])


SIZES = ["batch_size=8", "sequence_length=8", "hidden_size=16", "intermediate_size=8", "num_experts=8"]
SIZES += ["expert_parallel=4"]


@pytest.mark.slow
def test_a_layer(tmp_path):
    record, said = run(tmp_path, "--routing", "recorded", "num_chunks=1:2", *SIZES)
    assert list(record["sides"]) == ["num_chunks=1", "num_chunks=2"]
    assert record["switch"] == {"field": "moe.comm.num_chunks", "values": ["1", "2"]}
    work = record["workload"]
    assert (work["kind"], work["config"], work["routing"], work["shared"]) == ("layer", "tiny_cpu", "recorded", SIZES)
    check_sides(record, devices=4)
    one, two = (told["collectives"]["all_to_all"]["straight"] for told in record["sides"].values())
    assert two == 2 * one
    for words in ("num_chunks=2", "XLA_FLAGS: --xla", "hidden of hideable", record["verdict"]["sentence"][:30]):
        assert words in said
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "overlap_ab.json",
        "overlap_ab_a.xplane.pb",
        "overlap_ab_b.xplane.pb",
    ]


@pytest.mark.slow
def test_training_steps(tmp_path):
    record, said = run(tmp_path, "--train", TRAINING, "--switch", "dedup=off,on")
    assert list(record["sides"]) == ["dedup=False", "dedup=True"] and record["workload"]["kind"] == "train"
    check_sides(record, devices=2)
    first, *_, last = record["sides"]["dedup=True"]["losses"]
    assert last != first and record["differences"]["routing_equal"]
    assert "training steps" in said


def test_a_switch_that_does_nothing_is_said(tmp_path):
    """On a CPU "auto" is all_to_all."""
    record, said = run(tmp_path, "transport=auto:all_to_all", *SIZES)
    assert record["differences"]["same_program"] and not record["verdict"]["told"]
    assert "both sides are the same program" in " ".join(said.split())
