"""What block_links.py measures in each of its processes, and the table of it.

Letters: B sequences, S positions, R ranks, Y layers of a sequential stack.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from _block import BlockWorkload, cut, param_shardings
from _common import environment
from _compare_report import size
from jax_ep import make_mesh
from jax_ep.bench import compare_runs
from jax_ep.block.coship import parallel_block, sequential_stack
from jax_ep.block.ledger import block_ledger
from jax_ep.ledger import count_routing
from jax_ep.model_config import ModelConfig
from jax_ep.models.decoder import init_decoder

WAYS = ("separate", "coship")
_CHAIN = 9  # collectives one after another in one program, for what each further one takes
_LARGE = 1 << 18  # numbers a pair, 1 MiB


def measure(
    workload: BlockWorkload,
    forms: Sequence[str],
    split: str,
    sequences: Sequence[int],
    runs: int | None,
    backward: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Times every form, length and way on all devices of all processes; `say` is told of each as it is done."""
    mesh = make_mesh(workload.expert_parallel, workload.data_parallel, jax.devices())
    link = calibrate(mesh)
    say(f"link: {_link_in_words(link)}")
    rows = []
    for form in forms:
        config = cut(workload.model, workload.layers if form == "sequential" else 1)
        params = _params(form, config, mesh)
        for sequence in sequences:
            count = runs if runs is not None else max(12, min(60, 60 * 128 // sequence))
            row = _one(form, config, params, mesh, (workload.batch_size, sequence), split, count, backward)
            row["predicted_ms"] = row["collectives_saved"] * link["latency_us"] / 1e3
            rows.append(row)
            times = ", ".join(f"{kv} {row['median_ms'][kv]:.2f} ms" for kv in WAYS)
            say(f"{form}, {row['tokens_per_rank']} tokens a rank: {times}")
    return {
        "environment": environment(jax.device_count()),
        "processes": jax.process_count(),
        "timed": "forward+backward" if backward else "forward",
        "timed_region": "one compiled call, blocked on, in every process; a run's time is that of the slowest rank",
        "split": split,
        "model": _model_in_words(workload),
        "link": link,
        "rows": rows,
    }


def calibrate(mesh: Mesh) -> dict[str, Any]:
    """What one more collective takes in a program, and what a byte takes beyond that, on every rank at once."""
    ranks = mesh.shape["expert"]
    calls = {}
    for numbers in (1, _LARGE):
        x = _everywhere(mesh, (mesh.size * ranks, numbers), P(("data", "expert")))
        for depth in (1, _CHAIN):
            calls[f"{numbers}x{depth}"] = _compiled_call(_chain(mesh, depth), x)
    runs = {name: statistics.median(times) for name, times in _slowest(calls, warmup=1, runs=8).items()}
    each = {n: (runs[f"{n}x{_CHAIN}"] - runs[f"{n}x1"]) / (_CHAIN - 1) for n in (1, _LARGE)}
    moved = (ranks - 1) * (_LARGE - 1) * 4
    return {
        "latency_us": each[1] * 1e3,
        "megabytes_s": moved / max(each[_LARGE] - each[1], 1e-6) / 1e3,
        "measured": f"all_to_all of 4 bytes and of {size(_LARGE * 4)} a pair, each further one of {_CHAIN}",
    }


def _chain(mesh: Mesh, depth: int) -> Callable[[jax.Array], jax.Array]:
    def run(x: jax.Array) -> jax.Array:
        for _ in range(depth):
            x = jax.lax.all_to_all(x, "expert", 0, 0) + 1
        return x

    spec = P(("data", "expert"))
    return jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def _one(
    form: str,
    config: ModelConfig,
    params: Any,
    mesh: Mesh,
    shape: tuple[int, int],
    split: str,
    runs: int,
    backward: bool,
) -> dict[str, Any]:
    """Both ways of one block on one batch."""
    batch, sequence = shape
    x = _everywhere(mesh, (batch, sequence, config.moe.hidden_size), P("data", "expert"))
    calls, rounds = {}, 0
    for kv in WAYS:
        calls[kv] = _compiled_call(_function(form, config, mesh, split, kv, backward), params, x)
        rounds = max(rounds, int(np.max(calls[kv]()[1])))
    times = _slowest(calls, warmup=2, runs=runs)
    layers = config.num_layers
    saved = [(a - b) / layers for a, b in zip(times["separate"], times["coship"], strict=True)]
    low, middle, high = statistics.quantiles(saved, n=4, method="inclusive")
    ledgers = {kv: _ledger(form, config, mesh, shape, split, kv) for kv in WAYS}
    ways = ("forward", "backward") if backward else ("forward",)
    payload = {kv: sum(ledger[way]["payload_collectives"] for way in ways) for kv, ledger in ledgers.items()}
    return {
        "block": form,
        "batch": batch,
        "sequence": sequence,
        "layers": layers,
        "tokens_per_rank": batch * sequence // mesh.size,
        "wire_per_rank": sum(ledgers["coship"][way]["wire"]["largest"] for way in ways),
        "payload_collectives": payload,
        "collectives_saved": payload["separate"] - payload["coship"],
        "rounds": rounds,
        "median_ms": {kv: statistics.median(t) / layers for kv, t in times.items()},
        "quartiles_ms": {kv: [q / layers for q in statistics.quantiles(t, n=4)[::2]] for kv, t in times.items()},
        "saved_ms": {"median": middle, "quartiles": [low, high]},
        "pays": "yes" if low > 0 else "costs" if high < 0 else "no difference seen",
        "runs_ms": {kv: list(t) for kv, t in times.items()},
    }


def _function(
    form: str, config: ModelConfig, mesh: Mesh, split: str, kv: str, backward: bool
) -> Callable[[Any, jax.Array], Any]:
    block = parallel_block if form == "parallel" else sequential_stack

    def forward(params: Any, x: jax.Array) -> Any:
        y, stats = block(params, x, config, mesh=mesh, split=split, kv=kv)
        return y, stats.rounds

    def both(params: Any, x: jax.Array) -> Any:
        y, pull, rounds = jax.vjp(lambda p, a: forward(p, a), params, x, has_aux=True)
        return y, rounds, pull(y)

    return both if backward else forward


def _ledger(form: str, config: ModelConfig, mesh: Mesh, shape: tuple[int, int], split: str, kv: str) -> dict[str, Any]:
    """Of a layer, one round: on all_to_all its wire is the same for every routing."""
    replicas, ranks = mesh.devices.shape
    (rows, sequence), many = shape, 2 if form == "sequential" else 1
    tokens = rows // replicas // many * sequence // ranks
    nowhere = np.full((replicas, ranks, tokens, config.moe.router.top_k), -1)
    counts = count_routing(nowhere, config.moe, ranks=ranks, replicas=replicas)
    known: dict[str, Any] = {"form": form, "kv": kv, "split": split, "window": config.window or sequence}
    known |= {"batch": rows // replicas, "sequence": sequence, "ranks": ranks, "replicas": replicas}
    layer: dict[str, Any] = block_ledger(config, [counts] * many if many == 2 else counts, **known)["layer"]
    return layer


def _params(form: str, config: ModelConfig, mesh: Mesh) -> Any:
    ranks = mesh.shape["expert"]

    def create() -> Any:
        layers = init_decoder(config, jax.random.key(0), ranks=ranks)["layers"]
        return layers if form == "sequential" else jax.tree.map(operator.itemgetter(0), layers)

    shardings = param_shardings(jax.eval_shape(create), mesh, stacked=form == "sequential")
    return jax.jit(create, out_shardings=shardings)()


def _everywhere(mesh: Mesh, shape: tuple[int, ...], spec: P) -> jax.Array:
    """Random numbers."""
    make = lambda: jax.random.normal(jax.random.key(1), shape, jnp.float32)
    return jax.jit(make, out_shardings=NamedSharding(mesh, spec))()


def _compiled_call(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    compiled = jax.jit(function).lower(*arguments).compile()
    return lambda: compiled(*arguments)


def _slowest(calls: Mapping[str, Callable[[], Any]], warmup: int, runs: int) -> dict[str, list[float]]:
    """Milliseconds of every run of each, on the rank that took longest."""
    timings = compare_runs(calls, warmup=warmup, runs=runs)
    mine = np.array([timing.runs_ms for timing in timings.values()])
    slowest = np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, *mine.shape).max(0)
    return {name: times.tolist() for name, times in zip(calls, slowest, strict=True)}


def _model_in_words(workload: BlockWorkload) -> str:
    m, moe = workload.model, workload.model.moe
    sizes = f"H={moe.hidden_size} I={moe.intermediate_size} E={moe.num_experts} K={moe.router.top_k} {moe.dtype}"
    return f"{sizes}, heads {m.num_heads}:{m.num_kv_heads}x{m.head_dim}, B={workload.batch_size}"


def _link_in_words(link: Mapping[str, Any]) -> str:
    return f"{link['latency_us']:.0f} us a collective, and {link['megabytes_s']:.0f} MB/s a rank beyond that"


def table(record: Mapping[str, Any]) -> str:
    """Markdown."""
    e, link = record["environment"], record["link"]
    through = link["through"] if link["rate"] is None else f"{link['through']} of {link['rate']}"
    lines = [
        f"{record['processes']} processes on {e['cpu_cores']} cores, Gloo over {through}: {_link_in_words(link)}. "
        f"jax {e['jax']}, {record['model']}, {record['split']}, {record['timed']}. Times are medians of a layer, the "
        "slowest rank's; saved is that of separate - co-shipped of neighbouring runs, with its quartiles; predicted is "
        "the collectives saved x what one takes.",
        "",
        "| block | tokens a rank | wire a rank | collectives | separate | co-shipped | saved, ms | predicted | pays |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        saved, median, counts = row["saved_ms"], row["median_ms"], row["payload_collectives"]
        low, high = saved["quartiles"]
        cells = [
            row["block"] if row["layers"] == 1 else f"{row['block']}, {row['layers']} layers",
            str(row["tokens_per_rank"]),
            size(row["wire_per_rank"]),
            f"{counts['separate']} / {counts['coship']}",
            f"{median['separate']:.2f}",
            f"{median['coship']:.2f}",
            f"{saved['median']:+.2f} ({low:+.2f} .. {high:+.2f})",
            f"{row['predicted_ms']:.2f}",
            row["pays"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if any(row["rounds"] > 1 for row in record["rows"]):
        lines += ["", "Some took further rounds, whose bytes are not in the wire shown."]
    return "\n".join(lines)
