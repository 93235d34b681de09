"""block.json as a table, as words on when a form pays, and as a picture."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from _compare_report import (
    console_of_width,
    devices_in_words,
    draw_mark,
    draw_times,
    figure,
    label_rows,
    print_heading,
    size,
    unit_of,
    workload_in_words,
    write_beside,
)

PARTS = ("hidden", "kv", "metadata", "control", "wire")
_COLORS = {"coship": "#2a9d8f", "separate": "#8d99ae", "all_gather": "#e09f3e", "ring": "#9e2a2b"}
_KINDS = (
    ("hidden rows", "hidden", "#264653"),
    ("keys and values", "kv", "#2a9d8f"),
    ("metadata", "metadata", "#e9c46a"),
    ("control", "control", "#e76f51"),
)
# What a collective costs before its first byte, in microseconds, and what a rank sends after that, in GB/s. Typical
# figures, for predictions alone; scripts/block_links.py measures both between processes.
LINKS = {
    "1 Gbit/s Ethernet": (100.0, 0.118),
    "25 Gbit/s Ethernet": (50.0, 2.9),
    "PCIe 4.0 x16": (25.0, 25.0),
    "NVLink": (15.0, 200.0),
}


def block_in_words(record: dict[str, Any]) -> str:
    w = record["workload"]
    layers = f", {w['layers']} layers" if record["block"] == "sequential" else ""
    heads = f"heads {w['num_heads']}:{w['num_kv_heads']}x{w['head_dim']}"
    documents = f", {w['documents']} documents" if w["documents"] else ""
    return f"{record['block']} block{layers}, {record['split']}, {heads}{documents}"


def print_block(record: dict[str, Any]) -> None:
    """To stdout."""
    console = console_of_width(200)
    print_heading(console, record)
    console.print(f"{block_in_words(record)}\n")
    gradients = record["timed"] != "forward"
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("keys and values", no_wrap=True)
    headings = ["payload", "control", "median ms", "min .. max", *PARTS, "largest wire", "largest kv", "max diff"]
    headings += [*(["rel. grads"] if gradients else []), "temp", "compile"]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("payload by kind")
    for kv, m in record["ways"].items():
        table.add_row(
            kv,
            _with_stack(m["collectives"], "payload"),
            str(m["collectives"]["layer"]["control"]),
            f"{m['median_ms']:.2f}",
            f"{m['min_ms']:.2f} .. {m['max_ms']:.2f}",
            *(size(m["moved"][part]["total"]) for part in PARTS),
            size(m["moved"]["wire"]["largest"]),
            size(m["moved"]["kv"]["largest"]),
            f"{m['max_abs_diff']:.1e}",
            *([f"{m['relative_difference_gradients']:.1e}"] if gradients else []),
            "-" if m["temp_bytes"] is None else size(m["temp_bytes"]),
            f"{m['compile_s']:.1f} s",
            ", ".join(f"{count} {kind}" for kind, count in m["collectives"]["kinds"].items()) or "none",
        )
    console.print(table)
    alone = record["one_device"]
    console.print(f"\nthe same on one device, nothing exchanged: {alone['median_ms']:.2f} ms; differences are to it")
    console.print(
        f"payload, control: collectives a layer in the lowered program ({record['timed']}; +n: once a stack), without "
        "the sum of statistics;\nbytes: of the call, over all ranks, without rows that stay; largest: the most "
        "that one rank sends or receives"
    )
    for line in _when_it_pays(record):
        console.print(line)
    _print_predictions(console, record)
    for note in record["notes"]:
        console.print(f"note: {note}", style="dim")


def _with_stack(collectives: dict[str, Any], purpose: str) -> str:
    once = collectives["stack"][purpose]
    return f"{collectives['layer'][purpose]}{f' (+{once})' if once else ''}"


def predicted_us(layer: dict[str, Any], latency_us: float, gigabytes_s: float) -> float:
    """The forward's collectives of a layer, one after another, nothing beside them: each costs a latency, and the
    busiest rank's bytes cross at the link's rate.
    """
    forward = layer["forward"]
    count = forward["payload_collectives"] + forward["control_collectives"]
    return float(count * latency_us + forward["wire"]["largest"] / gigabytes_s / 1e3)


def _print_predictions(console: Console, record: dict[str, Any]) -> None:
    layers = {kv: m["layer"] for kv, m in record["ways"].items()}
    if not any(layer["forward"]["wire"]["total"] for layer in layers.values()):
        return
    console.print("\npredicted, not measured: us on the wire of one layer's forward, nothing beside it")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("link", no_wrap=True)
    for kv in layers:
        table.add_column(kv, justify="right", no_wrap=True)
    for name, (latency, rate) in LINKS.items():
        times = [f"{predicted_us(layer, latency, rate):.0f}" for layer in layers.values()]
        table.add_row(f"{name}: {latency:g} us a collective, {rate:g} GB/s", *times)
    console.print(table)


def _when_it_pays(record: dict[str, Any]) -> list[str]:
    """From this run's collectives and bytes; a link's latency is what they are worth."""
    ways = record["ways"]
    ours = ways.get("coship")
    if ours is None or not ours["moved"]["wire"]["total"]:
        return []
    lines = [""]
    count = lambda m: m["layer"]["forward"]["payload_collectives"]
    if other := ways.get("separate"):
        saved, wire = count(other) - count(ours), ours["layer"]["forward"]["wire"]["largest"]
        lines += [
            f"co-shipping against separate exchanges: {count(ours)} payload collectives a layer instead of "
            f"{count(other)}, the same bytes; {_ratio(ours, other)} of the time here",
            f"predicted: saving {saved} x the latency of a collective is 5% or more of a layer's time on the "
            f"wire where the busiest rank, which has {size(wire)} here, has",
            f"  up to {_up_to(saved, count(other))}",
        ]
    for kv in ("all_gather", "ring"):
        if other := ways.get(kv):
            parts = (("kv", "key/value bytes"), ("wire", "bytes on the wire"))
            moved = [f"{_share(ours, other, part)} of its {words}" for part, words in parts]
            lines.append(
                f"co-shipping against {kv}: {count(ours)} payload collectives a layer instead of {count(other)}, "
                f"{' and '.join(moved)}; {_ratio(ours, other)} of the time here"
            )
    if record["block"] == "sequential":
        lines.append(
            "it saves messages, not exposure: what follows an exchange waits for it. For sizes bound by latency"
        )
    if form := record["at_expert_bytes"]:
        rows, own = form["forward"]["kv"]["total"], ours["layer"]["forward"]["kv"]["total"]
        times = f", {rows / own:.1f} times as much" if own else ""
        lines.append(f"attention at the expert's rank would move {size(rows)} of keys and values a layer{times}")
    return lines


def _share(ours: dict[str, Any], other: dict[str, Any], part: str) -> str:
    return f"{ours['layer']['forward'][part]['total'] / other['layer']['forward'][part]['total']:.2f}"


def _ratio(ours: dict[str, Any], other: dict[str, Any]) -> str:
    return f"{ours['median_ms'] / other['median_ms']:.2f}"


def _up_to(saved: int, count: int) -> str:
    """saved * L = 5% of count * L + bytes / W, on each link."""
    sizes = {name: (saved / 0.05 - count) * latency * rate * 1e3 for name, (latency, rate) in LINKS.items()}
    return ", ".join(f"{size(most)} ({name})" for name, most in sizes.items())


def block_picture(record: dict[str, Any]) -> bytes:
    """A PNG: time, bytes by part and temporaries of every way."""
    rows = record["ways"]
    with figure((6, 7, 4.5), 2.6 + 0.75 * len(rows)) as (panels, finish):
        times, moved, temporaries = panels
        draw_times(times, rows, [_COLORS[kv] for kv in rows])
        alone = record["one_device"]["median_ms"]
        times.set_xlim(0, max(times.get_xlim()[1], 1.05 * alone))
        draw_mark(times, alone, "one device, no exchange")
        _draw_parts(moved, rows, record["timed"])
        _draw_temporaries(temporaries, rows)
        names = [f"{kv}\n{_with_stack(m['collectives'], 'payload')} a layer" for kv, m in rows.items()]
        label_rows(panels, names)
        title = f"Keys and values of a {record['block']} block on {devices_in_words(record)}"
        subtitle = f"{workload_in_words(record)}, {record['timed']}, jax {record['environment']['jax']}"
        once = " (+n: once a stack)" if record["block"] == "sequential" else ""
        return finish(title, subtitle, f"{block_in_words(record)}; beside each name, its payload collectives{once}")


def _draw_parts(axes: Any, rows: dict[str, Any], timed: str) -> None:
    largest = max(m["moved"]["wire"]["total"] for m in rows.values())
    unit, scale = unit_of(largest)
    for row, m in enumerate(rows.values()):
        start = 0.0
        for label, part, color in _KINDS:
            count = m["moved"][part]["total"] / scale
            axes.barh(row, count, left=start, color=color, height=0.62, zorder=2, label=None if row else label)
            start += count
        wire = m["moved"]["wire"]["total"] / scale
        axes.plot([wire, wire], [row - 0.4, row + 0.4], color="#d00000", linewidth=2.5, zorder=4)
        write_beside(axes, row, f"{size(m['moved']['wire']['largest'])} on the busiest rank")
    axes.plot([], [], color="#d00000", linewidth=2.5, label="wire: handed to the collectives")
    axes.set_xlim(0, 1.05 * max(largest, 1) / scale)
    axes.set_xlabel(f"{unit} to other ranks a {timed.replace('+', ' and ')}, over all ranks")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize=9)


def _draw_temporaries(axes: Any, rows: dict[str, Any]) -> None:
    largest = max(m["temp_bytes"] or 0 for m in rows.values())
    unit, scale = unit_of(largest)
    for row, (kv, m) in enumerate(rows.items()):
        axes.barh(row, (m["temp_bytes"] or 0) / scale, color=_COLORS[kv], height=0.62, zorder=2)
        write_beside(axes, row, "not known" if m["temp_bytes"] is None else size(m["temp_bytes"]))
    axes.set_xlim(0, 1.05 * max(largest, 1) / scale)
    axes.set_xlabel(f"{unit} of temporaries on a device")
