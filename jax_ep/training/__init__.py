"""Training: configuration, state and step, data, checkpoints, and the loop that puts them together."""

from jax_ep.training.checkpoint import Checkpoints
from jax_ep.training.config import OptimizerConfig, TrainConfig
from jax_ep.training.data import Windows, read_documents, split, unigram_entropy
from jax_ep.training.loop import Result, TrainingStopped, train
from jax_ep.training.optimizer import make_optimizer
from jax_ep.training.step import (
    StepMetrics,
    TrainState,
    init_state,
    make_evaluate,
    make_step,
    state_shapes,
    state_shardings,
)

__all__ = [
    "Checkpoints",
    "OptimizerConfig",
    "Result",
    "StepMetrics",
    "TrainConfig",
    "TrainState",
    "TrainingStopped",
    "Windows",
    "init_state",
    "make_evaluate",
    "make_optimizer",
    "make_step",
    "read_documents",
    "split",
    "state_shapes",
    "state_shardings",
    "train",
    "unigram_entropy",
]
