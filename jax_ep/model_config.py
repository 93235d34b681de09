"""Frozen configurations of whole models, validated when built. Fields name what the published families differ in.

Letters: H hidden, D head_dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from jax_ep.config import MoEConfig, RouterConfig, boolean, one_of, positive_int, positive_number, refuse

ROPE_SCALINGS = ("default", "linear", "llama3", "yarn")
RECOMPUTE = ("none", "selective", "full")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864) and their published scalings.

    Attributes:
      theta: base of the frequencies.
      scaling: "default"; "linear": positions over factor; "llama3": low frequencies over factor, with a ramp between
        (as of Llama 3.1); "yarn" (Peng et al. 2023, arXiv:2309.00071).
      factor: of the scaling.
      original_max_position: positions that the model was first trained on (llama3, yarn).
      low_freq_factor, high_freq_factor: ends of llama3's ramp.
      beta_fast, beta_slow: ends of yarn's ramp, in rotations.
      truncate: yarn's ramp ends are whole dimensions (gpt_oss: they are not).
      attention_factor: yarn: on cos and sin; None: 0.1 * ln(factor) + 1.
    """

    theta: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        one_of("scaling", self.scaling, ROPE_SCALINGS, works="default")
        for field, works in (("theta", 10000.0), ("factor", 1.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0)):
            positive_number(field, getattr(self, field), works)
        for field, works in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            positive_number(field, getattr(self, field), works)
        if self.theta <= 1:
            refuse("theta", self.theta, "must be above 1: later pairs turn slower", 10000.0)
        if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            rule = f"must be above low_freq_factor={self.low_freq_factor}"
            refuse("high_freq_factor", self.high_freq_factor, rule, self.low_freq_factor * 4)
        boolean("truncate", self.truncate)
        if self.attention_factor is not None:
            positive_number("attention_factor", self.attention_factor, 1.0)
        if self.scaling in ("llama3", "yarn"):
            positive_int("original_max_position", self.original_max_position, 4096)
        elif self.original_max_position is not None:
            rule = f"scaling {self.scaling!r} does not read it"
            refuse("original_max_position", self.original_max_position, rule, None)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder: every layer is attention and a mixture of experts.

    Attributes:
      vocab_size, num_layers: of the model.
      num_heads, num_kv_heads, head_dim: grouped-query attention.
      moe: the MoE layer of every layer; hidden_size and dtypes are its.
      norm_eps: of every RMSNorm.
      rope: rotary positions.
      qk_norm: RMSNorm on queries and keys before the rotation: "head" over head_dim (qwen3_moe), "projection" over all
        heads together (olmoe), or None.
      qkv_bias, output_bias: biases of the attention's products.
      qkv_clip: queries, keys and values are clipped to +- this (olmoe); None: not.
      window: sliding window, positions that a query sees, its own included; None: all before it.
      window_layers: which layers have the window, one bool a layer; None: all.
      attention_sinks: a trained logit a head takes part in the softmax and is dropped (gpt_oss).
      attention_multiplier: factor on the logits of attention; None: head_dim ** -0.5.
      embedding_multiplier, residual_multiplier, logits_divisor: of granitemoe.
      tie_embeddings: the output matrix is the embedding.
      max_position: positions that the published model is meant for.
      balance_loss_coef: factor of the "hf" balance loss, pooled over layers, in the training loss.
      stop_tokens: ids that end a generated sequence.
      recompute: activations kept for the backward: "none" recomputes nothing, "selective" keeps what the layer names
        (`CHECKPOINT_NAMES`), "full" keeps layer inputs.
      kv_coship: "contiguous" or "zigzag": sequences are split so over the expert axis, and layers run in two
        microbatches whose keys and values travel beside hidden rows (`jax_ep.block.coship.sequential_stack`): packed
        layers, an even batch. Without a cache only: what is decoded with one is not split. None: not.
      overlap_moe_expert_parallel_comm: layers run in two microbatches half a layer apart, so that each exchange of one
        has the other's attention or experts beside it (`jax_ep.block.microbatch`): packed layers on an expert axis of
        two ranks or more, each with an even number of whole sequences. In training and prefill, without a cache.
    """

    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    moe: MoEConfig
    norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    qk_norm: str | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qkv_clip: float | None = None
    window: int | None = None
    window_layers: tuple[bool, ...] | None = None
    attention_sinks: bool = False
    attention_multiplier: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    tie_embeddings: bool = False
    max_position: int = 4096
    balance_loss_coef: float = 0.0
    stop_tokens: tuple[int, ...] = ()
    recompute: str = "none"
    kv_coship: str | None = None
    overlap_moe_expert_parallel_comm: bool = False

    def __post_init__(self) -> None:
        works = {"vocab_size": 32000, "num_layers": 4, "num_heads": 8, "num_kv_heads": 1, "head_dim": 64}
        for field, value in works.items():
            positive_int(field, getattr(self, field), value)
        positive_int("max_position", self.max_position, 4096)
        if self.num_heads % self.num_kv_heads:
            refuse("num_kv_heads", self.num_kv_heads, f"must divide num_heads={self.num_heads}", 1)
        if self.head_dim % 2:
            refuse("head_dim", self.head_dim, "must be even: rotary positions turn pairs", self.head_dim + 1)
        for field, kind in (("moe", MoEConfig(512, 1024, 8, RouterConfig(2))), ("rope", RopeConfig())):
            if not isinstance(getattr(self, field), type(kind)):
                refuse(field, getattr(self, field), f"must be a {type(kind).__name__}", kind)
        for field in ("qkv_bias", "output_bias", "attention_sinks", "tie_embeddings"):
            boolean(field, getattr(self, field))
        for field in ("norm_eps", "embedding_multiplier", "residual_multiplier", "logits_divisor"):
            positive_number(field, getattr(self, field), 1.0 if field != "norm_eps" else 1e-6)
        for field in ("attention_multiplier", "qkv_clip"):
            if getattr(self, field) is not None:
                positive_number(field, getattr(self, field), 1.0)
        if self.balance_loss_coef != 0 or isinstance(self.balance_loss_coef, bool):
            positive_number("balance_loss_coef", self.balance_loss_coef, 0.01)
        if self.qk_norm is not None:
            one_of("qk_norm", self.qk_norm, ("head", "projection"), works="head")
        one_of("recompute", self.recompute, RECOMPUTE, works="none")
        if self.kv_coship is not None:
            one_of("kv_coship", self.kv_coship, ("contiguous", "zigzag"), works="zigzag")
        if self.window is not None:
            positive_int("window", self.window, 4096)
        if self.window_layers is not None:
            object.__setattr__(self, "window_layers", _tuple("window_layers", self.window_layers, None))
            if self.window is None:
                refuse("window_layers", self.window_layers, "there is no window (window=None)", None)
            if len(self.window_layers) != self.num_layers or not all(isinstance(w, bool) for w in self.window_layers):
                rule = f"must hold a bool for each of num_layers={self.num_layers}"
                refuse("window_layers", self.window_layers, rule, (True,) * self.num_layers)
        object.__setattr__(self, "stop_tokens", _tuple("stop_tokens", self.stop_tokens, ()))
        for token in self.stop_tokens:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                refuse("stop_tokens", self.stop_tokens, f"must be ids in [0, vocab_size={self.vocab_size})", ())
        self._check_overlap()

    def _check_overlap(self) -> None:
        field, overlap = "overlap_moe_expert_parallel_comm", self.moe.overlap
        boolean(field, getattr(self, field))
        if not self.overlap_moe_expert_parallel_comm:
            if overlap.delay_wgrad_compute:
                rule = f"in a model it needs {field}=True, whose exchanges it makes room beside"
                refuse("delay_wgrad_compute", True, rule, False)
            return
        if self.kv_coship is not None:
            rule = f"kv_coship={self.kv_coship!r} runs layers in two microbatches already; without it True works"
            refuse(field, True, rule, False)
        if self.recompute == "full":
            rule = f"with {field}=True a layer's exchanges would be sent again beside nothing"
            refuse("recompute", "full", rule, "selective")
        if overlap.moe_shared_expert_overlap:
            rule = f"with {field}=True the other microbatch is beside the dispatch"
            refuse("moe_shared_expert_overlap", True, rule, False)
        if self.moe.num_experts < 2:
            refuse(field, True, "num_experts=1 leaves nothing to exchange", False)
        check_microbatches(self)


def check_microbatches(config: ModelConfig) -> None:
    """Refuses what two microbatches half a layer apart do not do."""
    one = "two microbatches send one packed buffer, one message a rank"
    wanted: dict[str, tuple[Any, str]] = {
        "mode": ("packed", "two microbatches send packed rows"),
        "num_chunks": (1, one),
        "messages": ("rank", one),
        "capacity_factor": (None, "who comes first is decided over the whole batch, and here it goes in halves"),
    }
    for field, (value, rule) in wanted.items():
        if getattr(config.moe.comm, field) != value:
            refuse(field, getattr(config.moe.comm, field), rule, value)
    if config.moe.shard_sequence:
        refuse("shard_sequence", True, "sequences are whole, and the batch is split over the expert axis", False)


def _tuple(field: str, value: Any, works: Any) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        refuse(field, value, "must be a sequence", works)
    return tuple(value)
