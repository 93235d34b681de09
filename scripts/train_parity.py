"""The first losses of a training run on its mesh, by every way of reaching the experts, against those on one device.

    python scripts/train_parity.py                                 configs/tiny_lm.py, 50 steps: about three minutes
    python scripts/train_parity.py --steps 20 expert_parallel=8 data_parallel=1

Same weights, same text. Prints the largest difference of each and writes OUT/train_parity.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from _common import (
    Parser,
    UsageError,
    environment,
    load_train_config,
    override,
    refuse_bad_folder,
    run_main,
    simulate_devices,
    visible_devices,
    write_files,
)
from jax_ep import make_mesh
from jax_ep.training.config import TrainConfig
from jax_ep.training.data import Windows, batch, read_documents, split
from jax_ep.training.step import batch_sharding, init_state, make_step

RECORD = "train_parity.json"
WAYS: dict[str, dict[str, Any]] = {
    "padded": {"mode": "padded"},
    "packed": {"mode": "packed"},
    "packed with dedup": {"mode": "packed", "dedup": True},
    "allgather": {"mode": "allgather"},
}


def main(argv: Sequence[str]) -> None:
    args = _arguments(argv)
    config: TrainConfig = override(load_train_config(args.config), args.overrides)
    refuse_bad_folder(args.out, RECORD)
    need = config.expert_parallel * config.data_parallel
    simulate_devices(None, need, in_order=True)
    devices = visible_devices(None)
    if len(devices) < need:
        raise UsageError(f"the mesh needs {need} devices and there are {len(devices)}; expert_parallel=1 works")
    text = split(read_documents(None), config.sequence_length)
    windows = Windows(text.train, config.sequence_length, config.seed)
    alone = losses(dataclasses.replace(config, expert_parallel=1, data_parallel=1), windows, args.steps)
    record: dict[str, Any] = {"environment": environment(need), "config": args.config, "one device": alone, "ways": {}}
    table = Table("way", f"losses 1 and {args.steps}", "largest difference", "at step")
    table.add_row("one device", f"{alone[0]:.6f} {alone[-1]:.6f}", "", "")
    for name, comm in WAYS.items():
        found = losses(with_comm(config, comm), windows, args.steps)
        apart = [abs(a - b) for a, b in zip(found, alone, strict=True)]
        at = apart.index(max(apart))
        record["ways"][name] = {"losses": found, "largest_difference": apart[at], "at_step": at + 1}
        table.add_row(name, f"{found[0]:.6f} {found[-1]:.6f}", f"{apart[at]:.1e}", str(at + 1))
    Console().print(table)
    write_files(args.out, {RECORD: (json.dumps(record, indent=2) + "\n").encode()})
    print(f"written: {args.out / RECORD}")


def with_comm(config: TrainConfig, comm: dict[str, Any]) -> TrainConfig:
    """The run with another way of reaching the experts."""
    model = config.model
    factor = model.moe.comm.recv_rows_factor
    how = dict(comm, recv_rows_factor=factor) if comm["mode"] == "packed" else comm
    moe = dataclasses.replace(model.moe, comm=type(model.moe.comm)(**how))
    return dataclasses.replace(config, model=dataclasses.replace(model, moe=moe))


def losses(config: TrainConfig, windows: Windows, steps: int) -> list[float]:
    """Of the first steps of a run, on its mesh."""
    mesh = make_mesh(config.expert_parallel, config.data_parallel, jax.devices()[: _size(config)])
    state, step, lay_out = init_state(config, mesh), make_step(config, mesh), batch_sharding(config, mesh)
    found = []
    for at in range(steps):
        state, metrics = step(state, batch(windows, at * config.batch_size, config, lay_out))
        found.append(float(metrics.loss))
    return found


def _size(config: TrainConfig) -> int:
    return config.expert_parallel * config.data_parallel


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="train_parity.py", description=__doc__)
    parser.add_argument("--config", default="tiny_lm", help="a file in configs/, or a path (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="steps of each (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/train_parity"), help="folder (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields of the run, as in learning_rate=1e-3")
    args = parser.parse_known_or_refuse(argv)
    if args.steps < 1:
        raise UsageError(f"steps={args.steps}: must be at least 1; --steps 50 works")
    return args


if __name__ == "__main__":
    run_main(main)
