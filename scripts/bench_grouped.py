"""Grouped products against jax.lax.ragged_dot and dense products of the same FLOPs, on one device.

    python scripts/bench_grouped.py

Takes three to six minutes on two CPU cores. Every case runs in fresh processes, its contestants interleaved run by run.
A ratio is one of medians within one process, and the best process counts, since a process can be slow as a whole.
A timed run is one compiled call, blocked on. Prints a table and writes DIR/bench_grouped.json.

Letters: T tokens, K top_k, E experts, H hidden, I intermediate; plain products are [M, K] x [G, K, N].
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from _common import Parser, UsageError, nearest, refuse_bad_folder, run_main, write_files
from jax_ep import grouped_matmul, moe
from jax_ep.bench.clock import compare_runs
from jax_ep.config import MoEConfig, RouterConfig
from jax_ep.experts import init_expert_params

CASES: dict[str, dict[str, Any]] = {
    "plain_g8": {"kind": "plain", "G": 8, "M": 4096, "K": 512, "N": 1024},
    "plain_g64": {"kind": "plain", "G": 64, "M": 4096, "K": 512, "N": 256},
    "layer_e8": {"kind": "layer", "T": 2048, "H": 512, "I": 1024, "E": 8, "K": 2},
    "layer_e64": {"kind": "layer", "T": 2048, "H": 512, "I": 512, "E": 64, "K": 8},
}
# (case, what is timed, "slower/faster contestant", goal, whether the ratio should be at least or at most the goal)
GOALS = [
    ("plain_g8", "forward", "ragged_dot/grouped", 6.0, "at least"),
    ("plain_g64", "forward", "ragged_dot/grouped", 25.0, "at least"),
    ("layer_e8", "forward", "layer/dense", 1.2, "at most"),
    ("layer_e8", "forward+backward", "layer/dense", 1.35, "at most"),
    ("layer_e64", "forward", "layer/dense", 1.3, "at most"),
    ("layer_e64", "forward+backward", "layer/dense", 1.4, "at most"),
]

Call = Callable[[], Any]


def uneven_sizes(groups: int, rows: int) -> np.ndarray:
    """[G] near-balanced sizes that sum to `rows`: what multinomial routing of uniform tokens gives."""
    return np.random.default_rng(0).multinomial(rows, np.full(groups, 1 / groups)).astype(np.int32)


def compiled(function: Callable[..., Any], *args: Any) -> tuple[Call, float]:
    """The compiled call on `args` and the seconds that tracing and compiling took."""
    start = time.perf_counter()
    program = jax.jit(function).lower(*args).compile()
    return lambda: jax.block_until_ready(program(*args)), time.perf_counter() - start


def plain_contestants(case: dict[str, Any]) -> dict[str, dict[str, tuple[Call, float]]]:
    keys = jax.random.split(jax.random.key(0), 2)
    rows = jax.random.normal(keys[0], (case["M"], case["K"]))
    weights = jax.random.normal(keys[1], (case["G"], case["K"], case["N"]))
    sizes = jnp.asarray(uneven_sizes(case["G"], case["M"]))
    grouped = compiled(grouped_matmul, rows, weights, sizes)
    ragged = compiled(jax.lax.ragged_dot, rows, weights, sizes)
    np.testing.assert_allclose(grouped[0](), ragged[0](), rtol=1e-3, atol=1e-3)
    return {"forward": {"grouped": grouped, "ragged_dot": ragged, "dense": compiled(jnp.matmul, rows, weights[0])}}


def layer_contestants(case: dict[str, Any]) -> dict[str, dict[str, tuple[Call, float]]]:
    config = MoEConfig(case["H"], case["I"], case["E"], RouterConfig(case["K"]))
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (case["T"], case["H"]))
    router = jax.random.normal(keys[1], (case["H"], case["E"])) * case["H"] ** -0.5
    params = {"router": {"kernel": router}, "experts": init_expert_params(config, keys[2], case["E"])}
    dense_x = jax.random.normal(keys[3], (case["T"] * case["K"], case["H"]))
    dense_params = {name: weight[0] for name, weight in params["experts"].items()}

    def layer(params: Any, x: jax.Array) -> jax.Array:
        return moe(params, x, config)[0]

    def dense(params: Any, x: jax.Array) -> jax.Array:
        return (jax.nn.silu(x @ params["gate"]) * (x @ params["up"])) @ params["down"]

    def with_gradients(function: Callable[..., jax.Array], cotangent: jax.Array) -> Callable[..., Any]:
        return jax.value_and_grad(lambda params, x: jnp.vdot(function(params, x), cotangent), argnums=(0, 1))

    d_x, d_dense = jax.random.normal(keys[4], x.shape), jax.random.normal(keys[4], dense_x.shape)
    return {
        "forward": {"layer": compiled(layer, params, x), "dense": compiled(dense, dense_params, dense_x)},
        "forward+backward": {
            "layer": compiled(with_gradients(layer, d_x), params, x),
            "dense": compiled(with_gradients(dense, d_dense), dense_params, dense_x),
        },
    }


def measure(case: dict[str, Any], runs: int, warmup: int) -> dict[str, Any]:
    """One process's figures: {what is timed: {contestant: {...}}}."""
    contestants = plain_contestants(case) if case["kind"] == "plain" else layer_contestants(case)
    figures: dict[str, Any] = {}
    for timed, entries in contestants.items():
        times = compare_runs({name: call for name, (call, _) in entries.items()}, warmup=warmup, runs=runs)
        figures[timed] = {
            name: {
                "median_ms": times[name].median_ms,
                "min_ms": times[name].min_ms,
                "max_ms": times[name].max_ms,
                "compile_s": seconds,
            }
            for name, (_, seconds) in entries.items()
        }
    return figures


def in_fresh_process(name: str, runs: int, warmup: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", name, "--runs", str(runs), "--warmup", str(warmup)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def ratios_of(figures: dict[str, Any], timed: str, ratio: str) -> float:
    over, under = ratio.split("/")
    return figures[timed][over]["median_ms"] / figures[timed][under]["median_ms"]


def judged(processes: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Every goal whose case ran, with the ratio of each process and the best."""
    rows = []
    for case, timed, ratio, goal, side in GOALS:
        if case in processes:
            each = [ratios_of(figures, timed, ratio) for figures in processes[case]]
            best = max(each) if side == "at least" else min(each)
            met = best >= goal if side == "at least" else best <= goal
            row = {"case": case, "timed": timed, "ratio": ratio, "each": each, "best": best}
            rows.append(row | {"goal": f"{side} {goal}", "met": met})
    return rows


def print_figures(name: str, case: dict[str, Any], processes: list[dict[str, Any]]) -> None:
    shape = " ".join(f"{letter}={size}" for letter, size in case.items() if letter != "kind")
    print(f"\n{name}: {shape}, float32")
    print(f"  {'timed':17} {'contestant':11} {'median ms (each process)':30} {'min':>8} {'max':>8} {'compile s':>10}")
    for timed, contestants in processes[0].items():
        for contestant in contestants:
            each = [figures[timed][contestant] for figures in processes]
            medians = "  ".join(f"{one['median_ms']:.1f}" for one in each)
            low, high = min(one["min_ms"] for one in each), max(one["max_ms"] for one in each)
            seconds = statistics.median(one["compile_s"] for one in each)
            print(f"  {timed:17} {contestant:11} {medians:30} {low:8.1f} {high:8.1f} {seconds:10.1f}", flush=True)


def main(argv: Sequence[str]) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("out/bench"), help="folder for the JSON (default: %(default)s)"
    )
    parser.add_argument("--cases", default=",".join(CASES), help=f"some of {','.join(CASES)}")
    parser.add_argument("--processes", type=int, default=3, help="fresh processes a case (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=7, help="timed runs (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="untimed runs before them (default: %(default)s)")
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for field, least in (("processes", 1), ("runs", 1), ("warmup", 0)):
        if getattr(options, field) < least:
            raise UsageError(f"--{field} {getattr(options, field)}: must be at least {least}; --{field} {least} works")
    if options.worker:
        print(json.dumps(measure(CASES[options.worker], options.runs, options.warmup)))
        return
    names = options.cases.split(",")
    for name in names:
        if name not in CASES:
            raise UsageError(f"unknown case {name!r}{nearest(name, CASES)}")
    refuse_bad_folder(options.out, "bench_grouped.json")
    device = jax.devices()[0]
    print(
        f"jax {jax.__version__}, {device.platform} ({device.device_kind}); medians of {options.runs} interleaved runs"
    )
    processes: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        processes[name] = [in_fresh_process(name, options.runs, options.warmup) for _ in range(options.processes)]
        print_figures(name, CASES[name], processes[name])
    goals = judged(processes)
    print("\nratios of medians, one a process; the best counts")
    for row in goals:
        each = "  ".join(f"{value:.2f}" for value in row["each"])
        verdict = "met" if row["met"] else "NOT met"
        label = f"{row['case']} {row['timed']}, {row['ratio']}"
        print(f"  {label:48} {each:22} best {row['best']:6.2f}, goal {row['goal']}: {verdict}")
    record = {
        "environment": {"jax": jax.__version__, "platform": device.platform, "device_kind": device.device_kind},
        "timed": "one compiled call, until its results are ready",
        "runs": options.runs,
        "warmup": options.warmup,
        "cases": CASES,
        "processes": processes,
        "goals": goals,
    }
    write_files(options.out, {"bench_grouped.json": (json.dumps(record, indent=1) + "\n").encode()})


if __name__ == "__main__":
    run_main(main)
