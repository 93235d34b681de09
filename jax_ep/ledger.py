"""Bytes that a layer moves, from counts and shapes alone. Pure integers; nothing is read off a run.

Letters: D replicas, R ranks, T tokens on a rank, n pieces of them, K top_k, E experts (padded), L = E/R local experts,
H hidden, M messages a (source, destination), q rows of a message a round, S = min(K, L) slots of a deduplicated row.

Five figures a direction, summed over all ranks, never mixed:

  payload         hidden rows that the path moves, rows whose destination is their source included
  payload_remote  the same without those
  metadata        expert ids, slots, weights, masks and scales that travel beside the rows
  control         the exchange of counts, header rows included
  wire            what the collective is handed for other ranks, empty rows and all rounds included
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_ep.config import MoEConfig, positive_int, refuse
from jax_ep.plan import geometry, pieces
from jax_ep.transport.wire import blocks

FIGURES = ("payload", "payload_remote", "metadata", "control", "wire")
_INT = 4  # bytes of a count, an expert id, a float32 weight or a scale


class RoutingCounts(NamedTuple):
    """What a routing has to move; the k-th piece is a rank's k-th run of consecutive tokens.

    Attributes:
      assignments: [D, R, n, E] int64, assignments of each piece of each rank's tokens to each expert.
      rows: [D, R, n, R] int64, distinct (token, destination rank) pairs of them: the rows that dedup moves.
    """

    assignments: np.ndarray
    rows: np.ndarray


def count_routing(experts: Any, config: MoEConfig, *, ranks: int, replicas: int = 1) -> RoutingCounts:
    """Counts a routing for `byte_ledger`. Plain NumPy.

    Args:
      experts: [D, R, T, K] integers, each rank's choices, or [tokens, K] in global token order, which is (data, expert,
        position) row-major: every rank holds ceil(tokens / (D*R)) of them, the last ones what is left. Ids outside
        [0, num_experts), as masked tokens and what a capacity_factor dropped should have, go nowhere.
      config: the layer; its num_experts, top_k and comm.num_chunks are read.
      ranks: R.
      replicas: D.

    Raises:
      ConfigError: experts that are no integers of these shapes, or numbers of ranks or replicas that are none.

    Example:
      >>> layer = MoEConfig(512, 1024, 4, RouterConfig(2), CommConfig(dedup=True))
      >>> count_routing([[0, 1], [1, 2]], layer, ranks=2).rows[0, :, 0].tolist()  # a token on each rank
      [[1, 0], [1, 1]]
    """
    try:
        given = np.asarray(experts)
    except ValueError:
        refuse("experts", type(experts).__name__, "must be one array of integers", "routing.experts")
    ids = _ids_by_rank(given, config, ranks, replicas)
    padded_e = config.padded_experts(ranks)
    destination = np.sort(ids // (padded_e // ranks), 3)  # R where an assignment goes nowhere
    again = destination[..., 1:] == destination[..., :-1]
    destination[..., 1:][again] = ranks
    ends = np.cumsum(pieces(ids.shape[2], config.comm.num_chunks))[:-1]
    count = lambda a, most: np.stack([_histogram(piece, most) for piece in np.split(a, ends, 2)], 2)
    return RoutingCounts(count(ids, padded_e), count(destination, ranks))


def byte_ledger(
    config: MoEConfig,
    counts: Any,
    *,
    tokens_per_rank: int | None = None,
    total_tokens: int | None = None,
    transport: str | None = None,
) -> dict[str, Any]:
    """The ledger of one layer and batch.

    Backward figures are those of the gradient with respect to inputs, router and experts, without recomputation: the
    cotangents' way through both exchanges; rounds after the first send rows and cotangents again. Reductions, of the
    gradients of replicated parameters and of statistics, are not counted.

    Args:
      config: the layer; its comm says the path, its dtype the bytes of an element.
      counts: RoutingCounts (see `count_routing`), or [R, E] or [D, R, E] integers, assignments of each rank's tokens to
        each expert; after any drops. With dedup or num_chunks > 1 only RoutingCounts say enough.
      tokens_per_rank: T; None infers the smallest that holds the counts: the largest row sum / K, rounded up (right
        when no token is masked).
      total_tokens: tokens of all ranks that take part, for the reference figures; None infers the assignments / K,
        rounded up (right when none was dropped).
      transport: of packed: "ragged", "all_to_all" or "all_gather"; None takes config.comm.transport, with "auto" read
        as all_to_all.

    Returns:
      {"forward": {figure: bytes}, "backward": {figure: bytes}, "rounds": int, the most of a piece and replica,
       "transport": str | None,
       "rows_per_rank": [R ints] assignments that each rank's experts run on,
       "shard_ratio": the busiest rank's over the mean,
       "reference": {"tensor_parallel", "ideal", "padded"}: 2*T*H, 2*T*K*H and 2*R*T*K*H elements in bytes, T here being
       total_tokens}.
      All integers but shard_ratio.

    Raises:
      ConfigError: counts that are no non-negative integers of these shapes, do not fit each other or the pieces that
        num_chunks makes, or do not say enough; token numbers that are none or do not fit the counts; or an unknown
        transport.
    """
    counts = _checked(counts, config)
    replicas, ranks, _, padded_e = counts.assignments.shape
    k, h = config.router.top_k, config.hidden_size
    t = _tokens_per_rank(counts, config, tokens_per_rank)
    total = _tokens("total_tokens", total_tokens, -(-int(counts.assignments.sum()) // k))
    element = jnp.dtype(config.dtype).itemsize

    mode = config.comm.mode
    if mode == "dense" or ranks == 1 or t == 0:
        forward, backward, rounds, used = dict.fromkeys(FIGURES, 0), dict.fromkeys(FIGURES, 0), 0, None
    elif mode == "allgather":
        forward, backward, rounds, used = *_allgather(replicas, ranks, t, k, h, element), 1, None
    elif mode == "padded":
        forward, backward, rounds, used = *_padded(replicas, ranks, t, k, h, element), 1, None
    else:
        used = config.comm.transport if transport is None else transport
        used = "all_to_all" if used == "auto" else used
        if used not in ("ragged", "all_to_all", "all_gather"):
            refuse("transport", used, "must be ragged, all_to_all or all_gather", "all_to_all")
        forward, backward, rounds = _packed(counts, config, t, used)

    if config.comm.capacity_factor is not None and ranks > 1 and t:
        # Ranks tell each other their counts and tokens before they drop rows.
        told = replicas * ranks * (ranks - 1) * (config.num_experts + 1) * _INT
        forward = {**forward, "control": forward["control"] + told, "wire": forward["wire"] + told}

    # Dense runs every expert on every token, wherever the router sends it.
    by_rank = counts.assignments.reshape(-1, ranks, padded_e // ranks).sum((0, 2))
    rows = np.full(ranks, replicas * t * config.num_experts) if mode == "dense" else by_rank
    unit = 2 * total * h * element
    return {
        "forward": forward,
        "backward": backward,
        "rounds": rounds,
        "transport": used,
        "rows_per_rank": [int(r) for r in rows],
        "shard_ratio": float(rows.max() * ranks / rows.sum()) if rows.sum() else 1.0,
        "reference": {"tensor_parallel": unit, "ideal": unit * k, "padded": unit * k * ranks},
    }


def _ids_by_rank(experts: np.ndarray, config: MoEConfig, ranks: int, replicas: int) -> np.ndarray:
    """[D, R, T, K] int64. What goes nowhere, and what fills the last ranks up to T, is the padded number of experts."""
    positive_int("ranks", ranks, 2)
    positive_int("replicas", replicas, 1)
    shape, k = list(experts.shape), config.router.top_k
    if len(shape) not in (2, 4) or shape[-1] != k or (len(shape) == 4 and shape[:2] != [replicas, ranks]):
        rule = f"must be [tokens, top_k={k}] or [replicas={replicas}, ranks={ranks}, tokens, top_k={k}]"
        refuse("experts.shape", shape, rule, [8, k])
    if not np.issubdtype(experts.dtype, np.integer):
        refuse("experts.dtype", experts.dtype.name, "must be integers", "int32")
    nowhere = config.padded_experts(ranks)
    known = (experts >= 0) & (experts < config.num_experts)  # before the cast, which may wrap
    ids = np.where(known, experts.astype(np.int64), nowhere)
    if len(shape) == 4:
        return ids
    share = -(-shape[0] // (replicas * ranks))
    ids = np.pad(ids, ((0, share * replicas * ranks - shape[0]), (0, 0)), constant_values=nowhere)
    return ids.reshape(replicas, ranks, share, k)


def _histogram(ids: np.ndarray, most: int) -> np.ndarray:
    """ids [D, R, T, K] in 0..most -> [D, R, most], how often each below `most` occurs on each rank."""
    replicas, ranks, _, _ = ids.shape
    rank = np.arange(replicas * ranks)[:, None]
    flat = rank * (most + 1) + ids.reshape(replicas * ranks, -1)
    return np.bincount(flat.reshape(-1), minlength=replicas * ranks * (most + 1)).reshape(replicas, ranks, -1)[
        ..., :most
    ]


def _checked(counts: Any, config: MoEConfig) -> RoutingCounts:
    if isinstance(counts, RoutingCounts):
        return _checked_routing(counts, config)
    counts = np.asarray(counts)
    fits = counts.ndim in (2, 3) and 0 not in counts.shape
    if not fits or counts.shape[-1] not in (config.num_experts, config.padded_experts(counts.shape[-2])):
        rule = f"must be [ranks, num_experts={config.num_experts}] or [replicas, ranks, num_experts]"
        refuse("counts.shape", list(counts.shape), rule, [2, config.num_experts])
    counts = _no_negatives("counts", counts).reshape(-1, *counts.shape[-2:])
    ranks = counts.shape[1]
    for field, value, usual in (("dedup", config.comm.dedup, False), ("num_chunks", config.comm.num_chunks, 1)):
        if value != usual:
            rule = f"with {field}={value} the sums over a rank's tokens do not say which rows travel"
            works = f"count_routing(experts, config, ranks={ranks}, replicas={counts.shape[0]})"
            refuse("counts", f"integers{list(counts.shape)}", rule, works)
    counts = np.pad(counts, ((0, 0), (0, 0), (0, config.padded_experts(ranks) - counts.shape[2])))
    rows = -(-counts.reshape(*counts.shape[:2], 1, ranks, -1).sum(4) // config.router.top_k)  # the fewest; not read
    return RoutingCounts(counts[:, :, None], rows)


def _checked_routing(counts: RoutingCounts, config: MoEConfig) -> RoutingCounts:
    assignments, rows = (np.asarray(a) for a in counts)
    shape, ranks = list(assignments.shape), assignments.shape[1] if assignments.ndim == 4 else 0
    if len(shape) != 4 or 0 in shape or shape[3] != config.padded_experts(ranks):
        rule = f"must be [replicas, ranks, pieces, num_experts={config.num_experts}, padded to divide over the ranks]"
        refuse("counts.assignments.shape", shape, rule, [1, 2, 1, config.padded_experts(2)])
    if list(rows.shape) != [*shape[:3], ranks]:
        rule = f"must be [replicas, ranks, pieces, ranks], as assignments are {shape}"
        refuse("counts.rows.shape", list(rows.shape), rule, [*shape[:3], ranks])
    assignments, rows = _no_negatives("counts.assignments", assignments), _no_negatives("counts.rows", rows)
    most = assignments.reshape(*rows.shape, -1).sum(4)
    least = -(-most // config.router.top_k)
    if (wrong := (rows < least) | (rows > most)).any():
        at = tuple(int(i[0]) for i in np.nonzero(wrong))
        rule = f"{most[at]} assignments of top_k={config.router.top_k} are {least[at]} to {most[at]} rows"
        refuse(f"counts.rows{list(at)}", int(rows[at]), rule, int(most[at]))
    return RoutingCounts(assignments, rows)


def _no_negatives(field: str, counts: np.ndarray) -> np.ndarray:
    if not np.issubdtype(counts.dtype, np.integer):
        refuse(f"{field}.dtype", counts.dtype.name, "must be integers", "int64")
    if (counts < 0).any():
        refuse(f"{field}.min()", int(counts.min()), "no rank sends less than nothing", 0)
    return counts.astype(np.int64)


def _tokens_per_rank(counts: RoutingCounts, config: MoEConfig, value: Any) -> int:
    """T, of which every piece holds the counts; inferred, the smallest."""
    shape, k, chunks = list(counts.assignments.shape), config.router.top_k, config.comm.num_chunks
    n = shape[2]
    needed = np.maximum(-(-counts.assignments.sum(3) // k), counts.rows.max(3)).max((0, 1))  # [n] tokens
    # The first pieces hold one token more than the others: as far as the last that needs it.
    fullest = int(needed.max())
    inferred = max(n if n > 1 else 0, n * (fullest - 1) + int(np.flatnonzero(needed == fullest)[-1]) + 1)
    made = len(pieces(inferred, chunks))
    if made != n:
        rule = f"num_chunks={chunks} makes {made} of the {inferred} tokens or more of a rank, and there are {n} pieces"
        refuse("counts.assignments.shape", shape, rule, [*shape[:2], made, shape[3]])
    t = _tokens("tokens_per_rank", value, inferred)
    share = pieces(t, chunks)
    if len(share) != n:
        refuse("tokens_per_rank", t, f"num_chunks={chunks} makes {len(share)} pieces, and counts hold {n}", inferred)
    if (needed > share).any():
        rule = f"counts hold more than {t} * top_k={k} rows on a rank"
        if n > 1:
            rule = f"counts hold {needed.tolist()} tokens or more in the pieces, which have {list(share)}"
        refuse("tokens_per_rank", t, rule, inferred)
    return t


def _tokens(field: str, value: Any, inferred: int) -> int:
    if value is None:
        return inferred
    positive_int(field, value, inferred, least=0)
    return int(value)


def _figures(payload: int, remote: int, metadata: int, control: int, wire: int) -> dict[str, int]:
    return dict(zip(FIGURES, (int(v) for v in (payload, remote, metadata, control, wire)), strict=True))


def _allgather(
    replicas: int, ranks: int, t: int, k: int, h: int, element: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Each rank's tokens go to all others and a partial sum of each token comes back; ids and weights travel beside."""
    to_all = replicas * ranks * ranks * t
    remote = replicas * ranks * (ranks - 1) * t
    rows, rows_remote = 2 * to_all * h * element, 2 * remote * h * element
    ids, weights = remote * k * _INT, remote * k * _INT
    forward = _figures(rows, rows_remote, ids + weights, 0, rows_remote + ids + weights)
    return forward, _figures(rows, rows_remote, weights, 0, rows_remote + weights)


def _padded(replicas: int, ranks: int, t: int, k: int, h: int, element: int) -> tuple[dict[str, int], dict[str, int]]:
    """T*K rows for every rank, there and back, and an id beside each on the way there."""
    chunks, remote = replicas * ranks * ranks * t * k, replicas * ranks * (ranks - 1) * t * k
    rows, rows_remote, ids = 2 * chunks * h * element, 2 * remote * h * element, remote * _INT
    forward = _figures(rows, rows_remote, ids, 0, rows_remote + ids)
    return forward, _figures(rows, rows_remote, 0, 0, rows_remote)


class _Bytes(NamedTuple):
    """Of one row, there and back together."""

    payload: int
    metadata: int

    @property
    def both(self) -> int:
        return self.payload + self.metadata


class _Rows(NamedTuple):
    """What the packed path moves, of one piece or several.

    Attributes:
      all, remote: rows, and those that leave their rank.
      later, later_remote: those of them that travel after the first round.
      places: rows of all messages to other ranks in all rounds, empty ones included; all_to_all only, else 0.
      later_places: those after the first round.
      told: integers of headers or of the exchange of counts.
    """

    all: int
    remote: int
    later: int
    later_remote: int
    places: int
    later_places: int
    told: int


def _packed(
    counts: RoutingCounts, config: MoEConfig, tokens: int, transport: str
) -> tuple[dict[str, int], dict[str, int], int]:
    """Rows that must travel, in all their rounds; q of them a message and round on all_to_all, empty or not."""
    parts, rounds = [], 1
    for piece, share in enumerate(pieces(tokens, config.comm.num_chunks)):
        moved, needed = _piece(counts, piece, config, share, transport)
        parts.append(moved)
        rounds = max(rounds, needed)
    rows = _Rows(*map(sum, zip(*parts, strict=True)))
    there_and_back, cotangents, again = _row_bytes(config, counts.assignments.shape[3] // counts.rows.shape[3])

    control = rows.told * _INT
    handed = rows.remote if transport != "all_to_all" else rows.places
    forward = _figures(
        rows.all * there_and_back.payload,
        rows.remote * there_and_back.payload,
        rows.remote * there_and_back.metadata,
        control,
        handed * there_and_back.both + control,
    )
    first, first_remote = rows.all - rows.later, rows.remote - rows.later_remote
    if transport != "all_to_all":
        wire = first_remote * cotangents.both + rows.later_remote * again.both
    else:
        wire = (rows.places - rows.later_places) * cotangents.both + rows.later_places * again.both
    backward = _figures(
        first * cotangents.payload + rows.later * again.payload,
        first_remote * cotangents.payload + rows.later_remote * again.payload,
        first_remote * cotangents.metadata + rows.later_remote * again.metadata,
        0,
        wire,
    )
    return forward, backward, rounds


def _row_bytes(config: MoEConfig, local_experts: int) -> tuple[_Bytes, _Bytes, _Bytes]:
    """Of a row of the forward, of the backward's first round, and of its later ones: row, cotangent and weights to the
    experts, gradients of row and weights home.
    """
    comm, h = config.comm, config.hidden_size
    hidden = h * jnp.dtype(config.dtype).itemsize
    out, scales = (
        (hidden, 0) if comm.wire_dtype is None else (h * jnp.dtype(comm.wire_dtype).itemsize, blocks(h) * _INT)
    )
    weights = min(config.router.top_k, local_experts) * _INT if comm.dedup else 0
    slots = weights  # as many local ids
    weight = 0 if comm.dedup else _INT
    return (
        _Bytes(out + hidden, scales + slots + weights),
        _Bytes(2 * hidden, weights),
        _Bytes(out + 2 * hidden, scales + slots + 2 * (weights + weight)),
    )


def _piece(counts: RoutingCounts, piece: int, config: MoEConfig, tokens: int, transport: str) -> tuple[_Rows, int]:
    """What one piece, of `tokens` tokens, moves; and its rounds, the most of the replicas."""
    replicas, ranks, _, padded_e = counts.assignments.shape
    g = geometry(config.comm, tokens, config.router.top_k, padded_e, ranks, transport)
    travels = (counts.rows if config.comm.dedup else counts.assignments)[:, :, piece]
    sizes = travels.reshape(replicas, ranks, ranks, g.messages, -1).sum(4)  # [D, source, destination, message]
    every = int(sizes.sum())
    if not g.own:
        sizes = sizes * ~np.eye(ranks, dtype=bool)[:, :, None]
    pairs = replicas * ranks * (ranks - 1)
    if g.ragged:
        told = pairs * g.num_experts
        first = _first_window(sizes, g.recv_rows)
        rounds = np.maximum(1, -(-sizes.sum((1, 3)).max(1) // g.recv_rows))
        places = later_places = 0
    else:
        told = pairs * (g.local_experts + 1)
        first = np.minimum(sizes, g.quota)
        rounds = np.maximum(1, -(-sizes.max((1, 2, 3)) // g.quota))
        places = int(rounds.sum()) * ranks * (ranks - 1) * g.messages * g.quota
        later_places = places - pairs * g.messages * g.quota
    later = sizes - first
    return (
        _Rows(every, _remote(sizes), int(later.sum()), _remote(later), places, later_places, told),
        int(rounds.max()),
    )


def _remote(sizes: np.ndarray) -> int:
    """Rows of [D, source, destination, M] that leave their rank."""
    return int(sizes.sum() - np.trace(sizes, axis1=1, axis2=2).sum())


def _first_window(sizes: np.ndarray, window: int) -> np.ndarray:
    """Rows of [D, source, destination, M] among the first `window` of their receiver's order, [message][source]."""
    order = np.transpose(sizes, (0, 2, 3, 1))  # [D, destination, message, source]
    end = np.cumsum(order.reshape(*order.shape[:2], -1), 2).reshape(order.shape)
    inside = np.minimum(end, window) - np.minimum(end - order, window)
    return np.transpose(inside, (0, 3, 1, 2))
