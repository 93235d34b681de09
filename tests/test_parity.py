"""Every path equals the dense one: path x transport x mesh x rounds x shape x routing, values and gradients.

Cells: every (path, mesh, recv_rows_factor) there is, and for each of them a (shape, source) chosen greedily so that
every pair of options of different kinds that can meet does (`test_every_pair_of_options_meets` checks that). A cell is
one compiled program; the routing is an input of it, through a router bias and a mask ("router": the router's own
gradient is checked too) or as a Routing ("forced": also several choices of one token for the same expert). All
routings run through every cell.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import CommConfig, MoEConfig, RouterConfig, Routing, init_params, make_mesh, moe

H, I = 16, 24
PATHS = ("allgather", "padded", "packed/ragged", "packed/all_to_all", "packed/all_gather")
MESHES = ((1, 1), (2, 1), (4, 1), (8, 1), (4, 2))  # (expert, data)
FACTORS = (None, 2.0, 1.0, 0.5)
# name: (T, E, K); T=29 and E=10 divide by nothing
SHAPES = {"plain": (32, 8, 2), "k1": (32, 8, 1), "k_all": (16, 8, 8), "odd": (29, 10, 3), "t1": (1, 8, 2)}
SOURCES = ("router", "forced")
ROUTINGS = ("even", "zipf", "one_expert", "silent_rank", "idle_rank", "one_pair", "random_mask", "all_masked")


def cells():
    """(path, mesh, factor, shape, source), see above. On one rank the three transports are one program; one stands
    for all.
    """
    fixed = []
    for path, mesh in itertools.product(PATHS, MESHES):
        alone = mesh == (1, 1)
        if alone and path in ("packed/all_to_all", "packed/all_gather"):
            continue
        factors = FACTORS if path.startswith("packed") and not alone else (2.0,)
        fixed += [(path, mesh, f) for f in factors]
    fixed += [("packed/ragged", (1, 1), 2.0)] * (len(SHAPES) - 3)  # so that one rank meets every shape
    wanted = possible_pairs(fixed)
    rng = np.random.default_rng(0)
    for _ in range(200):  # greedy in a random order covers everything after a few tries
        met, chosen = set(), []
        for at in rng.permutation(len(fixed)):
            options = list(itertools.product(SHAPES, SOURCES))
            rng.shuffle(options)
            best = max(options, key=lambda o: len(pairs((*fixed[at], *o)) - met))
            met |= pairs((*fixed[at], *best))
            chosen.append((*fixed[at], *best))
        if wanted <= met:
            return sorted(chosen, key=str)
    raise AssertionError("no covering found")


def pairs(cell):
    return set(itertools.combinations(enumerate(cell), 2))


def possible_pairs(fixed):
    """Pairs of options that can meet: those of the fixed part that exist, and everything with every shape and
    source.
    """
    options = [*({c[i] for c in fixed} for i in range(3)), set(SHAPES), set(SOURCES)]
    free = [
        ((i, a), (j, b))
        for (i, some), (j, others) in itertools.combinations(enumerate(options), 2)
        if j >= 3
        for a in some
        for b in others
    ]
    return set(free).union(*(pairs(c) for c in fixed))


CELLS = cells()


def test_every_pair_of_options_meets():
    """Counted from the options, not from how the cells were chosen."""
    met = set().union(*(pairs(c) for c in CELLS))
    options = [PATHS, MESHES, FACTORS, tuple(SHAPES), SOURCES]
    for (i, some), (j, others) in itertools.combinations(enumerate(options), 2):
        for a, b in itertools.product(some, others):
            one_rank = (1, 1) in (a, b) and ((b == (1, 1) and a in PATHS[3:]) or (j == 2 and b != 2.0))
            not_packed = i == 0 and j == 2 and not a.startswith("packed") and b != 2.0
            assert one_rank or not_packed or ((i, a), (j, b)) in met, (a, b)


def config(path, factor, shape):
    _, experts, top_k = SHAPES[shape]
    mode, _, transport = path.partition("/")
    comm = CommConfig(mode=mode)
    if mode == "packed":
        comm = CommConfig(transport=transport, recv_rows_factor=factor)
    return MoEConfig(H, I, experts, RouterConfig(top_k, logit_bias=True), comm=comm)


@functools.cache
def inputs(shape):
    tokens = SHAPES[shape][0]
    keys = jax.random.split(jax.random.key(7), 4)
    params = init_params(config("dense", 2.0, shape), keys[0])
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


@functools.cache
def program(path, mesh, factor, shape):
    cfg = config(path, factor, shape)
    on = None if mesh is None else make_mesh(*mesh)

    @jax.jit
    def run(params, x, cotangent, bias, mask, forced):
        def loss(params, x, weights):
            params = {**params, "router": {**params["router"], "bias": params["router"]["bias"] + bias}}
            used = None if forced is None else forced._replace(weights=weights)
            y, stats = moe(params, x, cfg, mesh=on, token_mask=mask, routing=used)
            return (y * cotangent).sum(), (y, stats)

        weights = jnp.zeros(()) if forced is None else forced.weights
        (_, (y, stats)), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(params, x, weights)
        return y, stats, grads

    return run


@functools.cache
def dense(shape, source, name, ranks):
    return program("dense", None, None, shape)(*inputs(shape), *routing(shape, source, name, ranks))


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
    path, mesh, factor, shape, source = cell
    run = program(path, mesh, factor, shape)
    rounds = set()
    for name in ROUTINGS:
        y, stats, grads = run(*inputs(shape), *routing(shape, source, name, mesh[0]))
        want_y, want_stats, want_grads = dense(shape, source, name, mesh[0])
        assert_close(y, want_y, 1e-5, f"{name}: y")
        for (where, got), want in zip(
            jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(want_grads), strict=True
        ):
            assert_close(got, want, 1e-4, f"{name}: gradient {jax.tree_util.keystr(where)}")
        np.testing.assert_array_equal(stats.counts, want_stats.counts)
        assert int(stats.tokens) == int(want_stats.tokens) and int(stats.dropped_rows) == 0
        rounds.add(int(stats.rounds))
    if path.startswith("packed") and mesh[0] > 1 and shape in ("plain", "k1") and factor is not None:
        assert (max(rounds) > 1) == (factor < mesh[0]), f"rounds taken: {rounds}"
