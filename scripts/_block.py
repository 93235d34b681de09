"""What compare.py --block runs: one block whose keys and values travel in different ways, all else alike.

Letters: B sequences of the whole batch, S positions, H hidden, Y layers.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.progress import Progress

from _bench import Difference, difference, time_in_turns, times_of
from _block_bytes import Chosen, Where, chosen_experts, count_at_expert, count_bytes
from _common import environment, load_config, load_model_config, override
from _text import RECIPE
from jax_ep.aot import count_collectives
from jax_ep.bench import Timing
from jax_ep.block.coship import parallel_block, sequential_stack
from jax_ep.block.ledger import add_figures
from jax_ep.block.ranges import reorder
from jax_ep.config import positive_int, refuse
from jax_ep.layer import resolve_transport
from jax_ep.model_config import ModelConfig
from jax_ep.models.decoder import init_decoder

BLOCKS = ("parallel", "sequential")
DIRECTIONS = ("forward", "backward")
ALONE = "one_device"


@dataclasses.dataclass(frozen=True)
class BlockWorkload:
    """A block on a batch, and how it is measured.

    Attributes:
      batch_size, sequence_length: B and S of the whole batch.
      model: whose layers they are.
      layers: Y of the sequential block's stack.
      expert_parallel, data_parallel, warmup, runs: as of WorkloadConfig.
    """

    batch_size: int
    sequence_length: int
    model: ModelConfig
    layers: int = 2
    expert_parallel: int = 8
    data_parallel: int = 1
    warmup: int = 2
    runs: int = 5

    def __post_init__(self) -> None:
        works = {
            "batch_size": 8,
            "sequence_length": 64,
            "layers": 2,
            "expert_parallel": 8,
            "data_parallel": 1,
            "runs": 5,
        }
        for field, value in works.items():
            positive_int(field, getattr(self, field), value)
        positive_int("warmup", self.warmup, 2, least=0)
        if self.batch_size % self.data_parallel:
            rule = f"must be a multiple of data_parallel={self.data_parallel}"
            refuse("batch_size", self.batch_size, rule, -(-self.batch_size // self.data_parallel) * self.data_parallel)

    @property
    def moe(self) -> Any:
        return self.model.moe


_OF_A_WHOLE_MODEL = (
    "vocab_size",
    "tie_embeddings",
    "embedding_multiplier",
    "logits_divisor",
    "max_position",
    "balance_loss_coef",
    "stop_tokens",
)


def block_workload(
    name: str, overrides: Sequence[str], elsewhere: Mapping[str, str], forms: Sequence[str]
) -> BlockWorkload:
    """The workload and the model of a config file as one, with overrides.

    Args:
      name: of the config file.
      overrides, elsewhere: as of `override`, for a BlockWorkload.
      forms: the blocks it is for.
    """
    w = load_config(name)
    mesh = {field: getattr(w, field) for field in ("expert_parallel", "data_parallel", "warmup", "runs")}
    workload = BlockWorkload(w.batch_size, w.sequence_length, load_model_config(name), **mesh)
    set_elsewhere = dict(elsewhere)
    set_elsewhere |= {f"model.{field}": "train.py: a block is layers alone" for field in _OF_A_WHOLE_MODEL}
    set_elsewhere |= {
        "model.kv_coship": "--split zigzag",
        "model.num_layers": "layers=2, of the sequential block's stack",
        "model.moe.comm.mode": "a layer of its own: a block's is packed",
    }
    if "sequential" not in forms:
        set_elsewhere |= dict.fromkeys(
            ("layers", "model.recompute"), "the sequential block: a parallel one is one layer"
        )
    done: BlockWorkload = override(workload, overrides, elsewhere=set_elsewhere)
    return done


def document_ids(batch: int, sequence: int, mean: int) -> np.ndarray:
    """[B, S] int32: documents of 1 to 2 * mean - 1 positions, seeded, packed one after another into each sequence."""
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 2 * mean, (batch, sequence))
    ends = np.cumsum(lengths, 1)  # [B, S]
    at = np.arange(sequence)
    return (at[None, :, None] >= ends[:, None]).sum(2, dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class BlockProgram:
    """The block with one way of keys and values, compiled, and what one run of it gave."""

    call: Callable[[], Any]
    compile_s: float
    collectives: dict[str, Any]
    temp_bytes: int | None
    stats: Any
    difference: Difference


class BlockBench:
    """One block on one mesh: builds, times and describes its programs."""

    def __init__(
        self,
        form: str,
        split: str,
        workload: BlockWorkload,
        mesh: Mesh,
        states: np.ndarray,
        segment_ids: np.ndarray | None,
        backward: bool,
        progress: Progress,
    ) -> None:
        """states [B, S, H] and segment_ids [B, S], in order of positions."""
        self.form, self.split, self.workload, self.mesh = form, split, workload, mesh
        self.segment_ids, self.backward, self.progress = segment_ids, backward, progress
        self.config = cut(workload.model, workload.layers if form == "sequential" else 1)
        self.replicas, self.ranks = mesh.devices.shape
        self.states = np.asarray(jnp.asarray(states, self.config.moe.dtype))
        cotangent = np.random.default_rng(1).standard_normal(states.shape)
        self.cotangent = np.asarray(jnp.asarray(cotangent, self.config.moe.dtype))
        layers = init_decoder(self.config, jax.random.key(0), ranks=self.ranks)["layers"]
        self.params = jax.tree.map(np.asarray, layers if form == "sequential" else _first(layers))

    def compile(self, ways: Sequence[str]) -> dict[str, BlockProgram]:
        """Compiles and runs each once, after the block on one device, which the differences are to."""
        task = self.progress.add_task("compiling", total=len(ways) + 1)
        alone = self._place(None)
        programs: dict[str, BlockProgram] = {}
        programs[ALONE], reference = self._program("coship", None, alone, [])
        self.progress.advance(task)
        placed = self._place(self.mesh)
        for kv in ways:
            programs[kv], _ = self._program(kv, self.mesh, placed, reference)
            self.progress.console.print(f"compiled {kv} in {programs[kv].compile_s:.1f} s", highlight=False)
            self.progress.advance(task)
        self.progress.remove_task(task)
        return programs

    def _function(self, kv: str, config: ModelConfig, mesh: Mesh | None) -> Callable[..., Any]:
        def block(params: Any, x: jax.Array, ids: jax.Array | None) -> Any:
            form = parallel_block if self.form == "parallel" else sequential_stack
            return form(params, x, config, mesh=mesh, segment_ids=ids, split=self.split, kv=kv)

        def forward(params: Any, x: jax.Array, ids: jax.Array | None, cotangent: jax.Array) -> Any:
            return block(params, x, ids)

        def forward_and_backward(params: Any, x: jax.Array, ids: jax.Array | None, cotangent: jax.Array) -> Any:
            y, pull, stats = jax.vjp(lambda p, a: block(p, a, ids), params, x, has_aux=True)
            return y, stats, pull(cotangent)

        return forward_and_backward if self.backward else forward

    def _program(
        self, kv: str, mesh: Mesh | None, arguments: Any, reference: list[np.ndarray]
    ) -> tuple[BlockProgram, list[np.ndarray]]:
        """A program and its results in order of positions, output first; without a reference they are their own."""
        start = time.perf_counter()
        compiled = jax.jit(self._function(kv, self.config, mesh)).lower(*arguments).compile()
        compile_s = time.perf_counter() - start
        y, stats, *gradients = jax.block_until_ready(compiled(*arguments))
        back = lambda a: self._reorder(a, inverse=True) if mesh is not None else np.asarray(a)
        results = [np.asarray(back(y), np.float32)]
        for d_params, d_x in gradients:
            results += [np.asarray(leaf, np.float32) for leaf in (back(d_x), *jax.tree.leaves(d_params))]
        memory = compiled.memory_analysis()
        program = BlockProgram(
            call=lambda: compiled(*arguments),
            compile_s=compile_s,
            collectives={} if mesh is None else self._collectives(kv, arguments),
            temp_bytes=None if memory is None else int(memory.temp_size_in_bytes),
            stats=jax.tree.map(np.asarray, stats),
            difference=difference(results, reference or results),
        )
        return program, results

    def _collectives(self, kv: str, arguments: Any) -> dict[str, Any]:
        """Of the program lowered for CUDA, where ragged is an operation, with room for any routing: further rounds are
        loops inside the loop over layers.
        """
        moe = self.config.moe
        roomy = dataclasses.replace(moe, comm=dataclasses.replace(moe.comm, recv_rows_factor=None))
        function = self._function(kv, dataclasses.replace(self.config, moe=roomy), self.mesh)
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments)
        text = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
        return collectives_by_purpose(text, looped=self.form == "sequential")

    def _reorder(self, a: Any, inverse: bool = False) -> np.ndarray:
        return np.asarray(reorder(jnp.asarray(np.asarray(a)), self.split, self.ranks, axis=1, inverse=inverse))

    def _place(self, mesh: Mesh | None) -> tuple[Any, ...]:
        """Parameters, x, segment ids and cotangent where the block wants them, so that no run pays for moving them."""
        ids = self.segment_ids
        if mesh is None:
            return jax.device_put((self.params, self.states, ids, self.cotangent), self.mesh.devices.flat[0])
        rows = NamedSharding(mesh, P("data", "expert"))
        params = jax.device_put(self.params, param_shardings(self.params, mesh, self.form == "sequential"))
        placed_ids = None if ids is None else jax.device_put(ids, NamedSharding(mesh, P("data")))
        x, cotangent = (jax.device_put(self._reorder(a), rows) for a in (self.states, self.cotangent))
        return params, x, placed_ids, cotangent

    @functools.cached_property
    def chosen(self) -> list[Chosen]:
        """What each layer's router chose, outside the timed part."""
        return chosen_experts(self.form, self.config, self.params, self.states, self.segment_ids)

    @property
    def where(self) -> Where:
        transport = resolve_transport(self.config.moe, self.mesh)
        return Where(self.form, self.split, self.replicas, self.ranks, transport)

    # What is written down.

    def record(self, ways: Sequence[str], source: str, config_name: str) -> dict[str, Any]:
        """Compiles and times the ways, and tells everything that block.json holds."""
        programs = self.compile(ways)
        timings = time_in_turns(self.workload, {kv: program.call for kv, program in programs.items()}, self.progress)
        layers = self.config.num_layers
        held = "routing, planning, packing, control, exchanges, experts, attention, statistics"
        if self.backward:
            held += ", and the gradients of inputs and parameters for a fixed random cotangent"
        record: dict[str, Any] = {
            "environment": environment(jax.device_count()),
            "workload": self._workload(source, config_name),
            "block": self.form,
            "split": self.split,
            "timed": "forward+backward" if self.backward else "forward",
            "timed_region": f"one compiled call of {layers} layer{'s' if layers > 1 else ''}, blocked on: {held}",
            "ways": {kv: self._describe(kv, programs[kv], timings[kv]) for kv in ways},
            ALONE: self._times(timings[ALONE]) | {"temp_bytes": programs[ALONE].temp_bytes},
            "at_expert_bytes": count_at_expert(self.where, self.config, self.chosen[0], self.segment_ids),
        }
        record["notes"] = self._notes(record, programs)
        return record

    def _describe(self, kv: str, program: BlockProgram, timing: Timing) -> dict[str, Any]:
        ledger = count_bytes(self.where, kv, self.config, self.chosen, self.segment_ids)
        timed = [ledger["bytes"][way] for way in (DIRECTIONS if self.backward else DIRECTIONS[:1])]
        return {
            **self._times(timing),
            "compile_s": program.compile_s,
            "max_abs_diff": program.difference.largest,
            "relative_difference": program.difference.relative,
            "relative_difference_gradients": program.difference.relative_gradients,
            "collectives": program.collectives,
            "transport": ledger["transport"],
            "rounds": int(np.max(program.stats.rounds)),
            "moved": add_figures(timed),
            "bytes": ledger["bytes"],
            "layer": ledger["layer"],
            "temp_bytes": program.temp_bytes,
        }

    def _times(self, timing: Timing) -> dict[str, Any]:
        return times_of(timing, self.states.shape[0] * self.states.shape[1])

    def _workload(self, source: str, config_name: str) -> dict[str, Any]:
        w, c = self.workload, self.config
        segments = None
        if self.segment_ids is not None:
            segments = int((np.diff(self.segment_ids, axis=1) != 0).sum() + len(self.segment_ids))
        return {
            "config": config_name,
            "batch_size": w.batch_size,
            "sequence_length": w.sequence_length,
            "layers": c.num_layers,
            "hidden_size": c.moe.hidden_size,
            "intermediate_size": c.moe.intermediate_size,
            "num_experts": c.moe.num_experts,
            "top_k": c.moe.router.top_k,
            "num_heads": c.num_heads,
            "num_kv_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
            "window": c.window,
            "window_layers": c.window_layers,
            "documents": segments,
            "dtype": c.moe.dtype,
            "expert_parallel": w.expert_parallel,
            "data_parallel": w.data_parallel,
            "warmup": w.warmup,
            "runs": w.runs,
            "packed": dataclasses.asdict(c.moe.comm),
            "source": f"{source}: {w.batch_size} sequences of {w.sequence_length} bytes at even distances; {RECIPE}",
        }

    def _notes(self, record: dict[str, Any], programs: Mapping[str, BlockProgram]) -> list[str]:
        notes = []
        if jax.default_backend() == "cpu":
            notes.append(
                "Simulated devices share this machine's cores and memory: times rank the work each way "
                "does, not links. On CPU, ragged crosses by all_gather."
            )
        if self.segment_ids is not None:
            notes.append("control holds the segment ids, gathered once before the call and not in its time.")
        if self.form == "sequential" and self.where.transport == "all_to_all":
            notes.append("wire holds the first layer's combine, which brings no rows home.")
        if self.config.moe.comm.wire_dtype is not None and self.ranks > 1:
            notes.append("wire_dtype rounds rows on their way to the experts: differences show that rounding, too.")
        rounds = max(m["rounds"] for m in record["ways"].values())
        if rounds > 1:
            notes.append(f"{rounds} rounds: each further one adds a dispatch and a combine for its microbatch.")
        counts = np.stack([np.bincount(e.reshape(-1), minlength=self.config.moe.num_experts) for e, _ in self.chosen])
        ran = {kv: np.asarray(p.stats.counts).reshape(counts.shape) for kv, p in programs.items()}
        if other := [kv for kv, of in ran.items() if not np.array_equal(of, counts)]:
            notes.append(
                f"the routing that bytes are counted from is not to the token the one that ran in {', '.join(other)}: "
                "the router rounded otherwise."
            )
        return notes


def cut(model: ModelConfig, layers: int) -> ModelConfig:
    """The model's first layers, and nothing around them."""
    windowed = ((model.window_layers or (model.window is not None,)) * layers)[:layers]
    alike = len(set(windowed)) == 1
    return dataclasses.replace(
        model,
        num_layers=layers,
        window=model.window if any(windowed) else None,
        window_layers=None if alike else windowed,
        vocab_size=2,
        stop_tokens=(),
        kv_coship=None,
    )


def param_shardings(params: Any, mesh: Mesh, stacked: bool) -> Any:
    """Of a layer's parameters, or of a stack's: experts over the expert axis, the rest whole."""
    whole, split = (NamedSharding(mesh, spec) for spec in (P(), P(*(None,) * stacked, "expert")))
    shardings = jax.tree.map(lambda _: whole, params)
    shardings["moe"]["experts"] = jax.tree.map(lambda _: split, params["moe"]["experts"])
    return shardings


def _first(layers: Any) -> Any:
    return jax.tree.map(operator.itemgetter(0), layers)


_OF_INTEGERS = re.compile(r'"stablehlo\.all_gather"(?=\(.*\(tensor<[^>]*i32>)')


def collectives_by_purpose(text: str, looped: bool) -> dict[str, Any]:
    """Collectives of a lowered block: payload, control (counts are gathered as integers) and sums over ranks.

    looped: whether layers are a loop, of which one turn is a layer.

    Returns:
      {"layer": {"payload", "control", "sums"}, "stack": the same of what stands outside the loop,
       "kinds": payload of a layer by kind}.
    """
    every, others = count_collectives(text), count_collectives(_OF_INTEGERS.sub('"counts"', text))
    here, outside = ("loop", "straight") if looped else ("straight", "loop")
    found: dict[str, Any] = {}
    for which, where in (("layer", here), ("stack", outside)):
        count = {kind: getattr(c, where) for kind, c in others.items() if kind != "all_reduce"}
        sums = getattr(every["all_reduce"], where)
        control = getattr(every["all_gather"], where) - count["all_gather"]
        found[which] = {"payload": sum(count.values()), "control": control, "sums": sums}
        if which == "layer":
            found["kinds"] = {kind: n for kind, n in count.items() if n}
    return found
