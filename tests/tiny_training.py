"""A training that takes milliseconds a step: for tests in this process, and as `--config` of scripts/train.py."""

from __future__ import annotations

from jax_ep.config import CommConfig, MoEConfig, RouterConfig
from jax_ep.model_config import ModelConfig
from jax_ep.training.config import OptimizerConfig, TrainConfig


def get_train_config() -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(
            vocab_size=256,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            moe=MoEConfig(
                hidden_size=16,
                intermediate_size=16,
                num_experts=4,
                router=RouterConfig(top_k=2),
                comm=CommConfig(transport="all_to_all"),
            ),
            qk_norm="head",
            max_position=128,
            balance_loss_coef=0.01,
        ),
        batch_size=8,
        sequence_length=16,
        steps=8,
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        expert_parallel=2,
        evaluate_every=4,
        evaluate_sequences=20,
        checkpoint_every=2,
        max_bad_steps=2,
    )
