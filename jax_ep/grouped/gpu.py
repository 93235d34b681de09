"""Grouped products on NVIDIA GPUs: Pallas Triton kernels whose work is in proportion to the rows that are there.

Letters as in `products`; BM, BN, BK are the sides of a tile: rows, columns, depth.

A program of x @ w owns one tile of the result: BM positions of one group, BN columns. Groups start where they start, so
no row is moved to make tiles even; a tile that its group does not fill loads and stores under a mask. x is read through
its index row by row, so no gathered copy of it exists. Positions past the sum of the sizes are a group of their own,
which multiplies nothing and stores zeros.

A program of x.T @ d owns BK x BN of one group's result and walks over that group's positions.

Neither kernel has a temporary in memory. How many programs do something depends on the data, so no group can be too
large and none costs anything when it is empty.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep.grouped import pallas_compat as pallas
from jax_ep.grouped.gpu_tiles import Tiles, gradient_tiles, product_tiles, visits
from jax_ep.grouped.products import Activation, ExpertWeights, Rows, biased, to_float32

Ref = Any  # of Pallas


class Kernels(NamedTuple):
    """The `Products` of this backend.

    Attributes:
      interpret: run the kernels as plain JAX operations, on any platform: for tests.
      tiles: instead of those that fit the shapes: for tests.
    """

    interpret: bool = False
    tiles: Tiles | None = None

    def hidden(
        self, x: Rows, experts: ExpertWeights, group_sizes: jax.Array, activation: Activation, save: bool
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """`Products.hidden`. With a gate, one kernel reads x once and multiplies it with both matrices."""
        dtype = x.values.dtype
        if experts.gate is None:  # activations without a gate use erf, which Triton's lowering in JAX lacks
            up = biased(self.product([(x, experts.up)], group_sizes, jnp.float32), experts.up_bias, group_sizes)
            up = up.astype(dtype)
            h = activation(None, to_float32(up)).astype(dtype)
            return h, None, up if save else None
        groups, depth, columns = experts.up.shape
        tiles = self.tiles or product_tiles(x.positions / groups, columns, depth, dtype.itemsize * 8, matrices=2)
        biases = [bias for bias in (experts.gate_bias, experts.up_bias) if bias is not None]
        body = functools.partial(
            _hidden_kernel,
            form=_Form(tiles, groups, depth, columns, False),
            indexed=x.at is not None,
            activation=activation,
            biases=(experts.gate_bias is not None, experts.up_bias is not None),
        )
        arguments = [*_rows_arguments(x), experts.gate, experts.up, *biases]
        results = [((x.positions, columns), dtype)] * (3 if save else 1)
        h, *saved = self._visit(body, x.positions, tiles, group_sizes, columns, arguments, results, "moe_hidden")
        return (h, *saved) if save else (h, None, None)

    def product(
        self,
        pairs: Sequence[tuple[Rows, jax.Array]],
        group_sizes: jax.Array,
        dtype: jax.typing.DTypeLike,
        transposed: bool = False,
    ) -> jax.Array:
        """`Products.product`: one kernel adds up all pairs before it stores."""
        x, weights = pairs[0]
        groups, depth, columns = weights.shape
        if transposed:
            depth, columns = columns, depth
        bits = x.values.dtype.itemsize * 8
        tiles = self.tiles or product_tiles(x.positions / groups, columns, depth, bits)
        indexed = tuple(rows.at is not None for rows, _ in pairs)
        form = _Form(tiles, groups, depth, columns, transposed)
        body = functools.partial(_product_kernel, form=form, indexed=indexed)
        arguments = [a for rows, w in pairs for a in (*_rows_arguments(rows), w)]
        results = [((x.positions, columns), dtype)]
        return self._visit(body, x.positions, tiles, group_sizes, columns, arguments, results, "moe_product")[0]

    def weight_gradient(self, x: Rows, d: Rows, group_sizes: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """`Products.weight_gradient`."""
        groups, rows, columns = group_sizes.shape[0], x.values.shape[1], d.values.shape[1]
        tiles = self.tiles or gradient_tiles(x.positions / groups, rows, columns, x.values.dtype.itemsize * 8)
        body = functools.partial(
            _gradient_kernel, tiles=tiles, sides=(rows, columns), indexed=(x.at is not None, d.at is not None)
        )
        sizes = group_sizes.astype(jnp.int32)
        arguments = [sizes, jnp.cumsum(sizes) - sizes, *_rows_arguments(x), *_rows_arguments(d)]
        programs = groups * math.ceil(rows / tiles.depth) * math.ceil(columns / tiles.columns)
        results = [((groups, rows, columns), dtype)]
        return self._call(body, tiles, arguments, results, programs, "moe_weight_gradient")[0]

    def _visit(
        self,
        body: Any,
        positions: int,
        tiles: Tiles,
        group_sizes: jax.Array,
        columns: int,
        arguments: Sequence[jax.Array],
        results: Any,
        name: str,
    ) -> list[jax.Array]:
        """Runs a kernel once for every visit and tile of columns."""
        table = visits(group_sizes, positions, tiles.rows, tiles.band)
        programs = table.first.shape[0] * math.ceil(columns / tiles.columns)
        return self._call(body, tiles, [*table, *arguments], results, programs, name)

    def _call(
        self, body: Any, tiles: Tiles, arguments: Sequence[jax.Array], results: Any, programs: int, name: str
    ) -> list[jax.Array]:
        warps, stages = tiles.warps, tiles.stages
        return pallas.call(
            body, arguments, results, programs, name=name, warps=warps, stages=stages, interpret=self.interpret
        )


class _Form(NamedTuple):
    """What is static of a kernel over visits."""

    tiles: Tiles
    groups: int
    depth: int
    columns: int
    transposed: bool


def _rows_arguments(rows: Rows) -> list[jax.Array]:
    return [rows.values] if rows.at is None else [rows.values, rows.at]


# ------------------------------------------------------------------------------------------------------------ kernels


class _Tile(NamedTuple):
    """One program's part of a result over visits."""

    group: jax.Array  # [], G past the sum of the sizes
    first: jax.Array  # [], first position
    held: jax.Array  # [BM] bool, positions of this visit
    column: jax.Array  # [], first column

    @staticmethod
    def here(form: _Form, group_ref: Ref, first_ref: Ref, count_ref: Ref) -> _Tile:
        """Bands of visits; in a band, all visits of one tile of columns, then of the next."""
        tiles = form.tiles
        program = pallas.program_id(0)
        band = tiles.band * math.ceil(form.columns / tiles.columns)
        visit = program // band * tiles.band + program % band % tiles.band
        column = program % band // tiles.band * tiles.columns
        held = jnp.arange(tiles.rows) < pallas.load(count_ref.at[visit])
        return _Tile(pallas.load(group_ref.at[visit]), pallas.load(first_ref.at[visit]), held, column)


def _within(first: jax.Array, count: int, size: int) -> jax.Array | None:
    """[count] bool, which of first .. are below size. None: all of them, whatever first is."""
    return None if size % count == 0 else first + jnp.arange(count) < size


def _both(rows: jax.Array | None, columns: jax.Array | None) -> jax.Array | None:
    """Of a mask of rows and one of columns, either None for all."""
    if rows is None or columns is None:
        return rows[:, None] if columns is None and rows is not None else None if columns is None else columns[None, :]
    return rows[:, None] & columns[None, :]


def _masked(ref: Ref, mask: jax.Array | None) -> jax.Array:
    return pallas.load(ref) if mask is None else pallas.load(ref, mask=mask, other=0)


def _read_rows(
    ref: Ref,
    index_ref: Ref | None,
    first: jax.Array,
    held: jax.Array,
    column: jax.Array,
    columns: int,
    columns_held: jax.Array | None,
) -> jax.Array:
    """[count of held, columns]: the rows of the positions from `first` on, zeros outside the masks."""
    at, mask = pallas.ds(first, held.shape[0]), _both(held, columns_held)
    if index_ref is None:
        return pallas.load(ref.at[at, pallas.ds(column, columns)], mask=mask, other=0)
    rows = pallas.load(index_ref.at[at], mask=held, other=0)
    shape = (held.shape[0], columns)
    rows = jnp.broadcast_to(rows[:, None], shape)
    picked = jnp.broadcast_to((column + jnp.arange(columns))[None, :], shape)
    return pallas.load(ref.at[rows, picked], mask=jnp.broadcast_to(mask, shape), other=0)


def _accumulated(
    form: _Form, at: _Tile, x_ref: Ref, index_ref: Ref | None, weight_refs: Sequence[Ref], start: Any
) -> Any:
    """start + this tile of x @ w, for each of the weights."""
    tiles = form.tiles
    group = jnp.minimum(at.group, form.groups - 1)
    columns_held = _within(at.column, tiles.columns, form.columns)
    columns = pallas.ds(at.column, tiles.columns)

    def turn(k: jax.Array, sums: Any) -> Any:
        first = k * tiles.depth
        depth, depth_held = pallas.ds(first, tiles.depth), _within(first, tiles.depth, form.depth)
        a = _read_rows(x_ref, index_ref, at.first, at.held, first, tiles.depth, depth_held)  # [BM, BK]
        out = []
        for total, ref in zip(sums, weight_refs):
            if form.transposed:
                w = _masked(ref.at[group, columns, depth], _both(columns_held, depth_held))  # [BN, BK]
            else:
                w = _masked(ref.at[group, depth, columns], _both(depth_held, columns_held))  # [BK, BN]
            out.append(total + pallas.dot(a, w, trans_b=form.transposed))
        return tuple(out)

    turns = (at.group < form.groups).astype(jnp.int32) * math.ceil(form.depth / tiles.depth)
    return jax.lax.fori_loop(0, turns, turn, start)


def _zeros(form: _Form) -> jax.Array:
    return jnp.zeros((form.tiles.rows, form.tiles.columns), jnp.float32)


def _write(form: _Form, at: _Tile, ref: Ref, values: jax.Array) -> None:
    mask = _both(at.held, _within(at.column, form.tiles.columns, form.columns))
    where = ref.at[pallas.ds(at.first, form.tiles.rows), pallas.ds(at.column, form.tiles.columns)]
    pallas.store(where, values.astype(ref.dtype), mask=mask)


def _product_kernel(
    group_ref: Ref, first_ref: Ref, count_ref: Ref, *refs: Ref, form: _Form, indexed: Sequence[bool]
) -> None:
    at = _Tile.here(form, group_ref, first_ref, count_ref)
    *inputs, out_ref = refs
    given = iter(inputs)
    sums = (_zeros(form),)
    for has_index in indexed:
        x_ref, index_ref, w_ref = next(given), next(given) if has_index else None, next(given)
        sums = _accumulated(form, at, x_ref, index_ref, [w_ref], sums)
    _write(form, at, out_ref, sums[0])


def _hidden_kernel(
    group_ref: Ref,
    first_ref: Ref,
    count_ref: Ref,
    *refs: Ref,
    form: _Form,
    indexed: bool,
    activation: Activation,
    biases: tuple[bool, bool],
) -> None:
    at = _Tile.here(form, group_ref, first_ref, count_ref)
    given = iter(refs)
    x_ref, index_ref = next(given), next(given) if indexed else None
    weights = [next(given), next(given)]
    bias_refs = [next(given) if has else None for has in biases]
    h_ref, *saved = given
    sums = _accumulated(form, at, x_ref, index_ref, weights, (_zeros(form),) * 2)
    group = jnp.minimum(at.group, form.groups - 1)
    columns = pallas.ds(at.column, form.tiles.columns)
    columns_held = _within(at.column, form.tiles.columns, form.columns)
    rounded = []
    for total, bias_ref in zip(sums, bias_refs):
        if bias_ref is not None:
            total += _masked(bias_ref.at[group, columns], columns_held).astype(jnp.float32)[None]
        rounded.append(total.astype(h_ref.dtype))
    h = activation(rounded[0].astype(jnp.float32), rounded[1].astype(jnp.float32))
    filled = at.group < form.groups
    for ref, values in zip((h_ref, *saved), (h, *rounded)):
        _write(form, at, ref, jnp.where(filled, values.astype(jnp.float32), 0.0))


def _gradient_kernel(
    size_ref: Ref, start_ref: Ref, *refs: Ref, tiles: Tiles, sides: tuple[int, int], indexed: tuple[bool, bool]
) -> None:
    *inputs, out_ref = refs
    given = iter(inputs)
    x_ref, x_index = next(given), next(given) if indexed[0] else None
    d_ref, d_index = next(given), next(given) if indexed[1] else None
    program = pallas.program_id(0)
    across = math.ceil(sides[1] / tiles.columns)
    down = math.ceil(sides[0] / tiles.depth)
    group = program // (down * across)
    left, right = program // across % down * tiles.depth, program % across * tiles.columns
    left_held, right_held = _within(left, tiles.depth, sides[0]), _within(right, tiles.columns, sides[1])
    start, size = pallas.load(start_ref.at[group]), pallas.load(size_ref.at[group])

    def turn(k: jax.Array, total: jax.Array) -> jax.Array:
        first = start + k * tiles.rows
        held = k * tiles.rows + jnp.arange(tiles.rows) < size
        a = _read_rows(x_ref, x_index, first, held, left, tiles.depth, left_held)  # [BM, BK]
        b = _read_rows(d_ref, d_index, first, held, right, tiles.columns, right_held)  # [BM, BN]
        return total + pallas.dot(a, b, trans_a=True)

    zeros = jnp.zeros((tiles.depth, tiles.columns), jnp.float32)
    total = jax.lax.fori_loop(0, (size + tiles.rows - 1) // tiles.rows, turn, zeros)
    where = out_ref.at[group, pallas.ds(left, tiles.depth), pallas.ds(right, tiles.columns)]
    pallas.store(where, total.astype(out_ref.dtype), mask=_both(left_held, right_held))
