"""compare.py's record as a table and as a picture."""

from __future__ import annotations

import io
import os
import shutil
from typing import Any

from rich.console import Console
from rich.table import Table

from _common import UsageError

_COLORS = {"dense": "#8d99ae", "allgather": "#e09f3e", "padded": "#9e2a2b", "packed": "#2a9d8f"}
_KINDS = (
    ("payload to other ranks", "payload_remote", "#264653"),
    ("payload that stays", None, "#a8c5cf"),
    ("metadata", "metadata", "#e9c46a"),
    ("control", "control", "#e76f51"),
)


def devices_in_words(record: dict[str, Any]) -> str:
    environment, workload = record["environment"], record["workload"]
    count = workload["expert_parallel"] * workload["data_parallel"]
    what = "simulated CPU device" if environment["simulated"] else environment["device_kind"]
    return f"{count} {what}{'s' if count > 1 and environment['simulated'] else ''}"


def workload_in_words(record: dict[str, Any]) -> str:
    w = record["workload"]
    sizes = f"H={w['hidden_size']} I={w['intermediate_size']} E={w['num_experts']} K={w['top_k']}"
    return f"B={w['batch_size']} S={w['sequence_length']} {sizes} {w['dtype']}"


def size(count: float) -> str:
    """A byte count as people write it."""
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= 10 * scale:
            return f"{count / scale:.0f} {unit}"
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


def print_table(record: dict[str, Any]) -> None:
    """To stdout; where that is no terminal, as wide as it needs to be."""
    width = max(140, shutil.get_terminal_size().columns) if os.isatty(1) else 140
    console = Console(width=width, highlight=False)
    environment, workload = record["environment"], record["workload"]
    mesh = f"data={workload['data_parallel']} x expert={workload['expert_parallel']}"
    console.print(f"\n{devices_in_words(record)} ({mesh}), jax {environment['jax']}", style="bold")
    console.print(f"{workload_in_words(record)}, {record['timed']}, {workload['runs']} runs after {workload['warmup']}")
    console.print(f"text: {workload['source'].split(':')[0]}\n")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("mode", no_wrap=True)
    for heading in ("median ms", "min .. max", "payload", "wire", "rounds", "busiest", "max diff", "temp", "compile"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("collectives")
    for mode, m in record["modes"].items():
        table.add_row(
            mode,
            f"{m['median_ms']:.2f}",
            f"{m['min_ms']:.2f} .. {m['max_ms']:.2f}",
            size(m["bytes"]["payload"]),
            size(m["bytes"]["wire"]),
            str(m["rounds"]),
            f"x{m['shard_ratio']:.2f}",
            f"{m['max_abs_diff']:.1e}",
            "-" if m["temp_bytes"] is None else size(m["temp_bytes"]),
            f"{m['compile_s']:.1f} s",
            _collectives(m["collectives"]),
        )
    console.print(table)
    ratios = [f"{name} {ratio:.3f}" for name, ratio in record["ratios"].items() if ratio is not None]
    if ratios:
        console.print(f"\ntime: {', '.join(ratios)}")
    reference = record["reference_bytes"]
    console.print("reference bytes, forward: " + ", ".join(f"{name} {count}" for name, count in reference.items()))
    console.print("busiest: rows of the busiest rank over the mean; collectives (+n): in the loop of further rounds")
    for note in record["notes"]:
        console.print(f"note: {note}", style="dim")


def _collectives(counts: dict[str, dict[str, int]]) -> str:
    """Straight-line ones, then those of further rounds: "2 all_to_all (+2)"."""
    parts = []
    for kind, count in counts.items():
        loop = f" (+{count['loop']})" if count["loop"] else ""
        parts.append(f"{count['straight']} {kind}{loop}")
    return ", ".join(parts) or "none"


def require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("the picture needs matplotlib; pip install matplotlib, or make compare, works") from None


def picture(record: dict[str, Any]) -> bytes:
    """A PNG: time a mode with its runs, and bytes by kind a mode."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    modes = record["modes"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 1.9 + 0.75 * len(modes)), layout="constrained")
    _draw_times(left, record)
    _draw_bytes(right, record)
    for axes in (left, right):
        axes.set_yticks(range(len(modes)), list(modes), fontsize=12)
        axes.invert_yaxis()
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="0.9", zorder=0)
        axes.set_axisbelow(True)
    figure.suptitle(
        f"One mixture-of-experts layer on {devices_in_words(record)}\n", fontsize=15, fontweight="bold", ha="center"
    )
    words = f"{workload_in_words(record)}, {record['timed']}, jax {record['environment']['jax']}"
    figure.text(0.5, 0.925 if len(modes) > 2 else 0.89, words, ha="center", va="top", fontsize=10, color="0.35")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    plt.close(figure)
    return buffer.getvalue()


def _draw_times(axes: Any, record: dict[str, Any]) -> None:
    modes = record["modes"]
    top = max(m["max_ms"] for m in modes.values())
    for row, (mode, m) in enumerate(modes.items()):
        axes.barh(row, m["median_ms"], color=_COLORS[mode], height=0.62, zorder=2)
        axes.plot([m["min_ms"], m["max_ms"]], [row, row], color="0.15", linewidth=1.2, zorder=3)
        axes.scatter(m["runs_ms"], [row] * len(m["runs_ms"]), s=14, color="0.15", alpha=0.55, linewidths=0, zorder=4)
        text = f"{_three_digits(m['median_ms'])} ms"
        axes.text(m["max_ms"] + 0.02 * top, row, text, va="center", fontsize=11, fontweight="bold")
    if "one_device" in record:
        alone = record["one_device"]["median_ms"]
        label = "same layer, one device, no exchange"
        axes.axvline(alone, color="0.25", linestyle=(0, (4, 3)), linewidth=1.2, zorder=3, label=label)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=9)
    axes.set_xlim(0, 1.3 * max(top, record.get("one_device", {}).get("median_ms", 0)))
    axes.set_xlabel(f"time of one call, ms: median, and all {record['workload']['runs']} runs")


def _three_digits(value: float) -> str:
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _draw_bytes(axes: Any, record: dict[str, Any]) -> None:
    modes = record["modes"]
    largest = max(max(m["bytes"]["wire"], m["bytes"]["payload"] + m["bytes"]["metadata"]) for m in modes.values())
    unit, scale = ("MiB", 1 << 20) if largest >= 1 << 20 else ("KiB", 1 << 10)
    labelled: set[str] = set()
    for row, m in enumerate(modes.values()):
        moved, start = m["bytes"], 0.0
        for label, key, color in _KINDS:
            count = (moved["payload"] - moved["payload_remote"] if key is None else moved[key]) / scale
            shown = label if label not in labelled else None
            labelled.add(label)
            axes.barh(row, count, left=start, color=color, height=0.62, zorder=2, label=shown)
            start += count
        wire = moved["wire"] / scale
        if wire:
            axes.plot([wire, wire], [row - 0.4, row + 0.4], color="#d00000", linewidth=2.5, zorder=4)
        text = f"{size(moved['wire'])} on the wire" if wire else "no rows move"
        axes.text(max(start, wire) + 0.02 * largest / scale, row, text, va="center", fontsize=11)
    axes.plot([], [], color="#d00000", linewidth=2.5, label="wire: handed to the collectives for other ranks")
    axes.set_xlim(0, 1.42 * max(largest, 1) / scale)
    axes.set_xlabel(f"{unit} a {record['timed'].replace('+', ' and ')}, over all ranks")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize=9)
