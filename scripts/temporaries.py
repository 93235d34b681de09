"""Temporary memory of one layer on a host that is not here, as compiled for it ahead of time; nothing is run.

    make temporaries                            makes an environment with JAX's CUDA compiler (about 5 GB), runs this
    python scripts/temporaries.py tokens=4096   per rank; also hidden_size, intermediate_size, num_experts, top_k

Writes OUT/temporaries.json. Experts are this package's kernels; jax.lax.ragged_dot's, which XLA turns into masked dense
products on GPUs; or, "identity", none: what routing, packing and the exchange need by themselves.

Letters: T tokens on a rank, K top_k, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "-1"}  # before JAX is read: nothing looks for a card

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

import jax_ep.local
from _common import Parser, UsageError, nearest, parse_value, refuse_bad_folder, run_main, write_files
from _described import expert_mesh, lowered_layer
from jax_ep import CommConfig, MoEConfig, RouterConfig
from jax_ep.aot.hosts import described_devices

CARD, RANKS = "rtx4090", 8
SIZES = {"tokens": 2048, "hidden_size": 512, "intermediate_size": 512, "num_experts": 64, "top_k": 8}
FACTORS = (None, 2.0, 1.25)
KINDS: tuple[dict[str, Any], ...] = ({"dedup": True}, {"num_chunks": 4}, {"wire_dtype": "int8"})  # at the last factor
COLUMNS = tuple((e, d) for e in ("kernels", "ragged_dot", "identity") for d in ("forward", "forward+backward"))


def main(argv: Sequence[str]) -> None:
    args = _arguments(argv)
    sizes = dict(SIZES)
    for item in args.overrides:
        key, _, text = item.partition("=")
        if key not in sizes:
            raise UsageError(f"unknown key {key!r}{nearest(key, sizes)}")
        sizes[key] = parse_value(key, text, int)
    refuse_bad_folder(args.out, "temporaries.json")
    mesh = expert_mesh(described_devices(CARD, RANKS))
    rows = []
    console = Console(stderr=True)
    variants: list[tuple[float | None, dict[str, Any]]] = [(factor, {}) for factor in FACTORS]
    variants += [(FACTORS[-1], kind) for kind in KINDS]
    for transport in ("all_to_all", "ragged"):
        for factor, kind in variants:
            comm = CommConfig(transport=transport, recv_rows_factor=factor, **kind)
            row: dict[str, Any] = {"transport": transport, "recv_rows_factor": factor, **kind}
            for experts, direction in COLUMNS:
                if kind and experts != "kernels":
                    continue
                start = time.perf_counter()
                name = f"{experts}, {direction}"
                row[name] = temporaries(sizes, comm, mesh, direction != "forward", experts)
                console.print(f"{transport} {factor} {kind} {name}: {time.perf_counter() - start:.0f} s", style="dim")
            rows.append(row)
    record = {
        "card": CARD,
        "ranks": RANKS,
        "dtype": "bfloat16",
        "jax": jax.__version__,
        **sizes,
        "bytes_a_device": rows,
    }
    write_files(args.out, {"temporaries.json": (json.dumps(record, indent=2) + "\n").encode()})
    print_table(record)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="temporaries.py", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/temporaries"), help="folder (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_known_or_refuse(argv)


def temporaries(sizes: dict[str, int], comm: CommConfig, mesh: Mesh, backward: bool, experts: str) -> int:
    """Bytes a device that the compiled layer needs beside its arguments and results."""
    h, i, e, k = (sizes[n] for n in ("hidden_size", "intermediate_size", "num_experts", "top_k"))
    backend = "ragged_dot" if experts == "ragged_dot" else "auto"
    layer = MoEConfig(h, i, e, RouterConfig(k), comm, dtype="bfloat16", param_dtype="bfloat16")
    config = dataclasses.replace(layer, grouped_backend=backend)
    with mock.patch.object(
        jax_ep.local, "apply_experts", _identity if experts == "identity" else jax_ep.local.apply_experts
    ):
        jax.clear_caches()  # the layer's own jit must not remember the other experts
        compiled = lowered_layer(config, mesh, sizes["tokens"], backward).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def _identity(
    rows: jax.Array, index: jax.Array, group_sizes: jax.Array, weights: jax.Array | None, *_: Any, **__: Any
) -> jax.Array:
    """In place of experts: the rows themselves, times the sum of their weights."""
    if weights is None:
        return rows
    held = jnp.where(jnp.arange(index.shape[0]) < group_sizes.sum(), index, rows.shape[0])
    factor = jnp.zeros(rows.shape[0], jnp.float32).at[held].add(weights, mode="drop")
    return rows.astype(jnp.float32) * factor[:, None]


def print_table(record: dict[str, Any]) -> None:
    console = Console(width=210, highlight=False)
    w = record
    console.print(f"\ncompiled for {w['ranks']} x {w['card']}, not run; jax {w['jax']}", style="bold")
    console.print(
        f"T={w['tokens']} a rank, H={w['hidden_size']} I={w['intermediate_size']} E={w['num_experts']} K={w['top_k']} "
        f"{w['dtype']}; temporaries a device in MiB, and over those of recv_rows_factor=None"
    )
    names = [f"{experts}, {direction}" for experts, direction in COLUMNS]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("transport", "recv_rows_factor", "", *names):
        table.add_column(heading, no_wrap=True, justify="right" if heading in names else "left")
    base: dict[str, Any] = {}
    for row in w["bytes_a_device"]:
        if row["recv_rows_factor"] is None:
            base = row
        kind = {k: v for k, v in row.items() if k not in ("transport", "recv_rows_factor", *names)}
        cells = [f"{row[n] / 2**20:.0f}  x{row[n] / base[n]:.3f}" if n in row else "-" for n in names]
        words = ", ".join(f"{k}={v}" for k, v in kind.items())
        table.add_row(row["transport"], str(row["recv_rows_factor"]), words, *cells)
    console.print(table)


if __name__ == "__main__":
    run_main(main)
