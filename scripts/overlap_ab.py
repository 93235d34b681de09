"""Two runs that differ in exactly one switch, in turns: step time, and how much communication runs beside computation.

    python scripts/overlap_ab.py num_chunks=1:2                              one layer of configs/tiny_cpu.py
    python scripts/overlap_ab.py --layer mini_infer --switch delay_wgrad_compute=off,on num_chunks=2
    python scripts/overlap_ab.py --train tiny_lm --runs 9 dedup=False:True   training steps
    python scripts/overlap_ab.py --routing recorded dedup=False:True dtype=bfloat16

A:B or --switch key=A,B is the switch; key=value sets a field of both runs. Parameters, data, routing, mesh and flags
are shared, and runs alternate. --layer times forward and backward of one layer for a routing that is forced on it:
balanced, or recorded from its own router once. --train times training steps, whose routers choose for themselves;
whether they chose alike is told. A profile of one further step of each side, outside the timed runs, gives the union of
communication, of computation, and of both at once; kernels' times are never summed.

A speed-up is told only where losses and gradients agree to rounding and the medians are further apart than the middle
half of a side's runs (of fewer than nine runs: than all of them). On a CPU devices are simulated, and XLA:CPU hardly
overlaps: times there rank work, nothing else.
Writes OUT/overlap_ab.json and the two traces, for a profile viewer.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from _common import (
    Parser,
    UsageError,
    environment,
    load_config,
    load_train_config,
    refuse_bad_folder,
    run_main,
    simulate_devices,
    visible_devices,
    write_files,
)
from _overlap import (
    MIN_RUNS,
    TOLERANCES,
    Outcome,
    Switch,
    judge,
    loss_difference,
    read_switch,
    two_configs,
)
from _overlap_report import print_overlap
from _overlap_runs import (
    ROUTINGS,
    Side,
    gradient_difference,
    layer_flops,
    layer_sides,
    norm_difference,
    over_devices,
    profile,
    train_flops,
    train_sides,
)
from _text import hidden_states, read_text, sequences
from jax_ep import make_mesh
from jax_ep.bench import Timing, compare_runs
from jax_ep.config import MoEConfig, one_of
from jax_ep.overlap import check_flags
from jax_ep.training.config import TrainConfig
from jax_ep.training.data import Windows, read_documents, split

RECORD = "overlap_ab.json"
TRACES = ("overlap_ab_a.xplane.pb", "overlap_ab_b.xplane.pb")
OWN_MESH = "a config of your own; this script makes its mesh itself, with axes data and expert"
_AXES = ("expert_axis", "token_axes", "shard_sequence")
_TRAINED = ("accumulation", "shard_weights")


def main(argv: Sequence[str]) -> None:
    args = _arguments(argv)
    refuse_bad_folder(args.out, RECORD, *TRACES)
    check_flags(os.environ.get("XLA_FLAGS", ""))
    simulate_devices(args.devices, in_order=True)
    switches = [item for item in args.overrides if ":" in item.partition("=")[2]]
    shared = [item for item in args.overrides if item not in switches]
    switches += args.switch
    training = args.train is not None
    base = load_train_config(args.train) if training else load_config(args.layer)
    at = "model.moe." if training else "moe."
    elsewhere = dict.fromkeys((at + axis for axis in _AXES), OWN_MESH)
    kind = "a ModelConfig or MoEConfig, accumulation or shard_weights" if training else "a MoEConfig"
    own = lambda field: field.startswith(("model.", *_TRAINED) if training else "moe.")
    switch = read_switch(switches, shared, base, own, kind)
    configs = two_configs(base, shared, switch, elsewhere)
    record, traces = _run(args, configs, switch, shared)
    write_files(args.out, {RECORD: (json.dumps(record, indent=2, allow_nan=False) + "\n").encode(), **traces})
    print_overlap(record)
    print(f"written: {args.out / RECORD}")


def _run(
    args: argparse.Namespace, configs: tuple[Any, Any], switch: Switch, shared: Sequence[str]
) -> tuple[dict[str, Any], dict[str, bytes]]:
    config, training = configs[0], args.train is not None
    devices = _devices(config, args.devices)
    mesh = make_mesh(config.expert_parallel, config.data_parallel, devices)
    if training:
        flops = train_flops(config)
        text = split(read_documents(None if args.text is None else [args.text], field="text"), config.sequence_length)
        windows = Windows(text.train, config.sequence_length, config.seed)
        sides = train_sides(switch.labels, configs, mesh, windows, args.warmup + args.runs + 2)
    else:
        tokens = config.batch_size * config.sequence_length
        flops = layer_flops(config.moe, tokens)
        ids = sequences(read_text(args.text), config.batch_size, config.sequence_length)
        states = hidden_states(ids, config.moe.hidden_size).reshape(tokens, -1)  # [T, H]
        sides = layer_sides(switch.labels, configs, mesh, states, args.routing)
    same_program = sides[0].lowered.as_text() == sides[1].lowered.as_text()
    for side in sides:
        side.compile()
    for side in sides:
        jax.block_until_ready(side.step())
    gradient = gradient_difference(sides)
    timings = compare_runs({side.label: side.step for side in sides}, warmup=args.warmup, runs=args.runs)
    gradient = norm_difference(sides) if gradient is None else gradient
    outcomes = [_outcome(side, timings[side.label]) for side in sides]
    peak = _peak_bytes(devices)
    described, traces = {}, {}
    for side, outcome, file in zip(sides, outcomes, TRACES):
        described[side.label] = _describe(side, outcome, flops / mesh.size)
        described[side.label]["profile"], traces[file] = _profiled(side)
    dtype = min((_moe(each).dtype for each in configs), key=lambda name: TOLERANCES[name])
    verdict = judge(outcomes[0], outcomes[1], dtype, gradient, same_program)
    loss = loss_difference(outcomes[0], outcomes[1])
    loss_most, gradient_most = TOLERANCES[dtype]
    record = {
        "environment": environment(mesh.size),
        "workload": _workload(args, config, shared),
        "switch": {"field": switch.field, "values": list(switch.texts)},
        "timed_region": "one call of one compiled step, until all its results are ready; data lie on the devices",
        "sides": described,
        "device_peak_bytes": peak,
        "differences": {
            "loss": _number(loss.relative),
            "loss_at_step": loss.step,
            "loss_tolerance": loss_most,
            "gradient": None if gradient is None else _number(gradient),
            "gradient_tolerance": gradient_most,
            "gradient_is": "largest difference of norms" if training else "Frobenius norm of the difference",
            "same_program": same_program,
            "routing_equal": _routing_equal(sides) if training else True,
        },
        "verdict": verdict._asdict(),
    }
    return record | {"notes": _notes(record, training)}, {name: raw for name, raw in traces.items() if raw}


def _outcome(side: Side, timing: Timing) -> Outcome:
    skipped = sum(map(int, side.all_told("skipped")))
    return Outcome(side.label, timing.runs_ms, tuple(map(float, side.all_told("loss"))), skipped)


def _describe(side: Side, outcome: Outcome, flops_a_device: float) -> dict[str, Any]:
    return {
        "median_ms": outcome.median_ms,
        "spread_ms": outcome.spread_ms,
        "min_ms": min(outcome.runs_ms),
        "max_ms": max(outcome.runs_ms),
        "runs_ms": list(outcome.runs_ms),
        "model_tflops_per_device": flops_a_device / outcome.median_ms / 1e9,
        "losses": [_number(loss) for loss in outcome.losses],
        "nan_steps": outcome.nan_steps,
        "skipped_steps": outcome.skipped,
        "dropped_rows": max(map(int, side.all_told("dropped_rows"))),
        "compile_s": side.compile_s,
        **side.memory(),
        "collectives": side.collectives(),
    }


def _profiled(side: Side) -> tuple[dict[str, Any], bytes]:
    devices, raw, reason = profile(side)
    if devices is None:
        return {"reason": reason}, raw
    figures = {name: trace.figures() for name, trace in devices.items()}
    return {"over_devices": over_devices(devices), "devices": figures}, raw


def _routing_equal(sides: Sequence[Side]) -> bool:
    """Whether all experts of all layers had as many tokens in every step."""
    a, b = (side.all_told("counts") for side in sides)
    return all((x == y).all() for x, y in zip(a, b, strict=True))


def _peak_bytes(devices: Sequence[Any]) -> int | None:
    """Of the fullest device since the process began, both sides together; None where devices do not tell."""
    told = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return max((int(peak) for peak in told if peak is not None), default=None)


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _moe(config: Any) -> MoEConfig:
    """The layer of a TrainConfig or a WorkloadConfig."""
    return config.model.moe if isinstance(config, TrainConfig) else config.moe


def _workload(args: argparse.Namespace, config: Any, shared: Sequence[str]) -> dict[str, Any]:
    training, moe = args.train is not None, _moe(config)
    return {
        "kind": "train" if training else "layer",
        "config": args.train if training else args.layer,
        "shared": list(shared),
        "batch_size": config.batch_size,
        "sequence_length": config.sequence_length,
        "hidden_size": moe.hidden_size,
        "intermediate_size": moe.intermediate_size,
        "num_experts": moe.num_experts,
        "top_k": moe.router.top_k,
        "dtype": moe.dtype,
        "expert_parallel": config.expert_parallel,
        "data_parallel": config.data_parallel,
        "seed": config.seed if training else 0,
        "routing": "own" if training else args.routing,
        "warmup": args.warmup,
        "runs": args.runs,
    }


def _notes(record: dict[str, Any], training: bool) -> list[str]:
    notes, flags = [], record["environment"]["xla_flags"]
    if record["environment"]["platform"] == "cpu":
        notes.append(
            "simulated devices share this machine's cores, and XLA:CPU hardly overlaps: times rank the work each side "
            "does, and a collective's time is mostly waiting for the others."
        )
    elif "xla_gpu_enable_latency_hiding_scheduler=true" not in flags:
        rule = "is not in XLA_FLAGS: without it XLA may run collectives in the order of the program"
        notes.append(f"--xla_gpu_enable_latency_hiding_scheduler=true {rule}.")
    if record["workload"]["dtype"] == "float32":
        notes.append("float32: twice the bytes of 2-byte elements.")
    if training and not record["differences"]["routing_equal"]:
        notes.append("the routers did not load experts alike on both sides in every step.")
    for label, side in record["sides"].items():
        if "reason" in side["profile"]:
            notes.append(f"no profile of {label}: {side['profile']['reason']}")
    notes.append("hideable: min(communication, computation), a bound; what waits for what, a profile does not tell.")
    return notes


def _devices(config: Any, asked: int | None) -> list[Any]:
    have, need = visible_devices(asked), config.expert_parallel * config.data_parallel
    if need > len(have):
        mesh = f"expert_parallel={config.expert_parallel}, data_parallel={config.data_parallel}"
        works = f"expert_parallel={len(have)} data_parallel=1 works"
        if jax.default_backend() == "cpu":
            works += f", and so does --devices {need}"
        raise UsageError(f"{mesh}: needs {need} devices and there are {len(have)}; {works}")
    return have[:need]


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="overlap_ab.py", description=__doc__)
    parser.add_argument("--layer", metavar="CONFIG", help="one layer of a file in configs/, or a path (tiny_cpu)")
    parser.add_argument("--train", metavar="CONFIG", help="training steps of such a file, as tiny_lm")
    parser.add_argument("--switch", action="append", default=[], metavar="key=A,B", help="the field that differs")
    parser.add_argument("--routing", help=f"of --layer: {' or '.join(ROUTINGS)} (default: {ROUTINGS[0]})")
    parser.add_argument("--runs", type=int, default=11, metavar="N", help="timed steps of each (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="untimed ones before (default: %(default)s)")
    parser.add_argument("--text", metavar="FILE", help="text to work on (default: Python's own sources)")
    parser.add_argument("--out", type=Path, default=Path("out/overlap_ab"), help="folder (default: %(default)s)")
    parser.add_argument("--devices", type=int, metavar="N", help="devices to simulate on a CPU (default: 8)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields of both runs; key=A:B is the switch")
    args = parser.parse_known_or_refuse(argv)
    if args.layer is not None and args.train is not None:
        raise UsageError("--layer and --train: one of them; --layer tiny_cpu works")
    if args.train is not None and args.routing is not None:
        rule = "in a model the routers choose, the same as long as parameters are; only --layer forces a routing"
        raise UsageError(f"routing={args.routing!r}: {rule}; --train {args.train} without it works")
    args.layer, args.routing = args.layer or "tiny_cpu", args.routing or ROUTINGS[0]
    one_of("routing", args.routing, ROUTINGS, works=ROUTINGS[0])
    for name, least in (("runs", MIN_RUNS), ("warmup", 1), ("devices", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UsageError(f"{name}={value}: must be at least {least}; --{name} {max(least, 2)} works")
    return args


if __name__ == "__main__":
    run_main(main)
