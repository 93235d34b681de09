"""Qwen1.5-MoE-A2.7B: one layer of it on 16384 tokens, and the whole model. 60 experts of which 4 a token, and a gated
shared one as wide as four.

    make compare ARGS="--config qwen1_5_moe_a2_7b --modes packed,padded"

60 experts on eight devices are padded to 64, so the last device holds four experts and four empty ones. A layer's
experts are 1.0 GB in bfloat16. Values are those of config.json of Qwen/Qwen1.5-MoE-A2.7B on the hub; batch and sequence
are ours, 2048 tokens a device.

On simulated devices take a smaller layer of the same kind (within a minute on two cores, compilation included):

    make compare ARGS="--config qwen1_5_moe_a2_7b batch_size=1 hidden_size=256 intermediate_size=176 dtype=float32"
"""

from jax_ep.config import MoEConfig, RouterConfig, WorkloadConfig
from jax_ep.model_config import ModelConfig, RopeConfig


def get_config() -> WorkloadConfig:
    return WorkloadConfig(batch_size=8, sequence_length=2048, moe=get_model_config().moe, expert_parallel=8)


def get_model_config() -> ModelConfig:
    return ModelConfig(
        vocab_size=151936,
        num_layers=24,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        moe=MoEConfig(
            hidden_size=2048,
            intermediate_size=1408,
            num_experts=60,
            router=RouterConfig(top_k=4, normalize_weights=False),
            num_shared_experts=1,
            shared_intermediate_size=5632,
            shared_gate=True,
            dtype="bfloat16",
            param_dtype="bfloat16",
        ),
        norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        qkv_bias=True,
        max_position=8192,
        balance_loss_coef=0.001,
        stop_tokens=(151643,),
    )
