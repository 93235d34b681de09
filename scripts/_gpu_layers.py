"""The whole layer on one device at published shapes, and the same block in torch. For bench_gpu.py.

Letters: T tokens, K top_k, E experts, H hidden, I intermediate, W width of the shared experts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jax
import numpy as np

from _common import load_config
from _gpu_measure import OUT_OF_TIME, Cell, How, forward_and_backward, installed, measure
from _gpu_products import TIMED
from jax_ep import MoEConfig, moe
from jax_ep.layer import init_params
from jax_ep.routing import route, router_logits

LAYERS = ("mixtral_8x7b", "qwen3_30b_a3b", "deepseek_moe_16b")
TOKENS, TINY_TOKENS = 4096, 48
PEERS = ("ragged_dot", "tokamax", "torch")
WORKER = Path(__file__).resolve().parent / "_gpu_torch.py"
TORCH_SECONDS = 75.0


def layer_config(name: str, rehearse: bool) -> MoEConfig:
    """The layer of configs/NAME.py; a small one of its kind for a rehearsal."""
    config = load_config(name).moe
    if not rehearse:
        return config
    return dataclasses.replace(
        config, hidden_size=32, intermediate_size=16, num_experts=min(config.num_experts, 2 * config.router.top_k)
    )


def layer_flops(config: MoEConfig, tokens: int) -> int:
    """Of a forward: router, experts, shared experts; products only."""
    matrices = 3 if config.gated else 2
    routed = config.router.top_k * config.intermediate_size
    return 2 * tokens * config.hidden_size * (config.num_experts + matrices * (routed + config.shared_width))


def layer_section(name: str, how: How) -> dict[str, Any]:
    """One layer's figures: its shape, the load of its busiest expert, and {what is timed: {contestant: cell}}."""
    config, tokens = layer_config(name, how.rehearse), TINY_TOKENS if how.rehearse else TOKENS
    keys = jax.random.split(jax.random.key(0), 3)
    with jax.default_device(how.device):
        params = jax.jit(lambda key: init_params(config, key))(keys[0])
        x, cotangent = (jax.random.normal(key, (tokens, config.hidden_size), config.dtype) for key in keys[1:])
    flops = layer_flops(config, tokens)
    contestants = {"ours": config, "ragged_dot": dataclasses.replace(config, grouped_backend="ragged_dot")}
    if installed("tokamax"):
        contestants["tokamax"] = dataclasses.replace(config, grouped_backend="tokamax")
    figures: dict[str, dict[str, Cell]] = {}
    for timed, weight in zip(TIMED, (1, 3)):
        functions: dict[str, Any] = {}
        for who, one in contestants.items():
            run = lambda params, x, one=one: moe(params, x, one)[0]
            backward = timed != "forward"
            functions[who] = (forward_and_backward(run), (cotangent, (params, x))) if backward else (run, (params, x))
        figures[timed] = measure(f"{name}, {timed}", functions, flops * weight, how)
    shape = {"T": tokens, "H": config.hidden_size, "I": config.intermediate_size, "E": config.num_experts}
    shape |= {"K": config.router.top_k, "W": config.shared_width}
    busiest = _busiest(params["router"]["kernel"], x, config)
    return {"shape": shape, "dtype": config.dtype, "busiest": busiest, "flops_forward": flops, "figures": figures}


def _busiest(kernel: jax.Array, x: jax.Array, config: MoEConfig) -> float:
    """Rows of the busiest expert over the mean, as the random router chooses."""
    experts = route(router_logits(x, kernel), config.router).experts
    counts = np.bincount(np.asarray(experts).reshape(-1), minlength=config.num_experts)
    return float(counts.max() / counts.mean())


def torch_peer(names: list[str], interpreter: str, how: How) -> dict[str, Any]:
    """What torch's grouped experts in the blocks of HF transformers take, from a process of its own.

    Returns:
      "versions", and under "layers" {layer: {what is timed: cell}}; a "reason" where there is no torch.
    """
    seconds = min(TORCH_SECONDS, how.budget.left())
    if seconds <= 0:
        how.budget.skipped.append("torch")
        return {"reason": OUT_OF_TIME, "layers": {}}
    tokens = TINY_TOKENS if how.rehearse else TOKENS
    job = {
        "device": "cuda" if how.device.platform == "gpu" else "cpu",
        "tokens": tokens,
        "warmup": how.warmup,
        "runs": how.runs,
        "layers": {name: _fields(layer_config(name, how.rehearse)) for name in names},
    }
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    answer: dict[str, Any] = {"layers": {}}
    try:
        done = subprocess.run(
            [interpreter, str(WORKER), json.dumps(job)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        output, ended = done.stdout, f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1][:160]}"
        ended = ended if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        ended = f"stopped after {seconds:.0f} s"
    except OSError as error:
        output, ended = "", f"failed: {interpreter}: {error.strerror}"
    for line in output.splitlines():
        if line.startswith("{"):
            told = json.loads(line)
            answer["layers"] |= told.pop("layer", {})
            answer |= told
    if ended:
        answer["reason"] = ended
    for name in names:
        flops = layer_flops(layer_config(name, how.rehearse), tokens)
        for timed, weight in zip(TIMED, (1, 3)):
            cell = answer["layers"].setdefault(name, {}).setdefault(timed, {})
            if "median_ms" in cell:
                cell["tflops"] = flops * weight / cell["median_ms"] / 1e9
            else:
                cell.setdefault("reason", answer.get("reason", "not measured"))
    return answer


def _fields(config: MoEConfig) -> dict[str, Any]:
    """What the worker needs to know of a layer."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_experts": config.num_experts,
        "top_k": config.router.top_k,
        "num_shared_experts": config.num_shared_experts,
        "normalize_weights": config.router.normalize_weights,
    }
