"""Every path equals the dense one: path x transport x mesh x rounds x shape x routing x what packed can do, values and
gradients.

Cells: every (path, mesh, recv_rows_factor) there is, and for each of them the free options (shape, source, rows,
chunks, wire, capacity) chosen greedily so that every pair of options of different kinds that can meet does
(`test_every_pair_of_options_meets` checks that). A cell is one compiled program; the routing is an input of it, through
a router bias and a mask ("router": the router's own gradient is checked too) or as a Routing ("forced": also several
choices of one token for the same expert). All routings run through every cell.

The dense reference of a wire_dtype gives its experts rounded inputs, with gradients straight through; that of a
capacity_factor leaves out what is past it.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import CommConfig, MoEConfig, RouterConfig, Routing, init_params, make_mesh, moe
from jax_ep import plan as planning
from jax_ep.paths import dense
from jax_ep.routing import route, router_logits
from jax_ep.transport.wire import rounded

H, I = 16, 24
PATHS = ("allgather", "padded", "packed/ragged", "packed/all_to_all", "packed/all_gather")
MESHES = ((1, 1), (2, 1), (4, 1), (8, 1), (4, 2))  # (expert, data)
FACTORS = (None, 2.0, 1.0, 0.5)
# name: (T, E, K); T=29 and E=10 divide by nothing
SHAPES = {"plain": (32, 8, 2), "k1": (32, 8, 1), "k_all": (16, 8, 8), "odd": (29, 10, 3), "t1": (1, 8, 2)}
SOURCES = ("router", "forced")
ROWS = ("rank", "expert", "dedup")  # messages a rank or an expert; one row a (token, rank)
CHUNKS = (1, 3)
WIRES = (None, "int8", "float8_e4m3fn")
CAPACITIES = (None, 0.75)
FREE = (tuple(SHAPES), SOURCES, ROWS, CHUNKS, WIRES, CAPACITIES)
KINDS = (PATHS, MESHES, FACTORS, *FREE)
ROUTINGS = ("even", "zipf", "one_expert", "silent_rank", "idle_rank", "one_pair", "random_mask", "all_masked")


def free_options(path):
    """The free options that a path has."""
    packed = path.startswith("packed")
    capacities = CAPACITIES if path != "allgather" else (None,)
    return (*FREE[:2], *(FREE[2:5] if packed else (("rank",), (1,), (None,))), capacities)


def cells():
    """Cells as above. On one rank the three transports are one program; one stands for all."""
    fixed = []
    for path, mesh in itertools.product(PATHS, MESHES):
        alone = mesh == (1, 1)
        if alone and path in ("packed/all_to_all", "packed/all_gather"):
            continue
        factors = FACTORS if path.startswith("packed") and not alone else (2.0,)
        fixed += [(path, mesh, f) for f in factors]
    fixed += [("packed/ragged", (1, 1), 2.0)] * (len(SHAPES) - 3)  # so that one rank meets every shape
    options = {path: list(itertools.product(*free_options(path))) for path in PATHS}
    wanted = set().union(*(pairs((*f, *o)) for f in set(fixed) for o in options[f[0]]))
    rng = np.random.default_rng(0)
    for _ in range(100):  # greedy in a random order covers everything after a few tries
        met, chosen = set(), []
        for at in rng.permutation(len(fixed)):
            path = fixed[at][0]
            some = [options[path][i] for i in rng.permutation(len(options[path]))[:60]]
            best = max(some, key=lambda o: len(pairs((*fixed[at], *o)) - met))
            met |= pairs((*fixed[at], *best))
            chosen.append((*fixed[at], *best))
        if wanted <= met:
            return sorted(chosen, key=str)
    raise AssertionError(f"no covering found: {sorted(wanted - met, key=str)}")


def pairs(cell):
    return set(itertools.combinations(enumerate(cell), 2))


CELLS = cells()


def test_every_pair_of_options_meets():
    """Counted from the options, not from how the cells were chosen."""
    met = set().union(*(pairs(c) for c in CELLS))
    plain = {2: 2.0, 5: "rank", 6: 1, 7: None}  # what a path that is not packed has
    for (i, some), (j, others) in itertools.combinations(enumerate(KINDS), 2):
        for a, b in itertools.product(some, others):
            one_rank = (1, 1) in (a, b) and ((b == (1, 1) and a in PATHS[3:]) or (j == 2 and b != 2.0))
            not_packed = i == 0 and j in plain and not a.startswith("packed") and b != plain[j]
            dropless = i == 0 and j == 8 and a == "allgather" and b is not None
            assert one_rank or not_packed or dropless or ((i, a), (j, b)) in met, (a, b)


def config(cell):
    path, _, factor, shape, _, rows, chunks, wire, capacity = cell
    _, experts, top_k = SHAPES[shape]
    mode, _, transport = path.partition("/")
    comm = CommConfig(mode=mode, capacity_factor=capacity)
    if mode == "packed":
        kind = {"dedup": True} if rows == "dedup" else {"messages": rows}
        comm = CommConfig(
            transport=transport,
            recv_rows_factor=factor,
            num_chunks=chunks,
            wire_dtype=wire,
            capacity_factor=capacity,
            **kind,
        )
    return MoEConfig(H, I, experts, RouterConfig(top_k, logit_bias=True), comm=comm)


@functools.cache
def inputs(shape):
    tokens = SHAPES[shape][0]
    keys = jax.random.split(jax.random.key(7), 4)
    params = init_params(config(("padded", None, None, shape, None, "rank", 1, None, None)), keys[0])
    x = jax.random.normal(keys[1], (tokens, H))
    return params, x, jax.random.normal(keys[2], (tokens, H))


@functools.cache
def routing(shape, source, name, ranks):
    """(bias [E], mask [T], Routing | None): `ranks` says which tokens and experts are one rank's, as 8 ranks would be
    split.
    """
    tokens, experts, top_k = SHAPES[shape]
    rng = np.random.default_rng(ROUTINGS.index(name))
    token_rank = np.arange(tokens) * ranks // max(tokens, ranks)
    expert_rank = np.arange(experts) // -(-experts // ranks)
    bias, mask = np.zeros(experts), np.ones(tokens, bool)
    if name == "zipf":
        bias = -2.0 * np.log1p(rng.permutation(experts))
    elif name == "one_expert":
        bias[experts // 2] = 60
    elif name == "silent_rank":
        mask = token_rank != token_rank[-1] if tokens > 1 else mask
    elif name == "idle_rank":
        bias[expert_rank == 1] = -60
    elif name == "one_pair":
        mask = token_rank == token_rank[tokens // 2]
        bias[expert_rank == expert_rank[-1]] = 60
    elif name == "random_mask":
        mask = rng.random(tokens) < 0.5
    elif name == "all_masked":
        mask[:] = False
    forced = None
    if source == "forced":
        noise = rng.gumbel(size=(tokens, experts)) + bias
        ids = np.argsort(-noise, 1)[:, :top_k]
        if name == "one_expert":
            ids = np.full_like(ids, experts // 2)  # the same expert K times
        if name == "even":
            ids = (np.arange(tokens * top_k) % experts).reshape(tokens, top_k)
        forced = Routing(jnp.asarray(ids, jnp.int32), jnp.asarray(rng.random(ids.shape), jnp.float32))
    return jnp.asarray(bias, jnp.float32), jnp.asarray(mask), forced


def with_gradients(layer, shape):
    """Jitted (params, x, cotangent, bias, mask, forced) -> (y, stats, gradients); `layer` gives y and stats."""

    @jax.jit
    def run(params, x, cotangent, bias, mask, forced):
        def loss(params, x, weights):
            params = {**params, "router": {**params["router"], "bias": params["router"]["bias"] + bias}}
            used = None if forced is None else forced._replace(weights=weights)
            y, stats = layer(params, x, mask, used)
            return (y * cotangent).sum(), (y, stats)

        weights = jnp.zeros(()) if forced is None else forced.weights
        (_, (y, stats)), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(params, x, weights)
        return y, stats, grads

    return run


@functools.cache
def reference_program(shape, wire, capacity, replicas):
    """The dense path, given what is rounded and dropped: y, and (counts before drops, tokens, dropped rows)."""
    tokens, experts, top_k = SHAPES[shape]
    cfg = MoEConfig(H, I, experts, RouterConfig(top_k, logit_bias=True), CommConfig(mode="dense"))

    def layer(params, x, mask, forced):
        x = jnp.where(mask[:, None], x, 0)
        router = params["router"]
        routing = forced or route(router_logits(x, router["kernel"], router["bias"]), cfg.router)
        ids = jnp.where(mask[:, None], routing.experts, experts)
        kept = ids < experts
        if capacity is not None:
            groups = np.arange(tokens) // (-(-tokens // 8) * 8 // replicas)  # as the layer splits them, padded
            for group in range(replicas):
                mine = jnp.where((groups == group)[:, None], ids, experts)
                limit = planning.capacity(capacity, (mask & (groups == group)).sum(), ids.shape[1], experts)
                first = planning.kept_under_capacity(mine, experts, jnp.zeros(experts, jnp.int32), limit)
                kept = jnp.where((groups == group)[:, None], first, kept)
        rows = x if wire is None else rounded(x, wire)
        weights = jnp.where(kept, routing.weights, 0)
        y = dense.run(rows, jnp.where(kept, ids, experts), weights, params["experts"], cfg)
        counts = planning.count(ids.reshape(-1), experts)
        return jnp.where(mask[:, None], y, 0), (counts, mask.sum(), (ids < experts).sum() - kept.sum())

    return with_gradients(layer, shape)


@functools.cache
def reference(shape, source, name, ranks, wire, capacity, replicas):
    run = reference_program(shape, wire, capacity, replicas)
    return run(*inputs(shape), *routing(shape, source, name, ranks))


def assert_close(got, want, tol, what):
    """|a - b| <= tol * max|b|, with a floor for what is truly zero (K=1: the gradient of a renormalised single
    weight).
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.isfinite(got).all(), what
    error, scale = np.abs(got - want).max(initial=0), max(np.abs(want).max(initial=0), 1e-2)
    assert error <= tol * scale, f"{what}: {error} > {tol} * {scale}"


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: "-".join(map(str, c)).replace(" ", ""))
def test_equals_dense(cell):
    path, mesh, factor, shape, source, rows, chunks, wire, capacity = cell
    cfg, on, (ranks, replicas) = config(cell), make_mesh(*mesh), mesh
    run = with_gradients(lambda p, x, mask, forced: moe(p, x, cfg, mesh=on, token_mask=mask, routing=forced), shape)
    rounds = set()
    for name in ROUTINGS:
        y, stats, grads = run(*inputs(shape), *routing(shape, source, name, ranks))
        want_wire = wire if ranks > 1 else None  # one rank sends nothing, and rounds nothing
        key = (shape, source, name, ranks, want_wire, capacity, replicas if capacity else 1)
        want_y, (counts, tokens, dropped), want_grads = reference(*key)
        assert_close(y, want_y, 1e-5, f"{name}: y")
        for (where, got), want in zip(
            jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(want_grads), strict=True
        ):
            assert_close(got, want, 1e-4, f"{name}: gradient {jax.tree_util.keystr(where)}")
        np.testing.assert_array_equal(stats.counts, counts)
        assert int(stats.tokens) == int(tokens) and int(stats.dropped_rows) == int(dropped)
        rounds.add(int(stats.rounds))
    packed = path.startswith("packed") and ranks > 1 and factor is not None
    if packed and shape in ("plain", "k1") and (rows, chunks, capacity) == ("rank", 1, None):
        assert (max(rounds) > 1) == (factor < ranks), f"rounds taken: {rounds}"


@pytest.mark.parametrize("over", [-1, 0, 1])
@pytest.mark.parametrize("transport", ["ragged", "all_to_all"])
@pytest.mark.parametrize("kind", [{}, {"dedup": True}, {"num_chunks": 2}, {"messages": "expert"}], ids=str)
def test_rounds_turn_at_the_quota(kind, transport, over):
    """One row under, at and over what a round holds, in one pair of four ranks or at one receiver; still exact."""
    tokens, experts, top_k, ranks = 16, 8, 2, 4
    comm = CommConfig(transport=transport, recv_rows_factor=0.5, **kind)
    cfg = MoEConfig(H, I, experts, RouterConfig(top_k), comm=comm)
    g = planning.geometry(comm, tokens // comm.num_chunks, top_k, experts, ranks, transport)
    room = (g.recv_rows if g.ragged else g.quota) + over
    ids = np.full((ranks, tokens, top_k), experts)  # nowhere
    senders = range(1, ranks) if g.ragged else range(1, 2)
    for i in range(room):  # rows for rank 0's first expert; deduplicated ones bring its second along
        ids[senders[i % len(senders)], i // len(senders), 0] = 0
    if comm.dedup:
        ids[..., 1] = np.where(ids[..., 0] == 0, 1, experts)
    params = init_params(cfg, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (ranks * tokens, H))
    routing = Routing(jnp.asarray(ids.reshape(-1, top_k), jnp.int32), jnp.full((ranks * tokens, top_k), 0.7))
    y, stats = moe(params, x, cfg, mesh=make_mesh(ranks), routing=routing)
    want, _ = moe(params, x, MoEConfig(H, I, experts, RouterConfig(top_k), CommConfig("dense")), routing=routing)
    assert int(stats.rounds) == (2 if over > 0 else 1)
    assert_close(y, want, 1e-5, "y")
