"""Routing -> Plan: counts, offsets, orders, rounds. Pure integers; no collective, no flax.

Letters: T tokens on a rank, K top_k, N = T*K assignments, E experts (padded), R ranks, L = E/R local experts,
q rows of a (source, destination) pair a round, C = R*q rows of a receive buffer.

"Home" is the rank a token lives on, "away" the rank of its expert. An assignment is a token's k-th choice, a = t*K + k.
Sorted by expert (stable), a rank's assignments are one run a destination rank, and inside it one run an expert.

A home buffer holds rows on their way out or just back, an away buffer rows that experts run on:

  transport     home buffer                           away buffer (a round)
  ragged        [N], row p = sorted position p        [C], runs [source][expert], window i of the receiver's order
  all_to_all    [R, q], run of rows for each rank     [R, q], a run from each source, rows i*q .. (i+1)*q of each pair

all_gather (simulation) is laid out as ragged.
"""

from __future__ import annotations

import dataclasses
import fractions
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep.config import refuse


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What is known before any token is: all static, all plain integers."""

    tokens: int
    top_k: int
    num_experts: int
    ranks: int
    quota: int
    transport: str = "all_to_all"

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
        return self.assignments if self.ragged else self.ranks * self.quota

    @property
    def recv_rows(self) -> int:
        """C"""
        return self.ranks * self.quota

    @property
    def max_rounds(self) -> int:
        """Rounds that the worst routing takes: all assignments of all ranks for one rank (ragged), or one pair's
        (all_to_all).
        """
        return -(-self.assignments // self.quota)


def quota(assignments: int, ranks: int, recv_rows_factor: float | None) -> int:
    """q = max(1, ceil(f * balanced / R)), and never more than the N rows that one pair can need."""
    if recv_rows_factor is None:
        return assignments
    exact = min(recv_rows_factor, ranks) * assignments / ranks
    return min(max(1, int(-(-exact // 1))), assignments)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Where each assignment of this rank goes, and what arrives here.

    Attributes:
      order: [N] int32, the assignment at each sorted position; those that go nowhere come last.
      position: [T, K] int32, the sorted position of each assignment (inverse of `order`).
      destination: [T, K] int32, the rank of each assignment's expert; R where it goes nowhere.
      counts: [R, L] int32, this rank's rows for each expert.
      recv_counts: [R, L] int32, rows from each source for each expert of this rank; None until the dispatch on
        all_to_all.
      pair_counts: [R, R] int32, rows for each (source, destination); ragged layout only, else None.
      rounds: int32, rounds that every rank of this expert axis takes; None until the dispatch on all_to_all.
      rank: int32, this rank's index on the expert axis.
      geometry: static.
      axis_name: static, the expert axis.
    """

    order: jax.Array
    position: jax.Array
    destination: jax.Array
    counts: jax.Array
    recv_counts: jax.Array | None
    pair_counts: jax.Array | None
    rounds: jax.Array | None
    rank: jax.Array
    geometry: Geometry = dataclasses.field(metadata={"static": True})
    axis_name: str | None = dataclasses.field(metadata={"static": True})

    @property
    def send_counts(self) -> jax.Array:
        """[R], this rank's rows for each destination."""
        return self.counts.sum(1)


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
    destination = jnp.where(inside, experts // g.local_experts, g.ranks).astype(jnp.int32)
    position = inverse(order).reshape(experts.shape)  # [T, K]
    by_rank = counts.reshape(g.ranks, g.local_experts)
    return Plan(order, position, destination, by_rank, None, None, None, rank, g, axis_name)


def finish_ragged(plan: Plan, all_counts: jax.Array) -> Plan:
    """Adds what all_counts [R, R, L] (source, destination, expert) tells. Rounds: the fullest receiver's rows over C,
    at least 1.
    """
    pairs = all_counts.sum(2)
    rounds = -(-pairs.sum(0).max() // plan.geometry.recv_rows)
    recv = jax.lax.dynamic_index_in_dim(all_counts, plan.rank, 1, keepdims=False)  # [R, L]
    return dataclasses.replace(plan, recv_counts=recv, pair_counts=pairs, rounds=jnp.maximum(rounds, 1))


def header(plan: Plan) -> jax.Array:
    """[R, L + 1] int32: for each destination its counts, then this rank's largest pair count."""
    largest = jnp.full((plan.geometry.ranks, 1), plan.send_counts.max(), jnp.int32)
    return jnp.concatenate([plan.counts, largest], 1)


def finish_all_to_all(plan: Plan, received: jax.Array) -> Plan:
    """Adds what the headers [R, L + 1] of all sources tell. Rounds: the largest pair count over q, at least 1."""
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
    runs = plan.send_counts  # [R]
    begin = before(runs)
    known = plan.destination < g.ranks
    to = jnp.minimum(plan.destination, g.ranks - 1)
    within = plan.position - begin[to]  # [T, K], place in the run of its destination
    if g.ragged:
        at = jnp.arange(g.assignments, dtype=jnp.int32)
        assignment = jnp.where(at < runs.sum(), plan.order, g.assignments)
        if g.max_rounds == 1:
            travels = known
        else:
            assert plan.pair_counts is not None
            ahead = before(plan.pair_counts)[plan.rank]  # [R], rows of earlier sources at each receiver
            there = ahead[to] + within - step * g.recv_rows
            travels = known & (there >= 0) & (there < g.recv_rows)
        return Home(assignment, jnp.where(travels, plan.position, g.home_rows))
    place = step * g.quota + jnp.arange(g.quota, dtype=jnp.int32)  # [q]
    at = begin[:, None] + place[None]  # [R, q]
    filled = place[None] < runs[:, None]
    assignment = jnp.where(filled, plan.order[jnp.minimum(at, g.assignments - 1)], g.assignments)  # [R, q]
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
    if g.ragged:
        begin = before(recv.reshape(-1)).reshape(recv.shape)  # [R, L] in the receiver's order
        room, base = g.recv_rows, jnp.zeros((g.ranks, 1), jnp.int32)
    else:
        begin = before(recv, 1)  # [R, L] within the pair
        room, base = g.quota, g.quota * jnp.arange(g.ranks, dtype=jnp.int32)[:, None]
    first = jnp.clip(begin - step * room, 0, room)
    sizes = jnp.clip(begin + recv - step * room, 0, room) - first
    index = segment_index(sizes.T.reshape(-1), (base + first).T.reshape(-1), g.recv_rows)
    return Away(index, sizes.sum(0, dtype=jnp.int32))


def segment_index(sizes: jax.Array, starts: jax.Array, length: int) -> jax.Array:
    """Lays runs [start, start + size) one after another: [length] int32, `length` past their end.

    Differences at the runs' beginnings, summed up: no sort, no search, and empty runs cancel out.
    """
    begin = before(sizes)
    shift = starts - begin
    steps = jnp.zeros(length, jnp.int32).at[begin].add(jnp.diff(shift, prepend=0), mode="drop")  # [length]
    at = jnp.arange(length, dtype=jnp.int32)
    return jnp.where(at < sizes.sum(), at + jnp.cumsum(steps, dtype=jnp.int32), length)


class Slices(NamedTuple):
    """Arguments of a ragged all-to-all, one slice a peer, each [R] int32."""

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array
    recv_sizes: jax.Array


def ragged_slices(plan: Plan, step: jax.Array | int = 0, reverse: bool = False) -> Slices:
    """Which slices cross in round `step`; reverse=True brings them back."""
    g, pairs, me = plan.geometry, plan.pair_counts, plan.rank
    assert pairs is not None, "the ragged layout knows all pair counts"
    ahead = before(pairs)  # [source, destination], in the receiver's order
    low = step * g.recv_rows
    there = jnp.clip(ahead - low, 0, g.recv_rows)
    sizes = jnp.clip(ahead + pairs - low, 0, g.recv_rows) - there
    here = before(pairs, 1) + jnp.clip(low - ahead, 0, pairs)  # [source, destination], in the sender's home buffer
    if reverse:
        return Slices(there[:, me], sizes[:, me], here[:, me], sizes[me])
    return Slices(here[me], sizes[me], there[me], sizes[:, me])


def capacity(factor: float, tokens: Any, top_k: int, num_experts: int) -> Any:
    """ceil(factor * tokens * K / E), rows that an expert takes; exact in 32 bits for an int32 `tokens`, traced or not.

    The factor counts as the nearest fraction with a denominator of at most 100, and as E where it is more.
    """
    share = fractions.Fraction(str(min(factor, num_experts))).limit_denominator(100)
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
