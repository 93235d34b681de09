"""What people meet in train.py: a run and its record, going on, refusals, signals, and a model that writes text."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_training import get_train_config

import _tokens
import _train_report
import generate
import train
from _common import UsageError, load_train_config
from _train_progress import FILE, Display, ProgressFile, read_records
from jax_ep import ConfigError
from jax_ep.training import loop

TINY = Path(__file__).resolve().parent / "tiny_training.py"
STEPS = get_train_config().steps


def run(out: Path, *arguments: Any) -> None:
    train.main(["--config", str(TINY), "--data", str(text_beside(out)), "--out", str(out), *map(str, arguments)])


def text_beside(out: Path) -> Path:
    """Four thousand bytes of a made-up text, in ASCII and beyond, in the folder above `out`."""
    path = out.parent / "text.txt"
    rng = random.Random(3)
    words = ["def", "return", "größe", "x", "y", "(", ")", ":\n", "€"]
    path.write_text(" ".join(rng.choice(words) for _ in range(1000)), encoding="utf-8")
    return path


@pytest.fixture(scope="module", autouse=True)
def _compiled_once():
    """One program a config for all tests here."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("make_step", "make_evaluate"):
            patch.setattr(loop, name, functools.lru_cache(getattr(loop, name)))
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run's folder and what it printed."""
    folder = tmp_path_factory.mktemp("train") / "run"
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(train.Console, "print", lambda self, *what, **_: said.extend(map(str, what)))
        run(folder)
    return folder, "\n".join(said)


def test_a_run_leaves_its_record_its_progress_and_a_picture(finished):
    folder, said = finished
    assert {file.name for file in folder.iterdir()} == {"checkpoints", "model", FILE, "train.json", "train.png"}
    assert (folder / "train.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((folder / "train.json").read_text())
    environment, model, result, times = (record[name] for name in ("environment", "model", "result", "times"))
    assert environment["simulated"] and environment["device_count"] == 2 and environment["processes"] == 1
    assert model["mesh"] == {"data": 1, "expert": 2} and model["mode"] == "packed" and model["family"] == "qwen3_moe"
    h, e, i = 16, 4, 16
    attention = h * 16 + 2 * h * 8 + 16 * h
    layer = attention + 2 * h + 2 * 8 + h * e + e * 3 * h * i
    assert model["parameters"] == 2 * layer + 2 * 256 * h + h
    assert model["active_parameters"] == model["parameters"] - 2 * 2 * 3 * h * i  # two experts of four, in two layers
    assert record["config"]["model"]["moe"]["router"]["top_k"] == 2 and record["config"]["steps"] == STEPS

    told = read_records(folder / FILE)
    steps = [r for r in told if r["kind"] == "step"]
    validations = [r for r in told if r["kind"] == "validation"]
    assert [r["step"] for r in steps] == list(range(1, STEPS + 1)) and [r["step"] for r in validations] == [4, 8]
    assert result["final_validation"] == validations[-1]["loss"]
    assert result["best_validation"] == min(r["loss"] for r in validations)
    assert result["percent_under_unigram"] == pytest.approx(
        100 * (1 - validations[-1]["loss"] / record["data"]["unigram_entropy"])
    )
    text = np.frombuffer((folder.parent / "text.txt").read_bytes(), np.uint8)
    assert record["data"]["validation_bytes"] + record["data"]["train_bytes"] == pytest.approx(len(text), abs=4)
    seconds = sum(r["seconds"] for r in steps)
    assert times["steps_per_s"] == pytest.approx(STEPS / seconds)
    assert times["tokens_per_s"] == pytest.approx(STEPS * 8 * 16 / seconds)
    per_token = steps[0]["tflops_per_device"] / steps[0]["tokens_per_s"]
    assert times["tflops_per_device"] == pytest.approx(times["tokens_per_s"] * per_token)
    assert times["total_s"] > times["compile_s"] + seconds and times["starts"] == 1
    assert "until its metrics are on the host" in record["timed"]
    assert any("simulated" in note for note in record["notes"])
    for words in (
        "2 simulated CPU devices",
        "text.txt",
        "unigram entropy",
        "active a token",
        "worst layer",
        "generate.py",
    ):
        assert words in said


def test_the_model_writes_text(finished, tmp_path, capsys):
    folder, _ = finished
    options = ["--expert-parallel", "1", "--max-new-tokens", "5", "--temperature", "1", "--out", str(tmp_path)]
    generate.main(["--model", str(folder / "model"), "--prompt", "def größe", *options])
    record = json.loads((tmp_path / "generate.json").read_text())
    (row,) = record["sequences"]
    assert row["prompt"] == "def größe" and row["prompt_ids"] == list("def größe".encode())
    assert record["model"]["tokenizer"] == "bytes" and record["sampling"]["stop_tokens"] == [0]


def test_a_finished_run_says_so_and_goes_on_with_more_steps(finished, capsys):
    folder, _ = finished
    before = (folder / FILE).read_bytes()
    with pytest.raises(UsageError, match=rf"run is finished, {STEPS} steps of it; steps={2 * STEPS} goes on"):
        run(folder)
    assert (folder / FILE).read_bytes() == before
    run(folder, f"steps={STEPS + 2}")
    assert f"going on from {(folder / 'checkpoints' / str(STEPS)).absolute()}" in capsys.readouterr().out
    told = read_records(folder / FILE)
    assert [r["step"] for r in told if r["kind"] == "step"] == list(range(1, STEPS + 3))
    assert (folder / FILE).read_bytes().startswith(before)
    record = json.loads((folder / "train.json").read_text())
    assert record["times"]["starts"] == 2 and record["result"]["steps"] == STEPS + 2
    with pytest.raises(UsageError, match=r"another run, which is finished: optimizer\.learning_rate.*--out another"):
        run(folder, "learning_rate=1")
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate"):
        run(folder, "steps=20", "learning_rate=1")
    assert read_records(folder / FILE) == told


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_a_step_with_a_checkpoint(tmp_path, monkeypatch, capfd, signum):
    def add(self, record):
        if record["kind"] == "step" and record["step"] == 3:
            os.kill(os.getpid(), signum)

    monkeypatch.setattr(Display, "add", add)
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(SystemExit) as ended:
        run(tmp_path / "run")
    assert ended.value.code == 128 + signum
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    error = capfd.readouterr().err
    assert f"ended by {signum.name} after step 3 of {STEPS}" in error and "the same command goes on" in error
    assert error.count("ending after this step, with a checkpoint; again: at once") == 1
    assert (tmp_path / "run" / loop.CHECKPOINTS / "3").is_dir()
    assert not (tmp_path / "run" / "train.json").exists()
    assert read_records(tmp_path / "run" / FILE)[-1]["step"] == 3
    if signum == signal.SIGINT:  # no validation has been yet
        monkeypatch.undo()
        run(tmp_path / "run", "steps=2")
        record = json.loads((tmp_path / "run" / "train.json").read_text())
        assert record["result"]["steps"] == 3 and record["result"]["best_step"] == 3


def test_another_interruption_ends_it_at_once(tmp_path, monkeypatch, capfd):
    def add(self, record):
        if record["kind"] == "step":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Display, "add", lambda *a: (add(*a), add(*a)))
    monkeypatch.setattr(os, "_exit", train.sys.exit)
    with pytest.raises(SystemExit) as ended:
        run(tmp_path / "run")
    assert ended.value.code == 130 and "interrupted; no checkpoint has been written" in capfd.readouterr().err


def test_what_does_not_end_itself_is_ended(tmp_path, monkeypatch, capfd):
    ended: list[int] = []
    there = threading.Event()
    monkeypatch.setattr(train, "AT_ONCE_S", 0.01)
    monkeypatch.setattr(os, "_exit", lambda code: (ended.append(code), there.set()))
    with train._signals(tmp_path) as came:
        signal.raise_signal(signal.SIGTERM)
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert there.wait(10)
    assert came == [signal.SIGTERM] and ended == [130]
    assert "again: at once\ntrain.py: interrupted; no checkpoint" in capfd.readouterr().err


def test_a_validation_that_is_not_finite_is_null_and_said(finished, tmp_path):
    folder, _ = finished
    record = json.loads((folder / "train.json").read_text())
    record["model"]["family"] = None
    lines = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    validations = [line for line in lines if line["kind"] == "validation"]
    for left in (validations[-1:], validations):
        for line in left:
            line["loss"] = None
        (tmp_path / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
        said = io.StringIO()
        train._finish(tmp_path, record, train.Console(file=said, width=200))
        result = json.loads((tmp_path / "train.json").read_text())["result"]
        assert result["final_validation"] is None and result["percent_under_unigram"] is None
        assert (result["best_validation"] is None) == (left is validations)
        assert "not finite" in said.getvalue() and (tmp_path / "train.png").exists()


def test_one_of_a_kind_is_said_so():
    assert [_train_report.counted(n, "layer") for n in (0, 1, 2)] == ["0 layers", "1 layer", "2 layers"]


REFUSALS = {
    "config": (["--config", "tiny_lmm"], "unknown config 'tiny_lmm'; nearest: .*tiny_lm"),
    "config without training": (["--config", "tiny_decoder"], "get_train_config"),
    "key": (["step=3"], "unknown key 'step'; nearest: .*steps"),
    "axes": (["token_axes=expert,"], "set it with expert_parallel"),
    "value": (["accumulation=3"], "accumulation=3: must divide batch_size=8"),
    "data": (["--data", "/nowhere/text"], "'/nowhere/text': cannot be read"),
    "no data": (["--data"], "--data"),
    "mesh": (["expert_parallel=16"], "needs 16 devices and there are 8"),
    "devices": (["--devices", "0"], "devices=0"),
    "deadline": (["--deadline", "0"], "deadline=0.0"),
    "vocabulary": (["vocab_size=64"], "the text has byte 226; vocab_size=256 works"),
    "option": (["--datas", "x"], "nearest: --data"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_come_before_the_work(name, tmp_path):
    arguments, words = REFUSALS[name]
    base = ["--config", str(TINY)] if "--config" not in arguments else []
    with pytest.raises((UsageError, ConfigError), match=words):
        train.main([*base, "--out", str(tmp_path / "run"), *arguments])
    assert not (tmp_path / "run").exists()


def test_flags_that_take_collectives_from_the_scheduler_are_refused_with_overlap(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=FUSION,COLLECTIVES")
    with pytest.raises(ConfigError, match="'FUSION' works"):
        train.main(["--config", str(TINY), "--out", str(tmp_path), "overlap_moe_expert_parallel_comm=True"])


def test_a_folder_that_cannot_be_the_runs_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file is a file; --out out/train works"):
        run(tmp_path / "file")
    (tmp_path / "run").mkdir()
    held = ProgressFile(tmp_path / "run")
    with pytest.raises(UsageError, match="another run is writing there"):
        run(tmp_path / "run")
    held.close()


def test_files_of_others_are_refused_and_stay(tmp_path):
    (tmp_path / "progress").mkdir()
    (tmp_path / "progress" / FILE).write_text('{"mine": 1}\n')
    with pytest.raises(UsageError, match=rf"{FILE} is not of a run of train\.py; --out another folder works"):
        run(tmp_path / "progress")
    assert (tmp_path / "progress" / FILE).read_text() == '{"mine": 1}\n'
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / train.MODEL).write_text("mine")
    with pytest.raises(UsageError, match="model is a file, and the model's folder goes there; --out another"):
        run(tmp_path / "model")
    (tmp_path / "model" / FILE).write_text('{"kind": "st')  # killed early
    train.refuse_foreign(tmp_path / "model")


def test_a_full_disk_is_one_line(tmp_path):
    class Full(io.BytesIO):
        def write(self, line):
            return super().write(line[:3])

    progress = ProgressFile(tmp_path)
    progress.close()
    progress._file = Full()
    with pytest.raises(UsageError, match=r"progress\.jsonl cannot be written: No space left on device; --out a folder"):
        progress.add({"kind": "step", "step": 1})
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written to: Not a directory"):
        train.write_files(tmp_path / "file" / "run", {"train.json": b""})


def test_overrides_may_follow_the_data(tmp_path):
    (tmp_path / "a=b").write_text("x")
    args = train._arguments(["--data", str(tmp_path / "a=b"), "text.txt", "steps=5", "--out", "x", "top_k=1"])
    assert args.data == [str(tmp_path / "a=b"), "text.txt"] and sorted(args.overrides) == ["steps=5", "top_k=1"]


@pytest.mark.parametrize("cached", [False, True])
def test_collectives_keep_one_order(monkeypatch, cached):
    simulate, order = (
        f"--xla_{n}" for n in ("force_host_platform_device_count", "cpu_enable_concurrency_optimized_scheduler")
    )
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    if cached:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "somewhere")
    for before, after in {
        f"{simulate}=3": f"{simulate}=3 {order}=false",
        f"{order}=true": f"{order}=true {simulate}=8",
    }.items():
        monkeypatch.setenv("XLA_FLAGS", before)
        train.simulate_devices(None, in_order=not cached)
        assert os.environ["XLA_FLAGS"] == after


def test_tiny_lm_loads_and_overrides_reach_all_of_it():
    config = load_train_config("tiny_lm")
    changed = train.override(config, ["learning_rate=0.5", "num_experts=16", "clip_norm=none", "capacity_factor=2"])
    assert changed.optimizer.learning_rate == 0.5 and changed.optimizer.clip_norm is None
    assert changed.model.moe.num_experts == 16 and changed.model.moe.comm.capacity_factor == 2


def test_progress_is_cut_where_a_run_goes_on(tmp_path):
    step = lambda i, loss=1.0: {"kind": "step", "step": i, "loss": loss}
    first = ProgressFile(tmp_path)
    for record in ({"kind": "start", "step": 0}, step(1), step(2, float("nan")), step(3, float("inf"))):
        first.add(record)
    first.close()
    with (tmp_path / FILE).open("a") as file:
        file.write('{"kind": "step", "st')  # killed half way
    assert [r["step"] for r in read_records(tmp_path / FILE)] == [0, 1, 2, 3]
    second = ProgressFile(tmp_path)
    second.add({"kind": "start", "step": 2})
    second.add(step(3))
    second.close()
    lines = (tmp_path / FILE).read_text().splitlines()
    told = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [(r["kind"], r["step"]) for r in told] == [
        ("start", 0), ("step", 1), ("step", 2), ("start", 2), ("step", 3)
    ]  # fmt: skip
    assert told[2]["loss"] is None
    third = ProgressFile(tmp_path)  # without a checkpoint it begins again
    third.add({"kind": "start", "step": 0})
    third.close()
    assert [r["step"] for r in read_records(tmp_path / FILE)] == [0, 0]


def test_byte_tokenizer_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / _tokens.TOKENIZER
    path.write_bytes(_tokens.byte_tokenizer_file())
    ours = _tokens.tokenizer_of(tmp_path, wanted=True)
    assert isinstance(ours, _tokens.ByteTokenizer)
    theirs = tokenizers.Tokenizer.from_file(str(path))
    for text in ("def f(x):\n\treturn 1\r\n", " aé€𝄞 z  ", "\0a\0\0b", "".join(map(chr, range(600))), ""):
        assert theirs.encode(text).ids == ours.encode(text) == list(text.encode())
        assert theirs.decode(list(text.encode())) == ours.decode(list(text.encode())) == text
    for ids in ([0xE2, 0x82], [255, 65], *([i] for i in range(256))):
        assert theirs.decode(ids) == ours.decode(ids)
    path.write_bytes(_tokens.byte_tokenizer_file().replace(b'"merges": []', b'"merges": [["a", "b"]]'))
    assert not _tokens._holds_bytes(path)
