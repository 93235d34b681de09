"""The byte ledger: published figures, a row-by-row enumeration, real runs, and the collectives of traced programs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import (
    CommConfig,
    ConfigError,
    MoEConfig,
    RouterConfig,
    Routing,
    byte_ledger,
    count_routing,
    init_params,
    make_mesh,
    moe,
)

FIGURES = ("payload", "payload_remote", "metadata", "control", "wire")
INT = FLOAT = 4
ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


def layer(mode="packed", transport="auto", factor=2.0, *, experts=8, top_k=2, hidden=16, dtype="float32", **comm):
    if mode == "packed":
        comm |= {"transport": transport, "recv_rows_factor": factor}
    return MoEConfig(hidden, 8, experts, RouterConfig(top_k), CommConfig(mode=mode, **comm), dtype=dtype)


# ---------------------------------------------------------------------------------------------------- published figures

PUBLISHED = dict(hidden=512, experts=8, top_k=2, dtype="bfloat16")  # B=4 S=16, two ranks
REFERENCE = {"tensor_parallel": 131072, "ideal": 262144, "padded": 524288}


def spread_tokens() -> np.ndarray:
    """32 tokens on each of two ranks, even over the experts."""
    return np.full((2, 8), 8)


def tokens_on_rank_0() -> np.ndarray:
    """All 64 tokens on one of the two ranks, the experts loaded unevenly."""
    return np.array([[40, 10, 14, 0, 30, 30, 2, 2], [0] * 8])


@pytest.mark.parametrize("counts", [spread_tokens, tokens_on_rank_0])
@pytest.mark.parametrize("transport", ["ragged", "all_to_all", "all_gather"])
def test_published_figures(counts, transport):
    ledger = byte_ledger(layer(transport=transport, **PUBLISHED), counts())
    assert ledger["reference"] == REFERENCE
    assert ledger["forward"]["payload"] == 262144
    assert ledger["transport"] == transport


def test_published_figures_of_every_part():
    """Tokens spread evenly: half of all rows are remote; the headers are 5 integers for each of two pairs."""
    counts = spread_tokens()
    ragged = byte_ledger(layer(transport="ragged", **PUBLISHED), counts)
    control = 2 * 8 * 4
    assert ragged["forward"] == dict(zip(FIGURES, (262144, 131072, 0, control, 131072 + control)))
    dense = byte_ledger(layer(transport="all_to_all", factor=1.0, **PUBLISHED), counts)
    assert dense["forward"] == dict(zip(FIGURES, (262144, 131072, 0, 2 * 5 * 4, 131072 + 2 * 5 * 4)))
    assert (ragged["rounds"], dense["rounds"]) == (1, 1)
    padded = byte_ledger(layer("padded", **PUBLISHED), counts)["forward"]
    assert (padded["payload"], padded["payload_remote"], padded["metadata"]) == (524288, 262144, 2 * 64 * INT)
    assert (padded["control"], padded["wire"]) == (0, 262144 + 2 * 64 * INT)


def test_published_figures_with_tokens_that_fill_no_expert():
    """Tokens that take part but whose rows were dropped still count in the reference figures when one says so."""
    ledger = byte_ledger(layer(**PUBLISHED), spread_tokens() // 2, tokens_per_rank=32, total_tokens=64)
    assert ledger["reference"] == REFERENCE
    assert ledger["forward"]["payload"] == 131072


@pytest.mark.parametrize(
    ("counts", "ratio", "rows"),
    [
        ([[8] * 8, [8] * 8], 1.0, [64, 64]),
        ([[16, 16, 16, 16, 0, 0, 0, 0]] * 2, 2.0, [128, 0]),
        ([[40, 10, 14, 0, 30, 30, 2, 2], [0] * 8], 1.0, [64, 64]),
        ([[6, 0, 0, 0, 2, 0, 0, 0], [0] * 8], 1.5, [6, 2]),
        ([[0] * 8, [0] * 8], 1.0, [0, 0]),
    ],
)
@pytest.mark.parametrize("mode", ["packed", "padded", "allgather"])
def test_shard_ratio_and_rows_per_rank(counts, ratio, rows, mode):
    ledger = byte_ledger(layer(mode), counts)
    assert ledger["shard_ratio"] == ratio
    assert ledger["rows_per_rank"] == rows


def test_dense_loads_every_rank_alike():
    """Every expert runs on every token, whatever the router says: 8 experts on 4 tokens of each of 2 ranks."""
    ledger = byte_ledger(layer("dense"), [[8, 0, 0, 0, 0, 0, 0, 0]] * 2, tokens_per_rank=4)
    assert (ledger["shard_ratio"], ledger["rows_per_rank"]) == (1.0, [32, 32])


def test_one_rank_and_the_dense_path_move_nothing():
    nothing = dict.fromkeys(FIGURES, 0)
    for ledger in (byte_ledger(layer(), [[3] * 8]), byte_ledger(layer("dense"), [[3] * 8, [1] * 8])):
        assert (ledger["forward"], ledger["backward"]) == (nothing, nothing)
        assert (ledger["rounds"], ledger["transport"]) == (0, None)


# ---------------------------------------------------------------------------------------------- row by row, in loops


def enumerate_bytes(config: MoEConfig, counts: np.ndarray, tokens: int, transport: str | None) -> dict[str, Any]:
    """The ledger by looking at every row, slot and header there is. counts [D, R, E]."""
    replicas, ranks, experts = counts.shape
    row, k = config.hidden_size * ELEMENT[config.dtype], config.router.top_k
    owner = lambda expert: expert // math.ceil(experts / ranks)
    forward, backward = defaultdict(int), defaultdict(int)

    def travels(sums, source, destination, payload=0, metadata=0, control=0, empty=False):
        """One thing handed to a collective: empty rows count on the wire only, rows that stay count in payload only."""
        sums["payload"] += 0 if empty else payload
        if source != destination:
            sums["payload_remote"] += 0 if empty else payload
            sums["metadata"] += 0 if empty else metadata
            sums["control"] += control
            sums["wire"] += payload + metadata + control

    rounds = 0
    for replica in range(replicas):
        rows = [
            (source, expert)
            for source in range(ranks)
            for expert in range(experts)
            for _ in range(counts[replica, source, expert])
        ]
        pairs = [(s, d) for s in range(ranks) for d in range(ranks)]
        if config.comm.mode == "allgather":
            rounds = 1
            for s, d in pairs:
                for _ in range(tokens):
                    travels(forward, s, d, row, k * (INT + FLOAT))
                    travels(forward, d, s, row)
                    travels(backward, s, d, row)
                    travels(backward, d, s, row, k * FLOAT)
        elif config.comm.mode == "padded":
            rounds = 1
            for s, d in pairs:
                for _ in range(tokens * k):
                    travels(forward, s, d, row, INT)
                    travels(forward, d, s, row)
                    travels(backward, s, d, row)
                    travels(backward, d, s, row)
        else:
            q, factor = 1, config.comm.recv_rows_factor
            most = max(1, tokens * k)
            while q < most and (factor is None or Fraction(q) < Fraction(factor) * most / ranks):
                q += 1
            place = defaultdict(int)  # of a row among those that share its buffer
            when = []
            for source, expert in rows:
                key = (source, owner(expert)) if transport == "all_to_all" else owner(expert)
                when.append(place[key] // (q if transport == "all_to_all" else ranks * q))
                place[key] += 1
            last = max(when, default=0)
            rounds = max(rounds, last + 1)
            for (source, expert), step in zip(rows, when, strict=True):
                home, away = source, owner(expert)
                travels(forward, home, away, row)
                travels(forward, away, home, row)
                if step == 0:  # the cotangent to the experts, the gradient home
                    travels(backward, home, away, row)
                    travels(backward, away, home, row)
                else:  # row, cotangent and weight to the experts; the gradients of row and weight home
                    travels(backward, home, away, 2 * row, FLOAT)
                    travels(backward, away, home, row, FLOAT)
            if transport == "all_to_all":
                filled = defaultdict(int)
                for (source, expert), step in zip(rows, when, strict=True):
                    filled[source, owner(expert), step] += 1
                for s, d in pairs:
                    for _ in range(math.ceil(experts / ranks) + 1):  # counts, and the largest
                        travels(forward, s, d, control=INT)
                    for step in range(last + 1):
                        for _ in range(q - filled[s, d, step]):
                            for sums, there, back in (
                                (forward, (row, 0), (row, 0)),
                                (backward, (row, 0), (row, 0))
                                if step == 0
                                else (backward, (2 * row, FLOAT), (row, FLOAT)),
                            ):
                                travels(sums, s, d, *there, empty=True)
                                travels(sums, d, s, *back, empty=True)
            else:
                for s, d in pairs:
                    for _ in range(ranks * math.ceil(experts / ranks)):
                        travels(forward, s, d, control=INT)
        if config.comm.capacity_factor is not None:
            for s, d in pairs:
                for _ in range(config.num_experts + 1):  # counts, and the number of tokens
                    travels(forward, s, d, control=INT)
    load = [int(counts[:, :, [e for e in range(experts) if owner(e) == r]].sum()) for r in range(ranks)]
    return {
        "forward": {name: forward[name] for name in FIGURES},
        "backward": {name: backward[name] for name in FIGURES},
        "rounds": rounds,
        "transport": transport,
        "rows_per_rank": load,
        "shard_ratio": max(load) * ranks / sum(load) if sum(load) else 1.0,
    }


def random_case(seed: int):
    """A layer, counts [D, R, E] and T. Some ranks are silent, some experts idle, some rows dropped or masked."""
    rng = np.random.default_rng(seed)
    mode = str(rng.choice(["packed", "packed", "packed", "padded", "allgather"]))
    transport = str(rng.choice(["ragged", "all_to_all", "all_gather"])) if mode == "packed" else None
    ranks, replicas = int(rng.choice([2, 3, 4])), int(rng.choice([1, 1, 2]))
    experts, tokens = int(rng.integers(2, 10)), int(rng.integers(1, 9))
    top_k = int(rng.integers(1, min(experts, 4) + 1))
    factor = [None, 2.0, 1.0, 0.5, 0.25, 1.3][rng.integers(6)]
    config = layer(
        mode,
        transport or "auto",
        factor,
        experts=experts,
        top_k=top_k,
        hidden=int(rng.choice([1, 2, 3, 8, 33])),
        dtype=str(rng.choice(list(ELEMENT))),
        **({"capacity_factor": 1.0} if mode != "allgather" and rng.random() < 0.3 else {}),
    )
    likely = rng.dirichlet(np.full(experts, rng.choice([0.2, 1.0, 50.0])))
    counts = np.zeros((replicas, ranks, experts), np.int64)
    for replica in range(replicas):
        for rank in range(ranks):
            silent = rng.random() < 0.15
            for _ in range(0 if silent else tokens):
                chosen = rng.choice(experts, top_k, replace=False, p=0.99 * likely + 0.01 / experts)
                for expert in chosen[rng.random(top_k) < 0.9]:
                    counts[replica, rank, expert] += 1
    return config, counts, tokens, transport


def test_ledger_equals_the_enumeration_of_every_row():
    rounds = defaultdict(int)
    for seed in range(300):
        config, counts, tokens, transport = random_case(seed)
        ledger = byte_ledger(config, counts, tokens_per_rank=tokens)
        reference = ledger.pop("reference")
        assert ledger == enumerate_bytes(config, counts, tokens, transport), f"seed {seed}: {config}"
        real = math.ceil(counts.sum() / config.router.top_k)
        unit = 2 * real * config.hidden_size * ELEMENT[config.dtype]
        ranks, k = counts.shape[1], config.router.top_k
        assert reference == {"tensor_parallel": unit, "ideal": unit * k, "padded": unit * k * ranks}
        assert all(type(v) is int for d in (ledger["forward"], ledger["backward"], reference) for v in d.values())
        rounds[ledger["rounds"]] += 1
    assert rounds[1] > 50
    assert sum(n for r, n in rounds.items() if r > 1) > 50
    assert max(rounds) >= 4


def test_on_ragged_the_wire_is_payload_metadata_and_control():
    for seed in range(300):
        config, counts, tokens, transport = random_case(seed)
        ledger = byte_ledger(config, counts, tokens_per_rank=tokens)
        for sums in (ledger["forward"], ledger["backward"]):
            useful = sums["payload_remote"] + sums["metadata"] + sums["control"]
            assert sums["wire"] >= useful
            if transport != "all_to_all":
                assert sums["wire"] == useful


def test_tokens_per_rank_is_inferred_from_the_fullest_rank():
    counts = np.array([[3, 0, 0, 2], [1, 1, 0, 0]])
    config = layer("padded", experts=4)
    assert byte_ledger(config, counts) == byte_ledger(config, counts, tokens_per_rank=3)
    assert byte_ledger(config, counts)["forward"]["wire"] == 2 * 1 * 3 * 2 * (2 * 16 * 4 + INT)


def test_counts_may_be_flat_stacked_or_padded():
    counts = np.random.default_rng(0).integers(0, 5, (4, 6))
    config = layer(experts=6)
    flat = byte_ledger(config, counts)
    assert byte_ledger(config, counts[None]) == flat
    assert byte_ledger(config, jnp.asarray(counts)) == flat
    assert byte_ledger(config, counts.tolist()) == flat
    assert byte_ledger(config, np.pad(counts, ((0, 0), (0, 2)))) == flat
    twice = byte_ledger(config, np.stack([counts, counts]))
    for direction in ("forward", "backward"):
        assert twice[direction] == {name: 2 * v for name, v in flat[direction].items()}
    assert twice["rounds"] == flat["rounds"]


def test_auto_reads_as_all_to_all_and_the_argument_wins():
    counts = np.full((2, 8), 4)
    assert byte_ledger(layer(), counts)["transport"] == "all_to_all"
    assert byte_ledger(layer(), counts, transport="ragged") == byte_ledger(layer(transport="ragged"), counts)
    assert byte_ledger(layer("padded"), counts)["transport"] is None


# --------------------------------------------------------------------------------------------------- against real runs

TOKENS = 32
RUNS = {
    "packed all_to_all 0.5, data 2": ((4, 2), layer(factor=0.5, experts=6)),
    "packed ragged 0.5, data 2": ((4, 2), layer(transport="ragged", factor=0.5)),
    "packed all_gather 2": ((4,), layer(transport="all_gather", factor=2.0, experts=6)),
    "packed all_to_all, worst case": ((2,), layer(factor=None, dtype="bfloat16")),
    "dedup all_to_all 0.5, data 2": ((4, 2), layer(factor=0.5, experts=6, dedup=True)),
    "dedup ragged 0.5": ((4,), layer(transport="ragged", factor=0.5, experts=16, dedup=True, wire_dtype="int8")),
    "chunks all_to_all 0.5": ((4,), layer(factor=0.5, num_chunks=3, wire_dtype="float8_e4m3fn", dtype="bfloat16")),
    "chunks ragged 0.5, data 2": ((4, 2), layer(transport="ragged", factor=0.5, num_chunks=3)),
    "chunks dedup all_to_all 0.5": ((4,), layer(factor=0.5, experts=16, dedup=True, num_chunks=2)),
    "per expert all_to_all 0.5": ((4,), layer(factor=0.5, messages="expert")),
    "per expert ragged 0.5": ((4,), layer(transport="ragged", factor=0.5, messages="expert", num_chunks=2)),
    "padded, data 2": ((4, 2), layer("padded")),
    "allgather": ((4,), layer("allgather")),
}


def row_bytes(config: MoEConfig, ranks: int) -> int:
    """A row to the experts, what travels beside it, and one home."""
    comm, k, home = config.comm, config.router.top_k, config.hidden_size * ELEMENT[config.dtype]
    beside = {"allgather": k * (INT + FLOAT), "padded": INT}.get(comm.mode, 0)
    if comm.dedup:
        beside += min(k, math.ceil(config.num_experts / ranks)) * (INT + FLOAT)
    if comm.wire_dtype is not None:
        return config.hidden_size + math.ceil(config.hidden_size / 128) * FLOAT + beside + home
    return home + beside + home


@functools.cache
def runner(name: str):
    sizes, config = RUNS[name]
    run = functools.partial(moe, config=config, mesh=make_mesh(*sizes))
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    params = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), shapes)
    x = jnp.ones((TOKENS, config.hidden_size), config.dtype)
    return jax.jit(lambda experts: run(params, x, routing=Routing(experts, jnp.ones(experts.shape)))[1])


def draw_routing(skew: str, experts: int) -> np.ndarray:
    rng = np.random.default_rng(11)
    if skew == "one expert":
        return np.tile(np.array([0, experts], np.int32), (TOKENS, 1))  # the second choice goes nowhere
    p = {"even": np.ones(experts), "zipf": 1 / np.arange(1, experts + 1) ** 2}[skew]
    chosen = np.stack([rng.choice(experts, 2, replace=False, p=p / p.sum()) for _ in range(TOKENS)]).astype(np.int32)
    if skew == "zipf":
        chosen[:8] = experts  # the first rank has nothing to send
    return chosen


@pytest.mark.parametrize("name", RUNS)
def test_rounds_and_wire_rows_of_real_runs_agree(name):
    (ranks, *replicas), config = RUNS[name]
    replicas = replicas[0] if replicas else 1
    share = TOKENS // (ranks * replicas)
    for skew in ("even", "zipf", "one expert"):
        routing = draw_routing(skew, config.num_experts)
        counts = count_routing(routing, config, ranks=ranks, replicas=replicas)
        ledger = byte_ledger(config, counts, tokens_per_rank=share)
        stats = runner(name)(routing)
        assert int(stats.rounds) == ledger["rounds"]
        forward = ledger["forward"]
        assert int(stats.wire_rows) * row_bytes(config, ranks) == forward["wire"] - forward["control"]
        assert stats.counts.tolist() == counts.assignments.sum((0, 1, 2))[: config.num_experts].tolist()
        if skew == "one expert" and config.comm.recv_rows_factor == 0.5:
            assert ledger["rounds"] > 1


# ----------------------------------------------------------------------------------- against the traced program


def collective_bytes(jaxpr: Any, ranks: int, trips: int) -> int:
    """Bytes that one rank hands to collectives for other ranks, without sums over ranks; loops run `trips` times."""
    total = 0
    for eqn in jaxpr.eqns:
        name, size = eqn.primitive.name, sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.invars)
        if name in ("all_to_all", "reduce_scatter"):
            assert size % ranks == 0
            total += size // ranks * (ranks - 1)
        elif name == "all_gather":
            total += size * (ranks - 1)
        assert name not in ("ragged_all_to_all", "ppermute"), "not counted here"
        times = trips if name == "while" else 1
        total += times * sum(collective_bytes(sub, ranks, trips) for sub in subjaxprs(eqn.params))
    return total


def subjaxprs(params: dict[str, Any]):
    for value in jax.tree.leaves(list(params.values()), is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns"):
            yield inner


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "comm",
    [
        {"mode": "packed", "recv_rows_factor": None},
        {"mode": "packed", "recv_rows_factor": 0.5},
        {"mode": "packed", "recv_rows_factor": 2.0, "capacity_factor": 1.0},
        {"mode": "packed", "recv_rows_factor": None, "dedup": True},
        {"mode": "packed", "recv_rows_factor": 0.5, "dedup": True},
        {"mode": "packed", "recv_rows_factor": None, "num_chunks": 3},
        {"mode": "packed", "recv_rows_factor": 0.5, "num_chunks": 3},
        {"mode": "packed", "recv_rows_factor": None, "wire_dtype": "int8"},
        {"mode": "packed", "recv_rows_factor": 0.5, "wire_dtype": "float8_e4m3fn"},
        {"mode": "packed", "recv_rows_factor": None, "messages": "expert"},
        {"mode": "packed", "recv_rows_factor": 0.5, "messages": "expert"},
        {"mode": "packed", "recv_rows_factor": 0.5, "dedup": True, "num_chunks": 2, "wire_dtype": "int8"},
        {"mode": "packed", "recv_rows_factor": 0.5, "messages": "expert", "num_chunks": 2, "wire_dtype": "int8"},
        {"mode": "padded"},
        {"mode": "padded", "capacity_factor": 1.0},
        {"mode": "allgather"},
    ],
    ids=lambda c: "-".join(f"{k}={v}" if k in ("dedup", "num_chunks") else str(v) for k, v in c.items()),
)
def test_wire_equals_the_collectives_of_the_traced_program(comm, dtype):
    """Forward, and forward + backward with respect to inputs, router and experts, on 2 replicas of 4 ranks."""
    ranks, replicas, share, k = 4, 2, 6, 2
    config = MoEConfig(5, 4, 6, RouterConfig(k), CommConfig(**comm), dtype=dtype, param_dtype=dtype)
    mesh = make_mesh(ranks, replicas)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0), ranks=ranks))
    x = jax.ShapeDtypeStruct((share * ranks * replicas, 5), dtype)
    run = lambda p, v: moe(p, v, config, mesh=mesh)[0].sum()
    experts = np.full((replicas, ranks, share, k), 6)
    experts[..., 0] = 0  # the fullest message holds all tokens of a rank, in every piece and on every replica
    experts[:, 1, :, 1] = 4
    counts = count_routing(experts, config, ranks=ranks, replicas=replicas)
    ledger = byte_ledger(config, counts, tokens_per_rank=share)
    trips = ledger["rounds"] - 1
    assert (trips > 0) == (comm.get("recv_rows_factor") == 0.5)
    forward = collective_bytes(jax.make_jaxpr(run)(params, x).jaxpr, ranks, trips)
    both = collective_bytes(jax.make_jaxpr(jax.grad(run, argnums=(0, 1)))(params, x).jaxpr, ranks, trips)
    devices = ranks * replicas
    assert forward * devices == ledger["forward"]["wire"]
    assert (both - forward) * devices == ledger["backward"]["wire"]


def count_bytes(jaxpr: Any) -> int:
    """Bytes of [source, destination, piece, expert] counts that one rank gathers, its own included."""
    here = (v.aval for e in jaxpr.eqns if e.params.get("name") == "moe_counts" for v in e.outvars if v.aval.ndim == 4)
    below = (count_bytes(sub) for eqn in jaxpr.eqns for sub in subjaxprs(eqn.params))
    return sum(a.size * a.dtype.itemsize for a in here) + sum(below)


@pytest.mark.parametrize("transport", ["ragged", "all_gather"])
@pytest.mark.parametrize("comm", [{}, {"dedup": True}, {"num_chunks": 3}, {"dedup": True, "num_chunks": 3}], ids=str)
def test_control_equals_the_counts_that_the_traced_program_gathers(comm, transport):
    ranks, share = 4, 6
    config = layer(transport=transport, factor=1.0, experts=6, **comm)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0), ranks=ranks))
    x = jax.ShapeDtypeStruct((share * ranks, config.hidden_size), config.dtype)
    jaxpr = jax.make_jaxpr(lambda p, v: moe(p, v, config, mesh=make_mesh(ranks))[0])(params, x).jaxpr
    counts = count_routing(np.zeros((share * ranks, 2), int), config, ranks=ranks)
    assert count_bytes(jaxpr) * (ranks - 1) == byte_ledger(config, counts)["forward"]["control"]


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("counts", "changes", "message"),
    [
        ([3] * 8, {}, r"counts.shape=\[8\]: must be \[ranks, num_experts=8\] or .*; counts.shape=\[2, 8\] works"),
        (np.zeros((2, 2, 2, 8), int), {}, r"counts.shape=\[2, 2, 2, 8\]: "),
        (np.zeros((2, 7), int), {}, r"counts.shape=\[2, 7\]: "),
        (np.zeros((0, 8), int), {}, r"counts.shape=\[0, 8\]: "),
        (np.ones((2, 8)), {}, r"counts.dtype='float64': must be integers; counts.dtype='int64' works"),
        (np.ones((2, 8), bool), {}, r"counts.dtype='bool': must be integers"),
        (np.full((2, 8), -1), {}, r"counts.min\(\)=-1: .*; counts.min\(\)=0 works"),
        (
            np.full((2, 8), 2),
            {"tokens_per_rank": 7},
            r"tokens_per_rank=7: .* 7 \* top_k=2 rows .*; tokens_per_rank=8 works",
        ),
        (np.full((2, 8), 2), {"tokens_per_rank": -1}, r"tokens_per_rank=-1: must be an integer of at least 0"),
        (np.full((2, 8), 2), {"tokens_per_rank": 8.0}, r"tokens_per_rank=8.0: must be an integer of at least 0"),
        (np.full((2, 8), 2), {"total_tokens": True}, r"total_tokens=True: must be an integer of at least 0"),
        (np.full((2, 8), 2), {"transport": "nccl"}, r"transport='nccl': .*; transport='all_to_all' works"),
    ],
)
def test_bad_input_is_refused(counts, changes, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        byte_ledger(layer(), counts, **changes)


def test_values_that_the_refusals_offer_work():
    full = np.full((2, 8), 2)
    assert byte_ledger(layer(), full, tokens_per_rank=8, transport="all_to_all")["forward"]["payload"] > 0
    assert byte_ledger(layer(), np.zeros((2, 8), np.int64))["forward"]["payload"] == 0
    same = dataclasses.replace(layer(), hidden_size=16)
    assert byte_ledger(same, full, total_tokens=16) == byte_ledger(layer(), full)
