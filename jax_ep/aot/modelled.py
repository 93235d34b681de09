"""How long a schedule would take on a host, and how much of its communication products would cover. Modelled: nothing
here has been measured.

A product takes its operations over the host's rate, or its bytes over its memory's, whichever is longer, at a stated
efficiency. A collective takes the link's latency and its bytes over the link's rate; one after the other uses the link.
Everything else (sorts, gathers, additions, loops over the data) is given no time, so that what counts as hidden lies
beside a product of experts or attention, and nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

from jax_ep.aot.hosts import Host
from jax_ep.aot.products import Product
from jax_ep.aot.schedule import Collective, Schedule
from jax_ep.config import MoEConfig

EFFICIENCY = 0.6  # of the host's rate, which a good product of this size reaches
MEMORY_EFFICIENCY = 0.8  # of the memory's rate
# Hidden over all communication, measured with a profiler on 16 H100 in two hosts by others, with another model: a mark
# to read modelled figures beside, not to compare them with.
PUBLISHED_HIDDEN = 0.3655
_ONE_SHOT_RANKS = 8


class Bar(NamedTuple):
    """One product or collective in time, in seconds from the schedule's beginning."""

    start: float
    end: float
    of: Product | Collective

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Prediction(NamedTuple):
    """What is modelled of one schedule, its loops with their turns included in the sums.

    Attributes:
      products, collectives: bars, without those of loops.
      communication, hidden, hideable: seconds; hideable is the most that any order of these operations could hide.
      computation: seconds of all products.
      total: seconds from the first to the last.
      rows_communication, rows_hidden, rows_hideable: of the collectives that carry rows (`Collective.payload`) alone.
    """

    products: tuple[Bar, ...]
    collectives: tuple[Bar, ...]
    communication: float
    hidden: float
    hideable: float
    computation: float
    total: float
    rows_communication: float
    rows_hidden: float
    rows_hideable: float

    @property
    def hidden_fraction(self) -> float | None:
        """hidden / communication; None without communication."""
        return self.hidden / self.communication if self.communication else None

    @property
    def hidden_of_hideable(self) -> float | None:
        """hidden / hideable; None where nothing can be hidden."""
        return self.hidden / self.hideable if self.hideable else None


def host_synchronous(collective: Collective, host: Host) -> bool:
    """Whether the devices wait for the host in it: ragged exchanges of GPUs that go through NCCL."""
    one_shot = host.peer_access and collective.ranks <= _ONE_SHOT_RANKS
    return host.platform == "cuda" and collective.kind == "ragged_all_to_all" and not one_shot


def sent_bytes(collective: Collective, config: MoEConfig) -> int:
    """Bytes that one device sends to others under a balanced routing.

    A ragged exchange has room for recv_rows_factor times the rows on the side where they arrive, and for just the rows
    where they start; one that takes some there and brings others back has some of both. All have 1 + the factor times
    the rows on both sides together.
    """
    factor = config.comm.recv_rows_factor
    if collective.kind != "ragged_all_to_all" or factor is None or not collective.ranks:
        return collective.sent
    rows = (collective.given + collective.bytes) / (1 + factor)
    return min(collective.sent, round(rows * (collective.ranks - 1) / collective.ranks))


def collective_seconds(collective: Collective, host: Host, config: MoEConfig) -> float:
    return host.link_latency + sent_bytes(collective, config) / host.link_rate


def product_seconds(product: Product, host: Host, live: float = 1.0) -> float:
    """live: the part of its rows that are real."""
    computing = product.flops * live / (host.tflops * 1e12 * EFFICIENCY)
    moved = product.weight_bytes + live * (product.bytes - product.weight_bytes)
    return max(computing, moved / (host.memory_rate * MEMORY_EFFICIENCY))


def live_parts(schedule: Schedule, config: MoEConfig, tokens: int, ranks: int) -> dict[str, float]:
    """The part of the rows in the buffers of "experts" and "own_experts" that are real under a balanced routing;
    grouped products skip the others.

    Args:
      schedule: of the program. One layer's forward is taken to be what the computation holds that has most of it.
      config: that layer.
      tokens: of one device.
      ranks: of the expert axis.
    """
    matrices = 3 if config.gated else 2
    every = 2 * tokens * config.router.top_k * matrices * config.hidden_size * config.intermediate_size
    there = {"experts": 0, "own_experts": 0}
    for computation in schedule.whole():
        forward = [p for p in computation.products if p.forward and p.grouped]
        found = {place: sum(p.flops for p in forward if p.place == place) for place in there}
        there = max(there, found, key=lambda flops: sum(flops.values()))
    own = every / ranks if there["own_experts"] else 0.0
    real = {"experts": every - own, "own_experts": own}
    return {place: min(1.0, real[place] / flops) if flops else 1.0 for place, flops in there.items()}


def predict(schedule: Schedule, host: Host, config: MoEConfig, live: dict[str, float]) -> Prediction:
    """A schedule's time on a host; see the module. `live` as of `live_parts`."""
    seconds = {p: product_seconds(p, host, live.get(p.place, 1.0) if p.grouped else 1.0) for p in schedule.products}
    exchanges = {c: collective_seconds(c, host, config) for c in schedule.collectives}
    products, collectives = _bars(schedule, host, seconds, exchanges)
    covered = [bar for bar in products if isinstance(bar.of, Product) and bar.of.place]
    every, rows = (
        [
            sum(bar.seconds for bar in some),
            sum(max(0.0, min(c.end, p.end) - max(c.start, p.start)) for c in some for p in covered),
            hideable(schedule, {c.of: exchanges[c.of] for c in some if isinstance(c.of, Collective)}, seconds),
        ]
        for some in (collectives, [c for c in collectives if isinstance(c.of, Collective) and c.of.payload])
    )
    total = max([bar.end for bar in (*products, *collectives)], default=0.0)
    sums = [*every, sum(seconds.values()), total, *rows]
    for loop in schedule.loops:
        if loop.body is not None and loop.trips is not None:
            each = predict(loop.body, host, config, live)[2:]
            sums = [a + loop.trips * b for a, b in zip(sums, each)]
    return Prediction(tuple(products), tuple(collectives), *sums)


def _bars(
    schedule: Schedule, host: Host, seconds: dict[Product, float], exchanges: dict[Collective, float]
) -> tuple[list[Bar], list[Bar]]:
    """One pass through the schedule: a clock of the products, and when the link is free."""
    starts: dict[int, list[Collective]] = {}
    for collective in schedule.collectives:
        starts.setdefault(collective.start, []).append(collective)
    ends = {collective.end: collective for collective in schedule.collectives if collective.asynchronous}
    at = {product.at: product for product in schedule.products}
    products, collectives = list[Bar](), list[Bar]()
    finished: dict[str, float] = {}
    clock = free = 0.0
    for position in sorted({*starts, *ends, *at}):
        if position in at:
            product = at[position]
            products.append(Bar(clock, clock + seconds[product], product))
            clock += seconds[product]
        for collective in starts.get(position, ()):
            blocking = not collective.asynchronous or host_synchronous(collective, host)
            # GPUs send one after the other; on a TPU's links a short one that all wait for goes beside a long one.
            beside = host.platform == "tpu" and blocking and not collective.payload
            begin = clock if beside else max(clock, free)
            end = finished[collective.name] = begin + exchanges[collective]
            collectives.append(Bar(begin, end, collective))
            free = free if beside else end
            clock = end if blocking else clock
        if position in ends:
            clock = max(clock, finished[ends[position].name])
    return products, collectives


def hideable(schedule: Schedule, communication: dict[Collective, float], products: dict[Product, float]) -> float:
    """Seconds of communication that products could cover in the best order: each moment of a product covers one
    collective, and only one that neither waits for it nor is waited for. (A maximum flow from collectives to products.)
    """
    room = {c: seconds for c, seconds in communication.items()}
    left = {p: seconds for p, seconds in products.items() if p.place}
    edges = {c: [p for p in left if schedule.independent(c, p)] for c in room}
    flow: dict[tuple[Collective, Product], float] = {}
    tiny = 1e-12
    while path := _augmenting(room, left, edges, flow, tiny):
        first, last = path[0][0], path[-1][1]
        forward, back = path[::2], path[1::2]
        amount = min([room[first], left[last], *(flow[pair] for pair in back)])
        for pair in forward:
            flow[pair] = flow.get(pair, 0.0) + amount
        for pair in back:
            flow[pair] -= amount
        room[first] -= amount
        left[last] -= amount
    return sum(flow.values())


def _augmenting(
    room: dict[Collective, float],
    left: dict[Product, float],
    edges: dict[Collective, list[Product]],
    flow: dict[tuple[Collective, Product], float],
    tiny: float,
) -> list[tuple[Collective, Product]]:
    """Pairs from a collective with time to spare to a product with time to spare: added to, taken from, added to ..."""
    reached: dict[Product, tuple[Collective, Product | None]] = {}
    queue: list[tuple[Collective, Product | None]] = [(c, None) for c, seconds in room.items() if seconds > tiny]
    seen = {c for c, _ in queue}
    for collective, through in queue:
        for product in edges[collective]:
            if product in reached:
                continue
            reached[product] = collective, through
            if left[product] > tiny:
                path, step = [(collective, product)], through
                while step is not None:
                    previous, before = reached[step]
                    path = [(previous, step), (path[0][0], step), *path]
                    step = before
                return path
            for other in edges:
                if other not in seen and flow.get((other, product), 0.0) > tiny:
                    seen.add(other)
                    queue.append((other, product))
    return []
