"""What `python scripts/generate.py` makes with random weights: a whole model that two cores run at once.

    python scripts/generate.py

About fifteen seconds on two cores, nearly all of it compilation. Its vocabulary is ASCII, so that text goes in
and comes out without a tokenizer; what comes out means nothing.
"""

from jax_ep.config import MoEConfig, RouterConfig, WorkloadConfig
from jax_ep.model_config import ModelConfig


def get_config() -> WorkloadConfig:
    return WorkloadConfig(batch_size=4, sequence_length=64, moe=get_model_config().moe, expert_parallel=4)


def get_model_config() -> ModelConfig:
    return ModelConfig(
        vocab_size=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        moe=MoEConfig(hidden_size=64, intermediate_size=48, num_experts=8, router=RouterConfig(top_k=2)),
        qk_norm="head",
        max_position=1024,
    )
