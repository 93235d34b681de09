"""What overlap_ab.py runs: one layer or one training step, once for each side, compiled ahead and called in turn.

Letters: T tokens of the whole batch, H hidden, K top_k, E experts, A microbatches, B sequences of a step, S positions.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from _common import UsageError
from jax_ep import MoEConfig, moe, route
from jax_ep.aot import count_collectives
from jax_ep.bench.intervals import DeviceTrace, read_trace
from jax_ep.config import ConfigError, WorkloadConfig
from jax_ep.layer import init_params, param_shardings
from jax_ep.routing import Routing, balanced_routing, router_logits
from jax_ep.training.config import TrainConfig
from jax_ep.training.data import Windows, batch
from jax_ep.training.flops import model_flops
from jax_ep.training.step import batch_sharding, init_state, make_step, state_shapes

ROUTINGS = ("balanced", "recorded")


@dataclasses.dataclass
class Side:
    """One side, traced: not compiled yet, so that a config which is refused is refused before anything runs.

    Attributes:
      label: what it is called.
      lowered: its program.
      begin: gives a function of the compiled program: one step, whose results are blocked on.
      compiled, step: once compiled.
      compile_s: how long that took.
      told: of every step in order, "loss", and "skipped" and "counts" (of experts [Y, E]) where the step has them.
      gradients: of the first step; None where the step does not give them.
    """

    label: str
    lowered: Any
    begin: Callable[[Side], Callable[[], Any]]
    compiled: Any = None
    step: Any = None
    compile_s: float = 0.0
    told: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    gradients: Any = None

    def compile(self) -> None:
        start = time.perf_counter()
        self.compiled = self.lowered.compile()
        self.compile_s = time.perf_counter() - start
        self.step = self.begin(self)

    def all_told(self, name: str) -> list[Any]:
        """One figure of every step, read from the devices."""
        return jax.device_get([told[name] for told in self.told if name in told])

    def memory(self) -> dict[str, int | None]:
        """Bytes a device needs for the program, as its compiler counts them."""
        found = self.compiled.memory_analysis()
        sizes = {"temp": "temp_size_in_bytes", "argument": "argument_size_in_bytes", "output": "output_size_in_bytes"}
        return {f"{name}_bytes": None if found is None else int(getattr(found, of)) for name, of in sizes.items()}

    def collectives(self) -> dict[str, Any]:
        found = count_collectives(self.compiled.as_text())
        return {kind: count._asdict() for kind, count in found.items() if any(count)}


# One layer.


def layer_sides(
    labels: Sequence[str], workloads: Sequence[WorkloadConfig], mesh: Mesh, states: np.ndarray, routing: str
) -> list[Side]:
    """Forward and backward of mean(y ** 2), with gradients of x and the experts, for one forced routing.

    Args:
      labels, workloads: of the two sides.
      mesh: of both.
      states: hidden states [T, H].
      routing: "balanced", or "recorded": what the first side's router chose for these states, once.
    """
    first = workloads[0].moe
    make = lambda config: init_params(config, jax.random.key(0), ranks=workloads[0].expert_parallel)
    _same_shapes(labels, [jax.eval_shape(lambda config=w.moe: make(config)) for w in workloads])
    made = make(first)
    forced = forced_routing(made["router"], jnp.asarray(states), first, routing)
    rows = NamedSharding(mesh, P(("data", "expert")) if len(states) % mesh.size == 0 else P())
    forced = jax.device_put(forced, rows)
    without_router = lambda tree: {name: leaf for name, leaf in tree.items() if name != "router"}
    sides = []
    for label, workload in zip(labels, workloads):
        config = workload.moe
        x = jax.device_put(jnp.asarray(states, config.dtype), rows)
        params = jax.device_put(without_router(made), without_router(param_shardings(config, mesh)))
        sides.append(_layer_side(label, config, mesh, params, x, forced))
    return sides


def _layer_side(label: str, config: MoEConfig, mesh: Mesh, params: Any, x: jax.Array, routing: Routing) -> Side:
    def step(params: Any, x: jax.Array, routing: Routing) -> Any:
        def loss(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            y, stats = moe(params, x, config, mesh=mesh, routing=routing)
            return jnp.square(y.astype(jnp.float32)).mean(), stats.dropped_rows

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    def begin(side: Side) -> Callable[[], Any]:
        def call() -> Any:
            (value, dropped), gradients = side.compiled(params, x, routing)
            if not side.told:
                side.gradients = gradients
            side.told.append({"loss": value, "dropped_rows": dropped})
            return value, gradients

        return call

    return Side(label, jax.jit(step).trace(params, x, routing).lower(), begin)


def forced_routing(router: dict[str, jax.Array], states: jax.Array, config: MoEConfig, kind: str) -> Routing:
    """Experts [T, K] and weights [T, K] that both sides are given."""
    if kind == "balanced":
        return balanced_routing(len(states), config.num_experts, config.router.top_k)
    logits = router_logits(states, router["kernel"], router.get("bias"))
    chosen = route(logits, config.router, selection_bias=router.get("selection_bias"))
    return Routing(chosen.experts, chosen.weights)


def layer_flops(config: MoEConfig, tokens: int) -> int:
    """Of a layer's forward and backward over all devices, without router: as `jax_ep.training.flops` counts."""
    matrices, h = (3 if config.gated else 2), config.hidden_size
    weights = config.router.top_k * matrices * h * config.intermediate_size
    weights += matrices * h * config.shared_width + h * config.shared_gate
    return 3 * 2 * tokens * weights


# One training step.


def train_sides(
    labels: Sequence[str], configs: Sequence[TrainConfig], mesh: Mesh, windows: Windows, steps: int
) -> list[Side]:
    """Steps of a run from its beginning: step i of both sides sees the same windows.

    Args:
      labels, configs: of the two sides.
      mesh: of both.
      windows: the text.
      steps: how many will be called.
    """
    _same_shapes(labels, [state_shapes(config, mesh).params for config in configs])
    return [_train_side(label, config, mesh, windows, steps) for label, config in zip(labels, configs)]


def _train_side(label: str, config: TrainConfig, mesh: Mesh, windows: Windows, steps: int) -> Side:
    lead = (config.accumulation, config.batch_size // config.accumulation, config.sequence_length)
    ids = jax.ShapeDtypeStruct(lead, jnp.int32)
    step: Any = make_step(config, mesh)
    lowered = step.trace(state_shapes(config, mesh), ids).lower()

    def begin(side: Side) -> Callable[[], Any]:
        state, lies = init_state(config, mesh), batch_sharding(config, mesh)
        batches = [batch(windows, at * config.batch_size, config, lies) for at in range(steps)]

        def call() -> Any:
            nonlocal state
            state, metrics = side.compiled(state, batches[len(side.told)])
            told = {"loss": metrics.loss, "gradient_norm": metrics.grad_norm, "skipped": metrics.skipped}
            side.told.append(told | {"counts": metrics.stats.counts, "dropped_rows": metrics.stats.dropped_rows.sum()})
            return state, metrics

        return call

    return Side(label, lowered, begin)


def train_flops(config: TrainConfig) -> int:
    return model_flops(config.model, config.batch_size, config.sequence_length)


# Both.


def _same_shapes(labels: Sequence[str], trees: Sequence[Any]) -> None:
    a, b = (jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in trees)
    if a != b:
        rule = "have parameters of other shapes or dtypes, and both runs must begin with the same"
        raise UsageError(f"{labels[0]} and {labels[1]} {rule}; dedup=False:True works")


def gradient_difference(sides: Sequence[Side]) -> float | None:
    """Of the first step: the Frobenius norm of the difference over that of the first side's gradients, all together.
    They are let go. None: the step keeps its gradients.
    """
    a, b = sides
    if a.gradients is None:
        return None
    off, whole = map(float, _norms(a.gradients, b.gradients))
    a.gradients = b.gradients = None
    return off / whole if whole else off


def norm_difference(sides: Sequence[Side]) -> float:
    """The largest relative difference of the norms of gradients, over all steps."""
    norms = zip(*(side.all_told("gradient_norm") for side in sides), strict=True)
    apart = [0.0 if x == y else abs(float(y) - float(x)) / abs(float(x)) if x else math.inf for x, y in norms]
    return math.nan if any(map(math.isnan, apart)) else max(apart)


@jax.jit
def _norms(a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
    wide = lambda leaf: leaf.astype(jnp.float32)
    size = lambda tree: jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(tree)))
    return size(jax.tree.map(lambda x, y: wide(x) - wide(y), a, b)), size(jax.tree.map(wide, a))


def profile(side: Side) -> tuple[dict[str, DeviceTrace] | None, bytes, str]:
    """One more step, untimed, under JAX's profiler: what every device did, the trace, and why there is nothing."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(side.step())
        raw = next((file.read_bytes() for file in Path(folder).rglob("*.xplane.pb")), b"")
        try:
            return read_trace(folder, side.compiled.as_text()), raw, ""
        except ConfigError as error:
            return None, raw, str(error)


def over_devices(devices: dict[str, DeviceTrace]) -> dict[str, Any]:
    """Means over devices of their unions, in milliseconds, and fractions of all devices' communication."""
    traces = list(devices.values())
    total = {name: sum(getattr(t, f"{name}_ns") for t in traces) for name in _FIGURES}
    means = {f"{name}_ms": total[name] / len(traces) / 1e6 for name in _FIGURES}
    fraction = lambda of: total["hidden"] / total[of] if total[of] else None
    return means | {"hidden_fraction": fraction("communication"), "hidden_of_hideable": fraction("hideable")}


_FIGURES = ("communication", "computation", "hidden", "hideable", "span")
