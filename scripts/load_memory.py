"""Host memory and file bytes of loading a checkpoint whose experts are 90% of its bytes.

    python scripts/load_memory.py

Writes a synthetic checkpoint of 2 GB, loads it in a fresh process onto 4 simulated devices, and in 4 processes of one
device each, joined by Gloo; each way saves it again and the files are compared. Takes about a minute on two CPU cores
and 4 GB of disk under --folder. Prints a table and writes DIR/load_memory.json.

Peak memory is the process's largest resident set while loading minus its resident set before, JAX started and idle.
"Placed" counts the shards of every device, a replicated parameter once a device. CPU devices of one process share the
memory of replicas, so the files' bytes are the tighter measure. What the kernel counted as read is from the process's
own /proc/self/io.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from _common import Parser, UsageError, refuse_bad_folder, run_main, simulate_devices, write_files
from jax_ep import MoEConfig, RouterConfig, make_mesh
from jax_ep.model_config import ModelConfig
from jax_ep.models import safetensors_io
from jax_ep.models.checkpoint import CONFIG, Read, load_params, save_params
from jax_ep.models.families import config_from_hub, config_to_hub
from jax_ep.models.folder_update import write_at
from jax_ep.models.tensors import tensor_map

DEVICES, LAYERS, EXPERTS, EXPERT_SHARE, DTYPE = 4, 4, 8, 0.9, "bfloat16"
FILE_BYTES = 1_000_000_000  # of one file
# How a family's tensors of experts lie: one an expert; all experts in one, gate above up; gate and up alternating.
FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "mixtral": {"moe": {}, "router": {}, "model": {}},
    "granitemoe": {"moe": {}, "router": {"softmax_after_top_k": True}, "model": {}},
    "gpt_oss": {
        "moe": {"activation": "gpt_oss", "expert_bias": True},
        "router": {"softmax_after_top_k": True, "logit_bias": True},
        "model": {"qkv_bias": True, "output_bias": True, "attention_sinks": True},
    },
}


def model_of(family: str, total: int) -> ModelConfig:
    """A model of about `total` bytes, EXPERT_SHARE of them in its experts."""
    width = np.dtype(safetensors_io.dtype_of(safetensors_io.code_of(DTYPE))).itemsize
    hidden = 1 << max(4, round(np.log2((total / 1000) ** 0.5)))  # attention then takes a few per cent
    attention = LAYERS * 4 * hidden * hidden * width
    inner = max(1, round(EXPERT_SHARE * total / (LAYERS * EXPERTS * 3 * hidden * width)))
    vocab = max(32, round(((1 - EXPERT_SHARE) * total - attention) / (2 * hidden * width)))
    extra = FAMILIES[family]
    router = RouterConfig(2, **extra["router"])
    moe = MoEConfig(hidden, inner, EXPERTS, router, dtype=DTYPE, param_dtype=DTYPE, **extra["moe"])
    sizes = {"vocab_size": vocab, "num_layers": LAYERS, "num_heads": 4, "num_kv_heads": 4, "head_dim": hidden // 4}
    return ModelConfig(**sizes, moe=moe, **extra["model"])


def write_checkpoint(folder: Path, family: str, total: int) -> None:
    """A checkpoint of random finite numbers, tensor by tensor."""
    config = model_of(family, total)
    code, random = safetensors_io.code_of(DTYPE), np.random.default_rng(0)
    shapes = {entry.name: entry.shape for entry in tensor_map(family, config)}
    plans, index = safetensors_io.plan_files({name: (code, shape) for name, shape in shapes.items()}, FILE_BYTES)
    folder.mkdir(parents=True)
    for plan in plans:
        with open(folder / plan.name, "wb") as file:
            file.write(plan.header)
            file.flush()
            for name, offset in plan.offsets.items():
                bits = random.integers(0, 1 << 14, int(np.prod(shapes[name])), dtype=np.uint16)  # below 2, no NaN
                write_at(file.fileno(), offset, bits)
    if index is not None:
        (folder / safetensors_io.INDEX).write_bytes(index)
    (folder / CONFIG).write_text(json.dumps(config_to_hub(config, family)))


# What runs in a process of its own.


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_bytes() -> int:
    """The largest resident set so far. Not ru_maxrss where that can be helped: it counts the parent's, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    high = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
    return high[0] if high else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def kernel_read_bytes() -> int:
    """Bytes that this process's read calls have returned."""
    return int(Path("/proc/self/io").read_text().split()[1])


def is_expert(name: str) -> bool:
    return ".experts." in name or "block_sparse_moe.input" in name or "block_sparse_moe.output" in name


def load_and_save(folder: Path, saved: Path, family: str) -> dict[str, Any]:
    """Loads onto all devices there are, saves again; figures of this process."""
    config = config_from_hub(json.loads((folder / CONFIG).read_text()))
    mesh = make_mesh(jax.device_count())
    jax.block_until_ready([jax.device_put(np.zeros(1), device) for device in jax.local_devices()])
    reads: list[Read] = []
    resident, kernel, start = resident_bytes(), kernel_read_bytes(), time.perf_counter()
    params = load_params(folder, config, family, mesh, reads=reads)
    jax.block_until_ready(params)
    seconds = time.perf_counter() - start
    peak, kernel = peak_bytes() - resident, kernel_read_bytes() - kernel
    leaves = jax.tree.leaves(params)
    placed = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    start = time.perf_counter()
    save_params(params, config, family, saved, most_file_bytes=FILE_BYTES)
    by_device = {
        d.id: sum(r.nbytes for r in reads if is_expert(r.tensor) and d.id in r.devices) for d in jax.local_devices()
    }
    return {
        "process": jax.process_index(),
        "load_s": seconds,
        "save_s": time.perf_counter() - start,
        "peak_bytes": peak,
        "peak_bytes_with_saving": peak_bytes() - resident,
        "placed_bytes": placed,
        "expert_bytes_read": sum(r.nbytes for r in reads if is_expert(r.tensor)),
        "expert_bytes_read_by_device": by_device,
        "other_bytes_read": sum(r.nbytes for r in reads if not is_expert(r.tensor)),
        "kernel_read_bytes": kernel,
    }


def worker(options: argparse.Namespace) -> None:
    if options.worker == "simulated":
        simulate_devices(DEVICES)
    else:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(options.coordinator, DEVICES, int(options.worker))
    figures = load_and_save(options.folder / "hub", options.folder / "saved", options.family)
    print(json.dumps(figures), flush=True)


def in_fresh_processes(names: Sequence[str], options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Figures of one process, or of several that run together."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        coordinator = f"localhost:{probe.getsockname()[1]}"
    common = ["--family", options.family, "--folder", str(folder), "--coordinator", coordinator]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    commands = [[sys.executable, __file__, "--worker", name, *common] for name in names]
    running = [subprocess.Popen(c, env=environment, stdout=subprocess.PIPE, text=True) for c in commands]
    outputs = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise UsageError("a process failed; what it said is above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


# The report.


def same_files(first: Path, second: Path) -> bool:
    names = sorted(path.name for path in first.glob("model*"))
    return bool(names) and not any(filecmp.cmpfiles(first, second, names, shallow=False)[1:])


def report(record: dict[str, Any]) -> None:
    one, ranks = record["simulated"], record["processes"]
    files, share = record["file_bytes"], record["expert_share"]
    print(f"{record['family']} {record['dtype']}, millions of bytes: files {files / 1e6:.1f}, {share:.1%} experts")
    print(f"\none process, {DEVICES} simulated devices")
    print(f"  placed, all devices' shards {one['placed_bytes'] / 1e6:10.1f}")
    print(f"  peak memory of loading      {one['peak_bytes'] / 1e6:10.1f}  {record['peak_over_placed']:.3f} of placed")
    print(f"                                          {record['peak_over_files']:.3f} of the files' bytes")
    print(f"  peak, saving included       {one['peak_bytes_with_saving'] / 1e6:10.1f}")
    print(
        f"  loaded in {one['load_s']:.1f} s, saved in {one['save_s']:.1f} s, saved files the same: {one['same_files']}"
    )
    print(f"\n{len(ranks)} processes of one device each (Gloo)")
    columns = {"expert_bytes_read": "experts", "other_bytes_read": "the rest", "kernel_read_bytes": "by the kernel"}
    columns |= {"peak_bytes": "peak memory", "placed_bytes": "placed"}
    print("  rank" + "".join(f"{title:>15}" for title in columns.values()))
    for rank in ranks:
        print(f"  {rank['process']:4}" + "".join(f"{rank[name] / 1e6:15.1f}" for name in columns))
    owned = record["expert_bytes"] / len(ranks) / 1e6
    print(f"  read; a rank's own experts are {owned:.1f}; files saved by all, the same: {ranks[0]['same_files']}")


def main(argv: Sequence[str]) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the checkpoint (default: %(default)s)")
    parser.add_argument("--family", choices=FAMILIES, default="mixtral", help="whose files (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, help="for the checkpoints; removed afterwards (default: a temporary one)"
    )
    parser.add_argument("--out", type=Path, default=Path("out/load_memory"), help="for the JSON (default: %(default)s)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        return worker(options)
    if not 0.001 <= options.gigabytes <= 1000:
        raise UsageError(f"--gigabytes {options.gigabytes}: must be in [0.001, 1000]; --gigabytes 2 works")
    refuse_bad_folder(options.out, "load_memory.json")
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        record = measure(Path(made), options)
    report(record)
    write_files(options.out, {"load_memory.json": (json.dumps(record, indent=1) + "\n").encode()})


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    print(f"writing a checkpoint of {options.gigabytes} GB", file=sys.stderr, flush=True)
    hub, saved = folder / "hub", folder / "saved"
    write_checkpoint(hub, options.family, round(options.gigabytes * 1e9))
    with safetensors_io.open_checkpoint(hub) as checkpoint:
        sizes = {name: checkpoint.tensor(name).nbytes for name in checkpoint.files}
    total, experts = sum(sizes.values()), sum(n for name, n in sizes.items() if is_expert(name))
    print("loading onto simulated devices, then in several processes", file=sys.stderr, flush=True)
    (one,) = in_fresh_processes(["simulated"], options, folder)
    one["same_files"] = same_files(hub, saved)
    shutil.rmtree(saved)
    ranks = in_fresh_processes([str(rank) for rank in range(DEVICES)], options, folder)
    ranks[0]["same_files"] = same_files(hub, saved)
    return {
        "environment": {"jax": jax.__version__, "devices": DEVICES},
        "family": options.family,
        "dtype": DTYPE,
        "file_bytes": total,
        "expert_bytes": experts,
        "expert_share": experts / total,
        "simulated": one,
        "processes": ranks,
        "peak_over_placed": one["peak_bytes"] / one["placed_bytes"],
        "peak_over_files": one["peak_bytes"] / total,
    }


if __name__ == "__main__":
    run_main(main)
