"""overlap_ab.json as a table."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from _compare_report import collectives_in_words, console_of_width, devices_in_words, size, workload_in_words


def print_overlap(record: dict[str, Any]) -> None:
    """To stdout."""
    console = console_of_width(120)
    where, work, switch = (record[name] for name in ("environment", "workload", "switch"))
    mesh = f"data={work['data_parallel']} x expert={work['expert_parallel']}"
    console.print(f"\n{devices_in_words(record)} ({mesh}), jax {where['jax']}", style="bold")
    console.print(f"XLA_FLAGS: {where['xla_flags'] or 'none'}")
    timed = "training steps" if work["kind"] == "train" else "one layer, forward and backward"
    shared = f", both with {' '.join(work['shared'])}" if work["shared"] else ""
    console.print(f"{work['config']}: {timed}, {workload_in_words(record)}, routing {work['routing']}{shared}")
    console.print(f"switch: {switch['field']}; {work['runs']} runs of each in turns, after {work['warmup']}\n")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for label in record["sides"]:
        table.add_column(label, justify="right", no_wrap=True)
    for name, cells in overlap_rows(list(record["sides"].values())):
        table.add_row(name, *cells)
    console.print(table)
    differs, peak = record["differences"], record["device_peak_bytes"]
    console.print()
    if peak is not None:
        console.print(f"fullest device: {size(peak)} at most, both sides together")
    console.print(
        f"losses differ by {_small(differs['loss'])} relative ({differs['loss_tolerance']:.0e} is rounding), "
        f"gradients by {_small(differs['gradient'])} ({differs['gradient_tolerance']:.0e})"
    )
    console.print(record["verdict"]["sentence"], style="bold")
    for note in record["notes"]:
        console.print(f"note: {note}", style="dim")


def overlap_rows(sides: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Headings and one cell a side."""
    ms = lambda name: [f"{side[name]:.2f}" for side in sides]
    bytes_ = lambda name: ["-" if side[name] is None else size(side[name]) for side in sides]
    profiles = [side["profile"].get("over_devices", {}) for side in sides]
    profiled = lambda name: [f"{p[name]:.2f}" if p else "-" for p in profiles]
    percent = lambda name: ["-" if p.get(name) is None else f"{100 * p[name]:.1f} %" for p in profiles]
    return [
        ("step, median ms", ms("median_ms")),
        ("spread of the runs, ms", ms("spread_ms")),
        ("min .. max, ms", [f"{side['min_ms']:.2f} .. {side['max_ms']:.2f}" for side in sides]),
        ("model TFLOP/s a device", [f"{side['model_tflops_per_device']:.4g}" for side in sides]),
        ("loss, first and last", [f"{_loss(side['losses'][0])} {_loss(side['losses'][-1])}" for side in sides]),
        ("steps not finite, skipped", [f"{side['nan_steps']}, {side['skipped_steps']}" for side in sides]),
        ("temporaries a device", bytes_("temp_bytes")),
        ("compilation", [f"{side['compile_s']:.1f} s" for side in sides]),
        ("collectives", [collectives_in_words(side["collectives"]) for side in sides]),
        ("profile: communication, ms*", profiled("communication_ms")),
        ("profile: computation, ms*", profiled("computation_ms")),
        ("profile: both at once, ms*", profiled("hidden_ms")),
        ("profile: first start to last end, ms", profiled("span_ms")),
        ("hidden of communication", percent("hidden_fraction")),
        ("hidden of hideable", percent("hidden_of_hideable")),
        ("* of the union, mean of devices", ["" for _ in sides]),
    ]


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6f}"


def _small(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
