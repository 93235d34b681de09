"""train.py's heading, its record as a table, and the picture of a run.

Letters: A microbatches of a step, B sequences of a step, S positions.
"""

from __future__ import annotations

import functools
import io
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from _compare_report import size
from _train_progress import Record

_TRAIN, _VALIDATION, _REFERENCE, _LOAD, _RATE = "#2a9d8f", "#9e2a2b", "0.35", "#264653", "#e09f3e"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def devices_in_words(record: dict[str, Any]) -> str:
    environment, mesh = record["environment"], record["model"]["mesh"]
    count = environment["device_count"]
    what = "simulated CPU device" if environment["simulated"] else environment["device_kind"]
    plural = "s" if count > 1 and environment["simulated"] else ""
    processes = f" of {environment['processes']} processes" if environment["processes"] > 1 else ""
    return f"{count} {what}{plural}{processes} ({' x '.join(f'{name} {n}' for name, n in mesh.items())})"


def print_heading(console: Console, record: dict[str, Any]) -> None:
    """What is about to be trained, on what."""
    say = functools.partial(console.print, soft_wrap=True, highlight=False)
    model, data, config = record["model"], record["data"], record["config"]
    way = model["mode"] if model["transport"] is None else f"{model['mode']} over {model['transport']}"
    say(f"\n{model['name']} on {devices_in_words(record)}, {way}", style="bold")
    active = f"{_count(model['active_parameters'])} of them active a token"
    layers, experts = counted(config["model"]["num_layers"], "layer"), counted(model["experts"], "expert")
    shape = f"{layers}, {experts}, {model['top_k']} a token"
    say(f"model: {_count(model['parameters'])} parameters, {active}; {shape}; {model['dtype']}")
    say(f"text: {data['source']}; held out: {data['held_out']}")
    rows = config["batch_size"], config["sequence_length"]
    pieces = f" in {config['accumulation']} microbatches" if config["accumulation"] > 1 else ""
    step = f"a step has {rows[0]} x {rows[1]} = {rows[0] * rows[1]} tokens{pieces}"
    steps = counted(config["steps"], "step")
    whole = f"{steps} in all, {_count(data['tokens'])} tokens, {data['epochs']:.2f} times the text"
    say(f"tokens: {step}; {whole}")
    say(f"unigram entropy of the held-out text: {data['unigram_entropy']:.4f} nats a byte")
    for note in record["notes"]:
        say(f"note: {note}", style="dim")
    say()


def _count(number: float) -> str:
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return str(int(number))


def print_summary(console: Console, record: dict[str, Any]) -> None:
    """What came of it."""
    result, times = record["result"], record["times"]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("validation loss", _validation(result, 4, " nats a byte"))
    if result["best_validation"] is not None:
        table.add_row("best", f"{result['best_validation']:.4f} after step {result['best_step']}")
    loss = "-" if result["final_loss"] is None else f"{result['final_loss']:.4f}"
    table.add_row("training loss", f"{loss}, {counted(result['skipped_steps'], 'step')} skipped")
    speed = f"{times['tokens_per_s']:.0f} tokens/s, {times['tflops_per_device']:.3g} model TFLOP/s a device"
    table.add_row("speed", f"{times['steps_per_s']:.2f} steps/s, {speed}")
    table.add_row("time", f"{times['total_s']:.1f} s, {times['compile_s']:.1f} of them compilation of the step")
    whose = "the fullest device" if result["peak_of"] == "device" else "the process"
    table.add_row("peak memory", f"{size(result['peak_bytes'])} of {whose}")
    console.print(table)


def _validation(result: dict[str, Any], digits: int, unit: str = "") -> str:
    loss, percent = result["final_validation"], result["percent_under_unigram"]
    if loss is None:
        return "not finite"
    where = "under" if percent >= 0 else "above"
    return f"{loss:.{digits}f}{unit}, {abs(percent):.1f}% {where} the unigram entropy"


def picture(record: dict[str, Any], records: list[Record]) -> bytes:
    """A PNG: losses over steps against the unigram entropy; expert load; learning rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [r for r in records if r["kind"] == "step"]
    figure, panels = plt.subplot_mosaic(
        [["loss", "load"], ["loss", "rate"]], figsize=(11, 5), width_ratios=(1.9, 1), layout="constrained"
    )
    try:
        _draw_losses(panels["loss"], record, steps, [r for r in records if r["kind"] == "validation"])
        _draw_load(panels["load"], steps)
        _draw_rate(panels["rate"], steps)
        for axes in panels.values():
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color="0.92", zorder=0)
            axes.set_axisbelow(True)
            axes.set_xlim(0, max(1, steps[-1]["step"]))
        figure.get_layout_engine().set(rect=(0.004, 0, 0.99, 0.86), wspace=0.04, hspace=0.04)
        model, result = record["model"], record["result"]
        head = f"{model['name']}: validation loss {_validation(result, 2)}"
        figure.text(0.5, 0.975, head, ha="center", va="top", fontsize=15, fontweight="bold")
        what = f"{_count(model['parameters'])} parameters, {_count(model['active_parameters'])} active a token"
        text = f"{what}, {model['mode']}; {devices_in_words(record)}, jax {record['environment']['jax']}"
        figure.text(0.5, 0.905, text, ha="center", va="top", fontsize=10.5, color="0.35")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150)
        return buffer.getvalue()
    finally:
        plt.close(figure)


def _series(records: list[Record], field: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values; what JSON had no word for is NaN, which breaks a line."""
    values = [np.nan if r[field] is None else r[field] for r in records]
    return np.array([r["step"] for r in records]), np.array(values, float)


def _draw_losses(axes: Any, record: dict[str, Any], steps: list[Record], validations: list[Record]) -> None:
    at, loss = _series(steps, "cross_entropy")
    axes.plot(at, loss, color=_TRAIN, linewidth=1, alpha=0.75, zorder=2, label="training, every step")
    where, held_out = _series(validations, "loss")
    style = {"color": _VALIDATION, "markersize": 4, "zorder": 4, "clip_on": False}
    axes.plot(where, held_out, "o-", label="validation, held-out text", **style)
    beside = {"xytext": (7, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
    if np.isfinite(held_out[-1]):
        last = f"{held_out[-1]:.2f}"
        axes.annotate(last, (where[-1], held_out[-1]), color=_VALIDATION, fontweight="bold", **beside)
    unigram = record["data"]["unigram_entropy"]
    axes.axhline(unigram, color=_REFERENCE, linestyle=(0, (4, 3)), linewidth=1.2, zorder=3)
    above = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "bottom", "zorder": 5}
    axes.text(0.99, unigram, f"unigram entropy {unigram:.2f}", color=_REFERENCE, fontsize=10, **above)
    skipped = [r["step"] for r in steps if r["skipped"]]
    if skipped:
        axes.plot(skipped, [unigram] * len(skipped), "x", color="0.2", zorder=5, label="skipped: not finite")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("cross-entropy, nats a byte")
    axes.set_xlabel("step")
    axes.legend(frameon=False, loc="upper right", fontsize=10)


def _draw_load(axes: Any, steps: list[Record]) -> None:
    at, mean = _series(steps, "load_entropy")
    _, worst = _series(steps, "load_entropy_worst")
    axes.fill_between(at, worst, mean, color=_LOAD, alpha=0.2, linewidth=0, zorder=2)
    axes.plot(at, mean, color=_LOAD, linewidth=1.2, zorder=3)
    axes.set_ylim(min(0.8, float(np.nanmin(worst)) - 0.02), 1.005)
    axes.set_ylabel("entropy / ln E")
    axes.set_title("expert load, 1 is even (shade: worst layer)", loc="left", fontsize=10.5)
    axes.tick_params(labelbottom=False)


def _draw_rate(axes: Any, steps: list[Record]) -> None:
    at, rate = _series(steps, "learning_rate")
    axes.plot(at, rate, color=_RATE, linewidth=1.6, zorder=3)
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))
    axes.set_title("learning rate", loc="left", fontsize=10.5)
    axes.set_xlabel("step")
