"""One workload on one mesh: layers compiled, timed, and described in bytes, collectives and differences.

Letters: D data-parallel replicas, R ranks, T tokens of the whole batch, K top_k, E experts, H hidden.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.progress import Progress

from _common import environment
from _text import RECIPE
from jax_ep import MoEConfig, byte_ledger, count_routing, moe, route
from jax_ep import plan as planning
from jax_ep.aot import CollectiveCount, count_collectives
from jax_ep.bench import Timing, compare_runs
from jax_ep.config import CommConfig, WorkloadConfig
from jax_ep.layer import init_params, param_shardings, resolve_transport
from jax_ep.routing import router_logits

ONE_DEVICE = "grouped_one_device"


def mode_config(moe_config: MoEConfig, mode: str) -> MoEConfig:
    """The layer with its own comm for packed, and for another mode what that mode reads of it."""
    comm = moe_config.comm
    if mode == "padded":
        comm = CommConfig(mode=mode, capacity_factor=comm.capacity_factor)
    elif mode == "packed":
        comm = dataclasses.replace(comm, mode=mode)
    else:
        comm = CommConfig(mode=mode)
    return dataclasses.replace(moe_config, comm=comm)


class Difference(NamedTuple):
    """Of one run's results to those of dense, same weights and inputs.

    Attributes:
      largest: of outputs (and gradients), absolute.
      relative: Frobenius norm of the outputs' difference over that of dense's outputs.
      relative_gradients: the same of all gradients together; None where there are none.
    """

    largest: float
    relative: float
    relative_gradients: float | None


@dataclasses.dataclass(frozen=True)
class Program:
    """One layer, compiled, and what one run of it gave."""

    config: MoEConfig
    call: Callable[[], Any]
    compile_s: float
    collectives: dict[str, CollectiveCount]
    temp_bytes: int | None
    stats: Any
    difference: Difference


class Bench:
    """One workload on one mesh: builds, times and describes its programs."""

    def __init__(
        self, workload: WorkloadConfig, mesh: Mesh, states: np.ndarray, backward: bool, progress: Progress
    ) -> None:
        self.workload, self.mesh, self.backward, self.progress = workload, mesh, backward, progress
        self.config = mode_config(workload.moe, "packed")
        self.states = np.asarray(jnp.asarray(states, self.config.dtype))  # [T, H]
        cotangent = np.random.default_rng(1).standard_normal(states.shape)
        self.cotangent = np.asarray(jnp.asarray(cotangent, self.config.dtype))  # [T, H]
        params = init_params(self.config, jax.random.key(0), ranks=workload.expert_parallel)
        self.params = jax.tree.map(np.asarray, params)

    def compile(self, layers: Mapping[str, MoEConfig]) -> dict[str, Program]:
        """Compiles and runs each once; dense is always among them, and first, for the differences.

        Layers of one mode share their arguments; the one called ONE_DEVICE has no mesh.
        """
        layers = {"dense": mode_config(self.config, "dense"), **layers}
        task = self.progress.add_task("compiling", total=len(layers))
        programs: dict[str, Program] = {}
        placed: dict[tuple[str, bool], Any] = {}
        reference: list[np.ndarray] = []
        for name, config in layers.items():
            mesh = None if name == ONE_DEVICE else self.mesh
            lies = (config.comm.mode, mesh is None)
            if lies not in placed:
                placed[lies] = self._place(config, mesh)
            programs[name], results = self._program(config, mesh, placed[lies], reference)
            reference = reference or results
            self.progress.console.print(f"compiled {name} in {programs[name].compile_s:.1f} s", highlight=False)
            self.progress.advance(task)
        self.progress.remove_task(task)
        return programs

    def _program(
        self, config: MoEConfig, mesh: Mesh | None, arguments: Any, reference: list[np.ndarray]
    ) -> tuple[Program, list[np.ndarray]]:
        """A program and its results, output first; without a reference they are their own."""

        def forward(params: Any, x: jax.Array, cotangent: jax.Array) -> Any:
            return moe(params, x, config, mesh=mesh)

        def forward_and_backward(params: Any, x: jax.Array, cotangent: jax.Array) -> Any:
            y, pull, stats = jax.vjp(lambda p, a: moe(p, a, config, mesh=mesh), params, x, has_aux=True)
            return y, stats, pull(cotangent)

        start = time.perf_counter()
        lowered = jax.jit(forward_and_backward if self.backward else forward).trace(*arguments).lower()
        compiled = lowered.compile()
        compile_s = time.perf_counter() - start
        y, stats, *gradients = jax.block_until_ready(compiled(*arguments))
        results = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves((y, gradients))]
        memory = compiled.memory_analysis()
        program = Program(
            config=config,
            call=lambda: compiled(*arguments),
            compile_s=compile_s,
            collectives=count_collectives(lowered.as_text()),
            temp_bytes=None if memory is None else int(memory.temp_size_in_bytes),
            stats=jax.tree.map(np.asarray, stats),
            difference=difference(results, reference or results),
        )
        return program, results

    def _place(self, config: MoEConfig, mesh: Mesh | None) -> tuple[Any, jax.Array, jax.Array]:
        """Parameters, hidden states and cotangent where the layer wants them, so that no run pays for moving them."""
        if mesh is None:
            device = self.mesh.devices.flat[0]
            experts = {name: leaf[: config.num_experts] for name, leaf in self.params["experts"].items()}
            router = {name: leaf[..., : config.num_experts] for name, leaf in self.params["router"].items()}
            params = {**self.params, "experts": experts, "router": router}
            return jax.device_put((params, self.states, self.cotangent), device)
        divides = self.states.shape[0] % mesh.size == 0
        rows = NamedSharding(mesh, P(("data", "expert")) if divides else P())
        params = jax.device_put(self.params, param_shardings(config, mesh))
        return params, jax.device_put(self.states, rows), jax.device_put(self.cotangent, rows)

    def time(self, programs: Mapping[str, Program]) -> dict[str, Timing]:
        return time_in_turns(self.workload, {name: program.call for name, program in programs.items()}, self.progress)

    # What moves.

    @functools.cached_property
    def experts(self) -> np.ndarray:
        """[T, K] ids: the layer's routing once more, outside the timed part, nothing dropped."""
        router = {name: jnp.asarray(leaf) for name, leaf in self.params["router"].items()}
        logits = router_logits(jnp.asarray(self.states), router["kernel"], router.get("bias"))
        return np.asarray(route(logits, self.config.router, selection_bias=router.get("selection_bias")).experts)

    def tokens_per_expert(self) -> np.ndarray:
        return np.bincount(self.experts.reshape(-1), minlength=self.config.num_experts)[: self.config.num_experts]

    def ledger(self, config: MoEConfig) -> dict[str, Any]:
        """The bytes of a layer with this routing, less what its capacity_factor drops."""
        replicas, ranks = self.mesh.devices.shape
        tokens, e = self.states.shape[0], config.num_experts
        share = -(-tokens // (replicas * ranks))
        experts = self.experts
        if (factor := config.comm.capacity_factor) is not None:
            parts = []
            for start in range(0, tokens, ranks * share):  # a replica's ranks share each expert's capacity
                part = experts[start : start + ranks * share]
                most = planning.capacity(factor, len(part), config.router.top_k, e)
                kept = planning.kept_under_capacity(jnp.asarray(part), e, ahead=0, capacity=most)
                parts.append(np.where(kept, part, -1))
            experts = np.concatenate(parts)
        counts = count_routing(experts, config, ranks=ranks, replicas=replicas)
        transport = resolve_transport(config, self.mesh)
        return byte_ledger(config, counts, tokens_per_rank=share, total_tokens=tokens, transport=transport)

    # What is written down.

    def describe(self, program: Program, timing: Timing) -> dict[str, Any]:
        ledger = self.ledger(program.config)
        moved = dict(ledger["forward"])
        if self.backward:
            moved = {kind: moved[kind] + ledger["backward"][kind] for kind in moved}
        return {
            **self.times(timing),
            "compile_s": program.compile_s,
            "max_abs_diff": program.difference.largest,
            "relative_difference": program.difference.relative,
            "relative_difference_gradients": program.difference.relative_gradients,
            "transport": ledger["transport"],
            "rounds": int(program.stats.rounds),
            "dropped_rows": int(program.stats.dropped_rows),
            "bytes": moved,
            "shard_ratio": ledger["shard_ratio"],
            "collectives": {kind: count._asdict() for kind, count in program.collectives.items() if any(count)},
            "temp_bytes": program.temp_bytes,
        }

    def times(self, timing: Timing) -> dict[str, Any]:
        return times_of(timing, self.states.shape[0])

    def setting(self, source: str, config_name: str) -> dict[str, Any]:
        """What a record says before its figures."""
        held = "routing, planning, packing, control, exchanges, experts, combine, statistics"
        if self.backward:
            held += ", and the gradients of inputs, router and experts for a fixed random cotangent"
        return {
            "environment": environment(jax.device_count()),
            "workload": self._workload(source, config_name),
            "timed": "forward+backward" if self.backward else "forward",
            "timed_region": f"one compiled call of the whole layer, blocked on: {held}",
        }

    def _workload(self, source: str, config_name: str) -> dict[str, Any]:
        w, c = self.workload, self.config
        per_expert = self.tokens_per_expert()
        busiest, idlest = (float(extreme / per_expert.mean()) for extreme in (per_expert.max(), per_expert.min()))
        spread = f"the busiest expert has {busiest:.2f} times the mean load, the idlest {idlest:.2f}"
        return {
            "config": config_name,
            "batch_size": w.batch_size,
            "sequence_length": w.sequence_length,
            "tokens": self.states.shape[0],
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_experts": c.num_experts,
            "top_k": c.router.top_k,
            "activation": c.activation,
            "dtype": c.dtype,
            "param_dtype": c.param_dtype,
            "expert_parallel": w.expert_parallel,
            "data_parallel": w.data_parallel,
            "warmup": w.warmup,
            "runs": w.runs,
            "packed": dataclasses.asdict(c.comm),
            "source": f"{source}: {w.batch_size} sequences of {w.sequence_length} bytes at even distances; {RECIPE}",
            "routing": f"the layer's own router with random weights; {spread}",
            "tokens_per_expert": per_expert.tolist(),
        }

    def notes(self, programs: Mapping[str, Program], names: Sequence[str], what: str) -> list[str]:
        """What a reader of the figures of `names` should know; `what` they are, in the plural."""
        notes = []
        if jax.default_backend() == "cpu":
            notes.append(
                f"{self.mesh.size} simulated devices share this machine's cores and memory: times rank the work each "
                "path does, not links. Bytes and rounds are those of the transport in the JSON; on CPU, ragged "
                "crosses by all_gather."
            )
        if self.config.dtype == "float32":
            notes.append("float32: every byte figure is twice that of 2-byte elements, which published figures use.")
        if self.backward:
            notes.append(
                "bytes are forward plus backward, without the gradient reductions of parameters that every rank holds; "
                "reference_bytes are of one forward."
            )
        if len(names) > 1:
            notes.append(f"{what} take turns, run by run, every round in another order.")
        dropped = [name for name in names if int(programs[name].stats.dropped_rows)]
        if dropped:
            notes.append(f"capacity_factor drops rows in {', '.join(dropped)}: max_abs_diff shows that, too.")
        rounded = [name for name in names if programs[name].config.comm.wire_dtype is not None]
        if rounded and self.workload.expert_parallel > 1:
            notes.append(
                f"wire_dtype rounds rows on their way to the experts in {', '.join(rounded)}: differences to dense "
                "show that rounding, not only another order of sums."
            )
        per_expert = self.tokens_per_expert()
        other = [name for name in names if not np.array_equal(programs[name].stats.counts, per_expert)]
        if other:
            notes.append(
                f"the routing that bytes are counted from is not to the token the one that ran in {', '.join(other)}: "
                "the router rounded otherwise."
            )
        return notes


def time_in_turns(workload: Any, calls: Mapping[str, Callable[[], Any]], progress: Progress) -> dict[str, Timing]:
    """Interleaved runs, every round in another order; workload has their number, and that of untimed ones."""
    warmup, runs = workload.warmup, workload.runs
    task = progress.add_task("running", total=(warmup + runs) * len(calls))
    return compare_runs(calls, warmup=warmup, runs=runs, on_run=lambda name: progress.advance(task))


def times_of(timing: Timing, tokens: int) -> dict[str, Any]:
    """What is written down of the runs of a call on so many tokens."""
    return {
        "median_ms": timing.median_ms,
        "min_ms": timing.min_ms,
        "max_ms": timing.max_ms,
        "runs_ms": list(timing.runs_ms),
        "tokens_per_s": tokens / timing.median_ms * 1e3,
    }


def difference(results: list[np.ndarray], reference: list[np.ndarray]) -> Difference:
    """Empty experts that pad one of two programs have no counterpart in the other."""
    shared = lambda a, b: tuple(slice(min(m, n)) for m, n in zip(a.shape, b.shape, strict=True))
    pairs = [(a[shared(a, b)], b[shared(a, b)]) for a, b in zip(results, reference, strict=True)]
    largest = max(float(np.abs(a - b).max()) for a, b in pairs)
    return Difference(largest, _relative(pairs[:1]), _relative(pairs[1:]) if pairs[1:] else None)


def _relative(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
    off = sum(float(np.square(a - b).sum(dtype=np.float64)) for a, b in pairs)
    whole = sum(float(np.square(b).sum(dtype=np.float64)) for _, b in pairs)
    return (off / whole) ** 0.5 if whole else 0.0
