"""Logits -> Routing; balance and z losses from sums. Pure.

Letters: T tokens, K top_k, E experts, G groups of experts. Leading axes of logits are free: [..., E].
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.config import RouterConfig, refuse


class Routing(NamedTuple):
    """Which experts each token goes to, and with which weights.

    Attributes:
      experts: [..., K] int32. A value outside [0, E) means "nowhere".
      weights: [..., K] float32.
      probs: [..., E] float32, the distribution that balance losses pool; None where it is not known.
      logsumexp: [...] float32, of the logits, for the z-loss; None where it is not known.
    """

    experts: jax.Array
    weights: jax.Array
    probs: jax.Array | None = None
    logsumexp: jax.Array | None = None


class MoEStats(NamedTuple):
    """Sums over all tokens of all devices, from which losses and load figures follow. Stackable by scan.

    Attributes:
      tokens: int32, tokens that took part (not masked).
      counts: [E] int32, assignments the router made to each expert, before any capacity.
      prob_sum: [E] float32, summed probabilities; zeros when a Routing without `probs` was given.
      lse_sq_sum: float32, summed squared logsumexp; zero when a Routing without `logsumexp` was given.
      dropped_rows: int32, assignments that found no room (only with capacity_factor).
      rounds: int32, exchanges each dispatch took, the largest over devices; 0 where nothing is exchanged.
      wire_rows: int32, rows handed to the dispatch collectives for other ranks, empty rows included; the simulation
        transport all_gather counts as the ragged one it stands for.
    """

    tokens: jax.Array
    counts: jax.Array
    prob_sum: jax.Array
    lse_sq_sum: jax.Array
    dropped_rows: jax.Array
    rounds: jax.Array
    wire_rows: jax.Array


def no_stats(num_experts: int) -> MoEStats:
    """The stats of no tokens: zeros."""
    none, each = jnp.int32(0), (num_experts,)
    return MoEStats(none, jnp.zeros(each, jnp.int32), jnp.zeros(each, jnp.float32), jnp.float32(0), none, none, none)


def router_logits(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [..., H] @ kernel [H, E] (+ bias [E]) in float32 at full precision, whatever the dtypes."""
    f32 = jnp.float32
    logits = jnp.matmul(x.astype(f32), kernel.astype(f32), precision=jax.lax.Precision.HIGHEST)
    return logits if bias is None else logits + _like(bias, logits)


def _like(bias: jax.Array, logits: jax.Array) -> jax.Array:
    """bias [E] as float32 of logits' rank."""
    return bias.astype(jnp.float32).reshape(*(1,) * (logits.ndim - 1), -1)


def route(logits: jax.Array, config: RouterConfig, *, selection_bias: jax.Array | None = None) -> Routing:
    """Chooses K experts a token and their weights. Ties go to the lower expert id.

    Families (mixtral, olmoe, qwen2_moe, qwen3_moe, gpt_oss, granitemoe, deepseek_v2, deepseek_v3) differ only in
    `config`. Experts of groups that were not chosen cannot be chosen, however negative the scores are.

    Args:
      logits: [..., E], any float dtype; everything is computed in float32.
      config: the RouterConfig.
      selection_bias: [E], added to the scores for choosing only; required exactly when config.selection_bias.

    Returns:
      Routing with experts [..., K] in falling order of score.

    Raises:
      ConfigError: top_k exceeds E, or selection_bias is missing or unexpected.
    """
    num_experts = logits.shape[-1]
    if config.top_k > num_experts:
        refuse("top_k", config.top_k, f"cannot exceed the {num_experts} experts of the logits", num_experts)
    if (selection_bias is not None) != config.selection_bias:
        rule = f"the router's selection bias is {'missing' if config.selection_bias else 'given'}"
        refuse("selection_bias", config.selection_bias, rule, not config.selection_bias)
    logits = logits.astype(jnp.float32)
    if config.score_function == "sigmoid":
        scores = jax.nn.sigmoid(logits)
        probs = _normalized(scores, 1e-20)
    else:
        scores = probs = jax.nn.softmax(logits, axis=-1)

    if config.softmax_after_top_k:
        top, experts = jax.lax.top_k(logits, config.top_k)  # [..., K]
        weights = jax.nn.softmax(top, axis=-1)
    else:
        choice = scores if selection_bias is None else scores + _like(selection_bias, scores)
        choice = jax.lax.stop_gradient(choice)
        if config.num_groups > 1:
            choice = _mask_groups(choice, config)
        experts = jax.lax.top_k(choice, config.top_k)[1]  # [..., K]
        weights = jnp.take_along_axis(scores, experts, axis=-1)  # [..., K]
        if config.normalize_weights:
            # A softmax' largest score is never 0, but a bias may have chosen others.
            may_be_zero = config.score_function == "sigmoid" or config.selection_bias
            weights = _normalized(weights, 1e-20 if may_be_zero else 0.0)
    weights = weights * config.scale
    return Routing(experts.astype(jnp.int32), weights, probs, jax.nn.logsumexp(logits, axis=-1))


def _normalized(scores: jax.Array, floor: float) -> jax.Array:
    """scores / (their sum + floor), brought near 1 first: the derivative of a quotient squares its denominator, which
    may be 1e-20.
    """
    size = jax.lax.stop_gradient(scores.sum(-1, keepdims=True) + floor)
    scaled = scores / size
    return scaled / (scaled.sum(-1, keepdims=True) + floor / size)


def _mask_groups(choice: jax.Array, config: RouterConfig) -> jax.Array:
    """-inf for the experts of all but the best top_k_groups groups."""
    groups = choice.reshape(*choice.shape[:-1], config.num_groups, -1)  # [..., G, E/G]
    if config.group_score == "max":
        score = groups.max(-1)
    else:
        score = jax.lax.top_k(groups, 2)[0].sum(-1)
    best = jax.lax.top_k(score, config.top_k_groups)[1]  # [..., top_k_groups]
    kept = jax.nn.one_hot(best, config.num_groups, dtype=jnp.bool_).any(-2)  # [..., G]
    return jnp.where(kept[..., None], groups, -jnp.inf).reshape(choice.shape)


def balanced_routing(tokens: int | tuple[int, ...], num_experts: int, top_k: int) -> Routing:
    """A forced routing that loads every expert alike: token t takes experts t*K, t*K+1, ... modulo E, weights 1/K.

    Args:
      tokens: the leading shape, T or (B, S).
    """
    shape = (tokens,) if isinstance(tokens, int) else tuple(tokens)
    if top_k > num_experts:
        refuse("top_k", top_k, f"cannot exceed num_experts={num_experts}", num_experts)
    experts = np.arange(int(np.prod(shape)) * top_k).reshape(*shape, top_k) % num_experts
    weights = np.full(experts.shape, 1.0 / top_k, np.float32)
    return Routing(jnp.asarray(experts, jnp.int32), jnp.asarray(weights))


def balance_loss(stats: MoEStats, kind: str = "switch") -> jax.Array:
    """Auxiliary load-balance loss E * sum_e f_e P_e, from sums.

    Args:
      stats: of one layer and batch. Stacked stats [layers, ...] give one loss a layer; add them up first to pool.
      kind: "switch": f is the fraction of assignments (uniform gives 1; Fedus et al. 2021, arXiv:2101.03961).
        "hf": f is not divided by K (uniform gives K), as HF transformers computes it over all layers pooled.

    Raises:
      ConfigError: kind is neither.
    """
    if kind not in ("switch", "hf"):
        refuse("kind", kind, 'must be "switch" or "hf"', "switch")
    counts = stats.counts.astype(jnp.float32)
    tokens = jnp.maximum(stats.tokens, 1).astype(jnp.float32)[..., None]
    total = jnp.maximum(counts.sum(-1, keepdims=True), 1.0) if kind == "switch" else tokens
    return counts.shape[-1] * (counts / total * (stats.prob_sum / tokens)).sum(-1)


def z_loss(stats: MoEStats) -> jax.Array:
    """Mean squared logsumexp of the router logits (Zoph et al. 2022, arXiv:2202.08906), from sums."""
    return stats.lse_sq_sum / jnp.maximum(stats.tokens, 1)


def bias_update(counts: jax.Array, rate: float) -> jax.Array:
    """What a step adds to the selection bias so that experts come to be chosen alike (Wang et al. 2024,
    arXiv:2408.15664, as deepseek_v3 has it): rate * sign(mean count - count).

    Args:
      counts: [..., E] integers, assignments made to each expert in the step (`MoEStats.counts`).
      rate: how far.

    Returns:
      [..., E] float32.
    """
    above = (counts - counts.min(-1, keepdims=True)).astype(jnp.float32)  # small where nearly balanced: exact
    return rate * jnp.sign(above.mean(-1, keepdims=True) - above)
