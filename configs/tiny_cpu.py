"""What `make compare` runs: small enough for two cores, fine-grained enough that the paths differ.

    make compare

About twenty seconds on two cores, compilation included, once the environment is made. Expect packed to take a third of
dense's time and half of padded's, and to hand its collectives a third of the bytes that padded does. allgather is
faster still here, where no link charges for its bytes.

A router with random weights loads real text unevenly: the fullest (source, destination) pair holds 2.15 times the mean,
which recv_rows_factor=2.5 fits into one round. `recv_rows_factor=1.25` shows two rounds in half the memory.
"""

from jax_ep.config import CommConfig, MoEConfig, RouterConfig, WorkloadConfig


def get_config() -> WorkloadConfig:
    return WorkloadConfig(
        batch_size=16,
        sequence_length=128,
        moe=MoEConfig(
            hidden_size=512,
            intermediate_size=256,
            num_experts=32,
            router=RouterConfig(top_k=4),
            comm=CommConfig(recv_rows_factor=2.5),
        ),
        expert_parallel=8,
        warmup=2,
        runs=7,
    )
