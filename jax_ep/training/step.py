"""One training step as one program: loss, gradient, update, and what to do when they are not finite.

Arrays are whole ones that the compiler spreads over the mesh, so a norm over all parameters is that, however each of
them is split.

Letters: A microbatches, B sequences of a step, S positions, Y layers, E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import sharding
from jax_ep.models.decoder import Params, decoder_shardings, forward, init_decoder, loss_of_logits
from jax_ep.models.placement import placement
from jax_ep.routing import MoEStats, bias_update, z_loss
from jax_ep.training.config import TrainConfig
from jax_ep.training.optimizer import make_optimizer, schedule


class TrainState(NamedTuple):
    """What a run goes on from.

    Attributes:
      step: int32, steps tried, skipped ones included.
      sequences: int32, sequences consumed: the position in the data.
      params: as of `jax_ep.models.decoder.init_decoder`.
      opt_state: of `make_optimizer`; it counts the updates made.
      skipped: int32, steps without a finite loss, gradient and update, which changed neither params nor opt_state.
      skipped_in_row: int32, of those the ones since the last good step.
    """

    step: jax.Array
    sequences: jax.Array
    params: Params
    opt_state: Any
    skipped: jax.Array
    skipped_in_row: jax.Array


class StepMetrics(NamedTuple):
    """What a step tells, the same on every device.

    Attributes:
      loss: float32, what was minimised: the mean over microbatches, as are the next three.
      cross_entropy: float32, of next tokens, in nats.
      balance, z: float32, balance and z-loss of the routers, before their factors.
      grad_norm: float32, over all parameters, before it is bounded.
      learning_rate: float32.
      skipped: bool, whether loss, grad_norm or the update was not finite, so that nothing was changed.
      stats: MoEStats [Y, ...], summed over microbatches; of rounds the most.
    """

    loss: jax.Array
    cross_entropy: jax.Array
    balance: jax.Array
    z: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    skipped: jax.Array
    stats: MoEStats


def trained(params: Params) -> Params:
    """Parameters without the routers' selection bias, which no gradient trains."""
    router = params["layers"]["moe"]["router"]
    return _with_router(params, {name: a for name, a in router.items() if name != "selection_bias"})


def with_trained(params: Params, new: Params) -> Params:
    """`params` with those that `trained` gives replaced by `new`."""
    return _with_router(new, {**params["layers"]["moe"]["router"], **new["layers"]["moe"]["router"]})


def _with_router(params: Params, router: Params) -> Params:
    layers = params["layers"]
    return {**params, "layers": {**layers, "moe": {**layers["moe"], "router": router}}}


def _create(config: TrainConfig, ranks: int) -> TrainState:
    params = init_decoder(config.model, jax.random.key(config.seed), ranks)
    zero = jnp.int32(0)
    return TrainState(zero, zero, params, make_optimizer(config).init(trained(params)), zero, zero)


def _creator(config: TrainConfig, mesh: Mesh) -> Callable[[], TrainState]:
    return functools.partial(_create, config, sharding.layer_axes(config.model.moe, mesh).ranks)


def init_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """A fresh state on its devices, made in one program: no device holds more than its share."""
    return jax.jit(_creator(config, mesh), out_shardings=state_shardings(config, mesh))()


def state_shapes(config: TrainConfig, mesh: Mesh) -> TrainState:
    """ShapeDtypeStructs in the structure of `init_state`; nothing is allocated."""
    return jax.eval_shape(_creator(config, mesh))


def state_shardings(config: TrainConfig, mesh: Mesh) -> TrainState:
    """NamedShardings in that structure: Adam's moments lie as their parameters do, counts on every device."""
    shapes, whole = state_shapes(config, mesh), NamedSharding(mesh, P())
    params = decoder_shardings(config.model, mesh, split_weights=config.shard_weights)
    opt_state = optax.tree.map_params(
        make_optimizer(config),
        lambda _, lies: lies,
        shapes.opt_state,
        trained(params),
        transform_non_params=lambda _: whole,
    )
    return TrainState(whole, whole, params, opt_state, whole, whole)


def rows_sharding(config: TrainConfig, mesh: Mesh, rows: int) -> NamedSharding:
    """How the model lays `rows` sequences [rows, S] out."""
    spec = placement(config.model.moe, mesh, rows, config.sequence_length).tokens
    assert spec is not None
    return NamedSharding(mesh, spec)


def batch_sharding(config: TrainConfig, mesh: Mesh) -> NamedSharding:
    """How a step's sequences [A, B/A, S] lie: every microbatch as the model lays it out."""
    rows = rows_sharding(config, mesh, config.batch_size // config.accumulation)
    return NamedSharding(mesh, P(None, *rows.spec))


class Parts(NamedTuple):
    """What the loss of a microbatch is made of, float32, before the factors; and MoEStats [Y, ...]."""

    cross_entropy: jax.Array
    balance: jax.Array
    z: jax.Array
    stats: MoEStats


def microbatch_loss(params: Params, input_ids: jax.Array, config: TrainConfig, mesh: Mesh) -> tuple[jax.Array, Parts]:
    """What a step minimises, of one microbatch [B/A, S]; see `loss_of_forward`."""
    params = model_params(params, config)
    logits, stats = forward(params, input_ids, config.model, mesh=mesh, split_weights=config.shard_weights)
    return loss_of_forward(logits, stats, input_ids, config)


def loss_of_forward(
    logits: jax.Array, stats: MoEStats, input_ids: jax.Array, config: TrainConfig
) -> tuple[jax.Array, Parts]:
    """The decoder's loss, which holds the balance loss, + z_loss_coef * the z-loss pooled over layers; and its
    parts.
    """
    total, parts = loss_of_logits(logits, stats, input_ids, config.model)
    z = z_loss(jax.tree.map(lambda a: a.sum(0), stats))
    total = total + config.z_loss_coef * z if config.z_loss_coef else total
    return total, Parts(parts.cross_entropy, parts.balance, z, stats)


def model_params(params: Params, config: TrainConfig) -> Params:
    """What the model runs with: with config.zero_experts, routed experts that give zeros."""
    if not config.zero_experts:
        return params
    layers = params["layers"]
    last = ("down", "down_bias")
    experts = {n: jnp.zeros_like(a) if n in last else a for n, a in layers["moe"]["experts"].items()}
    return {**params, "layers": {**layers, "moe": {**layers["moe"], "experts": experts}}}


def gradient(params: Params, input_ids: jax.Array, config: TrainConfig, mesh: Mesh) -> tuple[jax.Array, Parts, Params]:
    """Loss, its parts and its gradient over a step's microbatches [A, B/A, S].

    Returns:
      the mean loss; Parts, means but for the stats: those are summed, and of rounds the most taken; the mean gradient,
      float32, in the structure of `trained`.
    """
    weights = trained(params)

    def of(ids: jax.Array) -> tuple[jax.Array, Parts, Params]:
        run = lambda weights: microbatch_loss(with_trained(params, weights), ids, config, mesh)
        (total, parts), grads = jax.value_and_grad(run, has_aux=True)(weights)
        return total, parts, grads

    if config.accumulation == 1:
        return of(input_ids[0])

    def add(sums: Any, ids: jax.Array) -> tuple[Any, None]:
        new = of(ids)
        rounds = jnp.maximum(sums[1].stats.rounds, new[1].stats.rounds)
        total, parts, grads = jax.tree.map(jnp.add, sums, new)
        return (total, parts._replace(stats=parts.stats._replace(rounds=rounds)), grads), None

    nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(of, input_ids[0]))
    (total, parts, grads), _ = jax.lax.scan(add, nothing, input_ids)
    mean = lambda a: a / config.accumulation
    stats, parts = parts.stats, jax.tree.map(mean, parts)
    return mean(total), parts._replace(stats=stats), jax.tree.map(mean, grads)


def advance(state: TrainState, input_ids: jax.Array, config: TrainConfig, mesh: Mesh) -> tuple[TrainState, StepMetrics]:
    """One step on sequences [A, B/A, S]. Pure; see `make_step`."""
    loss, parts, grads = gradient(state.params, input_ids, config, mesh)
    with jax.named_scope("update"):
        norm, weights = optax.tree.norm(grads), trained(state.params)
        updates, opt_state = make_optimizer(config).update(grads, state.opt_state, weights)
        params = with_trained(state.params, optax.apply_updates(weights, updates))
        if config.bias_update_rate:
            router = params["layers"]["moe"]["router"]
            moved = router["selection_bias"] + bias_update(parts.stats.counts, config.bias_update_rate)  # [Y, E]
            params = _with_router(params, {**router, "selection_bias": moved})
        good = jnp.isfinite(loss) & jnp.isfinite(norm) & jnp.isfinite(optax.tree.norm(updates))
        keep = lambda new, old: jnp.where(good, new, old)
        params, opt_state = jax.tree.map(keep, (params, opt_state), (state.params, state.opt_state))
    bad = 1 - good.astype(jnp.int32)
    new = TrainState(
        step=state.step + 1,
        sequences=state.sequences + config.batch_size,
        params=params,
        opt_state=opt_state,
        skipped=state.skipped + bad,
        skipped_in_row=bad * (state.skipped_in_row + 1),
    )
    rate = schedule(config)(state.step - state.skipped)
    metrics = StepMetrics(loss, *parts[:3], norm, jnp.asarray(rate, jnp.float32), ~good, parts.stats)
    return new, metrics


def make_step(config: TrainConfig, mesh: Mesh) -> Callable[[TrainState, jax.Array], tuple[TrainState, StepMetrics]]:
    """Compiles, on its first call, `f(state, input_ids int32 [A, B/A, S]) -> (state, StepMetrics)`.

    The state given is used up. A step whose loss, gradient or update is not finite leaves parameters and optimiser
    state as they were and is counted; it uses up its sequences all the same.
    """
    lies = state_shardings(config, mesh)
    return jax.jit(
        functools.partial(advance, config=config, mesh=mesh),
        in_shardings=(lies, batch_sharding(config, mesh)),
        out_shardings=(lies, NamedSharding(mesh, P())),  # the state's left open would be another at the next step
        donate_argnums=0,
    )


def make_evaluate(config: TrainConfig, mesh: Mesh) -> Callable[[Params, jax.Array], tuple[jax.Array, jax.Array]]:
    """Compiles, on its first call for a shape, `f(params, input_ids int32 [B, S]) -> (sum, count)`: the summed
    cross-entropy of next tokens in nats, float32, and how many there are, int32. Any B; `rows_sharding` says where they
    go.
    """

    def evaluate(params: Params, input_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        _, parts = microbatch_loss(params, input_ids, config, mesh)
        count = input_ids.shape[0] * (input_ids.shape[1] - 1)
        return parts.cross_entropy * count, jnp.int32(count)

    lies = state_shardings(config, mesh).params
    return jax.jit(evaluate, in_shardings=(lies, None), out_shardings=NamedSharding(mesh, P()))
