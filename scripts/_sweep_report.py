"""sweep.json as a table and as a picture."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.table import Table

from _compare_report import (
    collectives_in_words,
    console_of_width,
    devices_in_words,
    draw_bytes,
    draw_mark,
    draw_times,
    figure,
    label_rows,
    print_heading,
    size,
    subtitle,
    unit_of,
    write_beside,
)
from _sweep import BASELINE, TOGETHER
from jax_ep.config import CommConfig

_BASELINE_COLOR, _TOGETHER_COLOR = "#8d99ae", "#1b6f65"
_FIELD_COLORS = ("#2a9d8f", "#7fc8bf")  # in turns, so that the values of one field stand together


def print_sweep(record: dict[str, Any]) -> None:
    """To stdout."""
    console = console_of_width(210)
    print_heading(console, record)
    settings = ", ".join(f"{field}={value}" for field, value in record["workload"]["packed"].items() if field != "mode")
    console.print(f"baseline: packed with {settings}\n")
    gradients = record["timed"] != "forward"
    headings = ["median ms", "min .. max", "time", "payload", "to others", "metadata", "control", "wire", "wire"]
    headings += ["rounds", "max diff", "rel. diff", *(["rel. grads"] if gradients else []), "temp", "compile"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("variant", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("collectives")
    for name, m in record["variants"].items():
        moved = m["bytes"]
        table.add_row(
            name,
            f"{m['median_ms']:.2f}",
            f"{m['min_ms']:.2f} .. {m['max_ms']:.2f}",
            f"x{m['time_ratio']:.2f}",
            *(size(moved[kind]) for kind in ("payload", "payload_remote", "metadata", "control", "wire")),
            "-" if m["wire_ratio"] is None else f"x{m['wire_ratio']:.2f}",
            str(m["rounds"]),
            f"{m['max_abs_diff']:.1e}",
            f"{m['relative_difference']:.1e}",
            *([f"{m['relative_difference_gradients']:.1e}"] if gradients else []),
            "-" if m["temp_bytes"] is None else size(m["temp_bytes"]),
            f"{m['compile_s']:.1f} s",
            collectives_in_words(m["collectives"]),
        )
    console.print(table)
    console.print()
    if TOGETHER in record["variants"]:
        console.print(f"together: {_assignments(record['variants'][TOGETHER]['changed'], ', ')}")
    console.print("x: ratio to the baseline, of median times and of wire; differences are to dense: max, the largest;")
    console.print("rel., Frobenius norms of output (and of gradients); collectives (+n): in the loop of further rounds")
    for note in record["notes"]:
        console.print(f"note: {note}", style="dim")


def _assignments(changed: dict[str, Any], between: str) -> str:
    return between.join(f"{field}={value}" for field, value in changed.items())


def sweep_picture(record: dict[str, Any]) -> bytes:
    """A PNG: time, bytes by kind and temporaries of every variant."""
    rows = record["variants"]
    colors = _colors(rows)
    with figure((6, 7, 4.5), 2.3 + 0.52 * len(rows)) as (panels, finish):
        times, moved, temporaries = panels
        draw_times(times, rows, colors)
        draw_mark(times, rows[BASELINE]["median_ms"], "the baseline's median")
        draw_bytes(moved, rows, record["timed"])
        _draw_temporaries(temporaries, rows, colors)
        label_rows(panels, list(rows))
        settings = f"baseline: {_assignments(_baseline(record), ' ')}"
        if TOGETHER in rows:
            settings += f";  together: {_assignments(rows[TOGETHER]['changed'], ' ')}"
        title = f"Packed exchanges, one option changed at a time, on {devices_in_words(record)}"
        return finish(title, subtitle(record), settings)


def _colors(rows: dict[str, Any]) -> list[str]:
    """The values of one field alike, and neighbouring fields apart."""
    fields = [next(iter(m["changed"]), "") for m in rows.values()]
    shade = {field: _FIELD_COLORS[i % 2] for i, field in enumerate(dict.fromkeys(fields[1:]))}
    special = {BASELINE: _BASELINE_COLOR, TOGETHER: _TOGETHER_COLOR}
    return [special.get(name) or shade[field] for name, field in zip(rows, fields, strict=True)]


def _baseline(record: dict[str, Any]) -> dict[str, Any]:
    """What the swept fields are there, and whatever else is not the default."""
    comm, defaults = record["workload"]["packed"], dataclasses.asdict(CommConfig())
    return {field: value for field, value in comm.items() if field in record["swept"] or value != defaults[field]}


def _draw_temporaries(axes: Any, rows: dict[str, Any], colors: list[str]) -> None:
    largest = max(m["temp_bytes"] or 0 for m in rows.values())
    unit, scale = unit_of(largest)
    for row, m in enumerate(rows.values()):
        axes.barh(row, (m["temp_bytes"] or 0) / scale, color=colors[row], height=0.62, zorder=2)
        write_beside(axes, row, "not known" if m["temp_bytes"] is None else size(m["temp_bytes"]))
    if rows[BASELINE]["temp_bytes"]:
        draw_mark(axes, rows[BASELINE]["temp_bytes"] / scale, "the baseline's")
    axes.set_xlim(0, 1.05 * max(largest, 1) / scale)
    axes.set_xlabel(f"{unit} of temporaries on a device")
