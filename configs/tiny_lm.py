"""What `python scripts/train.py` trains: a model of bytes that learns visibly on two cores.

    python scripts/train.py --config tiny_lm

TIME
RESULT
"""

from jax_ep.config import CommConfig, MoEConfig, RouterConfig, WorkloadConfig
from jax_ep.model_config import ModelConfig
from jax_ep.training.config import OptimizerConfig, TrainConfig


def get_config() -> WorkloadConfig:
    config = get_train_config()
    return WorkloadConfig(
        batch_size=config.batch_size,
        sequence_length=config.sequence_length,
        moe=config.model.moe,
        expert_parallel=config.expert_parallel,
        data_parallel=config.data_parallel,
    )


def get_model_config() -> ModelConfig:
    return ModelConfig(
        vocab_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        moe=MoEConfig(
            hidden_size=128,
            intermediate_size=128,
            num_experts=8,
            router=RouterConfig(top_k=2),
            comm=CommConfig(mode="packed", recv_rows_factor=2.0),
        ),
        qk_norm="head",
        max_position=1024,
        balance_loss_coef=0.01,
    )


def get_train_config() -> TrainConfig:
    return TrainConfig(
        model=get_model_config(),
        batch_size=16,
        sequence_length=128,
        steps=1000,
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=50, final_fraction=0.05),
        expert_parallel=4,
        data_parallel=2,
        evaluate_every=250,
        evaluate_sequences=256,
        checkpoint_every=250,
    )
