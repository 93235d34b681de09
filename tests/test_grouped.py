"""Grouped products and the fused expert MLP against float64 NumPy loops, on every backend that CPU can run.

Letters: M rows, A positions, G groups (experts), H hidden, I intermediate; [M, K] x [G, K, N] in the plain products.

Backends: "public" is what users call; "loops" is the CPU code on a ladder short enough that small arrays use all of it,
with NaN in all memory it claims to write before reading; "fallback" is the ragged_dot code; "kernels" are those of
GPUs, interpreted (test_gpu_kernels.py has the shapes that break their tiles).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep import experts as activations
from jax_ep.config import ConfigError
from jax_ep.grouped import ExpertWeights, cpu, expert_mlp, fallback, gpu, grouped_matmul, products

PRODUCTS = {"fallback": fallback.RAGGED_DOT, "kernels": gpu.Kernels(interpret=True)}
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 3e-3}
ACTIVATIONS = {"swiglu": activations.swiglu, "gelu": activations.gelu, "gpt_oss": activations.gpt_oss}


def assert_near(actual: Any, expected: np.ndarray, tolerance: float, what: str) -> None:
    """Norm-wise: |a - b| <= tolerance * max|b|, and finite."""
    actual = np.asarray(actual, np.float64)
    assert np.isfinite(actual).all(), what
    error, scale = np.abs(actual - expected).max(initial=0), np.abs(expected).max(initial=0)
    assert error <= tolerance * scale, f"{what}: error {error} at scale {scale}"


def normal(seed: int, shape: tuple[int, ...], dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def small_ladder(positions: int, *_: Any) -> cpu.Ladder:
    return cpu.Ladder((min(2, positions),), min(3, positions))


@pytest.fixture
def on_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "ladder", small_ladder)
    monkeypatch.setattr(cpu, "_unwritten", partial(jax.tree.map, lambda a: jnp.full(a.shape, jnp.nan, a.dtype)))


@pytest.fixture(params=["public", "loops", *PRODUCTS])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "loops":
        request.getfixturevalue("on_loops")
    return request.param


# ---------------------------------------------------------------------------------------------- plain grouped product


def matmul_oracle(
    rows: np.ndarray, weights: np.ndarray, sizes: list[int], d_out: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    out, d_rows, d_weights = np.zeros_like(d_out), np.zeros_like(rows), np.zeros_like(weights)
    row = 0
    for group, size in enumerate(sizes):
        for _ in range(size):
            out[row] = rows[row] @ weights[group]
            d_rows[row] = weights[group] @ d_out[row]
            d_weights[group] += np.outer(rows[row], d_out[row])
            row += 1
    return out, d_rows, d_weights


def matmul_and_gradients(backend: str) -> Callable[..., Any]:
    """Compiled (rows, weights, sizes, d_out) -> (out, d_rows, d_weights)."""

    def through(rows: jax.Array, weights: jax.Array, sizes: jax.Array, d_out: jax.Array) -> Any:
        if backend == "public":
            out, pull = jax.vjp(lambda r, w: grouped_matmul(r, w, sizes), rows, weights)
            return out, *pull(d_out)
        if backend == "loops":
            return cpu.matmul_forward(rows, weights, sizes), *cpu.matmul_backward(rows, weights, sizes, d_out)
        out = products.matmul_forward(PRODUCTS[backend], rows, weights, sizes)
        return out, *products.matmul_backward(PRODUCTS[backend], rows, weights, sizes, d_out)

    return jax.jit(through)


def check_matmul(backend: str, shape: tuple[int, int, int, int], cases: list[list[int]], dtype: str) -> None:
    m, g, k, n = shape
    run = matmul_and_gradients(backend)
    weights, d_out = normal(1, (g, k, n), dtype), normal(2, (m, n), dtype)
    for sizes in cases:
        rows = normal(0, (m, k), dtype).at[sum(sizes) :].set(jnp.nan)
        tail_nan = d_out.at[sum(sizes) :].set(jnp.nan)
        got = run(rows, weights, jnp.asarray(sizes), tail_nan)
        expected = matmul_oracle(*(np.asarray(a, np.float64) for a in (rows, weights)), sizes, np.asarray(d_out, float))
        for name, actual, value in zip(("out", "d_rows", "d_weights"), got, expected):
            assert actual.dtype == jnp.dtype(dtype)
            assert_near(actual, value, TOLERANCE[dtype], f"{name}, sizes {sizes}")
        empty = [group for group, size in enumerate(sizes) if size == 0]
        assert not np.asarray(got[0], float)[sum(sizes) :].any()
        assert not np.asarray(got[1], float)[sum(sizes) :].any()
        assert not np.asarray(got[2], float)[empty].any()


SIZES = [[2, 0, 3], [0, 0, 0], [8, 0, 0], [0, 0, 8], [1, 5, 2], [4, 4, 0], [3, 2, 3], [0, 1, 0], [0, 7, 1]]


def test_matmul_matches_the_oracle_on_hostile_sizes(backend: str) -> None:
    check_matmul(backend, (8, 3, 5, 6), SIZES, "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matmul_in_16_bits(backend: str, dtype: str) -> None:
    check_matmul(backend, (8, 3, 16, 6), SIZES[:5], dtype)


def test_matmul_of_one_group_and_of_one_row(backend: str) -> None:
    check_matmul(backend, (5, 1, 4, 3), [[5], [4], [2], [0]], "float32")
    check_matmul(backend, (1, 3, 4, 2), [[0, 1, 0], [0, 0, 0]], "float32")


def test_matmul_on_the_ladder_of_a_big_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_PLAIN_FINE", 1.3)
    m, g, k, n = 4096, 8, 128, 512
    rungs = cpu.ladder(m, g, m, 2.0 * k * n, cpu._PLAIN_FINE)
    assert rungs.piece is not None
    assert len(rungs.steps) == 7
    rows, weights, d_out = normal(0, (m, k)), normal(1, (g, k, n)), normal(2, (m, n))
    run = matmul_and_gradients("public")
    ends = list(rungs.steps)
    near = [ends[0], ends[0] + 1, ends[-1], ends[-1] + 1, 0, 1, ends[len(ends) // 2]]
    for sizes in ([*near, m - sum(near)], [0, m, 0, 0, 0, 0, 0, 0], [m // g] * g):
        out, d_rows, d_weights = run(rows, weights, jnp.asarray(sizes), d_out)
        x, w, d = (np.asarray(a, np.float64) for a in (rows, weights, d_out))
        ends_of = np.cumsum(sizes)
        for group, (start, end) in enumerate(zip(ends_of - sizes, ends_of)):
            at = slice(int(start), int(end))
            assert_near(out[at], x[at] @ w[group], 1e-5, f"out, group {group} of {sizes}")
            assert_near(d_rows[at], d[at] @ w[group].T, 1e-5, f"d_rows, group {group} of {sizes}")
            assert_near(d_weights[group], x[at].T @ d[at], 1e-5, f"d_weights, group {group} of {sizes}")


# --------------------------------------------------------------------------------------------------- fused expert MLP


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gpt_oss64(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate = np.minimum(gate, 7)
    return (np.clip(up, -7, 7) + 1) * gate * sigmoid(1.702 * gate)


ACTIVATIONS64 = {
    "swiglu": lambda gate, up: gate * sigmoid(gate) * up,
    "gelu": lambda gate, up: up * np.vectorize(lambda v: 0.5 * (1 + math.erf(v / math.sqrt(2))))(up),
    "gpt_oss": gpt_oss64,
}


def mlp_oracle(
    rows: np.ndarray,
    index: list[int],
    sizes: list[int],
    weights: np.ndarray,
    experts: ExpertWeights,
    name: str,
    d_out: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, ExpertWeights]:
    """Output and gradients, position by position; the activation's derivative by central differences."""
    act, step = ACTIVATIONS64[name], 1e-6
    out, d_rows, d_weights = np.zeros(rows.shape), np.zeros(rows.shape), np.zeros(weights.shape)
    d = ExpertWeights(*(None if field is None else np.zeros(field.shape) for field in experts))

    def pre_activation(x: np.ndarray, matrix: Any, bias: Any, expert: int) -> Any:
        if matrix is None:
            return None
        return x @ matrix[expert] + (0 if bias is None else bias[expert])

    n = 0
    for expert, size in enumerate(sizes):
        for _ in range(size):
            m, factor = index[n], weights[n]
            gate = pre_activation(rows[m], experts.gate, experts.gate_bias, expert)
            up = pre_activation(rows[m], experts.up, experts.up_bias, expert)
            h = act(gate, up)
            y = pre_activation(h, experts.down, experts.down_bias, expert)
            out[m] += factor * y
            d_weights[n] = y @ d_out[m]
            d_y = factor * d_out[m]
            d_h = experts.down[expert] @ d_y
            d.down[expert] += np.outer(h, d_y)
            d_up = d_h * (act(gate, up + step) - act(gate, up - step)) / (2 * step)
            d.up[expert] += np.outer(rows[m], d_up)
            d_rows[m] += experts.up[expert] @ d_up
            sums = {"up_bias": d_up, "down_bias": d_y}
            if gate is not None:
                d_gate = d_h * (act(gate + step, up) - act(gate - step, up)) / (2 * step)
                d.gate[expert] += np.outer(rows[m], d_gate)
                d_rows[m] += experts.gate[expert] @ d_gate
                sums["gate_bias"] = d_gate
            for field, value in sums.items():
                if getattr(d, field) is not None:
                    getattr(d, field)[expert] += value
            n += 1
    return out, d_rows, d_weights, d


def mlp_and_gradients(backend: str, name: str, weighted: bool) -> Callable[..., Any]:
    """Compiled (rows, index, sizes, weights or None, experts, d_out) -> (out, d_rows, d_weights or None, d_experts)."""
    activation = ACTIVATIONS[name]

    def through(
        rows: jax.Array, index: jax.Array, sizes: jax.Array, weights: jax.Array | None, experts: Any, d_out: jax.Array
    ) -> Any:
        if backend == "public":
            op = lambda r, w, e: expert_mlp(r, index, sizes, w, e, activation=activation, expected_rows=5)
            out, pull = jax.vjp(op, rows, weights, experts)
            return out, *pull(d_out)
        args = (rows, index, sizes, weights, experts)
        if backend == "loops":
            out, gate, up = cpu.mlp_forward(*args, activation=activation, expected_rows=5, save=True)
            return out, *cpu.mlp_backward(*args, gate, up, d_out, activation=activation, expected_rows=5)
        out, gate, up = products.mlp_forward(PRODUCTS[backend], *args, activation=activation, save=True)
        how = {"activation": activation, "delay_wgrad": backend == "kernels"}  # which changes no value
        return out, *products.mlp_backward(PRODUCTS[backend], *args, gate, up, d_out, **how)

    return jax.jit(through)


def make_experts(shape: tuple[int, int, int], name: str, biased: bool, dtype: str) -> ExpertWeights:
    g, h, i = shape
    gated = name != "gelu"
    scale = 2.0 if name == "gpt_oss" else 0.5
    gate, up, down = (normal(seed, s, dtype) for seed, s in ((10, (g, h, i)), (11, (g, h, i)), (12, (g, i, h))))
    gate_bias, up_bias, down_bias = (normal(seed, s, dtype) for seed, s in ((13, (g, i)), (14, (g, i)), (15, (g, h))))
    return ExpertWeights(
        gate=gate * scale if gated else None,
        up=up * scale,
        down=down,
        gate_bias=gate_bias if biased and gated else None,
        up_bias=up_bias if biased else None,
        down_bias=down_bias if biased else None,
    )


def check_mlp(
    backend: str,
    shape: tuple[int, int, int, int],
    name: str,
    biased: bool,
    weighted: bool,
    dtype: str,
    cases: list[tuple[list[int], list[int]]],
) -> None:
    """`cases` are (index, sizes); index entries past the sum may be anything."""
    m, g, h, i = shape
    positions = len(cases[0][0])
    experts = make_experts((g, h, i), name, biased, dtype)
    run = mlp_and_gradients(backend, name, weighted)
    out_dtype = "float32" if weighted else dtype
    tolerance = TOLERANCE[dtype] * 2
    for index, sizes in cases:
        total = sum(sizes)
        used = sorted(set(index[:total]))
        unused = [row for row in range(m) if row not in used]
        rows = normal(0, (m, h), dtype)
        d_out = normal(1, (m, h), out_dtype)
        weights = normal(2, (positions,)) if weighted else None
        oracle_weights = np.asarray(weights, np.float64) if weighted else np.ones(positions)
        in64 = lambda tree: jax.tree.map(lambda a: np.asarray(a, np.float64), tree)
        expected = mlp_oracle(in64(rows), index, sizes, oracle_weights, in64(experts), name, in64(d_out))
        rows = rows.at[jnp.asarray(unused, int)].set(jnp.nan)
        d_out = d_out.at[jnp.asarray(unused, int)].set(jnp.nan)
        weights = weights.at[total:].set(jnp.nan) if weighted else None
        got = run(rows, jnp.asarray(index, jnp.int32), jnp.asarray(sizes), weights, experts, d_out)
        says = f"{backend} {name} sizes {sizes} index {index}"
        assert got[0].dtype == jnp.dtype(out_dtype)
        assert got[1].dtype == jnp.dtype(dtype)
        assert (got[2] is None) == (not weighted)
        for what, actual, value in zip(("out", "d_rows", "d_weights"), got, expected):
            if actual is not None:
                assert_near(actual, value, tolerance, f"{what}, {says}")
        for field in ExpertWeights._fields:
            actual, value = getattr(got[3], field), getattr(expected[3], field)
            assert (actual is None) == (value is None)
            if actual is not None:
                assert actual.dtype == jnp.dtype(dtype)
                assert_near(actual, value, tolerance, f"d_{field}, {says}")
                assert not np.asarray(actual, float)[[e for e in range(g) if sizes[e] == 0]].any()
        for array in got[:2]:
            assert not np.asarray(array, float)[unused].any()
        if weighted:
            assert not np.asarray(got[2])[total:].any()


# Rows 0-6; index 7 is out of range, -1 too. With weights rows may repeat, also within an expert.
REPEATED = [
    ([0, 3, 3, 5, 0, 1, 6, 7, 7], [2, 0, 3, 2]),
    ([0, 0, 0, 1, 1, 2, 2, 2, 6], [9, 0, 0, 0]),
    ([4, 4, 4, 4, 4, 4, 4, 4, 4], [0, 0, 4, 5]),
    ([7, -1, 7, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0]),
    ([6, 5, 4, 3, 2, 1, 0, -1, 99], [1, 4, 2, 0]),
    ([2, 7, 7, 7, 7, 7, 7, 7, 7], [0, 1, 0, 0]),
]
UNIQUE = [
    ([0, 3, 2, 5, 1, 6, 4, 7, 7], [2, 0, 3, 2]),
    ([6, 5, 4, 3, 2, 1, 0, -1, 99], [0, 7, 0, 0]),
    ([7, -1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0]),
    ([2, 4, 7, 7, 7, 7, 7, 7, 7], [0, 1, 0, 1]),
]


@pytest.mark.parametrize(("name", "biased"), [("swiglu", True), ("gelu", False), ("gpt_oss", True)])
def test_mlp_with_weights_matches_the_oracle(backend: str, name: str, biased: bool) -> None:
    check_mlp(backend, (7, 4, 5, 6), name, biased, True, "float32", REPEATED)


@pytest.mark.parametrize(("name", "biased"), [("swiglu", False), ("gelu", True)])
def test_mlp_without_weights_matches_the_oracle(backend: str, name: str, biased: bool) -> None:
    check_mlp(backend, (7, 4, 5, 6), name, biased, False, "float32", UNIQUE)


@pytest.mark.parametrize(("dtype", "weighted"), [("bfloat16", True), ("float16", False)])
def test_mlp_in_16_bits(backend: str, dtype: str, weighted: bool) -> None:
    cases = REPEATED[:3] if weighted else UNIQUE[:2]
    check_mlp(backend, (7, 4, 8, 6), "swiglu", True, weighted, dtype, cases)


def test_mlp_of_one_expert_and_of_one_row(backend: str) -> None:
    one_expert = [([0, 1, 2, 2, 1], [5]), ([0, 1, 2, 3, 9], [3]), ([0] * 5, [0])]
    check_mlp(backend, (4, 1, 3, 2), "swiglu", True, True, "float32", one_expert)
    check_mlp(backend, (1, 3, 3, 2), "swiglu", True, True, "float32", [([0], [0, 1, 0]), ([5], [0, 0, 0])])


def test_a_hot_expert_of_many_pieces_sums_its_16_bit_gradients_in_float32(request: pytest.FixtureRequest) -> None:
    positions, dtype = 512, "bfloat16"
    experts = make_experts((2, 4, 4), "swiglu", False, dtype)
    index, sizes = jnp.arange(positions, dtype=jnp.int32), jnp.asarray([positions - 1, 1])
    rows, d_out = jnp.ones((positions, 4), dtype), jnp.ones((positions, 4))
    weights = jnp.full(positions, 1 / 64)
    gradient = lambda: mlp_and_gradients("loops", "swiglu", True)(rows, index, sizes, weights, experts, d_out)[3]
    one_gemm = gradient()
    request.getfixturevalue("on_loops")
    pieces = gradient()
    for field in ("gate", "up", "down"):
        np.testing.assert_array_equal(getattr(pieces, field), getattr(one_gemm, field))


# --------------------------------------------------------------------------------------------- where programs put it


def example() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, ExpertWeights]:
    experts = make_experts((4, 5, 6), "swiglu", True, "float32")
    index, sizes = REPEATED[0]
    return normal(0, (7, 5)), jnp.asarray(index, jnp.int32), jnp.asarray(sizes), normal(1, (9,)), experts


def loss(
    rows: jax.Array,
    index: jax.Array,
    sizes: jax.Array,
    weights: jax.Array,
    experts: ExpertWeights,
    backend: str = "auto",
) -> jax.Array:
    how = {"activation": activations.swiglu, "backend": backend}
    return jnp.square(expert_mlp(rows, index, sizes, weights, experts, **how)).sum()


def assert_trees_near(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        assert_near(a, np.asarray(b), 1e-5, "tree")


def test_gradients_inside_scan_loops_checkpoint_and_shard_map(mesh: Callable[..., jax.sharding.Mesh]) -> None:
    args = example()
    gradient = jax.grad(loss, argnums=(0, 3, 4))
    expected = jax.jit(gradient)(*args)
    rows = args[0]
    added = lambda a, b: jax.tree.map(jnp.add, a, b)
    zeros = jax.tree.map(jnp.zeros_like, expected)
    bound = jnp.int32(2)

    looped = jax.jit(lambda n, *a: jax.lax.fori_loop(0, n, lambda _, c: added(c, gradient(*a)), zeros))
    assert_trees_near(looped(bound, *args), added(expected, expected))

    def scanned(rows: jax.Array, weights: jax.Array, experts: ExpertWeights) -> jax.Array:
        step = lambda total, factor: (total + loss(rows * factor, *args[1:3], weights, experts), None)
        return jax.lax.scan(step, jnp.zeros(()), jnp.ones(2))[0]

    assert_trees_near(jax.jit(jax.grad(scanned, (0, 1, 2)))(rows, *args[3:]), added(expected, expected))

    one_a_rank = lambda *a: jax.tree.map(lambda g: g[None], gradient(*a))
    mapped = jax.shard_map(one_a_rank, mesh=mesh(2), in_specs=P(), out_specs=P("expert"), check_vma=False)
    both = jax.jit(mapped)(*args)
    for rank in range(2):
        assert_trees_near(jax.tree.map(lambda g, rank=rank: g[rank], both), expected)


def test_a_remat_policy_keeps_the_named_pre_activations(capsys: pytest.CaptureFixture[str]) -> None:
    args = example()
    function = lambda *a: jnp.sin(loss(*a))
    plain = jax.jit(jax.grad(function, (0, 3, 4)))(*args)
    policies = jax.checkpoint_policies
    for policy, kept in ((policies.save_only_these_names("moe_gate", "moe_up"), 2), (policies.nothing_saveable, 0)):
        recomputed = jax.checkpoint(function, policy=policy)
        jax.ad_checkpoint.print_saved_residuals(recomputed, *args)
        assert capsys.readouterr().out.count("f32[9,6]") == kept
        assert_trees_near(jax.jit(jax.grad(recomputed, (0, 3, 4)))(*args), plain)


@pytest.mark.parametrize(
    ("platform", "backend", "product"),
    [("cuda", "auto", "gpu.triton"), ("tpu", "auto", "ragged_dot"), ("cuda", "ragged_dot", "ragged_dot")],
)
def test_lowering_for_an_accelerator_has_its_products_and_no_cpu_loops(
    platform: str, backend: str, product: str
) -> None:
    def text(function: Callable[..., Any], *args: Any, platform: str = platform) -> str:
        return jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()

    rows, weights, sizes = normal(0, (8, 4)), normal(1, (3, 4, 5)), jnp.asarray([2, 0, 3])
    square = lambda r, w: jnp.square(grouped_matmul(r, w, sizes, backend=backend)).sum()
    plain = jax.value_and_grad(square, argnums=(0, 1))
    fused = jax.value_and_grad(partial(loss, backend=backend), argnums=(0, 3, 4))
    # Kernels multiply gate and up in one, forward and back to the rows.
    counts = (3, 7) if product == "gpu.triton" else (3, 9)
    other = {"gpu.triton": "ragged_dot", "ragged_dot": "gpu.triton"}[product]
    for function, args, count in ((plain, (rows, weights), counts[0]), (fused, example(), counts[1])):
        there = text(function, *args)
        assert there.count(product) >= count
        assert other not in there
        assert "stablehlo.while" not in there
        here = text(function, *args, platform="cpu")
        assert product not in here  # JAX has no ragged_dot on CPU either
        assert ("stablehlo.while" in here) == (backend == "auto")


@pytest.mark.parametrize("backend", ["triton", "tokamax"])
def test_a_backend_that_is_not_there_is_refused(backend: str) -> None:
    if backend == "tokamax" and importlib.util.find_spec("tokamax"):
        pytest.skip("tokamax is here")
    with pytest.raises(ConfigError, match="backend='auto' works"):
        grouped_matmul(jnp.ones((2, 3)), jnp.ones((1, 3, 2)), jnp.asarray([2]), backend=backend)


def test_no_positions_and_no_rows_give_zeros() -> None:
    rows, _, _, _, experts = example()
    none = jnp.zeros(0, jnp.int32)
    sizes = jnp.zeros(4, jnp.int32)
    op = partial(expert_mlp, activation=activations.swiglu)
    out, pull = jax.vjp(lambda r, w, e: op(r, none, sizes, w, e), rows, jnp.zeros(0), experts)
    assert out.shape == rows.shape
    assert not out.any()
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(pull(out)))
    assert op(rows[:0], jnp.zeros(3, jnp.int32), sizes, None, experts).shape == (0, 5)
    assert grouped_matmul(jnp.zeros((0, 5)), experts.up, sizes).shape == (0, 6)


# ------------------------------------------------------------------------------------------------------------- ladder


@pytest.mark.parametrize("fine", [cpu._PLAIN_FINE, cpu._MLP_FINE])
@pytest.mark.parametrize(
    ("positions", "groups", "expected"),
    [(4096, 8, 4096), (16384, 64, 16384), (32768, 64, 16384), (8192, 1, 4096), (8192, 128, 100), (3000, 7, 9999)],
)
def test_ladder_rises_holds_every_group_and_wastes_little_near_the_mean(
    positions: int, groups: int, expected: int, fine: float
) -> None:
    steps, piece = cpu.ladder(positions, groups, expected, 1e6, fine)
    assert list(steps) == sorted(set(steps))
    assert all(0 < step <= positions for step in steps)
    assert (steps[-1] == positions) if piece is None else (0 < piece < positions)
    assert len(steps) <= 18
    mean = min(expected, positions) / groups
    for size in range(1, min(positions, int(1.35 * mean)) + 1):
        step = next(step for step in steps if step >= size)
        assert step - size <= 0.26 * mean + cpu._MULTIPLE
        if size >= 0.7 * mean:
            assert step <= size * fine + cpu._MULTIPLE


def test_ladder_of_small_work_is_one_step_and_of_moderate_work_two_bodies() -> None:
    assert cpu.ladder(64, 8, 64, 1e4, 1.1) == ((64,), None)
    steps, piece = cpu.ladder(512, 8, 512, 7e5, 1.1)
    assert len(steps) == 1
    assert piece is not None
    assert cpu.ladder(512, 8, 512, 8e5, 1.1).steps[1:]


# ----------------------------------------------------------------------------------------------------------- refusals


def test_matmul_refuses_what_does_not_fit() -> None:
    rows, weights, sizes = jnp.ones((8, 4)), jnp.ones((3, 4, 2)), jnp.asarray([2, 0, 3])
    refused: list[tuple[tuple[Any, Any, Any], str]] = [
        ((rows[0], weights, sizes), r"rows\.shape=\(4,\)"),
        ((rows, weights[0], sizes), r"weights\.shape=\(4, 2\)"),
        ((rows[:, :3], weights, sizes), r"weights\.shape=\(3, 4, 2\).*K=3.*\(3, 3, 2\) works"),
        ((rows, weights, sizes[:2]), r"group_sizes\.shape=\(2,\).*\(3,\) works"),
        ((rows, weights, sizes * 1.0), r"group_sizes\.dtype='float32'.*int32"),
        ((rows, weights.astype("bfloat16"), sizes), r"weights\.dtype='bfloat16'.*float32"),
        ((rows.astype("int32"), weights, sizes), r"rows\.dtype='int32'"),
    ]
    for args, message in refused:
        with pytest.raises(ConfigError, match=message):
            grouped_matmul(*args)


def test_mlp_refuses_what_does_not_fit() -> None:
    rows, index, sizes, weights, experts = example()
    op = partial(expert_mlp, activation=activations.swiglu)
    refused: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((rows[:, :4], index, sizes, weights, experts), {}, r"experts\.up\.shape=\(4, 5, 6\)"),
        ((rows, index[None], sizes, weights, experts), {}, r"index\.shape=\(1, 9\)"),
        ((rows, index * 1.0, sizes, weights, experts), {}, r"index\.dtype"),
        ((rows, index, sizes[:3], weights, experts), {}, r"group_sizes\.shape=\(3,\)"),
        ((rows, index, sizes, weights[:4], experts), {}, r"weights\.shape=\(4,\).*\(9,\) works"),
        ((rows, index, sizes, weights.astype("bfloat16"), experts), {}, r"weights\.dtype"),
        ((rows, index, sizes, weights, experts._replace(gate=None)), {}, r"experts\.gate_bias"),
        ((rows, index, sizes, weights, experts._replace(down=experts.up)), {}, r"experts\.down\.shape"),
        ((rows.astype("bfloat16"), index, sizes, weights, experts), {}, r"experts\.up\.dtype='float32'.*bfloat16"),
        ((rows, index, sizes, weights, experts), {"expected_rows": 0}, r"expected_rows=0"),
    ]
    for args, more, message in refused:
        with pytest.raises(ConfigError, match=message):
            op(*args, **more)
