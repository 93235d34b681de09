"""Where a loss or a gradient that is not finite began. Computes a step again, only after one went wrong.

Letters: A microbatches, B sequences of a step, S positions, Y layers.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep.models.decoder import Observed, Params, observed_forward
from jax_ep.training.config import TrainConfig
from jax_ep.training.step import (
    TrainState,
    batch_sharding,
    loss_of_forward,
    model_params,
    state_shardings,
    trained,
    with_trained,
)

_BACKWARD = "(the backward runs from the last layer to the first)"


class _Seen(NamedTuple):
    """Of each of A microbatches.

    Attributes:
      finite: bools: the tokens between the halves of layers, and the logits.
      loss: float32.
      largest: the largest magnitude in the gradient of each parameter, of layers' parameters in that of each layer;
        NaN where there is one. In the structure of `trained`.
    """

    finite: Observed
    loss: jax.Array
    largest: Params


def first_not_finite(config: TrainConfig, mesh: Mesh, state: TrainState, input_ids: jax.Array) -> str:
    """Says in words where it began, as "microbatch 1 of 4: layer 3, attention".

    Args:
      config, mesh: of the run.
      state: what the bad step left behind: it has the parameters that the step had.
      input_ids: [A, B/A, S] of that step.
    """
    seen: _Seen = jax.device_get(_program(config, mesh)(state.params, input_ids))
    microbatches = [jax.tree.map(operator.itemgetter(a), seen) for a in range(config.accumulation)]
    for a, one in enumerate(microbatches):
        found = _words(one)
        if found:
            return f"microbatch {a + 1} of {config.accumulation}: {found}" if config.accumulation > 1 else found
    sizes = [dict(_gradients(one.largest)) for one in microbatches]
    where, size = max(((name, max(s[name] for s in sizes)) for name in sizes[0]), key=operator.itemgetter(1))
    what = f"its parts are finite, up to {size:.3g} in {where}"
    count = sum(a.size for a in jax.tree.leaves(trained(state.params)))
    if float(size) ** 2 * count < float(np.finfo(np.float32).max):  # what the norm cannot be above
        return f"the update, of a gradient that is finite: {what}"
    return f"the norm of the gradient: {what}"


@functools.lru_cache(maxsize=1)
def _program(config: TrainConfig, mesh: Mesh) -> Callable[[Params, jax.Array], _Seen]:
    """`_look` compiled; kept, as bad steps come in rows."""
    return jax.jit(
        functools.partial(_look, config=config, mesh=mesh),
        in_shardings=(state_shardings(config, mesh).params, batch_sharding(config, mesh)),
        out_shardings=NamedSharding(mesh, P()),
    )


def _look(params: Params, input_ids: jax.Array, config: TrainConfig, mesh: Mesh) -> _Seen:
    def run(weights: Params, ids: jax.Array) -> tuple[jax.Array, Observed]:
        whole = model_params(with_trained(params, weights), config)
        finite = lambda a: jnp.isfinite(a).all()
        split = config.shard_weights
        logits, stats, seen = observed_forward(whole, ids, config.model, finite, mesh, split_weights=split)
        return loss_of_forward(logits, stats, ids, config)[0], seen

    def largest(path: tuple[Any, ...], a: jax.Array) -> jax.Array:
        return jnp.abs(a).max(range(path[0].key == "layers", a.ndim))

    def one(ids: jax.Array) -> _Seen:
        (loss, finite), gradients = jax.value_and_grad(run, has_aux=True)(trained(params), ids)
        return _Seen(finite, loss, jax.tree.map_with_path(largest, gradients))

    return jax.lax.map(one, input_ids)


def _words(seen: _Seen) -> str | None:
    """Where a microbatch went wrong first; None where it did not."""
    finite = seen.finite
    if not finite.embedded:
        return "the embedding"
    for y, (attention, experts) in enumerate(zip(finite.attention, finite.experts, strict=True)):
        if not (attention and experts):
            return f"layer {y}, {'experts' if attention else 'attention'}"
    if not finite.logits:
        return "the logits"
    if not np.isfinite(seen.loss):
        return "the loss"
    bad = (name for name, size in _gradients(seen.largest) if not np.isfinite(size))
    return next((f"the gradient of {name} {_BACKWARD}" for name in bad), None)


def _gradients(largest: Params) -> Iterator[tuple[str, float]]:
    """Names of a model's parts and the largest magnitude in their gradient, in the order of the backward."""
    if "lm_head" in largest:
        yield "lm_head", float(largest["lm_head"])
    yield "final_norm", float(largest["final_norm"])
    layers = largest["layers"]
    attention = [a for name, a in layers.items() if name not in ("moe_norm", "moe")]
    experts = [layers["moe_norm"], *jax.tree.leaves(layers["moe"])]
    for y in reversed(range(len(layers["moe_norm"]))):
        yield f"layer {y}, experts", float(np.max([a[y] for a in experts]))
        yield f"layer {y}, attention", float(np.max([a[y] for a in attention]))
    yield "the embedding", float(largest["embed"])
