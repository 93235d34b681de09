"""The training loop: restores, steps, evaluates, saves, and tells of each in a record.

Letters: A microbatches of a step, B sequences of a step, S positions, Y layers, E experts.
"""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep.config import ConfigError
from jax_ep.distributed import Watchdog
from jax_ep.training import data
from jax_ep.training.checkpoint import Checkpoints
from jax_ep.training.config import TrainConfig
from jax_ep.training.data import Windows
from jax_ep.training.diagnose import first_not_finite
from jax_ep.training.flops import model_flops
from jax_ep.training.step import (
    StepMetrics,
    TrainState,
    batch_sharding,
    init_state,
    make_evaluate,
    make_step,
    rows_sharding,
)

Record = dict[str, Any]
CHECKPOINTS = "checkpoints"  # their folder, in that of a run


class TrainingStopped(Exception):
    """Too many steps in a row were not finite. The message names where it began, and the last good checkpoint."""


class Result(NamedTuple):
    """What a call of `train` came to.

    Attributes:
      state: after the last step.
      step: steps tried, before this call and in it.
      ended_early: `stop` asked for an end before the last step.
      compile_s: of the step; 0 where there was none to do.
    """

    state: TrainState
    step: int
    ended_early: bool
    compile_s: float


def train(
    config: TrainConfig,
    mesh: Mesh,
    train_windows: Windows,
    validation_windows: Windows,
    folder: Path,
    *,
    facts: dict[str, Any],
    on_record: Callable[[Record], None],
    watchdog: Watchdog | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Trains until config.steps, from the newest whole checkpoint in `folder`, or from the beginning.

    Every process of a job calls this. Checkpoints are written every config.checkpoint_every steps, at the end, and when
    `stop` ends it early; while steps are being skipped none is, so that the newest one is good.

    Records, in the order of their steps:
      {"kind": "start", "step", "says"}: the step it goes on from, 0 for a fresh start, and sentences about checkpoints.
      {"kind": "step", "step" from 1, ...}: see `step_record`; of a skipped step also "where" it began.
      {"kind": "validation", "step", "loss", "sequences", "predictions"}: mean cross-entropy on the first
        config.evaluate_sequences validation windows, or as many whole batches of them as there are. It follows also the
        start of a run that has no step to do.

    Args:
      config, mesh: of the run; the mesh need not be that of the checkpoint.
      train_windows, validation_windows: of config.sequence_length.
      folder: of the run; checkpoints lie below it.
      facts: of the data, which a checkpoint keeps.
      on_record: called with each record, in every process.
      watchdog: told what the run is about to do.
      stop: asked after each step; where it is true in any process, the run ends there.

    Raises:
      ConfigError: a checkpoint that does not fit, or cannot be written; too little text to validate on.
      TrainingStopped: more than config.max_bad_steps steps in a row were not finite.
    """
    beat = (lambda _: None) if watchdog is None else watchdog.beat
    validate = _validation(config, mesh, validation_windows)
    with contextlib.closing(Checkpoints(folder / CHECKPOINTS, config, mesh, facts)) as checkpoints:
        beat("restore")
        restored = checkpoints.restore()
        state, says = (init_state(config, mesh), []) if restored is None else restored
        counts = (state.step, state.sequences, state.skipped, state.skipped_in_row)
        step, position, skipped_steps, bad = map(int, jax.device_get(counts))
        if restored is not None:
            says = [*says, f"going on from {checkpoints.folder / str(step)}"]
        on_record({"kind": "start", "step": step, "says": says})
        if step >= config.steps:
            beat(f"step {step} validation")
            on_record({"kind": "validation", "step": step, **validate(state.params)})
            return Result(state, step, False, 0.0)

        lay_out = batch_sharding(config, mesh)
        batch = data.batch(train_windows, position, config, lay_out)
        beat("compile")
        begun = time.perf_counter()
        jitted: Any = make_step(config, mesh)
        run = jitted.lower(state, batch).compile()
        compile_s = time.perf_counter() - begun
        flops = model_flops(config.model, config.batch_size, config.sequence_length)
        ending = False
        while step < config.steps and not ending:
            step += 1
            beat(f"step {step}")
            begun = time.perf_counter()
            state, on_device = run(state, batch)
            this, position = batch, position + config.batch_size
            if step < config.steps:  # while the devices work
                batch = data.batch(train_windows, position, config, lay_out)
            beat(f"step {step} wait")
            metrics: StepMetrics = jax.device_get(on_device)
            seconds = time.perf_counter() - begun
            skipped = bool(metrics.skipped)
            bad, skipped_steps = (bad + 1 if skipped else 0), skipped_steps + skipped
            record = step_record(config, mesh, step, metrics, seconds, flops)
            record["skipped_steps"] = skipped_steps
            if skipped:
                beat(f"step {step} diagnose")
                record["where"] = first_not_finite(config, mesh, state, this)
            on_record(record)
            if bad > config.max_bad_steps:
                raise _stopped(step, bad, record["where"], checkpoints, _all_finite(mesh, state.params))
            ending = _anywhere(stop())
            last = step == config.steps
            if last or step % config.evaluate_every == 0:
                beat(f"step {step} validation")
                on_record({"kind": "validation", "step": step, **validate(state.params)})
            if last or ending or (step % config.checkpoint_every == 0 and not bad):
                beat(f"step {step} checkpoint")
                checkpoints.save(state)
        beat("last checkpoint")
        checkpoints.wait()
        return Result(state, step, step < config.steps, compile_s)


def step_record(
    config: TrainConfig, mesh: Mesh, step: int, metrics: StepMetrics, seconds: float, flops: float
) -> Record:
    """What a step did.

    Args:
      metrics: on the host.
      seconds: from handing the step to the devices until its metrics were on the host.
      flops: of the model in a step.

    Returns:
      "loss" and its parts in nats, "grad_norm" before clipping, "tokens_per_s", "tflops_per_device" of the model's own
      products, "load_entropy" (of the experts' shares of assignments, as a fraction of ln E: mean of the layers;
      "_worst": of the least even one, "load_worst_layer"), "load_max_over_mean" of any layer's experts, "dropped_rows"
      and "rounds" (sum and largest of the layers), "peak_bytes" of "peak_of", "device" or "process".
    """
    peak, whose = peak_memory()
    return {
        "kind": "step",
        "step": step,
        **{name: float(getattr(metrics, name)) for name in ("loss", "cross_entropy", "balance", "z", "grad_norm")},
        "learning_rate": float(metrics.learning_rate),
        "skipped": bool(metrics.skipped),
        "seconds": seconds,
        "tokens_per_s": config.batch_size * config.sequence_length / seconds,
        "tflops_per_device": flops / seconds / mesh.size / 1e12,
        **expert_load(np.asarray(metrics.stats.counts)),
        "dropped_rows": int(metrics.stats.dropped_rows.sum()),
        "rounds": int(metrics.stats.rounds.max()),
        "peak_bytes": peak,
        "peak_of": whose,
    }


def expert_load(counts: np.ndarray) -> dict[str, Any]:
    """Assignments to experts [Y, E] as the "load_..." figures of `step_record`."""
    shares = counts / np.maximum(counts.sum(-1, keepdims=True), 1)  # [Y, E]
    surprise = -np.log(np.where(shares > 0, shares, 1))
    even = (shares * surprise).sum(-1) / math.log(max(counts.shape[-1], 2))  # [Y]
    worst = int(even.argmin())
    return {
        "load_entropy": float(even.mean()),
        "load_entropy_worst": float(even[worst]),
        "load_worst_layer": worst,
        "load_max_over_mean": float(shares.max() * counts.shape[-1]),
    }


def peak_memory() -> tuple[int, str]:
    """Bytes, and whose: the fullest device's of this process where devices tell, else the process' resident memory."""
    told = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [stats["peak_bytes_in_use"] for stats in told if "peak_bytes_in_use" in stats]
    if peaks:
        return max(peaks), "device"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process"


def _validation(config: TrainConfig, mesh: Mesh, windows: Windows) -> Callable[[Any], Record]:
    """Evaluates parameters on the first windows, in batches of a microbatch's size."""
    wanted = min(config.evaluate_sequences, len(windows))
    rows = min(config.batch_size // config.accumulation, wanted)
    overlap = config.model.overlap_moe_expert_parallel_comm
    if config.model.kv_coship is not None or overlap:  # two halves of a batch on each replica, or rank
        pairs = 2 * config.data_parallel * (config.expert_parallel if overlap else 1)
        field, off = ("overlap_moe_expert_parallel_comm", False) if overlap else ("kv_coship", "none")
        if len(windows) < pairs:
            where = "rank" if overlap else "replica"
            rule = f"with {field} validation takes {pairs} sequences at once, two for each {where}"
            there = f"the held-out text has {len(windows)} of sequence_length={windows.sequence_length}"
            works = f"more text, a smaller sequence_length or {field}={off} works"
            raise ConfigError(f"evaluate_sequences={config.evaluate_sequences}: {rule}, and {there}; {works}")
        rows = max(rows // pairs, 1) * pairs
        wanted = max(wanted, rows)
    lay_out = rows_sharding(config, mesh, rows)
    firsts = range(0, wanted // rows * rows, rows)
    batches = [data.place_rows(windows, first, (rows,), lay_out) for first in firsts]
    evaluate = make_evaluate(config, mesh)

    def validate(params: Any) -> Record:
        sums, counts = zip(*jax.device_get([evaluate(params, batch) for batch in batches]), strict=True)
        predictions = int(sum(map(int, counts)))
        loss = float(sum(map(float, sums))) / predictions
        return {"loss": loss, "sequences": rows * len(batches), "predictions": predictions}

    return validate


def _all_finite(mesh: Mesh, params: Any) -> bool:
    finite = lambda tree: jnp.stack([jnp.isfinite(a).all() for a in jax.tree.leaves(tree)]).all()
    return bool(jax.device_get(jax.jit(finite, out_shardings=NamedSharding(mesh, P()))(params)))


def _stopped(step: int, bad: int, where: str, checkpoints: Checkpoints, finite: bool) -> TrainingStopped:
    """`finite`: whether the parameters are; where they are not, no number of steps gets past that."""
    checkpoints.wait()
    newest = checkpoints.newest()
    good = "there is no checkpoint yet" if newest is None else f"the last good checkpoint is {newest}"
    advice = "a lower learning_rate makes another run"
    if finite:
        advice = f"max_bad_steps={2 * bad} goes on past them, and {advice}"
    return TrainingStopped(f"step {step}: {bad} steps in a row were not finite ({where}); {good}; {advice}")


def _anywhere(asked: bool) -> bool:
    """Whether any process of the job says so; the same answer in all."""
    if jax.process_count() == 1:
        return asked
    return bool(multihost_utils.process_allgather(np.bool_(asked)).any())
