"""Blocks whose key/value rows travel beside hidden rows equal attention and experts on one device, values and
gradients.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jax_ep import CommConfig, ConfigError, ModelConfig, MoEConfig, RouterConfig, balance_loss, make_mesh, moe
from jax_ep.attention import NO_WINDOW, attention_scale, linear, project, rms_norm, rope_tables
from jax_ep.block.coship import KV_WAYS, parallel_block, sequential_stack
from jax_ep.block.ranges import reorder
from jax_ep.models.decoder import init_decoder

pytestmark = pytest.mark.slow

S, H, E = 32, 16, 8
NONE, SMALL, LARGE = NO_WINDOW, 3, 11  # windows: all; narrower, and wider, than what a rank holds of 4 or 8


def model(heads: tuple[int, int] = (8, 2), experts: int = E, dtype: str = "float32", comm: Any = None, **fields: Any):
    """Two layers, whose routers have a bias for tests to send tokens with."""
    router = RouterConfig(2, softmax_after_top_k=True, logit_bias=True)
    moe_config = MoEConfig(H, 8, experts, router, comm=CommConfig(**(comm or {})), dtype=dtype)
    return ModelConfig(32, 2, *heads, 4, moe_config, **fields)


@functools.cache
def initial(config: ModelConfig) -> Any:
    return init_decoder(config, jax.random.key(0))["layers"]


def make_params(config: ModelConfig, form: str, skewed: bool = False) -> Any:
    """Those of a stack or of one layer; skewed: all tokens want experts 2 and 3."""
    names = ("num_heads", "num_kv_heads", "qkv_bias", "output_bias", "attention_sinks")
    of_shapes = {name: getattr(config, name) for name in names}
    layers = initial(dataclasses.replace(model(experts=config.moe.num_experts), **of_shapes))
    router = layers["moe"]["router"]
    wanted = jnp.zeros(config.moe.num_experts).at[2:4].set(20)[None] * skewed
    layers = {**layers, "moe": {**layers["moe"], "router": {**router, "bias": router["bias"] + wanted}}}
    if config.attention_sinks:
        layers["sinks"] += jnp.linspace(-1, 2, config.num_heads)[None]
    return layers if form == "sequential" else jax.tree.map(operator.itemgetter(0), layers)


def segments(batch: int, ranks: int) -> list[np.ndarray]:
    """[B, S] each: no border; and ones on borders of ranks, off them, and round a segment of one position, a kind a
    sequence, in another order in the other half. Numbers come back after others.
    """
    on = np.arange(S) * ranks // S % 3 + 5
    off = (np.arange(S) + 3) // 7 % 3
    alone = np.where(np.arange(S) == S // max(2, ranks), 9, np.where(np.arange(S) < 20, 1, 2))
    kinds = [on, off, alone]
    return [np.full((batch, S), 4)] + [
        np.stack([kinds[(i + i // 3 + at) % 3] for i in range(batch)]) for at in range(3)
    ]


# --- the reference: one device, whole sequences, every expert on every token


def attention(params: Any, n: jax.Array, config: ModelConfig, runs: jax.Array, window: Any) -> jax.Array:
    b, s, _ = n.shape
    at = jnp.arange(s)
    queries, keys, values = project(params, n, *rope_tables(config, at[None]), config)
    shared = config.num_heads // config.num_kv_heads
    keys, values = (jnp.repeat(a, shared, axis=2) for a in (keys, values))
    logits = jnp.einsum("bsnd,bznd->bnsz", queries, keys) * attention_scale(config)
    distance = at[:, None] - at[None]
    seen = ((distance >= 0) & (distance < window))[None] & (runs[:, :, None] == runs[:, None])
    weights = jnp.where(seen[:, None], jnp.exp(logits), 0)
    total = weights.sum(-1, keepdims=True)
    if config.attention_sinks:
        total += jnp.exp(params["sinks"]).reshape(1, -1, 1, 1)
    out = jnp.einsum("bnsz,bznd->bsnd", weights / total, values).reshape(b, s, -1)
    return linear(out, params["o"], params.get("o_bias")) * config.residual_multiplier


def experts(params: Any, n: jax.Array, config: ModelConfig, mask: Any) -> Any:
    dense = dataclasses.replace(config.moe, comm=CommConfig("dense"))
    y, stats = moe(params["moe"], n, dense, token_mask=mask)
    return y * config.residual_multiplier, stats


def reference(form: str, params: Any, x: jax.Array, ids: jax.Array, mask: Any, window: Any, config: ModelConfig) -> Any:
    runs = jnp.cumsum(jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0))), 1)
    norm = lambda layer, which, x: rms_norm(x, layer[f"{which}_norm"], config.norm_eps)
    if form == "parallel":
        n = norm(params, "attention", x)
        y, stats = experts(params, n, config, mask)
        return x + attention(params, n, config, runs, window) + y, stats
    seen = []
    windowed = config.window_layers or (config.window is not None,) * config.num_layers
    for at, has in enumerate(windowed):
        layer = jax.tree.map(operator.itemgetter(at), params)
        wide = config.window if has else NO_WINDOW
        x = x + attention(layer, norm(layer, "attention", x), config, runs, wide)
        y, stats = experts(layer, norm(layer, "moe", x), config, mask)
        x = x + y
        seen.append(stats)
    return x, jax.tree.map(lambda *each: jnp.stack(each), *seen)


def coshipped(
    form: str,
    params: Any,
    x: jax.Array,
    config: ModelConfig,
    ids: Any,
    mask: Any,
    window: Any,
    mesh: Any,
    split: str,
    kv: str = "coship",
) -> Any:
    """The form, for x in order of positions."""
    ranks = 1 if mesh is None else mesh.shape["expert"]
    x = reorder(x, split, ranks, axis=1)
    how = dict(mesh=mesh, segment_ids=ids, token_mask=mask, split=split, kv=kv)
    if form == "parallel":
        y, stats = parallel_block(params, x, config, window=window, **how)
    else:
        y, stats = sequential_stack(params, x, config, **how)
    return reorder(y, split, ranks, axis=1, inverse=True), stats


# --- values and gradients


class Case(NamedTuple):
    """A compiled program; segments, routings and (where `window` says so) windows are its inputs.

    Attributes:
      form, ranks, data, split, batch, heads: what it runs on.
      comm: fields of its CommConfig.
      window: static, or "traced"; of the sequential form config.window.
      fields: further ones of its ModelConfig.
      masked: tokens at the ends are padding.
      segmented: False: nobody says what the segments are.
    """

    form: str
    ranks: int
    data: int
    split: str
    batch: int
    heads: tuple[int, int]
    comm: dict[str, Any]
    window: Any
    fields: Mapping[str, Any] = MappingProxyType({})
    masked: bool = False
    segmented: bool = True

    def __str__(self) -> str:
        kind = "-".join(f"{name}={value}" for name, value in self.comm.items())
        return f"{self.form}-{self.data}x{self.ranks}-{self.split}-{self.batch}-{self.heads[0]}:{self.heads[1]}-{kind}"


ONE, FEW = {"recv_rows_factor": None}, {"recv_rows_factor": 0.5}
DENSE, GATHER, DEDUP = {"transport": "all_to_all"}, {"transport": "all_gather"}, {"dedup": True}
MIXED = {"window": SMALL, "window_layers": (True, False)}
CASES = [
    Case("parallel", 1, 1, "contiguous", 1, (8, 8), ONE, "traced"),
    Case("parallel", 2, 1, "zigzag", 3, (8, 2), DENSE | DEDUP | FEW, "traced", masked=True),
    Case("parallel", 4, 2, "contiguous", 6, (8, 1), DENSE | ONE, SMALL, {"experts": 6}),
    Case("parallel", 8, 1, "zigzag", 1, (8, 1), GATHER | FEW, "traced"),
    Case("parallel", 4, 1, "zigzag", 3, (8, 8), GATHER | DEDUP | ONE, LARGE, {"qkv_bias": True, "output_bias": True}),
    Case("parallel", 2, 2, "contiguous", 2, (8, 8), GATHER | FEW, "traced", {"attention_sinks": True}),
    Case("parallel", 8, 1, "contiguous", 3, (8, 2), DENSE | DEDUP | ONE, LARGE, masked=True),
    Case("parallel", 4, 1, "contiguous", 1, (8, 2), DENSE | ONE, None, segmented=False),
    Case("sequential", 1, 1, "zigzag", 2, (8, 1), ONE, LARGE),
    Case("sequential", 2, 2, "contiguous", 4, (8, 2), DENSE | DEDUP | FEW, None, MIXED, masked=True),
    Case("sequential", 4, 1, "zigzag", 6, (8, 8), GATHER | ONE, SMALL, {"attention_sinks": True}),
    Case("sequential", 8, 1, "contiguous", 6, (8, 1), DENSE | DEDUP | ONE, None, {"recompute": "selective"}),
    Case("sequential", 4, 2, "zigzag", 4, (8, 2), DENSE | ONE, LARGE, {"recompute": "full"}, masked=True),
]


def evaluator(run: Any) -> Any:
    """Compiled: (params, x, ids, mask, window) -> ((loss, (y, stats)), gradients); the loss weighs every value
    otherwise.
    """

    def loss(params: Any, x: jax.Array, *inputs: Any) -> Any:
        y, stats = run(params, x, *inputs)
        weights = jnp.cos(jnp.arange(y.size)).reshape(y.shape)
        return (weights * y).sum() + balance_loss(stats).sum(), (y, stats)

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


def ours(case: Case, config: ModelConfig) -> Any:
    mesh = None if case.ranks * case.data == 1 else make_mesh(case.ranks, case.data)

    def run(params: Any, x: jax.Array, ids: Any, mask: Any, window: Any) -> Any:
        window = window if case.window == "traced" else case.window
        ids = ids if case.segmented else None
        return coshipped(case.form, params, x, config, ids, mask, window, mesh, case.split)

    return evaluator(run)


def close(got: Any, want: Any, tolerance: float) -> None:
    """Norm-wise: the largest difference is at most tolerance * the largest value."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case):
    fields = case.fields if case.form == "parallel" else {"window": case.window, **case.fields}
    config = model(case.heads, comm=case.comm, **fields)
    x = jax.random.normal(jax.random.key(1), (case.batch, S, H))
    mask, pad = None, np.zeros((case.batch, S), int)
    if case.masked:
        pad[0, -5:] = pad[-1, :3] = 100
        mask = jnp.asarray(pad == 0)
    run, plain = ours(case, config), evaluator(functools.partial(reference, case.form, config=config))
    windows = [NONE, SMALL, LARGE, NONE] if case.window == "traced" else [case.window or NONE] * 4
    kinds = segments(case.batch, case.ranks)
    rounds = []
    for ids, window, skewed in list(zip(kinds, windows, [False, False, True, True]))[: 4 if case.segmented else 1]:
        inputs = (make_params(config, case.form, skewed), x, jnp.asarray(ids + pad, jnp.int32), mask, jnp.int32(window))
        (_, (y, stats)), grads = run(*inputs)
        (_, (want, wanted)), want_grads = plain(*inputs)
        close(y, want, 1e-5)
        jax.tree.map(lambda a, b: close(a, b, 1e-4), grads, want_grads)
        assert stats.tokens.tolist() == wanted.tokens.tolist() and stats.counts.tolist() == wanted.counts.tolist()
        close(stats.prob_sum, wanted.prob_sum, 1e-5)
        rounds.append(int(stats.rounds.max()))
    expected = 0 if case.ranks == 1 else 1
    assert min(rounds) >= expected and (case.comm["recv_rows_factor"] is not None or max(rounds) == expected)
    if case.comm["recv_rows_factor"] is not None and case.segmented:
        assert max(rounds) > 1  # all tokens to two experts


def tiny(form: str, kv: str = "coship", **comm: Any) -> Any:
    """y of a form on four ranks, forward alone, as a function of its parameters and x."""
    config = model(comm={"recv_rows_factor": None, **comm})
    ids = jnp.asarray(segments(2, 4)[2], jnp.int32)
    run = lambda params, x: coshipped(form, params, x, config, ids, None, None, make_mesh(4), "zigzag", kv)
    return config, run


@pytest.mark.parametrize("form", ["parallel", "sequential"])
def test_rows_that_travel_otherwise(form):
    """The same rows in exchanges of their own: bit for bit the same. All rows, by all_gather or a ring: to rounding."""
    x = jax.random.normal(jax.random.key(1), (2, S, H))
    ys = {}
    for kv in KV_WAYS if form == "parallel" else KV_WAYS[:2]:
        config, run = tiny(form, kv)
        ys[kv], _ = jax.jit(run)(make_params(config, form), x)
    np.testing.assert_array_equal(ys["coship"], ys["separate"])
    for y in ys.values():
        close(y, ys["coship"], 1e-5)


def test_hidden_rows_are_rounded_on_their_way_and_keys_are_not():
    """As `moe` rounds them on the same mesh, whatever travels beside them; in bfloat16, keys and values too are."""
    x = jax.random.normal(jax.random.key(1), (2, S, H))
    config, run = tiny("parallel", wire_dtype="int8")
    params = make_params(config, "parallel")
    y, _ = jax.jit(run)(params, x)
    n = rms_norm(x, params["attention_norm"], config.norm_eps)
    ids = jnp.asarray(segments(2, 4)[2], jnp.int32)
    rounded = jax.jit(functools.partial(moe, config=config.moe, mesh=make_mesh(4)))(params["moe"], n)[0]
    whole = jax.jit(functools.partial(moe, config=dataclasses.replace(config.moe, comm=CommConfig("dense"))))
    runs = jnp.cumsum(jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0))), 1)
    attended = attention(params, n, config, runs, NONE)
    close(y, x + attended + rounded, 1e-5)
    assert np.abs(np.asarray(whole(params["moe"], n)[0] - rounded)).max() > 1e-4


def test_bfloat16_rows_beside_rounded_ones():
    """Parts of two, one and four bytes in one buffer; the reference routes the same bfloat16 tokens."""
    config = model(comm={"recv_rows_factor": None, "wire_dtype": "int8"}, dtype="bfloat16")
    params, x = make_params(config, "parallel"), jax.random.normal(jax.random.key(1), (3, S, H))
    ids = jnp.asarray(segments(3, 4)[1], jnp.int32)
    with jax.set_mesh(make_mesh(4)):  # the ambient mesh
        y, _ = jax.jit(lambda *args: parallel_block(*args, config, segment_ids=ids))(params, x)
    assert y.dtype == jnp.bfloat16
    want, _ = reference("parallel", params, x.astype(y.dtype), ids, None, NONE, model(dtype="bfloat16"))
    close(y.astype(jnp.float32), want.astype(jnp.float32), 2e-2)


def refusal(form: str = "parallel", shape: Any = (2, S, H), mesh: Any = (4, 1), config: Any = None, **how: Any) -> str:
    config = model() if config is None else config
    block = parallel_block if form == "parallel" else sequential_stack
    mesh = make_mesh(*mesh) if isinstance(mesh, tuple) else mesh
    with pytest.raises(ConfigError) as error:
        block(make_params(config, form), jnp.zeros(shape), config, mesh=mesh, **how)
    return str(error.value)


def with_moe(**fields: Any) -> ModelConfig:
    return dataclasses.replace(model(), moe=dataclasses.replace(model().moe, **fields))


def test_refusals_name_what_works():
    assert "batch=3: must be a multiple of 2: 1 replica, two microbatches each; batch=4 works" in refusal(
        "sequential", (3, S, H)
    )
    assert "batch=6: must be a multiple of 4" in refusal("sequential", (6, S, H), (2, 2))
    assert "batch=3: must be a multiple of 2: 2 replicas; batch=4 works" in refusal(shape=(3, S, H), mesh=(2, 2))
    assert "sequence=30: contiguous over 4 ranks" in refusal(shape=(2, 30, H))
    assert "sequence=36: zigzag over 4 ranks" in refusal(shape=(2, 36, H), split="zigzag")
    assert "sequence=40 works" in refusal(shape=(2, 36, H), split="zigzag")
    assert "x='float32[2, 32, 8]'" in refusal(shape=(2, S, 8))
    assert "kv='together': must be one of coship, separate, all_gather, ring" in refusal(kv="together")
    assert "split='striped'" in refusal(split="striped")
    for comm in ({"mode": "padded"}, {"num_chunks": 2}, {"messages": "expert"}, {"capacity_factor": 1.0}):
        ((field, value),) = comm.items()
        for form in ("parallel", "sequential"):
            assert f"{field}={value!r}: " in refusal(form, config=model(comm=comm))
    assert "shard_sequence=False: positions are split" in refusal(config=with_moe(shard_sequence=False))
    assert "segment_ids='int32[2, 31]'" in refusal(segment_ids=jnp.zeros((2, 31), jnp.int32))
    assert "segment_ids='float32[2, 32]'" in refusal(segment_ids=jnp.zeros((2, 32)))
    assert "token_mask='int32[2, 32]'" in refusal(token_mask=jnp.ones((2, 32), jnp.int32))
    assert "window=None: window_layers" in refusal(config=model(**MIXED))
    for window in (0, np.int64(0), np.int32(-3)):
        assert "must be an integer of at least 1" in refusal(window=window)
    assert "window='float32[]': must be one integer" in refusal(window=jnp.float32(2.5))
    assert "window='int32[2]'" in refusal(window=jnp.array([2, 3]))


def test_a_window_that_all_layers_have_needs_no_saying():
    x = jax.random.normal(jax.random.key(1), (1, S, H))
    params = make_params(model(), "parallel")
    for layers, window in (((True, True), SMALL), ((False, False), NONE)):
        config = model(comm=ONE, window=SMALL, window_layers=layers)
        y, _ = parallel_block(params, x, config, mesh=make_mesh(2))
        want, _ = reference("parallel", params, x, jnp.zeros((1, S), jnp.int32), None, window, config)
        close(y, want, 1e-5)


def test_parameters_of_another_configuration_are_refused():
    config = model()
    one, stack = make_params(config, "parallel"), make_params(config, "sequential")
    x = jnp.zeros((2, S, H))
    three = jax.tree.map(lambda a: jnp.concatenate([a, a[:1]]), stack)
    without = {name: a for name, a in one.items() if name != "moe"}
    for block, params, settings, words in (
        (sequential_stack, three, config, r"\['attention_norm'\]=\[3, 16\]: .* works"),
        (sequential_stack, one, config, r"\['attention_norm'\]=\[16\]"),
        (parallel_block, stack, config, r"\['attention_norm'\]=\[2, 16\]"),
        (parallel_block, one, model(attention_sinks=True), "params names=.*'sinks'.* works"),
        (parallel_block, {**one, "q_bias": one["q"][0]}, config, "params names=.*'q_bias'"),
        (parallel_block, without, config, "params names=.*'moe'.* works"),
    ):
        with pytest.raises(ConfigError, match=words):
            block(params, x, settings, mesh=make_mesh(4))


def test_meshes_that_are_refused():
    devices = np.array(jax.devices())
    more = Mesh(devices.reshape(2, 2, 2), ("data", "expert", "tensor"), axis_types=(AxisType.Auto,) * 3)
    assert "mesh axes besides token_axes=('tensor',)" in refusal(mesh=more)
    explicit = Mesh(devices.reshape(2, 4), ("data", "expert"), axis_types=(AxisType.Explicit,) * 2)
    assert "mesh axis_types=" in refusal(mesh=explicit)

    def inside(x: jax.Array) -> jax.Array:
        return parallel_block(make_params(model(), "parallel"), x, model())[0]

    with pytest.raises(ConfigError, match=r"mesh manual axes=.*a block makes its own shard_map"):
        jax.shard_map(inside, mesh=make_mesh(4), in_specs=P(), out_specs=P(), check_vma=False)(jnp.zeros((2, S, H)))
