"""Slots of deduplicated rows against a loop, and the windows that bound the experts' temporaries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import CommConfig, MoEConfig, RouterConfig, Routing, init_params, make_mesh, moe
from jax_ep.paths import Dispatched, run_experts
from jax_ep.paths.dedup import slots


def loop(experts, weights, num_experts, ranks):
    """{rank: {local expert: weight}} of each token."""
    local = num_experts // ranks
    rows = [{} for _ in experts]
    for row, ids, w in zip(rows, experts, weights):
        for e, weight in zip(ids, w):
            if 0 <= e < num_experts:
                there = row.setdefault(e // local, {})
                there[e % local] = there.get(e % local, 0) + weight
    return rows


@pytest.mark.parametrize(("ranks", "local", "top_k"), [(2, 1, 1), (2, 3, 5), (4, 2, 2), (4, 1, 6), (8, 4, 3)])
def test_slots_equal_a_loop(ranks, local, top_k):
    """Experts named twice, ids that go nowhere, and the gradient of the weights."""
    num_experts, tokens = ranks * local, 40
    rng = np.random.default_rng(ranks)
    experts = rng.integers(0, num_experts + 1, (tokens, top_k))
    experts[rng.random(experts.shape) < 0.1] = 2**31 - 1
    experts[rng.random(experts.shape) < 0.1] = -1
    weights = rng.random((tokens, top_k)).astype(np.float32)
    make = functools.partial(slots, num_experts=num_experts, ranks=ranks)
    got = jax.tree.map(np.asarray, jax.jit(make)(jnp.asarray(experts, jnp.int32), jnp.asarray(weights)))
    assert got.experts.shape == (tokens, min(top_k, ranks), min(top_k, local))
    for t, want in enumerate(loop(experts, weights, num_experts, ranks)):
        used = [j for j, d in enumerate(got.destination[t]) if d < ranks]
        assert used == list(range(len(want))) and set(got.destination[t, used]) == set(want)
        for j in range(got.destination.shape[1]):
            have = {int(e): w for e, w in zip(got.experts[t, j], got.weights[t, j]) if e < local}
            assert have == pytest.approx(want.get(int(got.destination[t, j]), {}))
            assert (got.weights[t, j][got.experts[t, j] == local] == 0).all()
    cotangent = rng.random(got.weights.shape).astype(np.float32)
    _, pull = jax.vjp(lambda w: make(jnp.asarray(experts, jnp.int32), w).weights, jnp.asarray(weights))
    d_weights = pull(jnp.asarray(cotangent))[0]
    for t, k in np.ndindex(experts.shape):
        e, want = experts[t, k], 0.0
        if 0 <= e < num_experts:
            j = list(got.destination[t]).index(e // local)
            want = cotangent[t, j, list(got.experts[t, j]).index(e % local)]
        assert d_weights[t, k] == want


def expert_fn(rows, index, sizes, weights, params):
    """What an expert does is a scale here: position by position, as the group sizes say."""
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(index.shape[0]), side="right", method="compare_all")
    present = jnp.arange(index.shape[0]) < sizes.sum()
    scale = jnp.where(present, weights * params[jnp.where(present, group, 0)], 0)
    at = jnp.where(present, index, 0)
    return jnp.zeros(rows.shape, jnp.float32).at[at].add(scale[:, None] * rows[at])


@pytest.mark.parametrize("window", [1, 3, 8, 20, 21])
@pytest.mark.parametrize("sizes", [(0, 0, 0), (5, 0, 3), (0, 20, 0), (7, 7, 6), (1, 0, 2)])
def test_windows_add_up(window, sizes):
    rng = np.random.default_rng(0)
    rows, params, cotangent = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((6, 4), (3,), (6, 4)))
    index, weights = jnp.asarray(rng.integers(0, 6, 20), jnp.int32), jnp.asarray(rng.random(20), jnp.float32)

    def run(window):
        def f(rows, weights, params):
            d = Dispatched(rows, index, jnp.asarray(sizes, jnp.int32), weights, None, window)
            return run_experts(expert_fn, d, params)

        y, pull = jax.vjp(f, rows, weights, params)
        return y, *pull(cotangent)

    for got, want in zip(run(window), run(None)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [{"dedup": True}, {"num_chunks": 2}], ids=str)
def test_more_than_a_window_of_positions_is_exact(kind):
    """Every token to all of one rank's experts: more positions than balanced ones, in a loop beside the rounds'."""
    ranks, experts, top_k, tokens = 2, 8, 4, 32
    comm = CommConfig(recv_rows_factor=1.0, **kind)
    cfg = MoEConfig(16, 24, experts, RouterConfig(top_k), comm)
    dense = MoEConfig(16, 24, experts, RouterConfig(top_k), CommConfig("dense"))
    params, x = init_params(cfg, jax.random.key(0)), jax.random.normal(jax.random.key(1), (tokens, 16))
    ids = np.tile(np.arange(top_k), (tokens, 1))
    routing = Routing(jnp.asarray(ids, jnp.int32), jax.random.uniform(jax.random.key(2), ids.shape))

    def run(cfg, mesh):
        loss = lambda p, x, w: jnp.square(moe(p, x, cfg, mesh=mesh, routing=routing._replace(weights=w))[0]).sum()
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(params, x, routing.weights)

    text = str(jax.make_jaxpr(lambda: run(cfg, make_mesh(ranks)))())
    assert "_later" in text, "no window was too small, so nothing was tested"
    for got, want in zip(jax.tree.leaves(run(cfg, make_mesh(ranks))), jax.tree.leaves(run(dense, None))):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(jnp.abs(want).max()) + 1e-6)
