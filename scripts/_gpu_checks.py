"""Values and gradients of the grouped product and the layer against dense ones in float32. For bench_gpu.py.

The references visit every group (expert) with all rows, the others zeroed, in float32 at the highest precision, on the
same device. Nothing of jax_ep is in them but the router.

Letters: M rows, G groups, T tokens, E experts, H hidden, I intermediate; K and N are the sides of a product's weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import MoEConfig, RouterConfig, grouped_matmul, moe
from jax_ep.layer import init_params
from jax_ep.routing import route, router_logits

# Of the largest difference over the largest value of the reference, for one array. float32: sums of some hundred terms
# in another order, rounded at 2^-24 each; TensorFloat-32 would be off by 2^-11 and fail. bfloat16: the reference takes
# the same rounded inputs, so a product is off by the one rounding of its result, 2^-8 at most; the layer rounds gate,
# up, h and their gradients as well, and its router's gradient is a difference of such sums (0.0064 at most on a CPU).
TOLERANCES = {
    ("product", "float32"): 1e-5,
    ("product", "bfloat16"): 2.0**-7,
    ("layer", "float32"): 5e-5,
    ("layer", "bfloat16"): 2.0**-5,
}
PRODUCT = (520, 7, 328, 200)  # M, G, K, N: nothing a multiple of a tile
LAYER = MoEConfig(192, 136, 8, RouterConfig(2, logit_bias=True))
TOKENS = 301


class Check(NamedTuple):
    """One array against its reference.

    Attributes:
      name: what was checked, on which sizes.
      dtype: of the inputs.
      difference: the largest, over the largest value of the reference; infinite where a zero should be exact and is
        not, NaN where there is a NaN.
      tolerance: what it may be.
    """

    name: str
    dtype: str
    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance  # False of NaN


def hostile_sizes(rows: int, groups: int) -> dict[str, np.ndarray]:
    """Name -> [G] sizes of at most `rows` in all; what is left over is a tail."""
    uneven = np.random.default_rng(0).multinomial(rows, np.full(groups, 1 / groups))
    no_tiles = np.array([1, 127, 129, 63, 65, 0, 33])[:groups]
    one, ends, none = np.zeros((3, groups), int)
    one[groups // 2] = rows
    ends[0], ends[-1] = rows // 4, rows // 2 + 1
    return {
        "uneven": uneven,
        "one group holds all": one,
        "empty groups and a tail": ends,
        "no multiples of tiles and a tail": no_tiles,
        "only a tail": none,
    }


def product_checks(dtype: str) -> Iterator[Check]:
    """grouped_matmul, its result and both gradients; the rows of a tail hold NaN."""
    m, g, k, n = PRODUCT
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (m, k), (g, k, n), (m, n)
    rows, weights, cotangent = (jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes))

    @jax.jit
    def ours(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(lambda r, w: grouped_matmul(r, w, sizes), rows, weights)
        return y, *pull(cotangent)

    for name, sizes in hostile_sizes(m, g).items():
        spoilt = jnp.where(jnp.arange(m)[:, None] < sizes.sum(), rows, jnp.nan)
        leave_nan_behind()
        got = ours(spoilt, weights, jnp.asarray(sizes, jnp.int32))
        want = dense_product(rows, weights, jnp.asarray(sizes, jnp.int32), cotangent)
        for what, a, b in zip(("result", "gradient of rows", "gradient of weights"), got, want):
            yield _check(f"grouped_matmul, {name}: {what}", "product", dtype, a, b)


@jax.jit
def dense_product(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Result [M, N] and gradients [M, K], [G, K, N], group by group over all rows."""
    rows, weights, cotangent = (a.astype(jnp.float32) for a in (rows, weights, cotangent))
    ends = jnp.cumsum(sizes)
    at = jnp.arange(rows.shape[0])

    def one(
        sums: tuple[jax.Array, jax.Array], group: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        w, start, end = group
        mine = ((at >= start) & (at < end))[:, None]
        r, d = jnp.where(mine, rows, 0), jnp.where(mine, cotangent, 0)
        return (sums[0] + r @ w, sums[1] + d @ w.T), r.T @ d

    with jax.default_matmul_precision("highest"):
        start = jnp.zeros(cotangent.shape, jnp.float32), jnp.zeros(rows.shape, jnp.float32)
        (y, d_rows), d_weights = jax.lax.scan(one, start, (weights, ends - sizes, ends))
    return y, d_rows, d_weights


def layer_cases(config: MoEConfig, tokens: int) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Name -> the router's bias [E], which steers tokens, and token_mask [T]."""
    e = config.num_experts
    nobody, everybody = np.zeros(e, np.float32), np.ones(tokens, bool)
    two, odd = nobody.copy(), nobody.copy()
    two[[1, e - 1]] = 40
    odd[::2] = -40
    some = np.random.default_rng(0).random(tokens) < 0.4
    cases = {
        "the router's choice": (nobody, everybody),
        "two experts hold all": (two, everybody),
        "every other expert is empty": (odd, everybody),
        "masked tokens": (two / 40, some),
    }
    return {name: (jnp.asarray(bias), jnp.asarray(mask)) for name, (bias, mask) in cases.items()}


def layer_checks(dtype: str) -> Iterator[Check]:
    """The layer on one device: y and the gradients of x and of every parameter."""
    config = dataclasses.replace(LAYER, dtype=dtype, param_dtype=dtype)
    keys = jax.random.split(jax.random.key(1), 3)
    params = init_params(config, keys[0])
    x, cotangent = (jax.random.normal(key, (TOKENS, config.hidden_size)).astype(dtype) for key in keys[1:])

    @jax.jit
    def ours(params: Any, x: jax.Array, mask: jax.Array) -> Any:
        with full_precision(dtype):
            y, pull = jax.vjp(lambda p, a: moe(p, a, config, token_mask=mask)[0], params, x)
            return y, pull(cotangent)

    for name, (bias, mask) in layer_cases(config, TOKENS).items():
        steered = {**params, "router": {**params["router"], "bias": bias.astype(dtype)}}
        leave_nan_behind()
        got = ours(steered, x, mask)
        yield from layer_differences(f"layer, {name}", dtype, got, dense_layer(steered, x, mask, cotangent))


def layer_differences(name: str, dtype: str, got: Any, want: Any) -> Iterator[Check]:
    """y and gradients, as forward_and_backward gives them, leaf by leaf."""
    got, want = jax.tree.leaves_with_path(got), jax.tree.leaves(want)
    for (path, a), b in zip(got, want, strict=True):
        keys = [getattr(key, "key", None) for key in path]
        inner = " ".join(str(key) for key in keys if key is not None)
        what = "y" if len(path) == 1 else f"gradient of {inner or 'x'}"
        yield _check(f"{name}: {what}", "layer", dtype, a, b)


@jax.jit
def dense_layer(params: Any, x: jax.Array, mask: jax.Array, cotangent: jax.Array) -> Any:
    """y [T, H] and the gradients of params and x: LAYER with every expert on every token."""

    def layer(params: Any, x: jax.Array) -> jax.Array:
        router, experts = params["router"], params["experts"]
        routing = route(router_logits(x, router["kernel"], router["bias"]), LAYER.router)
        hit = routing.experts[..., None] == jnp.arange(LAYER.num_experts)[None, None]  # [T, K, E]
        weight = jnp.where(hit & mask[:, None, None], routing.weights[..., None], 0).sum(1)  # [T, E]

        def one(y: jax.Array, expert: Any) -> tuple[jax.Array, None]:
            gate, up, down, weight = expert
            return y + weight[:, None] * ((jax.nn.silu(x @ gate) * (x @ up)) @ down), None

        stacked = experts["gate"], experts["up"], experts["down"], weight.T
        return jax.lax.scan(one, jnp.zeros_like(x), stacked)[0]

    exact = jax.tree.map(lambda a: a.astype(jnp.float32), (params, x, cotangent))
    with jax.default_matmul_precision("highest"):
        y, pull = jax.vjp(layer, *exact[:2])
        return y, pull(exact[2])


def full_precision(dtype: str) -> contextlib.AbstractContextManager[Any]:
    """XLA's own products of float32, of which the layer has some beside the grouped ones, are TensorFloat-32 on GPUs
    unless they are told otherwise. Kernels decide for themselves.
    """
    return jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext()


def leave_nan_behind() -> None:
    """Frees memory full of NaN, so that whoever does not write its result shows it."""
    jax.block_until_ready(jnp.full(2**22, jnp.nan))


def difference(got: np.ndarray, want: np.ndarray) -> float:
    """`Check.difference`; a row (group) whose reference is all zeros has to be exactly zero."""
    zero = ~want.reshape(want.shape[0], -1).any(1)
    if np.any(got[zero] != 0):
        return float("inf")
    largest = float(np.abs(got - want).max())
    return largest / float(np.abs(want).max()) if want.any() else largest


def _check(name: str, kind: str, dtype: str, got: jax.Array, want: jax.Array) -> Check:
    a, b = (np.asarray(array, np.float32) for array in (got, want))
    return Check(name, dtype, difference(a, b), TOLERANCES[kind, dtype])
