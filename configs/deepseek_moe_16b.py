"""DeepSeekMoE 16B: one layer of it on 16384 tokens. 64 small experts of which 6 a token, and two that
all tokens take.

    make compare ARGS="--config deepseek_moe_16b --modes packed,padded"

A layer's experts are 1.1 GB in bfloat16, 138 MB on each of eight devices. Values are those of config.json of
deepseek-ai/deepseek-moe-16b-base on the hub; batch and sequence are ours, 2048 tokens a device. The layer only: the
model's first layer is dense.

On simulated devices take a smaller layer of the same kind (within a minute on two cores, compilation included):

    make compare ARGS="--config deepseek_moe_16b batch_size=1 hidden_size=256 intermediate_size=176 dtype=float32"
"""

from jax_ep.config import MoEConfig, RouterConfig, WorkloadConfig


def get_config() -> WorkloadConfig:
    return WorkloadConfig(
        batch_size=8,
        sequence_length=2048,
        moe=MoEConfig(
            hidden_size=2048,
            intermediate_size=1408,
            num_experts=64,
            router=RouterConfig(top_k=6, normalize_weights=False),
            num_shared_experts=2,
            dtype="bfloat16",
            param_dtype="bfloat16",
        ),
        expert_parallel=8,
    )
