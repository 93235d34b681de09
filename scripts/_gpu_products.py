"""The plain grouped product against one dense product of the same FLOPs, and the device's dense rate. For bench_gpu.py.

Letters: M rows, G groups; K and N are the sides of a product's weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from _gpu_measure import Cell, Contestants, How, forward_and_backward, installed, measure
from jax_ep import grouped_matmul

# rows are those of a group on average
CASES = {
    "g8": {"G": 8, "rows": 2048, "K": 2048, "N": 2048},
    "g64": {"G": 64, "rows": 256, "K": 2048, "N": 768},
}
TINY = {"g8": {"G": 4, "rows": 16, "K": 32, "N": 48}, "g64": {"G": 8, "rows": 8, "K": 32, "N": 16}}
SQUARE, TINY_SQUARE = 8192, 128
SIZES = ("balanced", "uneven")
TIMED = ("forward", "forward+backward")


def device_rate(how: How) -> Cell:
    """The device's dense rate in bfloat16: one square product."""
    side = TINY_SQUARE if how.rehearse else SQUARE
    a, b = jax.device_put(jax.random.normal(jax.random.key(0), (2, side, side), jnp.bfloat16), how.device)
    cells = measure("dense rate", {"square": (jnp.matmul, (a, b))}, 2 * side**3, how)
    return {"side": side, **cells["square"]}


def group_sizes(kind: str, groups: int, rows: int) -> np.ndarray:
    """[G] sizes that sum to groups * rows: all equal, or what multinomial routing of uniform tokens gives."""
    if kind == "balanced":
        return np.full(groups, rows, np.int32)
    uniform = np.full(groups, 1 / groups)
    return np.random.default_rng(0).multinomial(groups * rows, uniform).astype(np.int32)


def product_section(name: str, how: How) -> dict[str, Any]:
    """One case's figures: its shape, and {sizes: {what is timed: {contestant: cell}}}."""
    case = (TINY if how.rehearse else CASES)[name]
    flops = 2 * case["G"] * case["rows"] * case["K"] * case["N"]
    figures: dict[str, Any] = {kind: {} for kind in SIZES}
    for timed, weight in zip(TIMED, (1, 3)):
        cells = measure(f"{name}, {timed}", _contestants(case, timed, how), flops * weight, how)
        for kind in SIZES:
            figures[kind][timed] = {"dense": cells["dense"]}
            figures[kind][timed] |= {who: cells[f"{who}, {kind}"] for who in _functions()}
    return {"shape": case, "dtype": "bfloat16", "figures": figures}


def _functions() -> dict[str, Callable[..., jax.Array]]:
    """Contestant -> a function of rows, weights and sizes."""
    functions: dict[str, Callable[..., jax.Array]] = {"grouped": grouped_matmul, "ragged_dot": jax.lax.ragged_dot}
    if installed("tokamax"):
        functions["tokamax"] = functools.partial(grouped_matmul, backend="tokamax")
    return functions


def _contestants(case: dict[str, int], timed: str, how: How) -> Contestants:
    """Those of both kinds of sizes, which share their programs, and the dense product, which knows no sizes."""
    g, m = case["G"], case["G"] * case["rows"]
    keys = jax.random.split(jax.random.key(1), 3)
    shapes = (m, case["K"]), (g, case["K"], case["N"]), (m, case["N"])
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes)]
    rows, weights, cotangent = jax.device_put(arrays, how.device)
    sizes = {kind: jax.device_put(group_sizes(kind, g, case["rows"]), how.device) for kind in SIZES}
    found: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    for who, function in {"dense": jnp.matmul, **_functions()}.items():
        run = function if timed == "forward" else forward_and_backward(function)
        for kind in SIZES:
            factors = (rows, weights[0] if who == "dense" else weights)
            rest = () if who == "dense" else (sizes[kind],)
            args = (*factors, *rest) if timed == "forward" else (cotangent, factors, *rest)
            found[who if who == "dense" else f"{who}, {kind}"] = (run, args)
    return found
