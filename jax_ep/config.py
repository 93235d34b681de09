"""Frozen configurations, validated when built. Nothing here touches a device.

Every refusal is a `ConfigError` that names the field, its value, the rule and a value that works.
"""

from __future__ import annotations

import dataclasses
import numbers
import sys
from typing import Any, NoReturn

import jax.numpy as jnp

MODES = ("dense", "allgather", "padded", "packed")
TRANSPORTS = ("auto", "ragged", "all_to_all", "all_gather")
ACTIVATIONS = ("swiglu", "gelu", "gpt_oss")
DTYPES = ("float32", "bfloat16", "float16")
WIRE_DTYPES = ("int8", "float8_e4m3fn")
MESSAGES = ("rank", "expert")
GROUPED_BACKENDS = ("auto", "ragged_dot", "tokamax")


class ConfigError(ValueError):
    """A configuration that cannot mean anything, or not yet."""


def refuse(field: str, value: Any, rule: str, works: Any) -> NoReturn:
    """Raises the one form of error message this library uses."""
    raise ConfigError(f"{field}={value!r}: {rule}; {field}={works!r} works")


def one_of(field: str, value: Any, allowed: tuple[str, ...], works: str | None = None) -> None:
    if value not in allowed:
        refuse(field, value, f"must be one of {', '.join(allowed)}", works or allowed[-1])


def positive_int(field: str, value: Any, works: int, least: int = 1) -> None:
    """Refuses what is no integer, Python's or NumPy's, of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        refuse(field, value, f"must be an integer of at least {least}", works)


def positive_number(field: str, value: Any, works: float) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < value <= sys.float_info.max:  # type: ignore[operator]
        refuse(field, value, "must be a finite number above 0", works)


def boolean(field: str, value: Any) -> None:
    if not isinstance(value, bool):
        refuse(field, value, "must be True or False", True)


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How logits become experts and weights. The published families differ only in these fields.

    Attributes:
      top_k: experts a token goes to, K.
      score_function: "softmax" over all experts, or "sigmoid" of each (deepseek_v3).
      normalize_weights: divide the K weights by their sum.
      softmax_after_top_k: choose by logit, then softmax over the K chosen (gpt_oss, granitemoe).
      num_groups: experts are in this many equal groups (deepseek); 1 means no groups.
      top_k_groups: groups whose experts may be chosen.
      group_score: a group's score: "max" of its experts (deepseek_v2) or "top2_sum" (deepseek_v3).
      scale: factor on the final weights (`routed_scaling_factor`).
      logit_bias: the router has a trained bias [E] (gpt_oss).
      selection_bias: an untrained bias [E] takes part in choosing, not in the weights (deepseek_v3).
    """

    top_k: int
    score_function: str = "softmax"
    normalize_weights: bool = True
    softmax_after_top_k: bool = False
    num_groups: int = 1
    top_k_groups: int = 1
    group_score: str = "max"
    scale: float = 1.0
    logit_bias: bool = False
    selection_bias: bool = False

    def __post_init__(self) -> None:
        positive_int("top_k", self.top_k, 2)
        one_of("score_function", self.score_function, ("sigmoid", "softmax"))
        one_of("group_score", self.group_score, ("top2_sum", "max"))
        positive_int("num_groups", self.num_groups, 1)
        positive_int("top_k_groups", self.top_k_groups, 1)
        positive_number("scale", self.scale, 1.0)
        for field in ("normalize_weights", "softmax_after_top_k", "logit_bias", "selection_bias"):
            boolean(field, getattr(self, field))
        if self.top_k_groups > self.num_groups:
            rule = f"cannot exceed num_groups={self.num_groups}"
            refuse("top_k_groups", self.top_k_groups, rule, self.num_groups)
        if self.softmax_after_top_k and self.score_function != "softmax":
            rule = "softmax_after_top_k takes a softmax of the chosen logits"
            refuse("score_function", self.score_function, rule, "softmax")
        if self.softmax_after_top_k and (self.num_groups > 1 or self.selection_bias):
            other = f"num_groups={self.num_groups}" if self.num_groups > 1 else "selection_bias=True"
            refuse("softmax_after_top_k", True, f"it chooses by logit alone, which excludes {other}", False)


@dataclasses.dataclass(frozen=True)
class CommConfig:
    """How tokens reach their experts.

    Attributes:
      mode: "dense" (every expert on every token), "allgather", "padded" or "packed".
      transport: how packed rows cross: "ragged", "all_to_all", "all_gather" (simulation only), or "auto":
        ragged where the devices run it without host synchronisation, else all_to_all.
      recv_rows_factor: the receive buffer of packed holds this many times the balanced rows; a routing
        that needs more takes more rounds and stays exact. None: room for the worst case, one round.
      capacity_factor: an expert takes at most ceil(c * tokens * K / E) rows of the tokens that share an
        expert axis and are not masked, first come in token order; the rest add 0 and are counted. c counts as the
        nearest fraction with a denominator of at most 100. None: nothing is dropped.
      dedup: one row a (token, destination rank), however many of its experts live there; their slots and weights
        travel beside it, and one sum comes back. The sum is taken in float32 and rounded to the layer's dtype once a
        rank, so it rounds otherwise than without dedup. Balanced rows, of which the receive buffer holds
        recv_rows_factor times, are then those of a uniform routing, `jax_ep.plan.rows_a_token` of them a token.
      num_chunks: the tokens of a rank go in this many pieces n with buffers of their own, in n + 2 exchanges, each
        beside another piece's experts (`jax_ep.paths.pieces`; with messages "expert" in 2 n). Rows for the rank's own
        experts then take part in no exchange, and go through them beside the last.
      wire_dtype: "int8" or "float8_e4m3fn": rows travel to their experts so, with one float32 scale a block of 128
        values (see `transport.wire`); they come back in the layer's dtype, and gradients pass straight through the
        rounding and travel unquantised. Rows for the rank's own experts are rounded as well, so that a result depends
        on neither num_chunks nor transport. On normal inputs the layer's output is off by about 1% (int8) or 4%
        (float8), relative Frobenius norm. None: rows travel in the layer's dtype.
      messages: "rank": one message a destination. "expert": one a (destination, local expert), so that on the ragged
        transport rows arrive grouped; on all_to_all one collective a local expert, for benchmarks.
    """

    mode: str = "packed"
    transport: str = "auto"
    recv_rows_factor: float | None = 2.0
    dedup: bool = False
    num_chunks: int = 1
    capacity_factor: float | None = None
    wire_dtype: str | None = None
    messages: str = "rank"

    def __post_init__(self) -> None:
        one_of("mode", self.mode, MODES)
        one_of("transport", self.transport, TRANSPORTS, works="auto")
        if self.recv_rows_factor is not None:
            positive_number("recv_rows_factor", self.recv_rows_factor, 2.0)
        if self.capacity_factor is not None:
            if self.mode in ("dense", "allgather"):
                refuse("capacity_factor", self.capacity_factor, f"mode {self.mode!r} drops nothing", None)
            positive_number("capacity_factor", self.capacity_factor, 1.25)
        boolean("dedup", self.dedup)
        positive_int("num_chunks", self.num_chunks, 2)
        if self.wire_dtype is not None:
            object.__setattr__(self, "wire_dtype", _dtype_name("wire_dtype", self.wire_dtype, WIRE_DTYPES[::-1]))
        one_of("messages", self.messages, MESSAGES, works="rank")
        if self.mode != "packed":
            rule = f'only mode="packed" reads it, and mode is {self.mode!r}'
            if self.transport != "auto":
                refuse("transport", self.transport, rule, "auto")
            for field in ("recv_rows_factor", "dedup", "num_chunks", "wire_dtype", "messages"):
                if getattr(self, field) != (default := _COMM_DEFAULTS[field]):
                    refuse(field, getattr(self, field), rule, default)
        if self.dedup and self.messages == "expert":
            rule = "with dedup a row serves several experts of its destination, so no expert has messages of its own"
            refuse("messages", self.messages, rule, "rank")


_COMM_DEFAULTS = {field.name: field.default for field in dataclasses.fields(CommConfig)}


@dataclasses.dataclass(frozen=True)
class OverlapConfig:
    """What one layer does beside its exchanges. Values stay the same; the order of the program changes.

    Pieces of tokens (CommConfig.num_chunks) are ordered so as well; two microbatches are ModelConfig's
    overlap_moe_expert_parallel_comm.

    Attributes:
      delay_wgrad_compute: the backward of the experts gives the gradient of its rows first, whose exchange then runs
        beside the gradients of the weights. (No difference on CPU, where one loop computes both.)
      moe_shared_expert_overlap: shared experts run beside the first dispatch.
    """

    delay_wgrad_compute: bool = False
    moe_shared_expert_overlap: bool = False

    def __post_init__(self) -> None:
        boolean("delay_wgrad_compute", self.delay_wgrad_compute)
        boolean("moe_shared_expert_overlap", self.moe_shared_expert_overlap)


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """One mixture-of-experts layer.

    Attributes:
      hidden_size: H.
      intermediate_size: I, of one expert.
      num_experts: E. Where the expert axis does not divide it, it is padded with empty experts.
      router: a RouterConfig.
      comm: a CommConfig.
      overlap: an OverlapConfig.
      activation: "swiglu" silu(gate) * up, "gelu" of up alone (no gate matrix), or "gpt_oss" (clamped, gated).
      expert_bias: every expert product has a bias.
      num_shared_experts: experts that every token goes through, as one MLP of their summed width; 0: none.
      shared_intermediate_size: that width; None: num_shared_experts * intermediate_size.
      shared_gate: the shared output is multiplied by sigmoid(x @ gate) (qwen2_moe).
      dtype: of the computation, the rows that travel and the result.
      param_dtype: of the parameters.
      expert_axis: mesh axis that the experts are spread over.
      token_axes: mesh axes that the tokens are spread over, outermost first, expert_axis last. Those that the mesh
        lacks count as size 1.
      shard_sequence: how x [B, S, H] lies on the mesh. True: batch over token_axes without expert_axis,
        sequence over expert_axis. False: batch over all token_axes. None: as x's own sharding says where it
        is visible (concrete arrays, Explicit axes), else sequence where it divides, else batch; with a
        capacity_factor always batch, so that tokens come first in the order of x.
      grouped_backend: what multiplies rows grouped by expert. "auto": loops of dense products on CPU, Triton kernels on
        NVIDIA GPUs (sm_80 or newer), jax.lax.ragged_dot elsewhere. "ragged_dot": that, everywhere. "tokamax":
        tokamax.ragged_dot, where that package is installed.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    router: RouterConfig
    comm: CommConfig = CommConfig()
    overlap: OverlapConfig = OverlapConfig()
    activation: str = "swiglu"
    expert_bias: bool = False
    num_shared_experts: int = 0
    shared_intermediate_size: int | None = None
    shared_gate: bool = False
    dtype: str = "float32"
    param_dtype: str = "float32"
    expert_axis: str = "expert"
    token_axes: tuple[str, ...] = ("data", "expert")
    shard_sequence: bool | None = None
    grouped_backend: str = "auto"

    def __post_init__(self) -> None:
        positive_int("hidden_size", self.hidden_size, 512)
        positive_int("intermediate_size", self.intermediate_size, 1024)
        positive_int("num_experts", self.num_experts, 8)
        for field, works in (("router", RouterConfig(2)), ("comm", CommConfig()), ("overlap", OverlapConfig())):
            if not isinstance(getattr(self, field), type(works)):
                refuse(field, getattr(self, field), f"must be a {type(works).__name__}", works)
        one_of("activation", self.activation, ACTIVATIONS)
        boolean("expert_bias", self.expert_bias)
        boolean("shared_gate", self.shared_gate)
        positive_int("num_shared_experts", self.num_shared_experts, 0, least=0)
        router, experts = self.router, self.num_experts
        if router.top_k > experts:
            most = min(2, experts, router.top_k_groups * max(1, experts // router.num_groups))
            refuse("top_k", router.top_k, f"cannot exceed num_experts={experts}", most)
        if router.top_k_groups > experts:
            refuse("top_k_groups", router.top_k_groups, f"there are only {experts} experts", 1)
        if experts % router.num_groups:
            divisors = [n for n in range(router.top_k_groups, experts + 1) if experts % n == 0]
            refuse("num_groups", router.num_groups, f"must divide num_experts={experts}", divisors[0])
        group = experts // router.num_groups
        if router.top_k > router.top_k_groups * group:
            rule = f"{router.top_k_groups} groups of {group} experts hold fewer than that"
            refuse("top_k", router.top_k, rule, router.top_k_groups * group)
        if router.group_score == "top2_sum" and router.num_groups > 1 and group < 2:
            refuse("group_score", router.group_score, "needs groups of at least two experts", "max")
        if self.num_shared_experts == 0:
            if self.shared_intermediate_size is not None:
                rule = "there are no shared experts (num_shared_experts=0)"
                refuse("shared_intermediate_size", self.shared_intermediate_size, rule, None)
            if self.shared_gate:
                refuse("shared_gate", True, "there are no shared experts (num_shared_experts=0)", False)
        elif self.shared_intermediate_size is not None:
            positive_int("shared_intermediate_size", self.shared_intermediate_size, self.intermediate_size)
        for field in ("dtype", "param_dtype"):
            object.__setattr__(self, field, _dtype_name(field, getattr(self, field)))
        axes = self.token_axes
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        object.__setattr__(self, "token_axes", axes)
        if not axes or axes[-1] != self.expert_axis or len(set(axes)) != len(axes):
            rule = f"must name each axis once and expert_axis={self.expert_axis!r} last, as tokens are ordered"
            others = axes if self.expert_axis in axes else axes[:-1]
            others = tuple(a for a in dict.fromkeys(others) if a != self.expert_axis)
            refuse("token_axes", axes, rule, (*others, self.expert_axis))
        if self.shard_sequence is not None:
            boolean("shard_sequence", self.shard_sequence)
        one_of("grouped_backend", self.grouped_backend, GROUPED_BACKENDS, works="auto")
        for field in ("delay_wgrad_compute", "moe_shared_expert_overlap"):
            if getattr(self.overlap, field):
                if self.comm.mode not in ("padded", "packed"):
                    rule = f"comm.mode={self.comm.mode!r} exchanges nothing that waits for experts"
                    refuse(field, True, f"{rule}; comm.mode='packed' does", False)
                if experts < 2:
                    refuse(field, True, f"num_experts={experts} leaves nothing to exchange", False)
        if self.overlap.moe_shared_expert_overlap and not self.num_shared_experts:
            refuse("moe_shared_expert_overlap", True, "there are no shared experts (num_shared_experts=0)", False)

    @property
    def shared_width(self) -> int:
        """Width of the shared experts' one MLP; 0 without."""
        return self.shared_intermediate_size or self.num_shared_experts * self.intermediate_size

    @property
    def gated(self) -> bool:
        """Whether an expert has a gate matrix beside up and down."""
        return self.activation != "gelu"

    def padded_experts(self, ranks: int) -> int:
        """E with the empty experts that make it divide over `ranks`."""
        return -(-self.num_experts // ranks) * ranks

    def __repr__(self) -> str:
        parts = [f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self)]
        pads = [(r, self.padded_experts(r)) for r in (2, 4, 8) if self.num_experts % r]
        if self.num_experts > 1 and pads:
            said = ", ".join(f"{p} on {r}" for r, p in pads)
            at = next(i for i, p in enumerate(parts) if p.startswith("num_experts="))
            parts[at] += f" <padded with empty experts to {said}>"
        return f"MoEConfig({', '.join(parts)})"


def _dtype_name(field: str, value: Any, allowed: tuple[str, ...] = DTYPES[::-1]) -> str:
    try:
        name = value if value is None else jnp.dtype(value).name
    except TypeError:
        name = value
    one_of(field, name, allowed)
    return str(name)


@dataclasses.dataclass(frozen=True)
class WorkloadConfig:
    """A named benchmark workload: one layer on a batch, and how it is measured.

    Attributes:
      batch_size, sequence_length: B and S of the whole batch, over all devices.
      moe: the layer.
      expert_parallel, data_parallel: sizes of the mesh axes.
      warmup, runs: untimed and timed runs of every mode.
    """

    batch_size: int
    sequence_length: int
    moe: MoEConfig
    expert_parallel: int = 8
    data_parallel: int = 1
    warmup: int = 2
    runs: int = 5

    def __post_init__(self) -> None:
        works = {"batch_size": 8, "sequence_length": 64, "expert_parallel": 8, "data_parallel": 1, "runs": 5}
        for field, value in works.items():
            positive_int(field, getattr(self, field), value)
        positive_int("warmup", self.warmup, 2, least=0)
