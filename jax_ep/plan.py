"""Routing -> Plan: counts, offsets, orders, rounds. Pure integers; no collective, no flax.

Letters: T tokens on a rank, K top_k, N = T*K assignments, E experts (padded), R ranks, L = E/R local experts,
M messages a (source, destination): 1, or L; q rows of a message a round, C rows of a receive buffer.

"Home" is the rank a token lives on, "away" the rank of its expert. An assignment is a token's k-th choice, a = t*K + k.
Sorted by expert (stable), a rank's assignments are one run a destination rank, and inside it one run an expert.

A home buffer holds rows on their way out or just back, an away buffer rows that experts run on:

  transport     home buffer                              away buffer (a round)
  ragged        [N], row p = sorted position p           [C], runs [message][source], window i of the receiver's order
  all_to_all    [R, M, q], a run of rows a message       [R, M, q], a run a message, rows i*q .. (i+1)*q of each

all_gather (simulation) is laid out as ragged. Deduplicated rows have a plan like any others: their "experts" are the
destination ranks, of which a token has min(K, R) at most (`paths.dedup`).
"""

from __future__ import annotations

import dataclasses
import fractions
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep.config import CommConfig, refuse


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What is known before any token is: all static, all plain integers.

    Attributes:
      tokens: T.
      top_k: K, choices of a token; of deduplicated rows min(K, R).
      num_experts: E; of deduplicated rows R.
      ranks: R.
      quota: q; on the ragged layout R*q = C, however many messages there are.
      transport: "ragged", "all_to_all" or "all_gather".
      messages: M.
      most: rows that one pair can need: N, of deduplicated rows T.
      own: whether a rank's rows for itself take part; without them they are not in the plan.
    """

    tokens: int
    top_k: int
    num_experts: int
    ranks: int
    quota: int
    transport: str = "all_to_all"
    messages: int = 1
    most: int | None = None
    own: bool = True

    @property
    def assignments(self) -> int:
        """N"""
        return self.tokens * self.top_k

    @property
    def local_experts(self) -> int:
        """L"""
        return self.num_experts // self.ranks

    @property
    def ragged(self) -> bool:
        """Whether buffers are laid out as for the ragged transport."""
        return self.transport != "all_to_all"

    @property
    def home_rows(self) -> int:
        return self.assignments if self.ragged else self.recv_rows

    @property
    def recv_rows(self) -> int:
        """C"""
        return self.ranks * self.quota * (1 if self.ragged else self.messages)

    @property
    def max_rounds(self) -> int:
        """Rounds that the worst routing takes: all rows of all ranks for one rank (ragged), or one message's
        (all_to_all).
        """
        most = self.assignments if self.most is None else self.most
        if not self.ragged:
            return max(1, -(-most // self.quota))
        sources = self.ranks if self.own else self.ranks - 1
        return max(1, -(-sources * most // self.recv_rows))


def geometry(
    comm: CommConfig,
    tokens: int,
    top_k: int,
    padded_experts: int,
    ranks: int,
    transport: str,
    own: bool | None = None,
) -> Geometry:
    """The static side of the plan of one piece.

    Args:
      comm: says the path.
      tokens: of one rank; with num_chunks, of the piece.
      top_k: K.
      padded_experts: E, padded to divide over `ranks`.
      ranks: R.
      transport: of packed.
      own: whether rows for the rank itself take part; None: as `moe` has it, without num_chunks.
    """
    n = max(1, tokens * top_k)
    if comm.mode != "packed" or ranks == 1:
        return Geometry(tokens, top_k, padded_experts, ranks, n)
    factor, own = comm.recv_rows_factor, comm.num_chunks == 1 if own is None else own
    if comm.dedup:
        balanced, most = tokens * rows_a_token(padded_experts, top_k, ranks), max(1, tokens)
        q = quota(most, balanced / ranks, factor)
        return Geometry(tokens, min(top_k, ranks), ranks, ranks, q, transport, most=most, own=own)
    local = padded_experts // ranks
    messages = local if comm.messages == "expert" else 1
    pieces = padded_experts if comm.messages == "expert" and transport == "all_to_all" else ranks
    q = quota(n, fractions.Fraction(n, pieces), factor)
    return Geometry(tokens, top_k, padded_experts, ranks, q, transport, messages=messages, most=n, own=own)


def quota(most: int, balanced: fractions.Fraction, recv_rows_factor: float | None) -> int:
    """q = max(1, ceil(f * balanced)), and never more than the `most` rows there can be; balanced: those of a message
    when all are alike.
    """
    if recv_rows_factor is None:
        return most
    return min(max(1, math.ceil(fractions.Fraction(recv_rows_factor) * balanced)), most)


def pieces(tokens: int, num_chunks: int) -> tuple[int, ...]:
    """Tokens of each piece of a rank's `tokens`, in order; the first ones hold one more, and none is empty."""
    count = max(1, min(num_chunks, tokens))
    return tuple(tokens // count + (i < tokens % count) for i in range(count))


def rows_a_token(num_experts: int, top_k: int, ranks: int) -> fractions.Fraction:
    """U = R * (1 - C(E-L, K) / C(E, K)): ranks that a token's K distinct experts live on, on average over uniform
    draws, its own rank included.
    """
    local = num_experts // ranks
    top_k = min(top_k, num_experts)
    return ranks * (1 - fractions.Fraction(math.comb(num_experts - local, top_k), math.comb(num_experts, top_k)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Where each assignment of this rank goes, and what arrives here.

    Attributes:
      order: [N] int32, the assignment at each sorted position; those that go nowhere come last.
      position: [T, K] int32, the sorted position of each assignment (inverse of `order`).
      message: [T, K] int32, destination rank * M + message of each assignment; R*M where it goes nowhere.
      counts: [R, L] int32, this rank's rows for each expert.
      recv_counts: [R, L] int32, rows from each source for each expert of this rank; None until the dispatch on
        all_to_all.
      pair_counts: [R, R, M] int32, rows of each (source, destination, message); ragged layout only, else None.
      rounds: int32, rounds that every rank of this expert axis takes; None until the dispatch on all_to_all.
      rank: int32, this rank's index on the expert axis.
      geometry: static.
      axis_name: static, the expert axis.
    """

    order: jax.Array
    position: jax.Array
    message: jax.Array
    counts: jax.Array
    recv_counts: jax.Array | None
    pair_counts: jax.Array | None
    rounds: jax.Array | None
    rank: jax.Array
    geometry: Geometry = dataclasses.field(metadata={"static": True})
    axis_name: str | None = dataclasses.field(metadata={"static": True})

    @property
    def destination(self) -> jax.Array:
        """[T, K], the rank of each assignment's expert; R where it goes nowhere."""
        return self.message // self.geometry.messages

    @property
    def send_counts(self) -> jax.Array:
        """[R], this rank's rows for each destination."""
        return self.counts.sum(1, dtype=jnp.int32)

    @property
    def message_counts(self) -> jax.Array:
        """[R * M], this rank's rows of each message."""
        return self.counts.reshape(self.geometry.ranks * self.geometry.messages, -1).sum(1, dtype=jnp.int32)


def before(sizes: jax.Array, axis: int = 0) -> jax.Array:
    """Exclusive cumulative sum: where each run starts."""
    return jnp.cumsum(sizes, axis, dtype=jnp.int32) - sizes


def sort_by_expert(experts: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """experts [N] -> (order [N], counts [E]). Stable; ids outside [0, E) sort last and count nowhere."""
    keys = jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts).astype(jnp.int32)
    return stable_order(keys, num_experts), count(keys, num_experts)


def stable_order(keys: jax.Array, largest: int) -> jax.Array:
    """keys [N] int32 in 0..largest -> the permutation [N] that sorts them stably."""
    n = keys.shape[0]
    if (largest + 1) * n < 2**31:  # one integer holds key and place, and one operand sorts faster than two
        return jax.lax.sort(keys * n + jnp.arange(n, dtype=jnp.int32), is_stable=False) % n  # [N]
    return jnp.argsort(keys, stable=True).astype(jnp.int32)  # [N]


def count(ids: jax.Array, num_experts: int) -> jax.Array:
    """ids [N] -> [E] int32, how often each of 0..E-1 occurs."""
    each = jnp.arange(num_experts, dtype=ids.dtype)
    return (ids[:, None] == each[None]).sum(0, dtype=jnp.int32)


def inverse(order: jax.Array) -> jax.Array:
    """The inverse of a permutation [N]."""
    n = order.shape[0]
    return jnp.zeros(n, jnp.int32).at[order].set(jnp.arange(n, dtype=jnp.int32), unique_indices=True)  # [N]


def start_plan(experts: jax.Array, geometry: Geometry, rank: jax.Array, axis_name: str | None) -> Plan:
    """experts [T, K] -> the part of a Plan that one rank knows by itself."""
    g = geometry
    order, counts = sort_by_expert(experts.reshape(-1), g.num_experts)
    inside = (experts >= 0) & (experts < g.num_experts)
    messages = g.ranks * g.messages
    message = jnp.where(inside, experts // (g.num_experts // messages), messages).astype(jnp.int32)
    position = inverse(order).reshape(experts.shape)  # [T, K]
    by_rank = counts.reshape(g.ranks, g.local_experts)
    return Plan(order, position, message, by_rank, None, None, None, rank, g, axis_name)


def finish_ragged(plan: Plan, all_counts: jax.Array) -> Plan:
    """Adds what all_counts [R, R, L] (source, destination, expert) tells. Rounds: the fullest receiver's rows over C,
    at least 1.
    """
    g = plan.geometry
    pairs = all_counts.reshape(g.ranks, g.ranks, g.messages, -1).sum(3, dtype=jnp.int32)
    rounds = -(-pairs.sum((0, 2), dtype=jnp.int32).max() // g.recv_rows)
    recv = jax.lax.dynamic_index_in_dim(all_counts, plan.rank, 1, keepdims=False)  # [R, L]
    return dataclasses.replace(plan, recv_counts=recv, pair_counts=pairs, rounds=jnp.maximum(rounds, 1))


def header(plan: Plan) -> jax.Array:
    """[R, L + 1] int32: for each destination its counts, then the rows of this rank's largest message."""
    largest = jnp.full((plan.geometry.ranks, 1), plan.message_counts.max(), jnp.int32)
    return jnp.concatenate([plan.counts, largest], 1)


def finish_all_to_all(plan: Plan, received: jax.Array) -> Plan:
    """Adds what the headers [R, L + 1] of all sources tell. Rounds: the largest message over q, at least 1."""
    rounds = -(-received[:, -1].max() // plan.geometry.quota)
    return dataclasses.replace(plan, recv_counts=received[:, :-1], rounds=jnp.maximum(rounds, 1))


class Home(NamedTuple):
    """A round, seen from home.

    Attributes:
      assignment: [home rows] int32, whose row stands there; N where nobody's.
      slot: [T, K] int32, where each assignment's row stands; home rows where it does not travel this round.
    """

    assignment: jax.Array
    slot: jax.Array


def home(plan: Plan, step: jax.Array | int = 0) -> Home:
    """The home buffer of round `step`."""
    g = plan.geometry
    rows = plan.message_counts  # [R * M]
    begin = before(rows)
    known = plan.message < rows.shape[0]
    to = jnp.minimum(plan.message, rows.shape[0] - 1)
    within = plan.position - begin[to]  # [T, K], place in the run of its message
    if g.ragged:
        at = jnp.arange(g.assignments, dtype=jnp.int32)
        assignment = jnp.where(at < rows.sum(), plan.order, g.assignments)
        if g.max_rounds == 1:
            travels = known
        else:
            assert plan.pair_counts is not None
            ahead = arrival(plan.pair_counts)[plan.rank].reshape(-1)  # [R * M], rows before them at each receiver
            there = ahead[to] + within - step * g.recv_rows
            travels = known & (there >= 0) & (there < g.recv_rows)
        return Home(assignment, jnp.where(travels, plan.position, g.home_rows))
    place = step * g.quota + jnp.arange(g.quota, dtype=jnp.int32)  # [q]
    at = begin[:, None] + place[None]  # [R * M, q]
    filled = place[None] < rows[:, None]
    assignment = jnp.where(filled, plan.order[jnp.minimum(at, g.assignments - 1)], g.assignments)  # [R * M, q]
    j = within - step * g.quota
    travels = known & (j >= 0) & (j < g.quota)
    return Home(assignment.reshape(-1), jnp.where(travels, to * g.quota + j, g.home_rows))


class Away(NamedTuple):
    """A round, seen from the experts' rank.

    Attributes:
      index: [C] int32, the receive-buffer row of each arrived assignment, sorted by (expert, source); C past the end.
      group_sizes: [L] int32, rows of each local expert.
    """

    index: jax.Array
    group_sizes: jax.Array


def away(plan: Plan, step: jax.Array | int = 0) -> Away:
    """The away buffer of round `step`, regrouped by expert with index arithmetic."""
    g = plan.geometry
    recv = plan.recv_counts
    if recv is None:
        refuse("plan.recv_counts", None, "they come with the first dispatch", "exchange(..., with_counts=True)")
    by_message = recv.reshape(g.ranks, g.messages, -1)  # [R, M, L / M]
    if g.ragged:
        order = by_message.swapaxes(0, 1)  # the receiver's: [message][source][expert]
        begin = before(order.reshape(-1)).reshape(order.shape).swapaxes(0, 1)
        room, base = g.recv_rows, jnp.zeros((g.ranks, g.messages, 1), jnp.int32)
    else:
        begin = before(by_message, 2)  # within the message
        room = g.quota
        base = room * jnp.arange(g.ranks * g.messages, dtype=jnp.int32).reshape(g.ranks, g.messages, 1)
    base = jnp.broadcast_to(base, begin.shape).reshape(recv.shape)  # [R, L]
    begin = begin.reshape(recv.shape)
    first = jnp.clip(begin - step * room, 0, room)
    sizes = jnp.clip(begin + recv - step * room, 0, room) - first
    index = segment_index(sizes.T.reshape(-1), (base + first).T.reshape(-1), g.recv_rows)
    return Away(index, sizes.sum(0, dtype=jnp.int32))


def segment_index(sizes: jax.Array, starts: jax.Array, length: int) -> jax.Array:
    """Lays runs [start, start + size) one after another: [length] int32, `length` past their end.

    Differences at the runs' beginnings, summed up: no sort, no search, and empty runs cancel out.
    """
    begin = before(sizes)
    steps = jnp.zeros(length, jnp.int32).at[begin].add(jnp.diff(starts - begin, prepend=0), mode="drop")  # [length]
    at = jnp.arange(length, dtype=jnp.int32)
    return jnp.where(at < sizes.sum(), at + jnp.cumsum(steps, dtype=jnp.int32), length)


def lay_runs(rows: jax.Array, sizes: jax.Array, starts: jax.Array, targets: jax.Array, length: int) -> jax.Array:
    """Rows [n, W] -> [length, W]: run [start, start + size) of `rows` at each target, zeros between. Targets rise, and
    runs do not overlap there.
    """
    steps = jnp.zeros(length, jnp.int32).at[targets].add(jnp.diff(starts - targets, prepend=0), mode="drop")
    edges = jnp.zeros(length, jnp.int32).at[targets].add(1, mode="drop").at[targets + sizes].add(-1, mode="drop")
    at = jnp.arange(length, dtype=jnp.int32) + jnp.cumsum(steps, dtype=jnp.int32)
    inside = jnp.cumsum(edges, dtype=jnp.int32) > 0
    return rows.at[jnp.where(inside, at, rows.shape[0])].get(mode="fill", fill_value=0)  # [length, W]


def arrival(pairs: jax.Array) -> jax.Array:
    """pairs [R, R, M] (source, destination, message) -> where each run starts in its receiver's order."""
    order = jnp.transpose(pairs, (1, 2, 0))  # [destination][message][source]
    begin = before(order.reshape(order.shape[0], -1), 1).reshape(order.shape)
    return jnp.transpose(begin, (2, 0, 1))


class Travel(NamedTuple):
    """Runs that cross on the ragged layout, of every (sender, receiver, message), each [R, R, M] int32.

    Attributes:
      sizes: rows.
      out: where a run starts in its sender's buffer.
      into: where it starts in its receiver's.
    """

    sizes: jax.Array
    out: jax.Array
    into: jax.Array

    def turned(self) -> Travel:
        """The way back."""
        return Travel(self.sizes.swapaxes(0, 1), self.into.swapaxes(0, 1), self.out.swapaxes(0, 1))


def travel(pairs: jax.Array, room: int, step: jax.Array | int = 0) -> Travel:
    """pairs [R, R, M] rows -> the runs of round `step`, from home to away buffers of `room` rows."""
    ahead = arrival(pairs)
    low = step * room
    into = jnp.clip(ahead - low, 0, room)
    sizes = jnp.clip(ahead + pairs - low, 0, room) - into
    begin = before(pairs.reshape(pairs.shape[0], -1), 1).reshape(pairs.shape)
    return Travel(sizes, begin + jnp.clip(low - ahead, 0, pairs), into)


def capacity(factor: float, tokens: Any, top_k: int, num_experts: int) -> Any:
    """ceil(factor * tokens * K / E), rows that an expert takes; exact in 32 bits for an int32 `tokens`, traced or not.

    The factor counts as the nearest fraction with a denominator of at most 100 (and at least 1/100), and as E where it
    is more.
    """
    share = max(fractions.Fraction(str(min(factor, num_experts))).limit_denominator(100), fractions.Fraction(1, 100))
    n, d = share.numerator, share.denominator * num_experts
    whole, rest = tokens * top_k // d, tokens * top_k % d
    return n * whole - (-n * rest // d)


def kept_under_capacity(experts: jax.Array, num_experts: int, ahead: Any, capacity: Any) -> jax.Array:
    """[T, K] bool: whether an assignment is among the first `capacity` of its expert, in token order, then choice.

    Args:
      experts: [T, K]; ids outside [0, E) count nowhere.
      ahead: [E] int32, assignments of earlier ranks to each expert; 0 on one rank.
    """
    order, counts = sort_by_expert(experts.reshape(-1), num_experts)
    inside = (experts >= 0) & (experts < num_experts)
    e = jnp.where(inside, experts, 0)
    rank_in_expert = inverse(order).reshape(experts.shape) - (before(counts) - ahead)[e]
    return inside & (rank_in_expert < capacity)
