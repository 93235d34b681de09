"""bench_gpu.py, as far as it goes without a GPU: a rehearsal, what it refuses, wrong results, and what it concludes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import _gpu_checks
import _gpu_layers
import bench_gpu
from _common import UsageError, load_config
from _gpu_checks import difference
from _gpu_measure import OUT_OF_TIME, Budget, How, forward_and_backward, measure
from _gpu_report import REHEARSAL, judged, markdown, table, verdicts

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
TIMED = ["forward", "forward+backward"]
TIMES = {"median_ms", "min_ms", "max_ms", "spread", "runs_ms", "tflops"}


def how(seconds=100.0, runs=3):
    return How(1, runs, jax.devices()[0], Budget(seconds), rehearse=True)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """One rehearsal on two devices: its output, its record and its table."""
    out = tmp_path_factory.mktemp("bench_gpu") / "new" / "out"
    options = ["--rehearse", "--devices", "2", "--layers", "mixtral_8x7b", "--runs", "3", "--warmup", "1"]
    options += ["--seconds", "400", "--out", str(out)]
    command = [sys.executable, str(ROOT / "scripts/bench_gpu.py"), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in out.iterdir()) == ["bench_gpu.json", "bench_gpu.md"]
    return done, json.loads((out / "bench_gpu.json").read_text()), (out / "bench_gpu.md").read_text()


def test_rehearsal_says_so(rehearsal):
    done, record, text = rehearsal
    assert record["rehearsal"] is True
    assert record["note"] == REHEARSAL
    assert REHEARSAL in text
    assert text in done.stdout
    assert {goal["met"] for goal in record["goals"]} == {None}
    assert "met" not in text.replace("not measured", "")


def test_rehearsal_has_every_figure(rehearsal):
    record = rehearsal[1]
    assert set(record["products"]) == {"g8", "g64"}
    for section in record["products"].values():
        assert list(section["figures"]) == ["balanced", "uneven"]
        for figures in section["figures"].values():
            assert list(figures) == TIMED
            for cells in figures.values():
                assert {"dense", "grouped", "ragged_dot"} <= set(cells)
                assert all(set(cell) >= TIMES and len(cell["runs_ms"]) == 3 for cell in cells.values())
                assert all(cell["temp_bytes"] >= 0 for cell in cells.values())
    layer = record["layers"]["mixtral_8x7b"]
    assert layer["shape"] == {"T": 48, "H": 32, "I": 16, "E": 4, "K": 2, "W": 0}
    for timed in TIMED:
        cells = layer["figures"][timed]
        assert set(cells["ours"]) >= TIMES <= set(cells["ragged_dot"])
        assert "median_ms" in cells["torch"] or cells["torch"]["reason"]
    assert set(record["dense_rate"]) >= TIMES
    assert not record["skipped"]


def test_rehearsal_says_where(rehearsal):
    record = rehearsal[1]
    environment = record["environment"]
    named = {"jax", "jaxlib", "device_kind", "device_count", "xla_flags", "driver", "runtime", "torch", "transformers"}
    assert named <= set(environment)
    assert environment["device_count"] == 2
    assert {"checks", "torch", "dense rate", "g8", "mixtral_8x7b", "g64", "paths"} == set(record["seconds"])


def test_rehearsal_checks_all_that_it_times(rehearsal):
    record = rehearsal[1]
    assert all(check["passed"] and check["difference"] <= check["tolerance"] for check in record["checks"])
    names = {(check["name"].split(",")[0], check["dtype"]) for check in record["checks"]}
    both = {(name, dtype) for name in ("grouped_matmul", "layer") for dtype in ("float32", "bfloat16")}
    assert both <= names
    paths = {check["name"].split(" on 2 devices")[0] for check in record["checks"]} - {n for n, _ in names}
    assert {"packed, all_to_all", "packed, ragged"} <= paths
    assert {("dense on 2 devices", "float32"), ("allgather on 2 devices", "float32")} <= names
    assert set(record["paths"]["figures"]) == set(TIMED)
    for cells in record["paths"]["figures"].values():
        assert set(cells) == {"dense", "allgather", "padded", "packed, all_to_all", "packed, ragged"}
        assert all("median_ms" in cell for cell in cells.values())


# Refusals.


def test_without_a_gpu_it_refuses(tmp_path):
    with pytest.raises(UsageError, match=r"no GPU: JAX finds cpu .*--rehearse") as refusal:
        bench_gpu.main(["--out", str(tmp_path / "out")])
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--runs", "0"], "--runs 0"),
        (["--seconds", "nan"], "--seconds nan"),
        (["--layers", "mixtral"], "unknown layer 'mixtral'; nearest: mixtral_8x7b"),
        (["--devices", "1000", "--rehearse"], "there are 8"),
        (["--quick"], "--quick"),
    ],
)
def test_options_that_mean_nothing(options, said, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # put back what a rehearsal sets
    with pytest.raises(UsageError, match=said):
        bench_gpu.main(options)


# Checks that fail.


def slightly_off(rows, weights, sizes):
    return grouped_matmul(rows, weights, sizes) * 1.02


def tail_not_zero(rows, weights, sizes):
    out = grouped_matmul(rows, weights, sizes)
    return jnp.where(jnp.arange(out.shape[0])[:, None] < sizes.sum(), out, 1e-9).astype(out.dtype)


def does_not_run(rows, weights, sizes):
    raise RuntimeError("no kernel image")


grouped_matmul = _gpu_checks.grouped_matmul


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (slightly_off, "FAILED  grouped_matmul, uneven: result, float32: off by 0.02 of the largest value, 1e-05 is"),
        (tail_not_zero, "FAILED  grouped_matmul, only a tail: result, bfloat16: off by inf"),
        (does_not_run, "FAILED  grouped_matmul, float32: did not run: failed: RuntimeError: no kernel image"),
    ],
)
def test_wrong_products_are_not_timed(wrong, said, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    monkeypatch.setattr(_gpu_checks, "grouped_matmul", wrong)
    monkeypatch.setattr(bench_gpu, "layer_checks", lambda dtype: [])
    monkeypatch.setattr(bench_gpu, "measured", lambda *_: pytest.fail("timed"))
    with pytest.raises(SystemExit) as ended:
        bench_gpu.main(["--rehearse", "--devices", "1", "--out", str(tmp_path / "out")])
    assert ended.value.code == 1
    told = capsys.readouterr()
    assert said in told.err
    assert "nothing was timed" in told.err
    assert not told.out
    assert not (tmp_path / "out").exists()


def test_wrong_gradients_of_the_layer_are_seen(monkeypatch):
    real = _gpu_checks.moe

    def wrong(params, x, config, **kwargs):
        down = params["experts"]["down"]
        params = {**params, "experts": {**params["experts"], "down": 0.9 * down + jax.lax.stop_gradient(0.1 * down)}}
        return real(params, x, config, **kwargs)

    monkeypatch.setattr(_gpu_checks, "moe", wrong)
    failed = {check.name.split(": ")[1] for check in _gpu_checks.layer_checks("float32") if not check.passed}
    assert failed == {"gradient of experts down"}


def test_difference():
    want = np.array([[4.0, 0.0], [0.0, 0.0]], np.float32)
    assert difference(want, want) == 0
    assert difference(np.array([[4.0, 1.0], [0.0, 0.0]]), want) == 0.25
    assert difference(np.array([[4.0, 0.0], [0.0, 1e-30]]), want) == float("inf")
    assert difference(np.array([[4.0, 0.0], [0.0, np.nan]]), want) == float("inf")
    assert not difference(np.array([[4.0, np.nan], [0.0, 0.0]]), want) <= 1
    assert difference(0 * want, 0 * want) == 0


# Times.


def test_measure_says_why_there_is_no_time():
    def too_large(x):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.")

    def unsupported(x):
        raise NotImplementedError("not on\nthis card")

    x = jnp.ones((4, 4))
    double = lambda x: 2 * x
    cells = measure(
        "it", {"fits": (double, (x,)), "large": (too_large, (x,)), "no": (unsupported, (x,))}, 8e9, how(runs=5)
    )
    assert cells["large"] == {"reason": "out of memory"}
    assert cells["no"] == {"reason": "failed: NotImplementedError: not on"}
    fits = cells["fits"]
    assert len(fits["runs_ms"]) == 5
    assert fits["calls_a_run"] > 1
    assert fits["tflops"] == pytest.approx(8 / fits["median_ms"])
    late = how(seconds=-1)
    assert measure("it", {"fits": (double, (x,))}, 1, late) == {"fits": {"reason": OUT_OF_TIME}}
    assert late.budget.skipped == ["it, fits"]


def test_forward_and_backward_are_both_there():
    y, gradients = forward_and_backward(lambda a, b, c: a * b + c)(
        jnp.float32(2), (jnp.float32(3), jnp.float32(5)), 7.0
    )
    assert (float(y), [float(g) for g in gradients]) == (22, [10, 6])


# Torch, in a process of its own.


def interpreter(folder, body):
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_torch_tells_what_it_has(tmp_path):
    lines = ['{"versions": {"torch": "9.9"}}', '{"layer": {"mixtral_8x7b": {"forward": {"median_ms": 2.0}}}}']
    body = "echo chatter\n" + "\n".join(f"echo '{line}'" for line in lines) + "\necho CUDA went away >&2; exit 3"
    told = _gpu_layers.torch_peer(["mixtral_8x7b", "qwen3_30b_a3b"], interpreter(tmp_path, body), how())
    assert told["versions"] == {"torch": "9.9"}
    assert told["layers"]["mixtral_8x7b"]["forward"]["tflops"] > 0
    ended = {"reason": "failed: CUDA went away"}
    assert told["layers"]["mixtral_8x7b"]["forward+backward"] == ended
    assert told["layers"]["qwen3_30b_a3b"] == {"forward": ended, "forward+backward": ended}


def test_torch_that_is_not_there_or_does_not_end(tmp_path):
    missing = _gpu_layers.torch_peer(["mixtral_8x7b"], str(tmp_path / "none"), how())
    assert missing["layers"]["mixtral_8x7b"]["forward"]["reason"].endswith("No such file or directory")
    endless = interpreter(tmp_path, "echo '{\"versions\": {}}'\nexec sleep 60")
    stopped = _gpu_layers.torch_peer(["mixtral_8x7b"], endless, how(seconds=1))
    assert stopped["reason"].startswith("stopped after")
    late = how(seconds=-1)
    assert _gpu_layers.torch_peer(["mixtral_8x7b"], endless, late)["reason"] == OUT_OF_TIME
    assert late.budget.skipped == ["torch"]


# Verdicts.


def record(grouped, ours, peer, rehearsal=False):
    """A record with the same cells everywhere; the dense product takes 7 ms."""
    cells = {"dense": cell(7.0), "grouped": grouped}
    figures = {sizes: dict.fromkeys(TIMED, cells) for sizes in ("balanced", "uneven")}
    layer = {"shape": {"T": 8}, "figures": {timed: {"ours": ours, "torch": peer} for timed in TIMED}}
    return {
        "rehearsal": rehearsal,
        "dense_rate": {**cell(1.0), "side": 8},
        "products": {"g8": {"shape": {"G": 8}, "figures": figures}},
        "layers": {"mixtral_8x7b": layer},
    }


def cell(ms):
    return {"median_ms": ms, "min_ms": ms, "max_ms": ms, "runs_ms": [ms, ms], "tflops": 1 / ms}


@pytest.mark.parametrize(
    ("grouped", "ours", "peer", "of_dense", "faster"),
    [
        (cell(10.0), cell(3.0), cell(6.0), (0.7, True), (2.0, True)),
        (cell(10.1), cell(3.0), cell(3.0), (7 / 10.1, False), (1.0, False)),
        ({"reason": "out of memory"}, {"reason": "failed: it"}, cell(3.0), (None, False), (None, False)),
        ({"reason": OUT_OF_TIME}, {"reason": OUT_OF_TIME}, cell(3.0), (None, None), (None, None)),
        (cell(5.0), cell(3.0), {"reason": "out of memory"}, (1.4, True), (None, None)),
    ],
)
def test_verdicts(grouped, ours, peer, of_dense, faster):
    made = record(grouped, ours, peer)
    goals = judged(made)
    dense = [goal for goal in goals if "dense product" in goal["goal"]]
    torch = [goal for goal in goals if "torch" in goal["goal"]]
    assert (len(dense), len(torch), len(goals)) == (4, 2, 4 + 2 * 3)
    for found, (ratio, met) in [*((goal, of_dense) for goal in dense), *((goal, faster) for goal in torch)]:
        assert found["met"] is met
        assert found["ratio"] == (None if ratio is None else pytest.approx(ratio))
    absent = [goal for goal in goals if "tokamax" in goal["goal"]]
    assert all(goal["met"] is None for goal in absent)
    word = {True: "met", False: "NOT met", None: "not measured"}
    assert all(word[goal["met"]] in line for goal, line in zip(goals, verdicts(goals), strict=True))
    assert table(made).count("\n") == 2 + 8 + 4
    assert {goal["met"] for goal in judged(record(grouped, ours, peer, rehearsal=True))} == {None}


def test_a_section_that_ended_early_is_told():
    made = record(cell(1.0), cell(1.0), cell(2.0))
    made["layers"]["mixtral_8x7b"] = {"shape": {}, "figures": {}, "reason": "out of memory"}
    told = [goal for goal in judged(made) if "mixtral" in goal["goal"]]
    assert len(told) == 6
    assert {(goal["met"], goal["why"]) for goal in told} == {(None, "out of memory")}
    assert "out of memory" in table(made)


def test_peak_memory_is_told_where_it_is_known():
    made = record(cell(1.0), cell(1.0), cell(2.0))
    made |= {"environment": {"jax": "1", "device_count": 1, "device_kind": "it"}, "how": {"runs": 2, "warmup": 1}}
    made |= {"goals": judged(made), "skipped": ["g64"], "peak_bytes_so_far": {"torch": None, "g8": 3 * 2**29}}
    text = markdown(made)
    assert "up to the end of: g8 1.5 GiB." in text
    assert "Skipped, out of time: g64." in text


# The configuration.


def test_deepseek_moe_16b_is_the_published_layer():
    """config.json of deepseek-ai/deepseek-moe-16b-base."""
    workload = load_config("deepseek_moe_16b")
    layer = workload.moe
    assert (layer.hidden_size, layer.intermediate_size, layer.num_experts, layer.router.top_k) == (2048, 1408, 64, 6)
    assert (layer.num_shared_experts, layer.shared_width, layer.shared_gate) == (2, 2816, False)
    assert (layer.router.score_function, layer.router.normalize_weights, layer.router.scale) == ("softmax", False, 1.0)
    assert workload.batch_size * workload.sequence_length == 16384
