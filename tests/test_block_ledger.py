"""The byte ledger of blocks: every row of random cases in loops, what traced programs hand to their collectives, and
what runs really send.

Letters: D replicas, R ranks, B sequences of a replica, S positions, T tokens of a rank, K top_k, L local experts.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_ledger_packed import ELEMENT, FLOAT, INT, rows_of_a_message

from jax_ep import CommConfig, ConfigError, ModelConfig, MoEConfig, RouterConfig, count_routing, make_mesh, route
from jax_ep.attention import rms_norm
from jax_ep.block.at_expert import block_at_experts, context_counts
from jax_ep.block.coship import KV_WAYS, parallel_block, sequential_stack
from jax_ep.block.ledger import PARTS, add_figures, block_ledger
from jax_ep.block.ranges import reorder
from jax_ep.models.decoder import init_decoder
from jax_ep.routing import router_logits
from jax_ep.transport import ragged

pytestmark = pytest.mark.slow

WAYS = ("forward", "backward")


def model(*, experts=6, top_k=2, hidden=5, heads=(2, 1), head_dim=2, dtype="float32", layers=2, comm=None, **fields):
    moe = MoEConfig(
        hidden, 4, experts, RouterConfig(top_k, logit_bias=True), comm=CommConfig(**comm or {}), dtype=dtype
    )
    return ModelConfig(2, layers, *heads, head_dim, moe, **fields)


def owner(position: int, split: str, sequence: int, ranks: int) -> int:
    if split == "contiguous":
        return position * ranks // sequence
    chunk = position * 2 * ranks // sequence
    return chunk if chunk < ranks else 2 * ranks - 1 - chunk


# -------------------------------------------------------------------------------------------- row by row, in loops


class Enumerated:
    """Bytes that each rank (replica, rank) sends and receives, one thing after the other."""

    def __init__(self, replicas: int, ranks: int):
        self.everyone = [(d, r) for d in range(replicas) for r in range(ranks)]
        self.sent, self.received = ({way: defaultdict(Counter) for way in WAYS} for _ in range(2))

    def send(self, way, replica, sender, receiver, empty=False, **parts):
        if sender == receiver:
            return
        for part, count in parts.items():
            for name in ("wire",) if empty else (part, "wire"):
                self.sent[way][name][replica, sender] += count
                self.received[way][name][replica, receiver] += count

    def figures(self, way):
        found = {}
        for part in PARTS:
            sent, received = ([sums[way][part][who] for who in self.everyone] for sums in (self.sent, self.received))
            found[part] = dict(total=sum(sent), largest=max(sent + received), sent=sent, received=received)
        return found


def enumerate_keys(to, config, split, batch, sequence, ranks, window, segments, halves, transport, traced):
    """Keys and values of the first two forms: a row for each rank whose queries see it, and room on all_to_all."""
    row = 2 * config.num_kv_heads * config.head_dim * ELEMENT[config.moe.dtype]

    def rows(segments, window):
        seen = set()
        for b, q in np.ndindex(batch, sequence):
            for k in range(q + 1):
                if window is not None and q - k >= window:
                    continue
                if segments is None or len(set(segments[b, k : q + 1].tolist())) == 1:
                    seen.add((b, k, owner(q, split, sequence, ranks)))
        pairs = Counter((owner(k, split, sequence, ranks), away) for _, k, away in seen)
        return {pair: count for pair, count in pairs.items() if pair[0] != pair[1]}

    room = max(1, max(rows(None, None if traced else window).values(), default=0) // batch * (batch // halves))
    for d in range(len(to.everyone) // ranks):
        counts = rows(None if segments is None else segments[d * batch : (d + 1) * batch], window)
        for home, away in np.ndindex(ranks, ranks):
            count = counts.get((home, away), 0)
            empty = room * halves - count if transport == "all_to_all" else 0
            for many, nothing in ((count, False), (empty, True)):
                to.send("forward", d, home, away, nothing, kv=many * row)
                to.send("backward", d, away, home, nothing, kv=many * row)


def enumerate_experts(to, config, experts, transport, names=0):
    """Dispatch and combine of experts [D, R, T, K]; returns the rounds."""
    comm, (replicas, ranks, tokens, k) = config.comm, experts.shape
    local = math.ceil(config.num_experts / ranks)
    row = config.hidden_size * ELEMENT[config.dtype]
    out, scales = (row, 0) if comm.wire_dtype is None else (config.hidden_size, math.ceil(config.hidden_size / 128) * 4)
    slots = min(k, local) if comm.dedup else 0
    q = rows_of_a_message(config, tokens, ranks, local, transport)
    again, home_again = (0, slots * FLOAT) if comm.dedup else (FLOAT, FLOAT)  # weights, with the rows of later rounds

    def cross(d, home, away, later, empty=False):
        beside = scales + slots * (INT + FLOAT) + names
        to.send("forward", d, home, away, empty, hidden=out, metadata=beside)
        to.send("forward", d, away, home, empty, hidden=row)
        if later:
            to.send("backward", d, home, away, empty, hidden=out + row, metadata=beside + again)
            to.send("backward", d, away, home, empty, hidden=row, metadata=home_again)
        else:
            to.send("backward", d, home, away, empty, hidden=row)
            to.send("backward", d, away, home, empty, hidden=row, metadata=slots * FLOAT)

    rounds = 1
    for d in range(replicas):
        place, filled = Counter(), Counter()
        for home in range(ranks):
            for token in range(tokens):
                real = [int(e) // local for e in experts[d, home, token] if 0 <= e < config.num_experts]
                for away in set(real) if comm.dedup else real:
                    if away == home:
                        continue
                    buffer, room = ((home, away), q) if transport == "all_to_all" else (away, q * ranks)
                    turn = place[buffer] // room
                    place[buffer] += 1
                    filled[home, away, turn] += 1
                    cross(d, home, away, turn > 0)
        turns = 1 + max((turn for _, _, turn in filled), default=0)
        rounds = max(rounds, turns)
        for home, away in np.ndindex(ranks, ranks):
            if transport == "all_to_all":
                for turn in range(turns):
                    for _ in range(q - filled[home, away, turn]):
                        cross(d, home, away, turn > 0, empty=True)
            told = (1 if comm.dedup else local) + 1
            if transport != "all_to_all":
                told = ranks * (1 if comm.dedup else local)
            to.send("forward", d, home, away, control=told * INT)
    return rounds


def enumerate_context(to, config, first, sequence, ranks, window, segments, transport):
    """Contexts of tokens that go to ranks `first` [D, R, B, S] (others nowhere), each beside its names."""
    row = 2 * config.num_kv_heads * config.head_dim * ELEMENT[config.moe.dtype]
    names = INT * (1 if segments is None else 2)
    for d, home, away in np.ndindex(first.shape[0], ranks, ranks):
        count = 0
        for b, key in np.ndindex(first.shape[2], sequence):
            sees = (
                q - key < (window or sequence)
                and (segments is None or len(set(segments[d, home, b, key : q + 1].tolist())) == 1)
                for q in range(key, sequence)
                if first[d, home, b, q] == away
            )
            count += any(sees)
        room = first.shape[2] * sequence - count if transport == "all_to_all" else 0
        for many, nothing in ((count, False), (room, True)):
            to.send("forward", d, home, away, nothing, kv=many * row, metadata=many * names)
            to.send("backward", d, away, home, nothing, kv=many * row)
        if transport != "all_to_all":
            to.send("forward", d, home, away, control=ranks * INT)


def random_case(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    pick = lambda *values: values[rng.integers(len(values))]
    form = pick("parallel", "sequential", "at_expert")
    ranks, replicas = pick(2, 3, 4), pick(1, 1, 2)
    batch = {"parallel": pick(1, 2, 3), "sequential": pick(2, 4), "at_expert": ranks * pick(1, 2)}[form]
    sequence = 2 * ranks * pick(1, 2, 3)
    comm = dict(recv_rows_factor=None, dedup=True)
    if form != "at_expert":
        factor = pick(None, 2.0, 1.0, 0.5, 0.25)
        comm = dict(recv_rows_factor=factor, dedup=pick(True, False), wire_dtype=pick(None, None, "int8"))
    experts, layers = int(rng.integers(3, 9)), 2
    config = model(
        experts=experts,
        top_k=int(rng.integers(1, 4)),
        hidden=pick(1, 5, 129),
        heads=pick((2, 1), (2, 2)),
        dtype=pick(*ELEMENT),
        layers=layers,
        comm=comm,
        window=pick(None, 1, 2, sequence // ranks, 3 * sequence),
    )
    explicit = None
    if form != "at_expert" and rng.random() < 0.3:
        explicit = pick(1, 3, sequence)
        if config.window is not None and rng.random() < 0.5:
            config = dataclasses.replace(config, window_layers=(True, False))
    segments = None
    if rng.random() < 0.5:  # numbers come back after others
        segments = rng.integers(0, 2, (replicas * batch, sequence)).repeat(pick(1, 3), 1)[:, :sequence]
    halves = 2 if form == "sequential" else 1
    tokens = batch // halves * sequence // ranks
    likely = rng.dirichlet(np.full(experts, pick(0.2, 1.0, 50.0))) * 0.99 + 0.01 / experts
    ids = rng.choice(experts, (halves, replicas, ranks, tokens, config.moe.router.top_k), p=likely)
    ids[rng.random(ids.shape) < 0.1] = -1
    return dict(
        config=config,
        form=form,
        kv=pick("coship", "coship", *KV_WAYS) if form != "at_expert" else "coship",
        split=pick("contiguous", "zigzag"),
        batch=batch,
        sequence=sequence,
        ranks=ranks,
        replicas=replicas,
        window=explicit,
        segments=segments,
        ids=ids,
        first=rng.integers(0, ranks + 1, (replicas, ranks, max(1, batch // ranks), sequence)),
        transport=pick("ragged", "all_to_all", "all_gather"),
    )


def enumerated(case: dict[str, Any]) -> dict[str, Any]:
    config, form, kv, ranks, replicas = (case[name] for name in ("config", "form", "kv", "ranks", "replicas"))
    batch, sequence, segments, transport = (case[name] for name in ("batch", "sequence", "segments", "transport"))
    layer, stack = Enumerated(replicas, ranks), Enumerated(replicas, ranks)
    names = 0 if form != "at_expert" else INT * (1 if segments is None else 2)
    rounds = max(enumerate_experts(layer, config.moe, half, transport, names) for half in case["ids"])
    halves = len(case["ids"])
    if form == "at_expert":
        of_ranks = None if segments is None else segments.reshape(replicas, ranks, -1, sequence)
        enumerate_context(layer, config, case["first"], sequence, ranks, config.window, of_ranks, transport)
    elif kv in ("all_gather", "ring"):
        row = 2 * config.num_kv_heads * config.head_dim * ELEMENT[config.moe.dtype]
        for d, home, away in np.ndindex(replicas, ranks, ranks):
            for position in range(sequence):
                if owner(position, case["split"], sequence, ranks) == home:
                    layer.send("forward", d, home, away, kv=batch * row)
                    layer.send("backward", d, away, home, kv=batch * row)
    else:
        window = config.window if case["window"] is None else case["window"]
        traced = form == "sequential" and config.window_layers is not None
        how = (case["split"], batch, sequence, ranks, window, segments, halves, transport, traced)
        enumerate_keys(layer, config, *how)
    for d, home, away in np.ndindex(replicas, ranks, ranks):
        if segments is not None and form != "at_expert":
            for position in range(sequence):
                if owner(position, case["split"], sequence, ranks) == home:
                    stack.send("forward", d, home, away, control=batch * INT)
        if form == "sequential" and transport == "all_to_all":
            tokens, local = case["ids"].shape[3], math.ceil(config.moe.num_experts / ranks)
            q = rows_of_a_message(config.moe, tokens, ranks, local, transport)
            for way in WAYS:
                stack.send(way, d, home, away, True, hidden=q * config.moe.hidden_size * ELEMENT[config.moe.dtype])
    return dict(layer=layer, stack=stack, rounds=rounds)


def ledger_of(case: dict[str, Any]) -> dict[str, Any]:
    config, ranks = case["config"], case["ranks"]
    counts = [count_routing(half, config.moe, ranks=ranks, replicas=case["replicas"]) for half in case["ids"]]
    segments, context = case["segments"], None
    if case["form"] == "at_expert":
        of_ranks = None if segments is None else segments.reshape(case["replicas"], ranks, -1, case["sequence"])
        of = lambda d: None if segments is None else of_ranks[d]
        first, replicas = case["first"], range(case["replicas"])
        context = np.stack([context_counts(first[d], ranks, config.window, of(d)) for d in replicas])
    names = ("form", "kv", "split", "batch", "sequence", "ranks", "replicas", "window", "transport")
    return block_ledger(
        config,
        counts if len(counts) > 1 else counts[0],
        segment_ids=segments,
        context=context,
        **{name: case[name] for name in names},
    )


COLLECTIVES = {  # of a layer, with R ranks
    ("parallel", "coship"): lambda r: 2,
    ("parallel", "separate"): lambda r: 3,
    ("parallel", "all_gather"): lambda r: 3,
    ("parallel", "ring"): lambda r: 2 + r - 1,
    ("sequential", "coship"): lambda r: 3,
    ("sequential", "separate"): lambda r: 6,
    ("sequential", "all_gather"): lambda r: 6,
    ("sequential", "ring"): lambda r: 4 + 2 * (r - 1),
    ("at_expert", "coship"): lambda r: 2,
}


def test_ledger_equals_the_enumeration_of_every_row():
    met = Counter()
    for seed in range(240):
        case = random_case(seed)
        ledger, want = ledger_of(case), enumerated(case)
        form, kv, ranks, transport = (case[name] for name in ("form", "kv", "ranks", "transport"))
        for which in ("layer", "stack"):
            for way in WAYS:
                figures = dict(ledger[which][way])
                payload, control = figures.pop("payload_collectives"), figures.pop("control_collectives")
                assert figures == want[which].figures(way), f"seed {seed}: {which} {way}"
                if which == "layer":
                    assert payload == COLLECTIVES[form, kv](ranks), f"seed {seed}"
                    told = {"parallel": 1, "sequential": 2, "at_expert": 2}[form] if transport != "all_to_all" else 0
                    assert control == told * (way == "forward"), f"seed {seed}"
                else:
                    assert payload == (form == "sequential"), f"seed {seed}"
                    shared = case["segments"] is not None and form != "at_expert"
                    assert control == (shared and way == "forward"), f"seed {seed}"
        assert (ledger["rounds"], ledger["transport"]) == (want["rounds"], transport), f"seed {seed}"
        figures = [ledger[which][way].values() for which in ("layer", "stack") for way in WAYS]
        whole = [n for each in figures for figure in each for n in flat(figure)]
        assert all(type(n) is int for n in whole)
        layout = "all_to_all" if transport == "all_to_all" else "ragged"
        met[layout, form] += 1
        met[layout, form, "rounds"] += ledger["rounds"] > 1
        met[layout, kv] += 1
        met[form, "segments"] += case["segments"] is not None
        met[form, "window_layers"] += case["config"].window_layers is not None
    for layout in ("ragged", "all_to_all"):
        assert min(met[layout, form] for form in ("parallel", "sequential", "at_expert")) > 15
        assert min(met[layout, form, "rounds"] for form in ("parallel", "sequential")) > 5
        assert min(met[layout, kv] for kv in KV_WAYS) > 3
    assert min(met[form, "segments"] for form in ("parallel", "sequential", "at_expert")) > 10
    assert met["sequential", "window_layers"] > 3


def flat(figure):
    return [figure] if not isinstance(figure, dict) else [*figure["sent"], *figure["received"], figure["largest"]]


# --------------------------------------------------------------------------------------------------- by hand


def keys_sent(split="contiguous", kv="coship", ranks=4, batch=2, sequence=16, config=None, **masks):
    """KV rows in all and of each rank, forward."""
    config = model() if config is None else config
    ids = np.zeros((1, ranks, batch * sequence // ranks, 2), int)
    counts = count_routing(ids, config.moe, ranks=ranks)
    shape = dict(split=split, kv=kv, batch=batch, sequence=sequence, ranks=ranks)
    figure = block_ledger(config, counts, **shape, **masks)["layer"]["forward"]["kv"]
    row = 2 * config.num_kv_heads * config.head_dim * 4
    return figure["total"] // row, [n // row for n in figure["sent"]], [n // row for n in figure["received"]]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_causal_attention_needs_half_of_an_all_gather_contiguous_and_three_quarters_zigzag(ranks):
    share = 2 * 16 // ranks  # rows of a rank
    every = ranks * (ranks - 1) * share
    of_each = [share * (ranks - 1)] * ranks
    assert keys_sent(kv="all_gather", ranks=ranks) == (every, of_each, of_each)
    assert keys_sent(kv="ring", ranks=ranks) == keys_sent(kv="all_gather", ranks=ranks)
    total, sent, received = keys_sent(ranks=ranks)
    assert total == every // 2
    assert received == [share * r for r in range(ranks)]  # the last receives all there is, the first nothing
    assert sent == received[::-1]
    total, sent, received = keys_sent("zigzag", ranks=ranks)
    assert total * 4 == every * 3
    assert received == [share * (ranks - 1) - r * share // 2 for r in range(ranks)]  # rank 0 has the last queries


def test_masks_leave_out_what_no_query_reads():
    """Four ranks hold four positions of two sequences each; a window of 3 looks 2 back, over one border."""
    assert keys_sent(window=3) == (3 * 2 * 2, [4, 4, 4, 0], [0, 4, 4, 4])
    assert keys_sent(config=model(window=3)) == keys_sent(window=3)
    on_borders = np.arange(16)[None].repeat(2, 0) // 4
    assert keys_sent(segment_ids=on_borders)[0] == 0
    three = np.where(np.abs(np.arange(16)[None] - 7.5) < 2, 1, 0).repeat(
        2, 0
    )  # 0..5, 6..9 and 10..15, each over a border
    assert keys_sent(segment_ids=three) == (2 * (4 + 2 + 2), [8, 4, 4, 0], [0, 8, 4, 4])


def test_one_rank_moves_nothing():
    config = model(layers=1)
    counts = [count_routing(np.zeros((1, 1, 8, 2), int), config.moe, ranks=1)] * 2
    segments = np.zeros((2, 8), int)
    ledger = block_ledger(config, counts, form="sequential", batch=2, sequence=8, ranks=1, segment_ids=segments)
    assert (ledger["rounds"], ledger["transport"]) == (0, None)
    for which in ("layer", "stack"):
        for way in WAYS:
            assert not any(n for figure in ledger[which][way].values() for n in flat(figure))


def test_figures_of_several_layers_add_up():
    config = model()
    one = np.zeros((1, 2, 8, 2), int)
    two = np.full((1, 2, 8, 2), 5)
    shape = dict(batch=2, sequence=8, ranks=2)
    ledgers = [block_ledger(config, count_routing(ids, config.moe, ranks=2), **shape)["layer"] for ids in (one, two)]
    row = 8 * 2 * 5 * 4
    assert [ledger["forward"]["hidden"]["sent"] for ledger in ledgers] == [[row, row], [row, row]]
    total = add_figures(ledgers)
    both = [2 * row] * 2
    assert total["forward"]["hidden"] == dict(total=4 * row, largest=2 * row, sent=both, received=both)
    assert total["forward"]["payload_collectives"] == 4
    first = dict(sent=[1, 5], received=[2, 4], largest=5, total=6)
    kv = add_figures([first, dict(sent=[4, 0], received=[0, 4], largest=4, total=4)])
    assert kv == dict(sent=[5, 5], received=[2, 8], largest=8, total=10)


# ----------------------------------------------------------------------------------- against the traced program


def collectives(jaxpr: Any, ranks: int, trips: int) -> tuple[int, int]:
    """(bytes that one rank hands to collectives for other ranks, collectives), without sums; `while` turns `trips`
    times, and the collectives in it do not count.
    """
    handed = count = 0
    for eqn in jaxpr.eqns:
        name, size = eqn.primitive.name, sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.invars)
        assert name != "ragged_all_to_all", "not counted here"
        others = {"all_to_all": (ranks - 1) / ranks, "reduce_scatter": (ranks - 1) / ranks}
        others |= {"all_gather": ranks - 1, "ppermute": 1}
        if name in others:
            handed += round(size * others[name])
            count += 1
        times = {"while": trips, "scan": eqn.params.get("length")}.get(name, 1)
        holds = lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=holds):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                below = collectives(inner, ranks, trips)
                handed += times * below[0]
                count += times * below[1] * (name != "while")
    return handed, count


SEQUENCE, REPLICAS, RANKS, LAYERS = 16, 2, 4, 2
ALL_TO_ALL = dict(transport="all_to_all")
MIXED = dict(window=2, window_layers=(True, False))
NARROW, WIDE = "bfloat16", "float32"
TRACED = [  # form, kv, split, comm, fields of the model, dtype, segments
    ("parallel", "coship", "zigzag", dict(recv_rows_factor=0.5), {}, WIDE, True),
    ("parallel", "coship", "contiguous", dict(recv_rows_factor=None, dedup=True), dict(window=3), NARROW, False),
    ("parallel", "separate", "contiguous", dict(recv_rows_factor=None, wire_dtype="int8"), {}, NARROW, True),
    ("parallel", "all_gather", "zigzag", dict(recv_rows_factor=None), {}, NARROW, True),
    ("parallel", "ring", "contiguous", dict(recv_rows_factor=0.5, dedup=True, wire_dtype="int8"), {}, WIDE, False),
    ("sequential", "coship", "zigzag", dict(recv_rows_factor=0.5, dedup=True), {}, NARROW, True),
    ("sequential", "separate", "contiguous", dict(recv_rows_factor=2.0), dict(window=5), WIDE, False),
    ("sequential", "coship", "contiguous", dict(recv_rows_factor=None), MIXED, WIDE, False),
    ("sequential", "ring", "zigzag", dict(recv_rows_factor=None), {}, NARROW, True),
    ("at_expert", "coship", "contiguous", dict(recv_rows_factor=None, dedup=True), dict(window=3), NARROW, True),
]


def program(form: str, kv: str, split: str, config: ModelConfig, mesh: Any, segments: Any) -> Any:
    def run(params: Any, x: jax.Array) -> jax.Array:
        if form == "at_expert":
            return block_at_experts(params, x, config, mesh=mesh, segment_ids=segments)[0].sum()
        block = parallel_block if form == "parallel" else sequential_stack
        return block(params, x, config, mesh=mesh, segment_ids=segments, split=split, kv=kv)[0].sum()

    return run


def layers_of(form: str, params: Any) -> Any:
    return params if form == "sequential" else jax.tree.map(lambda a: a[0], params)


@pytest.mark.parametrize("case", TRACED, ids=lambda c: "-".join(map(str, (*c[:3], *c[3].values(), c[5]))))
def test_wire_and_collectives_are_those_of_the_traced_program(case):
    """Forward, and forward + backward, on two replicas of four ranks."""
    form, kv, split, comm, fields, dtype, with_segments = case
    config = model(comm=ALL_TO_ALL | comm, dtype=dtype, layers=LAYERS, **fields)
    batch = RANKS if form == "at_expert" else 2
    rows = REPLICAS * batch
    segments = np.arange(rows * SEQUENCE).reshape(rows, SEQUENCE) // 5 if with_segments else None
    many = 2 if form == "sequential" else 1
    tokens = batch // many * SEQUENCE // RANKS
    experts = np.full((REPLICAS, RANKS, tokens, 2), 6)
    experts[..., 0] = 0  # the fullest message holds all tokens of a rank
    experts[:, 1, :, 1] = 4
    counts = count_routing(experts, config.moe, ranks=RANKS, replicas=REPLICAS)
    windows = [None] * LAYERS if "window_layers" not in fields else [fields["window"], SEQUENCE]
    known = dict(batch=batch, sequence=SEQUENCE, ranks=RANKS, replicas=REPLICAS, segment_ids=segments)
    context = np.ones((REPLICAS, RANKS, RANKS), int) if form == "at_expert" else None
    known |= dict(form=form, kv=kv, split=split, context=context)
    counted = [block_ledger(config, [counts] * many if many > 1 else counts, window=w, **known) for w in windows]
    if form == "sequential":
        figures = add_figures([*(ledger["layer"] for ledger in counted), counted[0]["stack"]])
    else:
        figures = counted[0]["layer"]
    trips = counted[0]["rounds"] - 1
    assert (trips > 0) == (comm["recv_rows_factor"] == 0.5)

    params = jax.eval_shape(lambda: layers_of(form, init_decoder(config, jax.random.key(0), ranks=RANKS)["layers"]))
    x = jax.ShapeDtypeStruct((rows, SEQUENCE, config.moe.hidden_size), dtype)
    run = program(form, kv, split, config, make_mesh(RANKS, REPLICAS), segments)
    forward = collectives(jax.make_jaxpr(run)(params, x).jaxpr, RANKS, trips)
    both = collectives(jax.make_jaxpr(jax.grad(run, argnums=(0, 1)))(params, x).jaxpr, RANKS, trips)
    # Whoever calls has gathered the ids.
    of_ids = counted[0]["stack"]["forward"]["control"]["total"] if form == "sequential" else 0
    devices = RANKS * REPLICAS
    assert forward[0] * devices == figures["forward"]["wire"]["total"] - of_ids
    assert (both[0] - forward[0]) * devices == figures["backward"]["wire"]["total"]
    assert forward[1] == figures["forward"]["payload_collectives"]
    assert both[1] - forward[1] == figures["backward"]["payload_collectives"]


# ------------------------------------------------------------------------------------------- against what runs send


@pytest.fixture
def sizes(monkeypatch):
    """What the ranks of runs on the ragged layout send each other: bytes by (replica, sender, receiver)."""
    sent = Counter()
    through = ragged.emulated_ragged_all_to_all

    def spy(operand, output, input_offsets, send_sizes, *more, axis_name):
        def told(replica, rank, rows):
            for peer, count in enumerate(np.asarray(rows)):
                sent[int(replica), int(rank), peer] += int(count) * operand.shape[1] * operand.dtype.itemsize

        jax.debug.callback(told, jax.lax.axis_index("data"), jax.lax.axis_index(axis_name), send_sizes)
        return through(operand, output, input_offsets, send_sizes, *more, axis_name=axis_name)

    monkeypatch.setattr(ragged, "emulated_ragged_all_to_all", spy)
    return sent


@pytest.mark.parametrize("form", ["parallel", "sequential", "at_expert"])
def test_runs_on_the_ragged_layout_send_what_the_ledger_counts(sizes, form):
    """Each rank to each, of the tokens' own routing; with segments, a window, and of two forms further rounds."""
    factor = None if form == "at_expert" else 0.5
    comm = dict(transport="all_gather", recv_rows_factor=factor, dedup=form != "parallel")
    config = model(hidden=7, layers=1, comm=comm, window=6)  # no other test compiles it
    batch = RANKS if form == "at_expert" else 2
    rng = np.random.default_rng(0)
    params = init_decoder(config, jax.random.key(1), ranks=RANKS)["layers"]
    if form == "sequential":  # what its experts see is not known before it runs: all tokens choose alike
        params["moe"]["router"]["bias"] += jnp.asarray([0, 50, 0, 0, 60, 0])[None]
    params = layers_of(form, params)
    x = jnp.asarray(rng.standard_normal((REPLICAS * batch, SEQUENCE, 7)), jnp.float32)
    segments = np.cumsum(rng.random((REPLICAS * batch, SEQUENCE)) < 0.1, 1).astype(np.int32)

    if form == "sequential":
        chosen = np.broadcast_to([4, 1], (REPLICAS * batch, SEQUENCE, 2))
    else:
        normed = rms_norm(x, params["attention_norm"], config.norm_eps).reshape(-1, 7)
        router = params["moe"]["router"]
        routing = route(router_logits(normed, router["kernel"], router["bias"]), config.moe.router)
        chosen = np.asarray(routing.experts).reshape(REPLICAS * batch, SEQUENCE, 2)
    known = dict(form=form, batch=batch, sequence=SEQUENCE, ranks=RANKS, replicas=REPLICAS, segment_ids=segments)
    if form == "at_expert":
        ids = chosen.reshape(REPLICAS, RANKS, -1, 2)
        weights = np.asarray(routing.weights).reshape(REPLICAS, RANKS, -1, 2)
        top = np.take_along_axis(ids, weights.argmax(3)[..., None], 3)[..., 0] // 2  # of two experts each
        first = top.reshape(REPLICAS, RANKS, -1, SEQUENCE)
        parts = segments.reshape(first.shape)
        known["context"] = np.stack([context_counts(first[d], RANKS, 6, parts[d]) for d in range(REPLICAS)])
        counts = count_routing(ids, config.moe, ranks=RANKS, replicas=REPLICAS)
    else:
        held = np.stack([owner(p, "zigzag", SEQUENCE, RANKS) for p in range(SEQUENCE)])
        by_rank = np.stack([chosen[:, held == r] for r in range(RANKS)])  # [R, D*B, s, K]
        by_rank = by_rank.reshape(RANKS, REPLICAS, batch, -1, 2).swapaxes(0, 1)
        many = 2 if form == "sequential" else 1
        halves = [h.reshape(REPLICAS, RANKS, -1, 2) for h in np.split(by_rank, many, 2)]
        counts = [count_routing(half, config.moe, ranks=RANKS, replicas=REPLICAS) for half in halves]
        counts = counts if many == 2 else counts[0]
        x = reorder(x, "zigzag", RANKS, axis=1)
    ledger = block_ledger(config, counts, split="zigzag", **known)
    assert (ledger["rounds"] > 1) == (factor is not None)

    run = program(form, "coship", "zigzag", config, make_mesh(RANKS, REPLICAS), jnp.asarray(segments))
    ways = ("forward",) if form == "sequential" else WAYS
    jax.block_until_ready(jax.jit(run if len(ways) == 1 else jax.grad(run, argnums=(0, 1)))(params, x))
    jax.effects_barrier()
    everyone = list(np.ndindex(REPLICAS, RANKS))
    figures = [ledger["layer"][way] for way in ways]
    wanted = lambda name: sum(np.array(f["wire"][name]) - f["control"][name] for f in figures).tolist()
    assert [sum(sizes[d, r, to] for to in range(RANKS)) for d, r in everyone] == wanted("sent")
    assert [sum(sizes[d, source, r] for source in range(RANKS)) for d, r in everyone] == wanted("received")
    assert all(f["kv"]["total"] and f["hidden"]["total"] for f in figures)


# --------------------------------------------------------------------------------------------------------------- errors


def refused(match: str, *, config: Any = None, ids: Any = None, many: int = 1, **changes: Any) -> None:
    config = model() if config is None else config
    ids = np.zeros((1, 4, 8, 2), int) if ids is None else ids
    known = dict(batch=2, sequence=16, ranks=4) | changes
    counts = count_routing(ids, model().moe, ranks=ids.shape[1], replicas=ids.shape[0])
    with pytest.raises(ConfigError, match=match):
        block_ledger(config, counts if many == 1 else [counts] * many, **known)


def test_refusals_name_what_works():
    refused("form='both': must be one of parallel, sequential, at_expert; form='parallel' works", form="both")
    refused("kv='together': must be one of coship", kv="together")
    refused("kv='ring': must be one of coship; kv='coship' works", kv="ring", form="at_expert")
    refused("split='striped'", split="striped")
    refused("sequence=18: contiguous over 4 ranks", sequence=18)
    refused("batch=3: .* two microbatches; batch=4 works", batch=3, form="sequential")
    refused("batch=2: .* whole sequences of 4 ranks; batch=4 works", form="at_expert")
    refused("ranks=0", ranks=0)
    refused("mode='padded': .*packed rows; mode='packed' works", config=model(comm=dict(mode="padded")))
    refused("num_chunks=2: ", config=model(comm=dict(num_chunks=2)))
    refused("dedup=False: attention at the expert's rank .*; dedup=True works", form="at_expert", batch=4)
    refused(r"counts=\['RoutingCounts'\]: form 'sequential' has 2", form="sequential")
    refused(r"counts=.*form 'parallel' has 1", many=2)
    refused(r"counts.rows.shape=\[1, 4, 1, 4\]: .*=\[2, 4, 1, 4\] works", replicas=2)
    refused("tokens_per_rank=4: counts hold more", batch=1)
    refused("window=0: must be", window=0)
    refused("window=None: window_layers", config=model(window=3, window_layers=(True, False)))
    refused(r"segment_ids='int64\[2, 15\]': .*int32\[2, 16\]' works", segment_ids=np.zeros((2, 15), int))
    refused(r"segment_ids='float64\[2, 16\]'", segment_ids=np.zeros((2, 16)))
    refused("transport='carrier'", transport="carrier")
    dedup = model(comm=dict(dedup=True, recv_rows_factor=None))
    wide, every = np.zeros((1, 4, 16, 2), int), np.ones((1, 4, 4), int)
    refused(r"context=None: .*=\[1, 4, 4\] works", config=dedup, ids=wide, form="at_expert", batch=4)
    refused(r"context=\[4, 4\]", config=dedup, ids=wide, form="at_expert", batch=4, context=np.zeros((4, 4), int))
    refused("context=.*must be integers from 0", config=dedup, ids=wide, form="at_expert", batch=4, context=-every)
    refused("window=3: .*window=None works", config=dedup, ids=wide, form="at_expert", batch=4, window=3)
    refused("sequence=0", config=dedup, ids=wide, form="at_expert", batch=4, sequence=0)
    refused("context='given': form 'parallel' counts .*; context=None works", context=every)
    sharded = dataclasses.replace(model(), moe=dataclasses.replace(model().moe, shard_sequence=False))
    refused("shard_sequence=False", config=sharded)
    with pytest.raises(ConfigError, match=r"counts=\['NoneType'\]"):
        block_ledger(model(), None, batch=2, sequence=16, ranks=4)
    assert keys_sent(window=10**12) == keys_sent()
