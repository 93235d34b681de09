"""The optimiser of a run: AdamW under a schedule, after a bound on the gradient's norm. Pure.

Every update is elementwise but for that norm, which is of whole arrays under jit. So nothing here knows how parameters
are split.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_ep.training.config import TrainConfig


def schedule(config: TrainConfig) -> optax.Schedule:
    """Updates made before (integer) -> learning rate (float32)."""
    opt = config.optimizer
    falling = max(config.steps - opt.warmup_steps, 1)

    def at(count: jax.Array | int) -> jax.Array:
        made = jnp.asarray(count, jnp.float32)
        gone = jnp.clip((made - opt.warmup_steps) / falling, 0, 1)
        if opt.schedule == "constant":
            gone = jnp.zeros_like(gone)
        elif opt.schedule == "cosine":
            gone = (1 - jnp.cos(math.pi * gone)) / 2
        warm = jnp.minimum((made + 1) / max(opt.warmup_steps, 1), 1)
        return opt.learning_rate * warm * (1 - gone * (1 - opt.final_fraction))

    return at


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Of the trained parameters as `trained` in step.py gives them: the decoder's, without untrained biases."""
    opt = config.optimizer
    return optax.chain(
        optax.identity() if opt.clip_norm is None else optax.clip_by_global_norm(opt.clip_norm),
        optax.scale_by_adam(opt.b1, opt.b2, opt.eps),
        optax.add_decayed_weights(opt.weight_decay, mask=decays),
        optax.scale_by_learning_rate(schedule(config)),
    )


def decays(params: Any) -> Any:
    """Which of a decoder's parameters are matrices, one a layer or an expert; in the structure of `params`."""

    def of(path: tuple[Any, ...], a: jax.Array) -> bool:
        names = [key.key for key in path]
        return a.ndim - ("layers" in names) - ("experts" in names) >= 2

    return jax.tree.map_with_path(of, params)
