"""One packed buffer, one collective, and its transpose.

Letters: n home rows, C receive rows, R ranks, L local experts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep import plan as planning
from jax_ep.config import refuse
from jax_ep.plan import Plan
from jax_ep.transport.all_gather import emulated_ragged_all_to_all
from jax_ep.transport.all_to_all import swap, swap_with_header
from jax_ep.transport.parts import Part, pack, unpack
from jax_ep.transport.ragged import native_or_emulated, ragged_all_to_all

__all__ = ["Part", "exchange", "ragged_all_to_all", "share_counts"]


def share_counts(plan: Plan) -> Plan:
    """On the ragged layout, the one control collective: an all_gather of E int32 a rank. Elsewhere nothing; the
    dispatch tells.
    """
    if not plan.geometry.ragged:
        return plan
    gathered = jax.lax.all_gather(plan.counts, plan.axis_name)  # [R, R, L]
    return planning.finish_ragged(plan, checkpoint_name(gathered, "moe_counts"))


def exchange(
    parts: Sequence[Part],
    plan: Plan,
    *,
    reverse: bool = False,
    step: jax.Array | int = 0,
    with_counts: bool = False,
) -> tuple[list[Part], Plan]:
    """Moves the plan's rows of all parts to their experts' ranks, or back, in one collective.

    Inside shard_map over plan.axis_name. Home buffers are [home rows, width], laid out as `plan.home` says; away
    buffers [C, width], as `plan.away` says. Rows that nobody sent are zeros on the ragged layout; on all_to_all empty
    home rows travel as well, so leave them zero (`plan.home` says which). The transpose is the exchange turned round.

    Args:
      parts: what travels; all home buffers, or with reverse=True all away buffers.
      plan: from `make_plan`.
      reverse: bring rows back.
      step: the round.
      with_counts: on the all_to_all transport, carry this rank's counts in header rows, so that the plan comes back
        completed with the others'. The first dispatch of a plan wants that; the ragged layout knows its counts already.

    Returns:
      The parts on the other side, and the plan.

    Raises:
      ConfigError: a plan of one rank, which exchanges nothing; parts that are not the plan's rows.
    """
    g = plan.geometry
    if plan.axis_name is None or g.ranks == 1:
        refuse("plan ranks", g.ranks, "one rank exchanges nothing", 2)
    wanted = g.recv_rows if reverse else g.home_rows
    for i, part in enumerate(parts):
        if part.rows.ndim != 2 or part.rows.shape[0] != wanted:
            rule = f"must be [{wanted}, width], the {'away' if reverse else 'home'} rows of this plan"
            refuse(f"parts[{i}].rows", list(part.rows.shape), rule, [wanted, *part.rows.shape[1:2]])
    rows = tuple(p.rows for p in parts)
    head = planning.header(plan) if with_counts and not g.ragged else None
    moved, told = _move(reverse, rows, head, plan, step)
    if told is not None:
        plan = planning.finish_all_to_all(plan, checkpoint_name(told, "moe_counts"))
    return [Part(m) for m in moved], plan


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _move(
    reverse: bool, rows: tuple[jax.Array, ...], head: jax.Array | None, plan: Plan, step: jax.Array | int
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    g, axis = plan.geometry, plan.axis_name
    assert axis is not None, "one rank exchanges nothing"
    buffer, told = pack(rows), None
    if g.ragged:
        slices = planning.ragged_slices(plan, step, reverse)
        blank = jnp.zeros((g.home_rows if reverse else g.recv_rows, buffer.shape[1]), buffer.dtype)
        through = emulated_ragged_all_to_all if g.transport == "all_gather" else native_or_emulated
        buffer = through(buffer, blank, *slices, axis_name=axis)
    elif head is not None:
        buffer, told = swap_with_header(buffer, head, axis, g.ranks)
    else:
        buffer = swap(buffer, axis, g.ranks)
    return tuple(unpack(buffer, rows)), told


def _move_forward(reverse: bool, rows: Any, head: Any, plan: Plan, step: Any) -> Any:
    return _move(reverse, rows, head, plan, step), (plan, step)


def _move_backward(reverse: bool, saved: Any, cotangents: Any) -> Any:
    plan, step = saved
    back = list(cotangents[0])
    floats = [i for i, c in enumerate(back) if c.dtype != jax.dtypes.float0]
    if floats:
        moved, _ = _move(not reverse, tuple(back[i] for i in floats), None, plan, step)
        for i, m in zip(floats, moved, strict=True):
            back[i] = m
    return tuple(b if i in floats else None for i, b in enumerate(back)), None, None, None


_move.defvjp(_move_forward, _move_backward)
