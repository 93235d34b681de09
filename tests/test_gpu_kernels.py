"""The GPU kernels, interpreted, on the shapes that break tiles; what they are cut into; what they lower to.

Letters: A positions, G groups; [A, K] x [G, K, N]. Tiles here are 16 or 32 a side, so that small arrays have several of
them, whole and partly filled, in every direction. (test_grouped.py runs the whole expert MLP on the kernels as well.)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep.experts import gpt_oss, swiglu
from jax_ep.grouped import grouped_matmul
from jax_ep.grouped.gpu import Kernels
from jax_ep.grouped.gpu_tiles import Tiles, gradient_tiles, product_tiles, visits
from jax_ep.grouped.products import ExpertWeights, Rows

TILE = 16
A, G = 5 * TILE + 3, 4
KERNELS = Kernels(interpret=True, tiles=Tiles(TILE, 32, 16, 4, 4, 2))
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}
# Rows around the edges of a tile, empty groups everywhere, one group with all, tails of every kind.
SIZES = [
    [0, 1, TILE - 1, TILE],
    [TILE + 1, 0, 0, 2 * TILE],
    [A, 0, 0, 0],
    [0, 0, 0, A],
    [0, A - 1, 0, 0],
    [0, 0, 0, 0],
    [3 * TILE, TILE, TILE, 3],
    [1, 1, 1, 1],
]
# Whole tiles; several both ways, as many as in a band, and one element more; one less than a tile; less than the least.
SIDES = [(32, 32), (33, 97), (15, 31), (1, 3)]


def normal(seed: int, shape: Sequence[int], dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def in64(array: jax.Array) -> np.ndarray:
    return np.asarray(array, np.float64)


def spans(sizes: Sequence[int]) -> list[tuple[int, slice]]:
    ends = np.cumsum(sizes)
    return [(group, slice(int(end) - size, int(end))) for group, (size, end) in enumerate(zip(sizes, ends))]


def assert_near(actual: Any, expected: np.ndarray, dtype: str, what: str) -> None:
    actual = in64(actual)
    assert np.isfinite(actual).all(), what
    error = np.abs(actual - expected).max(initial=0)
    assert error <= TOLERANCE[dtype] * max(1.0, np.abs(expected).max(initial=0)), f"{what}: {error}"


def rows_of(seed: int, sizes: Sequence[int], width: int, dtype: str, indexed: bool) -> tuple[Rows, np.ndarray]:
    """Rows and what each position holds. Everything past the sum is NaN, or points at NaN, or out of range."""
    filled = sum(sizes)
    if not indexed:
        values = normal(seed, (A, width), dtype).at[filled:].set(jnp.nan)
        return Rows(values), in64(values)
    random = np.random.default_rng(seed)
    index = random.integers(0, 9, A)
    index[filled:] = random.choice([9, 10, -1, 10**6], A - filled)
    values = normal(seed, (10, width), dtype).at[9].set(jnp.nan)
    return Rows(values, jnp.asarray(index, jnp.int32)), in64(values)[np.clip(index, 0, 9)]


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize(("k", "n"), SIDES)
@pytest.mark.parametrize("transposed", [False, True])
def test_product_of_two_pairs(k: int, n: int, transposed: bool, dtype: str) -> None:
    weights = [normal(seed, (G, n, k) if transposed else (G, k, n), dtype) for seed in (1, 2)]
    matrices = [in64(w).swapaxes(1, 2) if transposed else in64(w) for w in weights]

    @jax.jit
    def run(first: Rows, second: Rows, sizes: jax.Array) -> jax.Array:
        pairs = [(first, weights[0]), (second, weights[1])]
        return KERNELS.product(pairs, sizes, jnp.float32, transposed)

    for sizes in SIZES:
        (first, at_first), (second, at_second) = rows_of(3, sizes, k, dtype, True), rows_of(4, sizes, k, dtype, False)
        expected = np.zeros((A, n))
        for group, span in spans(sizes):
            expected[span] = at_first[span] @ matrices[0][group] + at_second[span] @ matrices[1][group]
        out = run(first, second, jnp.asarray(sizes))
        assert out.dtype == jnp.float32
        # Inputs are exact in float64, sums are float32 whatever the inputs' dtype.
        assert_near(out, expected, "float32", f"sizes {sizes}")
        assert not np.asarray(out)[sum(sizes) :].any()


@pytest.mark.parametrize(("k", "n"), SIDES)
def test_weight_gradient(k: int, n: int, dtype: str) -> None:
    run = jax.jit(lambda x, d, sizes: KERNELS.weight_gradient(x, d, sizes, jnp.float32))
    for sizes, indexed in zip(SIZES, itertools.cycle([(True, False), (False, True)])):
        x, at_x = rows_of(5, sizes, k, dtype, indexed[0])
        d, at_d = rows_of(6, sizes, n, dtype, indexed[1])
        out = run(x, d, jnp.asarray(sizes))
        assert out.dtype == jnp.float32
        for group, span in spans(sizes):
            expected = at_x[span].T @ at_d[span]
            assert_near(out[group], expected, "float32", f"group {group} of {sizes}")
            assert sizes[group] or not np.asarray(out[group]).any()


@pytest.mark.parametrize(("k", "n"), SIDES[1:])
@pytest.mark.parametrize(("biases", "activation"), [((True, True), gpt_oss), ((False, True), swiglu)])
def test_hidden(k: int, n: int, biases: tuple[bool, bool], activation: Any, dtype: str) -> None:
    gate, up = normal(1, (G, k, n), dtype), normal(2, (G, k, n), dtype)
    gate_bias, up_bias = (normal(seed, (G, n), dtype) if has else None for seed, has in zip((3, 4), biases))
    experts = ExpertWeights(gate, up, jnp.zeros((G, n, k), dtype), gate_bias, up_bias)
    run = jax.jit(lambda x, sizes: KERNELS.hidden(x, experts, sizes, activation, True))
    alone = jax.jit(lambda x, sizes: KERNELS.hidden(x, experts, sizes, activation, False))
    bias_of = lambda bias, group: 0 if bias is None else in64(bias)[group]
    for sizes in SIZES:
        x, at_x = rows_of(7, sizes, k, dtype, True)
        h, out_gate, out_up = run(x, jnp.asarray(sizes))
        for group, span in spans(sizes):
            expected_gate = at_x[span] @ in64(gate)[group] + bias_of(gate_bias, group)
            expected_up = at_x[span] @ in64(up)[group] + bias_of(up_bias, group)
            assert_near(out_gate[span], expected_gate, dtype, f"gate {group} of {sizes}")
            assert_near(out_up[span], expected_up, dtype, f"up {group} of {sizes}")
            # The activation is of the rounded values.
            expected_h = activation(*(a[span].astype(jnp.float32) for a in (out_gate, out_up)))
            assert_near(h[span], in64(expected_h), dtype, f"h {group} of {sizes}")
        for array in (h, out_gate, out_up):
            assert array.dtype == jnp.dtype(dtype)
            assert not in64(array[sum(sizes) :]).any()
        only_h, *nothing = alone(x, jnp.asarray(sizes))
        assert nothing == [None, None]
        np.testing.assert_array_equal(in64(only_h), in64(h))


def test_every_position_is_in_one_visit_of_its_group() -> None:
    for positions, groups in ((1, 1), (7, 3), (40, 4), (64, 1), (33, 40)):
        random = np.random.default_rng(positions)
        for tile, band in itertools.product((1, 3, 16), (1, 4)):
            for _ in range(3):
                shares = np.where(random.random(groups) < 0.5, 0, random.random(groups)) + 1e-9
                sizes = random.multinomial(random.integers(0, positions + 1), shares / shares.sum())
                table = jax.tree.map(np.asarray, visits(jnp.asarray(sizes, jnp.int32), positions, tile, band))
                assert table.first.shape[0] % band == 0
                assert (table.count <= tile).all()
                seen = [
                    (position, group) for group, first, count in zip(*table) for position in range(first, first + count)
                ]
                expected = np.repeat(np.arange(groups + 1), [*sizes, positions - sizes.sum()])
                assert seen == list(enumerate(expected)), (sizes, tile)


@pytest.mark.parametrize("bits", [16, 32])
def test_tiles_are_powers_of_two_and_fit_into_shared_memory(bits: int) -> None:
    least = 99 << 10  # sm_86, sm_89 and sm_120; sm_80 and sm_90 have more
    for mean, k, n in itertools.product((0.1, 5, 20, 60, 300, 1e5), (1, 16, 100, 4096), (1, 33, 14336)):
        for matrices in (1, 2):
            tiles = product_tiles(mean, n, k, bits, matrices)
            tile = tiles.rows * tiles.depth + matrices * tiles.depth * tiles.columns
            assert tile * bits // 8 * tiles.stages <= least
            assert all(side >= 16 and side & (side - 1) == 0 for side in tiles[:3])
        tiles = gradient_tiles(mean, k, n, bits)
        assert (tiles.depth + tiles.columns) * tiles.rows * bits // 8 * tiles.stages <= least
        assert all(side >= 16 and side & (side - 1) == 0 for side in tiles[:3])


def test_kernels_under_vmap() -> None:
    rows, weights, sizes = normal(0, (2, 4, 4)), normal(1, (2, 4, 5)), jnp.asarray([1, 2])
    product = lambda x: KERNELS.product([(Rows(x), weights)], sizes, jnp.float32)
    np.testing.assert_allclose(jax.vmap(product)(rows)[1], product(rows[1]), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_lowers_for_gpus(dtype: str) -> None:
    both = jax.value_and_grad(lambda x, w, s: grouped_matmul(x, w, s).astype(jnp.float32).sum(), argnums=(0, 1))
    shapes = (jax.ShapeDtypeStruct((300, 70), dtype), jax.ShapeDtypeStruct((5, 70, 90), dtype))
    text = jax.jit(both).trace(*shapes, jnp.zeros(5, jnp.int32)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 3
