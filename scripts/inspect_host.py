"""What a host that is not here would do with a model: does it fit, and what runs beside the exchanges. Nothing is run.

    make inspect ARGS="--host 8xh100 --config qwen3_30b_a3b num_chunks=4"
    make inspect ARGS="--host 2xrtx4090 --config mixtral_8x7b --prefill --devices 8"

makes an environment with JAX's CUDA compiler (about 5 GB). For TPUs, in one with jax and libtpu (under 1 GB):

    python scripts/inspect_host.py --host tpu-v5e-8 --config qwen3_30b_a3b

Compiles the MoE layer for the host, with the gradients of x and all parameters in training. Prints the sum of a
device's memory against its card, every collective with what stands between its start and its end, and, modelled from
the host's rates, how much of the communication those products would cover. Writes OUT/inspect.json and
OUT/schedule.png. A host is one of the names that `--host list` prints, or a TOML file of one's own
(`jax_ep.aot.hosts.get_host`). Overrides are those of the model: num_chunks=4, transport=ragged, recompute=full,
delay_wgrad_compute=True. Training has float32 parameters, as scripts/train.py does. A layer takes half a minute to two
on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "-1"}  # before JAX is read: nothing looks for a card
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-8"}
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # what compilers say of machines that they do not find

from rich.console import Console

from _common import Parser, UsageError, load_model_config, override, refuse_bad_folder, run_main, write_files
from _inspect import Asked, compile_for, host_mesh
from _inspect_picture import draw
from _inspect_report import devices_needed, make_record, print_report
from jax_ep.aot.fits import saved_bytes
from jax_ep.aot.hosts import get_host, hosts
from jax_ep.aot.modelled import Bar, live_parts, predict
from jax_ep.aot.schedule import Schedule, read_schedule
from jax_ep.config import positive_int
from jax_ep.model_config import ModelConfig

RECORD, PICTURE = "inspect.json", "schedule.png"
TOKENS = {"train": 2048, "prefill": 2048, "decode": 8}
OF_A_LAYER = ("delay_wgrad_compute",)  # a model takes it with two microbatches only, a layer alone by itself
OVERLAPPED = 4  # layers that are compiled where two microbatches run beside each other


def main(argv: Sequence[str]) -> None:
    args = _arguments(argv)
    if args.host == "list":
        print("\n".join(hosts()))
        return
    asked = read_arguments(args)
    if args.picture and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("the picture needs matplotlib, which is not here; pip install matplotlib, or --no-picture")
    refuse_bad_folder(args.out, RECORD, PICTURE)
    if args.text is not None:
        refuse_bad_folder(args.text.parent, args.text.name)
    console, start = Console(stderr=True), time.perf_counter()
    mesh = host_mesh(asked.host)
    console.print(f"compiling for {asked.host.devices} devices of {asked.host.name}", style="dim")
    compiled = compile_for(asked, mesh)
    console.print(f"compiled in {time.perf_counter() - start:.0f} s", style="dim")
    saved = saved_bytes(asked.config, mesh, asked.tokens) if asked.task == "train" else None
    schedule = read_schedule(compiled.text)
    record = make_record(asked, compiled, schedule, saved)
    contents = {RECORD: (json.dumps(record, indent=2) + "\n").encode()}
    if args.picture:
        contents[PICTURE] = draw(*shown(schedule, asked), record)
    if args.text is not None:
        write_files(args.text.parent, {args.text.name: compiled.text.encode()})
    write_files(args.out, contents)
    print_report(record, devices_needed(asked, compiled.temporaries, saved))


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="inspect_host.py", description=__doc__)
    parser.add_argument(
        "--host", default="8xrtx4090", help=f"{', '.join(hosts())}, or a .toml file (default: %(default)s)"
    )
    parser.add_argument("--devices", type=int, help="as if the host had so many")
    parser.add_argument(
        "--config", default="qwen3_30b_a3b", help="a file in configs/, or a path (default: %(default)s)"
    )
    parser.add_argument("--mode", default="packed", help="packed, padded, allgather or dense (default: %(default)s)")
    tasks = parser.add_mutually_exclusive_group()
    for task in TOKENS:
        tasks.add_argument(f"--{task}", dest="task", action="store_const", const=task, default="train")
    parser.add_argument("--tokens", type=int, help="of a device at a time (default: 2048; in decode its sequences, 8)")
    parser.add_argument("--context", type=int, default=4096, help="positions a sequence, decode (default: %(default)s)")
    parser.add_argument("--layers", type=int, help="compile so many whole layers, with attention, not one MoE layer")
    parser.add_argument("--flags", choices=("on", "off"), default="on", help="XLA's flags for overlap (default: on)")
    parser.add_argument("--no-picture", dest="picture", action="store_false", help="no schedule.png")
    parser.add_argument("--text", type=Path, help="write the compiled program there as well")
    parser.add_argument("--out", type=Path, default=Path("out/inspect"), help="folder (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_known_or_refuse(argv)


def read_arguments(args: argparse.Namespace) -> Asked:
    """What is asked for, checked."""
    host = get_host(args.host)
    if args.devices is not None:
        positive_int("--devices", args.devices, host.devices)
        kind = host.name.removeprefix(f"{host.devices}x")
        name = f"{args.devices}x{kind}" if kind != host.name else host.name
        host = dataclasses.replace(host, devices=args.devices, name=name)
    task = args.task
    dtypes = ["param_dtype=float32"] if task == "train" else []
    given = [f"moe.comm.mode={args.mode}", *dtypes, *args.overrides]
    late = [each for each in given if _last_name(each) in OF_A_LAYER]
    model = load_model_config(args.config)
    config: ModelConfig = override(model, [each for each in given if each not in late])
    tokens = TOKENS[task] if args.tokens is None else args.tokens
    positive_int("--tokens", tokens, TOKENS[task])
    positive_int("--context", args.context, 4096)
    layers, overlapped = args.layers, config.overlap_moe_expert_parallel_comm
    if task == "decode" and (layers is not None or overlapped):
        what = "--layers" if layers is not None else "overlap_moe_expert_parallel_comm=True"
        raise UsageError(f"{what}: whole layers are those of training and prefill, without a cache; --prefill works")
    if task != "train" and late and override(config.moe, [_of_moe(each) for each in late]).overlap.delay_wgrad_compute:
        raise UsageError(f"delay_wgrad_compute=True: there is no backward in {task}; --train works")
    if layers is None and overlapped:
        layers = min(OVERLAPPED, config.num_layers)
    if layers is not None:
        config = override(model, given)
        positive_int("--layers", layers, OVERLAPPED)
        if layers > config.num_layers:
            raise UsageError(
                f"--layers {layers}: the model has {config.num_layers}; --layers {config.num_layers} works"
            )
    moe = config.moe if layers is not None else override(config.moe, [_of_moe(each) for each in late])
    return Asked(host, config, moe, Path(args.config).stem, task, tokens, args.context, args.flags == "on", layers)


def _of_moe(item: str) -> str:
    return item.rpartition("moe.")[2]


def _last_name(item: str) -> str:
    return item.partition("=")[0].strip().rpartition(".")[2]


def shown(schedule: Schedule, asked: Asked) -> tuple[list[Bar], list[Bar]]:
    """Products and collectives that the picture shows: the program's, or one turn of each loop that exchanges rows."""
    live = live_parts(schedule, asked.moe, asked.tokens, asked.host.devices)
    loops = [one for one in schedule.whole()[1:] if any(c.payload for c in one.collectives)]
    products, collectives, after = list[Bar](), list[Bar](), 0.0
    for one in loops or [schedule]:
        prediction = predict(one, asked.host, asked.moe, live)
        later = [[Bar(b.start + after, b.end + after, b.of) for b in bars] for bars in prediction[:2]]
        products += later[0]
        collectives += later[1]
        after = max(bar.end for bar in (*products, *collectives))
    return products, collectives


if __name__ == "__main__":
    run_main(main)
