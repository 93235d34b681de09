"""Attention in pieces, of rows that are spread over ranks, against the models' attention on whole sequences: values and
gradients. Rows that nobody sent are NaN both ways, so that reading one would show.

Letters: B sequences, S positions, R ranks, s = S/R, Z keys, Q query heads, N key/value heads, G = Q/N, D head_dim.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep import CommConfig, ConfigError, MoEConfig, Part, RouterConfig, exchange, make_plan
from jax_ep.aot import count_collectives
from jax_ep.attention import attend
from jax_ep.block.attention import attend_rows, merge
from jax_ep.block.kv import attend_gathered, attend_local, attend_ring, attend_split, kv_part, received
from jax_ep.block.ranges import plan_kv, reorder

D, SCALE = 8, 0.4
FAR = 10**4  # further than any window: what keeps documents apart in the models' attention


def normal(seed: int, *shape: int, dtype="float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def assert_near(got, want, tolerance, name=""):
    """Norm-wise: |a - b| <= tol * max|b|. Gradients that are 0 come out as rounding of sums of order 1."""
    want, got = np.asarray(want, np.float32), np.asarray(got, np.float32)
    assert np.isfinite(got).all(), name
    worst = np.abs(got - want).max()
    assert worst <= tolerance * max(np.abs(want).max(), 0.1), (name, worst, np.abs(want).max())


# --- attend_rows and merge


def dense(queries, keys, values, seen):
    """out [B, S, Q, D] and lse [B, S, Q]; seen [B, S, Z]. 0 and -inf where nothing is seen."""
    b, s, heads, d = queries.shape
    grouped = queries.astype(jnp.float32).reshape(b, s, keys.shape[2], -1, d)
    logits = jnp.einsum("bsngd,bznd->bsngz", grouped, keys.astype(jnp.float32)) * SCALE
    logits = jnp.where(seen[:, :, None, None], logits, -jnp.inf)
    some = seen.any(2)[:, :, None, None]
    lse = jax.nn.logsumexp(jnp.where(some[..., None], logits, 0), -1)
    weights = jnp.where(some[..., None], jnp.exp(logits - lse[..., None]), 0)
    out = jnp.einsum("bsngz,bznd->bsngd", weights, values.astype(jnp.float32))
    return out.reshape(queries.shape), jnp.where(some, lse, -jnp.inf).reshape(b, s, heads)


class Mask(NamedTuple):
    query_positions: np.ndarray
    key_positions: np.ndarray
    query_runs: np.ndarray | None = None
    key_runs: np.ndarray | None = None
    window: int | None = None

    def seen(self, batch: int) -> np.ndarray:
        """[B, S, Z]"""
        q, k = (np.atleast_2d(a) for a in self[:2])
        distance = q[:, :, None] - k[:, None]
        seen = (distance >= 0) & (distance < (FAR if self.window is None else self.window))
        if self.query_runs is not None:
            seen = seen & (self.query_runs[:, :, None] == self.key_runs[:, None])
        return np.broadcast_to(seen, (batch, *seen.shape[1:]))


def masks(batch: int, s: int, z: int) -> dict[str, Mask]:
    rng = np.random.default_rng(5)
    rising = np.arange(s) + z - s
    drawn = rng.integers(0, z, (batch, s)), np.stack([rng.permutation(z) for _ in range(batch)])
    runs = [np.sort(rng.integers(0, 3, (batch, n))) for n in (s, z)]
    return {
        "causal": Mask(rising, np.arange(z)),
        "drawn positions": Mask(*drawn),
        "window": Mask(rising, np.arange(z), window=3),
        "runs": Mask(rising, np.arange(z), *runs),
        "all of it": Mask(*drawn, *runs, 5),
        "nothing is seen": Mask(rising, np.arange(z) + FAR),
        "some see nothing": Mask(np.arange(s), np.arange(z) + s // 2),
    }


@functools.cache
def pulled(f, *static):
    """(out, lse) of `f`, and the gradients through both; lse where nothing is seen takes no part."""

    def run(rows, cotangents, mask):
        def finite(*rows):
            out, lse = f(*rows, mask, *static)
            return (out, jnp.where(lse < -1e30, 0, lse)), lse

        results, pull, lse = jax.vjp(finite, *rows, has_aux=True)
        return *results, lse, *pull(cotangents)

    return jax.jit(run)


def by_blocks(q, k, v, mask, block):
    runs = {"query_runs": mask.query_runs, "key_runs": mask.key_runs, "window": mask.window}
    return attend_rows(q, k, v, mask.query_positions, mask.key_positions, **runs, scale=SCALE, block=block)


@pytest.mark.parametrize(
    ("z", "block", "groups"),
    [(12, 12, 1), (12, 5, 4), (13, 4, 2), (14, 3, 2), (7, 64, 8)],
    ids=["one block", "three", "four, the last cut", "five in a loop, the last cut", "fewer keys than a block"],
)
def test_attend_rows(z, block, groups):
    batch, s, n = 2, 6, 2
    rows = normal(1, batch, s, n * groups, D), normal(2, batch, z, n, D), normal(3, batch, z, n, D)
    cotangents = normal(4, batch, s, n * groups, D), normal(5, batch, s, n * groups)
    cases = masks(batch, s, z)
    keep = cases if block == 3 else {name: cases[name] for name in ("causal", "all of it")}
    for name, mask in keep.items():
        got = pulled(by_blocks, block)(rows, cotangents, mask)
        want = pulled(dense)(rows, cotangents, mask.seen(batch))
        for i in (0, 1, 3, 4, 5):
            assert_near(got[i], want[i], 1e-5, f"{name}: {i}")
        nothing, lse = ~mask.seen(batch).any(2), np.asarray(got[2])
        assert (np.asarray(got[0])[nothing] == 0).all() and np.isfinite(lse).all()
        assert (lse[nothing] < -1e38).all() and (lse[~nothing] > -1e3).all()


def test_bfloat16_rows_with_float32_sums():
    batch, s, n, groups = 2, 16, 2, 2
    q, k, v = (normal(i, batch, s, h, D, dtype="bfloat16") for i, h in enumerate((n * groups, n, n)))
    at = np.arange(s)
    cotangents = normal(4, batch, s, n * groups, D), normal(5, batch, s, n * groups)
    out, lse, _, *gradients = pulled(by_blocks, 6)((q, k, v), cotangents, Mask(at, at))
    want, want_lse, _, *d_want = pulled(dense)((q, k, v), cotangents, Mask(at, at).seen(batch))
    assert out.dtype == lse.dtype == jnp.float32
    assert [g.dtype for g in gradients] == [jnp.bfloat16] * 3
    assert_near(lse, want_lse, 1e-6)  # logits of bfloat16 rows are exact in float32
    assert_near(out, want, 1e-2)
    for a, b in zip(gradients, d_want):
        assert_near(a, b, 2e-2)
    many = jnp.ones((1, 1000, 1, D), jnp.bfloat16)  # bfloat16 sums would stop at 256
    zeros = jnp.zeros((1, 1, 1, D), jnp.bfloat16)
    out, lse = attend_rows(zeros, many, many, np.array([1000]), np.arange(1000), scale=SCALE, block=1000)
    assert_near(out, np.ones(out.shape), 1e-2)
    assert_near(lse, np.full(lse.shape, np.log(1000)), 1e-6)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_merged_pieces_are_the_whole(with_sinks):
    batch, s, z, n, groups = 2, 6, 12, 2, 2
    q, k, v = normal(1, batch, s, n * groups, D), normal(2, batch, z, n, D), normal(3, batch, z, n, D)
    sinks = 3 * normal(4, n * groups) if with_sinks else None
    cuts = [(0, 2), (2, 3), (3, 9), (9, 12)]
    at, there = np.arange(s) + z - s - 1, np.arange(z)[::-1].copy()

    def in_pieces(q, k, v, sinks):
        rows = lambda a, b: attend_rows(q, k[:, a:b], v[:, a:b], at, there[a:b], window=8, scale=SCALE)
        return merge([rows(a, b) for a, b in cuts], sinks)

    def whole(q, k, v, sinks):
        mask = Mask(at, there, window=8).seen(batch)
        out, lse = dense(q, k, v, mask)
        return out if sinks is None else out * jax.nn.sigmoid(lse - sinks.reshape(1, 1, -1))[..., None]

    cotangent = normal(6, batch, s, n * groups, D)

    def with_gradients(f):
        out, pull = jax.vjp(f, q, k, v, sinks)
        return out, *pull(cotangent)[: 3 + with_sinks]

    results = jax.jit(lambda: (with_gradients(in_pieces), with_gradients(whole)))()
    for name, got, want in zip(("out", "queries", "keys", "values", "sinks"), *results):
        assert_near(got, want, 1e-5, name)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_queries_that_see_nothing_give_zeros_and_finite_gradients(with_sinks):
    q, k = normal(1, 1, 3, 2, D), normal(2, 1, 4, 1, D)
    sinks = normal(3, 2) if with_sinks else None

    def f(q, k, v, sinks):
        unseen = attend_rows(q, k, v, np.arange(3), np.arange(4) + 3, scale=SCALE)
        return merge([unseen, unseen], sinks)

    def with_gradients():
        out, pull = jax.vjp(f, q, k, k, sinks)
        return out, pull(jnp.ones_like(out))

    assert all((np.asarray(a) == 0).all() for a in jax.tree.leaves(jax.jit(with_gradients)()))


@pytest.mark.parametrize("loop", [False, True])
def test_temporaries_do_not_grow_with_queries_by_keys(loop):
    """Beside one block [S, block], they grow with S and with Z."""
    block = 64

    def temporaries(s, z):
        def f(q, k, v):
            out, lse = attend_rows(q, k, v, jnp.arange(s) + z - s, jnp.arange(z), scale=SCALE, block=block)
            return jnp.square(out).sum() + lse.sum()

        shapes = [jax.ShapeDtypeStruct((1, n, heads, D), jnp.float32) for n, heads in ((s, 4), (z, 1), (z, 1))]
        program = jax.jit(jax.value_and_grad(f, (0, 1, 2))).lower(*shapes).compile()
        return program.memory_analysis().temp_size_in_bytes

    s, blocks = 256, (8, 32) if loop else (1, 4)
    few, many = (temporaries(s, n * block) for n in blocks)
    rows = 4 * 2 * D * 4 * (blocks[1] - blocks[0]) * block  # keys, values, and their gradients
    logits = 4 * 4 * s * block  # of a block
    unrolled = 0 if loop else 3 * 4 * logits  # a scheduler may keep what several unrolled blocks need
    assert many - few <= rows + unrolled, (few, many)
    assert many < 4 * 4 * s * blocks[1] * block or not loop  # less than one whole [S, Z] of logits
    if loop:
        assert temporaries(2 * s, blocks[1] * block) <= 2.2 * many


# --- Rows spread over ranks


class Rows(NamedTuple):
    """Few, so that cases share the program of the unsharded attention."""

    batch: int
    heads: int
    groups: int


EIGHT, FOUR, ONE = Rows(1, 1, 8), Rows(3, 1, 4), Rows(3, 2, 1)
S = 32


class Case(NamedTuple):
    """window: static, or "traced", then an input; block: keys that stand in memory at a time."""

    form: str
    ranks: int
    split: str
    rows: Rows
    transport: str = "all_to_all"
    window: int | str | None = "traced"
    block: int = 64

    def __str__(self):
        return "-".join(str(x) for x in (*self[:3], *self.rows, *self[4:]))


CASES = [
    Case("split", 1, "zigzag", FOUR),
    Case("split", 2, "contiguous", ONE, "all_gather", None),
    Case("split", 2, "zigzag", EIGHT),
    Case("split", 4, "contiguous", FOUR),
    Case("split", 4, "contiguous", EIGHT, "all_gather", 11),
    Case("split", 4, "zigzag", ONE, "all_gather"),
    Case("split", 4, "zigzag", EIGHT, "all_to_all", 5, block=3),
    Case("split", 8, "contiguous", ONE, "all_to_all", 1),
    Case("split", 8, "contiguous", EIGHT, "all_gather"),
    Case("split", 8, "zigzag", FOUR, "all_gather"),
    Case("gathered", 1, "contiguous", ONE),
    Case("gathered", 2, "contiguous", EIGHT),
    Case("gathered", 4, "zigzag", FOUR),
    Case("gathered", 8, "contiguous", ONE, window=9),
    Case("ring", 1, "contiguous", FOUR),
    Case("ring", 2, "zigzag", ONE),
    Case("ring", 4, "contiguous", FOUR),
    Case("ring", 8, "zigzag", EIGHT),
]


@functools.partial(jax.custom_vjp)
def poison(rows, filled):
    """NaN in rows that nobody's data fills, on the way there and back."""
    return jnp.where(filled[:, None], rows, jnp.nan)


poison.defvjp(
    lambda rows, filled: (poison(rows, filled), filled),
    lambda filled, d: (jnp.where(filled[:, None], d, jnp.nan), None),
)


def rank_body(c: Case, queries, keys, values, sinks, segments, window):
    """One rank's attention [B, s, Q*D]."""
    rank, batch = jax.lax.axis_index("expert"), queries.shape[0]
    layout = "all_to_all" if c.transport == "all_to_all" else "ragged"
    window = window if c.window == "traced" else c.window
    plan = plan_kv(c.split, batch, S, c.ranks, rank, window=window, segments=segments, layout=layout)
    options = {"sinks": sinks, "scale": SCALE, "block": c.block}
    if c.form != "split":
        form = attend_gathered if c.form == "gathered" else attend_ring
        return form(queries, keys, values, plan, "expert", **options)
    rows = None
    if c.ranks > 1:
        config = MoEConfig(4, 4, c.ranks, RouterConfig(1), CommConfig(transport=c.transport))
        tokens = make_plan(jnp.full((2, 1), rank), config, axis_name="expert")
        part = kv_part(keys, values, plan)
        part = part._replace(rows=poison(part.rows, plan.home < queries.shape[0] * queries.shape[1]))
        hidden = Part(jnp.zeros((tokens.geometry.home_rows, 4)))
        (_, part), _ = exchange([hidden, part], tokens, with_counts=True)
        filled = plan.arrived < batch * plan.source.shape[1]
        rows = received(part._replace(rows=poison(part.rows, filled)), plan, c.rows.heads)
    return attend_split(queries, keys, values, rows, plan, **options)


@functools.cache
def spread(c: Case, mesh):
    spec = P(None, "expert")
    arguments = (spec,) * 3 + (P(),) * 3
    body = functools.partial(rank_body, c)
    on_ranks = jax.shard_map(body, mesh=mesh, in_specs=arguments, out_specs=spec, check_vma=False)

    def run(rows, sinks, cotangent, segments, window):
        def whole(rows, sinks):
            rows = [reorder(a, c.split, c.ranks, 1) for a in rows]
            return reorder(on_ranks(*rows, sinks, segments, window), c.split, c.ranks, 1, inverse=True)

        out, pull = jax.vjp(whole, rows, sinks)
        return out, pull(cotangent)

    return jax.jit(run)


@jax.jit
def unsharded(rows, sinks, cotangent, apart, window):
    """`attend` of whole sequences; apart [B, S]: documents further from each other than the window."""

    def whole(rows, sinks):
        return attend(*rows, apart, apart, None, window, sinks, SCALE)

    out, pull = jax.vjp(whole, rows, sinks)
    return out, pull(cotangent)


def segment_cases(c: Case) -> dict[str, np.ndarray]:
    """[B, S] each."""
    at, share = np.arange(S), S // c.ranks
    cases = {
        "one": 0 * at,
        "crossing": (at > share // 2) + (at > share + share // 2) + (at > S - 3),
        "ending on borders": at // share % 2,
        "a single one": (at > share) + (at > share + 1),
        "single ones": at,
    }
    return {n: np.stack([np.roll(a, 3 * b) for b in range(c.rows.batch)]).astype(np.int32) for n, a in cases.items()}


@pytest.mark.parametrize("c", CASES, ids=str)
def test_spread_attention_equals_whole(c, mesh):
    batch, n, q = c.rows.batch, c.rows.heads, c.rows.heads * c.rows.groups
    rows = [normal(i, batch, S, h, D) for i, h in enumerate((q, n, n))]
    sinks, cotangent = normal(3, q), normal(4, batch, S, q * D)
    share = S // c.ranks
    windows = (S + 5, max(1, share - 1), share + 2, share) if c.window == "traced" else (c.window,)
    program = spread(c, mesh(c.ranks))
    for i, (name, segments) in enumerate(segment_cases(c).items()):
        window = windows[i % len(windows)]
        got = program(rows, sinks, cotangent, segments, jnp.int32(window or 0))
        runs = np.cumsum(np.diff(segments, prepend=segments[:, :1]) != 0, 1)
        apart = (np.arange(S) + FAR * runs).astype(np.int32)
        want = unsharded(rows, sinks, cotangent, apart, jnp.int32(window or S))
        said = f"segments {name}, window {window}"
        assert_near(got[0], want[0], 1e-5, said)
        for a, b, what in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), ("q", "k", "v", "sinks")):
            assert_near(a, b, 1e-4, f"{said}: gradient of {what}")


@pytest.mark.parametrize("form", ["split", "gathered", "ring"])
def test_collectives_of_the_forms(form, mesh):
    """Forward and backward, in the lowered program; no segments and no sinks given."""
    c = Case(form, 4, "contiguous", FOUR, window=None)
    spec = P("data", "expert")
    body = lambda q, k, v: rank_body(c, q, k, v, None, None, None)
    f = jax.shard_map(body, mesh=mesh(4), in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    shapes = [jax.ShapeDtypeStruct((3, S, h, D), jnp.float32) for h in (4, 1, 1)]
    forward = jax.jit(f).lower(*shapes).as_text()
    both = jax.jit(lambda *rows: jax.vjp(f, *rows)[1](jnp.zeros((3, S, 4 * D)))).lower(*shapes).as_text()
    count = lambda text: {k: sum(n) for k, n in count_collectives(text).items() if sum(n)}
    kinds = {
        "split": ({"all_to_all": 1}, {"all_to_all": 2}),
        "gathered": ({"all_gather": 1}, {"all_gather": 1, "reduce_scatter": 1}),
        "ring": ({"collective_permute": 3}, {"collective_permute": 6}),
    }
    assert (count(forward), count(both)) == kinds[form]


@pytest.mark.parametrize("window", [None, 4])
def test_local_attention_in_pieces(window):
    """More queries than a block: each piece sees the keys before its end alone, within a static window."""
    batch, s, n, groups = 2, 26, 2, 2
    q, k, v = normal(1, batch, s, n * groups, D), normal(2, batch, s, n, D), normal(3, batch, s, n, D)
    segments = np.sort(np.random.default_rng(0).integers(0, 3, (batch, 2 * s)))
    cotangents = normal(4, batch, s, n * groups, D), normal(5, batch, s, n * groups)

    def local(q, k, v, segments):
        plan = plan_kv("zigzag", batch, 2 * s, 2, 1, window=window, segments=segments, layout="ragged")
        return attend_local(q, k, v, plan, scale=SCALE, block=7)

    got = pulled(local)((q, k, v), cotangents, segments)
    at = np.concatenate([np.arange(13), np.arange(13) + 13]) + 13  # chunks 1 and 2 of 4
    runs = np.cumsum(np.diff(segments, prepend=segments[:, :1]) != 0, 1)[:, at]
    seen = Mask(at, at, runs, runs, window).seen(batch)
    want = pulled(dense)((q, k, v), cotangents, seen)
    for a, b in zip(got, want):
        assert_near(a, b, 1e-5)


def test_result_has_the_queries_dtype():
    q, k, v = (normal(i, 2, 16, h, D, dtype="bfloat16") for i, h in enumerate((4, 2, 2)))

    def on_one_rank(q, k, v):
        plan = plan_kv("contiguous", 2, 16, 1, 0, layout="ragged")
        return attend_split(q, k, v, None, plan, scale=SCALE)

    out = jax.jit(on_one_rank)(q, k, v)
    assert out.dtype == jnp.bfloat16 and out.shape == (2, 16, 4 * D)
    at = np.arange(16)
    assert_near(out, dense(q, k, v, Mask(at, at).seen(2))[0].reshape(out.shape), 1e-2)


def test_rows_that_do_not_go_together_are_refused():
    q, k, at = normal(0, 1, 4, 6, 4), normal(1, 1, 4, 2, 4), jnp.arange(4)
    run = lambda *rows, **how: attend_rows(q, *rows, scale=1.0, **how)
    runs = jnp.zeros((1, 4), jnp.int32)
    four, five, none = normal(1, 1, 4, 4, 4), normal(1, 1, 5, 2, 4), jnp.zeros((1, 0, 2, 4))
    for rows, how, words in (
        ((four, four, at, at), {}, "N dividing 6"),
        ((k, five, at, at), {}, r"keys, values=\[\[1, 4, 2, 4\], \[1, 5, 2, 4\]\]"),
        ((none, none, at, at[:0]), {}, "Z from 1"),
        ((k, k, at, at[:3]), {}, r"key_positions=\[3\]"),
        ((k, k, at, at), {"query_runs": runs}, "query_runs, key_runs='one of them'"),
        ((k, k, at, at), {"key_runs": runs}, "query_runs, key_runs='one of them'"),
        ((k, k, at, at), {"query_runs": runs, "key_runs": runs[0]}, r"key_runs=\[4\]"),
        ((k, k, at, at), {"block": 0}, "block=0"),
    ):
        with pytest.raises(ConfigError, match=words):
            run(*rows, **how)
