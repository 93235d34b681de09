"""Packed: exactly the rows that must travel, one message a destination rank; more rounds when the buffer does not
hold them.

Letters: T tokens, K top_k, H hidden, R ranks, L local experts, C receive rows, n home rows; J rows of a token and S
slots of a row: K and 1, of deduplicated rows min(K, R) and min(K, L).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep import plan as planning
from jax_ep.config import CommConfig, MoEConfig, refuse
from jax_ep.paths.common import Dispatched, ExpertFn, add, as_gradients, grouped, no_sums
from jax_ep.paths.dedup import slots
from jax_ep.paths.rows import collect, place, spread
from jax_ep.paths.windows import run_experts
from jax_ep.plan import Home, Plan
from jax_ep.routing import Routing
from jax_ep.transport import Part, exchange
from jax_ep.transport.wire import rounded

NOWHERE = jnp.iinfo(jnp.int32).max


class Beside(NamedTuple):
    """What belongs to the rows of each token, at home.

    Attributes:
      weights: [T, J, S] float32. They stay at home where experts is None.
      experts: [T, J, S] int32, 1 + local expert, 0 for none; None: rows of one expert each, which the plan knows.
    """

    weights: jax.Array
    experts: jax.Array | None


def row_experts(experts: jax.Array, config: MoEConfig, ranks: int, rank: jax.Array, own: bool) -> jax.Array:
    """experts [T, K] -> [T, J], what the plan sorts rows by: their experts, or of deduplicated rows their ranks."""
    padded = config.padded_experts(ranks)
    experts = _travelling(experts, padded // ranks, rank, own)
    if not config.comm.dedup:
        return experts
    return slots(experts, jnp.zeros(experts.shape, jnp.float32), padded, ranks).destination


def _travelling(experts: jax.Array, local: int, rank: jax.Array, own: bool) -> jax.Array:
    """Without those of the rank itself, where they take no part in the exchange."""
    return experts if own else jnp.where(experts // local == rank, NOWHERE, experts)


def _beside(routing: Routing, plan: Plan, config: MoEConfig) -> Beside:
    ranks = plan.geometry.ranks
    if not config.comm.dedup:
        return Beside(routing.weights[..., None], None)
    padded = config.padded_experts(ranks)
    experts = _travelling(routing.experts, padded // ranks, plan.rank, plan.geometry.own)
    found = slots(experts, routing.weights, padded, ranks)
    return Beside(found.weights, (found.experts + 1) % (padded // ranks + 1))


def _window(comm: CommConfig, positions: int, balanced: Fraction | int) -> int | None:
    """Positions of a window: the receive buffer's factor times the balanced ones; None where all fit."""
    if comm.recv_rows_factor is None:
        return None
    window = max(1, math.ceil(Fraction(comm.recv_rows_factor) * balanced))
    return window if window < positions else None


def own_experts(x: jax.Array, routing: Routing, plan: Plan, config: MoEConfig) -> Dispatched:
    """The rank's tokens [T, H] beside its own experts, which need no exchange: for plans without them."""
    ranks, comm = plan.geometry.ranks, config.comm
    local = config.padded_experts(ranks) // ranks
    ids = routing.experts - plan.rank * local
    ids = jnp.where((routing.experts < NOWHERE) & (ids >= 0), ids, local)
    rows = x if comm.wire_dtype is None else rounded(x, comm.wire_dtype)
    window = _window(comm, ids.size, Fraction(ids.size, ranks))
    return grouped(rows, ids, routing.weights, plan, local, window)


def dispatch(x: jax.Array, routing: Routing, plan: Plan, config: MoEConfig) -> Dispatched:
    """x [T, H] -> the first round's rows at their experts' ranks."""
    arrived, plan = exchange(outgoing(x, routing, plan, config), plan, with_counts=True)
    return incoming(arrived, plan, config)


def outgoing(x: jax.Array, routing: Routing, plan: Plan, config: MoEConfig) -> list[Part]:
    """What a dispatch sends in the first round, for an exchange with_counts of the caller's own."""
    return _sent(x, _beside(routing, plan, config), planning.home(plan), config.comm)


def incoming(arrived: Sequence[Part], plan: Plan, config: MoEConfig) -> Dispatched:
    """What the parts of `outgoing` are on the other side; plan as the exchange returned it."""
    return _arrived(*(part.rows for part in named(arrived)), plan=plan, config=config)


def named(arrived: Sequence[Part]) -> list[Part]:
    """The parts of `outgoing` on the other side, under the checkpoint names that a policy can keep them by."""
    names = ("moe_dispatched", "moe_counts", "moe_weights")
    return [part._replace(rows=checkpoint_name(part.rows, name)) for part, name in zip(arrived, names)]


def _sent(x: jax.Array, beside: Beside, home: Home, comm: CommConfig) -> list[Part]:
    """The parts of a dispatch: hidden rows, and of deduplicated ones their experts and weights."""
    parts = [Part(spread(x, home), wire_dtype=comm.wire_dtype)]
    if beside.experts is not None:
        parts += [Part(place(beside.experts, home)), Part(place(beside.weights, home))]
    return parts


def _arrived(
    rows: jax.Array,
    experts: jax.Array | None = None,
    weights: jax.Array | None = None,
    *,
    plan: Plan,
    config: MoEConfig,
    step: jax.Array | int = 0,
) -> Dispatched:
    """Rows [C, H] beside their experts; deduplicated ones come with experts [C, S], 1 + local expert, and weights
    [C, S].
    """
    if experts is None or weights is None:
        return Dispatched(rows, *planning.away(plan, step), None, plan)
    g = plan.geometry
    local = config.padded_experts(g.ranks) // g.ranks
    balanced = g.tokens * config.router.top_k
    return grouped(rows, experts - 1, weights, plan, local, _window(config.comm, experts.size, balanced))


def combine(rows: jax.Array, dispatched: Dispatched, weights: jax.Array, config: MoEConfig) -> jax.Array:
    """Expert rows [C, H] of the first round -> weighted sums [T, H] at home, float32."""
    back, plan = exchange(returning(rows, config), dispatched.plan, reverse=True)
    return returned(back, plan, weights, config)


def returning(rows: jax.Array, config: MoEConfig) -> list[Part]:
    """What a combine sends in the first round, for a reverse exchange of the caller's own."""
    return [Part(rows.astype(config.dtype))]


def returned(back: Sequence[Part], plan: Plan, weights: jax.Array, config: MoEConfig) -> jax.Array:
    """Weighted sums [T, H] float32 of what the parts of `returning` are at home."""
    home = planning.home(plan)
    weights = jnp.ones(home.slot.shape, jnp.float32) if config.comm.dedup else weights
    return collect(checkpoint_name(back[0].rows, "moe_combined"), weights, home)


def extra_rounds(
    x: jax.Array,
    routing: Routing,
    params: Any,
    plan: Plan,
    expert_fn: ExpertFn,
    config: MoEConfig,
    loops: bool = True,
) -> jax.Array | None:
    """What rounds 2.. add to the sums [T, H] of `combine`, float32; None where no routing can need them.

    A loop whose trip count every rank knows. Nothing of a round is kept: its backward sends the rows again, with their
    cotangents and weights beside them in one exchange, recomputes, and brings the gradients of rows and weights home
    in another.

    Args:
      x: [T, H].
      routing: of these tokens.
      params: of the experts held here, as expert_fn takes them.
      plan: complete, as `dispatch` returns it.
      expert_fn: as for `run_experts`.
      config: the layer.
      loops: as for `run_experts`.
    """
    if plan.geometry.max_rounds == 1:
        return None
    if plan.rounds is None:
        refuse("plan.rounds", None, "they come with the first dispatch", "dispatch(...).plan")
    return _extra(_How(expert_fn, config, loops), x, _beside(routing, plan, config), params, plan)


class _How(NamedTuple):
    """What of the rounds is static."""

    expert_fn: ExpertFn
    config: MoEConfig
    loops: bool


def _experts(how: _How, arrived: list[Part], plan: Plan, step: jax.Array, params: Any) -> jax.Array:
    """Rows [C, H] as they go home: of hidden rows, and of deduplicated ones their experts and weights."""
    rows = _arrived(*(p.rows for p in arrived), plan=plan, config=how.config, step=step)
    return run_experts(how.expert_fn, rows, params, how.loops).astype(how.config.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _extra(how: _How, x: jax.Array, beside: Beside, params: Any, plan: Plan) -> jax.Array:
    def one(step: jax.Array, total: jax.Array) -> jax.Array:
        home = planning.home(plan, step)
        arrived, _ = exchange(_sent(x, beside, home, how.config.comm), plan, step=step)
        (back,), _ = exchange([Part(_experts(how, arrived, plan, step, params))], plan, reverse=True, step=step)
        weights = jnp.ones(home.slot.shape, jnp.float32) if beside.experts is not None else beside.weights[..., 0]
        return total + collect(back.rows, weights, home)

    return jax.lax.fori_loop(1, plan.rounds, one, jnp.zeros(x.shape, jnp.float32))


def _extra_forward(how: _How, x: jax.Array, beside: Beside, params: Any, plan: Plan) -> Any:
    return _extra(how, x, beside, params, plan), (x, beside, params, plan)


def _extra_backward(how: _How, saved: Any, d_total: jax.Array) -> Any:
    x, beside, params, plan = saved
    d_y = d_total.astype(x.dtype)

    def one(step: jax.Array, sums: Any) -> Any:
        home = planning.home(plan, step)
        sent = _sent(x, beside, home, how.config.comm)
        if beside.experts is None:
            sent.append(Part(place(beside.weights, home)))
        (*arrived, d_out), _ = exchange([*sent, Part(spread(d_y, home))], plan, step=step)

        def there(rows: jax.Array, weights: jax.Array, params: Any) -> jax.Array:
            """The rows' share of the sums; what stands between rows and weights are their experts."""
            if beside.experts is None:
                return weights * _experts(how, [Part(rows)], plan, step, params).astype(jnp.float32)
            return _experts(how, [Part(rows), arrived[1], Part(weights)], plan, step, params)

        out, pull = jax.vjp(there, arrived[0].rows, arrived[-1].rows, params)
        d_rows, d_weight, d_more = pull(d_out.rows.astype(out.dtype))
        (back, back_weight), _ = exchange([Part(d_rows), Part(d_weight)], plan, reverse=True, step=step)
        d_x = collect(back.rows, jnp.ones(home.slot.shape, jnp.float32), home)
        d_weights = back_weight.rows.at[home.slot].get(mode="fill", fill_value=0)  # [T, J, S]
        return add(sums, (d_x, d_weights, d_more))

    of = (x, beside.weights, params)
    d_x, d_weights, d_params = as_gradients(jax.lax.fori_loop(1, plan.rounds, one, no_sums(of)), of)
    return d_x, Beside(d_weights, None), d_params, None


_extra.defvjp(_extra_forward, _extra_backward)
