"""gpt-oss 20B: one layer of it on 16384 tokens, and the whole model. 32 experts of which 4 a token, with biases and a
clamped activation of its own.

    make compare ARGS="--config gpt_oss_20b --modes packed,padded"

A layer's experts are 1.6 GB in bfloat16, 199 MB on each of eight devices. The model was published in MXFP4, which comes
later; its shapes are these all the same. Values are those of config.json of openai/gpt-oss-20b on the hub; batch and
sequence are ours, 2048 tokens a device.

On simulated devices take a smaller layer of the same kind (within a minute on two cores, compilation included):

    make compare ARGS="--config gpt_oss_20b sequence_length=64 hidden_size=256 intermediate_size=256 dtype=float32"
"""

from jax_ep.config import MoEConfig, RouterConfig, WorkloadConfig
from jax_ep.model_config import ModelConfig, RopeConfig


def get_config() -> WorkloadConfig:
    return WorkloadConfig(batch_size=8, sequence_length=2048, moe=get_model_config().moe, expert_parallel=8)


def get_model_config() -> ModelConfig:
    return ModelConfig(
        vocab_size=201088,
        num_layers=24,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        moe=MoEConfig(
            hidden_size=2880,
            intermediate_size=2880,
            num_experts=32,
            router=RouterConfig(top_k=4, softmax_after_top_k=True, logit_bias=True),
            activation="gpt_oss",
            expert_bias=True,
            dtype="bfloat16",
            param_dtype="bfloat16",
        ),
        norm_eps=1e-5,
        rope=RopeConfig(theta=150000.0, scaling="yarn", factor=32.0, original_max_position=4096, truncate=False),
        qkv_bias=True,
        output_bias=True,
        window=128,
        window_layers=(True, False) * 12,
        attention_sinks=True,
        max_position=131072,
        balance_loss_coef=0.9,
        stop_tokens=(200002,),
    )
