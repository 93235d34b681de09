"""Frozen configurations of a training run, validated when built."""

from __future__ import annotations

import dataclasses
import numbers
import sys
from typing import Any

import numpy as np

from jax_ep.config import MoEConfig, RouterConfig, boolean, one_of, positive_int, positive_number, refuse
from jax_ep.model_config import ModelConfig
from jax_ep.sampling import SEEDS

SCHEDULES = ("constant", "linear", "cosine")
_COUNTED = 2**31  # a TrainState counts in int32, below this


def _not_negative(field: str, value: Any, works: float) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= value <= sys.float_info.max:  # type: ignore[operator]
        refuse(field, value, "must be a finite number of at least 0", works)


def _in_float32(field: str, value: float, works: float, below: float = np.inf) -> None:
    """Refuses what is another number where updates are computed: 0, or not below `below`."""
    with np.errstate(over="ignore"):
        single = np.float32(value)
    if not single < below or (value and not single):
        refuse(field, value, f"is {single:g} in float32, in which updates are computed", works)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with a schedule and a bound on the gradient.

    Attributes:
      learning_rate: its highest value.
      warmup_steps: updates over which it rises to that, the first one's being learning_rate / warmup_steps.
      schedule: "constant", or how it falls from there to the last step: "linear" or "cosine".
      final_fraction: of the highest value, where it falls to.
      b1, b2, eps: of Adam's moments.
      weight_decay: what an update takes off matrices, times the learning rate; vectors (norms, biases, sinks) keep
        theirs.
      clip_norm: a gradient whose norm over all parameters is above this is scaled down to it; None: never.
    """

    learning_rate: float = 1e-3
    warmup_steps: int = 0
    schedule: str = "cosine"
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        positive_number("learning_rate", self.learning_rate, 1e-3)
        positive_int("warmup_steps", self.warmup_steps, 0, least=0)
        one_of("schedule", self.schedule, SCHEDULES)
        _not_negative("final_fraction", self.final_fraction, 0.1)
        if self.final_fraction > 1:
            refuse("final_fraction", self.final_fraction, "must be at most 1, the highest learning rate", 1.0)
        for field, works in (("b1", 0.9), ("b2", 0.95)):
            _not_negative(field, getattr(self, field), works)
            if getattr(self, field) >= 1:
                refuse(field, getattr(self, field), "must be below 1", works)
        positive_number("eps", self.eps, 1e-8)
        _not_negative("weight_decay", self.weight_decay, 0.1)
        if self.clip_norm is not None:
            positive_number("clip_norm", self.clip_norm, 1.0)
        for field, works in (("learning_rate", 1e-3), ("eps", 1e-8), ("weight_decay", 0.1), ("clip_norm", 1.0)):
            _in_float32(field, getattr(self, field) or 0.0, works)
        for field, works in (("b1", 0.9), ("b2", 0.95)):
            _in_float32(field, getattr(self, field), works, below=1.0)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A model, how it is trained, and on which mesh.

    Attributes:
      model: moe.param_dtype float32; moe.dtype is what is computed in. model.recompute says what is kept for the
        backward, model.balance_loss_coef how much balance counts.
      batch_size: sequences of a step, over all devices and microbatches.
      sequence_length: tokens of each.
      steps: of the run, skipped ones included.
      optimizer: the OptimizerConfig.
      accumulation: microbatches of a step; its loss is the mean of theirs.
      z_loss_coef: factor of the routers' z-loss, pooled over layers, in the loss.
      bias_update_rate: how far a step moves the router's selection bias towards balance (deepseek_v3); 0: not.
      shard_weights: parameters outside the experts, and their optimiser state, lie split over all token axes.
      zero_experts: the routed experts' output is held at zero, to see what they are worth.
      max_bad_steps: steps in a row without a finite loss and gradient after which a run stops.
      seed: of the parameters and the order of the data.
      expert_parallel, data_parallel: sizes of the mesh axes.
      evaluate_every: steps between validations, of `evaluate_sequences` sequences each.
      checkpoint_every: steps between checkpoints, of which the newest `keep_checkpoints` stay.
    """

    model: ModelConfig
    batch_size: int
    sequence_length: int
    steps: int
    optimizer: OptimizerConfig = OptimizerConfig()
    accumulation: int = 1
    z_loss_coef: float = 0.0
    bias_update_rate: float = 0.0
    shard_weights: bool = False
    zero_experts: bool = False
    max_bad_steps: int = 5
    seed: int = 0
    expert_parallel: int = 8
    data_parallel: int = 1
    evaluate_every: int = 100
    evaluate_sequences: int = 64
    checkpoint_every: int = 100
    keep_checkpoints: int = 3

    def __post_init__(self) -> None:
        model = ModelConfig(256, 2, 4, 2, 16, MoEConfig(64, 96, 8, RouterConfig(2)))
        for field, example in (("model", model), ("optimizer", OptimizerConfig())):
            if not isinstance(getattr(self, field), type(example)):
                refuse(field, getattr(self, field), f"must be a {type(example).__name__}", example)
        moe, longest = self.model.moe, self.model.max_position
        if moe.param_dtype != "float32":
            rule = "what is trained is kept in float32; moe.dtype is what is computed in"
            refuse("model.moe.param_dtype", moe.param_dtype, rule, "float32")
        if moe.dtype == "float16":
            rule = "small gradients vanish in it, and there is no loss scale"
            refuse("model.moe.dtype", moe.dtype, rule, "bfloat16")
        if longest < 2:
            refuse("model.max_position", longest, "must be at least 2: the next token is predicted", 2)
        positive_int("accumulation", self.accumulation, 1)
        works = {"batch_size": 8 * self.accumulation, "sequence_length": min(64, longest)}
        works |= {"steps": max(100, self.optimizer.warmup_steps), "max_bad_steps": 5}
        works |= {"expert_parallel": 8, "data_parallel": 1, "evaluate_every": 100, "evaluate_sequences": 64}
        works |= {"checkpoint_every": 100, "keep_checkpoints": 3}
        for field, value in works.items():
            positive_int(field, getattr(self, field), value)
        if not 2 <= self.sequence_length <= longest:
            rule = f"must be from 2, as the next token is predicted, to model.max_position={longest}"
            refuse("sequence_length", self.sequence_length, rule, 2 if self.sequence_length < 2 else longest)
        if self.batch_size % self.accumulation:
            divisors = (n for n in range(self.accumulation, 0, -1) if self.batch_size % n == 0)
            refuse("accumulation", self.accumulation, f"must divide batch_size={self.batch_size}", next(divisors))
        self._check_microbatches()
        most = (_COUNTED - 1) // self.batch_size
        if self.steps > most:
            rule = f"the sequences of steps={self.steps} with batch_size={self.batch_size} must be below {_COUNTED}"
            field, value = ("steps", most) if most else ("batch_size", 8 * self.accumulation)
            refuse(field, getattr(self, field), rule, value)
        if self.optimizer.warmup_steps > self.steps:
            rule = f"must not be above steps={self.steps}"
            refuse("optimizer.warmup_steps", self.optimizer.warmup_steps, rule, self.steps)
        for field in ("z_loss_coef", "bias_update_rate"):
            _not_negative(field, getattr(self, field), 0.0)
        if self.bias_update_rate and not moe.router.selection_bias:
            rule = "the router has no bias to move (model.moe.router.selection_bias=False)"
            refuse("bias_update_rate", self.bias_update_rate, rule, 0.0)
        boolean("shard_weights", self.shard_weights)
        boolean("zero_experts", self.zero_experts)
        positive_int("seed", self.seed, 0, least=0)
        if self.seed >= SEEDS:
            refuse("seed", self.seed, f"must be below {SEEDS}", self.seed % SEEDS)

    def _check_microbatches(self) -> None:
        """Two halves of the sequences of each replica or rank, and weights that are whole."""
        model = self.model
        if model.kv_coship is None and not model.overlap_moe_expert_parallel_comm:
            return
        what, each = f"model.kv_coship={model.kv_coship!r}", 2 * self.data_parallel * self.accumulation
        places = "2 * data_parallel * accumulation"
        if model.overlap_moe_expert_parallel_comm:
            what, each = "model.overlap_moe_expert_parallel_comm=True", each * self.expert_parallel
            places = "2 * expert_parallel * data_parallel * accumulation"
        if self.batch_size % each:
            rule = f"with {what} must be a multiple of {places} = {each}"
            refuse("batch_size", self.batch_size, rule, -(-self.batch_size // each) * each)
        if self.shard_weights:
            rule = f"with {what} all layers run inside one shard_map, on whole weights"
            refuse("shard_weights", True, rule, False)
