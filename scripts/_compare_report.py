"""compare.py's record as a table and as a picture, and what a sweep's has in common with it."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
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


def console_of_width(least: int) -> Console:
    """For stdout; where that is no terminal, as wide as it needs to be."""
    return Console(width=max(least, shutil.get_terminal_size().columns) if os.isatty(1) else least, highlight=False)


def print_heading(console: Console, record: dict[str, Any]) -> None:
    environment, workload = record["environment"], record["workload"]
    mesh = f"data={workload['data_parallel']} x expert={workload['expert_parallel']}"
    console.print(f"\n{devices_in_words(record)} ({mesh}), jax {environment['jax']}", style="bold")
    console.print(f"{workload_in_words(record)}, {record['timed']}, {workload['runs']} runs after {workload['warmup']}")
    console.print(f"text: {workload['source'].split(':')[0]}\n")


def print_table(record: dict[str, Any]) -> None:
    """To stdout."""
    console = console_of_width(140)
    print_heading(console, record)
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
            collectives_in_words(m["collectives"]),
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


def collectives_in_words(counts: dict[str, dict[str, int]]) -> str:
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
    modes = record["modes"]
    with figure((6, 6), 2.1 + 0.75 * len(modes)) as (panels, finish):
        left, right = panels
        draw_times(left, modes, [_COLORS[mode] for mode in modes])
        if "one_device" in record:
            alone = record["one_device"]["median_ms"]
            left.set_xlim(0, max(left.get_xlim()[1], 1.05 * alone))
            draw_mark(left, alone, "same layer, one device, no exchange")
        draw_bytes(right, modes, record["timed"])
        label_rows(panels, list(modes))
        return finish(f"One mixture-of-experts layer on {devices_in_words(record)}", subtitle(record))


def subtitle(record: dict[str, Any]) -> str:
    return f"{workload_in_words(record)}, {record['timed']}, jax {record['environment']['jax']}"


@contextlib.contextmanager
def figure(widths: Sequence[float], height: float) -> Iterator[tuple[list[Any], Callable[..., bytes]]]:
    """Panels beside one another, of these widths in inches, that share their rows.

    Yields them and `finish`, which puts a title and lines of text over them and returns the PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    whole, axes = plt.subplots(
        1, len(widths), figsize=(sum(widths), height), layout="constrained", sharey=True, width_ratios=widths
    )

    def finish(title: str, *lines: str) -> bytes:
        taken = 0.5 + 0.24 * len(lines)  # inches, whatever the number of rows
        whole.get_layout_engine().set(rect=(0.004, 0, 0.99, 1 - taken / height), wspace=0.04)
        whole.text(0.5, 1 - 0.12 / height, title, ha="center", va="top", fontsize=15, fontweight="bold")
        for i, line in enumerate(lines):
            whole.text(0.5, 1 - (0.47 + 0.24 * i) / height, line, ha="center", va="top", fontsize=10.5, color="0.35")
        buffer = io.BytesIO()
        whole.savefig(buffer, format="png", dpi=150)
        return buffer.getvalue()

    try:
        yield list(axes), finish
    finally:
        plt.close(whole)


def label_rows(panels: Sequence[Any], names: Sequence[str]) -> None:
    panels[0].set_yticks(range(len(names)), list(names), fontsize=12)
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    for axes in panels:
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="0.9", zorder=0)
        axes.set_axisbelow(True)


def write_beside(axes: Any, row: int, text: str, weight: str = "normal") -> None:
    """In a column at the panel's right end, where no bar or mark reaches."""
    axes.text(1.02, row, text, transform=axes.get_yaxis_transform(), va="center", fontsize=11, fontweight=weight)


def draw_times(axes: Any, rows: dict[str, Any], colors: Sequence[str]) -> None:
    """Medians, all runs, and a sweep's ratio to the baseline."""
    end = 1.05 * max(min(m["max_ms"], 1.5 * m["median_ms"]) for m in rows.values())
    beyond = 0
    for row, m in enumerate(rows.values()):
        runs = [run for run in m["runs_ms"] if run <= end]
        slower = len(m["runs_ms"]) - len(runs)
        axes.barh(row, m["median_ms"], color=colors[row], height=0.62, zorder=2)
        axes.plot([m["min_ms"], min(m["max_ms"], end)], [row, row], color="0.15", linewidth=1.2, zorder=3)
        axes.scatter(runs, [row] * len(runs), s=14, color="0.15", alpha=0.55, linewidths=0, zorder=4)
        if slower:
            axes.scatter([end], [row], s=22, color="0.15", marker=">", linewidths=0, zorder=4, clip_on=False)
            beyond += slower
        ratio = f"  x{m['time_ratio']:.2f}" if "time_ratio" in m else ""
        write_beside(axes, row, f"{_three_digits(m['median_ms'])} ms{ratio}", "bold")
    axes.set_xlim(0, end)
    count = len(next(iter(rows.values()))["runs_ms"])
    arrows = f" (arrow: {beyond} slower than the axis)" if beyond else ""
    axes.set_xlabel(f"time of one call, ms: median, and all {count} runs{arrows}")


def _three_digits(value: float) -> str:
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def draw_mark(axes: Any, at: float, label: str) -> None:
    """A dashed line through all rows."""
    axes.axvline(at, color="0.25", linestyle=(0, (4, 3)), linewidth=1.2, zorder=3, label=label)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=9)


def unit_of(largest: float) -> tuple[str, int]:
    return ("MiB", 1 << 20) if largest >= 1 << 20 else ("KiB", 1 << 10)


def draw_bytes(axes: Any, rows: dict[str, Any], timed: str) -> None:
    reach = lambda m: max(m["bytes"]["wire"], sum(m["bytes"][kind] for kind in ("payload", "metadata", "control")))
    largest = max(map(reach, rows.values()))
    unit, scale = unit_of(largest)
    labelled: set[str] = set()
    for row, m in enumerate(rows.values()):
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
        ratio = f"  x{m['wire_ratio']:.2f}" if m.get("wire_ratio") is not None else ""
        write_beside(axes, row, f"{size(moved['wire'])} on the wire{ratio}" if wire else "no rows move")
    axes.plot([], [], color="#d00000", linewidth=2.5, label="wire: handed to the collectives for other ranks")
    axes.set_xlim(0, 1.05 * max(largest, 1) / scale)
    if not largest:
        axes.set_xticks([0])
    axes.set_xlabel(f"{unit} a {timed.replace('+', ' and ')}, over all ranks")
    handles, labels = axes.get_legend_handles_labels()
    wire_last = [*range(1, len(handles)), 0]  # matplotlib puts lines before bars
    axes.legend(
        [handles[i] for i in wire_last],
        [labels[i] for i in wire_last],
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=3,
        frameon=False,
        fontsize=9,
    )
