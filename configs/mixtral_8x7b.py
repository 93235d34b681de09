"""Mixtral 8x7B: one layer of it on 16384 tokens, and the whole model. 8 large experts of which 2 a token.

    make compare ARGS="--config mixtral_8x7b --modes packed,padded"

A layer's experts are 2.8 GB in bfloat16, 352 MB on each of eight devices. Values are those of config.json of
mistralai/Mixtral-8x7B-v0.1 on the hub; batch and sequence are ours, 2048 tokens a device.

On simulated devices take a smaller layer of the same kind (within a minute on two cores, compilation included):

    make compare ARGS="--config mixtral_8x7b sequence_length=64 hidden_size=256 intermediate_size=896 dtype=float32"
"""

from jax_ep.config import MoEConfig, RouterConfig, WorkloadConfig
from jax_ep.model_config import ModelConfig, RopeConfig


def get_config() -> WorkloadConfig:
    return WorkloadConfig(batch_size=8, sequence_length=2048, moe=get_model_config().moe, expert_parallel=8)


def get_model_config() -> ModelConfig:
    return ModelConfig(
        vocab_size=32000,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        moe=MoEConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_experts=8,
            router=RouterConfig(top_k=2),
            dtype="bfloat16",
            param_dtype="bfloat16",
        ),
        norm_eps=1e-5,
        rope=RopeConfig(theta=1e6),
        max_position=32768,
        balance_loss_coef=0.02,
        stop_tokens=(2,),
    )
