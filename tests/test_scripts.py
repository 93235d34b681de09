"""What people meet at the command line: compare.py's contract, refusals in one line, overrides."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import _common
import _text
import compare
from jax_ep import CommConfig, ConfigError, MoEConfig, RouterConfig, WorkloadConfig

ROOT = Path(__file__).resolve().parent.parent
MODES = ["dense", "allgather", "padded", "packed"]
BYTES = {"payload", "payload_remote", "metadata", "control", "wire"}
B, S, H, E, K, D, R = 4, 14, 32, 6, 2, 2, 4  # R does not divide E


def run_compare(*arguments, cwd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    command = [sys.executable, "-W", "error", str(ROOT / "scripts/compare.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run of everything at once, its output and its record."""
    folder = tmp_path_factory.mktemp("compare")
    text = folder / "some.txt"
    text.write_bytes(bytes(range(32, 127)) * 3)
    sizes = f"batch_size={B} moe.hidden_size={H} intermediate_size=16 num_experts={E} sequence_length={S}".split()
    options = f"--config mini_infer --expert-parallel {R} data_parallel={D} --runs 3 --warmup 1 --backward".split()
    done = run_compare(*options, *sizes, "--text", text, "--out", folder / "new" / "out", cwd=folder)
    assert done.returncode == 0, done.stderr
    files = folder / "new" / "out"
    assert sorted(file.name for file in files.iterdir()) == ["compare.json", "compare.png"]
    return done, json.loads((files / "compare.json").read_text()), (files / "compare.png").read_bytes()


def test_compare_environment_and_workload(run):
    record = run[1]
    environment = record["environment"]
    assert {"platform", "device_kind", "device_count", "jax", "xla_flags", "simulated"} <= set(environment)
    assert environment["simulated"] is True
    assert environment["device_count"] == 8
    workload = record["workload"]
    asked = {"batch_size": B, "sequence_length": S, "hidden_size": H, "num_experts": E, "top_k": K, "dtype": "float32"}
    asked |= {"expert_parallel": R, "data_parallel": D, "intermediate_size": 16}
    assert {key: workload[key] for key in asked} == asked
    assert "some.txt" in workload["source"]
    assert sum(workload["tokens_per_expert"]) == B * S * K
    assert "router" in workload["routing"]
    assert record["timed"] == "forward+backward"
    assert "one compiled call" in record["timed_region"]
    assert any("simulated" in note for note in record["notes"])
    assert any("2-byte" in note for note in record["notes"])


@pytest.mark.parametrize("mode", MODES)
def test_compare_modes(run, mode):
    record = run[1]
    assert list(record["modes"]) == MODES
    m = record["modes"][mode]
    assert len(m["runs_ms"]) == 3
    assert 0 < m["min_ms"] <= m["median_ms"] <= m["max_ms"]
    assert m["tokens_per_s"] == pytest.approx(B * S / m["median_ms"] * 1e3)
    assert m["compile_s"] > 0
    assert m["temp_bytes"] > 0
    assert m["max_abs_diff"] < 1e-4
    assert m["shard_ratio"] >= 1
    assert m["dropped_rows"] == 0
    assert set(m["bytes"]) == BYTES
    assert all(isinstance(count, int) for count in m["bytes"].values())
    assert m["transport"] == ("all_to_all" if mode == "packed" else None)
    assert (m["rounds"] > 0) == (mode != "dense")
    exchanges = m["collectives"].get("all_to_all", {"straight": 0, "loop": 0})
    assert exchanges["straight"] == (4 if mode in ("padded", "packed") else 0)
    if mode == "packed":
        # Four exchanges: there and back, forward and backward.
        assert m["bytes"]["payload"] >= 4 * B * S * K * H * 4


def test_compare_ratios_and_references(run):
    record = run[1]
    medians = {mode: m["median_ms"] for mode, m in record["modes"].items()}
    medians["grouped_one_device"] = record["one_device"]["median_ms"]
    assert set(record["ratios"]) == {"packed/dense", "packed/padded", "packed/grouped_one_device"}
    for name, ratio in record["ratios"].items():
        above, below = name.split("/")
        assert ratio == pytest.approx(medians[above] / medians[below])
    unit = 2 * B * S * H * 4
    assert record["reference_bytes"] == {"tensor_parallel": unit, "ideal": unit * K, "padded": unit * K * R}


def test_compare_output(run):
    done, _, png = run
    assert png.startswith(b"\x89PNG")
    assert len(png) > 20_000
    for words in (*MODES, "simulated", "packed/dense", "max diff", "compare.json"):
        assert words in done.stdout
    assert "Traceback" not in done.stderr


REFUSALS = {
    "key": (["num_expert=4"], ["unknown key 'num_expert'", "num_experts"]),
    "ambiguous key": (["moe.router=4"], ["unknown key 'moe.router'"]),
    "no override": (["packed"], ["'packed' is no override", "key=value"]),
    "value": (["top_k=two"], ["top_k=two: must be an integer", "top_k=8 works"]),
    "config value": (["top_k=64"], ["top_k=64", "num_experts=32"]),
    "mode": (["--modes", "dense,paked"], ["unknown mode 'paked'", "packed"]),
    "no mode": (["--modes", ","], ["names no mode"]),
    "modes and sweep": (["--modes", "packed", "--sweep", "dedup"], ["a sweep runs packed alone", "--sweep dedup"]),
    "sweep field": (["--sweep", "dedup,num_chunk"], ["no variants of 'num_chunk'", "nearest: num_chunks"]),
    "sweep of a mode": (["--sweep", "packed"], ["no variants of 'packed'", "dedup", "transport"]),
    "sweep of nothing": (["--sweep", ","], ["names no field", "recv_rows_factor"]),
    "options exclude": (["dedup=True", "messages=expert"], ["messages='expert'", "messages='rank' works"]),
    "mode as override": (["mode=padded"], ["mode=padded: set it with --modes"]),
    "config": (["--config", "tiny_gpu"], ["unknown config 'tiny_gpu'", "tiny_cpu"]),
    "config path": (["--config", "nowhere/x.py"], ["nowhere/x.py", "no such file"]),
    "option": (["--expert-paralel", "2"], ["unknown option --expert-paralel", "--expert-parallel"]),
    "runs": (["--runs", "0"], ["runs=0", "runs=5 works"]),
    "devices": (["--devices", "0"], ["devices=0", "--devices 8 works"]),
    "too few devices": (["--expert-parallel", "64"], ["expert_parallel=64", "needs 64 devices", "--devices 64"]),
    "text missing": (["--text", "nothing.txt"], ["nothing.txt", "cannot be read"]),
    "text is a folder": (["--text", "."], ["is a folder"]),
    "text empty": (["--text", "empty.txt"], ["empty.txt", "is empty"]),
    "text short": (["--text", "short.txt"], ["short.txt", "too short: 5 bytes", "2048"]),
    "out is a file": (["--out", "short.txt"], ["short.txt is a file"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case, tmp_path, monkeypatch, capsys):
    arguments, words = REFUSALS[case]
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("short")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(sys, "argv", ["compare.py", "--out", "results", *arguments])
    with pytest.raises(SystemExit) as stopped:
        _common.run_main(compare.main)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("compare.py: error: ")
    for word in words:
        assert word in err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty.txt", "short.txt"]


def test_refusal_of_a_whole_process(tmp_path):
    done = run_compare("--text", tmp_path / "missing.txt", "--devices", 2, "--expert-parallel", 2, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert not any(tmp_path.iterdir())


WORKLOAD = WorkloadConfig(2, 8, MoEConfig(16, 32, 4, RouterConfig(2)), expert_parallel=2)


def test_overrides_by_full_and_short_names():
    overrides = ["moe.router.top_k=4", "router.scale=2.5", "num_experts=8", "recv_rows_factor=None", "runs=1_000"]
    config = _common.override(WORKLOAD, overrides)
    router = RouterConfig(4, scale=2.5)
    comm = CommConfig(recv_rows_factor=None)
    expected = dataclasses.replace(WORKLOAD, moe=MoEConfig(16, 32, 8, router, comm), runs=1000)
    assert config == expected
    assert WORKLOAD.moe.num_experts == 4


@pytest.mark.parametrize("order", [["top_k=8", "num_experts=8"], ["num_experts=8", "top_k=8"]])
def test_overrides_that_need_each_other(order):
    assert _common.override(WORKLOAD, order).moe.router.top_k == 8


def test_override_values():
    values = {
        "shared_gate=true num_shared_experts=1": ("shared_gate", True),
        "shard_sequence=False": ("shard_sequence", False),
        "shard_sequence=none": ("shard_sequence", None),
        "token_axes=(replica,expert)": ("token_axes", ("replica", "expert")),
        "token_axes=expert,": ("token_axes", ("expert",)),
        "activation=gelu": ("activation", "gelu"),
    }
    for text, (field, value) in values.items():
        assert getattr(_common.override(WORKLOAD, text.split()).moe, field) == value
    assert _common.override(WORKLOAD, ["runs=1", "runs=2"]).runs == 2
    assert _common.override(WORKLOAD, []) is WORKLOAD


def test_override_refusals():
    for text, words in {
        "topk=2": "nearest: .*top_k",
        "=2": "no override",
        "shared_gate=yes": "True or False",
        "scale=big": "scale=1.5 works",
    }.items():
        with pytest.raises(_common.UsageError, match=words):
            _common.override(WORKLOAD, [text])
    with pytest.raises(ConfigError, match="transport='carrier'"):
        _common.override(WORKLOAD, ["transport=carrier"])

    @dataclasses.dataclass(frozen=True)
    class Two:
        left: RouterConfig
        right: RouterConfig

    two = Two(RouterConfig(1), RouterConfig(1))
    with pytest.raises(_common.UsageError, match=r"'top_k' could be left\.top_k or right\.top_k"):
        _common.override(two, ["top_k=2"])
    assert _common.override(two, ["right.top_k=2"]) == Two(RouterConfig(1), RouterConfig(2))


@pytest.mark.parametrize("name", sorted(file.stem for file in _common.CONFIGS.glob("*.py")))
def test_configs_load_by_name_and_path(name, tmp_path):
    config = _common.load_config(name)
    assert isinstance(config, WorkloadConfig)
    assert _common.load_config(str(_common.CONFIGS / f"{name}.py")) == config


def test_config_without_a_config(tmp_path):
    (tmp_path / "wrong.py").write_text("get_config = lambda: 3")
    with pytest.raises(_common.UsageError, match="must define get_config"):
        _common.load_config(str(tmp_path / "wrong.py"))
    (tmp_path / "broken.py").write_text("def")
    with pytest.raises(_common.UsageError, match="cannot be read"):
        _common.load_config(str(tmp_path / "broken.py"))


def test_mini_infer_is_the_published_workload():
    w = _common.load_config("mini_infer")
    sizes = (w.batch_size, w.sequence_length, w.moe.hidden_size, w.moe.intermediate_size, w.moe.num_experts)
    assert (*sizes, w.moe.router.top_k) == (4, 16, 512, 1024, 8, 2)
    assert (w.expert_parallel, w.warmup, w.runs) == (2, 2, 5)


def test_modes_read_only_their_own_settings():
    comm = CommConfig(recv_rows_factor=1.5, transport="ragged", capacity_factor=1.25)
    config = dataclasses.replace(WORKLOAD.moe, comm=comm)
    assert compare.mode_config(config, "packed").comm == comm
    assert compare.mode_config(config, "padded").comm == CommConfig(mode="padded", capacity_factor=1.25)
    assert compare.mode_config(config, "allgather").comm == CommConfig(mode="allgather")


def test_default_text_is_the_standard_library_and_the_same_every_time():
    text = _text.read_text(None)
    assert len(text.data) > 1_000_000
    assert b"import" in text.data
    tokens = _text.sequences(text, 8, 32)
    assert tokens.shape == (8, 32)
    assert len({bytes(row) for row in tokens}) == 8
    states = _text.hidden_states(tokens, 16)
    assert states.shape == (8, 32, 16)
    assert states.dtype == np.float32
    np.testing.assert_allclose(np.square(states).mean(-1), 1, rtol=1e-5)
    np.testing.assert_array_equal(states, _text.hidden_states(_text.sequences(_text.read_text(None), 8, 32), 16))


def test_hidden_states_look_back_and_never_ahead():
    tokens = np.arange(12, dtype=np.uint8)[None]
    states = _text.hidden_states(tokens, 8)
    for changed in range(12):
        other = tokens.copy()
        other[0, changed] = 200
        differs = (np.abs(_text.hidden_states(other, 8) - states) > 1e-6).any(-1)[0]
        assert differs.nonzero()[0].tolist() == list(range(changed, min(12, changed + _text.HISTORY)))


def test_simulated_device_counts(monkeypatch):
    flag = "--xla_force_host_platform_device_count"
    for before, count, after in [
        ("", None, f"{flag}=8"),
        (f"--a=1 {flag}=3", None, f"--a=1 {flag}=3"),
        (f"{flag}=3 --a=1", 2, f"--a=1 {flag}=2"),
    ]:
        monkeypatch.setenv("XLA_FLAGS", before)
        _common.simulate_devices(count)
        assert os.environ["XLA_FLAGS"] == after


def test_files_are_written_whole_or_not_at_all(tmp_path):
    _common.write_files(tmp_path / "a" / "b", {"x": b"1"})
    _common.write_files(tmp_path / "a" / "b", {"x": b"2", "y": b"3"})
    assert {file.name: file.read_bytes() for file in (tmp_path / "a" / "b").iterdir()} == {"x": b"2", "y": b"3"}
    with pytest.raises(TypeError):
        _common.write_files(tmp_path / "c", {"x": None})
    assert not any((tmp_path / "c").iterdir())
