"""Which key/value rows travel, against loops over (query, key) pairs: what is sent is exactly what some query of
another rank reads, and every index says where it stands.

Letters: B sequences, S positions, R ranks, s = S/R positions of a rank, Z places for received rows of a sequence.
"""

import functools
import re
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ep import ConfigError
from jax_ep.aot import count_collectives, host_calls
from jax_ep.block import ranges
from jax_ep.block.ranges import LAYOUTS, SPLITS, counts_of, plan_kv, positions, reorder

S = 32
RANKS = (1, 2, 4, 8)


def owners(split: str, sequence: int, ranks: int) -> np.ndarray:
    """[S], the rank of each position."""
    if split == "contiguous":
        return np.arange(sequence) // (sequence // ranks)
    chunk = np.arange(sequence) // (sequence // (2 * ranks))
    return np.minimum(chunk, 2 * ranks - 1 - chunk)


def reads(split: str, ranks: int, window: int | None, segments: np.ndarray) -> dict[tuple[int, int], set]:
    """(home, away) -> the (sequence, position) that queries of `away` read of `home`, pair by pair."""
    owner, found = owners(split, segments.shape[1], ranks), defaultdict(set)
    for b, ids in enumerate(segments):
        for q in range(len(ids)):
            for k in range(q, -1, -1):
                if ids[k] != ids[q] or (window is not None and q - k >= window):
                    break  # runs and windows have no holes
                found[owner[k], owner[q]].add((b, k))
    return found


def remote_counts(found: dict[tuple[int, int], set], ranks: int) -> np.ndarray:
    return np.array([[len(found[h, a]) if h != a else 0 for a in range(ranks)] for h in range(ranks)])


def segment_cases(batch: int, share: int) -> dict[str, np.ndarray | None]:
    """[B, S] each; ids come again later, so that only borders can tell documents apart."""
    at = np.arange(S)
    one = {
        "none": None,
        "crossing borders": (at >= share // 2 + 1) + (at >= share + share // 2) + (at >= S - 3),
        "ending on borders": at // share,
        "single ones": np.isin(at, (share - 1, share, S // 2 + 1, S - 1)),
        "all of length 1": at,
        "same ids again": at // 3 % 2,
    }
    rolled = lambda a: np.stack([np.roll(a, 5 * b) for b in range(batch)]).astype(np.int32)
    return {name: None if a is None else rolled(a) for name, a in one.items()}


def windows(share: int) -> list[int | None]:
    return [None, 1, 3, share, share + 1, S + 9]


def as_segments(segments: np.ndarray | None, batch: int) -> np.ndarray:
    return np.zeros((batch, S), np.int32) if segments is None else segments


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("split", SPLITS)
def test_counts_are_rows_that_remote_queries_read(split, ranks, batch):
    for name, segments in segment_cases(batch, S // ranks).items():
        for window in windows(S // ranks):
            want = remote_counts(reads(split, ranks, window, as_segments(segments, batch)), ranks)
            got = counts_of(split, batch, S, ranks, window, segments)
            np.testing.assert_array_equal(got, want, err_msg=f"{name}, window {window}")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_counts_of_drawn_documents(data):
    split, ranks = data.draw(st.sampled_from(SPLITS)), data.draw(st.integers(1, 6))
    sequence = 2 * ranks * data.draw(st.integers(1, 4))
    window = data.draw(st.none() | st.integers(1, sequence + 1))
    ids = st.lists(st.integers(-1, 1), min_size=sequence, max_size=sequence)
    segments = np.array(data.draw(st.lists(ids, min_size=1, max_size=2)), np.int32)
    want = remote_counts(reads(split, ranks, window, segments), ranks)
    np.testing.assert_array_equal(counts_of(split, len(segments), sequence, ranks, window, segments), want)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_fractions_of_an_all_gather(ranks):
    batch = 3
    gathered = batch * S * (ranks - 1)
    contiguous, zigzag = (counts_of(split, batch, S, ranks) for split in SPLITS)
    assert 2 * contiguous.sum() == gathered
    assert 4 * zigzag.sum() == 3 * gathered
    share = batch * S // ranks
    np.testing.assert_array_equal(contiguous.sum(0), share * np.arange(ranks))  # the last rank receives everything
    np.testing.assert_array_equal(2 * zigzag.sum(0), share * (2 * ranks - 2 - np.arange(ranks)))
    np.testing.assert_array_equal(counts_of("zigzag", batch, S, ranks, window=2**40), zigzag)


@functools.cache
def plans(split: str, ranks: int, batch: int, layout: str, window: int | str | None):
    """The plans of all ranks at once; window "traced": an input."""

    def of_all(window_input, segments):
        own = window_input if window == "traced" else window
        one = lambda rank: plan_kv(split, batch, S, ranks, rank, window=own, segments=segments, layout=layout)
        return jax.vmap(one)(jnp.arange(ranks))

    return jax.jit(of_all)


def check_plan(split, ranks, batch, layout, window, segments, plan):
    """Every array of the plans against rows carried one at a time."""
    found = reads(split, ranks, window, as_segments(segments, batch))
    owner, share = owners(split, S, ranks), S // ranks
    own = [[p for p in range(S) if owner[p] == r] for r in range(ranks)]
    counts = remote_counts(found, ranks)
    np.testing.assert_array_equal(plan.counts, np.broadcast_to(counts, (ranks, ranks, ranks)))
    if plan.runs is not None:
        steps = np.diff(as_segments(segments, batch), prepend=as_segments(segments, batch)[:, :1])
        np.testing.assert_array_equal(plan.runs[0], np.cumsum(steps != 0, 1))
    home_rows, away_rows, places = plan.home.shape[1], plan.arrived.shape[1], plan.source.shape[2]
    away = np.full((ranks, away_rows, 2), -1)  # (sequence, position) of each row
    for h in range(ranks):
        np.testing.assert_array_equal(plan.positions[h], own[h])
        rows = [(row // share, own[h][row % share]) if row < batch * share else (-1, -1) for row in plan.home[h]]
        stands = {}
        for d in range(ranks):
            begin, into = d * home_rows // ranks, h * away_rows // ranks
            if layout == "ragged":
                begin, into = counts[h, :d].sum(), counts[:h, d].sum()
            run = rows[begin : begin + counts[h, d]]
            assert len(set(run)) == counts[h, d]
            assert h == d or set(run) == found[h, d]  # sent is read
            away[d, into : into + counts[h, d]] = np.array(run).reshape(-1, 2)
            stands |= {begin + i: (d, row) for i, row in enumerate(run)}
        assert {i for i, row in enumerate(rows) if row[0] >= 0} == set(stands)
        for d in range(ranks):
            for row, at in enumerate(plan.slot[h, d]):
                here = (row // share, own[h][row % share])
                if h != d and here in found[h, d]:
                    assert stands[at] == (d, here)
                else:
                    assert at == home_rows
    for d in range(ranks):
        wanted = set().union(*(rows for (h, a), rows in found.items() if a == d and h != d))
        got = set()
        for b in range(batch):
            filled = plan.source[d, b] < away_rows
            for z in np.flatnonzero(filled):
                row = plan.source[d, b, z]
                assert tuple(away[d, row]) == (b, plan.away_positions[d, b, z])
                assert plan.arrived[d, row] == b * places + z
                got.add((b, int(plan.away_positions[d, b, z])))
            assert (plan.away_positions[d, b][~filled] == S).all()
            assert (plan.source[d, b][~filled] == away_rows).all()
            first = plan.away_positions[d, b, : plan.regions[0]]
            if split == "zigzag":  # region 0: what queries of the first chunk may see
                assert (first[first < S] < S // 2).all() and (plan.away_positions[d, b, len(first) :] >= S // 2).all()
        assert got == wanted
        np.testing.assert_array_equal(plan.arrived[d] < batch * places, away[d, :, 0] >= 0)
        assert (plan.arrived[d] <= batch * places).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("ranks", "batch"), [(1, 2), (2, 3), (4, 1), (8, 3)])
@pytest.mark.parametrize("split", SPLITS)
def test_indices_say_where_each_row_stands(split, ranks, batch, layout):
    share = S // ranks
    program = plans(split, ranks, batch, layout, "traced")
    for i, (name, segments) in enumerate(segment_cases(batch, share).items()):
        for window in windows(share)[i % 2 :: 2]:
            plan = program(jnp.int32(2**30 if window is None else window), as_segments(segments, batch))
            plan = jax.tree.map(np.asarray, plan)
            check_plan(split, ranks, batch, layout, window, segments, plan)
            np.testing.assert_array_equal(plan.counts[0], counts_of(split, batch, S, ranks, window, segments), name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("split", SPLITS)
def test_a_static_window_makes_buffers_smaller(split, layout):
    ranks, batch = 4, 3
    sizes = []
    for window in (1, 5):
        plan = jax.tree.map(np.asarray, plans(split, ranks, batch, layout, window)(None, None))
        check_plan(split, ranks, batch, layout, window, None, plan)
        pairs = counts_of(split, batch, S, ranks, window)
        if layout == "ragged":
            exact = pairs.sum(1).max(), pairs.sum(0).max()
        else:
            exact = (ranks * pairs.max(),) * 2
        least = 1 if layout == "ragged" else ranks
        sizes.append((plan.home.shape[1], plan.arrived.shape[1]))
        assert sizes[-1] == tuple(max(least, n) for n in exact)  # room for every row, and for no more
        assert plan.runs is None
    whole = ranges.rooms(split, batch, S, ranks, None, layout)
    assert sizes[0] < sizes[1] < whole[:2]
    wide = jax.eval_shape(lambda: plan_kv(split, batch, S, ranks, 0, window=S + 9, layout=layout))
    assert wide.home.shape == (whole.home,)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("split", SPLITS)
def test_positions_and_the_order_of_whole_arrays(split, ranks):
    shares = np.stack([positions(split, S, ranks, jnp.int32(r)) for r in range(ranks)])
    assert shares.dtype == np.int32
    for rank, share in enumerate(shares):
        np.testing.assert_array_equal(share, np.flatnonzero(owners(split, S, ranks) == rank))
    x = jnp.arange(3 * S * 2).reshape(3, S, 2)
    for axis, a in ((1, x), (-2, x), (0, x[0]), (-1, x[..., 0])):
        moved = reorder(a, split, ranks, axis)
        np.testing.assert_array_equal(moved, np.take(np.asarray(a), shares.reshape(-1), axis))
        np.testing.assert_array_equal(reorder(moved, split, ranks, axis, inverse=True), a)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("split", SPLITS)
def test_lowered_plan_has_no_loop_and_no_collective(split, layout):
    f = jax.jit(lambda rank, window, ids: plan_kv(split, 2, S, 4, rank, window=window, segments=ids, layout=layout))
    traced = f.trace(jnp.int32(0), jnp.int32(3), jnp.zeros((2, S), jnp.int32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert not re.findall(r"stablehlo\.(while|case|if|sort)\b", text)
    assert not host_calls(text) and not any(sum(c) for c in count_collectives(text).values())


ids = jnp.zeros((2, 16), jnp.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "striped"}, "split='striped': must be one of contiguous, zigzag; split='zigzag' works"),
        ({"sequence": 18}, "sequence=18: contiguous over 4 ranks cuts it into 4 equal chunks; sequence=20 works"),
        (
            {"split": "zigzag", "sequence": 12},
            "sequence=12: zigzag over 4 ranks cuts it into 8 equal chunks; sequence=16 works",
        ),
        ({"sequence": 0}, "sequence=0: must be an integer of at least 1; sequence=4 works"),
        ({"ranks": 0}, "ranks=0: must be an integer of at least 1; ranks=4 works"),
        ({"batch": 0}, "batch=0: must be an integer of at least 1; batch=1 works"),
        ({"window": 0}, "window=0: must be an integer of at least 1; window=16 works"),
        ({"window": 2.0}, "window=2.0: must be an integer of at least 1; window=16 works"),
        ({"layout": "all_gather"}, "layout='all_gather': must be one of ragged, all_to_all; layout='all_to_all' works"),
        (
            {"segments": ids[:1]},
            "segments='int32[1, 16]': must be integers, one a position; segments='int32[2, 16]' works",
        ),
        (
            {"segments": ids * 1.0},
            "segments='float32[2, 16]': must be integers, one a position; segments='int32[2, 16]' works",
        ),
    ],
)
def test_refusals(change, message):
    given = {"split": "contiguous", "batch": 2, "sequence": 16, "ranks": 4, "rank": 0, "layout": "ragged"}
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        plan_kv(**(given | change))
    ours = {k: v for k, v in (given | change).items() if k not in ("rank", "layout")}
    if "layout" not in change:
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            counts_of(**ours)


def test_more_refusals():
    with pytest.raises(ConfigError, match=r"^sequence=10: zigzag over 2 ranks cuts it into 4 equal chunks"):
        reorder(jnp.zeros((2, 10)), "zigzag", 2, 1)
    with pytest.raises(ConfigError, match=r"^sequence=10: contiguous over 4 ranks cuts it into 4 equal chunks"):
        positions("contiguous", 10, 4, 0)
    for rank in (4, -1, np.int64(7)):
        with pytest.raises(ConfigError, match=r"^rank=.*must be below ranks=4, from 0; rank=0 works"):
            plan_kv("zigzag", 1, 16, 4, rank, layout="ragged")
        with pytest.raises(ConfigError, match=r"^rank="):
            positions("zigzag", 16, 4, rank)
    for window in (jnp.float32(2.5), jnp.array([1, 2])):
        with pytest.raises(ConfigError, match=r"^window='.*must be one integer; window='int32\[\]' works"):
            plan_kv("zigzag", 1, 16, 4, 0, window=window, layout="ragged")
    assert ranges.rooms("zigzag", 1, 16, 1, None, "ragged") == (1, 1, (1, 0))  # one rank: nothing to send, legal shapes
