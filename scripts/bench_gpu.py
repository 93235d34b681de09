"""Grouped products and the whole layer on a GPU: right first, then how fast, beside dense products and peers.

    python scripts/bench_gpu.py                                 three minutes at most on one GPU
    python scripts/bench_gpu.py --torch ../torch/bin/python     torch and transformers from another environment
    python scripts/bench_gpu.py --rehearse                      tiny shapes, on whatever is here; times mean nothing
    python scripts/bench_gpu.py --rehearse --devices 4          the same, and the paths over four simulated devices

First values and gradients are compared with dense references in float32, on sizes made to hurt. Where one is off by
more than rounding it is printed, nothing is timed, and the exit code is 1. Then come, in bfloat16: the device's dense
rate; grouped_matmul beside one dense product of the same FLOPs, jax.lax.ragged_dot, and tokamax where it is installed;
the layer on one device at the shapes of mixtral_8x7b, qwen3_30b_a3b and deepseek_moe_16b, forward and forward+backward,
beside ragged_dot, tokamax, and torch's grouped experts in the blocks of HF transformers where those are installed.
On several GPUs all paths run over a mesh of them: checked first, timed at the end.

What does not fit in memory, cannot run, or is not begun after --seconds says so in its place. Writes
OUT/bench_gpu.json and OUT/bench_gpu.md.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Read when JAX first looks for devices: torch needs memory of the same card.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from _common import (
    Parser,
    UsageError,
    chosen,
    environment,
    refuse_bad_folder,
    run_main,
    simulate_devices,
    visible_devices,
    write_files,
)
from _gpu_checks import Check, layer_checks, product_checks
from _gpu_layers import LAYERS, layer_section, torch_peer
from _gpu_measure import Budget, How, peak_bytes, said
from _gpu_paths import PATHS, path_checks, path_section, reason_left_out
from _gpu_products import CASES, device_rate, product_section
from _gpu_report import REHEARSAL, heading, judged, markdown
from jax_ep.config import ConfigError

JSON, MARKDOWN = "bench_gpu.json", "bench_gpu.md"
SECONDS = 170.0


def main(argv: Sequence[str]) -> None:
    args = _arguments(argv)
    names = chosen("--layers", args.layers, LAYERS, "layer", "unknown layer")
    refuse_bad_folder(args.out, JSON, MARKDOWN)
    if args.rehearse:
        simulate_devices(args.devices, default=1, in_order=True)
    devices = visible_devices(args.devices)
    if args.devices is not None and len(devices) < args.devices:
        there = f"there are {len(devices)}"
        raise UsageError(f"devices={args.devices}: {there}; --devices {len(devices)} works")
    if devices[0].platform != "gpu" and not args.rehearse:
        found = f"{devices[0].platform} ({devices[0].device_kind})"
        raise UsageError(f'no GPU: JAX finds {found}; pip install "jax[cuda13]" beside a GPU, or --rehearse, works')
    budget = Budget(args.seconds or SECONDS * (1 if len(devices) == 1 else 2))
    how = How(args.warmup, args.runs, devices[0], budget, args.rehearse)
    if args.rehearse:
        say(REHEARSAL)
    with budget.section("checks"):
        checks, left_out = checked(devices)
    record = measured(names, devices, left_out, how, args.torch)
    record["checks"] = [{**check._asdict(), "passed": check.passed} for check in checks]
    text = markdown(record)
    content = (json.dumps(record, indent=1) + "\n").encode()
    write_files(args.out, {JSON: content, MARKDOWN: text.encode()})
    print(text)
    print(f"{len(checks)} checks passed; {sum(budget.sections.values()):.0f} s; written: {args.out / JSON}")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="bench_gpu.py", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/bench_gpu"), help="folder (default: %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on any device, to see that all of it runs")
    parser.add_argument("--devices", type=int, metavar="N", help="take N devices; a rehearsal simulates them on a CPU")
    parser.add_argument("--layers", default=",".join(LAYERS), help="some of %(default)s")
    parser.add_argument("--runs", type=int, default=7, help="timed runs (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="untimed runs before them (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, help=f"begin nothing after these (default: {SECONDS:.0f}, twice that on several GPUs)"
    )
    parser.add_argument(
        "--torch",
        metavar="PYTHON",
        default=sys.executable,
        help="interpreter with torch and transformers (default: this)",
    )
    args = parser.parse_args(argv)
    for field, least in (("devices", 1), ("runs", 1), ("warmup", 0), ("seconds", 1)):
        value = getattr(args, field)
        if value is not None and not value >= least:
            raise UsageError(f"--{field} {value}: must be at least {least}; --{field} {least} works")
    return args


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def checked(devices: Sequence[Any]) -> tuple[list[Check], dict[str, str]]:
    """All checks, and the paths that cannot run on these devices, with the reason.

    Raises:
      SystemExit: one failed, or did not run; all are run before.
    """
    todo: dict[str, Callable[[], Any]] = {}
    for dtype in ("float32", "bfloat16"):
        todo[f"grouped_matmul, {dtype}"] = functools.partial(product_checks, dtype)
        todo[f"layer, {dtype}"] = functools.partial(layer_checks, dtype)
    if len(devices) > 1:
        todo |= {path: functools.partial(path_checks, path, devices) for path in PATHS}
    checks: list[Check] = []
    left_out: dict[str, str] = {}
    bad: list[str] = []
    for name, make in todo.items():
        say(f"checking {name}")
        try:
            checks += make()
        except Exception as error:  # told below, beside the others
            reason = reason_left_out(name, devices, error) if name in PATHS else None
            if reason is None:
                bad.append(f"{name}: did not run: {said(error)}")
            else:
                left_out[name] = reason
    for check in checks:
        if not check.passed:
            off = f"off by {check.difference:.2g} of the largest value, {check.tolerance:.2g} is allowed"
            bad.append(f"{check.name}, {check.dtype}: {off}")
    if bad:
        for line in bad:
            say(f"FAILED  {line}")
        say(f"bench_gpu.py: {len(bad)} of {len(checks) + len(bad)} checks failed; nothing was timed")
        raise SystemExit(1)
    return checks, left_out


def measured(
    names: list[str], devices: Sequence[Any], left_out: dict[str, str], how: How, interpreter: str
) -> dict[str, Any]:
    """Every figure there is. Torch first, before JAX holds much of the device's memory; what matters least is last."""
    budget, peaks = how.budget, {}
    record: dict[str, Any] = {"rehearsal": how.rehearse, "note": REHEARSAL if how.rehearse else None}
    record |= {"environment": {}, "how": {"warmup": how.warmup, "runs": how.runs}, "products": {}, "layers": {}}

    def section(name: str, make: Callable[[], Any]) -> Any:
        say(f"timing {name}")
        try:
            with budget.section(name):
                made = make()
        except (UsageError, ConfigError):
            raise
        except Exception as error:  # the other sections' figures are worth having
            made = {"shape": {}, "figures": {}, "layers": {}, "reason": said(error)}
            say(f"{name}: {made['reason']}")
        peaks[name] = peak_bytes(how.device)
        return made

    torch = record["torch"] = section("torch", lambda: torch_peer(names, interpreter, how))
    record["environment"] = where(devices, torch.get("versions", {}))
    say(heading(record))
    record["dense_rate"] = section("dense rate", lambda: device_rate(how))
    first, *others = CASES
    record["products"][first] = section(first, lambda: product_section(first, how))
    for name in names:
        layer = record["layers"][name] = section(name, functools.partial(layer_section, name, how))
        for timed, cells in layer["figures"].items():
            cells["torch"] = torch["layers"].get(name, {}).get(timed, {"reason": torch.get("reason", "not measured")})
    for case in others:
        record["products"][case] = section(case, functools.partial(product_section, case, how))
    if len(devices) > 1:
        record["paths"] = section("paths", lambda: path_section(devices, left_out, how))
    record["peak_bytes_so_far"] = peaks
    record["seconds"] = budget.sections
    record["skipped"] = budget.skipped
    record["goals"] = judged(record)
    return record


def where(devices: Sequence[Any], torch: dict[str, Any]) -> dict[str, Any]:
    """The environment: what of it can be found out."""
    found = environment(len(devices))
    try:
        found["tokamax"] = importlib.metadata.version("tokamax")
    except importlib.metadata.PackageNotFoundError:
        found["tokamax"] = None
    found["jaxlib"] = importlib.metadata.version("jaxlib")
    found["runtime"] = getattr(devices[0].client, "platform_version", None)
    found["driver"] = _driver()
    stats = devices[0].memory_stats() or {}
    found["memory_bytes"] = stats.get("bytes_limit")
    return found | {name: torch.get(name) for name in ("torch", "transformers", "torch_cuda")}


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, check=True, capture_output=True, text=True, timeout=10).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


if __name__ == "__main__":
    run_main(main)
