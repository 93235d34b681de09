"""One packed buffer, one collective, and its transpose.

Letters: n home rows, C receive rows, R ranks, L local experts, M messages a (source, destination).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep import plan as planning
from jax_ep.config import WIRE_DTYPES, positive_int, refuse
from jax_ep.plan import Plan
from jax_ep.transport import wire
from jax_ep.transport.all_to_all import swap
from jax_ep.transport.parts import Part, from_columns, pack, to_columns, unit_bytes, unpack
from jax_ep.transport.ragged import move_runs, ragged_all_to_all

__all__ = ["Part", "exchange", "ragged_all_to_all", "share_counts"]


def share_counts(plans: Sequence[Plan]) -> list[Plan]:
    """On the ragged layout, the one control collective: an all_gather of each plan's counts. Elsewhere nothing; the
    dispatch tells.

    The plans, of one rank's pieces, have one number of experts.
    """
    if not plans[0].geometry.ragged:
        return list(plans)
    mine = jnp.stack([plan.counts for plan in plans], 1)  # [R, pieces, L]
    gathered = checkpoint_name(jax.lax.all_gather(mine, plans[0].axis_name), "moe_counts")  # [R, R, pieces, L]
    return [planning.finish_ragged(plan, gathered[:, :, i]) for i, plan in enumerate(plans)]


def exchange(
    parts: Sequence[Part],
    plan: Plan,
    *,
    reverse: bool = False,
    step: jax.Array | int = 0,
    with_counts: bool = False,
) -> tuple[list[Part], Plan]:
    """Moves rows to their experts' ranks, or back, all parts in one collective.

    Inside shard_map over plan.axis_name. Parts without counts are the plan's rows: home buffers [home rows, width],
    laid out as `plan.home` says, away buffers [C, width], as `plan.away` says. Parts with counts of their own may have
    any number of rows, see `Part`. Rows that nobody sent are zeros on the ragged layout; on all_to_all empty home rows
    travel as well, so leave them zero (`plan.home` says which). Rows for the rank itself are copied on the ragged
    layout, and take no part in its collective. The transpose is the exchange turned round.

    Args:
      parts: what travels; all home buffers, or with reverse=True all away buffers.
      plan: from `make_plan`.
      reverse: bring rows back.
      step: the round. Parts with counts of their own travel whole in every one.
      with_counts: on the all_to_all transport, carry this rank's counts beside the rows, so that the plan comes back
        completed with the others'. The first dispatch of a plan wants that; the ragged layout knows its counts already.

    Returns:
      The parts on the other side, and the plan.

    Raises:
      ConfigError: a plan of one rank, which exchanges nothing; parts that do not fit the plan or their counts.
    """
    g = plan.geometry
    if plan.axis_name is None or g.ranks == 1:
        refuse("plan ranks", g.ranks, "one rank exchanges nothing", 2)
    if not parts:
        refuse("parts", [], "must hold at least one", "[Part(rows)]")
    sizes, groups, known = [(g.home_rows, g.recv_rows)], [], {}  # of each group; of each part; group of each counts
    counts: list[jax.Array] = []
    for i, part in enumerate(parts):
        _check(i, part, plan, reverse)
        if part.counts is None:
            groups.append(0)
            continue
        n = part.rows.shape[0]
        other = n if part.capacity is None else part.capacity
        layout = (other, n) if reverse else (n, other)
        if id(part.counts) not in known:
            known[id(part.counts)] = len(sizes)
            sizes.append(layout)
            counts.append(part.counts.astype(jnp.int32))
        group = known[id(part.counts)]
        if sizes[group] != layout:
            rule = "parts of the same counts share their (home rows, away rows)"
            refuse(f"parts[{i}] (home rows, away rows)", layout, rule, sizes[group])
        groups.append(group)
    spec = _Spec(reverse, tuple(groups), tuple(sizes), tuple(p.wire_dtype for p in parts))
    head = planning.header(plan) if with_counts and not g.ragged else None
    moved, told = _move(spec, tuple(p.rows for p in parts), tuple(counts), head, plan, step)
    if told is not None:
        plan = planning.finish_all_to_all(plan, checkpoint_name(told, "moe_counts"))
    back = [None if p.counts is None else p.rows.shape[0] for p in parts]
    return [Part(m, p.counts, c, p.wire_dtype) for m, p, c in zip(moved, parts, back, strict=True)], plan


def _check(i: int, part: Part, plan: Plan, reverse: bool) -> None:
    if not isinstance(part, Part) or not all(hasattr(a, "dtype") for a in part[:2] if a is not None):
        refuse(f"parts[{i}]", type(part).__name__, "must be a Part of arrays", "Part(rows)")
    g, name, shape, dtype = plan.geometry, f"parts[{i}]", list(part.rows.shape), part.rows.dtype
    side, own = "away" if reverse else "home", part.counts is not None
    rows = g.recv_rows if reverse else g.home_rows
    if len(shape) != 2 or not shape[1] or not (own or shape[0] == rows):
        wanted = f"[{'rows' if own else rows}, width]"
        refuse(
            f"{name}.rows", shape, f"must be {wanted}, the {side} rows of this {'part' if own else 'plan'}", [rows, 8]
        )
    whole = jnp.issubdtype(dtype, jnp.number) and not jnp.issubdtype(dtype, jnp.complexfloating)
    if dtype != jnp.bool_ and not (whole and jax.dtypes.itemsize_bits(dtype) in (8, 16, 32, 64)):
        refuse(f"{name}.rows", dtype.name, "must be of a real dtype of 1, 2, 4 or 8 bytes", "float32")
    if part.counts is None:
        if part.capacity is not None:
            refuse(f"{name}.capacity", part.capacity, "rows of the plan have the plan's", None)
    else:
        _check_own_counts(name, part, part.counts, plan)
    if part.wire_dtype is not None:
        if part.wire_dtype not in WIRE_DTYPES:
            refuse(f"{name}.wire_dtype", part.wire_dtype, f"must be one of {', '.join(WIRE_DTYPES)}, or None", "int8")
        if not jnp.issubdtype(dtype, jnp.floating):
            refuse(f"{name}.wire_dtype", part.wire_dtype, f"rows are {dtype.name}, which is not rounded", None)


def _check_own_counts(name: str, part: Part, counts: jax.Array, plan: Plan) -> None:
    g, rows, square = plan.geometry, part.rows.shape[0], (plan.geometry.ranks,) * 2
    if counts.shape != square or not jnp.issubdtype(counts.dtype, jnp.integer):
        have = f"{counts.dtype.name}{list(counts.shape)}"
        refuse(f"{name}.counts", have, "must be integers, one a (home rank, away rank)", f"int32{list(square)}")
    if g.messages > 1:
        refuse("messages", "expert", f"it moves the plan's rows alone, and {name} has counts of its own", "rank")
    if g.ragged or part.capacity is not None:
        positive_int(f"{name}.capacity", part.capacity, rows, least=0)
    if not g.ragged and (rows % g.ranks or part.capacity not in (None, rows)):
        works = -(-rows // g.ranks) * g.ranks
        rule = f"on all_to_all rows and capacity are one multiple of the {g.ranks} ranks"
        refuse(f"{name} rows and capacity", [rows, part.capacity], rule, [works, works])


class _Spec(NamedTuple):
    """What of a move is static.

    Attributes:
      reverse: from away to home.
      groups: of each part: 0 the plan's rows, else 1 + the place of its counts.
      sizes: (home rows, away rows) of each group.
      wires: what each part travels as.
    """

    reverse: bool
    groups: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    wires: tuple[str | None, ...]


_Counts = tuple[jax.Array, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _move(
    spec: _Spec, rows: tuple[jax.Array, ...], counts: _Counts, head: jax.Array | None, plan: Plan, step: jax.Array | int
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Rows of all parts, and the header [R, k] if there is one, on the other side."""
    coded = [(r,) if w is None else wire.encode(r, w) for r, w in zip(rows, spec.wires, strict=True)]
    unit = unit_bytes([a for part in coded for a in part] + ([] if head is None else [head]))
    used = sorted(set(spec.groups))
    members = [[a for part, g in zip(coded, spec.groups) if g == group for a in part] for group in used]
    buffers = [pack(m, unit) for m in members]
    told = None
    if plan.geometry.ragged:
        buffers = _move_ragged(spec, used, buffers, counts, plan, step)
    else:
        assert plan.axis_name is not None
        messages = [1 if group else plan.geometry.messages for group in used]
        if head is not None:
            buffers, messages = [*buffers, to_columns(head, unit)], [*messages, 1]
        buffers = swap(buffers, messages, plan.axis_name, plan.geometry.ranks)
        if head is not None:
            told = from_columns(buffers.pop(), head.shape[1], head.dtype)
    arrived = {group: iter(unpack(b, m)) for group, b, m in zip(used, buffers, members, strict=True)}
    moved = []
    for row, group, dtype in zip(rows, spec.groups, spec.wires, strict=True):
        first = next(arrived[group])
        moved.append(first if dtype is None else wire.decode(first, next(arrived[group]), row.dtype))
    return tuple(moved), told


def _move_ragged(
    spec: _Spec, used: list[int], buffers: list[jax.Array], counts: _Counts, plan: Plan, step: jax.Array | int
) -> list[jax.Array]:
    ways, out_rows = [], []
    for group in used:
        home_rows, away_rows = spec.sizes[group]
        if group:
            way = planning.travel(counts[group - 1][:, :, None], away_rows)
        else:
            assert plan.pair_counts is not None, "the ragged layout knows all pair counts"
            way = planning.travel(plan.pair_counts, away_rows, step)
        ways.append(way.turned() if spec.reverse else way)
        out_rows.append(home_rows if spec.reverse else away_rows)
    assert plan.axis_name is not None
    return move_runs(
        buffers, ways, out_rows, plan.rank, axis_name=plan.axis_name, simulated=plan.geometry.transport == "all_gather"
    )


def _move_forward(spec: _Spec, rows: Any, counts: Any, head: Any, plan: Plan, step: Any) -> Any:
    return _move(spec, rows, counts, head, plan, step), (counts, plan, step)


def _move_backward(spec: _Spec, saved: Any, cotangents: Any) -> Any:
    counts, plan, step = saved
    back = list(cotangents[0])
    floats = [i for i, c in enumerate(back) if c.dtype != jax.dtypes.float0]
    if floats:
        groups = tuple(spec.groups[i] for i in floats)
        turned = _Spec(not spec.reverse, groups, spec.sizes, (None,) * len(floats))
        moved, _ = _move(turned, tuple(back[i] for i in floats), counts, None, plan, step)
        for i, m in zip(floats, moved, strict=True):
            back[i] = m
    return tuple(b if i in floats else None for i, b in enumerate(back)), None, None, None, None


_move.defvjp(_move_forward, _move_backward)
