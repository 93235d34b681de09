"""The published inference workload: 64 tokens, 8 experts of which 2 a token, two expert ranks.

    make compare ARGS="--config mini_infer"

About 15 s on two cores, compilation included. Expect packed's payload to be half of padded's, and times of about ten
milliseconds that differ little between the two: 64 tokens are little work, and most of a run is reading the weights.

Published byte figures are for 2-byte elements: tensor parallel 131072, ideal 262144, padded 524288. This config is
float32, because CPUs are slow at anything else, so the script reports twice those.
"""

from jax_ep.config import MoEConfig, RouterConfig, WorkloadConfig


def get_config() -> WorkloadConfig:
    return WorkloadConfig(
        batch_size=4,
        sequence_length=16,
        moe=MoEConfig(hidden_size=512, intermediate_size=1024, num_experts=8, router=RouterConfig(top_k=2)),
        expert_parallel=2,
        warmup=2,
        runs=5,
    )
