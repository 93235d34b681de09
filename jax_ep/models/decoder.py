"""A decoder of the published families: every layer is attention and a mixture of experts. Pure functions on arrays, and
`Decoder`, their thin nnx owner.

Like layers are stacked and scanned, so that neither the program nor its compile time grows with depth.

Letters: B batch, S positions, H hidden, V vocabulary, Y layers, Q query heads, N key/value heads, D head_dim,
E experts, R ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import layer as moe_layer
from jax_ep import sharding
from jax_ep.attention import NO_WINDOW, Queries, attend, attention_scale, linear, project, rms_norm, rope_tables
from jax_ep.block.coship import sequential_stack
from jax_ep.block.microbatch import microbatch_stack
from jax_ep.block.ranges import reorder
from jax_ep.config import refuse
from jax_ep.layer import RouterBias, moe
from jax_ep.local import recomputing
from jax_ep.model_config import ModelConfig
from jax_ep.models.placement import Placement, constrain, gather, narrow, placement, split_spec
from jax_ep.routing import MoEStats, balance_loss

Params = dict[str, Any]
IGNORED = -100  # a label that takes no part in the loss, as in HF transformers


def init_decoder(config: ModelConfig, key: jax.Array, ranks: int = 1) -> Params:
    """Fresh parameters: matrices normal with deviation 1/sqrt(fan-in), norms 1, biases and sinks 0.

    Args:
      config: the model.
      key: a PRNG key.
      ranks: R of the mesh: experts are padded with empty ones until it divides them. The others' values do not depend
        on it.

    Returns:
      {"embed" [V, H],
       "layers": {"attention_norm" [Y, H], "q" [Y, H, Q*D], "k", "v" [Y, H, N*D], "o" [Y, Q*D, H],
                  "q_bias", "k_bias", "v_bias", "o_bias" ?, "q_norm", "k_norm" [Y, D or n*D] ?, "sinks" [Y, Q] ?,
                  "moe_norm" [Y, H], "moe": as `jax_ep.init_params`, each with a leading Y},
       "final_norm" [H], "lm_head" [H, V] unless tie_embeddings}, in moe.param_dtype.
    """
    h, dtype = config.moe.hidden_size, jnp.dtype(config.moe.param_dtype)
    embed_key, head_key, moe_key, *keys = jax.random.split(key, 7)

    def matrix(at: jax.Array, *shape: int, fan_in: int) -> jax.Array:
        return (jax.random.normal(at, shape, jnp.float32) * fan_in**-0.5).astype(dtype)

    layers: Params = {name: jnp.ones((config.num_layers, h), dtype) for name in ("attention_norm", "moe_norm")}
    widths = attention_widths(config)
    for (name, (fan_in, width)), at in zip(widths.items(), keys, strict=True):
        layers[name] = matrix(at, config.num_layers, fan_in, width, fan_in=fan_in)
        if config.output_bias if name == "o" else config.qkv_bias:
            layers[f"{name}_bias"] = jnp.zeros((config.num_layers, width), dtype)
        if config.qk_norm is not None and name in "qk":
            normed = config.head_dim if config.qk_norm == "head" else width
            layers[f"{name}_norm"] = jnp.ones((config.num_layers, normed), dtype)
    if config.attention_sinks:
        layers["sinks"] = jnp.zeros((config.num_layers, config.num_heads), dtype)
    one = functools.partial(moe_layer.init_params, config.moe, ranks=ranks)
    layers["moe"] = jax.vmap(lambda at: one(at))(jax.random.split(moe_key, config.num_layers))
    params = {
        "embed": matrix(embed_key, config.vocab_size, h, fan_in=h),
        "layers": layers,
        "final_norm": jnp.ones(h, dtype),
    }
    if not config.tie_embeddings:
        params["lm_head"] = matrix(head_key, h, config.vocab_size, fan_in=h)
    return params


def attention_widths(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Rows and columns of the attention's four matrices, [in, out]."""
    h, q, n = config.moe.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {"q": (h, q), "k": (h, n), "v": (h, n), "o": (q, h)}


def decoder_shapes(config: ModelConfig, ranks: int = 1) -> Any:
    """ShapeDtypeStructs in the structure of `init_decoder`; nothing is allocated."""
    return jax.eval_shape(functools.partial(init_decoder, config, ranks=ranks), jax.random.key(0))


def decoder_shardings(config: ModelConfig, mesh: Mesh, split_weights: bool = False) -> Any:
    """NamedShardings in the structure of init_decoder(config, key, ranks=R of mesh): experts over the expert axis, the
    rest whole on every device; in mode "dense", which reads every expert everywhere, the experts too. With
    split_weights the rest lies over all token axes, as `split_spec` says.
    """
    axes = sharding.layer_axes(config.moe, mesh)
    shapes = decoder_shapes(config, axes.ranks)

    def outside(path: tuple[Any, ...], a: Any) -> P:
        return split_spec(a.shape, axes, path[0].key == "layers") if split_weights else P()

    specs: Any = jax.tree.map_with_path(outside, shapes)
    experts = sharding.param_specs(config.moe, shapes["layers"]["moe"])["experts"]
    specs["layers"]["moe"]["experts"] = {name: P(None, *spec) for name, spec in experts.items()}
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, P))


def place_params(params: Params, config: ModelConfig, mesh: Mesh) -> Params:
    """Parameters where `decoder_shardings` says, their experts padded for this mesh (or cut) where they were made for
    another number of ranks. What lies there already is not copied.
    """
    wanted = config.moe.padded_experts(sharding.layer_axes(config.moe, mesh).ranks)
    moe_params = params["layers"]["moe"]
    fit = lambda a: a if a.shape[1] == wanted else sharding.pad_rows(a[:, :wanted], wanted, axis=1)
    experts = {n: fit(a) for n, a in moe_params["experts"].items()}  # [Y, E, ...]
    params = {**params, "layers": {**params["layers"], "moe": {**moe_params, "experts": experts}}}
    return jax.device_put(params, decoder_shardings(config, mesh))


def forward(
    params: Params,
    input_ids: jax.Array,
    config: ModelConfig,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    attention_mask: jax.Array | None = None,
    split_weights: bool = False,
) -> tuple[jax.Array, MoEStats]:
    """Logits of every position. Works under jit and grad; recomputes in the backward as config.recompute says.

    Args:
      params: as `init_decoder` gives them, for this or any other number of ranks.
      input_ids: [B, S] integers in [0, V). Any B and S; what the mesh's token axes divide lies on them. With
        config.kv_coship B is an even number for each replica, with overlap_moe_expert_parallel_comm for each rank.
      config: the model.
      mesh: with the layer's axes; None: the ambient one, or one device.
      attention_mask: [B, S], bool or 0 and 1. Tokens at 0 are padding, before or after the others: nobody attends to
        them, they travel nowhere and count in no statistics, and their logits are finite and mean nothing.
      split_weights: params lie as decoder_shardings(..., split_weights=True) says: those of a layer are gathered where
        it runs, and again in its backward, so that no device ever holds those of all layers.

    Returns:
      logits [B, S, V] float32, and MoEStats stacked [Y, ...].

    Raises:
      ConfigError: shapes, dtypes, axes or parameters that do not fit the config.
    """
    if config.kv_coship is not None or config.overlap_moe_expert_parallel_comm:
        if split_weights:
            field = "kv_coship" if config.kv_coship is not None else "overlap_moe_expert_parallel_comm"
            rule = f"with {field} all layers run inside one shard_map, which takes their weights whole"
            refuse("split_weights", True, rule, False)
        through = _coshipped_forward if config.kv_coship is not None else _microbatched_forward
        return through(params, input_ids, config, mesh, attention_mask)
    logits, stats, _ = observed_forward(params, input_ids, config, lambda x: None, mesh, attention_mask, split_weights)
    return logits, stats


def _coshipped_forward(
    params: Params,
    input_ids: jax.Array,
    config: ModelConfig,
    mesh: Mesh | AbstractMesh | None,
    attention_mask: jax.Array | None,
) -> tuple[jax.Array, MoEStats]:
    """`forward` through `sequential_stack`. What does not divide over the ranks is padded at its end and masked."""
    mask = check_ids(input_ids, attention_mask)
    (b, s), split = input_ids.shape, config.kv_coship
    assert split is not None
    ranks = sharding.layer_axes(config.moe, sharding.ambient_mesh() if mesh is None else mesh).ranks
    short = -s % (ranks if split == "contiguous" else 2 * ranks)
    if short:
        mask = jnp.pad(jnp.ones((b, s), jnp.bool_) if mask is None else mask, ((0, 0), (0, short)))
        input_ids = jnp.pad(input_ids, ((0, 0), (0, short)))
    place = placement(dataclasses.replace(config.moe, shard_sequence=True), mesh, b, s + short)
    x = embed(params, reorder(input_ids, split, ranks, axis=1), config, place)
    segments = None if mask is None else mask.astype(jnp.int32)
    x, stats = sequential_stack(
        params["layers"], x, config, mesh=mesh, segment_ids=segments, token_mask=mask, split=split
    )
    x = reorder(x, split, ranks, axis=1, inverse=True)[:, :s]
    return logits_of(params, x, config), stats


def _microbatched_forward(
    params: Params,
    input_ids: jax.Array,
    config: ModelConfig,
    mesh: Mesh | AbstractMesh | None,
    attention_mask: jax.Array | None,
) -> tuple[jax.Array, MoEStats]:
    """`forward` through `microbatch_stack`."""
    mask = check_ids(input_ids, attention_mask)
    place = placement(dataclasses.replace(config.moe, shard_sequence=False), mesh, *input_ids.shape)
    x = embed(params, input_ids, config, place)
    segments = None if mask is None else mask.astype(jnp.int32)
    x, stats = microbatch_stack(params["layers"], x, config, mesh=mesh, segment_ids=segments, token_mask=mask)
    return logits_of(params, x, config), stats


class Observed(NamedTuple):
    """What an observer returned: of the embedded tokens; after each layer's attention and after its experts, stacked
    [Y, ...]; of the logits.
    """

    embedded: Any
    attention: Any
    experts: Any
    logits: Any


def observed_forward(
    params: Params,
    input_ids: jax.Array,
    config: ModelConfig,
    observe: Callable[[jax.Array], Any],
    mesh: Mesh | AbstractMesh | None = None,
    attention_mask: jax.Array | None = None,
    split_weights: bool = False,
) -> tuple[jax.Array, MoEStats, Observed]:
    """`forward`, and what `observe` makes of the tokens [B, S, H] on their way, and of the logits. One layer after the
    other, whatever config.kv_coship says.
    """
    mask = check_ids(input_ids, attention_mask)
    b, s = input_ids.shape
    place = placement(config.moe, mesh, b, s, split_weights=split_weights)
    positions = jnp.broadcast_to(jnp.arange(s), (b, s))
    if mask is not None:  # rotary positions are relative, but small ones round less
        positions = positions - jnp.argmax(mask, axis=1, keepdims=True)
    tables = rope_tables(config, positions)
    scale = attention_scale(config)

    def body(x: jax.Array, at: tuple[Params, jax.Array]) -> tuple[jax.Array, Any]:
        layer, window = gather(at[0], place), at[1]

        def attention(rows: Queries) -> tuple[jax.Array, None]:
            keys, values = (constrain(a, place.whole_sequences, place.mesh) for a in rows[1:])
            where = (positions, positions, mask, window, layer.get("sinks"), scale)
            return attend(rows.queries, keys, values, *where), None

        x, _ = attention_half(layer, x, tables, config, attention)
        attended = observe(x)
        x, stats = experts_half(layer, x, config, place, mask)
        return x, (stats, attended, observe(x))

    params = narrow(params, place)
    outside = gather({name: a for name, a in params.items() if name != "layers"}, place)
    x = embed(outside, input_ids, config, place)
    embedded = observe(x)
    layers = (params["layers"], layer_windows(config))
    x, (stats, attended, done) = jax.lax.scan(_recomputing(body, config.recompute, place), x, layers)
    logits = logits_of(outside, x, config)
    return logits, stats, Observed(embedded, attended, done, observe(logits))


class LossParts(NamedTuple):
    """What a loss is made of: the mean cross-entropy and the balance loss, float32, and MoEStats stacked [Y, ...]."""

    cross_entropy: jax.Array
    balance: jax.Array
    stats: MoEStats


def loss(
    params: Params,
    input_ids: jax.Array,
    config: ModelConfig,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    attention_mask: jax.Array | None = None,
    labels: jax.Array | None = None,
) -> tuple[jax.Array, LossParts]:
    """Mean cross-entropy of next tokens + balance_loss_coef * the "hf" balance loss, pooled over layers.

    Args:
      params, input_ids, config, mesh, attention_mask: as of `forward`.
      labels: [B, S] integers; position t predicts labels[:, t + 1]. Those of `IGNORED` (-100) take no part. None: the
        input ids, without those that are masked. (HF transformers leaves it to the caller to mask labels.)

    Returns:
      the loss, float32, and its parts; for jax.value_and_grad(..., has_aux=True).
    """
    logits, stats = forward(params, input_ids, config, mesh=mesh, attention_mask=attention_mask)
    return loss_of_logits(logits, stats, input_ids, config, attention_mask=attention_mask, labels=labels)


def loss_of_logits(
    logits: jax.Array,
    stats: MoEStats,
    input_ids: jax.Array,
    config: ModelConfig,
    *,
    attention_mask: jax.Array | None = None,
    labels: jax.Array | None = None,
) -> tuple[jax.Array, LossParts]:
    """`loss` of what `forward` returned."""
    mask = check_ids(input_ids, attention_mask)
    if labels is None:
        labels = input_ids.astype(jnp.int32)
        labels = labels if mask is None else jnp.where(mask, labels, IGNORED)
    elif labels.shape != input_ids.shape or not jnp.issubdtype(labels.dtype, jnp.integer):
        given = f"{labels.dtype.name}{list(labels.shape)}"
        refuse("labels", given, "must be integers of input_ids' shape", f"int32{list(input_ids.shape)}")
    labels = labels.astype(jnp.int32)  # IGNORED fits in no unsigned dtype
    targets = jnp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED)  # [B, S]
    counted = targets != IGNORED
    if mask is not None:  # what a masked token predicts means nothing
        counted &= mask
    chosen = jnp.take_along_axis(logits, jnp.where(counted, targets, 0)[..., None], axis=-1)[..., 0]  # [B, S]
    surprise = jnp.where(counted, jax.nn.logsumexp(logits, axis=-1) - chosen, 0)
    cross_entropy = surprise.sum() / jnp.maximum(counted.sum(), 1)
    balance = balance_loss(jax.tree.map(lambda a: a.sum(0), stats), "hf")
    total = cross_entropy + config.balance_loss_coef * balance if config.balance_loss_coef else cross_entropy
    return total, LossParts(cross_entropy, balance, stats)


def layer_windows(config: ModelConfig) -> jax.Array:
    """The sliding window of each layer [Y] int32; `NO_WINDOW` where there is none."""
    windowed = config.window_layers or (config.window is not None,) * config.num_layers
    return jnp.array([config.window if has else NO_WINDOW for has in windowed], jnp.int32)


def embed(params: Params, input_ids: jax.Array, config: ModelConfig, place: Placement) -> jax.Array:
    rows = jnp.take(params["embed"], input_ids, axis=0, mode="clip").astype(config.moe.dtype)  # [B, S, H]
    return constrain(rows * config.embedding_multiplier, place.tokens, place.mesh)


def logits_of(params: Params, x: jax.Array, config: ModelConfig) -> jax.Array:
    """x [..., H] to float32 logits [..., V]."""
    with jax.named_scope("logits"):
        x = rms_norm(x, params["final_norm"], config.norm_eps)
        if config.tie_embeddings:
            subscripts, head = "...h,vh->...v", params["embed"]
        else:
            subscripts, head = "...h,hv->...v", params["lm_head"]
        logits = jnp.einsum(subscripts, x, head.astype(x.dtype), preferred_element_type=jnp.float32)
        return logits / config.logits_divisor


def run_layer(
    params: Params,
    x: jax.Array,
    tables: tuple[jax.Array, jax.Array],
    config: ModelConfig,
    place: Placement,
    token_mask: jax.Array | None,
    attention: Callable[[Queries], tuple[jax.Array, Any]],
) -> tuple[jax.Array, MoEStats, Any]:
    """One layer: x [B, S, H] -> the same, its statistics, and what `attention` wants kept."""
    x, kept = attention_half(params, x, tables, config, attention)
    x, stats = experts_half(params, x, config, place, token_mask)
    return x, stats, kept


def attention_half(
    params: Params,
    x: jax.Array,
    tables: tuple[jax.Array, jax.Array],
    config: ModelConfig,
    attention: Callable[[Queries], tuple[jax.Array, Any]],
) -> tuple[jax.Array, Any]:
    """The first half of a layer: x [B, S, H] -> the same, and what `attention` wants kept."""
    with jax.named_scope("attention"):
        rows = project(params, rms_norm(x, params["attention_norm"], config.norm_eps), *tables, config)
        attended, kept = attention(rows)
        return x + linear(attended, params["o"], params.get("o_bias")) * config.residual_multiplier, kept


def experts_half(
    params: Params, x: jax.Array, config: ModelConfig, place: Placement, token_mask: jax.Array | None
) -> tuple[jax.Array, MoEStats]:
    """The second half of a layer: x [B, S, H] -> the same, and its statistics."""
    normed = constrain(rms_norm(x, params["moe_norm"], config.norm_eps), place.tokens, place.mesh)
    y, stats = moe(params["moe"], normed, place.moe, mesh=place.mesh, token_mask=token_mask)
    return constrain(x + y * config.residual_multiplier, place.tokens, place.mesh), stats


def _recomputing(body: Callable[..., Any], how: str, place: Placement) -> Callable[..., Any]:
    """A layer's body that keeps for the backward what `how` (ModelConfig.recompute) says; gathered weights never."""
    if how == "none" and place.split is not None:
        return jax.checkpoint(body, policy=_all_but_gathered, prevent_cse=False)
    return recomputing(body, how)


def _all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    return primitive.name != "sharding_constraint" or params["sharding"].spec != P()


def check_ids(input_ids: jax.Array, attention_mask: jax.Array | None) -> jax.Array | None:
    """Shapes and dtypes; the mask as bools."""
    if not all(hasattr(a, "dtype") for a in (input_ids, attention_mask) if a is not None):
        kinds = [type(a).__name__ for a in (input_ids, attention_mask)]
        refuse("input_ids and attention_mask", kinds, "must be arrays", "jnp.asarray(input_ids)")
    given = f"{input_ids.dtype.name}{list(input_ids.shape)}"
    if input_ids.ndim != 2 or not input_ids.shape[1] or not jnp.issubdtype(input_ids.dtype, jnp.integer):
        refuse("input_ids", given, "must be integers [B, S] with at least one position", "int32[2, 16]")
    if attention_mask is None:
        return None
    if attention_mask.shape != input_ids.shape or jnp.issubdtype(attention_mask.dtype, jnp.inexact):
        given = f"{attention_mask.dtype.name}{list(attention_mask.shape)}"
        rule = "must be bools, or 0 and 1, of input_ids' shape"
        refuse("attention_mask", given, rule, f"bool{list(input_ids.shape)}")
    return jnp.asarray(attention_mask) != 0


@functools.lru_cache(maxsize=32)
def _creator(config: ModelConfig, mesh: Mesh | None) -> Callable[[jax.Array], Params]:
    """init_decoder onto the mesh, in one program: no device holds more than its share."""
    create = functools.partial(init_decoder, config, ranks=sharding.layer_axes(config.moe, mesh).ranks)
    return jax.jit(create, out_shardings=None if mesh is None else decoder_shardings(config, mesh))


_forward = jax.jit(forward, static_argnames=("config", "mesh"))


class Decoder(nnx.Module):
    """`forward` with its parameters.

    Parameters are nnx.Param attributes in nested nnx.Dicts, named as `init_decoder` names them, each on its devices; an
    untrained selection bias is a `jax_ep.layer.RouterBias`.

    Attributes:
      config: the ModelConfig.
      mesh: where it runs; None: the ambient mesh, or one device.
      family: the published family whose files it came from; None: of no files.

    Example:
      decoder = Decoder(config, jax_ep.make_mesh(expert=8), rngs=nnx.Rngs(0))
      logits, stats = decoder(input_ids)
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh | None = None,
        *,
        rngs: nnx.Rngs | None = None,
        params: Params | None = None,
    ):
        """Fresh parameters from `rngs`, or those given; given ones stay where they lie."""
        if (rngs is None) == (params is None):
            refuse("rngs", rngs, "exactly one of rngs and params makes the parameters", "nnx.Rngs(0)")
        self.config = config
        self.mesh = mesh
        self.family: str | None = None
        if params is None:
            assert rngs is not None
            params = _creator(config, mesh)(rngs.params())
        owned = {name: _owned(name, value) for name, value in params.items()}
        self.embed, self.layers, self.final_norm = owned["embed"], owned["layers"], owned["final_norm"]
        self.lm_head = owned.get("lm_head")

    def params(self) -> Params:
        """The parameters as plain arrays, as `forward` takes them."""
        named = {"embed": self.embed, "layers": self.layers, "final_norm": self.final_norm, "lm_head": self.lm_head}
        return {name: _plain(value) for name, value in named.items() if value is not None}

    def __call__(
        self, input_ids: jax.Array | np.ndarray, attention_mask: jax.Array | np.ndarray | None = None
    ) -> tuple[jax.Array, MoEStats]:
        """input_ids [B, S] -> (logits [B, S, V] float32, MoEStats stacked [Y, ...]); arguments as of `forward`.

        Raises:
          ConfigError: as `forward`; also ids outside the vocabulary, where their values are known.
        """
        seen = not isinstance(input_ids, jax.core.Tracer) and getattr(input_ids, "is_fully_addressable", True)
        if seen and hasattr(input_ids, "dtype") and input_ids.size:
            check_vocabulary("input_ids", np.asarray(input_ids), self.config)
        return _forward(self.params(), input_ids, self.config, mesh=self.mesh, attention_mask=attention_mask)


def check_vocabulary(field: str, ids: np.ndarray, config: ModelConfig) -> None:
    """Refuses ids outside [0, V)."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= config.vocab_size:
        wrong = low if low < 0 else high
        refuse(f"{field} holds", wrong, f"ids are in [0, vocab_size={config.vocab_size})", config.vocab_size - 1)


def _owned(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return nnx.Dict({n: _owned(n, v) for n, v in value.items()})
    return (RouterBias if name == "selection_bias" else nnx.Param)(value)


def _plain(value: Any) -> Any:
    return {n: _plain(v) for n, v in value.items()} if isinstance(value, nnx.Dict) else value[...]
