"""What scripts/inspect_host.py writes and prints of a compiled program."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from _inspect import Asked, Compiled
from jax_ep.aot.compiled import host_calls
from jax_ep.aot.fits import XLA_SHARE, Line, Saved, bytes_by_key, memory_lines
from jax_ep.aot.hosts import flags_for, xla_flags
from jax_ep.aot.modelled import EFFICIENCY, PUBLISHED_HIDDEN, Bar, host_synchronous, live_parts, predict, sent_bytes
from jax_ep.aot.products import Product
from jax_ep.aot.schedule import Loop, Schedule

GIB = 2**30
ROUNDS = ("extra_rounds", "own_experts")  # loops that turn only where a routing needs more than one round


def make_record(asked: Asked, compiled: Compiled, schedule: Schedule, saved: Saved | None) -> dict[str, Any]:
    """Everything that is known, as JSON has it."""
    host, moe = asked.host, asked.moe
    live = live_parts(schedule, moe, asked.tokens, host.devices)
    prediction = predict(schedule, host, moe, live)
    lines = _lines(asked, compiled.temporaries, saved)
    sums = bytes_by_key(lines)
    total = sum(sums.values())
    record: dict[str, Any] = {
        "host": host.name,
        "devices": host.devices,
        "config": asked.config_name,
        "mode": moe.comm.mode,
        "task": asked.task,
        "tokens": asked.tokens,
        "context": asked.context if asked.task == "decode" else None,
        "compiled": "one MoE layer" if asked.layers is None else f"{asked.layers} layers with attention",
        "switches": [f.name for f in dataclasses.fields(asked.moe.overlap) if getattr(asked.moe.overlap, f.name)]
        + ["overlap_moe_expert_parallel_comm"] * asked.config.overlap_moe_expert_parallel_comm,
        "num_chunks": moe.comm.num_chunks,
        "overlap": dataclasses.asdict(moe.overlap),
        "dtype": moe.dtype,
        "param_dtype": moe.param_dtype,
        "transport": compiled.transport if moe.comm.mode == "packed" else None,
        "flags": xla_flags(compiled.flags),
        "jax": jax.__version__,
        "fits": total <= host.memory_bytes,
        "bytes_per_device": {**sums, "total": total, "card": host.memory_bytes},
        "arithmetic": [line._asdict() for line in lines],
        "collectives": collectives(schedule, live, asked),
        "loops": [
            {"name": loop.name, "op_name": loop.op_name, "trips": loop.trips}
            for one in schedule.whole()
            for loop in one.loops
        ],
        "weight_copies": [copy._asdict() for one in schedule.whole() for copy in one.copies],
        "host_calls": host_calls(compiled.text),
        "hidden_fraction": prediction.hidden_fraction,
        "hidden_of_hideable": prediction.hidden_of_hideable,
        "modelled_ms": {
            name: 1e3 * getattr(prediction, name)
            for name in prediction._fields
            if name not in ("products", "collectives")
        },
        "model": {
            **{k: v for k, v in dataclasses.asdict(host).items() if k not in ("name", "devices", "platform", "card")},
            "product_efficiency": EFFICIENCY,
            "published_hidden_fraction": PUBLISHED_HIDDEN,
            "what": "modelled, not measured; the published fraction was measured, on 16 H100 in another experiment",
        },
    }
    record["warnings"] = warnings(asked, compiled, schedule, record)
    return record


def _lines(asked: Asked, temporaries: int, saved: Saved | None, devices: int | None = None) -> list[Line]:
    ranks = asked.host.devices if devices is None else devices
    return memory_lines(asked.config, ranks, asked.task, asked.tokens, temporaries, saved, asked.context)


def collectives(schedule: Schedule, live: dict[str, float], asked: Asked) -> list[dict[str, Any]]:
    """One entry a collective, in the order they start; those of a loop's body after, each once."""
    prediction = predict(schedule, asked.host, asked.moe, live)
    found = [_collective(schedule, bar, prediction.products, asked) for bar in prediction.collectives]
    for loop in schedule.loops:
        if loop.body is not None:
            of_loop = {"loop": loop.name, "trips": loop.trips}
            found += [one | of_loop for one in collectives(loop.body, live, asked)]
    return found


def _collective(schedule: Schedule, bar: Bar, products: tuple[Bar, ...], asked: Asked) -> dict[str, Any]:
    one = bar.of
    assert not isinstance(one, Product)
    over = [p for p in products if isinstance(p.of, Product) and p.of.place]
    hidden = sum(max(0.0, min(bar.end, p.end) - max(bar.start, p.start)) for p in over)
    return {
        "name": one.name,
        "kind": one.kind,
        "bytes": one.bytes,
        "sent_bytes": sent_bytes(one, asked.moe),
        "payload": one.payload,
        "asynchronous": one.asynchronous,
        "conditional": one.conditional,
        "host_synchronous": host_synchronous(one, asked.host),
        "beside": [p.kernel or p.name for p in schedule.beside(one)],
        "modelled_ms": 1e3 * bar.seconds,
        "modelled_hidden_ms": 1e3 * hidden,
        "op_name": one.op_name,
    }


def warnings(asked: Asked, compiled: Compiled, schedule: Schedule, record: dict[str, Any]) -> list[str]:
    """What one may want to change, and with which flag or option."""
    comm, found = asked.moe.comm, list[str]()
    found += _memory_warnings(asked, record)
    payload = [one for one in record["collectives"] if one["payload"]]
    blocking = [one for one in payload if not one["asynchronous"] and not one["conditional"]]
    alone = [one for one in payload if one["asynchronous"] and not one["beside"]]
    if blocking:
        how = "an order of operations that lets them" if asked.flags else xla_flags(flags_for(asked.host)) or "none"
        found.append(
            f"{len(blocking)} of {len(payload)} payload collectives are synchronous; what lets them run: {how}"
        )
    if inside := [one for one in payload if one["conditional"]]:
        where = inside[0]["op_name"]
        found.append(
            f"{len(inside)} of {len(payload)} payload collectives stand in a conditional ({where}), beside nothing"
        )
    if alone:
        rule = "payload collectives have no product of experts or attention beside them"
        found.append(f"{len(alone)} of {len(payload)} {rule}; {', '.join(_options(asked))} may change that")
    if any(one["host_synchronous"] for one in payload):
        rule = "devices wait for the host in ragged exchanges through NCCL, which then hide nothing"
        found.append(f"{rule}; transport=all_to_all does not")
    if compiled.transport == "all_to_all" and comm.mode == "packed" and comm.recv_rows_factor != 1.0:
        size = "room for every row" if comm.recv_rows_factor is None else f"{comm.recv_rows_factor:g} x balanced rows"
        found.append(
            f"all_to_all sends whole buffers ({size}); recv_rows_factor=1.25, dedup=True or wire_dtype send less"
        )
    found += [f"a loop that the layer did not ask for: {loop.name} ({loop.op_name})" for loop in unexpected(schedule)]
    if masked := [product for one in schedule.whole() for product in one.products if product.masked]:
        rule = f"{len(masked)} dense products of all rows with all experts where grouped ones were meant"
        found.append(f"{rule} ({masked[0].name}); grouped_backend=auto has kernels for NVIDIA GPUs")
    if copies := [copy for one in schedule.whole() for copy in one.copies if copy.what != "convert"]:
        names = ", ".join(copy.name for copy in copies[:3])
        found.append(f"weights of experts are copied, {sum(c.bytes for c in copies) / 2**20:.0f} MiB a layer ({names})")
    if record["host_calls"]:
        found.append(f"the program talks to its host: {record['host_calls']}")
    if asked.moe.dtype == "float32":
        found.append("dtype=float32 has twice the bytes of dtype=bfloat16")
    return found


def _options(asked: Asked) -> list[str]:
    """Switches that are not on yet and give exchanges something to run beside."""
    config, comm = asked.config, asked.moe.comm
    options = []
    if comm.mode == "packed":
        options.append(f"num_chunks={2 * comm.num_chunks}")
    if asked.task == "train" and not asked.moe.overlap.delay_wgrad_compute:
        options.append("delay_wgrad_compute=True")
    if asked.moe.num_shared_experts and not asked.moe.overlap.moe_shared_expert_overlap:
        options.append("moe_shared_expert_overlap=True")
    if asked.task != "decode" and not config.overlap_moe_expert_parallel_comm:
        options.append("overlap_moe_expert_parallel_comm=True")
    return options or ["more --tokens"]


def unexpected(schedule: Schedule) -> list[Loop]:
    """Loops over the data that no option asks for."""
    loops = [loop for one in schedule.whole() for loop in one.loops if loop.trips is None]
    return [loop for loop in loops if not any(f"/{kind}" in loop.op_name for kind in ROUNDS)]


def _memory_warnings(asked: Asked, record: dict[str, Any]) -> list[str]:
    total, card = record["bytes_per_device"]["total"], asked.host.memory_bytes
    if total <= XLA_SHARE * card:
        return []
    if total <= card:
        share = "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"
        return [f"JAX takes {XLA_SHARE:.0%} of a card, which is less than this needs; {share} gives it more"]
    held = sum(
        line["bytes"] for line in record["arithmetic"] if line["key"] in ("parameters", "optimizer", "gradients")
    )
    options = ["fewer --tokens"] if held < card else []
    if asked.task == "train":
        if asked.moe.comm.num_chunks > 1:
            options.insert(0, "num_chunks=1")
        options.insert(0, "shard_weights=True of training spreads all but experts")
        if asked.config.recompute != "full":
            options.insert(0, "recompute=full")
    instead = f"{', '.join(options)} need less" if options else "the weights alone leave no room"
    return [f"does not fit: {(total - card) / 1e9:.1f} GB too much on each device; {instead}"]


def devices_needed(asked: Asked, temporaries: int, saved: Saved | None) -> int | None:
    """The least power of two of such devices on which the sum fits, temporaries and activations as they are."""
    for count in (2**n for n in range(11)):
        if sum(line.bytes for line in _lines(asked, temporaries, saved, count)) <= asked.host.memory_bytes:
            return count
    return None


# For people.


def print_report(record: dict[str, Any], needed: int | None) -> None:
    console = Console(width=150, highlight=False)
    w, sizes = record, record["bytes_per_device"]
    task = {"train": "training", "prefill": "prefill", "decode": "decode"}[w["task"]]
    console.print(
        f"\n{w['config']} on {w['devices']} devices ({w['host']}): {task}, {w['tokens']} tokens a device", style="bold"
    )
    console.print(
        f"{w['compiled']} in {w['dtype']} (parameters {w['param_dtype']}), mode {w['mode']}, transport "
        f"{w['transport']}, num_chunks {w['num_chunks']}; jax {w['jax']}; compiled, not run; flags: "
        f"{w['flags'] or 'none'}"
    )
    table = _table("memory of one device", "how it comes about", "GB")
    for line in w["arithmetic"]:
        table.add_row(f"{line['key']}: {line['what']}", line["arithmetic"], f"{line['bytes'] / 1e9:.3f}")
    left = sizes["card"] - sizes["total"]
    table.add_row("sum", f"of {sizes['card'] / 1e9:.1f} GB on the card", f"{sizes['total'] / 1e9:.3f}", style="bold")
    console.print(table)
    if w["fits"]:
        console.print(f"fits, with {left / 1e9:.1f} GB to spare", style="bold green")
    else:
        on = "not even on 1024 such devices" if needed is None else f"on {needed} such devices it would"
        console.print(f"does not fit: {-left / 1e9:.1f} GB too much on each device; {on}", style="bold red")
    _print_collectives(console, w)
    for warning in w["warnings"]:
        console.print(f"- {warning}")


def _print_collectives(console: Console, w: dict[str, Any]) -> None:
    table = _table("collective", "MiB sent", "asynchronous", "beside", "modelled ms", "of which hidden")
    small = [one for one in w["collectives"] if not one["payload"]]
    for one in w["collectives"]:
        if one["payload"]:
            where = f" (in a loop of {one['trips']})" if "trips" in one else ""
            cells = [f"{one['sent_bytes'] / 2**20:.1f}", _kind(one), ", ".join(one["beside"]) or "-"]
            times = [f"{one['modelled_ms']:.3f}", f"{one['modelled_hidden_ms']:.3f}"]
            table.add_row(one["name"] + where, *cells, *times)
    if small:
        sent, time = (sum(one[key] for one in small) for key in ("sent_bytes", "modelled_ms"))
        table.add_row(f"{len(small)} small ones", f"{sent / 2**20:.2f}", "", "", f"{time:.3f}", "")
    console.print(table)
    ms, percent = w["modelled_ms"], lambda value: "-" if value is None else f"{value:.1%}"
    console.print(
        f"modelled, not measured: {ms['communication']:.3f} ms of communication, {ms['hidden']:.3f} of it beside "
        f"products of experts and attention: hidden {percent(w['hidden_fraction'])}; what could be hidden at all "
        f"{ms['hideable']:.3f} ms: hidden of hideable {percent(w['hidden_of_hideable'])}",
        style="bold",
    )
    fraction, of = (
        ms["rows_hidden"] / ms[name] if ms[name] else None for name in ("rows_communication", "rows_hideable")
    )
    if ms["rows_communication"] < 0.9 * ms["communication"] or of is None or abs(of - w["hidden_of_hideable"]) > 0.05:
        console.print(
            f"of the exchanges of rows alone, {ms['rows_communication']:.3f} ms: hidden {percent(fraction)}, hidden of "
            f"hideable {percent(of)} (the rest is counts, and sums of what every device holds)",
            style="bold",
        )
    console.print(
        f"(products {ms['computation']:.3f} ms at {w['model']['product_efficiency']:.0%} of {w['model']['tflops']:g} "
        f"TFLOP/s; {w['model']['link']}, {w['model']['link_rate'] / 1e9:g} GB/s one way. Beside it, a published "
        f"fraction of {w['model']['published_hidden_fraction']:.2%}, measured on 16 H100 in another experiment.)"
    )
    loops = [loop for loop in w["loops"] if loop["trips"] is None]
    if loops:
        names = sorted({next((r for r in ROUNDS if r in loop["op_name"]), loop["name"]) for loop in loops})
        console.print(
            f"{len(loops)} loops over the data ({', '.join(names)}), taken as not turning under a balanced routing"
        )


def _kind(one: dict[str, Any]) -> str:
    """How a collective runs, in words."""
    if one["conditional"]:
        return "no: in a conditional"
    if one["host_synchronous"]:
        return "no: waits for the host"
    return "yes" if one["asynchronous"] else "no"


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    words = ("collective", "memory of one device", "how it comes about", "asynchronous", "beside")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in words else "right")
    return table
