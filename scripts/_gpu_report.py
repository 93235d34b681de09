"""What bench_gpu.py says of its figures: the goals, a table in Markdown, lines to print."""

from __future__ import annotations

import itertools
from typing import Any

from _gpu_layers import PEERS
from _gpu_measure import OUT_OF_TIME, Cell, gib
from _gpu_products import SIZES, TIMED

REHEARSAL = "A rehearsal: tiny shapes on whatever device is here. Its times mean nothing."
LEAST_OF_DENSE = 0.7
DENSE_CASE = "g8"  # the case with 2048 rows a group
COLUMNS = ("", "", "median ms", "min .. max", "TFLOP/s", "of dense rate", "time over ours", "temporaries", "compile s")
NOTES = (
    "A time is one compiled call's, blocked on; short calls are queued several a run, and the contestants take turns "
    "run by run (torch in a process of its own). TFLOP/s count the products that the routing asks for; the dense rate "
    "is that of the square product in the first row. Temporaries are the compiler's figure, torch's is the peak of its "
    "whole process."
)


def judged(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Every goal: what was wanted, the ratio that was measured, and whether it is met; None: not measured."""
    goals = []
    section = record["products"].get(DENSE_CASE, {})
    nothing = {"reason": section.get("reason", "not begun")}
    for sizes, timed in itertools.product(SIZES, TIMED):
        cells = section.get("figures", {}).get(sizes, {}).get(timed, {})
        name = f"grouped_matmul at {LEAST_OF_DENSE} of the dense product's rate or more, {DENSE_CASE} {sizes}, {timed}"
        ours = cells.get("grouped", nothing)
        goals.append(_goal(name, cells.get("dense", nothing), ours, LEAST_OF_DENSE, record["rehearsal"]))
    for layer, section in record["layers"].items():
        nothing = {"reason": section.get("reason", "not begun")}
        for timed, peer in itertools.product(TIMED, PEERS):
            cells = section.get("figures", {}).get(timed, {})
            cell = cells.get(peer, {"reason": "not installed"})
            ours = cells.get("ours", nothing)
            goals.append(_goal(f"{layer} faster than {peer}, {timed}", cell, ours, 1.0, record["rehearsal"]))
    return goals


def _goal(name: str, peer: Cell, ours: Cell, least: float, rehearsal: bool) -> dict[str, Any]:
    """Whether the peer's time over ours is at least so much; more than 1 where it has to be slower."""
    goal: dict[str, Any] = {"goal": name, "ratio": None, "met": None, "why": None}
    if "median_ms" not in ours:
        goal["why"] = ours.get("reason", "not begun")
        if goal["why"] not in (OUT_OF_TIME, "not begun") and "median_ms" in peer:
            goal["met"] = False
    elif "median_ms" not in peer:
        goal["why"] = peer.get("reason", "not begun")
    else:
        goal["ratio"] = peer["median_ms"] / ours["median_ms"]
        goal["met"] = goal["ratio"] >= least if least < 1 else goal["ratio"] > least
    if rehearsal:
        goal |= {"met": None, "why": goal["why"] or "a rehearsal"}
    return goal


def verdicts(goals: list[dict[str, Any]]) -> list[str]:
    lines = []
    for goal in goals:
        said = {True: "met", False: "NOT met", None: "not measured"}[goal["met"]]
        ratio = "" if goal["ratio"] is None else f"{goal['ratio']:.2f}: "
        why = f" ({goal['why']})" if goal["why"] else ""
        lines.append(f"{goal['goal']}: {ratio}{said}{why}")
    return lines


def table(record: dict[str, Any]) -> str:
    """All figures as one table in Markdown."""
    rate = record["dense_rate"].get("tflops")
    rows = [COLUMNS, tuple("---" if i < 2 else "---:" for i in range(len(COLUMNS)))]
    side = record["dense_rate"].get("side")
    rows.append(_row(f"dense {side} x {side} x {side}", "bfloat16", record["dense_rate"], None, rate))
    for case, section in record["products"].items():
        shape = " ".join(f"{key}={value}" for key, value in section["shape"].items())
        for sizes, by_timed in section["figures"].items():
            for timed, cells in by_timed.items():
                rows += _rows(f"{shape}, {sizes}, {timed}", cells, "grouped", rate)
        rows += _row_of_none(case, section)
    for layer, section in record["layers"].items():
        shape = " ".join(f"{key}={value}" for key, value in section["shape"].items())
        for timed, cells in section["figures"].items():
            rows += _rows(f"{layer}, {shape}, {timed}", cells, "ours", rate)
        rows += _row_of_none(layer, section)
    paths = record.get("paths")
    if paths:
        for timed, cells in paths["figures"].items():
            shared = rate and rate * paths["devices"]
            what = f"{paths['workload']} on {paths['devices']} devices, T={paths['T']}, {timed}"
            rows += _rows(what, cells, "packed, all_to_all", shared)
        rows += _row_of_none("paths", paths)
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = []
    for row in rows:
        padded = [f"{text:<{w}}" if i < 2 else f"{text:>{w}}" for i, (text, w) in enumerate(zip(row, widths))]
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines)


def _rows(what: str, cells: dict[str, Cell], ours: str, rate: float | None) -> list[tuple[str, ...]]:
    own = cells.get(ours, {}).get("median_ms")
    return [_row("" if i else what, who, cell, own, rate) for i, (who, cell) in enumerate(cells.items())]


def _row_of_none(what: str, section: dict[str, Any]) -> list[tuple[str, ...]]:
    """The row of a section that ended early."""
    return [_row(what, "", section, None, None)] if "reason" in section else []


def _row(what: str, who: str, cell: Cell, own: float | None, rate: float | None) -> tuple[str, ...]:
    implementation = f" {cell['implementation']}" if "implementation" in cell else ""
    memory = cell.get("temp_bytes", cell.get("peak_bytes"))
    end = ("" if memory is None else gib(memory), f"{cell['compile_s']:.1f}" if "compile_s" in cell else "")
    if "median_ms" not in cell:
        return (what, who + implementation, cell.get("reason", "not measured"), "", "", "", "", *end)
    once = " (one run)" if len(cell["runs_ms"]) == 1 else ""
    return (
        what,
        who + implementation,
        f"{cell['median_ms']:.3f}{once}",
        f"{cell['min_ms']:.3f} .. {cell['max_ms']:.3f}",
        f"{cell['tflops']:.1f}",
        "" if not rate else f"{cell['tflops'] / rate:.2f}",
        "" if own is None else f"{cell['median_ms'] / own:.2f}",
        *end,
    )


def heading(record: dict[str, Any]) -> str:
    """One line on where and how the figures were made."""
    e, how = record["environment"], record["how"]
    versions = [f"jax {e['jax']}", *(f"{n} {e[n]}" for n in ("torch", "transformers", "tokamax") if e.get(n))]
    where = f"{e['device_count']} x {e['device_kind']}"
    driver = f", driver {e['driver']}" if e.get("driver") else ""
    return f"{where}{driver}; {', '.join(versions)}; bfloat16, {how['runs']} runs after {how['warmup']}"


def markdown(record: dict[str, Any]) -> str:
    parts = [f"{heading(record)}."]
    if record["rehearsal"]:
        parts.append(f"**{REHEARSAL}**")
    parts += [table(record), "\n".join(f"- {line}" for line in verdicts(record["goals"])), NOTES]
    known = {name: peak for name, peak in record["peak_bytes_so_far"].items() if peak is not None}
    if known:
        after = "; ".join(f"{name} {gib(peak)}" for name, peak in known.items())
        parts.append(f"The most that JAX had in use on the first device, up to the end of: {after}.")
    if record["skipped"]:
        parts.append(f"Skipped, out of time: {'; '.join(record['skipped'])}.")
    return "\n\n".join(parts) + "\n"
