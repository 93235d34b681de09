"""The GPU kernels in whole layers, compiled for cards that are not here: memory, and what XLA made of them.

    make kernels            makes an environment with JAX's CUDA compiler (about 5 GB), runs this
    python scripts/aot_kernels.py --cards h100,a100 --configs qwen3_30b_a3b tokens=8192

One layer on one device, forward and with the gradients of x and all parameters, on kernels and on jax.lax.ragged_dot.
Temporaries are what a program needs beside its arguments and results; gradients are results, and a compiler may use
their memory before they are written. Ends with 1 where a program on kernels has a grouped product that is no kernel, a
dense product of all experts, or a loop. Nothing is run. Writes OUT/aot_kernels.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "-1"}  # before JAX is read: nothing looks for a card
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA warns of programs on ragged_dot that outgrow the card

import jax
from rich.console import Console
from rich.table import Table

from _common import (
    Parser,
    UsageError,
    chosen,
    load_config,
    nearest,
    parse_value,
    refuse_bad_folder,
    run_main,
    write_files,
)
from _described import expert_mesh, lowered_layer
from jax_ep import MoEConfig
from jax_ep.aot.hosts import cards, described_devices
from jax_ep.config import CommConfig, positive_int

CONFIGS = "mixtral_8x7b,qwen3_30b_a3b,deepseek_moe_16b"
RECORD = "aot_kernels.json"
KERNELS = ("moe_hidden", "moe_product", "moe_weight_gradient")
# Kernels of one layer: hidden and down; and in the backward to h, to x, and three weight gradients.
EXPECTED = {"forward": 2, "forward+backward": 7}


def main(argv: Sequence[str]) -> None:
    args = _arguments(argv)
    refuse_bad_folder(args.out, RECORD)
    console = Console(stderr=True)
    rows = []
    for card in args.cards:
        for name in args.configs:
            config = layer_of(name)
            for direction in EXPECTED:
                start = time.perf_counter()
                row: dict[str, Any] = {"card": card, "config": name, "direction": direction}
                row |= compiled_layer(config, card, args.tokens, direction != "forward")
                rows.append(row)
                console.print(f"{card} {name} {direction}: {time.perf_counter() - start:.0f} s", style="dim")
    record = {"jax": jax.__version__, "dtype": "bfloat16", "tokens": args.tokens, "layers": rows}
    write_files(args.out, {RECORD: (json.dumps(record, indent=2) + "\n").encode()})
    print_table(record)
    wrong = [f"{row['card']} {row['config']} {row['direction']}: {fault}" for row in rows for fault in row["faults"]]
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        raise SystemExit(1)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="aot_kernels.py", description=__doc__)
    parser.add_argument("--cards", default="rtx4090,h100", help=f"some of {', '.join(cards())} (default: %(default)s)")
    parser.add_argument("--configs", default=CONFIGS, help="comma-separated files in configs/ (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/aot_kernels"), help="folder (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="tokens=T")
    args = parser.parse_known_or_refuse(argv)
    args.cards = chosen("--cards", args.cards, cards(), "card", "unknown card")
    args.configs = args.configs.split(",")
    args.tokens = 4096
    for item in args.overrides:
        key, _, text = item.partition("=")
        if key != "tokens":
            raise UsageError(f"unknown key {key!r}{nearest(key, ['tokens'])}")
        args.tokens = parse_value(key, text, int)
        positive_int(key, args.tokens, 4096)
    return args


def layer_of(name: str) -> MoEConfig:
    """A published layer in bfloat16, on one device."""
    layer = load_config(name).moe
    return dataclasses.replace(layer, comm=CommConfig(), dtype="bfloat16", param_dtype="bfloat16")


def compiled_layer(config: MoEConfig, card: str, tokens: int, backward: bool) -> dict[str, Any]:
    """What the program on kernels needs and holds, and what the one on ragged_dot needs."""
    programs = {
        backend: _compile(dataclasses.replace(config, grouped_backend=backend), card, tokens, backward)
        for backend in ("auto", "ragged_dot")
    }
    memory = {name: int(program.memory_analysis().temp_size_in_bytes) for name, program in programs.items()}
    text = programs["auto"].as_text()
    return {
        "temporary_bytes": memory["auto"],
        "ragged_dot_temporary_bytes": memory["ragged_dot"],
        "kernels": kernels_in(text),
        "faults": faults(text, EXPECTED["forward+backward" if backward else "forward"]),
    }


def kernels_in(text: str) -> dict[str, int]:
    """How often a compiled program calls each kernel."""
    calls = [line for line in text.splitlines() if 'custom_call_target="__gpu$xla.gpu.triton"' in line]
    return {name: sum(f"/{name}/" in line for line in calls) for name in KERNELS}


def faults(text: str, kernels: int) -> list[str]:
    """What a compiled program should not have."""
    found = []
    if (calls := sum(kernels_in(text).values())) != kernels:
        found.append(f"{calls} kernels, not {kernels}")
    if dense := [line for line in text.splitlines() if " dot(" in line and "/experts/" in line]:
        found.append(f"{len(dense)} products of experts that are no kernels: {dense[0].strip()[:120]}")
    if re.search(r" while\(", text):
        found.append("a loop")
    return found


def _compile(config: MoEConfig, card: str, tokens: int, backward: bool) -> Any:
    return lowered_layer(config, expert_mesh(described_devices(card, 1)), tokens, backward).compile()


def print_table(record: dict[str, Any]) -> None:
    console = Console(width=130, highlight=False)
    console.print(f"\ncompiled for cards that are not here, not run; jax {record['jax']}", style="bold")
    console.print(f"T={record['tokens']} bfloat16, one device; temporaries in MiB")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("card", "config", "direction", "kernels", "temporaries", "with ragged_dot", "times more"):
        table.add_column(
            heading, no_wrap=True, justify="left" if heading in ("card", "config", "direction") else "right"
        )
    for row in record["layers"]:
        ours, other = row["temporary_bytes"], row["ragged_dot_temporary_bytes"]
        cells = [
            str(sum(row["kernels"].values())),
            f"{ours / 2**20:.0f}",
            f"{other / 2**20:.0f}",
            f"{other / ours:.1f}",
        ]
        table.add_row(row["card"], row["config"], row["direction"], *cells)
    console.print(table)


if __name__ == "__main__":
    run_main(main)
