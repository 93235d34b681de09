"""OLMoE 1B-7B: one layer of it on 16384 tokens, and the whole model. 64 small experts of which 8 a token.

    make compare ARGS="--config olmoe_1b_7b --modes packed,padded"

A layer's experts are 805 MB in bfloat16, 101 MB on each of eight devices. Values are those of config.json of
allenai/OLMoE-1B-7B-0924 on the hub; batch and sequence are ours, 2048 tokens a device.

On simulated devices take a smaller layer of the same kind (within a minute on two cores, compilation included):

    make compare ARGS="--config olmoe_1b_7b sequence_length=64 hidden_size=256 intermediate_size=128 dtype=float32"
"""

from jax_ep.config import MoEConfig, RouterConfig, WorkloadConfig
from jax_ep.model_config import ModelConfig, RopeConfig


def get_config() -> WorkloadConfig:
    return WorkloadConfig(batch_size=8, sequence_length=2048, moe=get_model_config().moe, expert_parallel=8)


def get_model_config() -> ModelConfig:
    return ModelConfig(
        vocab_size=50304,
        num_layers=16,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        moe=MoEConfig(
            hidden_size=2048,
            intermediate_size=1024,
            num_experts=64,
            router=RouterConfig(top_k=8, normalize_weights=False),
            dtype="bfloat16",
            param_dtype="bfloat16",
        ),
        norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        qk_norm="projection",
        max_position=4096,
        balance_loss_coef=0.01,
        stop_tokens=(50279,),
    )
