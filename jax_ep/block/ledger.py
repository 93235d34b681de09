"""Bytes that a layer of a block moves, by part, from counts and masks alone. Pure integers; nothing is read off a run.

Letters: D replicas, R ranks, B sequences of a replica, S positions, T tokens of a rank whose experts are exchanged
together, q rows a (home, away) pair on all_to_all. "Home" is the rank a row lives on, "away" the one that wants it.

Five parts. Rows for the rank itself count in none: they take no part in a block's exchanges.

  hidden    rows to other ranks' experts, and back
  kv        keys and values for other ranks' queries
  metadata  local experts, weights, scales and names that travel beside them
  control   the exchange of counts, header rows included; segment ids
  wire      what the collectives are handed for other ranks, empty rows and all rounds included
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_ep.block.coship import KV_WAYS, check_config, one_window
from jax_ep.block.ranges import check_split, counts_of, rooms
from jax_ep.block.sequential import layer_windows
from jax_ep.config import MoEConfig, one_of, positive_int, refuse
from jax_ep.ledger import RoutingCounts, byte_ledger
from jax_ep.model_config import ModelConfig
from jax_ep.plan import geometry
from jax_ep.transport.wire import blocks

FORMS = ("parallel", "sequential", "at_expert")
PARTS = ("hidden", "kv", "metadata", "control", "wire")
_INT = 4  # bytes of a count, an id, a float32 weight or a scale


def block_ledger(
    config: ModelConfig,
    counts: RoutingCounts | Sequence[RoutingCounts],
    *,
    form: str = "parallel",
    kv: str = "coship",
    split: str = "contiguous",
    batch: int,
    sequence: int,
    ranks: int,
    replicas: int = 1,
    window: int | None = None,
    segment_ids: Any = None,
    context: Any = None,
    transport: str | None = None,
) -> dict[str, Any]:
    """The ledger of one layer of a block.

    Backward figures are those of the gradient with respect to inputs and parameters, without recomputation. Sums over
    ranks, of gradients and statistics, are not counted. On all_to_all each pair has room for the key/value rows that
    the most demanding one can want whatever the segments are; what is empty of it counts in wire alone.

    Args:
      config: the block's; its moe.comm is one that the form takes.
      counts: of the routing, as `count_routing` gives them for experts [D, R, T, K], tokens where the form has them;
        of form "sequential" those of both microbatches, which are the halves of each replica's sequences.
      form: "parallel", "sequential" (both microbatches together), or "at_expert": `block_at_experts`.
      kv: one of KV_WAYS, of form "at_expert" the first. "all_gather" and "ring" move every row to every rank.
      split: of the positions.
      batch: B, of form "sequential" an even number.
      sequence, ranks, replicas: S, R, D.
      window: positions that a query sees in this layer, its own among them; None: config.window. Where
        config.window_layers differ, buffers of form "sequential" have room for all rows. Form "at_expert" takes none.
      segment_ids: [D*B, S] integers, as the form takes them; None: one segment.
      context: of form "at_expert", which knows its windows from it, alone: [D, R, R] integers, `context_counts` of
        each replica.
      transport: "ragged", "all_to_all" or "all_gather"; None takes config.moe.comm.transport, with "auto" read as
        all_to_all.

    Returns:
      {"layer": of one layer, "stack": what a stack of layers has once besides,
       "rounds": int, the most of a microbatch and replica, "transport": str | None}. Layer and stack are
      {"forward": {part: {"total": bytes, "largest": the most that one rank sends or receives,
                          "sent": [D*R bytes], "received": [D*R bytes]},
                   "payload_collectives": int, "control_collectives": int},
       "backward": the same}.
      Collectives are those of the first round; a further one has two of its own for each microbatch. A stack shares
      its segment ids once, by an all_gather of each rank's S/R of every sequence. One of form "sequential" has one
      exchange more than its layers, as the first layer brings home the rows of none.

    Raises:
      ConfigError: a form, way, split, mask or CommConfig that does not exist or go with the others, or counts that do
        not fit them.
    """
    halves = _check(config, counts, form, kv, split, batch, sequence, ranks, replicas)
    if form != "at_expert" and context is not None:
        refuse("context", "given", f"form {form!r} counts its key/value rows itself", None)
    of_layer, of_buffers = _windows(config, form, window, sequence)
    segments = None if segment_ids is None else _segments(segment_ids, replicas * batch, sequence)
    tokens = batch // len(halves) * sequence // ranks
    at_expert, sequential = form == "at_expert", form == "sequential"
    names = _INT * (1 if segments is None else 2) if at_expert else 0

    layer, stack, rounds, used = _Sums(replicas, ranks), _Sums(replicas, ranks), 0, None
    for half in halves:
        said = byte_ledger(config.moe, half, tokens_per_rank=tokens, transport=transport)  # refuses what does not fit
        used = said["transport"]
        rounds = max(rounds, _experts(layer, half, config.moe, tokens, used, names))
    ragged = used in ("ragged", "all_gather")
    if at_expert:
        rows = _context(context, replicas, ranks)
        _keys(layer, config, rows, None if ragged else tokens, names)
        layer.tell(ranks if ragged else 0)
    elif kv in ("all_gather", "ring"):
        _keys(layer, config, np.full((replicas, ranks, ranks), batch * sequence // ranks))
    else:
        each = [None] * replicas if segments is None else np.split(segments, replicas)
        rows = np.stack([counts_of(split, batch, sequence, ranks, of_layer, ids) for ids in each])
        room = rooms(split, batch // len(halves), sequence, ranks, of_buffers, "all_to_all").home // ranks
        _keys(layer, config, rows, None if ragged else room * len(halves))
    if segments is not None and not at_expert:
        stack.tell(batch * sequence // ranks)
    if sequential and not ragged:
        _nothing_home(stack, halves[-1], config.moe, tokens, used)

    if kv == "coship":
        exchanges = 3 if sequential else 2
    else:
        exchanges = len(halves) * (2 + (ranks - 1 if kv == "ring" else 1))
    told = ragged * (2 if at_expert else len(halves))
    some = ranks > 1
    return {
        "layer": layer.figures(exchanges * some, told),
        "stack": stack.figures(sequential * some, (segments is not None and not at_expert) * some),
        "rounds": rounds,
        "transport": used,
    }


def add_figures(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several layers and stacks as one: everything summed up rank by rank, and the largest of the sums."""
    total: dict[str, Any] = {}
    for name, first in figures[0].items():
        values = [figure[name] for figure in figures]
        if isinstance(first, Mapping):
            total[name] = add_figures(values)
        elif isinstance(first, list):
            total[name] = [sum(each) for each in zip(*values, strict=True)]
        else:
            total[name] = sum(values)
    if "largest" in total:
        total["largest"] = max(total["sent"] + total["received"])
    return total


def _check(
    config: ModelConfig,
    counts: Any,
    form: str,
    kv: str,
    split: str,
    batch: int,
    sequence: int,
    ranks: int,
    replicas: int,
) -> tuple[RoutingCounts, ...]:
    """The counts of each microbatch."""
    one_of("form", form, FORMS, works="parallel")
    one_of("kv", kv, KV_WAYS if form != "at_expert" else ("coship",), works="coship")
    for field, value, works in (("batch", batch, 2), ("ranks", ranks, 4), ("replicas", replicas, 1)):
        positive_int(field, value, works)
    check_split(split, sequence, 1 if form == "at_expert" else ranks)
    divisor = {"parallel": 1, "sequential": 2, "at_expert": ranks}[form]
    if batch % divisor:
        what = "two microbatches" if divisor == 2 else f"whole sequences of {ranks} ranks"
        refuse("batch", batch, f"a replica's sequences are {what}", -(-batch // divisor) * divisor)
    check_config(config, form, whole=form == "at_expert")
    halves = (counts,) if isinstance(counts, RoutingCounts) or not isinstance(counts, Sequence) else tuple(counts)
    many = 2 if form == "sequential" else 1
    if len(halves) != many or not all(isinstance(half, RoutingCounts) for half in halves):
        have = [type(half).__name__ for half in halves]
        refuse("counts", have, f"form {form!r} has {many} of RoutingCounts", ["RoutingCounts"] * many)
    for half in halves:
        shape, wanted_shape = list(np.shape(half.rows)), [replicas, ranks, 1, ranks]
        if shape != wanted_shape:
            refuse("counts.rows.shape", shape, "must be [replicas, ranks, 1, ranks]", wanted_shape)
    return halves


def _windows(config: ModelConfig, form: str, window: int | None, sequence: int) -> tuple[int | None, int | None]:
    """Of the layer, and what its buffers are sized for."""
    if form == "at_expert":
        if window is not None:
            refuse("window", window, f"form {form!r} has it in its context", None)
        return None, None
    if window is None:
        window = one_window(config)
    else:
        positive_int("window", window, 4096)
    window = None if window is None else min(window, sequence)
    differ = form == "sequential" and layer_windows(config)[1] is not None
    return window, None if differ else window


def _segments(segment_ids: Any, rows: int, sequence: int) -> np.ndarray:
    segments = np.asarray(segment_ids)
    if segments.shape != (rows, sequence) or not np.issubdtype(segments.dtype, np.integer):
        have = f"{segments.dtype.name}{list(segments.shape)}"
        refuse("segment_ids", have, "must be integers [replicas * batch, sequence]", f"int32{[rows, sequence]}")
    return segments


def _context(context: Any, replicas: int, ranks: int) -> np.ndarray:
    rows = np.asarray(context)
    whole = rows.shape == (replicas, ranks, ranks) and np.issubdtype(rows.dtype, np.integer)
    if not whole or rows.min() < 0:
        rule = "must be integers from 0, rows that each rank of a replica sends each"
        refuse("context", None if context is None else list(rows.shape), rule, [replicas, ranks, ranks])
    return rows


class _Leg(NamedTuple):
    """Bytes of a row, one way."""

    payload: int = 0
    metadata: int = 0


_NO_LEG = _Leg()


class _Sums:
    """Bytes that each rank sends each, [D, R, R], of each direction and part."""

    def __init__(self, replicas: int, ranks: int):
        shape = replicas, ranks, ranks
        self._of = {way: {part: np.zeros(shape, np.int64) for part in PARTS} for way in ("forward", "backward")}
        self._others = ~np.eye(ranks, dtype=bool)[None]

    def cross(self, way: str, part: str, rows: Any, handed: Any, there: _Leg = _NO_LEG, back: _Leg = _NO_LEG) -> None:
        """Rows [D, home, away] there and back; `handed`: with the empty ones among them."""
        sums, rows_back, handed_back = self._of[way], np.swapaxes(rows, 1, 2), np.swapaxes(handed, 1, 2)
        sums[part] += rows * there.payload + rows_back * back.payload
        sums["metadata"] += rows * there.metadata + rows_back * back.metadata
        sums["wire"] += handed * sum(there) + handed_back * sum(back)

    def tell(self, integers: int) -> None:
        """From each rank to each, in the forward."""
        for part in ("control", "wire"):
            self._of["forward"][part] += integers * _INT

    def figures(self, payload: int, control: int) -> dict[str, Any]:
        return {
            way: {part: self._figure(matrix) for part, matrix in parts.items()}
            | {"payload_collectives": int(payload), "control_collectives": int(control if way == "forward" else 0)}
            for way, parts in self._of.items()
        }

    def _figure(self, matrix: np.ndarray) -> dict[str, Any]:
        remote = matrix * self._others
        sent, received = ([int(n) for n in remote.sum(axis).reshape(-1)] for axis in (2, 1))
        return {"total": sum(sent), "largest": max(sent + received), "sent": sent, "received": received}


def _experts(sums: _Sums, counts: RoutingCounts, moe: MoEConfig, tokens: int, transport: str | None, names: int) -> int:
    """Adds the dispatch and combine of one microbatch, `names` bytes beside each row; returns its rounds."""
    replicas, ranks, _, padded = counts.assignments.shape
    if ranks == 1:
        return 0
    assert transport is not None
    g = geometry(moe.comm, tokens, moe.router.top_k, padded, ranks, transport, own=False)
    travels = counts.rows if moe.comm.dedup else counts.assignments.reshape(replicas, ranks, 1, ranks, -1).sum(4)
    rows = travels[:, :, 0] * ~np.eye(ranks, dtype=bool)[None]  # [D, home, away]
    if g.ragged:  # a round is a window of the receiver's order, which is that of the sources
        first = np.diff(np.minimum(np.cumsum(rows, 1), g.recv_rows), axis=1, prepend=0)
        rounds = -(-rows.sum(1).max(1) // g.recv_rows)
    else:
        first = np.minimum(rows, g.quota)
        rounds = -(-rows.max((1, 2)) // g.quota)
    rounds = np.maximum(rounds, 1).reshape(-1, 1, 1)
    later = rows - first
    handed_first, handed_later = first, later
    if not g.ragged:
        handed_first = np.full_like(rows, g.quota)
        handed_later = (rounds - 1) * handed_first

    hidden = _Leg(moe.hidden_size * jnp.dtype(moe.dtype).itemsize)
    slots = min(moe.router.top_k, padded // ranks) if moe.comm.dedup else 0
    beside = slots * _INT  # weights of a row; as much again for their experts
    out = _Leg(hidden.payload, 2 * beside + names)
    if moe.comm.wire_dtype is not None:
        codes = moe.hidden_size * jnp.dtype(moe.comm.wire_dtype).itemsize
        out = _Leg(codes, out.metadata + blocks(moe.hidden_size) * _INT)
    weight = beside if moe.comm.dedup else _INT
    again = _Leg(out.payload + hidden.payload, out.metadata + weight - beside)
    handed = handed_first + handed_later
    sums.cross("forward", "hidden", rows, handed, out, hidden)
    sums.cross("backward", "hidden", first, handed_first, hidden, _Leg(hidden.payload, beside))
    sums.cross("backward", "hidden", later, handed_later, again, _Leg(hidden.payload, weight))
    sums.tell(g.num_experts if g.ragged else g.local_experts + 1)
    return int(rounds.max())


def _keys(sums: _Sums, config: ModelConfig, rows: np.ndarray, room: int | None = None, names: int = 0) -> None:
    """Adds keys and values [D, home, away], `names` bytes beside each. room: places a pair; None: as many as rows."""
    row = 2 * config.num_kv_heads * config.head_dim * jnp.dtype(config.moe.dtype).itemsize
    handed = rows if room is None else np.full_like(rows, room)
    sums.cross("forward", "kv", rows, handed, there=_Leg(row, names))
    sums.cross("backward", "kv", rows, handed, back=_Leg(row))


def _nothing_home(sums: _Sums, counts: RoutingCounts, moe: MoEConfig, tokens: int, transport: str | None) -> None:
    """Adds a combine of no rows, whose empty places cross all the same."""
    replicas, ranks, _, padded = counts.assignments.shape
    if transport is None:
        return
    g = geometry(moe.comm, tokens, moe.router.top_k, padded, ranks, transport, own=False)
    nothing = np.zeros((replicas, ranks, ranks), np.int64)
    row = _Leg(moe.hidden_size * jnp.dtype(moe.dtype).itemsize)
    sums.cross("forward", "hidden", nothing, nothing + g.quota, back=row)
    sums.cross("backward", "hidden", nothing, nothing + g.quota, there=row)
