"""Time to compile a decoder of 4 and of 32 layers: like layers are scanned, so that it does not grow with depth.

    python scripts/depth.py
    python scripts/depth.py --layers 2,16,64 --config tiny_decoder hidden_size=128

About a minute on two cores. For each depth: tracing and lowering, compiling, and the lines of the compiled program, of
the forward, of the loss with its gradients, and of one decoding step. Nothing is run, and no parameters are made.
Without accelerators it simulates devices on the CPU. Writes OUT/depth.json.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from _common import (
    Parser,
    UsageError,
    load_model_config,
    override,
    refuse_bad_folder,
    run_main,
    simulate_devices,
    write_files,
)
from jax_ep import ModelConfig, make_mesh
from jax_ep.models.cache import cache_shardings, forward_cached, init_cache
from jax_ep.models.decoder import decoder_shapes, decoder_shardings, forward, loss

RECORD, BATCH, POSITIONS = "depth.json", 8, 64


def main(argv: Sequence[str]) -> None:
    parser = Parser(prog="depth.py", description=__doc__)
    parser.add_argument("--config", default="tiny_decoder", metavar="NAME", help="a file in configs/, or a path")
    parser.add_argument("--layers", default="4,32", help="depths, with commas between (default: %(default)s)")
    parser.add_argument("--expert-parallel", type=int, default=4, metavar="R", help="ranks (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/depth"), help="folder for the record (default: out/depth)"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields of the model, as in hidden_size=128")
    args = parser.parse_known_or_refuse(argv)
    simulate_devices(None)
    refuse_bad_folder(args.out, RECORD)
    try:
        depths = [int(part) for part in args.layers.split(",")]
    except ValueError:
        raise UsageError(f"layers={args.layers!r}: must be integers with commas between; --layers 4,32 works") from None
    config = override(load_model_config(args.config), args.overrides)
    mesh = make_mesh(args.expert_parallel)
    for function, arguments in programs(at_depth(config, 1), mesh).values():
        function.lower(*arguments)  # whatever is traced once a process is done then
    rows = []
    with Console(stderr=True).status("compiling") as status:
        for depth in depths:
            for name, program in programs(at_depth(config, depth), mesh).items():
                status.update(f"compiling {name}, {depth} layers")
                rows.append({"program": name, "layers": depth, **measure(*program)})
    rows.sort(key=lambda row: list(programs(config, mesh)).index(row["program"]))
    device = jax.devices()[0]
    record = {
        "environment": {
            "device_kind": device.device_kind,
            "simulated": device.platform == "cpu",
            "jax": jax.__version__,
        },
        "mesh": dict(mesh.shape),
        "batch": [BATCH, POSITIONS],
        "programs": rows,
    }
    write_files(args.out, {RECORD: (json.dumps(record, indent=2) + "\n").encode()})
    table = Table("program", "layers", "trace and lower s", "compile s", "lines")
    for row in rows:
        times = (f"{row[key]:.2f}" for key in ("lower_s", "compile_s"))
        table.add_row(row["program"], str(row["layers"]), *times, str(row["lines"]))
    Console().print(table)
    print(f"written: {args.out / RECORD}")


def at_depth(config: ModelConfig, layers: int) -> ModelConfig:
    return dataclasses.replace(config, num_layers=layers, window_layers=None)


def programs(config: ModelConfig, mesh: jax.sharding.Mesh) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Functions to compile, and their arguments as shapes."""

    def at(shapes: Any, shardings: Any) -> Any:
        return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings)

    params = at(decoder_shapes(config, mesh.shape["expert"]), decoder_shardings(config, mesh))
    cache = jax.eval_shape(functools.partial(init_cache, config, BATCH, POSITIONS))
    cache = at(cache, cache_shardings(config, mesh, BATCH))
    ids = lambda s: jax.ShapeDtypeStruct((BATCH, s), jnp.int32)
    how: dict[str, Any] = {"config": config, "mesh": mesh}
    step = functools.partial(forward_cached, last_only=True, **how)
    return {
        "forward": (jax.jit(functools.partial(forward, **how)), (params, ids(POSITIONS))),
        "loss and gradients": (
            jax.jit(jax.value_and_grad(functools.partial(loss, **how), has_aux=True)),
            (params, ids(POSITIONS)),
        ),
        "decoding step": (jax.jit(step, donate_argnums=2), (params, ids(1), cache)),
    }


def measure(function: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    begun = time.perf_counter()
    lowered = function.lower(*arguments)
    between = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    return {
        "lower_s": between - begun,
        "compile_s": done - between,
        "lines": len(compiled.as_text().splitlines()),
    }


if __name__ == "__main__":
    run_main(main)
