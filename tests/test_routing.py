"""`route` of every published family against a loop in float64; losses, masks and statistics, on any mesh."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import (
    CommConfig,
    ConfigError,
    MoEConfig,
    MoEStats,
    RouterConfig,
    Routing,
    balance_loss,
    balanced_routing,
    bias_update,
    init_params,
    make_mesh,
    moe,
    route,
    router_logits,
    z_loss,
)

# Family -> (experts, router), as in a published checkpoint of each.
FAMILIES = {
    "mixtral": (8, RouterConfig(top_k=2)),
    "olmoe": (64, RouterConfig(top_k=8, normalize_weights=False)),
    "qwen2_moe": (60, RouterConfig(top_k=4, normalize_weights=False)),
    "qwen3_moe": (128, RouterConfig(top_k=8)),
    "gpt_oss": (32, RouterConfig(top_k=4, softmax_after_top_k=True, logit_bias=True)),
    "granitemoe": (40, RouterConfig(top_k=8, softmax_after_top_k=True)),
    "deepseek_v2": (160, RouterConfig(top_k=6, normalize_weights=False, num_groups=8, top_k_groups=3, scale=16.0)),
    "deepseek_v3": (
        64,
        RouterConfig(
            top_k=8,
            score_function="sigmoid",
            num_groups=8,
            top_k_groups=4,
            group_score="top2_sum",
            scale=2.5,
            selection_bias=True,
        ),
    ),
}
TOKENS = 64
run_route = jax.jit(route, static_argnums=1)
run_balance_loss = jax.jit(balance_loss, static_argnames="kind")
run_z_loss = jax.jit(z_loss)
run_moe = jax.jit(moe, static_argnames=("config", "mesh"))


def make_params(config: MoEConfig, ranks: int = 1):
    """Parameters of the shapes init_params gives, without compiling its random numbers."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(functools.partial(init_params, config, ranks=ranks), jax.random.key(0))
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(0, s.shape[0] ** -0.5, s.shape), s.dtype), shapes)


families = pytest.mark.parametrize("family", FAMILIES)


def oracle(logits: np.ndarray, family: str, bias: np.ndarray | None):
    """One token's (experts, weights, distribution, logsumexp) in float64, family by family as published, in loops."""
    experts, c = FAMILIES[family]
    logits = [float(v) for v in logits]
    top = max(logits)
    exps = [math.exp(v - top) for v in logits]
    softmax = [v / sum(exps) for v in exps]
    lse = top + math.log(sum(exps))
    best = lambda scores, ids: sorted(ids, key=lambda e: (-scores[e], e))[: c.top_k]  # the lower id wins a tie
    everyone = range(experts)
    if family in ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe"):
        chosen = best(softmax, everyone)
        total = sum(softmax[e] for e in chosen) if family in ("mixtral", "qwen3_moe") else 1.0
        return chosen, [softmax[e] / total for e in chosen], softmax, lse
    if family in ("gpt_oss", "granitemoe"):
        chosen = best(logits, everyone)
        total = sum(exps[e] for e in chosen)
        return chosen, [exps[e] / total for e in chosen], softmax, lse
    size = experts // c.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(c.num_groups)]
    if family == "deepseek_v2":
        scores = choice = softmax
        group_scores = [max(scores[e] for e in group) for group in groups]
    else:
        scores = [1 / (1 + math.exp(-v)) for v in logits]
        choice = [s + float(b) for s, b in zip(scores, bias, strict=True)]
        group_scores = [sum(sorted((choice[e] for e in group), reverse=True)[:2]) for group in groups]
    open_groups = sorted(range(c.num_groups), key=lambda g: (-group_scores[g], g))[: c.top_k_groups]
    chosen = best(choice, [e for g in open_groups for e in groups[g]])
    if family == "deepseek_v2":
        return chosen, [scores[e] * c.scale for e in chosen], softmax, lse
    total = sum(scores[e] for e in chosen) + 1e-20
    distribution = [s / (sum(scores) + 1e-20) for s in scores]
    return chosen, [scores[e] / total * c.scale for e in chosen], distribution, lse


def draw(family: str, seed: int):
    """Float32 logits [T, E] and a selection bias that often makes scores negative."""
    experts, c = FAMILIES[family]
    rng = np.random.default_rng([seed, experts])
    logits = rng.normal(0, rng.choice([0.3, 2.0, 6.0]), (TOKENS, experts)).astype(np.float32)
    bias = rng.normal(-0.6, 0.3, experts).astype(np.float32) if c.selection_bias else None
    return logits, bias


def check(routing: Routing, logits: np.ndarray, family: str, bias: np.ndarray | None):
    want = [oracle(row, family, bias) for row in logits]
    assert np.array_equal(routing.experts, [w[0] for w in want])
    np.testing.assert_allclose(routing.weights, [w[1] for w in want], rtol=2e-5, atol=1e-12)
    np.testing.assert_allclose(routing.probs, [w[2] for w in want], rtol=2e-5, atol=1e-12)
    np.testing.assert_allclose(routing.logsumexp, [w[3] for w in want], rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------- route


@families
def test_route_equals_the_float64_loop_on_random_logits(family):
    c = FAMILIES[family][1]
    for seed in range(12):
        logits, bias = draw(family, seed)
        check(run_route(logits, c, selection_bias=bias), logits, family, bias)


@families
def test_ties_go_to_the_lower_id(family):
    experts, c = FAMILIES[family]
    rng = np.random.default_rng(experts)
    logits = rng.integers(0, 3, (TOKENS, experts)).astype(np.float32)
    logits[0] = 0
    bias = np.zeros(experts, np.float32) if c.selection_bias else None
    routing = run_route(logits, c, selection_bias=bias)
    check(routing, logits, family, bias)
    assert routing.experts[0].tolist() == list(range(c.top_k))


@families
def test_routing_has_the_declared_shapes_and_dtypes_and_keeps_leading_axes(family):
    c = FAMILIES[family][1]
    logits, bias = draw(family, 99)
    flat = run_route(logits, c, selection_bias=bias)
    folded = run_route(logits.reshape(4, 16, -1), c, selection_bias=bias)
    assert folded.experts.shape == folded.weights.shape == (4, 16, c.top_k)
    assert (folded.probs.shape, folded.logsumexp.shape) == ((4, 16, logits.shape[1]), (4, 16))
    assert [a.dtype.name for a in folded] == ["int32", "float32", "float32", "float32"]
    for a, b in zip(flat, folded, strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b).reshape(a.shape))


@families
def test_gradient_of_weights_distribution_and_logsumexp_is_that_of_the_float64_loop(family):
    c = FAMILIES[family][1]
    rng = np.random.default_rng(7)
    logits, bias = draw(family, 3)
    logits = logits[:8]
    first = run_route(logits, c, selection_bias=bias)
    to = [rng.normal(size=np.shape(a)) for a in (first.weights, first.probs, first.logsumexp)]
    along = rng.normal(size=logits.shape)

    def value(v):
        r = route(v, c, selection_bias=bias)
        return sum((jnp.asarray(t, jnp.float32) * a).sum() for t, a in zip(to, (r.weights, r.probs, r.logsumexp)))

    def in_float64(v):
        rows = [oracle(row, family, bias) for row in v]
        assert np.array_equal([r[0] for r in rows], first.experts), "the step must not change the choice"
        return sum((t * np.array([r[i] for r in rows])).sum() for i, t in zip((1, 2, 3), to))

    gradient = np.asarray(jax.jit(jax.grad(value))(logits))
    step = 1e-6
    numeric = (in_float64(logits + step * along) - in_float64(logits - step * along)) / (2 * step)
    scale = np.linalg.norm(gradient) * np.linalg.norm(along) / math.sqrt(along.size)
    assert abs((gradient * along).sum() - numeric) <= 1e-4 * max(abs(numeric), scale)


@functools.cache
def extremes(family: str):
    """Logits -> gradient of a function of all that route gives, and what it gives."""
    experts, c = FAMILIES[family]
    bias = np.zeros(experts, np.float32) if c.selection_bias else None

    def value(v):
        r = route(v, c, selection_bias=bias)
        return (r.weights * jnp.arange(1.0, c.top_k + 1)[None]).sum() + (r.probs**2).sum() + r.logsumexp.sum(), r

    return jax.jit(jax.grad(value, has_aux=True))


@families
@pytest.mark.parametrize("level", [0.0, 80.0, -60.0, -200.0, 1e4])
def test_values_and_gradients_are_finite_on_extreme_logits(family, level):
    experts, c = FAMILIES[family]
    spread = np.random.default_rng(1).normal(size=(4, experts)).astype(np.float32)
    rows = np.concatenate([np.full((2, experts), level), spread + level, spread * level]).astype(np.float32)
    gradient, routing = extremes(family)(rows)
    assert all(np.isfinite(a).all() for a in routing)
    assert np.isfinite(gradient).all()
    assert ((routing.experts >= 0) & (routing.experts < experts)).all()
    assert all(len(set(row)) == c.top_k for row in routing.experts.tolist())


@pytest.mark.parametrize("group_score", ["max", "top2_sum"])
def test_groups_that_were_not_chosen_stay_closed_however_negative_scores_are(group_score):
    """Masking with 0 would open them again: every corrected score here is below 0."""
    c = RouterConfig(
        top_k=4,
        score_function="sigmoid",
        num_groups=4,
        top_k_groups=2,
        group_score=group_score,
        selection_bias=True,
    )
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(200, 16)).astype(np.float32)
    bias = (-1.5 + rng.normal(0, 0.2, 16)).astype(np.float32)
    choice = 1 / (1 + np.exp(-logits.astype(np.float64))) + bias
    assert choice.max() < 0
    by_group = np.sort(choice.reshape(200, 4, 4), -1)
    score = by_group[..., -1] if group_score == "max" else by_group[..., -2:].sum(-1)
    best = np.argsort(-score, axis=1)[:, :2]
    experts = np.asarray(run_route(logits, c, selection_bias=bias).experts)
    for token in range(200):
        inside = [e for e in range(16) if e // 4 in best[token]]
        assert experts[token].tolist() == sorted(inside, key=lambda e: -choice[token, e])[:4]


def test_selection_bias_gets_no_gradient_and_changes_no_weight():
    c = FAMILIES["deepseek_v3"][1]
    logits, bias = draw("deepseek_v3", 4)
    gradient = jax.grad(lambda b: (route(logits, c, selection_bias=b).weights ** 2).sum())(jnp.asarray(bias))
    assert not np.asarray(gradient).any()
    shifted = run_route(logits, c, selection_bias=bias + np.float32(4))
    same = run_route(logits, c, selection_bias=bias)
    assert np.array_equal(shifted.experts, same.experts)
    assert np.array_equal(shifted.weights, same.weights)


def test_bias_update_is_a_step_towards_the_mean_count():
    counts = jnp.array([[4, 2, 2, 0], [3, 3, 3, 3]])  # of two layers
    got = bias_update(counts, 0.5)
    assert got.dtype == jnp.float32
    assert got.tolist() == [[-0.5, 0, 0, 0.5], [0, 0, 0, 0]]
    # Balanced is balanced, also where float32 does not hold the counts, nor their sum.
    assert not bias_update(jnp.full(3, 2**24 + 1), 0.5).any()
    assert bias_update(2**30 + jnp.array([1, 0, 2]), 0.5).tolist() == [0, 0.5, -0.5]


def test_bias_updates_balance_a_router_that_prefers_some_experts():
    c = RouterConfig(2, score_function="sigmoid", selection_bias=True)
    logits = np.random.default_rng(6).normal(size=(512, 8)) + np.linspace(-1.5, 1.5, 8)
    bias, load = jnp.zeros(8), []
    for _ in range(200):
        counts = jnp.bincount(run_route(logits, c, selection_bias=bias).experts.ravel(), length=8)
        load.append(float(counts.max() / counts.mean()))
        bias = bias + bias_update(counts, 0.01)
    assert load[0] > 2 and max(load[-20:]) < 1.2


# ------------------------------------------------------------------------------------------- float32 whatever the dtype

X_FLIP = jnp.array([[1, 1]], jnp.bfloat16)
KERNEL_FLIP = jnp.array([[0.5, 0.5, 0, 0], [0, 0.001, 0, 0]], jnp.bfloat16)  # logits .5, .501, 0, 0


def test_a_bfloat16_router_does_not_flip_experts():
    rounded = jnp.matmul(X_FLIP, KERNEL_FLIP)
    assert rounded[0, 0] == rounded[0, 1], "in bfloat16 the two logits are one, or this test shows nothing"
    logits = router_logits(X_FLIP, KERNEL_FLIP)
    assert logits.dtype == jnp.float32
    assert run_route(logits, RouterConfig(top_k=1)).experts.tolist() == [[1]]


def test_a_bfloat16_layer_does_not_flip_experts():
    c = MoEConfig(2, 2, 4, RouterConfig(top_k=1), CommConfig(mode="dense"), dtype="bfloat16", param_dtype="bfloat16")
    params = make_params(c)
    params["router"]["kernel"] = KERNEL_FLIP
    assert run_moe(params, X_FLIP, c)[1].counts.tolist() == [0, 1, 0, 0]


def test_router_logits_against_float64_and_with_a_bias():
    rng = np.random.default_rng(0)
    x, kernel, bias = (rng.normal(size=s).astype(np.float32) for s in ((3, 5, 256), (256, 16), (16,)))
    want = x.astype(np.float64) @ kernel.astype(np.float64)
    for given, expected in ((None, want), (bias, want + bias)):
        got = np.asarray(router_logits(x, kernel, given))
        assert np.abs(got - expected).max() <= 1e-6 * np.abs(expected).max()


# ----------------------------------------------------------------------------------------------------- losses from sums


def stats_of(logits: np.ndarray, c: RouterConfig) -> MoEStats:
    """Sums over all tokens, by hand."""
    routing = run_route(logits, c)
    counts = np.bincount(np.asarray(routing.experts).reshape(-1), minlength=logits.shape[1])
    lse = np.asarray(routing.logsumexp)
    zero = jnp.int32(0)
    return MoEStats(
        jnp.int32(logits.shape[0]),
        jnp.asarray(counts, jnp.int32),
        routing.probs.sum(0),
        jnp.float32((lse**2).sum()),
        zero,
        zero,
        zero,
    )


@pytest.mark.parametrize(("experts", "top_k"), [(8, 1), (8, 2), (6, 3), (4, 4)])
def test_uniform_load_gives_1_and_k(experts, top_k):
    logits = np.zeros((experts, experts), np.float32)
    for token in range(experts):  # token t prefers experts t, t + 1, ... by a hair
        logits[token, (token + np.arange(top_k)) % experts] = 1e-4
    stats = stats_of(logits, RouterConfig(top_k))
    assert stats.counts.tolist() == [top_k] * experts
    assert float(run_balance_loss(stats)) == pytest.approx(1, abs=1e-6)
    assert float(run_balance_loss(stats, "switch")) == pytest.approx(1, abs=1e-6)
    assert float(run_balance_loss(stats, "hf")) == pytest.approx(top_k, abs=1e-5)


def test_losses_equal_loops_in_float64():
    c = RouterConfig(top_k=3)
    for seed in range(20):
        logits = np.random.default_rng(seed).normal(0, 2, (17, 6)).astype(np.float32)
        stats = stats_of(logits, c)
        fractions, means, squares = np.zeros(6), np.zeros(6), 0.0
        for row in logits.astype(np.float64):
            p = np.exp(row) / np.exp(row).sum()
            means += p / 17
            squares += math.log(np.exp(row).sum()) ** 2 / 17
            for e in np.argsort(-row, kind="stable")[:3]:
                fractions[e] += 1 / 17
        assert float(run_balance_loss(stats, "hf")) == pytest.approx(6 * (fractions * means).sum(), rel=1e-5)
        assert float(run_balance_loss(stats)) == pytest.approx(6 * (fractions / 3 * means).sum(), rel=1e-5)
        assert float(run_z_loss(stats)) == pytest.approx(squares, rel=1e-5)


def test_stacked_stats_give_a_loss_a_layer_and_sums_pool_them():
    c = RouterConfig(top_k=2)
    layers = [stats_of(np.random.default_rng(s).normal(0, 2, (12, 8)).astype(np.float32), c) for s in range(3)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *layers)
    for kind in ("switch", "hf"):
        each = [float(run_balance_loss(s, kind)) for s in layers]
        np.testing.assert_allclose(run_balance_loss(stacked, kind), each, rtol=1e-6)
    np.testing.assert_allclose(run_z_loss(stacked), [float(run_z_loss(s)) for s in layers], rtol=1e-6)
    pooled = jax.tree.map(lambda a: a.sum(0), stacked)
    together = np.concatenate([np.random.default_rng(s).normal(0, 2, (12, 8)).astype(np.float32) for s in range(3)])
    assert float(run_balance_loss(pooled, "hf")) == pytest.approx(
        float(run_balance_loss(stats_of(together, c), "hf")), rel=1e-5
    )
    assert float(run_z_loss(pooled)) == pytest.approx(float(run_z_loss(stats_of(together, c))), rel=1e-5)


def test_no_token_at_all_gives_zero_losses():
    stats = MoEStats(*(jnp.zeros(s, d) for s, d in (((), int), (4, int), (4, float), ((), float))), *[jnp.int32(0)] * 3)
    assert [float(f) for f in (run_balance_loss(stats), run_balance_loss(stats, "hf"), run_z_loss(stats))] == [0, 0, 0]


# ---------------------------------------------------------------------------------------------------- through the layer

LAYER = MoEConfig(8, 4, 8, RouterConfig(top_k=2), CommConfig(recv_rows_factor=None))
PARAMS = functools.cache(lambda: make_params(LAYER))
MESHES = {"one device": None, "expert 4": (4,), "data 2, expert 4": (4, 2)}


@functools.cache
def losses_and_gradients(name: str):
    """(params, x, mask) -> gradients of the two auxiliary losses to params and x, the losses, the stats."""
    mesh = None if MESHES[name] is None else make_mesh(*MESHES[name])

    def value(params, x, mask):
        stats = moe(params, x, LAYER, mesh=mesh, token_mask=mask)[1]
        losses = jnp.stack([balance_loss(stats), balance_loss(stats, "hf"), z_loss(stats)])
        return jnp.dot(losses, jnp.array([1.0, 0.3, 0.1])), (losses, stats)

    return jax.jit(jax.grad(value, argnums=(0, 1), has_aux=True))


def tokens_and_mask(seed: int):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(24, 8)), jnp.float32), jnp.asarray(rng.random(24) < 0.7)


@pytest.mark.parametrize("name", ["expert 4", "data 2, expert 4"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_losses_and_their_gradients_on_a_mesh_equal_one_device(name, seed):
    x, mask = tokens_and_mask(seed)
    (d_params, d_x), (losses, stats) = losses_and_gradients("one device")(PARAMS(), x, mask)
    (m_params, m_x), (m_losses, m_stats) = losses_and_gradients(name)(PARAMS(), x, mask)
    np.testing.assert_allclose(m_losses, losses, rtol=1e-6)
    for mine, want in ((m_params["router"]["kernel"], d_params["router"]["kernel"]), (m_x, d_x)):
        assert np.abs(want).max() > 1e-3
        assert np.abs(np.asarray(mine) - want).max() <= 1e-5 * np.abs(want).max()
    assert m_stats.counts.tolist() == stats.counts.tolist()
    assert int(m_stats.tokens) == int(stats.tokens) == int(mask.sum())
    np.testing.assert_allclose(m_stats.prob_sum, stats.prob_sum, rtol=1e-6)
    np.testing.assert_allclose(m_stats.lse_sq_sum, stats.lse_sq_sum, rtol=1e-6)


@pytest.mark.parametrize("name", MESHES)
def test_masked_tokens_count_nowhere(name):
    """The sums are those of the other tokens alone, whatever stands in the masked rows."""
    x, mask = tokens_and_mask(3)
    (d_params, d_x), (losses, stats) = losses_and_gradients(name)(PARAMS(), x, mask)
    kept = np.asarray(x)[np.asarray(mask)]
    want = stats_of(np.asarray(router_logits(kept, PARAMS()["router"]["kernel"])), LAYER.router)
    assert int(stats.tokens) == len(kept) < len(x)
    assert stats.counts.tolist() == want.counts.tolist()
    np.testing.assert_allclose(stats.prob_sum, want.prob_sum, rtol=1e-5)
    np.testing.assert_allclose(stats.lse_sq_sum, want.lse_sq_sum, rtol=1e-5)
    np.testing.assert_allclose(
        losses, [run_balance_loss(want), run_balance_loss(want, "hf"), run_z_loss(want)], rtol=1e-5
    )
    assert not np.asarray(d_x)[~np.asarray(mask)].any()
    other = jnp.where(mask[:, None], x, jnp.nan)
    (o_params, o_x), (_, o_stats) = losses_and_gradients(name)(PARAMS(), other, mask)
    for a, b in zip(jax.tree.leaves((d_params, d_x, stats)), jax.tree.leaves((o_params, o_x, o_stats)), strict=True):
        assert np.array_equal(a, b)


def test_stats_of_a_given_routing_hold_its_counts_and_no_distribution():
    x, _ = tokens_and_mask(0)
    stats = run_moe(PARAMS(), x, LAYER, routing=balanced_routing(24, 8, 2))[1]
    assert stats.counts.tolist() == [6] * 8
    assert not np.asarray(stats.prob_sum).any()
    assert float(run_z_loss(stats)) == 0


# ----------------------------------------------------------------------------------------------------- balanced_routing


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(64, 8, 2), ((4, 16), 8, 2), (7, 6, 3), ((3, 5), 60, 8), (5, 4, 4), (1, 9, 1)]
)
def test_balanced_routing_loads_evenly(tokens, experts, top_k):
    routing = balanced_routing(tokens, experts, top_k)
    shape = (tokens,) if isinstance(tokens, int) else tokens
    assert routing.experts.shape == routing.weights.shape == (*shape, top_k)
    assert (routing.experts.dtype, routing.weights.dtype) == (jnp.int32, jnp.float32)
    load = np.bincount(np.asarray(routing.experts).reshape(-1), minlength=experts)
    assert len(load) == experts
    assert load.max() - load.min() <= (0 if math.prod(shape) * top_k % experts == 0 else 1)
    assert all(len(set(row)) == top_k for row in np.asarray(routing.experts).reshape(-1, top_k).tolist())
    np.testing.assert_allclose(np.asarray(routing.weights).sum(-1), 1, rtol=1e-6)
    assert routing.probs is None
    assert routing.logsumexp is None


# --------------------------------------------------------------------------------------------------------------- errors


def test_route_refuses_more_choices_than_experts():
    with pytest.raises(ConfigError, match=r"^top_k=5: cannot exceed the 4 experts of the logits; top_k=4 works$"):
        route(jnp.zeros((2, 4)), RouterConfig(top_k=5))
    assert run_route(jnp.zeros((2, 4)), RouterConfig(top_k=4)).experts.shape == (2, 4)


def test_route_refuses_a_selection_bias_that_is_missing_or_not_expected():
    with_bias = RouterConfig(top_k=1, selection_bias=True)
    with pytest.raises(ConfigError, match=r"^selection_bias=True: .* missing; selection_bias=False works$"):
        route(jnp.zeros((2, 4)), with_bias)
    with pytest.raises(ConfigError, match=r"^selection_bias=False: .* given; selection_bias=True works$"):
        route(jnp.zeros((2, 4)), RouterConfig(top_k=1), selection_bias=jnp.zeros(4))


def test_balance_loss_refuses_an_unknown_kind():
    with pytest.raises(ConfigError, match=r"^kind='mixtral': must be \"switch\" or \"hf\"; kind='switch' works$"):
        balance_loss(stats_of(np.zeros((2, 4), np.float32), RouterConfig(1)), "mixtral")


def test_balanced_routing_refuses_more_choices_than_experts():
    with pytest.raises(ConfigError, match=r"^top_k=5: cannot exceed num_experts=4; top_k=4 works$"):
        balanced_routing(3, 4, 5)


@pytest.mark.parametrize(
    ("mask", "field"),
    [
        (jnp.ones(5, jnp.bool_), "token_mask"),
        (jnp.ones(24), "token_mask"),
        (jnp.ones((24, 1), jnp.bool_), "token_mask"),
    ],
)
def test_moe_refuses_masks_that_do_not_fit(mask, field):
    with pytest.raises(ConfigError, match=f"^{field}="):
        moe(PARAMS(), jnp.zeros((24, 8)), LAYER, token_mask=mask)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"experts": jnp.zeros((23, 2), jnp.int32)}, "routing.experts"),
        ({"experts": jnp.zeros((24, 2))}, "routing.experts"),
        ({"weights": jnp.zeros((24, 3))}, "routing.weights"),
        ({"probs": jnp.zeros((24, 7))}, "routing.probs"),
        ({"logsumexp": jnp.zeros(23)}, "routing.logsumexp"),
    ],
)
def test_moe_refuses_a_routing_that_does_not_fit(changes, field):
    with pytest.raises(ConfigError, match=f"^{field}="):
        moe(PARAMS(), jnp.zeros((24, 8)), LAYER, routing=balanced_routing(24, 8, 2)._replace(**changes))


def test_padded_experts_are_never_chosen_by_a_router_of_true_experts():
    """Six experts on four ranks: eight are stored, six have logits."""
    c = MoEConfig(8, 4, 6, RouterConfig(top_k=6), comm=CommConfig(mode="dense"))
    stats = run_moe(make_params(c, ranks=4), tokens_and_mask(0)[0], c)[1]
    assert stats.counts.tolist() == [24] * 6


def test_a_bias_may_choose_experts_whose_softmax_is_zero():
    logits, bias = jnp.array([[200.0, 0.0, 0.0, 0.0]]), jnp.array([-10.0, 0.0, 0.0, 0.0])
    config = RouterConfig(1, selection_bias=True)
    weights = lambda v: route(v, config, selection_bias=bias).weights.sum()
    value, grad = jax.value_and_grad(weights)(logits)
    assert float(value) == 0 and bool(jnp.isfinite(grad).all())
