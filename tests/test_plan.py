"""The integer plan against a NumPy oracle written in loops, exactly, on seeded random and hostile routings."""

import functools
import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import CommConfig
from jax_ep import plan as planning
from jax_ep.plan import Geometry

NOWHERE = 10**6

# (tokens, top_k, experts, ranks, quota): one pair's worst case, one more than fits, one row, everything between.
SHAPES = [
    (6, 2, 8, 4, 12),
    (6, 2, 8, 4, 6),
    (6, 2, 8, 4, 1),
    (5, 1, 4, 2, 3),
    (1, 3, 8, 8, 2),
    (7, 3, 6, 2, 5),
    (4, 4, 4, 4, 3),
    (9, 2, 16, 8, 4),
]
CASES_EACH = 40  # 8 shapes x 2 layouts x 40 = 640 routings


def draw(rng: np.random.Generator, shape: tuple[int, ...], kind: int) -> np.ndarray:
    """Expert ids [R, T, K] of one kind of routing."""
    tokens, top_k, experts, ranks, _ = shape
    distinct = np.stack([rng.permutation(experts)[:top_k] for _ in range(ranks * tokens)]).reshape(ranks, tokens, top_k)
    local = experts // ranks
    if kind == 0:
        return distinct
    if kind == 1:  # everything to one expert, the same one K times
        return np.full_like(distinct, rng.integers(experts))
    if kind == 2:  # everything to one rank
        return rng.integers(local, size=distinct.shape) + local * rng.integers(ranks)
    if kind == 3:  # one rank sends nothing
        distinct[rng.integers(ranks)] = NOWHERE
        return distinct
    if kind == 4:  # one rank receives nothing
        idle = rng.integers(ranks)
        return np.where(distinct // local == idle, NOWHERE, distinct)
    if kind == 5:  # nothing at all
        return np.full_like(distinct, NOWHERE)
    if kind == 6:  # one pair holds all rows
        only = np.full_like(distinct, NOWHERE)
        only[rng.integers(ranks)] = rng.integers(local, size=(tokens, top_k)) + local * rng.integers(ranks)
        return only
    skewed = rng.zipf(1.5, size=distinct.shape) % experts
    return np.where(rng.random(distinct.shape) < 0.3, NOWHERE, skewed)


def oracle(experts: np.ndarray, g: Geometry) -> dict[str, list]:
    """Everything about every rank and round, written as loops over rows."""
    n, share = g.assignments, g.num_experts // (g.ranks * g.messages)  # experts of a message
    places = [(d, m) for d in range(g.ranks) for m in range(g.messages)]
    order, runs, message_rows = [], [], {}
    for s in range(g.ranks):
        flat = experts[s].reshape(-1)
        keyed = sorted(range(n), key=lambda a, flat=flat: (min(flat[a], g.num_experts), a))
        order.append(keyed)
        for d, m in places:
            mine = [a for a in keyed if flat[a] < g.num_experts and flat[a] // share == d * g.messages + m]
            message_rows[s, d, m] = mine
        runs.append([sum(len(message_rows[s, d, m]) for m in range(g.messages)) for d in range(g.ranks)])
    sources = range(g.ranks)
    arrival = {
        d: [(s, a) for m in range(g.messages) for s in sources for a in message_rows[s, d, m]] for d in range(g.ranks)
    }
    if g.ragged:
        rounds = max(1, max(-(-len(arrival[d]) // g.recv_rows) for d in range(g.ranks)))
    else:
        rounds = max(1, max(-(-len(rows) // g.quota) for rows in message_rows.values()))
    assert rounds <= g.max_rounds
    steps = []
    for i in range(min(rounds + 1, g.max_rounds)):  # one more than needed must be empty
        away = [dict() for _ in range(g.ranks)]  # receive slot -> (source, assignment)
        for d in range(g.ranks):
            if g.ragged:
                for c, row in enumerate(arrival[d][i * g.recv_rows : (i + 1) * g.recv_rows]):
                    away[d][c] = row
                continue
            for s in sources:
                for m in range(g.messages):
                    for j, a in enumerate(message_rows[s, d, m][i * g.quota : (i + 1) * g.quota]):
                        away[d][(s * g.messages + m) * g.quota + j] = (s, a)
        steps.append(away)
    pairs = {(s, d): [a for m in range(g.messages) for a in message_rows[s, d, m]] for s in sources for d in sources}
    return {"order": order, "runs": runs, "pairs": pairs, "rounds": rounds, "steps": steps}


@functools.cache
def compiled(g: Geometry):
    @jax.jit
    def run(experts):
        ranks = jnp.arange(g.ranks, dtype=jnp.int32)
        plans = jax.vmap(lambda e, r: planning.start_plan(e, g, r, None))(experts, ranks)
        if g.ragged:
            plans = jax.vmap(planning.finish_ragged, (0, None))(plans, plans.counts)
        else:
            heads = jax.vmap(planning.header)(plans)  # [source, destination, L + 1]
            plans = jax.vmap(planning.finish_all_to_all)(plans, heads.swapaxes(0, 1))
        return plans

    @jax.jit
    def step(plans, i):
        home = jax.vmap(lambda p: planning.home(p, i))(plans)
        away = jax.vmap(lambda p: planning.away(p, i))(plans)
        if not g.ragged:
            return home, away, None
        return home, away, planning.travel(plans.pair_counts[0], g.recv_rows, i)

    return run, step


def check(experts: np.ndarray, g: Geometry) -> int:
    want = oracle(experts, g)
    run, step = compiled(g)
    plans = run(jnp.asarray(experts, jnp.int32))
    n, local = g.assignments, g.local_experts
    np.testing.assert_array_equal(plans.order, want["order"])
    np.testing.assert_array_equal(np.asarray(plans.counts).sum(2), want["runs"])
    np.testing.assert_array_equal(plans.rounds, [want["rounds"]] * g.ranks)
    for r in range(g.ranks):
        np.testing.assert_array_equal(np.asarray(plans.order[r])[plans.position[r].reshape(-1)], np.arange(n))
        for s in range(g.ranks):
            ids = [experts[s].reshape(-1)[a] for a in want["pairs"][s, r]]
            np.testing.assert_array_equal(plans.recv_counts[r, s], [ids.count(r * local + e) for e in range(local)])
    for i, away in enumerate(want["steps"]):
        got_home, got_away, way = jax.tree.map(np.asarray, step(plans, jnp.int32(i)))
        slot_of = {(s, a): (d, c) for d in range(g.ranks) for c, (s, a) in away[d].items()}
        for r in range(g.ranks):
            flat = experts[r].reshape(-1)
            # Away: rows in (expert, source, arrival) order, then nothing.
            rows = sorted(away[r], key=lambda c, r=r: (experts[away[r][c][0]].reshape(-1)[away[r][c][1]], c))
            np.testing.assert_array_equal(got_away.index[r], rows + [g.recv_rows] * (g.recv_rows - len(rows)))
            ids = [experts[s].reshape(-1)[a] - r * local for s, a in away[r].values()]
            np.testing.assert_array_equal(got_away.group_sizes[r], [ids.count(e) for e in range(local)])
            # Home: where each assignment stands, if it travels now, and the other way round.
            sent = [a for a in range(n) if (r, a) in slot_of]
            if g.ragged:
                expect_slot = [want["order"][r].index(a) if a in sent else g.home_rows for a in range(n)]
                known = sum(f < g.num_experts for f in flat)
                expect_rows = want["order"][r][:known] + [n] * (n - known)
            else:
                pair = g.messages * g.quota
                where = {a: slot_of[r, a][0] * pair + slot_of[r, a][1] % pair for a in sent}
                expect_slot = [where.get(a, g.home_rows) for a in range(n)]
                expect_rows = [n] * g.home_rows
                for a, c in where.items():
                    expect_rows[c] = a
            np.testing.assert_array_equal(got_home.slot[r].reshape(-1), expect_slot)
            np.testing.assert_array_equal(got_home.assignment[r], expect_rows)
        if g.ragged:
            check_travel(way, got_home, away, g)
    return 1


def check_travel(way, home, away, g: Geometry) -> None:
    """Copying run by run must fill exactly the away buffers; the way back is the same with its ends turned."""
    for d in range(g.ranks):
        buffer = {}
        for s in range(g.ranks):
            for m in range(g.messages):
                size, out, into = (int(a[s, d, m]) for a in way)
                for j in range(size):
                    buffer[into + j] = (s, home.assignment[s, out + j])
                assert 0 <= out <= g.home_rows - size
                assert 0 <= into <= g.recv_rows - size
        assert buffer == away[d]
    back = way.turned()
    for turned, wanted in zip(back, (way.sizes, way.into, way.out), strict=True):
        np.testing.assert_array_equal(turned, np.swapaxes(wanted, 0, 1))


@pytest.mark.parametrize("transport", ["ragged", "all_to_all"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plan_equals_oracle(shape, transport):
    g = Geometry(*shape, transport=transport)
    seed = 1000 * SHAPES.index(shape)
    rng = np.random.default_rng(seed)
    checked = sum(check(draw(rng, shape, i % 8), g) for i in range(CASES_EACH))
    assert checked == CASES_EACH, seed


@pytest.mark.parametrize("transport", ["ragged", "all_to_all"])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[5], SHAPES[7]], ids=str)
@pytest.mark.parametrize("own", [True, False])
def test_plan_of_a_message_an_expert_and_without_own_rows(shape, transport, own):
    g = Geometry(*shape, transport=transport, messages=shape[2] // shape[3], own=own)
    rng = np.random.default_rng(SHAPES.index(shape))
    for i in range(24):
        experts = draw(rng, shape, i % 8)
        if not own:
            mine = experts // g.local_experts == np.arange(g.ranks)[:, None, None]
            experts = np.where(mine, NOWHERE, experts)
        check(experts, g)


@pytest.mark.parametrize("over", [-1, 0, 1])
@pytest.mark.parametrize("transport", ["ragged", "all_to_all"])
def test_rounds_turn_exactly_at_the_quota(transport, over):
    """One row under, at and over what a round holds."""
    g = Geometry(tokens=12, top_k=1, num_experts=4, ranks=2, quota=4, transport=transport)
    experts = np.full((2, 12, 1), NOWHERE)
    rows = 4 + over if transport == "all_to_all" else 8 + over
    experts[0, :rows] = 2
    check(experts, g)
    run, _ = compiled(g)
    assert int(run(jnp.asarray(experts, jnp.int32)).rounds[0]) == (2 if over > 0 else 1)


@pytest.mark.parametrize(
    ("most", "balanced", "factor", "want"),
    [
        (16, 4, None, 16),
        (16, 4, 1.0, 4),
        (16, 4, 1.1, 5),
        (16, 4, 0.001, 1),
        (16, 4, 99.0, 16),
        (1, Fraction(1, 8), 2.0, 1),
        (7, Fraction(7, 2), 0.5, 2),
        (10, Fraction(10, 3), 0.3, 1),
        (10, Fraction(10, 3), 0.6, 2),
    ],
)
def test_quota(most, balanced, factor, want):
    assert planning.quota(most, Fraction(balanced), factor) == want


@pytest.mark.parametrize(
    ("comm", "transport", "want"),
    [
        # T=12 K=2 E=8 R=4: 24 assignments, 6 a pair, 3 an expert; U = 4 * (1 - C(6,2) / C(8,2)) = 13/7 rows a token
        (dict(recv_rows_factor=1.5), "all_to_all", (9, 36, 36, 3)),
        (dict(recv_rows_factor=1.5), "ragged", (9, 24, 36, 3)),
        (dict(recv_rows_factor=None), "ragged", (24, 24, 96, 1)),
        (dict(recv_rows_factor=1.5, messages="expert"), "all_to_all", (5, 40, 40, 5)),
        (dict(recv_rows_factor=1.5, messages="expert"), "ragged", (9, 24, 36, 3)),
        (dict(recv_rows_factor=1.5, dedup=True), "all_to_all", (9, 36, 36, 2)),
        (dict(recv_rows_factor=1.5, dedup=True), "ragged", (9, 24, 36, 2)),
        (dict(recv_rows_factor=None, dedup=True), "all_to_all", (12, 48, 48, 1)),
        (dict(recv_rows_factor=1.5, num_chunks=2), "ragged", (9, 24, 36, 2)),
    ],
    ids=str,
)
def test_geometry(comm, transport, want):
    g = planning.geometry(CommConfig(**comm), 12, 2, 8, 4, transport)
    assert (g.quota, g.home_rows, g.recv_rows, g.max_rounds) == want
    assert g.num_experts == (4 if g.top_k == 2 and comm.get("dedup") else 8)


@pytest.mark.parametrize(("experts", "top_k", "ranks"), [(8, 2, 2), (6, 3, 3), (4, 4, 2), (6, 1, 2), (4, 2, 4)])
def test_rows_a_token_counts_all_draws(experts, top_k, ranks):
    """Every set of K experts, counted."""
    draws = list(itertools.combinations(range(experts), top_k))
    rows = sum(len({e // (experts // ranks) for e in draw}) for draw in draws)
    assert planning.rows_a_token(experts, top_k, ranks) == Fraction(rows, len(draws))


@pytest.mark.parametrize(("tokens", "chunks", "want"), [(8, 3, (3, 3, 2)), (2, 4, (1, 1)), (5, 1, (5,)), (0, 3, (0,))])
def test_pieces(tokens, chunks, want):
    assert planning.pieces(tokens, chunks) == want


@pytest.mark.parametrize("largest", [6, 2**31 // 50 - 1, 2**31 // 50, 2**31 - 2])
def test_stable_order(largest):
    """Also where key and place do not fit one int32 together."""
    keys = np.random.default_rng(0).integers(0, 7, 50)
    keys[::9] = largest
    want = np.argsort(keys, kind="stable")
    np.testing.assert_array_equal(planning.stable_order(jnp.asarray(keys, jnp.int32), largest), want)


def test_segment_index_with_empty_runs():
    sizes, starts = jnp.array([0, 2, 0, 0, 3, 0], jnp.int32), jnp.array([9, 5, 1, 7, 0, 2], jnp.int32)
    np.testing.assert_array_equal(planning.segment_index(sizes, starts, 8), [5, 6, 0, 1, 2, 8, 8, 8])


def test_lay_runs_with_gaps_and_empty_runs():
    rows = jnp.arange(1.0, 7.0)[:, None]
    sizes, starts, targets = [jnp.array(a, jnp.int32) for a in ([0, 2, 0, 3], [9, 4, 1, 0], [1, 1, 3, 5])]
    np.testing.assert_array_equal(planning.lay_runs(rows, sizes, starts, targets, 9)[:, 0], [0, 5, 6, 0, 0, 1, 2, 3, 0])


def test_capacity_keeps_the_first_in_token_order():
    experts = jnp.array([[0, 1], [0, 9], [1, 0], [0, 1]], jnp.int32)
    kept = planning.kept_under_capacity(experts, 2, jnp.array([1, 0], jnp.int32), 3)
    np.testing.assert_array_equal(kept, [[True, True], [True, False], [True, False], [False, True]])


@pytest.mark.parametrize(("factor", "want"), [(0.004, 1), (1e-9, 1), (0.01, 1), (1.0, 2), (0.75, 2), (99.0, 8)])
def test_capacity_is_never_nothing(factor, want):
    """Of 8 tokens of one choice over 4 experts."""
    assert planning.capacity(factor, 8, 1, 4) == want
