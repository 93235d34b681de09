"""Situations that went wrong in other mixture-of-experts code, one number each; tests/edge_cases.json has the values.

1 weights renormalised where the family does not     8 experts that the ranks do not divide
2 negative scores open masked groups                 9 overflow unseen
3 padding counted, dispatched, eating capacity      10 gate and up interleaved or clamped wrongly
4 two meanings of the balance loss                  11 a rank without tokens, or whose experts get none
5 padding in the z-loss                             12 ragged all-to-all absent on CPU meshes
6 garbage gradients of an expert without rows       13 gradients that depend on the number of ranks
7 rows past the sum of group sizes leak NaN         14 bfloat16 rows summed in bfloat16 at home
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jax_ep import (
    CommConfig,
    MoEConfig,
    MoELayer,
    RouterConfig,
    Routing,
    balance_loss,
    byte_ledger,
    grouped_matmul,
    init_params,
    make_mesh,
    moe,
    ragged_all_to_all,
    route,
    z_loss,
)
from jax_ep.experts import deinterleave, gpt_oss
from jax_ep.layer import resolve_transport
from jax_ep.paths.rows import collect
from jax_ep.plan import Home

CASES = json.loads((pathlib.Path(__file__).parent / "edge_cases.json").read_text())
run_route = jax.jit(route, static_argnums=1)
run_moe = jax.jit(moe, static_argnames=("config", "mesh"))
DENSE = CommConfig(mode="dense")
ONE_ROUND = CommConfig(recv_rows_factor=None)


def make_params(config: MoEConfig, seed: int = 0):
    """Parameters of the shapes init_params gives, without compiling its random numbers."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(0, s.shape[0] ** -0.5, s.shape), s.dtype), shapes)


def mesh_of(ranks: int):
    return None if ranks == 1 else make_mesh(ranks)


def close(got, want, tolerance=1e-5):
    """Norm-wise."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@functools.cache
def value_and_gradients(config: MoEConfig, ranks: int):
    """(params, x, mask, routing) -> gradients of a fixed sum of y to params, x and routing, (y, stats)."""
    mesh = mesh_of(ranks)

    def value(params, x, mask, routing):
        y, stats = moe(params, x, config, mesh=mesh, token_mask=mask, routing=routing)
        return (y * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)).sum(), (y, stats)

    return jax.jit(jax.grad(value, argnums=(0, 1, 3), has_aux=True, allow_int=True))


# ----------------------------------------------------------------------------------------------------------- 1: weights


@pytest.mark.parametrize(
    ("weights", "changes"),
    [
        ("w_norm_false", {"normalize_weights": False}),
        ("w_norm_true", {}),
        ("w_topk_then_softmax", {"softmax_after_top_k": True}),
        ("w_llama4_sigmoid", {"score_function": "sigmoid", "normalize_weights": False}),
    ],
)
def test_1_weights_are_renormalised_where_the_family_says_so(weights, changes):
    case = CASES["softmax_then_topk"]
    routing = run_route(jnp.array(case["logits"]), RouterConfig(top_k=case["k"], **changes))
    assert routing.experts.tolist() == case["idx"]
    np.testing.assert_allclose(routing.weights, case[weights], rtol=1e-6)


# ------------------------------------------------------------------------------------------------------------ 2: groups


@pytest.mark.parametrize("group_score", ["top2_sum", "max"])
def test_2_negative_corrected_scores_keep_masked_groups_closed(group_score):
    case = CASES["dsv3_negative_bias"]
    c = RouterConfig(
        top_k=case["k"],
        score_function="sigmoid",
        normalize_weights=case["norm"],
        num_groups=case["n_group"],
        top_k_groups=case["topk_group"],
        group_score=group_score,
        scale=case["scale"],
        selection_bias=True,
    )
    routing = run_route(jnp.array(case["logits"], jnp.float32), c, selection_bias=jnp.array(case["bias"]))
    assert routing.experts.tolist() == case["idx"]
    np.testing.assert_allclose(routing.weights, case["w"], rtol=1e-6)


# ----------------------------------------------------------------------------------------------- 3, 4, 5: losses, masks


def identity_router(experts: int, top_k: int, comm: CommConfig) -> tuple[MoEConfig, dict]:
    """A layer whose router logits are its input."""
    config = MoEConfig(experts, 4, experts, RouterConfig(top_k), comm)
    params = make_params(config)
    params["router"]["kernel"] = jnp.eye(experts)
    return config, params


@pytest.mark.parametrize(("ranks", "comm"), [(1, DENSE), (2, DENSE), (2, ONE_ROUND)], ids=["1", "2", "2-packed"])
def test_3_padding_is_not_counted_in_the_balance_loss(ranks, comm):
    case = CASES["aux_padding"]
    config, params = identity_router(case["E"], case["k"], comm)
    x, mask = jnp.array(case["logits"]), jnp.array(case["mask"], jnp.bool_)
    y, stats = run_moe(params, x, config, mesh=mesh_of(ranks), token_mask=mask)
    assert float(balance_loss(stats)) == pytest.approx(case["aux_masked"], abs=1e-6)
    assert stats.counts.tolist() == [1, 1]
    assert int(stats.tokens) == 2
    assert not np.asarray(y)[2:].any()
    everyone = run_moe(params, x, config, mesh=mesh_of(ranks), token_mask=jnp.ones(4, jnp.bool_))[1]
    assert float(balance_loss(everyone)) == pytest.approx(case["aux_unmasked"], rel=1e-6)


def test_3_padding_travels_nowhere():
    """Every token is for the other rank's expert; on the ragged transport the wire carries just the unmasked ones."""
    config, params = identity_router(2, 1, CommConfig(transport="ragged", recv_rows_factor=None))
    x = jnp.array([[0.0, 4.0]] * 4 + [[4.0, 0.0]] * 4)
    for mask in ([1] * 8, [1, 0, 0, 0, 1, 1, 0, 0], [0] * 8):
        stats = run_moe(params, x, config, mesh=make_mesh(2), token_mask=jnp.array(mask, jnp.bool_))[1]
        assert int(stats.wire_rows) == sum(mask)


@pytest.mark.parametrize("ranks", [1, 2])
def test_3_padding_takes_no_capacity(ranks):
    """Eight tokens for expert 0 of two. With four masked it takes the first two that are not, as without the masked."""
    config, params = identity_router(2, 1, CommConfig(recv_rows_factor=None, capacity_factor=1.0))
    x, mask = jnp.array([[4.0, 0.0]] * 8), jnp.array([0, 0, 0, 1, 1, 0, 1, 1], jnp.bool_)
    y, stats = run_moe(params, x, config, mesh=mesh_of(ranks), token_mask=mask)
    assert int(stats.dropped_rows) == 2
    assert np.asarray(y).any(1).tolist() == [False, False, False, True, True, False, False, False]
    alone, stats = run_moe(params, x[:4], config, mesh=mesh_of(ranks), token_mask=jnp.ones(4, jnp.bool_))
    assert int(stats.dropped_rows) == 2
    np.testing.assert_allclose(np.asarray(alone), np.asarray(y)[mask], rtol=1e-6)
    full, stats = run_moe(params, x, config, mesh=mesh_of(ranks), token_mask=jnp.ones(8, jnp.bool_))
    assert int(stats.dropped_rows) == 4
    assert np.asarray(full).any(1).tolist() == [True] * 4 + [False] * 4


@pytest.mark.parametrize("ranks", [1, 2])
def test_4_both_meanings_of_the_balance_loss_have_a_name(ranks):
    case = CASES["aux_uniform"]
    config, params = identity_router(case["E"], case["k"], DENSE)
    x = np.zeros((8, 8), np.float32)
    for token in range(8):  # token t prefers experts t, t + 1 by a hair
        x[token, [token, (token + 1) % 8]] = 1e-4
    stats = run_moe(params, x, config, mesh=mesh_of(ranks))[1]
    assert float(balance_loss(stats, "hf")) == pytest.approx(case["hf"], rel=1e-6)
    assert float(balance_loss(stats, "switch")) == pytest.approx(case["switch_or_megatron"], rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_5_padding_is_not_counted_in_the_z_loss(ranks):
    case = CASES["z_loss"]
    config, params = identity_router(4, 1, DENSE)
    row = case["logits"][0]
    for rows, mask in (([row, [9.0, -5.0, 3.0, 1.0]], [1, 0]), ([[7.0] * 4, row], [0, 1]), ([row, row], [1, 1])):
        mask = jnp.array(mask, jnp.bool_)
        stats = run_moe(params, jnp.array(rows), config, mesh=mesh_of(ranks), token_mask=mask)[1]
        assert float(z_loss(stats)) == pytest.approx(case["value"], rel=1e-6)


# --------------------------------------------------------------------------------------------------- 6, 7: grouped rows


@functools.cache
def grouped_case(tail: float):
    """8 rows of which groups [2, 0, 3] own five: result and gradients of its squared sum."""
    rng = np.random.default_rng(6)
    rows, weights = rng.normal(size=(8, 4)).astype(np.float32), rng.normal(size=(3, 4, 5)).astype(np.float32)
    rows[5:] = tail
    sizes = jnp.array([2, 0, 3], jnp.int32)
    value = lambda r, w: (out := grouped_matmul(r, w, sizes), (out**2).sum())[::-1]
    (_, out), (d_rows, d_weights) = jax.jit(jax.value_and_grad(lambda r, w: value(r, w), (0, 1), has_aux=True))(
        rows, weights
    )
    want = np.zeros((8, 5))
    want[:2], want[2:5] = rows[:2] @ weights[0], rows[2:5] @ weights[2]
    return rows, weights, want, *map(np.asarray, (out, d_rows, d_weights))


@pytest.mark.parametrize("tail", [0.0, 1.0, np.nan, np.inf])
def test_6_an_expert_without_rows_has_a_gradient_of_exactly_0(tail):
    rows, _, want, _, _, d_weights = grouped_case(tail)
    assert not d_weights[1].any()
    close(d_weights[0], 2 * rows[:2].T @ want[:2])
    close(d_weights[2], 2 * rows[2:5].T @ want[2:5])


@pytest.mark.parametrize("tail", [0.0, 1.0, np.nan, np.inf])
def test_7_rows_past_the_sum_of_sizes_add_exactly_0(tail):
    _, weights, want, out, d_rows, _ = grouped_case(tail)
    close(out, want)
    assert not out[5:].any()
    assert not d_rows[5:].any()
    close(d_rows[:2], 2 * want[:2] @ weights[0].T)
    close(d_rows[2:5], 2 * want[2:5] @ weights[2].T)


# ---------------------------------------------------------------------------------------------------- 8: padded experts


@pytest.mark.parametrize(("experts", "ranks", "padded"), [(6, 4, 8), (60, 8, 64)])
def test_8_experts_that_do_not_divide_are_padded_with_empty_ones(experts, ranks, padded):
    config = MoEConfig(8, 4, experts, RouterConfig(top_k=2), ONE_ROUND)
    assert f"num_experts={experts} <padded with empty experts to " in repr(config)
    assert f"{padded} on {ranks}" in repr(config)
    mesh = make_mesh(ranks)
    layer = MoELayer(config, mesh, rngs=nnx.Rngs(0))
    params = layer.params()
    assert {w.shape[0] for w in params["experts"].values()} == {padded}
    assert params["router"]["kernel"].shape == (8, experts)

    owners = {}
    for shard in params["experts"]["up"].addressable_shards:
        first, end, _ = shard.index[0].indices(padded)
        for expert in range(first, min(end, experts)):
            owners.setdefault(expert, []).append(shard.device.id)
    assert owners == {e: [mesh.devices.flat[e // (padded // ranks)].id] for e in range(experts)}

    alone = jax.device_get(params)
    alone["experts"] = {n: w[:experts] for n, w in alone["experts"].items()}
    x = jnp.asarray(np.random.default_rng(experts).normal(size=(32, 8)), jnp.float32)
    (d_params, d_x, _), (y, stats) = value_and_gradients(config, ranks)(params, x, None, None)
    dense = dataclasses.replace(config, comm=DENSE)
    (a_params, a_x, _), (a_y, a_stats) = value_and_gradients(dense, 1)(alone, x, None, None)
    close(y, a_y)
    close(d_x, a_x)
    close(d_params["router"]["kernel"], a_params["router"]["kernel"])
    assert stats.counts.tolist() == a_stats.counts.tolist()
    assert stats.counts.shape == (experts,)
    for name, gradient in d_params["experts"].items():
        close(gradient[:experts], a_params["experts"][name])
        assert not np.asarray(gradient[experts:]).any()


# ---------------------------------------------------------------------------------------------------------- 9: capacity


def capacity_case(comm: CommConfig):
    """The layer, its parameters, eight equal tokens for expert 0, and what the dense path says of them."""
    case = CASES["capacity"]
    config, params = identity_router(case["E"], case["k"], comm)
    x = jnp.array([case["logits_row"]] * case["T"], jnp.float32)
    dense = run_moe(params, x, dataclasses.replace(config, comm=DENSE))[0]
    assert np.asarray(dense).any(1).all()
    return config, params, x, np.asarray(dense)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("mode", ["packed", "padded"])
def test_9_overflow_is_capped_counted_and_adds_exactly_0(mode, ranks):
    comm = dataclasses.replace(ONE_ROUND if mode == "packed" else CommConfig(mode=mode), capacity_factor=1.0)
    config, params, x, dense = capacity_case(comm)
    (d_params, d_x, _), (y, stats) = value_and_gradients(config, ranks)(params, x, None, None)
    close(y[:2], dense[:2])
    assert not np.asarray(y[2:]).any()
    assert not np.asarray(d_x[2:]).any()
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(d_params))
    assert int(stats.dropped_rows) == 6
    assert int(stats.dropped_rows) / CASES["capacity"]["T"] == 0.75
    assert stats.counts.tolist() == [8, 0, 0, 0], "what the router wanted"


def test_9_without_a_capacity_nothing_is_dropped():
    """All eight rows on rank 0, which needs several rounds for them."""
    config, params, x, dense = capacity_case(CommConfig(recv_rows_factor=1.0))
    y, stats = run_moe(params, x, config, mesh=make_mesh(4))
    close(y, dense)
    assert int(stats.dropped_rows) == 0
    assert int(stats.rounds) == 2


# ------------------------------------------------------------------------------------------------------- 10: activation


def test_10_gpt_oss_gate_and_up_alternate_and_only_gate_is_unclamped_below():
    case = CASES["gpt_oss_act"]
    gate, up = deinterleave(jnp.array([case["interleaved"]], jnp.float32))
    assert (gate.tolist(), up.tolist()) == ([[-20, 9]], [[3, -9]])
    np.testing.assert_allclose(gpt_oss(gate, up), [case["out"]], rtol=1e-5)


# ----------------------------------------------------------------------------------------------- 11: silent, idle ranks

SILENT = MoEConfig(8, 4, 8, RouterConfig(top_k=2))
SILENT_COMMS = {
    "all_to_all": CommConfig(transport="all_to_all", recv_rows_factor=1.0),
    "ragged": CommConfig(transport="ragged", recv_rows_factor=None),
    "padded": CommConfig(mode="padded"),
    "allgather": CommConfig(mode="allgather"),
}


def silent_situations():
    """Name -> (experts [T, K], mask [T]) on 4 ranks of 4 tokens and 2 experts."""
    rng = np.random.default_rng(11)
    anywhere = np.stack([rng.permutation(8)[:2] for _ in range(16)]).astype(np.int32)
    rank_0 = np.tile(np.array([0, 1], np.int32), (16, 1))
    everyone, not_rank_2 = np.ones(16, bool), np.arange(16) // 4 != 2
    return {
        "all tokens to rank 0's experts": (rank_0, everyone),
        "all tokens masked on rank 2": (anywhere, not_rank_2),
        "both": (rank_0, not_rank_2),
        "no token at all": (anywhere, np.zeros(16, bool)),
    }


@pytest.mark.parametrize("comm", SILENT_COMMS)
def test_11_a_rank_without_tokens_or_whose_experts_get_none(comm):
    config = dataclasses.replace(SILENT, comm=SILENT_COMMS[comm])
    dense = dataclasses.replace(SILENT, comm=DENSE)
    params = make_params(SILENT, 1)
    rng = np.random.default_rng(1)
    x, weights = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((16, 8), (16, 2)))
    for experts, mask in silent_situations().values():
        routing = Routing(jnp.asarray(experts), weights)
        gradients, (y, stats) = value_and_gradients(config, 4)(params, x, jnp.asarray(mask), routing)
        want, (want_y, want_stats) = value_and_gradients(dense, 1)(params, x, jnp.asarray(mask), routing)
        close(y, want_y)
        assert stats.counts.tolist() == want_stats.counts.tolist()
        close(gradients[1], want[1], 1e-4)
        close(gradients[2].weights, want[2].weights, 1e-4)
        used = sorted({int(e) for row, m in zip(experts, mask, strict=True) if m for e in row})
        for name, gradient in gradients[0]["experts"].items():
            close(gradient, want[0]["experts"][name], 1e-4)
            assert not np.asarray(gradient)[[e for e in range(8) if e not in used]].any()
        assert not np.asarray(gradients[1])[~mask].any()


# ------------------------------------------------------------------------------------------------ 12: ragged all-to-all


@functools.cache
def ragged_program(ranks: int, rows: int, room: int):
    """Global operand, output and slices -> result, and the gradients of sum(result * weight) to operand and output."""

    def local(operand, output, slices, weight):
        result, pull = jax.vjp(lambda a, b: ragged_all_to_all(a, b, *slices, axis_name="expert"), operand, output)
        return result, *pull(weight)

    spec = P("expert")
    wrapped = jax.shard_map(local, mesh=make_mesh(ranks), in_specs=(spec,) * 4, out_specs=(spec,) * 3, check_vma=False)
    return jax.jit(wrapped)


@pytest.mark.parametrize("ranks", [4, 8])
def test_12_ragged_all_to_all_on_cpu_meshes_equals_a_loop(ranks):
    rows, room, width = 12, 40, 3
    program = ragged_program(ranks, rows, room)
    for seed in range(10):
        rng = np.random.default_rng([ranks, seed])
        operand = rng.normal(size=(ranks, rows, width)).astype(np.float32)
        output, weight = rng.normal(size=(2, ranks, room, width)).astype(np.float32)
        sizes = np.zeros((ranks, ranks), np.int32)  # [source, destination]
        for source in range(ranks):
            for _ in range(0 if rng.random() < 0.2 else rng.integers(0, rows + 1)):
                to = rng.integers(0, max(1, ranks // 2)) if seed % 2 else rng.integers(0, ranks)
                if sizes[:, to].sum() < room:
                    sizes[source, to] += 1
        begins = np.cumsum(sizes, 1, dtype=np.int32) - sizes
        puts = np.cumsum(sizes, 0, dtype=np.int32) - sizes
        puts += np.maximum(0, room - sizes.sum(0)).astype(np.int32)[None] // 2  # rows before and after stay as they are
        result, d_operand, d_output = output.copy(), np.zeros_like(operand), weight.copy()
        for s in range(ranks):
            for d in range(ranks):
                for i in range(sizes[s, d]):
                    result[d, puts[s, d] + i] = operand[s, begins[s, d] + i]
                    d_operand[s, begins[s, d] + i] = weight[d, puts[s, d] + i]
                    d_output[d, puts[s, d] + i] = 0
        slices = tuple(a.reshape(-1) for a in (begins, sizes, puts, sizes.T))
        flat = [a.reshape(-1, width) for a in (operand, output, weight)]
        got = program(flat[0], flat[1], slices, flat[2])
        for mine, want in zip(got, (result, d_operand, d_output), strict=True):
            assert np.array_equal(mine, want.reshape(-1, width)), f"seed {seed}"


def test_12_the_transport_has_a_name():
    counts = np.full((4, 8), 2)
    for said, used in (("auto", "all_to_all"), ("ragged", "ragged"), ("all_gather", "all_gather")):
        config = dataclasses.replace(SILENT, comm=CommConfig(transport=said))
        assert resolve_transport(config, make_mesh(4)) == used
        assert byte_ledger(config, counts, transport=resolve_transport(config, make_mesh(4)))["transport"] == used


# ------------------------------------------------------------------------------------------ 13: gradients on any number


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_13_gradients_do_not_depend_on_the_number_of_ranks(ranks):
    params = make_params(SILENT, 2)
    x = jnp.asarray(np.random.default_rng(13).normal(size=(32, 8)), jnp.float32)
    gradients, (y, _) = value_and_gradients(dataclasses.replace(SILENT, comm=ONE_ROUND), ranks)(params, x, None, None)
    want, (want_y, _) = value_and_gradients(dataclasses.replace(SILENT, comm=DENSE), 1)(params, x, None, None)
    close(y, want_y)
    close(gradients[1], want[1])
    assert np.abs(want[0]["router"]["kernel"]).max() > 1e-3
    for got, expected in zip(jax.tree.leaves(gradients[0]), jax.tree.leaves(want[0]), strict=True):
        close(got, expected)


# -------------------------------------------------------------------------------------------------- 14: sums in float32


def test_14_eight_rows_at_home_are_summed_in_float32():
    """Eight weighted rows of 1 + 2^-8, which bfloat16 does not have: 8 + 2^-5 exactly, where bfloat16 sums give 8."""
    rows, weights = jnp.ones((8, 4), jnp.bfloat16), jnp.full((1, 8), 1 + 2**-8, jnp.float32)
    home = Home(jnp.arange(8), jnp.arange(8)[None])
    total = jax.jit(collect)(rows, weights, home)
    assert total.dtype == jnp.float32
    assert total.tolist() == [[8 + 2**-5] * 4]


def in_bfloat16(weights, answers) -> list[float]:
    """The three wrong sums: rounded rows added in float32, rounded rows added in bfloat16, and partial sums rounded."""
    rounded = [jnp.bfloat16(w * a) for w, a in zip(weights, answers, strict=True)]
    partial = jnp.bfloat16(0)
    for w, a in zip(weights, answers, strict=True):
        partial = jnp.bfloat16(np.float32(partial) + w * a)
    return [
        float(jnp.bfloat16(sum(np.float32(r) for r in rounded))),
        float(functools.reduce(lambda a, b: a + b, rounded)),
        float(partial),
    ]


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("mode", ["packed", "padded", "dense"])
def test_14_a_bfloat16_layer_rounds_its_sum_once(mode, ranks):
    """Expert e answers its last bias, the matrices being 0; what a token gets is known to the last bit.

    In its first place token 0 gets eight equal rows of 1 + 2^-7, each weighted by 1 + 2^-8; elsewhere rows and weights
    are random, so that each way of rounding early shows.
    """
    comm = ONE_ROUND if mode == "packed" else CommConfig(mode=mode)
    config = MoEConfig(16, 4, 8, RouterConfig(8), comm, expert_bias=True, dtype="bfloat16")
    params = jax.tree.map(jnp.zeros_like, make_params(config))
    rng = np.random.default_rng(14)
    answers = np.asarray(jnp.asarray(rng.normal(1, 0.3, (8, 16)), jnp.bfloat16), np.float32)
    answers[:, 0] = 1 + 2**-7
    weights = rng.uniform(0.5, 1, (8, 8)).astype(np.float32)
    weights[0] = 1 + 2**-8
    exact = weights.astype(np.float64) @ answers
    want = np.asarray(jnp.asarray(exact, jnp.bfloat16), np.float32)
    assert want[0, 0] == 8.125
    assert in_bfloat16(weights[0], answers[:, 0])[1] == 8.0625
    wrong = np.array([[in_bfloat16(weights[t], answers[:, h]) for h in range(16)] for t in range(8)])
    assert ((wrong != want[..., None]).sum((0, 1)) >= 8).all(), "or nothing is shown"
    for error in (-1e-6, 1e-6):
        nearly = np.asarray(jnp.asarray(exact * (1 + error), jnp.bfloat16), np.float32)
        assert np.array_equal(nearly, want), "the order of float32 sums must not matter"

    params["experts"]["down_bias"] = jnp.asarray(answers)
    routing = Routing(jnp.tile(jnp.arange(8, dtype=jnp.int32)[None], (8, 1)), jnp.asarray(weights))
    y, _ = run_moe(params, jnp.ones((8, 16), jnp.bfloat16), config, mesh=mesh_of(ranks), routing=routing)
    assert y.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(y, np.float32), want)
