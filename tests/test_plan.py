"""The integer plan against a NumPy oracle written in loops, exactly, on seeded random and hostile routings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
    local, n = g.local_experts, g.assignments
    order, runs, pair_rows = [], [], {}
    for s in range(g.ranks):
        flat = experts[s].reshape(-1)
        keyed = sorted(range(n), key=lambda a, flat=flat: (min(flat[a], g.num_experts), a))
        order.append(keyed)
        for d in range(g.ranks):
            pair_rows[s, d] = [a for a in keyed if flat[a] < g.num_experts and flat[a] // local == d]
        runs.append([len(pair_rows[s, d]) for d in range(g.ranks)])
    arrival = {d: [(s, a) for s in range(g.ranks) for a in pair_rows[s, d]] for d in range(g.ranks)}
    if g.ragged:
        rounds = max(1, max(-(-len(arrival[d]) // g.recv_rows) for d in range(g.ranks)))
    else:
        rounds = max(1, max(-(-len(rows) // g.quota) for rows in pair_rows.values()))
    steps = []
    for i in range(min(rounds + 1, g.max_rounds)):  # one more than needed must be empty
        away = [dict() for _ in range(g.ranks)]  # receive slot -> (source, assignment)
        for d in range(g.ranks):
            if g.ragged:
                for c, row in enumerate(arrival[d][i * g.recv_rows : (i + 1) * g.recv_rows]):
                    away[d][c] = row
            else:
                for s in range(g.ranks):
                    for j, a in enumerate(pair_rows[s, d][i * g.quota : (i + 1) * g.quota]):
                        away[d][s * g.quota + j] = (s, a)
        steps.append(away)
    return {"order": order, "runs": runs, "pairs": pair_rows, "rounds": rounds, "steps": steps}


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
        out = jax.vmap(lambda p: planning.ragged_slices(p, i))(plans)
        return home, away, (out, jax.vmap(lambda p: planning.ragged_slices(p, i, reverse=True))(plans))

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
        got_home, got_away, slices = jax.tree.map(np.asarray, step(plans, jnp.int32(i)))
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
                where = {a: slot_of[r, a][0] * g.quota + slot_of[r, a][1] % g.quota for a in sent}
                expect_slot = [where.get(a, g.home_rows) for a in range(n)]
                expect_rows = [n] * g.home_rows
                for a, c in where.items():
                    expect_rows[c] = a
            np.testing.assert_array_equal(got_home.slot[r].reshape(-1), expect_slot)
            np.testing.assert_array_equal(got_home.assignment[r], expect_rows)
        if g.ragged:
            check_slices(slices, got_home, away, g)
    return 1


def check_slices(slices, home, away, g: Geometry) -> None:
    """Copying slice by slice must fill exactly the away buffers, and bring the rows back to where they stood."""
    (out, back) = slices
    for d in range(g.ranks):
        buffer = {}
        for s in range(g.ranks):
            size = out.send_sizes[s, d]
            assert size == out.recv_sizes[d, s] == back.send_sizes[d, s] == back.recv_sizes[s, d]
            for j in range(size):
                buffer[out.output_offsets[s, d] + j] = (s, home.assignment[s, out.input_offsets[s, d] + j])
            assert size == 0 or back.input_offsets[d, s] == out.output_offsets[s, d]
            assert size == 0 or back.output_offsets[d, s] == out.input_offsets[s, d]
            assert 0 <= out.input_offsets[s, d] <= g.home_rows - size
            assert 0 <= out.output_offsets[s, d] <= g.recv_rows - size
        assert buffer == away[d]


@pytest.mark.parametrize("transport", ["ragged", "all_to_all"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plan_equals_oracle(shape, transport):
    g = Geometry(*shape, transport=transport)
    seed = 1000 * SHAPES.index(shape)
    rng = np.random.default_rng(seed)
    checked = sum(check(draw(rng, shape, i % 8), g) for i in range(CASES_EACH))
    assert checked == CASES_EACH, seed


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
    ("assignments", "ranks", "factor", "want"),
    [
        (16, 4, None, 16),
        (16, 4, 1.0, 4),
        (16, 4, 1.1, 5),
        (16, 4, 0.001, 1),
        (16, 4, 99.0, 16),
        (1, 8, 2.0, 1),
        (7, 2, 0.5, 2),
    ],
)
def test_quota(assignments, ranks, factor, want):
    assert planning.quota(assignments, ranks, factor) == want


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


def test_capacity_keeps_the_first_in_token_order():
    experts = jnp.array([[0, 1], [0, 9], [1, 0], [0, 1]], jnp.int32)
    kept = planning.kept_under_capacity(experts, 2, jnp.array([1, 0], jnp.int32), 3)
    np.testing.assert_array_equal(kept, [[True, True], [True, False], [True, False], [False, True]])
