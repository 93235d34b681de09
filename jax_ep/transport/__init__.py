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

__all__ = ["Part", "Send", "exchange", "exchange_together", "ragged_all_to_all", "share_counts"]


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


class Send(NamedTuple):
    """The parts of one plan in an exchange, and which way they go. Fields as the arguments of `exchange`."""

    parts: Sequence[Part]
    plan: Plan
    reverse: bool = False
    step: jax.Array | int = 0
    with_counts: bool = False


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
    return exchange_together([Send(parts, plan, reverse, step, with_counts)])[0]


def exchange_together(sends: Sequence[Send]) -> list[tuple[list[Part], Plan]]:
    """Several exchanges in one collective, as a dispatch of some tokens and the combine of others.

    Args:
      sends: of plans of one axis and transport.

    Returns:
      What `exchange` returns of each.

    Raises:
      ConfigError: as `exchange`; plans that do not go together; no sends, or one without parts.
    """
    if not sends:
        refuse("sends", [], "must hold at least one", "[Send([Part(rows)], plan)]")
    groups: dict[Any, _Group] = {}  # by (send, id of the counts)
    counts: list[jax.Array] = []
    places: list[int] = []  # the group of each part
    for at, send in enumerate(sends):
        _check_send(at, send, sends)
        for i, part in enumerate(send.parts):
            _check(i, part, send.plan, send.reverse)
            group, key = _Group.of(at, send, part, len(counts) + 1), (at, id(part.counts))
            if key not in groups:
                groups[key] = group
                counts += [] if part.counts is None else [part.counts.astype(jnp.int32)]
            elif groups[key][2:] != group[2:]:
                rule = "parts of the same counts share their (home rows, away rows)"
                refuse(f"parts[{i}] (home rows, away rows)", group[2:], rule, groups[key][2:])
            places.append(list(groups).index(key))
    parts = [part for send in sends for part in send.parts]
    spec = _Spec(
        tuple(s.reverse for s in sends), tuple(groups.values()), tuple(places), tuple(p.wire_dtype for p in parts)
    )
    heads = tuple(planning.header(s.plan) if s.with_counts and not s.plan.geometry.ragged else None for s in sends)
    plans, steps = tuple(s.plan for s in sends), tuple(s.step for s in sends)
    moved, told = _move(spec, tuple(p.rows for p in parts), tuple(counts), heads, plans, steps)
    out, rest = [], iter(zip(moved, parts, strict=True))
    for send, plan, head in zip(sends, plans, told, strict=True):
        if head is not None:
            plan = planning.finish_all_to_all(plan, checkpoint_name(head, "moe_counts"))
        mine = [next(rest) for _ in send.parts]
        back = [Part(m, p.counts, None if p.counts is None else p.rows.shape[0], p.wire_dtype) for m, p in mine]
        out.append((back, plan))
    return out


def _check_send(at: int, send: Send, sends: Sequence[Send]) -> None:
    g, first = send.plan.geometry, sends[0].plan
    if send.plan.axis_name is None or g.ranks == 1:
        refuse("plan ranks", g.ranks, "one rank exchanges nothing", 2)
    if not send.parts:
        refuse("parts", [], "must hold at least one", "[Part(rows)]")
    route, wanted = ((p.axis_name, p.geometry.transport) for p in (send.plan, first))
    if route != wanted:
        refuse(f"sends[{at}] (axis, transport)", route, "plans of one exchange share them", wanted)
    if g.messages > 1 and len(sends) > 1:
        refuse("messages", "expert", "exchanges in one collective send one message a rank", "rank")


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


class _Group(NamedTuple):
    """Parts that share a layout.

    Attributes:
      send: whose.
      own: 0: rows of its plan; else 1 + the place of their counts.
      home, away: rows of the buffers.
    """

    send: int
    own: int
    home: int
    away: int

    @staticmethod
    def of(at: int, send: Send, part: Part, own: int) -> _Group:
        g = send.plan.geometry
        if part.counts is None:
            return _Group(at, 0, g.home_rows, g.recv_rows)
        here = part.rows.shape[0]
        there = here if part.capacity is None else part.capacity
        return _Group(at, own, *((there, here) if send.reverse else (here, there)))


class _Spec(NamedTuple):
    """What of a move is static.

    Attributes:
      reverse: of each send, whether it goes from away to home.
      groups: the layouts.
      places: the group of each part.
      wires: what each part travels as.
    """

    reverse: tuple[bool, ...]
    groups: tuple[_Group, ...]
    places: tuple[int, ...]
    wires: tuple[str | None, ...]


_Arrays = tuple[jax.Array, ...]
_Heads = tuple[jax.Array | None, ...]
_Plans = tuple[Plan, ...]
_Steps = tuple[jax.Array | int, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _move(
    spec: _Spec, rows: _Arrays, counts: _Arrays, heads: _Heads, plans: _Plans, steps: _Steps
) -> tuple[_Arrays, _Heads]:
    """Rows of all parts, and of each send the header [R, k] if there is one, on the other side."""
    coded = [(r,) if w is None else wire.encode(r, w) for r, w in zip(rows, spec.wires, strict=True)]
    sent = [head for head in heads if head is not None]
    unit = unit_bytes([a for part in coded for a in part] + sent)
    used = sorted(set(spec.places))
    members = [[a for part, place in zip(coded, spec.places) if place == at for a in part] for at in used]
    buffers = [pack(m, unit) for m in members]
    groups = [spec.groups[at] for at in used]
    if plans[0].geometry.ragged:
        buffers = _move_ragged(spec, groups, buffers, counts, plans, steps)
        told: list[jax.Array] = []
    else:
        assert plans[0].axis_name is not None
        messages = [1 if group.own else plans[group.send].geometry.messages for group in groups]
        whole = buffers + [to_columns(head, unit) for head in sent]
        whole = swap(whole, messages + [1] * len(sent), plans[0].axis_name, plans[0].geometry.ranks)
        buffers, columns = whole[: len(buffers)], whole[len(buffers) :]
        told = [from_columns(c, head.shape[1], head.dtype) for c, head in zip(columns, sent, strict=True)]
    arrived = {at: iter(unpack(b, m)) for at, b, m in zip(used, buffers, members, strict=True)}
    moved = []
    for row, place, dtype in zip(rows, spec.places, spec.wires, strict=True):
        first = next(arrived[place])
        moved.append(first if dtype is None else wire.decode(first, next(arrived[place]), row.dtype))
    back = iter(told)
    return tuple(moved), tuple(None if head is None else next(back) for head in heads)


def _move_ragged(
    spec: _Spec, groups: list[_Group], buffers: list[jax.Array], counts: _Arrays, plans: _Plans, steps: _Steps
) -> list[jax.Array]:
    ways, out_rows = [], []
    for group in groups:
        plan, reverse = plans[group.send], spec.reverse[group.send]
        if group.own:
            way = planning.travel(counts[group.own - 1][:, :, None], group.away)
        else:
            assert plan.pair_counts is not None, "the ragged layout knows all pair counts"
            way = planning.travel(plan.pair_counts, group.away, steps[group.send])
        ways.append(way.turned() if reverse else way)
        out_rows.append(group.home if reverse else group.away)
    first = plans[0]
    assert first.axis_name is not None
    simulated = first.geometry.transport == "all_gather"
    return move_runs(buffers, ways, out_rows, first.rank, axis_name=first.axis_name, simulated=simulated)


def _move_forward(spec: _Spec, rows: Any, counts: Any, heads: Any, plans: Any, steps: Any) -> Any:
    return _move(spec, rows, counts, heads, plans, steps), (counts, plans, steps)


def _move_backward(spec: _Spec, saved: Any, cotangents: Any) -> Any:
    counts, plans, steps = saved
    back = list(cotangents[0])
    floats = [i for i, c in enumerate(back) if c.dtype != jax.dtypes.float0]
    if floats:
        turned = _Spec(
            tuple(not reverse for reverse in spec.reverse),
            spec.groups,
            tuple(spec.places[i] for i in floats),
            (None,) * len(floats),
        )
        moved, _ = _move(turned, tuple(back[i] for i in floats), counts, (None,) * len(plans), plans, steps)
        for i, m in zip(floats, moved, strict=True):
            back[i] = m
    return tuple(b if i in floats else None for i, b in enumerate(back)), None, None, None, None


_move.defvjp(_move_forward, _move_backward)
