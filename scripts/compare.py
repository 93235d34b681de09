"""Runs one layer along several paths, same weights and text, and shows times, bytes, collectives and differences.

    python scripts/compare.py                                              configs/tiny_cpu.py, all four modes
    python scripts/compare.py --config mini_infer --modes packed,padded dtype=bfloat16
    python scripts/compare.py --backward --expert-parallel 4 data_parallel=2 recv_rows_factor=1.25

Without accelerators it simulates devices on the CPU and says so. Writes OUT/compare.json and OUT/compare.png.

Letters: D data-parallel replicas, R ranks, T tokens of the whole batch, K top_k, E experts, H hidden.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import Progress

from _common import (
    Parser,
    UsageError,
    load_config,
    nearest,
    override,
    refuse_bad_folder,
    run_main,
    simulate_devices,
    write_files,
)
from _compare_report import picture, print_table, require_matplotlib
from _text import RECIPE, hidden_states, read_text, sequences
from jax_ep import MoEConfig, byte_ledger, make_mesh, moe, route
from jax_ep import plan as planning
from jax_ep.aot import count_collectives
from jax_ep.bench import Timing, compare_runs
from jax_ep.config import MODES, CommConfig, WorkloadConfig
from jax_ep.layer import init_params, param_shardings, resolve_transport
from jax_ep.routing import router_logits

ONE_DEVICE = "grouped_one_device"
OWN_MESH = "a config of your own; this script makes its mesh itself, with axes data and expert"
SET_ELSEWHERE = {"moe.comm.mode": "--modes dense,packed"} | dict.fromkeys(
    ("moe.expert_axis", "moe.token_axes", "moe.shard_sequence"), OWN_MESH
)


def main(argv: Sequence[str]) -> None:
    args = _arguments(argv)
    simulate_devices(args.devices)
    modes = _modes(args.modes)
    workload = _workload(args)
    refuse_bad_folder(args.out, "compare.png", "compare.json")
    require_matplotlib()
    text = read_text(args.text)
    tokens = sequences(text, workload.batch_size, workload.sequence_length)
    devices = _devices(workload, args.devices)

    mesh = make_mesh(workload.expert_parallel, workload.data_parallel, devices)
    states = hidden_states(tokens, workload.moe.hidden_size).reshape(-1, workload.moe.hidden_size)  # [T, H]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bench = Bench(workload, mesh, states, args.backward, progress)
        programs = bench.compile([*modes, *([ONE_DEVICE] if "packed" in modes else [])])
        timings = bench.time(programs)
        record = bench.record(programs, timings, modes, text.source, args.config)
    refuse_bad_folder(args.out, "compare.png", "compare.json")
    content = (json.dumps(record, indent=2) + "\n").encode()
    write_files(args.out, {"compare.png": picture(record), "compare.json": content})
    print_table(record)
    print(f"written: {args.out / 'compare.json'}, {args.out / 'compare.png'}")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="compare.py", description=__doc__)
    parser.add_argument("--config", default="tiny_cpu", help="a file in configs/, or a path (default: %(default)s)")
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--expert-parallel", metavar="R", help="ranks the experts are spread over")
    parser.add_argument("--runs", metavar="N", help="timed runs of every mode")
    parser.add_argument("--warmup", metavar="N", help="untimed runs of every mode before that")
    parser.add_argument("--backward", action="store_true", help="time forward and backward together")
    parser.add_argument("--text", metavar="FILE", help="text to take hidden states of (default: Python's own sources)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/compare"), help="folder for results (default: %(default)s)"
    )
    parser.add_argument(
        "--devices", type=int, metavar="N", help="devices to simulate without accelerators (default: 8)"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields of the config, as in top_k=4")
    args = parser.parse_known_or_refuse(argv)
    if args.devices is not None and args.devices < 1:
        raise UsageError(f"devices={args.devices}: must be at least 1; --devices 8 works")
    return args


def _modes(text: str) -> list[str]:
    modes = [mode.strip() for mode in text.split(",") if mode.strip()]
    for mode in modes:
        if mode not in MODES:
            raise UsageError(f"unknown mode {mode!r}{nearest(mode, MODES)}")
    if not modes:
        raise UsageError(f"modes={text!r}: names no mode; there are: {', '.join(MODES)}")
    return list(dict.fromkeys(modes))


def _workload(args: argparse.Namespace) -> WorkloadConfig:
    options = {"expert_parallel": args.expert_parallel, "runs": args.runs, "warmup": args.warmup}
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    workload: WorkloadConfig = override(load_config(args.config), [*args.overrides, *given], elsewhere=SET_ELSEWHERE)
    return workload


def _devices(workload: WorkloadConfig, asked: int | None) -> list[Any]:
    """The first devices that the mesh needs."""
    need = workload.expert_parallel * workload.data_parallel
    try:
        have = jax.devices() if asked is None else jax.devices()[:asked]
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"JAX finds no device ({error}); JAX_PLATFORMS=cpu works") from error
    if need > len(have):
        fits = workload.data_parallel <= len(have)
        works = f"--expert-parallel {len(have) // workload.data_parallel} works" if fits else "data_parallel=1 works"
        if jax.default_backend() == "cpu":
            works += f", and so does --devices {need}"
        mesh = f"expert_parallel={workload.expert_parallel}, data_parallel={workload.data_parallel}"
        raise UsageError(f"{mesh}: needs {need} devices and there are {len(have)}; {works}")
    return list(have[:need])


def mode_config(moe_config: MoEConfig, mode: str) -> MoEConfig:
    """The layer with its own comm for packed, and for another mode what that mode reads of it."""
    comm = moe_config.comm
    if mode == "padded":
        comm = CommConfig(mode=mode, capacity_factor=comm.capacity_factor)
    elif mode == "packed":
        comm = dataclasses.replace(comm, mode=mode)
    else:
        comm = CommConfig(mode=mode)
    return dataclasses.replace(moe_config, comm=comm)


@dataclasses.dataclass(frozen=True)
class Program:
    """One mode, compiled, with one run's results."""

    config: MoEConfig
    call: Callable[[], Any]
    compile_s: float
    lowered: str
    temp_bytes: int | None
    outputs: list[np.ndarray]
    stats: Any


class Bench:
    """One workload on one mesh: builds, times and describes its programs."""

    def __init__(
        self, workload: WorkloadConfig, mesh: Mesh, states: np.ndarray, backward: bool, progress: Progress
    ) -> None:
        self.workload, self.mesh, self.backward, self.progress = workload, mesh, backward, progress
        self.config = mode_config(workload.moe, "packed")
        self.states = np.asarray(jnp.asarray(states, self.config.dtype))  # [T, H]
        cotangent = np.random.default_rng(1).standard_normal(states.shape)
        self.cotangent = np.asarray(jnp.asarray(cotangent, self.config.dtype))  # [T, H]
        params = init_params(self.config, jax.random.key(0), ranks=workload.expert_parallel)
        self.params = jax.tree.map(np.asarray, params)

    def compile(self, names: Sequence[str]) -> dict[str, Program]:
        """Compiles and runs each once; dense is always among them, for the differences."""
        wanted = list(dict.fromkeys(["dense", *names]))
        task = self.progress.add_task("compiling", total=len(wanted))
        programs = {}
        for name in wanted:
            programs[name] = self._program(name)
            self.progress.console.print(f"compiled {name} in {programs[name].compile_s:.1f} s", highlight=False)
            self.progress.advance(task)
        self.progress.remove_task(task)
        return programs

    def _program(self, name: str) -> Program:
        mesh = None if name == ONE_DEVICE else self.mesh
        config = mode_config(self.config, "packed" if mesh is None else name)

        def forward(params: Any, x: jax.Array, cotangent: jax.Array) -> Any:
            return moe(params, x, config, mesh=mesh)

        def forward_and_backward(params: Any, x: jax.Array, cotangent: jax.Array) -> Any:
            y, pull, stats = jax.vjp(lambda p, a: moe(p, a, config, mesh=mesh), params, x, has_aux=True)
            return y, stats, pull(cotangent)

        arguments = self._place(config, mesh)
        start = time.perf_counter()
        lowered = jax.jit(forward_and_backward if self.backward else forward).trace(*arguments).lower()
        compiled = lowered.compile()
        compile_s = time.perf_counter() - start
        y, stats, *gradients = jax.block_until_ready(compiled(*arguments))
        memory = compiled.memory_analysis()
        return Program(
            config=config,
            call=lambda: compiled(*arguments),
            compile_s=compile_s,
            lowered=lowered.as_text(),
            temp_bytes=None if memory is None else int(memory.temp_size_in_bytes),
            outputs=[np.asarray(leaf, np.float32) for leaf in jax.tree.leaves((y, gradients))],
            stats=jax.tree.map(np.asarray, stats),
        )

    def _place(self, config: MoEConfig, mesh: Mesh | None) -> tuple[Any, jax.Array, jax.Array]:
        """Parameters, hidden states and cotangent where the layer wants them, so that no run pays for moving them."""
        if mesh is None:
            device = self.mesh.devices.flat[0]
            experts = {name: leaf[: config.num_experts] for name, leaf in self.params["experts"].items()}
            router = {name: leaf[..., : config.num_experts] for name, leaf in self.params["router"].items()}
            params = {**self.params, "experts": experts, "router": router}
            return jax.device_put((params, self.states, self.cotangent), device)
        divides = self.states.shape[0] % mesh.size == 0
        rows = NamedSharding(mesh, P(("data", "expert")) if divides else P())
        params = jax.device_put(self.params, param_shardings(config, mesh))
        return params, jax.device_put(self.states, rows), jax.device_put(self.cotangent, rows)

    def time(self, programs: dict[str, Program]) -> dict[str, Timing]:
        rounds = self.workload.warmup + self.workload.runs
        task = self.progress.add_task("running", total=rounds * len(programs))
        calls = {name: program.call for name, program in programs.items()}
        advance = lambda name: self.progress.advance(task)
        return compare_runs(calls, warmup=self.workload.warmup, runs=self.workload.runs, on_run=advance)

    def counts(self) -> np.ndarray:
        """[D, R, E] assignments of each rank to each expert: the layer's routing once more, outside the timed part."""
        router = {name: jnp.asarray(leaf) for name, leaf in self.params["router"].items()}
        logits = router_logits(jnp.asarray(self.states), router["kernel"], router.get("bias"))
        chosen = route(logits, self.config.router, selection_bias=router.get("selection_bias")).experts
        ranks = self.mesh.size
        share = -(-len(chosen) // ranks)
        experts = self.config.num_experts
        parts = [np.asarray(chosen)[rank * share : (rank + 1) * share].reshape(-1) for rank in range(ranks)]
        counts = np.stack([np.bincount(part, minlength=experts)[:experts] for part in parts])
        return counts.reshape(*self.mesh.devices.shape, experts)

    def record(
        self, programs: dict[str, Program], timings: dict[str, Timing], modes: list[str], source: str, config_name: str
    ) -> dict[str, Any]:
        """Everything compare.json holds."""
        counts = self.counts()
        tokens = self.states.shape[0]
        ledgers = {mode: self._ledger(programs[mode], counts) for mode in modes}
        reference = self._ledger(programs.get("packed", programs["dense"]), counts)["reference"]
        described = {
            mode: self._describe(programs[mode], timings[mode], ledgers[mode], programs["dense"]) for mode in modes
        }
        medians = {name: timing.median_ms for name, timing in timings.items() if name in (*modes, ONE_DEVICE)}
        pairs = [("packed", "dense"), ("packed", "padded"), ("packed", ONE_DEVICE)]
        record = {
            "environment": _environment(),
            "workload": self._workload(counts, source, config_name),
            "timed": "forward+backward" if self.backward else "forward",
            "timed_region": _timed_region(self.backward),
            "modes": described,
            "reference_bytes": reference,
            "ratios": {
                f"{a}/{b}": medians[a] / medians[b] if a in medians and b in medians else None for a, b in pairs
            },
            "notes": self._notes(programs, modes),
        }
        if ONE_DEVICE in timings:
            alone = programs[ONE_DEVICE]
            record["one_device"] = {
                **_times(timings[ONE_DEVICE], tokens),
                "compile_s": alone.compile_s,
                "temp_bytes": alone.temp_bytes,
                "max_abs_diff": _difference(alone, programs["dense"]),
            }
        return record

    def _ledger(self, program: Program, counts: np.ndarray) -> dict[str, Any]:
        if (factor := program.config.comm.capacity_factor) is not None:
            top_k, experts = self.config.router.top_k, self.config.num_experts
            tokens = counts.sum((1, 2)) // top_k  # [D]
            capacity = planning.capacity(factor, tokens, top_k, experts)[:, None, None]
            ahead = counts.cumsum(1) - counts  # of lower ranks, which come first
            counts = np.clip(capacity - ahead, 0, counts)  # [D, R, E]
        share = -(-self.states.shape[0] // self.mesh.size)
        return byte_ledger(
            program.config,
            counts,
            tokens_per_rank=share,
            total_tokens=self.states.shape[0],
            transport=resolve_transport(program.config, self.mesh),
        )

    def _describe(self, program: Program, timing: Timing, ledger: dict[str, Any], dense: Program) -> dict[str, Any]:
        moved = dict(ledger["forward"])
        if self.backward:
            moved = {kind: moved[kind] + ledger["backward"][kind] for kind in moved}
        collectives = count_collectives(program.lowered)
        return {
            **_times(timing, self.states.shape[0]),
            "compile_s": program.compile_s,
            "max_abs_diff": _difference(program, dense),
            "transport": ledger["transport"],
            "rounds": int(program.stats.rounds),
            "dropped_rows": int(program.stats.dropped_rows),
            "bytes": moved,
            "shard_ratio": ledger["shard_ratio"],
            "collectives": {kind: count._asdict() for kind, count in collectives.items() if any(count)},
            "temp_bytes": program.temp_bytes,
        }

    def _workload(self, counts: np.ndarray, source: str, config_name: str) -> dict[str, Any]:
        w, c = self.workload, self.config
        per_expert = counts.sum((0, 1))
        busiest, idlest = (float(extreme / per_expert.mean()) for extreme in (per_expert.max(), per_expert.min()))
        spread = f"the busiest expert has {busiest:.2f} times the mean load, the idlest {idlest:.2f}"
        return {
            "config": config_name,
            "batch_size": w.batch_size,
            "sequence_length": w.sequence_length,
            "tokens": self.states.shape[0],
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_experts": c.num_experts,
            "top_k": c.router.top_k,
            "activation": c.activation,
            "dtype": c.dtype,
            "param_dtype": c.param_dtype,
            "expert_parallel": w.expert_parallel,
            "data_parallel": w.data_parallel,
            "warmup": w.warmup,
            "runs": w.runs,
            "packed": dataclasses.asdict(c.comm),
            "source": f"{source}: {w.batch_size} sequences of {w.sequence_length} bytes at even distances; {RECIPE}",
            "routing": f"the layer's own router with random weights; {spread}",
            "tokens_per_expert": per_expert.tolist(),
        }

    def _notes(self, programs: dict[str, Program], modes: list[str]) -> list[str]:
        notes = []
        if jax.default_backend() == "cpu":
            notes.append(
                f"{self.mesh.size} simulated devices share this machine's cores and memory: times rank the work each "
                "path does, not links. Bytes and rounds are those of the transport in compare.json; on CPU, ragged "
                "crosses by all_gather."
            )
        if self.config.dtype == "float32":
            notes.append("float32: every byte figure is twice that of 2-byte elements, which published figures use.")
        if self.backward:
            notes.append(
                "bytes are forward plus backward, without the gradient reductions of parameters that every rank holds; "
                "reference_bytes are of one forward."
            )
        if len(modes) > 1:
            notes.append("modes take turns, run by run, and each round starts with another.")
        dropped = [mode for mode in modes if int(programs[mode].stats.dropped_rows)]
        if dropped:
            notes.append(f"capacity_factor drops rows in {', '.join(dropped)}: max_abs_diff shows that, too.")
        return notes


def _times(timing: Timing, tokens: int) -> dict[str, Any]:
    return {
        "median_ms": timing.median_ms,
        "min_ms": timing.min_ms,
        "max_ms": timing.max_ms,
        "runs_ms": list(timing.runs_ms),
        "tokens_per_s": tokens / timing.median_ms * 1e3,
    }


def _difference(program: Program, reference: Program) -> float:
    """Largest difference of outputs (and gradients); empty experts that pad one of two programs have no counterpart."""
    shared = lambda a, b: tuple(slice(min(m, n)) for m, n in zip(a.shape, b.shape, strict=True))
    pairs = [(a, b, shared(a, b)) for a, b in zip(program.outputs, reference.outputs, strict=True)]
    return max(float(np.abs(a[both] - b[both]).max()) for a, b, both in pairs)


def _environment() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "device_count": jax.device_count(),
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "cpu_cores": os.cpu_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "simulated": device.platform == "cpu",
    }


def _timed_region(backward: bool) -> str:
    held = "routing, planning, packing, control, exchanges, experts, combine, statistics"
    more = ", and the gradients of inputs, router and experts for a fixed random cotangent" if backward else ""
    return f"one compiled call of the whole layer, blocked on: {held}{more}"


if __name__ == "__main__":
    run_main(main)
