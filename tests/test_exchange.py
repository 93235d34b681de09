"""Properties of the packed exchange, bit for bit against NumPy loops: on random meshes, routings, counts, widths and
dtypes every row arrives where it should and goes home again, cotangents travel the other way, nothing that was not
written is read, and everything crosses in one collective.

A program is compiled for each of the CONFIGS; routing, counts, rows and round are inputs. hypothesis draws those,
beside the hostile ones of EXAMPLES: len(CONFIGS) * (len(EXAMPLES) + DRAWN) = 38 * 16 = 608 examples.

Letters: D data replicas, R ranks, T tokens, K top_k, N = T*K, L local experts, M messages a (source, destination), q
rows of a message a round.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jax_ep import ConfigError, Part, exchange, make_mesh
from jax_ep import plan as planning
from jax_ep.aot import count_collectives, host_calls
from jax_ep.plan import Geometry
from jax_ep.transport import share_counts

NOWHERE = 10**6
TRANSPORTS = ("ragged", "all_to_all", "all_gather")
FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8", "int32", "bool", "uint16", "uint8", "int16", "uint32")
WIDE = ("float64", "int64", "uint64")  # with jax_enable_x64


# --- What is static


@dataclasses.dataclass(frozen=True)
class Column:
    """One part. table: 0 where it moves the plan's rows, else 1 + the place of its counts."""

    dtype: str
    width: int
    table: int

    @property
    def floating(self) -> bool:
        return jnp.issubdtype(self.dtype, jnp.floating)

    def bytes(self, rows: int) -> int:
        return rows * self.width * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Config:
    """layouts: (home rows, away rows) of the plan and of each table."""

    geometry: Geometry
    columns: tuple[Column, ...]
    layouts: tuple[tuple[int, int], ...]
    reverse: bool
    replicas: int
    wide: bool

    @property
    def floats(self) -> list[int]:
        return [i for i, c in enumerate(self.columns) if c.floating]

    def rows(self, column: Column, there: bool = False) -> int:
        """Of one rank, on the side that rows start from, or on the other."""
        return self.layouts[column.table][self.reverse != there]

    def __str__(self) -> str:
        g = self.geometry
        columns = ",".join(f"{c.dtype}x{c.width}" + f"@{c.table}" * (c.table > 0) for c in self.columns)
        way = "home" if self.reverse else "away"
        return f"{g.transport}-{self.replicas}x{g.ranks}-m{g.messages}-r{g.max_rounds}-{way}-{columns}"


def draw_config(index: int) -> Config:
    """Every transport on every number of ranks with no table (then in one message or L), with one, with two; at the end
    wide dtypes.
    """
    rng = np.random.default_rng([7, index])
    transport, ranks, tables = TRANSPORTS[index % 3], (4, 2, 8)[index // 3 % 3], (0, 1, 2, 1, 1)[index // 9]
    wide = index >= 36
    tokens, top_k, local = int(rng.integers(1, 7)), int(rng.integers(1, 4)), int(rng.integers(2 - tables // 2, 4))
    assignments = tokens * top_k
    messages = local if not tables and rng.random() < 0.7 else 1
    quota = assignments if rng.random() < 0.25 else int(rng.integers(1, max(2, assignments)))
    g = Geometry(tokens, top_k, local * ranks, ranks, quota, transport, messages)
    layouts = [(g.home_rows, g.recv_rows)]
    for _ in range(tables):
        home = int(rng.integers(1, 10))
        layouts.append((home, int(rng.integers(1, ranks * home))) if g.ragged else (ranks * (home // 2 + 1),) * 2)
    columns = []
    for i in range(max(3 * wide, tables, int(rng.integers(1, 5)))):
        dtypes = FLOATS if i == 0 or rng.random() < 0.4 else INTEGERS
        dtypes = WIDE[i : i + 1] if wide and i < 3 else dtypes
        columns.append(Column(str(rng.choice(dtypes)), int(rng.integers(1, 10)), (i + 1) % (tables + 1)))
    rng.shuffle(columns)
    replicas = 2 if ranks < 8 and rng.random() < 0.3 else 1
    return Config(g, tuple(columns), tuple(layouts), bool(rng.random() < 0.4), replicas, wide)


CONFIGS = [draw_config(i) for i in range(38)]


# --- The library's side


def moved(c: Config, rows, tables, plan, turned=False, **kwargs):
    """The exchange of all parts in the configuration's direction, or the other way."""
    parts = []
    for column, r in zip(c.columns, rows):
        if column.table == 0:
            parts.append(Part(r))
        else:
            capacity = c.rows(column, not turned) if c.geometry.ragged or column.width % 2 else None
            parts.append(Part(r, tables[column.table - 1], capacity))
    parts, plan = exchange(parts, plan, reverse=c.reverse != turned, **kwargs)
    return [p.rows for p in parts], plan


def body(c: Config, ids, step, tables, rows, cotangents, back: bool = True):
    """One rank's rows there; with cotangents also those, at home; with back=True also the rows at home again, and what
    the plan came to know.
    """
    g = c.geometry
    (plan,) = share_counts([planning.start_plan(ids, g, jax.lax.axis_index("expert"), "expert")])
    tables = [t[0] for t in tables]
    kwargs = {} if g.max_rounds == 1 else {"step": step}
    if not g.ragged and c.reverse and back:  # the first dispatch tells
        _, plan = exchange([Part(jnp.zeros((g.home_rows, 1)))], plan, with_counts=True)

    def send(floats):
        given = iter(floats)
        whole = [next(given) if column.floating else r for column, r in zip(c.columns, rows)]
        there, done = moved(c, whole, tables, plan, with_counts=not c.reverse, **kwargs)
        return [there[i] for i in c.floats], (there, done)

    floats = [rows[i] for i in c.floats]
    if not cotangents:
        return send(floats)[1][0]
    _, pull, (there, done) = jax.vjp(send, floats, has_aux=True)
    (gradients,) = pull(list(cotangents))
    if not back:
        return there, gradients
    again, _ = moved(c, there, tables, done, turned=True, **kwargs)
    return there, again, gradients, done.recv_counts, done.rounds[None]


def on_mesh(c: Config, f):
    """ids [D*R*T, K], step, a table [D, R, R] each, rows [D*R*n, width] and cotangents."""
    ranks = P(("data", "expert"))
    mesh = make_mesh(c.geometry.ranks, c.replicas, jax.devices()[: c.geometry.ranks * c.replicas])
    specs = ranks, P(), P("data"), ranks, ranks
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=ranks, check_vma=False))


@functools.cache
def program(c: Config):
    return on_mesh(c, functools.partial(body, c))


def shapes(c: Config, transposed: bool):
    """Arguments of a program, without values."""
    g, everyone = c.geometry, c.replicas * c.geometry.ranks
    ids = jax.ShapeDtypeStruct((everyone * g.tokens, g.top_k), jnp.int32)
    tables = [jax.ShapeDtypeStruct((c.replicas, g.ranks, g.ranks), jnp.int32) for _ in c.layouts[1:]]
    rows, cotangents = (
        [jax.ShapeDtypeStruct((everyone * c.rows(x, there), x.width), x.dtype) for x in c.columns]
        for there in (False, True)
    )
    return ids, jax.ShapeDtypeStruct((), jnp.int32), tables, rows, [cotangents[i] for i in c.floats if transposed]


# --- What to expect, in loops over rows


class Moves(NamedTuple):
    """Rows that travel: home row of a rank <-> away row of a rank; filled: whether the row is anybody's."""

    source: np.ndarray
    home: np.ndarray
    destination: np.ndarray
    away: np.ndarray
    filled: np.ndarray

    @classmethod
    def of(cls, rows: list[tuple[int, int, int, int, bool]]) -> "Moves":
        columns = np.array(rows, int).reshape(-1, 5).T
        return cls(*columns[:4], columns[4].astype(bool))

    def ends(self, reverse: bool):
        """(rank, row) where they start, and where they end."""
        ends = (self.source, self.home), (self.destination, self.away)
        return ends[::-1] if reverse else ends


def plan_moves(ids: np.ndarray, g: Geometry, step: int) -> Moves:
    """ids [R, T, K]."""
    local, share = g.local_experts, g.local_experts // g.messages
    runs = {}  # (source, destination, message) -> home rows of the ragged layout
    for s in range(g.ranks):
        known = sorted(e for e in ids[s].reshape(-1) if e < g.num_experts)
        for d in range(g.ranks):
            for m in range(g.messages):
                runs[s, d, m] = [p for p, e in enumerate(known) if (e // local, e % local // share) == (d, m)]
    rows = []
    for d in range(g.ranks):
        if g.ragged:
            arriving = [(s, p) for m in range(g.messages) for s in range(g.ranks) for p in runs[s, d, m]]
            window = arriving[step * g.recv_rows : (step + 1) * g.recv_rows]
            rows += [(s, p, d, c, True) for c, (s, p) in enumerate(window)]
            continue
        for s in range(g.ranks):
            for m in range(g.messages):
                for j in range(g.quota):
                    home, away = (d * g.messages + m) * g.quota + j, (s * g.messages + m) * g.quota + j
                    rows.append((s, home, d, away, step * g.quota + j < len(runs[s, d, m])))
    return Moves.of(rows)


def table_moves(counts: np.ndarray, layout: tuple[int, int], g: Geometry) -> Moves:
    """counts [R, R]."""
    rows, quota = [], layout[0] // g.ranks
    for s in range(g.ranks):
        for d in range(g.ranks):
            if not g.ragged:
                rows += [(s, d * quota + j, d, s * quota + j, j < counts[s, d]) for j in range(quota)]
                continue
            home, away = counts[s, :d].sum(), counts[:s, d].sum()
            rows += [(s, home + j, d, away + j, True) for j in range(min(counts[s, d], layout[1] - away))]
    return Moves.of(rows)


def carry(rows: np.ndarray, moves: Moves, reverse: bool, length: int) -> np.ndarray:
    """rows [R, n, width] -> [R, length, width], zeros where nothing arrives."""
    start, end = moves.ends(reverse)
    out = np.zeros((rows.shape[0], length, rows.shape[2]), rows.dtype)
    out[end] = rows[start]
    return out


def knows(ids: np.ndarray, g: Geometry) -> tuple[np.ndarray, int]:
    """What a completed plan says: rows for each [destination, source, local expert], and the rounds."""
    sent = np.stack(
        [np.bincount(own[own < g.num_experts], minlength=g.num_experts) for own in ids.reshape(g.ranks, -1)]
    )
    recv = sent.reshape(g.ranks, g.ranks, -1).swapaxes(0, 1)
    fullest = recv.reshape(g.ranks, g.ranks, g.messages, -1).sum(3).max() if not g.ragged else recv.sum((1, 2)).max()
    return recv, max(1, math.ceil(fullest / (g.recv_rows if g.ragged else g.quota)))


# --- What is drawn

SKEWS = ("nothing", "one pair", "under", "exact", "over", "one destination", "uniform", "sparse")
EXAMPLES = [(skew, SKEWS[(3 * i + 1) % 8], i, i % 3) for i, skew in enumerate(SKEWS)]
DRAWN = 8


def draw_ids(rng: np.random.Generator, skew: str, g: Geometry) -> np.ndarray:
    """ids [R, T, K]; under, exact and over: one receiver's rows (on all_to_all one message's) beside whole rounds."""
    shape, n = (g.ranks, g.tokens, g.top_k), g.assignments
    ids = np.full((g.ranks, n), NOWHERE)
    expert, source = int(rng.integers(g.num_experts)), int(rng.integers(g.ranks))
    if skew == "one pair":
        ids[source] = expert
    elif skew == "one destination":
        ids[:] = expert // g.local_experts * g.local_experts + rng.integers(g.local_experts, size=ids.shape)
    elif skew == "uniform":
        ids = rng.integers(g.num_experts, size=ids.shape)
    elif skew == "sparse":
        ids = np.where(rng.random(ids.shape) < 0.5, NOWHERE, rng.zipf(1.5, ids.shape) % g.num_experts)
    elif skew != "nothing":
        rounds = int(rng.integers(1, g.max_rounds + 1))
        rows = rounds * (g.recv_rows if g.ragged else g.quota) + SKEWS.index(skew) - SKEWS.index("exact")
        pool = g.local_experts if g.ragged else g.local_experts // g.messages
        for s in rng.permutation(g.ranks) if g.ragged else [source]:
            here = min(n, rows)
            ids[s, rng.permutation(n)[:here]] = expert // pool * pool + rng.integers(pool, size=here)
            rows -= here
    return ids.reshape(shape)


def draw_counts(rng: np.random.Generator, skew: str, layout: tuple[int, int], g: Geometry) -> np.ndarray:
    """counts [R, R] that fit the home buffers; under, exact and over: one away buffer's rows beside its room (on
    all_to_all a pair's, which never has more than q).
    """
    home, away = layout
    counts = np.zeros((g.ranks, g.ranks), np.int32)
    source, destination = rng.integers(g.ranks, size=2)
    most = home if g.ragged else home // g.ranks  # rows of a pair
    if skew == "one pair":
        counts[source, destination] = most
    elif skew == "one destination":
        counts[:, destination] = most
    elif skew in ("uniform", "sparse"):
        for s in range(g.ranks):
            left = home
            for d in rng.permutation(g.ranks):
                full = skew == "uniform" or rng.random() < 0.4
                counts[s, d] = rng.integers(0, min(most, left) + 1) if full else 0
                left -= counts[s, d]
    elif skew != "nothing":
        rows = (away if g.ragged else most) + SKEWS.index(skew) - SKEWS.index("exact")
        for s in rng.permutation(g.ranks):
            counts[s, destination] = min(most, rows)
            rows -= counts[s, destination] if g.ragged else 0
    return counts


def draw_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """[..., width] of any bits: NaNs with payloads, denormals and negative zeros among them."""
    whole = rng.integers(0, 256, (*shape[:-1], shape[-1] * jnp.dtype(dtype).itemsize), np.uint8)
    return (whole % 2 if dtype == "bool" else whole).view(dtype)


def bits(a) -> np.ndarray:
    return np.ascontiguousarray(a).view(np.uint8)


def check(c: Config, routing: str, counting: str, seed: list[int], step: int) -> None:
    g, rng = c.geometry, np.random.default_rng(seed)
    step %= g.max_rounds + (g.max_rounds > 1)  # one round more than any routing takes moves nothing
    both = c.replicas, g.ranks
    ids = np.stack([draw_ids(rng, routing, g) for _ in range(c.replicas)]).astype(np.int32)
    tables = [np.stack([draw_counts(rng, counting, lay, g) for _ in range(c.replicas)]) for lay in c.layouts[1:]]
    # moves[table][replica]; the plan's is table 0
    moves = [[plan_moves(own, g, step) for own in ids]]
    moves += [[table_moves(t, lay, g) for t in table] for table, lay in zip(tables, c.layouts[1:])]

    rows, cotangents = [], []
    for column in c.columns:
        data = draw_bits(rng, (*both, c.rows(column), column.width), column.dtype)
        for replica, way in enumerate(moves[column.table]):
            rank, row = way.ends(c.reverse)[0]
            unused = np.ones(data.shape[1:3], bool)
            unused[rank[way.filled], row[way.filled]] = False
            bits(data[replica])[unused] = 1 if column.dtype == "bool" else 255  # NaN, -1
        rows.append(data)
        cotangents.append(draw_bits(rng, (*both, c.rows(column, True), column.width), column.dtype))

    with jax.enable_x64(c.wide):
        arguments = ids.reshape(-1, g.top_k), np.int32(step), tables, [r.reshape(-1, r.shape[3]) for r in rows]
        out = program(c)(*arguments, [cotangents[i].reshape(-1, rows[i].shape[3]) for i in c.floats])
        there, again, gradients, recv, rounds = jax.tree.map(np.asarray, out)

    gradients = dict(zip(c.floats, gradients, strict=True))
    for i, column in enumerate(c.columns):
        for replica, way in enumerate(moves[column.table]):
            part = lambda a, replica=replica: a.reshape(*both, -1, a.shape[1])[replica]
            start, end = c.rows(column), c.rows(column, True)
            want = carry(rows[i][replica], way, c.reverse, end)
            label = f"parts[{i}], replica {replica}, step {step}: "
            assert there[i].dtype == again[i].dtype == jnp.dtype(column.dtype)
            np.testing.assert_array_equal(bits(part(there[i])), bits(want), label + "there")
            home_again = carry(want, way, not c.reverse, start)
            np.testing.assert_array_equal(bits(part(again[i])), bits(home_again), label + "and back")
            rank, row = (e[way.filled] for e in way.ends(c.reverse)[0])
            np.testing.assert_array_equal(bits(home_again[rank, row]), bits(rows[i][replica][rank, row]), "the oracle")
            if i in gradients:
                want = carry(cotangents[i][replica], way, not c.reverse, start)
                np.testing.assert_array_equal(bits(part(gradients[i])), bits(want), label + "cotangents")
    for replica in range(c.replicas):
        want_recv, want_rounds = knows(ids[replica], g)
        np.testing.assert_array_equal(recv.reshape(*both, g.ranks, -1)[replica], want_recv, "recv_counts")
        np.testing.assert_array_equal(rounds.reshape(both)[replica], want_rounds, "rounds")


def with_examples(f):
    for values in EXAMPLES:
        f = example(**dict(zip(("routing", "counting", "seed", "step"), values)))(f)
    return f


@pytest.mark.parametrize("index", range(len(CONFIGS)), ids=[f"{i}-{c}" for i, c in enumerate(CONFIGS)])
@settings(derandomize=True, deadline=None, database=None, max_examples=DRAWN)
@given(
    routing=st.sampled_from(SKEWS),
    counting=st.sampled_from(SKEWS),
    seed=st.integers(0, 2**32 - 1),
    step=st.integers(0, 5),
)
@with_examples
def test_every_row_arrives_and_goes_home(index, routing, counting, seed, step):
    check(CONFIGS[index], routing, counting, [seed, index], step)


# --- One collective, and nothing in it but the parts

SEVERAL = [
    c for c in CONFIGS if c.geometry.transport != "all_gather" and (c.geometry.messages > 1 or len(c.columns) > 1)
]


@pytest.mark.parametrize("c", SEVERAL, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_everything_crosses_in_one_collective(c, transposed):
    """Lowered for CUDA. Parts of several dtypes, widths and counts, and their cotangents: one collective each way, on
    all_to_all one a message; beside them the ragged layout's one of counts.
    """
    g = c.geometry
    with jax.enable_x64(c.wide):
        traced = on_mesh(c, functools.partial(body, c, back=False)).trace(*shapes(c, transposed))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    counted = {kind: tuple(count) for kind, count in count_collectives(text).items() if any(count)}
    ways = 2 if transposed else 1
    if g.ragged:
        assert counted == {"ragged_all_to_all": (ways, 0), "all_gather": (1, 0)}
    else:
        assert counted == {"all_to_all": (ways * g.messages, 0)}
    assert host_calls(text) == {}


def collective_bytes(jaxpr, kind: str) -> int:
    """Bytes of the operands of all collectives of a kind in a traced program."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == kind:
            total += eqn.invars[0].aval.size * eqn.invars[0].aval.dtype.itemsize
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            total += collective_bytes(inner, kind) if hasattr(inner, "eqns") else 0
    return total


DENSE = [c for c in CONFIGS if c.geometry.transport == "all_to_all"]


@pytest.mark.parametrize("c", DENSE, ids=str)
def test_all_to_all_carries_the_parts_and_nothing_else(c):
    """Bytes of one rank: the parts, L + 1 integers a destination on the way out, and float parts' cotangents."""
    g = c.geometry
    parts = [column.bytes(c.rows(column)) for column in c.columns]
    header = 0 if c.reverse else 4 * (g.local_experts + 1) * g.ranks
    for transposed in (False, True):
        with jax.enable_x64(c.wide):
            traced = on_mesh(c, functools.partial(body, c, back=False)).trace(*shapes(c, transposed))
        cotangents = sum(parts[i] for i in c.floats) * transposed
        assert collective_bytes(traced.jaxpr.jaxpr, "all_to_all") == sum(parts) + header + cotangents


def test_counts_of_several_plans_cross_in_one_collective():
    """And each plan gets its own."""
    ranks, sizes = 4, (5, 3)
    geometries = [Geometry(tokens, 2, 8, ranks, 2, "ragged") for tokens in sizes]

    def run(*ids):
        rank = jax.lax.axis_index("expert")
        plans = share_counts([planning.start_plan(i, g, rank, "expert") for i, g in zip(ids, geometries)])
        return [(plan.recv_counts, plan.rounds[None]) for plan in plans]

    mesh, spec = make_mesh(ranks, devices=jax.devices()[:ranks]), P("expert")
    f = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 10, (ranks, tokens, 2)).astype(np.int32) for tokens in sizes]
    flat = [i.reshape(-1, 2) for i in ids]
    for own, g, (recv, rounds) in zip(ids, geometries, f(*flat)):
        want, want_rounds = knows(own, g)
        np.testing.assert_array_equal(recv.reshape(want.shape), want)
        np.testing.assert_array_equal(rounds, want_rounds)
    counted = count_collectives(f.trace(*flat).lower(lowering_platforms=("cuda",)).as_text())
    assert {kind: tuple(count) for kind, count in counted.items() if any(count)} == {"all_gather": (1, 0)}


@pytest.mark.parametrize(
    ("part", "messages", "named"),
    [
        (dict(rows=(12, 3), counts=(4, 4), capacity=12), 2, "messages='expert'.*messages='rank' works"),
        (dict(rows=(12, 3), counts=(4, 4), capacity=12.0), 1, r"parts\[0\].capacity"),
        (dict(rows=(12, 0), counts=(4, 4), capacity=12), 1, r"parts\[0\].rows"),
        (dict(rows=(12, 3), counts=(4, 3), capacity=12), 1, r"parts\[0\].counts"),
        (dict(rows=(12, 3), counts=(4, 4), capacity=16), 1, r"parts\[0\] rows and capacity"),
        (dict(rows=(11, 3), counts=(4, 4)), 1, r"parts\[0\] rows and capacity"),
    ],
)
def test_refuses(part, messages, named):
    g = Geometry(6, 2, 8, 4, 2, "all_to_all", messages)
    plan = planning.start_plan(jnp.zeros((6, 2), jnp.int32), g, jnp.int32(0), "expert")
    rows, counts = jnp.zeros(part["rows"]), jnp.zeros(part["counts"], jnp.int32)
    with pytest.raises(ConfigError, match=named):
        exchange([Part(rows, counts, part.get("capacity"))], plan)
