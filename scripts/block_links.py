"""Times one layer of the blocks between processes joined over Gloo: key/value rows beside hidden rows in the same
collectives, and in collectives of their own, from a few tokens a rank to a long prefill.

    python scripts/block_links.py                        four processes over loopback
    python scripts/block_links.py --rate 500mbit         over links of that rate (Linux, as root)
    python scripts/block_links.py --sequences 8,64 --runs 20 --backward num_kv_heads=1

Prints a Markdown table and, beside it, what a small collective and a byte cost there; writes OUT/block_links.json. Runs
of both ways take turns; the time of a run is that of the slowest rank. A way pays where three quarters of the
differences between neighbouring runs say so.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

import jax

import launch
from _block import BLOCKS, BlockWorkload, block_workload
from _common import Parser, UsageError, refuse_bad_folder, run_main, write_files
from _links import address, links
from _links_bench import measure, table
from jax_ep.block.ranges import SPLITS, check_split
from jax_ep.config import one_of, refuse
from jax_ep.distributed import job_of, join

SEQUENCES = "8,64,512,2048"
HERE = Path(__file__).resolve().parent
RECORD = "block_links.json"


def main(argv: Sequence[str]) -> None:
    args = _arguments(argv)
    workload = _workload(args)
    if job_of(os.environ) is not None:
        _one_rank(args, workload)
        return
    refuse_bad_folder(args.out, RECORD)
    with contextlib.ExitStack() as stack:
        command = [str(HERE / "block_links.py"), *argv]
        if args.rate is not None:
            prefix = stack.enter_context(links(args.processes, args.rate))
            command = [str(HERE / "_netns.py"), prefix, address(0), *command]
        launch.main(["--processes", str(args.processes), "--deadline", "1200", *command])


def _one_rank(args: argparse.Namespace, workload: BlockWorkload) -> None:
    join()
    record = measure(workload, args.blocks, args.split, args.sequences, args.runs, args.backward, _progress)
    record["link"] |= {"rate": args.rate, "through": "loopback" if args.rate is None else "network namespaces"}
    if jax.process_index() == 0:
        text = table(record)
        print(f"\n{text}")
        write_files(args.out, {RECORD: (json.dumps(record | {"markdown": text}, indent=2) + "\n").encode()})
        print(f"written: {args.out / RECORD}")


def _progress(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="block_links.py", description=__doc__)
    parser.add_argument("--config", default="tiny_block", help="a file in configs/, or a path (default: %(default)s)")
    parser.add_argument("--blocks", default=",".join(BLOCKS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--sequences", default=SEQUENCES, metavar="S,..", help="lengths (default: %(default)s)")
    parser.add_argument("--split", default=SPLITS[-1], help=f"{' or '.join(SPLITS)} (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=4, metavar="N", help="ranks (default: %(default)s)")
    parser.add_argument("--rate", help="of each rank's link, as tc writes it: 500mbit (default: loopback as it is)")
    parser.add_argument("--runs", type=int, metavar="N", help="timed runs (default: fewer of longer ones, 60 to 12)")
    parser.add_argument("--backward", action="store_true", help="time forward and backward together")
    parser.add_argument("--out", type=Path, default=Path("out/block_links"), help="folder (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields of the config, as in num_kv_heads=1")
    args = parser.parse_known_or_refuse(argv)
    if args.processes < 2:
        raise UsageError(f"processes={args.processes}: one exchanges nothing; --processes 4 works")
    if args.runs is not None and args.runs < 4:
        raise UsageError(f"runs={args.runs}: quartiles need 4; --runs 20 works")
    one_of("split", args.split, SPLITS)
    args.blocks = list(dict.fromkeys(args.blocks.split(",")))
    for form in args.blocks:
        one_of("blocks", form, BLOCKS)
    try:
        args.sequences = list(dict.fromkeys(int(s) for s in args.sequences.split(",")))
    except ValueError:
        raise UsageError(f"sequences={args.sequences}: must be integers; --sequences {SEQUENCES} works") from None
    for sequence in args.sequences:
        check_split(args.split, sequence, args.processes)
    return args


def _workload(args: argparse.Namespace) -> BlockWorkload:
    elsewhere = {
        "expert_parallel": "--processes",
        "data_parallel": "compare.py --block: here every process is a rank",
        "sequence_length": "--sequences",
        "runs": "--runs",
        "warmup": "compare.py --block: here there are two",
    }
    workload = block_workload(args.config, ["batch_size=2", *args.overrides], elsewhere, args.blocks)
    if "sequential" in args.blocks and workload.batch_size % 2:
        rule = "the sequential block has two microbatches"
        refuse("batch_size", workload.batch_size, rule, workload.batch_size + 1)
    return dataclasses.replace(workload, expert_parallel=args.processes, data_parallel=1)


if __name__ == "__main__":
    run_main(main)
