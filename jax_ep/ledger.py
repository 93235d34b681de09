"""Bytes that a layer moves, from counts and shapes alone. Pure integers; nothing is read off a run.

Letters: T tokens on a rank, K top_k, E experts, R ranks, L = E/R local experts, H hidden, q rows of a pair a round.

Five figures a direction, summed over all ranks, never mixed:

  payload         hidden rows that the path moves, rows whose destination is their source included
  payload_remote  the same without those
  metadata        expert ids, weights and masks that travel beside the rows
  control         the exchange of counts, header rows included
  wire            what the collective is handed for other ranks, empty rows and all rounds included
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ep.config import MoEConfig, positive_int, refuse
from jax_ep.plan import quota
from jax_ep.transport.parts import header_rows

FIGURES = ("payload", "payload_remote", "metadata", "control", "wire")
_INT = 4  # bytes of a count, an expert id or a float32 weight


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
      counts: [R, E] or [D, R, E] integers, assignments of each rank's tokens to each expert (after any drops).
      tokens_per_rank: T; None infers it as the largest row sum / K, rounded up (right when no token is masked).
      total_tokens: tokens of all ranks that take part, for the reference figures; None infers the assignments / K,
        rounded up (right when none was dropped).
      transport: of packed: "ragged", "all_to_all" or "all_gather"; None takes config.comm.transport, with "auto" read
        as all_to_all.

    Returns:
      {"forward": {figure: bytes}, "backward": {figure: bytes}, "rounds": int, "transport": str | None,
       "rows_per_rank": [R ints] rows each rank's experts run on, "shard_ratio": the busiest rank's rows over the mean,
       "reference": {"tensor_parallel", "ideal", "padded"}: 2*T*H, 2*T*K*H and 2*R*T*K*H elements in bytes, T here being
       total_tokens}.
      All integers but shard_ratio.

    Raises:
      ConfigError: counts that are no non-negative integers of these shapes, token numbers that are none or do not fit
        the counts, or an unknown transport.
    """
    counts = _checked(counts, config)
    replicas, ranks, _ = counts.shape
    k, h = config.router.top_k, config.hidden_size
    fullest = -(-int(counts.sum(2).max()) // k)
    t = _tokens("tokens_per_rank", tokens_per_rank, fullest)
    if fullest > t:
        refuse("tokens_per_rank", t, f"counts hold more than {t} * top_k={k} rows on a rank", fullest)
    total = _tokens("total_tokens", total_tokens, -(-int(counts.sum()) // k))
    element = jnp.dtype(config.dtype).itemsize
    padded_e = config.padded_experts(ranks)
    counts = np.pad(counts, ((0, 0), (0, 0), (0, padded_e - counts.shape[2])))
    pairs = counts.reshape(replicas, ranks, ranks, -1).sum(3)  # [D, source, destination]

    mode = config.comm.mode
    if mode == "dense" or ranks == 1:
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
        q = quota(max(1, t * k), ranks, config.comm.recv_rows_factor)
        forward, backward, rounds = _packed(pairs, used, q, padded_e // ranks, h, element)

    if config.comm.capacity_factor is not None and ranks > 1:
        # Ranks tell each other their counts and tokens before they drop rows.
        told = replicas * ranks * (ranks - 1) * (config.num_experts + 1) * _INT
        forward = {**forward, "control": forward["control"] + told, "wire": forward["wire"] + told}

    # Dense runs every expert on every token, wherever the router sends it.
    rows = np.full(ranks, replicas * t * config.num_experts) if mode == "dense" else pairs.sum((0, 1))
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


def _checked(counts: Any, config: MoEConfig) -> np.ndarray:
    counts = np.asarray(counts)
    fits = counts.ndim in (2, 3) and 0 not in counts.shape
    if not fits or counts.shape[-1] not in (config.num_experts, config.padded_experts(counts.shape[-2])):
        rule = f"must be [ranks, num_experts={config.num_experts}] or [replicas, ranks, num_experts]"
        refuse("counts.shape", list(counts.shape), rule, [2, config.num_experts])
    if not np.issubdtype(counts.dtype, np.integer):
        refuse("counts.dtype", counts.dtype.name, "must be integers", "int64")
    if (counts < 0).any():
        refuse("counts.min()", int(counts.min()), "no rank sends less than nothing", 0)
    return counts.astype(np.int64).reshape(-1, *counts.shape[-2:])


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


def _packed(
    pairs: np.ndarray, transport: str, q: int, local_experts: int, h: int, element: int
) -> tuple[dict[str, int], dict[str, int], int]:
    """Rows that must travel; q of them a pair and round on all_to_all, empty or not."""
    replicas, ranks, _ = pairs.shape
    row = h * element
    own = np.trace(pairs, axis1=1, axis2=2).sum()
    total = int(pairs.sum())
    remote = int(total - own)
    others = ranks * (ranks - 1)
    ragged = transport != "all_to_all"
    if ragged:
        per_replica = np.maximum(1, -(-pairs.sum(1).max(1) // (ranks * q)))
        control = replicas * others * ranks * local_experts * _INT
        first = np.minimum(pairs.sum(1), ranks * q)  # rows of each receiver in round one
        later = total - int(first.sum())
        later_remote = remote - _first_window_remote(pairs, ranks * q)
        wire = 2 * remote * row + control
    else:
        per_replica = np.maximum(1, -(-pairs.max((1, 2)) // q))
        control = replicas * others * header_rows(local_experts + 1, h, min(element, 4)) * row
        later = int(np.maximum(pairs - q, 0).sum())
        diagonal = np.diagonal(pairs, axis1=1, axis2=2)
        later_remote = later - int(np.maximum(diagonal - q, 0).sum())
        wire = 2 * int(per_replica.sum()) * others * q * row + control
    forward = _figures(2 * total * row, 2 * remote * row, 0, control, wire)

    # Rounds 2.. of the backward send (row, cotangent, weight) and bring (gradient, weight gradient) back.
    extra_rows, extra_remote, beside = later * row, later_remote * row, 2 * later_remote * _INT
    if ragged:
        wire_back = 2 * remote * row + extra_remote + beside
    else:
        empty_too = int((per_replica - 1).sum()) * others * q
        wire_back = 2 * replicas * others * q * row + empty_too * (3 * row + 2 * _INT)
    backward = _figures(2 * total * row + extra_rows, 2 * remote * row + extra_remote, beside, 0, wire_back)
    return forward, backward, int(per_replica.max())


def _first_window_remote(pairs: np.ndarray, window: int) -> int:
    """Remote rows that the first `window` rows of each receiver's order hold."""
    end = np.cumsum(pairs, 1)
    inside = np.minimum(end, window) - np.minimum(end - pairs, window)
    return int(inside.sum() - np.trace(inside, axis1=1, axis2=2).sum())
