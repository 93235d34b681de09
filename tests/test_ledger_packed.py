"""The byte ledger of packed with dedup, num_chunks, wire_dtype and messages: every row of a routing, in loops.

Letters: D replicas, R ranks, T tokens on a rank, K top_k, E experts, L local experts, H hidden, q rows of a message.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import CommConfig, ConfigError, MoEConfig, RouterConfig, byte_ledger, count_routing
from jax_ep.ledger import RoutingCounts
from jax_ep.plan import rows_a_token

FIGURES = ("payload", "payload_remote", "metadata", "control", "wire")
INT = FLOAT = 4
ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
BLOCK = 128


def layer(*, experts=8, top_k=2, hidden=16, dtype="float32", **comm):
    return MoEConfig(hidden, 8, experts, RouterConfig(top_k), CommConfig(**comm), dtype=dtype)


def uniform_routing(rng: np.random.Generator, tokens: int, experts: int, top_k: int) -> np.ndarray:
    """[tokens, K] distinct experts, every choice as likely as any other."""
    return rng.random((tokens, experts)).argsort(1)[:, :top_k]


# -------------------------------------------------------------------------------------------- row by row, in loops


@functools.cache
def mean_ranks(experts: int, top_k: int, ranks: int) -> Fraction:
    """Ranks that K distinct ones of E experts live on, over all choices that there are."""
    local = experts // ranks
    choices = list(itertools.combinations(range(experts), min(top_k, experts)))
    return Fraction(sum(len({e // local for e in choice}) for choice in choices), len(choices))


def rows_of_a_message(config: MoEConfig, tokens: int, ranks: int, local: int, transport: str) -> int:
    """q of a piece of `tokens` tokens; on ragged, R*q is the receive buffer."""
    comm, k = config.comm, config.router.top_k
    if comm.dedup:
        most, balanced = max(1, tokens), tokens * mean_ranks(ranks * local, k, ranks) / ranks
    else:
        most = max(1, tokens * k)
        balanced = Fraction(most, ranks)
        if comm.messages == "expert" and transport == "all_to_all":
            balanced /= local
    q = 1
    while q < most and (comm.recv_rows_factor is None or q < Fraction(comm.recv_rows_factor) * balanced):
        q += 1
    return q


def enumerate_packed(config: MoEConfig, experts: np.ndarray, transport: str) -> tuple[dict[str, Any], Counter[str]]:
    """The ledger by looking at every row, slot and header there is; and how many rows stay, and come in later rounds.

    experts [D, R, T, K].
    """
    replicas, ranks, tokens, k = experts.shape
    comm, hidden, local = config.comm, config.hidden_size, math.ceil(config.num_experts / experts.shape[1])
    row = hidden * ELEMENT[config.dtype]
    out, scales = (row, 0) if comm.wire_dtype is None else (hidden, sum(FLOAT for _ in range(0, hidden, BLOCK)))
    slots = min(k, local) if comm.dedup else 0
    # (payload, metadata) to the experts and home: forward, first round of the backward, its later rounds
    forth = (out, scales + slots * (INT + FLOAT)), (row, 0)
    first = (row, 0), (row, slots * FLOAT)
    weights = slots * (INT + FLOAT) if comm.dedup else FLOAT
    later = (out + row, scales + weights), (row, slots * FLOAT if comm.dedup else FLOAT)
    sums = {"forward": defaultdict(int), "backward": defaultdict(int)}

    def travels(direction, source, destination, payload=0, metadata=0, control=0, empty=False):
        """One thing handed to a collective: empty rows count on the wire only, rows that stay count in payload only."""
        to = sums[direction]
        to["payload"] += 0 if empty else payload
        if source != destination:
            to["payload_remote"] += 0 if empty else payload
            to["metadata"] += 0 if empty else metadata
            to["control"] += control
            to["wire"] += payload + metadata + control

    def there_and_back(direction, home, away, legs, empty=False):
        travels(direction, home, away, *legs[0], empty=empty)
        travels(direction, away, home, *legs[1], empty=empty)

    rounds, load, seen = 1, [0] * ranks, Counter()
    pairs = [(s, d) for s in range(ranks) for d in range(ranks)]
    for replica in range(replicas):
        for piece in np.array_split(np.arange(tokens), max(1, min(comm.num_chunks, tokens))):
            rows = []  # (source, destination, message)
            for source in range(ranks):
                for token in piece:
                    real = [int(e) for e in experts[replica, source, token] if 0 <= e < config.num_experts]
                    for e in real:
                        load[e // local] += 1
                    if comm.dedup:
                        rows += [(source, d, 0) for d in {e // local for e in real}]
                    else:
                        rows += [(source, e // local, e % local if comm.messages == "expert" else 0) for e in real]
            messages = range(local if comm.messages == "expert" else 1)
            q = rows_of_a_message(config, len(piece), ranks, local, transport)
            where, place = defaultdict(int), {}
            for i in sorted(range(len(rows)), key=lambda i: (rows[i][2], rows[i][0])):
                source, destination, _ = rows[i]
                if comm.num_chunks > 1 and source == destination:
                    place[i] = 0  # it goes nowhere
                    continue
                buffer, room = (rows[i], q) if transport == "all_to_all" else (destination, ranks * q)
                place[i] = where[buffer] // room
                where[buffer] += 1
            steps = 1 + max(place.values(), default=0)
            rounds = max(rounds, steps)
            filled = Counter()
            for i, (home, away, message) in enumerate(rows):
                there_and_back("forward", home, away, forth)
                there_and_back("backward", home, away, first if place[i] == 0 else later)
                filled[home, away, message, place[i]] += 1
                seen["own"] += home == away
                seen["later"] += place[i] > 0
            for s, d in pairs:
                if transport == "all_to_all":
                    for _ in range(2 if comm.dedup else local + 1):
                        travels("forward", s, d, control=INT)
                    for message, step in itertools.product(messages, range(steps)):
                        for _ in range(q - filled[s, d, message, step] if s != d else 0):
                            there_and_back("forward", s, d, forth, empty=True)
                            there_and_back("backward", s, d, first if step == 0 else later, empty=True)
                else:
                    for _ in range(ranks if comm.dedup else ranks * local):
                        travels("forward", s, d, control=INT)
        if comm.capacity_factor is not None:
            for s, d in pairs:
                for _ in range(config.num_experts + 1):  # counts, and the number of tokens
                    travels("forward", s, d, control=INT)
    return {
        **{direction: {name: to[name] for name in FIGURES} for direction, to in sums.items()},
        "rounds": rounds,
        "transport": transport,
        "rows_per_rank": load,
        "shard_ratio": max(load) * ranks / sum(load) if sum(load) else 1.0,
    }, seen


def random_case(seed: int):
    """A layer, experts [D, R, T, K] and a transport. Some ranks are silent, tokens masked, choices dropped."""
    rng = np.random.default_rng(seed)
    pick = lambda *values: values[rng.integers(len(values))]
    ranks, replicas = pick(2, 3, 4), pick(1, 1, 2)
    num_experts, tokens = int(rng.integers(2, 10)), int(rng.integers(1, 10))
    top_k = int(rng.integers(1, min(num_experts, 4) + 1))
    dedup = pick(True, False)
    config = layer(
        experts=num_experts,
        top_k=top_k,
        hidden=pick(1, 3, 8, 127, 128, 129, 300),
        dtype=pick(*ELEMENT),
        recv_rows_factor=pick(None, 2.0, 1.3, 1.0, 0.5, 0.25),
        dedup=dedup,
        num_chunks=pick(1, 1, 2, 3, 4),
        wire_dtype=pick(None, "int8", "float8_e4m3fn"),
        messages="rank" if dedup else pick("rank", "expert"),
        capacity_factor=pick(None, None, None, 1.0),
    )
    twice = rng.random() < 0.3  # a token may name an expert twice
    likely = rng.dirichlet(np.full(num_experts, pick(0.2, 1.0, 50.0))) * 0.99 + 0.01 / num_experts
    experts = np.zeros((replicas, ranks, tokens, top_k), np.int32)
    for token in np.ndindex(replicas, ranks, tokens):
        experts[token] = rng.choice(num_experts, top_k, replace=twice, p=likely)
    nowhere = rng.random(experts.shape) < 0.1
    nowhere |= (rng.random((replicas, ranks, tokens, 1)) < 0.1) | (rng.random((replicas, ranks, 1, 1)) < 0.1)
    experts[nowhere] = rng.choice([-1, num_experts, num_experts + 5], int(nowhere.sum()))
    return config, experts, pick("ragged", "all_to_all", "all_gather")


CASES = 1000


def test_ledger_equals_the_enumeration_of_every_row():
    met = Counter()
    for seed in range(CASES):
        config, experts, transport = random_case(seed)
        comm, (replicas, ranks, tokens, k) = config.comm, experts.shape
        counts = count_routing(experts, config, ranks=ranks, replicas=replicas)
        ledger = byte_ledger(config, counts, tokens_per_rank=tokens, transport=transport)
        reference = ledger.pop("reference")
        want, seen = enumerate_packed(config, experts, transport)
        assert ledger == want, f"seed {seed}: {config}"
        real = math.ceil(((experts >= 0) & (experts < config.num_experts)).sum() / k)
        unit = 2 * real * config.hidden_size * ELEMENT[config.dtype]
        assert reference == {"tensor_parallel": unit, "ideal": unit * k, "padded": unit * k * ranks}, f"seed {seed}"
        assert all(type(v) is int for d in (ledger["forward"], ledger["backward"], reference) for v in d.values())
        for sums in (ledger["forward"], ledger["backward"]):
            useful = sums["payload_remote"] + sums["metadata"] + sums["control"]
            assert sums["wire"] == useful if transport != "all_to_all" else sums["wire"] >= useful, f"seed {seed}"
        if not comm.dedup and comm.num_chunks == 1:  # the sums over a rank's tokens say as much
            plain = counts.assignments.sum(2)
            ledger["reference"] = reference
            assert byte_ledger(config, plain, tokens_per_rank=tokens, transport=transport) == ledger, f"seed {seed}"

        layout = "all_to_all" if transport == "all_to_all" else "ragged"
        options = {
            "dedup": comm.dedup,
            "chunks": comm.num_chunks > 1,
            "wire": comm.wire_dtype is not None,
            "expert": comm.messages == "expert",
        }
        for name in (name for name, on in options.items() if on):
            met[layout, name] += 1
            met[layout, name, "rounds"] += seen["later"] > 0
        met[layout, "all of them"] += all(options[name] for name in ("dedup", "chunks", "wire")) and seen["later"] > 0
        met[layout, "own rows stay"] += comm.num_chunks > 1 and seen["own"] > 0 and seen["later"] > 0
        met["fewer tokens than chunks"] += tokens < comm.num_chunks
        met["one token in chunks"] += tokens == 1 < comm.num_chunks
        pieces = np.array_split(experts, max(1, min(comm.num_chunks, tokens)), 2)
        met["pieces of two sizes"] += len({p.shape[2] for p in pieces}) == 2
        met["an expert twice", comm.dedup] += any(
            len(set(real)) < len(real)
            for real in ([e for e in token if 0 <= e < config.num_experts] for token in experts.reshape(-1, k).tolist())
        )
        met["rows deduplicated"] += comm.dedup and counts.rows.sum() < counts.assignments.sum()
        met["padded experts"] += config.num_experts % ranks > 0
        met["nothing at all"] += real == 0
        met["rounds", ledger["rounds"]] += 1
    for layout, name in itertools.product(("ragged", "all_to_all"), ("dedup", "chunks", "wire", "expert")):
        assert met[layout, name] > 20, (layout, name)
        assert met[layout, name, "rounds"] > 5, (layout, name)
        assert met[layout, "all of them"] > 3
        assert met[layout, "own rows stay"] > 10
    for name in ("fewer tokens than chunks", "one token in chunks", "pieces of two sizes", "padded experts"):
        assert met[name] > 5, name
    assert min(met["an expert twice", True], met["an expert twice", False], met["rows deduplicated"]) > 20
    assert max(key[1] for key in met if key[0] == "rounds") >= 4


def test_by_hand():
    """Two ranks of two experts, two tokens each in two pieces; H = 3 in bfloat16, rows out in int8, S = 2 slots."""
    config = layer(experts=4, hidden=3, dtype="bfloat16", dedup=True, num_chunks=2, wire_dtype="int8")
    experts = [[[[0, 1], [2, 3]], [[1, 2], [3, 2]]]]  # rank 0: itself, then rank 1; rank 1: both, then itself
    counts = count_routing(experts, config, ranks=2)
    assert counts.assignments.tolist() == [[[[1, 1, 0, 0], [0, 0, 1, 1]], [[0, 1, 1, 0], [0, 0, 1, 1]]]]
    assert counts.rows.tolist() == [[[[1, 0], [0, 1]], [[1, 1], [0, 1]]]]
    out, home, beside = 3, 6, 4 + 2 * 8  # codes; elements; a scale, and two ids and weights
    five, two = 5 * (out + home), 2 * (out + home)  # of five rows, two are remote
    for transport, integers in (("ragged", 2 * 2 * 2), ("all_to_all", 2 * 2 * 2)):  # pairs, pieces, each 2 integers
        ledger = byte_ledger(config, counts, transport=transport)
        control = 4 * integers
        moved = (
            two + 2 * beside if transport == "ragged" else 4 * (out + home + beside)
        )  # q = 1: a row a pair and piece
        assert ledger["forward"] == dict(zip(FIGURES, (five, two, 2 * beside, control, moved + control)))
        moved = 2 * (2 * home + 8) if transport == "ragged" else 4 * (2 * home + 8)
        assert ledger["backward"] == dict(zip(FIGURES, (5 * 2 * home, 2 * 2 * home, 2 * 8, 0, moved)))
        assert ledger["rounds"] == 1
        assert ledger["rows_per_rank"] == [3, 5]


# ------------------------------------------------------------------------------------------------- dedup, wire_dtype


@pytest.mark.parametrize(("experts", "top_k", "ranks"), [(8, 2, 2), (128, 8, 4), (128, 8, 8)])
def test_dedup_moves_the_rows_that_sets_count_and_on_average_those_of_the_formula(experts, top_k, ranks):
    share, draws, local = 16, 200, experts // ranks
    config = layer(
        experts=experts, top_k=top_k, dtype="bfloat16", transport="ragged", recv_rows_factor=None, dedup=True
    )
    row, slot = 16 * 2, min(top_k, local)
    mean = Fraction(0)
    for seed in range(draws):
        routing = uniform_routing(np.random.default_rng(seed), ranks * share, experts, top_k)
        to = [{int(e) // local for e in token} for token in routing]
        rows, stay = sum(map(len, to)), sum(token // share in ranks_of for token, ranks_of in enumerate(to))
        counts = count_routing(routing, config, ranks=ranks)
        assert counts.rows.sum() == rows, f"seed {seed}"
        assert np.trace(counts.rows[0, :, 0]) == stay, f"seed {seed}"
        ledger = byte_ledger(config, counts)
        assert ledger["rounds"] == 1
        for direction, beside in (("forward", slot * (INT + FLOAT)), ("backward", slot * FLOAT)):
            sums = ledger[direction]
            assert sums["payload"] == rows * 2 * row, f"seed {seed}"
            assert sums["payload_remote"] == (rows - stay) * 2 * row, f"seed {seed}"
            assert sums["metadata"] == (rows - stay) * beside, f"seed {seed}"
        assert sum(ledger["rows_per_rank"]) == routing.size
        mean += Fraction(rows, ranks * share * draws)
    assert abs(mean / rows_a_token(experts, top_k, ranks) - 1) <= 0.02


@pytest.mark.parametrize("wire_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("hidden", [512, 768, 2048])
@pytest.mark.parametrize("transport", ["ragged", "all_to_all"])
def test_quantised_dispatch_takes_little_more_than_half_the_bytes(transport, hidden, wire_dtype):
    routing = uniform_routing(np.random.default_rng(0), 4 * 16, 8, 2)
    dispatch = {}
    for name in (None, wire_dtype):
        config = layer(hidden=hidden, dtype="bfloat16", transport=transport, wire_dtype=name)
        counts = count_routing(routing, config, ranks=4)
        remote = int(counts.assignments.sum()) - int(counts.assignments.reshape(4, 4, 2).trace().sum())
        combine = remote * hidden * 2
        forward = byte_ledger(config, counts)["forward"]
        dispatch[name] = forward["payload_remote"] + forward["metadata"] - combine
    assert dispatch[None] == combine
    assert dispatch[wire_dtype] <= 0.54 * dispatch[None]


# ----------------------------------------------------------------------------------------------------- count_routing


def test_count_routing_equals_python_sets():
    for seed in range(100):
        config, experts, _ = random_case(seed)
        replicas, ranks, tokens, _ = experts.shape
        local = math.ceil(config.num_experts / ranks)
        counts = count_routing(experts, config, ranks=ranks, replicas=replicas)
        pieces = np.array_split(np.arange(tokens), max(1, min(config.comm.num_chunks, tokens)))
        assert counts.assignments.dtype == counts.rows.dtype == np.int64
        assert counts.assignments.shape == (replicas, ranks, len(pieces), local * ranks)
        assert counts.rows.shape == (replicas, ranks, len(pieces), ranks)
        for d, r, p in np.ndindex(counts.rows.shape[:3]):
            chosen = experts[d, r, pieces[p]].tolist()
            times = Counter(e for token in chosen for e in token)
            to = Counter(
                rank for token in chosen for rank in {e // local for e in token if 0 <= e < config.num_experts}
            )
            known = [times[e] if e < config.num_experts else 0 for e in range(local * ranks)]
            assert counts.assignments[d, r, p].tolist() == known, f"seed {seed}"
            assert counts.rows[d, r, p].tolist() == [to[rank] for rank in range(ranks)], f"seed {seed}"


@pytest.mark.parametrize("tokens", [0, 1, 5, 9, 16, 21])
def test_flat_tokens_are_split_in_global_order(tokens):
    """Over 2 replicas of 4 ranks; the last ranks hold what is left."""
    config = layer(experts=6, num_chunks=2)
    flat = uniform_routing(np.random.default_rng(tokens), tokens, 6, 2)
    share = math.ceil(tokens / 8)
    split = np.full((2, 4, share, 2), -1)
    for token in range(tokens):
        split[token // (4 * share), token // share % 4, token % share] = flat[token]
    flat_counts, counts = (count_routing(a, config, ranks=4, replicas=2) for a in (flat, split))
    assert [a.tolist() for a in flat_counts] == [a.tolist() for a in counts]
    assert flat_counts.assignments.sum() == tokens * 2


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_ids_of_any_integer_dtype(dtype):
    """The largest id of a wide dtype goes nowhere, and a narrow one need not hold the number that stands for that."""
    config = layer(experts=256)
    lowest, largest = np.iinfo(dtype).min, np.iinfo(dtype).max
    tokens = [[100, min(largest, 255)], [100, lowest], [largest, 0]]  # 255 is an expert
    counts = count_routing(np.array(tokens, dtype), config, ranks=4)
    want = [[e for e in token if 0 <= e < 256] for token in tokens]
    times = Counter(e for token in want for e in token)
    assert counts.assignments.sum((0, 1, 2)).tolist() == [times[e] for e in range(256)]
    assert counts.rows.sum() == sum(len({e // 64 for e in token}) for token in want)


def test_what_count_routing_takes():
    config = layer(num_chunks=2)
    flat = uniform_routing(np.random.default_rng(0), 16, 8, 2)
    want = byte_ledger(config, count_routing(flat, config, ranks=4))
    for same in (flat.tolist(), jnp.asarray(flat), flat.reshape(1, 4, 4, 2)):
        assert byte_ledger(config, count_routing(same, config, ranks=4)) == want
    counts = RoutingCounts(*(jnp.asarray(a, jnp.int32) for a in count_routing(flat, config, ranks=4)))
    assert byte_ledger(config, counts) == want
    assert byte_ledger(layer(), count_routing(flat, layer(), ranks=1))["rows_per_rank"] == [32]


def test_tokens_per_rank_is_inferred_over_the_pieces():
    """Of T tokens all take part, on one rank at least: T comes back, and with it q and the rounds."""
    for seed in range(100):
        config, experts, transport = random_case(seed)
        replicas, ranks, tokens, k = experts.shape
        experts[-1, -1] = np.random.default_rng(seed).integers(0, config.num_experts, (tokens, k))
        counts = count_routing(experts, config, ranks=ranks, replicas=replicas)
        said = byte_ledger(config, counts, tokens_per_rank=tokens, transport=transport)
        assert byte_ledger(config, counts, transport=transport) == said, f"seed {seed}"


def test_tokens_per_rank_is_at_least_what_every_piece_needs():
    """The first four of six tokens are masked: two remain, both in the last of three pieces of two."""
    config = layer(num_chunks=3, recv_rows_factor=1.0)
    experts = np.array([[-1, -1]] * 4 + [[0, 4]] * 2)
    counts = count_routing(np.stack([experts, experts])[None], config, ranks=2)
    assert byte_ledger(config, counts) == byte_ledger(config, counts, tokens_per_rank=6)


@pytest.mark.parametrize("mode", ["dense", "allgather", "padded", "packed"])
def test_routing_counts_serve_every_path(mode):
    config = layer(mode=mode)
    routing = uniform_routing(np.random.default_rng(0), 2 * 4 * 6, 8, 2)
    counts = count_routing(routing, config, ranks=4, replicas=2)
    assert byte_ledger(config, counts) == byte_ledger(config, counts.assignments.sum(2))


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("experts", "sizes", "message"),
    [
        (np.zeros((8, 3), int), {}, r"experts.shape=\[8, 3\]: must be \[tokens, top_k=2\] or .*=\[8, 2\] works"),
        (np.zeros((2, 8, 2), int), {}, r"experts.shape=\[2, 8, 2\]: "),
        (
            np.zeros((1, 4, 8, 2), int),
            {},
            r"experts.shape=\[1, 4, 8, 2\]: .* or \[replicas=1, ranks=2, tokens, top_k=2\]",
        ),
        (np.zeros((2, 2, 8, 2), int), {}, r"experts.shape=\[2, 2, 8, 2\]: .*replicas=1"),
        (np.zeros((1, 2, 8, 1), int), {}, r"experts.shape=\[1, 2, 8, 1\]: "),
        (np.zeros((8, 2)), {}, r"experts.dtype='float64': must be integers; experts.dtype='int32' works"),
        (np.zeros((8, 2), int), {"ranks": 0}, r"ranks=0: must be an integer of at least 1; ranks=2 works"),
        (np.zeros((8, 2), int), {"ranks": 2.0}, r"ranks=2.0: must be an integer of at least 1"),
        (np.zeros((8, 2), int), {"replicas": True}, r"replicas=True: must be an integer of at least 1"),
    ],
)
def test_count_routing_refuses(experts, sizes, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        count_routing(experts, layer(), **{"ranks": 2} | sizes)


@pytest.mark.parametrize("shape", [(2, 8), (3, 2, 8)])
@pytest.mark.parametrize("comm", [{"dedup": True}, {"num_chunks": 2}, {"dedup": True, "num_chunks": 2}])
def test_plain_counts_are_refused_where_they_do_not_say_enough(comm, shape):
    field, value = next(iter(comm.items()))
    replicas = shape[0] if len(shape) == 3 else 1
    works = rf"counts='count_routing\(experts, config, ranks=2, replicas={replicas}\)' works$"
    with pytest.raises(ConfigError, match=rf"^counts='integers\[.*2, 8\]': with {field}={value} .*; {works}"):
        byte_ledger(layer(**comm), np.ones(shape, int))
    config = layer(**comm)
    assert byte_ledger(config, count_routing(np.zeros((8, 2), int), config, ranks=2))["forward"]["payload"] > 0


FULL = np.full((1, 2, 3, 8), 1)  # three pieces of four tokens
ROWS = np.full((1, 2, 3, 2), 3)


@pytest.mark.parametrize(
    ("assignments", "rows", "changes", "message"),
    [
        (
            FULL[0],
            ROWS,
            {},
            r"counts.assignments.shape=\[2, 3, 8\]: must be \[replicas, ranks, pieces, num_experts=8, ",
        ),
        (FULL[..., :7], ROWS, {}, r"counts.assignments.shape=\[1, 2, 3, 7\]: .*=\[1, 2, 1, 8\] works"),
        (np.ones((1, 3, 3, 8), int), ROWS, {}, r"counts.assignments.shape=\[1, 3, 3, 8\]: "),
        (FULL[:, :0], ROWS[:, :0], {}, r"counts.assignments.shape=\[1, 0, 3, 8\]: "),
        (FULL, ROWS[..., :1], {}, r"counts.rows.shape=\[1, 2, 3, 1\]: .*; counts.rows.shape=\[1, 2, 3, 2\] works"),
        (FULL, ROWS[:, :, :2], {}, r"counts.rows.shape=\[1, 2, 2, 2\]: "),
        (FULL * 1.0, ROWS, {}, r"counts.assignments.dtype='float64': must be integers"),
        (FULL, ROWS * 1.0, {}, r"counts.rows.dtype='float64': must be integers"),
        (-FULL, ROWS, {}, r"counts.assignments.min\(\)=-1: .*=0 works"),
        (FULL, -ROWS, {}, r"counts.rows.min\(\)=-3: .*=0 works"),
        (FULL, ROWS + 2, {}, r"counts.rows\[0, 0, 0, 0\]=5: 4 assignments of top_k=2 are 2 to 4 rows; .*=4 works"),
        (FULL, ROWS - 2, {}, r"counts.rows\[0, 0, 0, 0\]=1: 4 assignments of top_k=2 are 2 to 4 rows"),
        (
            FULL[:, :, :2],
            ROWS[:, :, :2],
            {},
            r"counts.assignments.shape=\[1, 2, 2, 8\]: num_chunks=3 makes 3 of the 8 tokens .*=\[1, 2, 3, 8\] works",
        ),
        (
            np.repeat(FULL, 2, 2),
            np.repeat(ROWS, 2, 2),
            {},
            r"counts.assignments.shape=\[1, 2, 6, 8\]: num_chunks=3 makes 3 of the 24 tokens",
        ),
        (
            FULL,
            ROWS,
            {"tokens_per_rank": 11},
            r"tokens_per_rank=11: counts hold \[4, 4, 4\] tokens or more in .* have \[4, 4, 3\]; .*=12 works",
        ),
        (FULL, ROWS, {"tokens_per_rank": 2}, r"tokens_per_rank=2: num_chunks=3 makes 2 pieces, .* 3; .*=12 works"),
    ],
)
def test_routing_counts_that_do_not_fit_are_refused(assignments, rows, changes, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        byte_ledger(layer(num_chunks=3), RoutingCounts(assignments, rows), **changes)


def test_pieces_of_another_number_of_chunks_are_refused():
    routing = uniform_routing(np.random.default_rng(0), 16, 8, 2)
    counts = count_routing(routing, layer(num_chunks=4), ranks=2)
    byte_ledger(layer(num_chunks=4), counts)
    for chunks in (1, 2, 3):
        with pytest.raises(ConfigError, match=rf"^counts.assignments.shape=.*num_chunks={chunks} makes {chunks} of "):
            byte_ledger(layer(num_chunks=chunks), counts)


def test_counts_that_the_refusals_offer_work():
    config = layer(num_chunks=3)
    ledger = byte_ledger(config, RoutingCounts(FULL, ROWS), tokens_per_rank=12)
    assert ledger == byte_ledger(config, RoutingCounts(FULL, ROWS))
    assert byte_ledger(layer(), RoutingCounts(FULL[:, :, :1], FULL[:, :, :1, :2] * 4))["forward"]["payload"] > 0


@pytest.mark.parametrize("comm", [{}, {"dedup": True}, {"num_chunks": 2}, {"capacity_factor": 1.0}])
def test_no_tokens_move_nothing(comm):
    config = layer(**comm)
    ledger = byte_ledger(config, count_routing(np.zeros((0, 2), int), config, ranks=2))
    assert (ledger["rounds"], set(ledger["forward"].values()), set(ledger["backward"].values())) == (0, {0}, {0})
