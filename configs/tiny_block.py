"""What `python scripts/compare.py --block parallel` runs: a layer of attention and experts that two cores carry.

    python scripts/compare.py --block parallel
    python scripts/compare.py --block sequential --split contiguous --segments 48

Keys and values of a position are as wide as its hidden row, so that both parts of an exchange can be seen. About half a
minute on two cores, compilation included. Expect co-shipping to take one payload collective a layer less than separate
exchanges of the same rows (of two microbatches three less), for the same bytes; and all_gather and the ring to move
more key/value rows than any query reads. Simulated devices charge nothing for a message: what that is worth on links,
scripts/block_links.py measures between processes.
"""

from jax_ep.config import CommConfig, MoEConfig, RouterConfig, WorkloadConfig
from jax_ep.model_config import ModelConfig


def get_config() -> WorkloadConfig:
    return WorkloadConfig(
        batch_size=4, sequence_length=256, moe=get_model_config().moe, expert_parallel=4, warmup=2, runs=7
    )


def get_model_config() -> ModelConfig:
    return ModelConfig(
        vocab_size=256,
        num_layers=2,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        moe=MoEConfig(
            hidden_size=256,
            intermediate_size=256,
            num_experts=16,
            router=RouterConfig(top_k=2),
            comm=CommConfig(recv_rows_factor=3.0),
        ),
        qk_norm="head",
    )
