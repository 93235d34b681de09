"""A compiled schedule in modelled time: products in one row, collectives in the other."""

from __future__ import annotations

import io
from typing import Any

from jax_ep.aot.modelled import Bar
from jax_ep.aot.products import Product
from jax_ep.aot.schedule import Collective

COLOURS = {
    "experts": "#1f6f8b",
    "weight gradients": "#4a97a8",
    "own and shared experts": "#3b9c73",
    "attention": "#8a6fb3",
    "other products": "#b8b8b8",
    "communication, hidden": "#e8a33d",
    "communication, exposed": "#c8452f",
    "waits for the host": "#5a1a12",
}


def draw(products: list[Bar], collectives: list[Bar], record: dict[str, Any]) -> bytes:
    """The picture, as PNG.

    Args:
      products, collectives: what to show, in time.
      record: what is said of it and of its collectives.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    sizes = {one["name"]: one["sent_bytes"] for one in record["collectives"]}
    waiting = {one["name"] for one in record["collectives"] if one["host_synchronous"]}
    total = max(bar.end for bar in (*products, *collectives))
    scale = 1e3 if total >= 1e-3 else 1e6
    figure, axes = plt.subplots(figsize=(13, 4.7), layout="constrained")
    used = set[str]()

    def bar(row: float, start: float, end: float, colour: str) -> None:
        used.add(colour)
        axes.broken_barh(
            [(start * scale, (end - start) * scale)], (row, 0.8), facecolors=COLOURS[colour], edgecolor="white", lw=0.8
        )

    for each in products:
        assert isinstance(each.of, Product)
        bar(1, each.start, each.end, _kind(each.of))
        _label(axes, each, 1.4, _short(each.of), scale, total)
    covered = [(p.start, p.end) for p in products if isinstance(p.of, Product) and p.of.place]
    for each in collectives:
        assert isinstance(each.of, Collective)
        for start, end, hidden in pieces(each, covered):
            shown = "waits for the host" if each.of.name in waiting else f"communication, {hidden}"
            bar(0, start, end, shown)
        if each.of.payload:
            sent = sizes[each.of.name]
            label = f"{sent / 2**20:.0f} MiB" if sent >= 2**20 else f"{sent / 2**10:.0f} KiB"
            _label(axes, each, 0.4, label, scale, total)
    axes.set_yticks([0.4, 1.4], ["communication", "products"], fontsize=13)
    axes.set_ylim(-0.15, 1.95)
    axes.set_xlim(0, total * scale * 1.005)
    axes.set_xlabel(f"modelled time, {'ms' if scale == 1e3 else 'µs'}", fontsize=13)
    axes.tick_params(labelsize=12)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(_title(record), fontsize=14, loc="left")
    patches = [Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in used]
    axes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4, fontsize=12, frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=140)
    plt.close(figure)
    return out.getvalue()


def pieces(bar: Bar, covered: list[tuple[float, float]]) -> list[tuple[float, float, str]]:
    """A collective cut into what lies beside products and what does not."""
    cuts = {bar.start, bar.end, *(t for pair in covered for t in pair if bar.start < t < bar.end)}
    found = list[tuple[float, float, str]]()
    for start, end in zip(sorted(cuts), sorted(cuts)[1:]):
        middle = (start + end) / 2
        kind = "hidden" if any(a <= middle <= b for a, b in covered) else "exposed"
        if found and found[-1][2] == kind:
            found[-1] = found[-1][0], end, kind
        else:
            found.append((start, end, kind))
    return found


def _kind(product: Product) -> str:
    if product.kernel == "moe_weight_gradient":
        return "weight gradients"
    if product.place in ("own_experts", "shared_experts"):
        return "own and shared experts"
    return product.place or "other products"


def _short(product: Product) -> str:
    names = {"moe_hidden": "gate, up", "moe_weight_gradient": "dW", "moe_product": "down" if product.forward else "dx"}
    return names.get(product.kernel, product.place.replace("_", " "))


def _label(axes: Any, bar: Bar, row: float, text: str, scale: float, total: float) -> None:
    """Written into the bar where it is wide enough, on its side where it is less so."""
    width = bar.seconds / total if total else 0.0
    if text and width > 0.012:
        wide = width > 0.0105 * len(text)
        middle = (bar.start + bar.end) / 2 * scale
        turned = 0 if wide else 90
        axes.text(middle, row, text, ha="center", va="center", fontsize=10.5, color="white", rotation=turned)


def _title(w: dict[str, Any]) -> str:
    task = {"train": "forward and backward", "prefill": "forward", "decode": "decode"}[w["task"]]
    ms = w["modelled_ms"]
    wholes = ms["rows_communication"], ms["rows_hideable"]
    hidden, of = (f"{ms['rows_hidden'] / whole:.0%}" if whole else "-" for whole in wholes)
    where = f"{w['host']}, {w['tokens']} tokens a device"
    flags = ", flags off" if "scheduler=false" in w["flags"] else ""
    said = f"modelled, not measured: {hidden} of the exchanges of rows hidden, {of} of what could be"
    if not ms["rows_communication"]:
        said = "modelled, not measured: no exchange of rows"
    how = ", ".join([f"num_chunks={w['num_chunks']}", *w["switches"]])
    return f"{w['config']}, {w['compiled']}, {task}, {where}\n{how}{flags}\n{said}"
