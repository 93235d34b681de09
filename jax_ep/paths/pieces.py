"""Pieces of a rank's tokens through packed's exchanges, so that the experts of each have an exchange beside them.

    dispatch of 0                                beside what the caller has
    dispatch of 1                                beside the experts of 0
    combine of i-1 and dispatch of i+1, in one   beside the experts of i
    combine of the last but one                  beside the experts of the last
    combine of the last                          beside what the caller has

n pieces take n + 2 collectives. Each line waits for the one before; in the backward they go from last to first.

Letters: T tokens of a piece, H hidden, C receive rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from jax_ep.config import MoEConfig
from jax_ep.overlap import after
from jax_ep.paths import packed
from jax_ep.paths.common import Dispatched
from jax_ep.plan import Plan
from jax_ep.routing import Routing
from jax_ep.transport import Part, Send, exchange_together


class Combined(NamedTuple):
    """What the pieces come to.

    Attributes:
      ys: weighted sums [T, H] float32 of each.
      plans: complete.
      first: as it was given, computed beside the first dispatch.
      last: as it was given; what takes it runs beside the last combine.
    """

    ys: list[jax.Array]
    plans: list[Plan]
    first: jax.Array | None
    last: jax.Array


def in_turn(
    xs: Sequence[jax.Array],
    routings: Sequence[Routing],
    plans: Sequence[Plan],
    experts: Callable[[int, Dispatched], jax.Array],
    config: MoEConfig,
    first: jax.Array | None,
    last: jax.Array,
) -> Combined:
    """Pieces [T, H], two or more, of plans without the rank's own rows; experts: (piece, arrived rows) to rows [C, H].

    first, last: floating point, see Combined.
    """
    count, together = len(xs), plans[0].geometry.messages == 1

    def dispatch(i: int, x: jax.Array) -> Send:
        return Send(packed.outgoing(x, routings[i], plans[i], config), plans[i], with_counts=True)

    def combine(i: int, rows: jax.Array) -> Send:
        return Send(packed.returning(rows, config), arrived[i].plan, reverse=True)

    def cross(*sends: Send) -> list[tuple[list[Part], Plan]]:
        return exchange_together(sends) if together else [exchange_together([send])[0] for send in sends]

    def home(i: int, came: tuple[list[Part], Plan]) -> jax.Array:
        return packed.returned(*came, routings[i].weights, config)

    arrived: list[Dispatched] = []
    ys: list[jax.Array] = []
    with jax.named_scope("dispatch"):
        arrived.append(packed.incoming(*cross(dispatch(0, xs[0]))[0], config))
    if first is not None:
        rows, first = after(arrived[0].rows, first)
        arrived[0] = arrived[0].with_rows(rows)
    back: jax.Array | None = None  # the rows of the piece before, on their way home
    for i in range(count):
        here, following = arrived[i], xs[i + 1] if i + 1 < count else None
        rows, back, following = jax.lax.optimization_barrier((here.rows, back, following))
        with jax.named_scope("exchange"):
            sends = [] if back is None else [combine(i - 1, back)]
            sends += [] if following is None else [dispatch(i + 1, following)]
            came = cross(*sends)
            if back is not None:
                ys.append(home(i - 1, came[0]))
            if following is not None:
                arrived.append(packed.incoming(*came[-1], config))
        with jax.named_scope("experts"):
            back = experts(i, here.with_rows(rows))
    (back, ys[-1]), last = after((back, ys[-1]), last)
    with jax.named_scope("combine"):
        ys.append(home(count - 1, *cross(combine(count - 1, back))))
    return Combined(ys, [a.plan for a in arrived], first, last)
