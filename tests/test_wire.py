"""Quantised rows: what the docstring promises of zeros, huge values and infinities, and the error of a layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import CommConfig, MoEConfig, RouterConfig, init_params, make_mesh, moe
from jax_ep.config import WIRE_DTYPES
from jax_ep.transport.wire import BLOCK, blocks, decode, encode, rounded

STEPS = {"int8": 254, "float8_e4m3fn": 458752}  # half a step at 0, in parts of the largest value
DTYPES = ("float32", "bfloat16", "float16")


def back(rows, wire_dtype):
    return np.asarray(decode(*encode(rows, wire_dtype), rows.dtype), np.float64)


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
@pytest.mark.parametrize("width", [1, 127, 128, 129, 300])
def test_codes_and_scales_have_the_bytes_that_are_counted(wire_dtype, width):
    codes, scales = jax.eval_shape(lambda r: encode(r, wire_dtype), jax.ShapeDtypeStruct((5, width), jnp.bfloat16))
    assert (codes.shape, codes.dtype) == ((5, width), wire_dtype)
    assert (scales.shape, scales.dtype) == ((5, -(-width // 128)), jnp.float32) and blocks(width) == scales.shape[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_every_value_is_within_half_a_step(wire_dtype, dtype):
    """int8: half a 127th of its block's largest value. float8: 2**-4 of itself, and half a step at 0."""
    rows = jax.random.normal(jax.random.key(0), (64, 300)) * jnp.exp2(jnp.arange(64.0) / 4 - 8)[:, None]
    rows = rows.astype(dtype)
    exact, got = np.asarray(rows, np.float64), back(rows, wire_dtype)
    padded = np.pad(np.abs(exact), ((0, 0), (0, 3 * BLOCK - 300))).reshape(64, 3, BLOCK).max(2)
    peak = np.repeat(padded, BLOCK, 1)[:, :300]
    allowed = peak / STEPS[wire_dtype] + (np.abs(exact) / 16 if wire_dtype != "int8" else 0)
    rounding = float(jnp.finfo(dtype).eps) * np.abs(exact) + float(jnp.finfo(dtype).smallest_subnormal)
    assert (np.abs(got - exact) <= 1.001 * allowed + rounding).all()
    assert np.abs(got - exact).max() > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_zeros_huge_values_and_infinities(wire_dtype, dtype):
    top = float(jnp.finfo(dtype).max)
    rows = np.zeros((6, 2 * BLOCK))
    rows[1, 5] = top  # one huge value, beside it one above and one below half a step
    rows[1, 6], rows[1, 7] = top / STEPS[wire_dtype] * 1.1, top / STEPS[wire_dtype] * 0.9
    rows[2, 0], rows[2, 1] = np.inf, 1
    rows[3, 0], rows[3, 200] = np.nan, 1
    rows[4, 0] = float(jnp.finfo(dtype).smallest_subnormal)
    rows[5, :] = 1
    got = back(jnp.asarray(rows, dtype), wire_dtype)
    assert (got[0] == 0).all()
    assert np.isfinite(got[1]).all() and got[1, 5] == pytest.approx(top, rel=0.01)
    assert got[1, 6] > 0 and got[1, 7] == 0 and (got[1, 8:] == 0).all()
    for row in (2, 3):
        assert np.isnan(got[row, :BLOCK]).all()
        np.testing.assert_array_equal(got[row, BLOCK:], np.asarray(rows[row, BLOCK:]))
    assert np.isfinite(got[4]).all() and (got[4, 1:] == 0).all()
    np.testing.assert_allclose(got[5], 1, rtol=1e-6)


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_gradients_pass_straight_through(wire_dtype):
    rows, cotangent = jax.random.normal(jax.random.key(0), (2, 3, 40))
    _, pull = jax.vjp(lambda r: rounded(r, wire_dtype), rows)
    np.testing.assert_array_equal(pull(cotangent)[0], cotangent)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("wire_dtype", "most"), [("int8", 0.02), ("float8_e4m3fn", 0.06)])
def test_error_of_a_layer_on_normal_inputs(wire_dtype, most, dtype):
    """Relative Frobenius error against the layer that sends its own dtype; `compare.py --sweep wire_dtype` prints it
    too.
    """

    def run(seed, **comm):
        cfg = MoEConfig(512, 64, 8, RouterConfig(2), CommConfig(**comm), dtype=dtype)
        x = jax.random.normal(jax.random.key(100 + seed), (256, 512)).astype(dtype)
        return np.asarray(moe(init_params(cfg, jax.random.key(seed)), x, cfg, mesh=make_mesh(2))[0], np.float64)

    pairs = [(run(seed), run(seed, wire_dtype=wire_dtype)) for seed in range(3)]
    worst = max(np.linalg.norm(got - exact) / np.linalg.norm(exact) for exact, got in pairs)
    print(f"{wire_dtype}, {dtype}: relative Frobenius error {worst:.4f}")
    assert most / 20 < worst <= most


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
@pytest.mark.parametrize("dedup", [False, True])
def test_an_infinite_token_spoils_no_other(wire_dtype, dedup):
    cfg = MoEConfig(160, 8, 4, RouterConfig(2), CommConfig(wire_dtype=wire_dtype, dedup=dedup))
    params = init_params(cfg, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (16, 160))
    clean = moe(params, x, cfg, mesh=make_mesh(2))[0]
    y = moe(params, x.at[3, 7].set(jnp.inf), cfg, mesh=make_mesh(2))[0]
    assert not np.isfinite(y[3]).any()
    np.testing.assert_array_equal(np.delete(y, 3, 0), np.delete(clean, 3, 0))
