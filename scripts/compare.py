"""Runs one layer along several paths, same weights and text, and shows times, bytes, collectives and differences.

    python scripts/compare.py                                              configs/tiny_cpu.py, all four modes
    python scripts/compare.py --config mini_infer --modes packed,padded dtype=bfloat16
    python scripts/compare.py --backward --expert-parallel 4 data_parallel=2 recv_rows_factor=1.25
    python scripts/compare.py --modes packed dedup=True num_chunks=2 wire_dtype=int8
    python scripts/compare.py --sweep dedup,num_chunks,recv_rows_factor,wire_dtype
    python scripts/compare.py --block parallel                             configs/tiny_block.py
    python scripts/compare.py --block sequential --split contiguous --segments 48 --kv coship,separate layers=4

With --sweep it runs variants of packed instead of modes: one option changed at a time, away from the config's own.
With --block it runs attention and experts of a config's model, sequences split over the ranks, and changes how keys and
values travel: beside hidden rows in the same collectives (coship), the same rows in collectives of their own
(separate), or all of them (all_gather, ring).

Without accelerators it simulates devices on the CPU and says so. Writes OUT/compare.json and OUT/compare.png, or those
called sweep or block.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress

from _bench import ONE_DEVICE, Bench, mode_config
from _block import BLOCKS, BlockBench, BlockWorkload, block_workload, document_ids
from _block_report import block_picture, print_block
from _common import (
    Parser,
    UsageError,
    chosen,
    load_config,
    override,
    refuse_bad_folder,
    run_main,
    simulate_devices,
    visible_devices,
    write_files,
)
from _compare_report import picture, print_table, require_matplotlib
from _sweep import HELP, sweep_record, swept_fields
from _sweep_report import print_sweep, sweep_picture
from _text import hidden_states, read_text, sequences
from jax_ep import make_mesh
from jax_ep.block.coship import KV_WAYS
from jax_ep.block.ranges import SPLITS
from jax_ep.config import MODES, WorkloadConfig, one_of

OWN_MESH = "a config of your own; this script makes its mesh itself, with axes data and expert"
SET_ELSEWHERE = {"moe.comm.mode": "--modes dense,packed"} | dict.fromkeys(
    ("moe.expert_axis", "moe.token_axes", "moe.shard_sequence"), OWN_MESH
)


def main(argv: Sequence[str]) -> None:
    args = _arguments(argv)
    simulate_devices(args.devices)
    modes, ways = _modes(args.modes), _ways(args.kv)
    swept = None if args.sweep is None else swept_fields(args.sweep)
    name, draw, print_record = "compare", picture, print_table
    if args.block:
        name, draw, print_record = "block", block_picture, print_block
    elif swept:
        name, draw, print_record = "sweep", sweep_picture, print_sweep
    folder = args.out or Path("out") / name
    png, record_file = f"{name}.png", f"{name}.json"
    workload = _workload(args)
    refuse_bad_folder(folder, png, record_file)
    require_matplotlib()
    text = read_text(args.text)
    tokens = sequences(text, workload.batch_size, workload.sequence_length)
    devices = _devices(workload, args.devices)

    mesh = make_mesh(workload.expert_parallel, workload.data_parallel, devices)
    states = hidden_states(tokens, workload.moe.hidden_size)  # [B, S, H]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        if isinstance(workload, BlockWorkload):
            shape = workload.batch_size, workload.sequence_length
            ids = None if args.segments is None else document_ids(*shape, mean=args.segments)
            block = BlockBench(
                args.block, args.split or SPLITS[-1], workload, mesh, states, ids, args.backward, progress
            )
            record = block.record(ways, text.source, args.config)
        else:
            flat = states.reshape(-1, workload.moe.hidden_size)  # [T, H]
            bench = Bench(workload, mesh, flat, args.backward, progress)
            if swept:
                record = sweep_record(bench, swept, text.source, args.config)
            else:
                record = compare_record(bench, modes, text.source, args.config)
    refuse_bad_folder(folder, png, record_file)
    content = (json.dumps(record, indent=2) + "\n").encode()
    write_files(folder, {png: draw(record), record_file: content})
    print_record(record)
    print(f"written: {folder / record_file}, {folder / png}")


def compare_record(bench: Bench, modes: list[str], source: str, config_name: str) -> dict[str, Any]:
    """Compiles and times the modes, and tells everything that compare.json holds."""
    layers = {mode: mode_config(bench.config, mode) for mode in modes}
    if "packed" in modes:
        layers[ONE_DEVICE] = layers["packed"]
    programs = bench.compile(layers)
    timings = bench.time(programs)
    medians = {name: timings[name].median_ms for name in layers}
    pairs = [("packed", "dense"), ("packed", "padded"), ("packed", ONE_DEVICE)]
    record = {
        **bench.setting(source, config_name),
        "modes": {mode: bench.describe(programs[mode], timings[mode]) for mode in modes},
        "reference_bytes": bench.ledger(bench.config)["reference"],
        "ratios": {f"{a}/{b}": medians[a] / medians[b] if a in medians and b in medians else None for a, b in pairs},
        "notes": bench.notes(programs, modes, "modes"),
    }
    if ONE_DEVICE in layers:
        alone = programs[ONE_DEVICE]
        record["one_device"] = {
            **bench.times(timings[ONE_DEVICE]),
            "compile_s": alone.compile_s,
            "temp_bytes": alone.temp_bytes,
            "max_abs_diff": alone.difference.largest,
            "relative_difference": alone.difference.relative,
        }
    return record


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="compare.py", description=__doc__)
    parser.add_argument("--config", help="a file in configs/, or a path (default: tiny_cpu; with --block, tiny_block)")
    parser.add_argument("--modes", metavar="NAMES", help=f"comma-separated (default: {','.join(MODES)})")
    parser.add_argument("--sweep", metavar="FIELDS", help=HELP)
    parser.add_argument("--block", metavar="FORM", help=f"a block instead of a layer: {' or '.join(BLOCKS)}")
    parser.add_argument("--kv", metavar="WAYS", help=f"of --block, comma-separated (default: {','.join(KV_WAYS)})")
    parser.add_argument(
        "--split", metavar="NAME", help=f"of --block's positions: {' or '.join(SPLITS)} (default: {SPLITS[-1]})"
    )
    parser.add_argument(
        "--segments", type=int, metavar="N", help="of --block: documents of N positions on average fill the sequences"
    )
    parser.add_argument("--expert-parallel", metavar="R", help="ranks the experts are spread over")
    parser.add_argument("--runs", metavar="N", help="timed runs of every mode or variant")
    parser.add_argument("--warmup", metavar="N", help="untimed runs of each before that")
    parser.add_argument("--backward", action="store_true", help="time forward and backward together")
    parser.add_argument("--text", metavar="FILE", help="text to take hidden states of (default: Python's own sources)")
    parser.add_argument("--out", type=Path, help="folder for results (default: out/compare, out/sweep or out/block)")
    parser.add_argument(
        "--devices", type=int, metavar="N", help="devices to simulate without accelerators (default: 8)"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields of the config, as in top_k=4")
    args = parser.parse_known_or_refuse(argv)
    if args.devices is not None and args.devices < 1:
        raise UsageError(f"devices={args.devices}: must be at least 1; --devices 8 works")
    if args.modes is not None and args.sweep is not None:
        raise UsageError(f"--modes {args.modes}: a sweep runs packed alone; --sweep {args.sweep} without it works")
    _check_block(args)
    args.config = args.config or ("tiny_block" if args.block else "tiny_cpu")
    return args


def _check_block(args: argparse.Namespace) -> None:
    options = {"kv": args.kv, "split": args.split, "segments": args.segments}
    if args.block is None:
        if given := [option for option, value in options.items() if value is not None]:
            raise UsageError(f"--{given[0]}: only --block has it; --block parallel works")
        return
    for option in ("modes", "sweep"):
        if getattr(args, option) is not None:
            raise UsageError(f"--{option} {getattr(args, option)}: a block is packed; --block {args.block} alone works")
    one_of("block", args.block, BLOCKS)
    one_of("split", SPLITS[-1] if args.split is None else args.split, SPLITS)
    if args.segments is not None and args.segments < 1:
        raise UsageError(f"segments={args.segments}: must be at least 1; --segments 64 works")


def _ways(text: str | None) -> list[str]:
    return list(KV_WAYS) if text is None else chosen("kv", text, KV_WAYS, "way", "unknown way of keys and values")


def _modes(text: str | None) -> list[str]:
    return list(MODES) if text is None else chosen("modes", text, MODES, "mode", "unknown mode")


def _workload(args: argparse.Namespace) -> WorkloadConfig | BlockWorkload:
    options = {"expert_parallel": args.expert_parallel, "runs": args.runs, "warmup": args.warmup}
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    if args.block:
        elsewhere = {f"model.{path}": works for path, works in SET_ELSEWHERE.items()}
        return block_workload(args.config, [*args.overrides, *given], elsewhere, [args.block])
    workload: WorkloadConfig = override(load_config(args.config), [*args.overrides, *given], elsewhere=SET_ELSEWHERE)
    return workload


def _devices(workload: WorkloadConfig | BlockWorkload, asked: int | None) -> list[Any]:
    """The first devices that the mesh needs."""
    need = workload.expert_parallel * workload.data_parallel
    have = visible_devices(asked)
    if need > len(have):
        fits = workload.data_parallel <= len(have)
        works = f"--expert-parallel {len(have) // workload.data_parallel} works" if fits else "data_parallel=1 works"
        if jax.default_backend() == "cpu":
            works += f", and so does --devices {need}"
        mesh = f"expert_parallel={workload.expert_parallel}, data_parallel={workload.data_parallel}"
        raise UsageError(f"{mesh}: needs {need} devices and there are {len(have)}; {works}")
    return have[:need]


if __name__ == "__main__":
    run_main(main)
