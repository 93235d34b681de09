"""Qwen3 30B-A3B: one layer of it on 16384 tokens, and the whole model. 128 small experts of which 8 a token.

    make compare ARGS="--config qwen3_30b_a3b --modes packed,padded"

A layer's experts are 1.2 GB in bfloat16, 151 MB on each of eight devices. Values are those of config.json of
Qwen/Qwen3-30B-A3B on the hub; batch and sequence are ours, 2048 tokens a device.

On simulated devices take a smaller layer of the same kind (within a minute on two cores, compilation included):

    make compare ARGS="--config qwen3_30b_a3b sequence_length=64 hidden_size=256 intermediate_size=96 dtype=float32"
"""

from jax_ep.config import MoEConfig, RouterConfig, WorkloadConfig
from jax_ep.model_config import ModelConfig, RopeConfig


def get_config() -> WorkloadConfig:
    return WorkloadConfig(batch_size=8, sequence_length=2048, moe=get_model_config().moe, expert_parallel=8)


def get_model_config() -> ModelConfig:
    return ModelConfig(
        vocab_size=151936,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        moe=MoEConfig(
            hidden_size=2048,
            intermediate_size=768,
            num_experts=128,
            router=RouterConfig(top_k=8),
            dtype="bfloat16",
            param_dtype="bfloat16",
        ),
        norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        qk_norm="head",
        max_position=40960,
        balance_loss_coef=0.001,
        stop_tokens=(151645,),
    )
