"""Times the mixture-of-experts blocks of HF transformers in torch: a process of its own, which bench_gpu.py starts.

    python scripts/_gpu_torch.py JOB

JOB is JSON, as _gpu_layers.torch_peer writes it. Prints a line of JSON for the versions, and one for each layer as soon
as it is timed. Weights and inputs are random, of the distribution that jax_ep's are; the block routes by itself.
Nothing is fetched. Only here are torch and transformers imported.
"""

from __future__ import annotations

import importlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

LEAST_MS, MOST_CALLS = 20.0, 100  # as in _gpu_measure.py
IMPLEMENTATIONS = ("grouped_mm", "eager")  # the first one that runs


def main(job: dict[str, Any]) -> None:
    try:
        torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    except ImportError as error:
        tell({"reason": f"not installed ({error.name})"})
        return
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "torch_cuda": torch.version.cuda}
    if job["device"] == "cuda" and not torch.cuda.is_available():
        tell({"versions": versions, "reason": "torch sees no CUDA device"})
        return
    tell({"versions": versions})
    for name, layer in job["layers"].items():
        tell({"layer": {name: time_layer(name, layer, job)}})


def tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def time_layer(name: str, layer: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """{what is timed: cell} with the first implementation that runs."""
    reason = ""
    for implementation in IMPLEMENTATIONS:
        try:
            return time_block(name, layer, job, implementation)
        except Exception as error:  # an older version, a card it has no kernel for, too little memory
            out = "out of memory" in str(error)
            reason = reason or ("out of memory" if out else f"failed: {type(error).__name__}: {str(error)[:160]}")
            if out:
                break
    return {timed: {"reason": reason} for timed in ("forward", "forward+backward")}


def make_block(name: str, layer: dict[str, Any], implementation: str) -> Any:
    """The block of the layer's family, on torch's default device in its default dtype."""
    shared = {"hidden_size": layer["hidden_size"], "num_experts_per_tok": layer["top_k"]}
    each = layer["intermediate_size"]
    if name.startswith("mixtral"):
        family, config_name, block_name = "mixtral", "MixtralConfig", "MixtralSparseMoeBlock"
        fields = {"intermediate_size": each, "num_local_experts": layer["num_experts"]}
    elif name.startswith("qwen3"):
        family, config_name, block_name = "qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock"
        fields = {"moe_intermediate_size": each, "num_experts": layer["num_experts"]}
        fields["norm_topk_prob"] = layer["normalize_weights"]
    else:
        family, config_name, block_name = "deepseek_v2", "DeepseekV2Config", "DeepseekV2Moe"
        fields = {"moe_intermediate_size": each, "n_routed_experts": layer["num_experts"], "topk_method": "greedy"}
        fields |= {"n_shared_experts": layer["num_shared_experts"], "routed_scaling_factor": 1.0}
        fields |= {"norm_topk_prob": layer["normalize_weights"], "n_group": 1, "topk_group": 1}
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    configuration = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    config = getattr(configuration, config_name)(**shared, **fields)
    config._experts_implementation = implementation
    return getattr(module, block_name)(config)


def time_block(name: str, layer: dict[str, Any], job: dict[str, Any], implementation: str) -> dict[str, Any]:
    torch: Any = importlib.import_module("torch")
    device, hidden = job["device"], layer["hidden_size"]
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            block = make_block(name, layer, implementation)
            x = torch.randn(1, job["tokens"], hidden, requires_grad=True)
            cotangent = torch.randn(1, job["tokens"], hidden)
            with torch.no_grad():
                for weight in block.parameters():
                    weight.normal_(0, weight.shape[-1] ** -0.5)
    finally:
        torch.set_default_dtype(before)
    wanted = [x, *block.parameters()]

    def result() -> Any:
        y = block(x)
        return y[0] if isinstance(y, tuple) else y  # older versions return the router's logits as well

    def forward() -> None:
        with torch.no_grad():
            result()

    def forward_and_backward() -> None:
        torch.autograd.grad(result(), wanted, cotangent)

    experts = (x.detach()[0].float() @ block.gate.weight.detach().float().T).topk(layer["top_k"]).indices
    counts = torch.bincount(experts.reshape(-1), minlength=layer["num_experts"]).float()
    figures: dict[str, Any] = {}
    for timed, run in (("forward", forward), ("forward+backward", forward_and_backward)):
        cell = time_calls(run, job, device)
        cell |= {"implementation": implementation, "busiest": float(counts.max() / counts.mean())}
        figures[timed] = cell
    return figures


def time_calls(run: Callable[[], None], job: dict[str, Any], device: str) -> dict[str, Any]:
    """Runs of several calls, as many as fill LEAST_MS, each from its start until the device is done."""
    torch: Any = importlib.import_module("torch")
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def timed(count: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(count):
            run()
        wait()
        return (time.perf_counter() - start) / count * 1e3

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    timed(1)
    calls = min(MOST_CALLS, max(1, math.ceil(LEAST_MS / timed(1))))
    for _ in range(job["warmup"]):
        timed(calls)
    runs = [timed(calls) for _ in range(job["runs"])]
    median = statistics.median(runs)
    cell = {"median_ms": median, "min_ms": min(runs), "max_ms": max(runs), "runs_ms": runs, "calls_a_run": calls}
    cell["spread"] = (max(runs) - min(runs)) / median
    if device == "cuda":
        cell["peak_bytes"] = torch.cuda.max_memory_allocated()
    return cell


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
