"""`moe` and `MoELayer` the way people use them: under transformations, on their own meshes, in other dtypes, with odd
sizes.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import CommConfig, ConfigError, MoEConfig, MoELayer, RouterConfig, Routing, init_params, make_mesh, moe
from jax_ep.layer import param_shardings, resolve_transport

H, I, E, K = 16, 32, 8, 2


def config(comm=None, **fields):
    return MoEConfig(H, I, fields.pop("num_experts", E), RouterConfig(K), comm=comm or CommConfig(), **fields)


BASE = config(CommConfig(recv_rows_factor=1.0))
PARAMS = init_params(BASE, jax.random.key(0))
X = jax.random.normal(jax.random.key(1), (32, H))
X3 = X.reshape(4, 8, H)


@functools.cache
def reference():
    """y and the gradients of sum(y^2) on one device, dense."""
    cfg = config(CommConfig(mode="dense"))
    loss = lambda p, x: jnp.square(moe(p, x, cfg)[0]).sum()
    return jax.jit(lambda p, x: (moe(p, x, cfg)[0], jax.grad(loss, (0, 1))(p, x)))(PARAMS, X)


def close(got, want, tol=1e-5):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64).reshape(np.shape(g))
        assert np.abs(g - w).max() <= tol * max(np.abs(w).max(), 1e-3)


# --- transformations


def test_runs_without_jit_and_inside_checkpoint_and_grad():
    mesh = make_mesh(4)
    y, _ = moe(PARAMS, X, BASE, mesh=mesh)
    close(y, reference()[0])
    kept = jax.checkpoint_policies.save_only_these_names(*jax_ep.CHECKPOINT_NAMES)
    for policy in (None, kept):
        layer = jax.checkpoint(lambda p, x: moe(p, x, BASE, mesh=mesh)[0], policy=policy)
        grads = jax.jit(jax.grad(lambda p, x, layer=layer: jnp.square(layer(p, x)).sum(), (0, 1)))(PARAMS, X)
        close(grads, reference()[1], 1e-4)


@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_stacked_layers(remat):
    """Three layers by lax.scan equal three by hand; the stats come out stacked."""
    mesh = make_mesh(4)
    layers = [init_params(BASE, jax.random.key(i)) for i in range(3)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *layers)

    def through_scan(stacked, x):
        def body(x, p):
            y, stats = moe(p, x, BASE, mesh=mesh)
            return x + y, stats

        return jax.lax.scan(jax.checkpoint(body) if remat else body, x, stacked)

    def by_hand(layers, x):
        for p in layers:
            x = x + moe(p, x, config(CommConfig(mode="dense")))[0]
        return x

    (y, stats), pull = jax.jit(lambda s, x: (through_scan(s, x), jax.grad(lambda s: through_scan(s, x)[0].sum())(s)))(
        stacked, X
    )
    want, want_pull = jax.jit(lambda s, x: (by_hand(s, x), jax.grad(lambda s: by_hand(s, x).sum())(s)))(layers, X)
    close(y, want)
    close(pull, jax.tree.map(lambda *a: jnp.stack(a), *want_pull), 1e-4)
    assert stats.counts.shape == (3, E)
    np.testing.assert_array_equal(stats.counts.sum(1), [X.shape[0] * K] * 3)
    assert jax_ep.balance_loss(stats).shape == (3,)


def test_nnx_layer_trains_under_nnx_jit():
    mesh = make_mesh(4, 2)
    layer = MoELayer(BASE, mesh, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)
    target = jnp.roll(X, 1, axis=1)

    @nnx.jit
    def step(layer, optimizer):
        def loss(layer):
            y, stats = layer(X)
            return jnp.square(y - target).mean() + 0.01 * jax_ep.balance_loss(stats)

        value, grads = nnx.value_and_grad(loss)(layer)
        optimizer.update(layer, grads)
        return value

    losses = [float(step(layer, optimizer)) for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0], losses
    assert layer.experts["up"][...].sharding.spec == P("expert")


def test_nnx_scan_over_layers():
    mesh = make_mesh(4)

    @nnx.vmap(in_axes=0, out_axes=0)
    def create(key):
        return MoELayer(BASE, None, rngs=nnx.Rngs(key))

    layers = create(jax.random.split(jax.random.key(0), 2))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, layer):
        return x + moe(layer.params(), x, BASE, mesh=mesh)[0]

    y = run(X, layers)
    x = X
    for i in range(2):
        p = jax.tree.map(lambda a, i=i: a[i], layers.params())
        x = x + moe(p, x, BASE)[0]
    close(y, x)


def test_the_layer_is_created_on_its_devices_and_equals_moe():
    mesh = make_mesh(4, 2)
    cfg = config(num_shared_experts=1, shared_gate=True)
    layer = MoELayer(cfg, mesh, rngs=nnx.Rngs(3))
    for path, value in jax.tree_util.tree_leaves_with_path(layer.params()):
        want = P("expert") if path[0].key == "experts" else P()
        assert value.sharding.spec == want, path
    y, _ = layer(X)
    alone = jax.device_get(layer.params())
    close(y, moe(alone, X, cfg)[0])
    assert jax.tree.structure(param_shardings(cfg, mesh)) == jax.tree.structure(layer.params())


def test_a_selection_bias_is_no_param():
    router = RouterConfig(K, score_function="sigmoid", selection_bias=True)
    layer = MoELayer(dataclasses.replace(BASE, router=router), rngs=nnx.Rngs(0))
    names = {path[-1] for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
    assert "selection_bias" not in names and {"kernel", "up"} <= names
    assert layer(X)[0].shape == X.shape


# --- meshes


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_users_own_mesh_with_a_third_axis(kind):
    grid = np.array(jax.devices()).reshape(2, 2, 2)
    mesh = Mesh(grid, ("replica", "ep", "tensor"), axis_types=(kind,) * 3)
    cfg = dataclasses.replace(BASE, expert_axis="ep", token_axes=("replica", "ep"))
    for x, spec in ((X, P(("replica", "ep"))), (X3, P("replica", "ep")), (X3, P(("replica", "ep"))), (X, P())):
        placed = jax.device_put(x, NamedSharding(mesh, spec))

        def loss(p, x):
            y = moe(p, x, cfg, mesh=mesh)[0]
            return jnp.square(y).sum(), y

        with jax.set_mesh(mesh):
            grads, y = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(PARAMS, placed)
        close(y, reference()[0].reshape(x.shape))
        close(grads, reference()[1], 1e-4)
    close(moe(PARAMS, placed, cfg, mesh=mesh)[0], reference()[0])  # outside jit, without an ambient mesh


@pytest.mark.parametrize("transport", ["ragged", "all_to_all"])
def test_replicas_that_need_different_rounds_beside_a_tensor_axis(transport):
    """The compiler puts collectives of its own into the loops of a partly manual program: all devices must turn
    alike.
    """
    axes = ("data", "expert", "tensor")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), axes, axis_types=(AxisType.Auto,) * 3)
    ids = np.zeros((32, K), np.int32)
    ids[:16] = (
        np.arange(16 * K).reshape(16, K) % E
    )  # balanced on the first replica, everything to one expert on the other
    forced = Routing(jnp.asarray(ids), jnp.full((32, K), 0.5))
    experts = {
        n: jax.device_put(w, NamedSharding(mesh, P("expert", None, "tensor"))) for n, w in PARAMS["experts"].items()
    }
    placed = jax.device_put(X, NamedSharding(mesh, P(("data", "expert"), "tensor")))

    def loss(cfg, on, p, x):
        y, stats = moe(p, x, cfg, mesh=on, routing=forced)
        return jnp.square(y).sum(), stats

    cfg = config(CommConfig(transport=transport, recv_rows_factor=0.3))
    run = jax.jit(jax.grad(functools.partial(loss, cfg, mesh), (0, 1), has_aux=True))
    grads, stats = run({**PARAMS, "experts": experts}, placed)
    dense = config(CommConfig(mode="dense"))
    want, _ = jax.jit(jax.grad(functools.partial(loss, dense, None), (0, 1), has_aux=True))(PARAMS, X)
    close(grads, want, 1e-4)
    assert int(stats.rounds) > 2


@pytest.mark.parametrize("comm", [dict(mode="padded"), dict(recv_rows_factor=0.5), dict(transport="ragged")], ids=str)
@pytest.mark.parametrize(("tokens", "factor"), [(17, 0.6), (17, 1.0), (9, 0.6), (32, 0.4)])
def test_capacity_counts_the_tokens_that_share_an_expert_axis(comm, tokens, factor):
    """Two replicas, the second one with padding: each expert keeps its first rows of each replica, the rest add 0."""
    rng = np.random.default_rng(tokens)
    ids = np.minimum(rng.geometric(0.4, (tokens, K)) - 1, E - 1)
    weights = rng.random((tokens, K)).astype(np.float32)
    share = -(-tokens // 8) * 4  # tokens of a replica, the last one's padding included
    kept = np.zeros_like(weights)
    for replica in range(0, tokens, share):
        mine = range(replica, min(replica + share, tokens))
        capacity, taken = int(np.ceil(factor * len(mine) * K / E)), np.zeros(E, int)
        for t in mine:
            for k in range(K):
                kept[t, k] = taken[ids[t, k]] < capacity
                taken[ids[t, k]] += 1
    cfg = config(CommConfig(capacity_factor=factor, **comm))
    forced = Routing(jnp.asarray(ids, jnp.int32), jnp.asarray(weights))
    run = jax.jit(lambda x, r: moe(PARAMS, x, cfg, mesh=make_mesh(4, 2), routing=r))
    y, stats = run(X[:tokens], forced)
    want, _ = moe(PARAMS, X[:tokens], config(CommConfig(mode="dense")), routing=forced._replace(weights=weights * kept))
    assert int(stats.dropped_rows) == int((kept == 0).sum())
    close(y, want)


def test_what_overflows_in_an_expert_nobody_asked_adds_nothing():
    big = {n: w.at[3].mul(1e4) for n, w in PARAMS["experts"].items()}
    forced = Routing(jnp.full((32, 1), 2, jnp.int32), jnp.ones((32, 1)))
    for mode in ("dense", "packed"):
        cfg = config(CommConfig(mode=mode), dtype="float16")
        run = jax.value_and_grad(lambda p, x, cfg=cfg: moe(p, x, cfg, routing=forced)[0].sum(), (0, 1))
        for leaf in jax.tree.leaves(run({**PARAMS, "experts": big}, X)):
            assert bool(jnp.isfinite(leaf).all()), mode
        broken = {**PARAMS, "experts": {n: w.at[3].set(jnp.nan) for n, w in big.items()}}
        value, (_, d_x) = run(broken, X)
        assert bool(jnp.isfinite(value)) and bool(jnp.isfinite(d_x).all()), mode


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_ambient_mesh(kind):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("data", "expert"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        y, stats = jax.jit(lambda p, x: moe(p, x, BASE))(PARAMS, X)
    close(y, reference()[0])
    assert int(stats.rounds) >= 1


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("tokens", [1, 13, 31])
def test_tokens_that_nothing_divides(kind, tokens):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "expert"), axis_types=(kind,) * 2)
    y, stats = jax.jit(lambda p, x: moe(p, x, BASE, mesh=mesh))(PARAMS, X[:tokens])
    close(y, reference()[0][:tokens])
    assert int(stats.tokens) == tokens
    y, _ = moe(PARAMS, X[None, :tokens], BASE, mesh=mesh)
    close(y[0], reference()[0][:tokens])


@pytest.mark.parametrize("made_for", [1, 4, 8])
@pytest.mark.parametrize("mode", ["packed", "dense"])
def test_parameters_made_for_another_mesh(made_for, mode):
    """Empty experts are cut or added: 6 experts are 6, 8 and 8 on one, four and eight ranks."""
    cfg = config(CommConfig(mode=mode), num_experts=6)
    params = init_params(cfg, jax.random.key(0), ranks=made_for)
    want, _ = moe(init_params(cfg, jax.random.key(0)), X, config(CommConfig(mode="dense"), num_experts=6))
    for ranks in (None, 2, 4):
        close(moe(params, X, cfg, mesh=ranks and make_mesh(ranks))[0], want)


def test_inside_a_shard_map_over_other_axes():
    """Manual over data only: the layer spreads over the expert axis itself."""
    mesh = make_mesh(4, 2)
    run = jax.shard_map(
        lambda p, x: moe(p, x, BASE, mesh=mesh)[0],
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
        axis_names={"data"},
        check_vma=False,
    )
    close(jax.jit(run)(PARAMS, X), reference()[0])


def test_inside_a_shard_map_that_checks_replication():
    run = jax.shard_map(
        lambda p, x: moe(p, x, BASE)[0],
        mesh=make_mesh(4),
        in_specs=({"router": P(), "experts": P("expert")}, P("expert")),
        out_specs=P("expert"),
    )
    with pytest.raises(ConfigError, match=r"check_vma=True.*check_vma=False works"):
        run(PARAMS, X)


def test_ids_of_a_wider_dtype_do_not_wrap():
    with jax.enable_x64(True):
        ids = jnp.full((32, 1), 2**32 + 1, jnp.int64)
        y, stats = moe(PARAMS, X, BASE, routing=Routing(ids, jnp.ones((32, 1), jnp.float32)))
        assert int(stats.counts.sum()) == 0 and not bool(y.any())


def test_an_infinite_weight_stays_in_its_token():
    weights = jnp.ones((32, K)).at[5, 0].set(jnp.inf)
    ids = jnp.asarray(np.arange(32 * K).reshape(32, K) % E, jnp.int32)
    cfg = config(CommConfig(recv_rows_factor=0.5))
    y, _ = moe(PARAMS, X, cfg, mesh=make_mesh(4), routing=Routing(ids, weights))
    assert bool(jnp.isfinite(jnp.delete(y, 5, 0)).all()) and bool(jnp.isinf(y[5]).all())


@pytest.mark.parametrize("comm", [dict(capacity_factor=1e308), dict(recv_rows_factor=1e308)], ids=str)
def test_huge_factors_mean_all_there_is(comm):
    y, stats = moe(PARAMS, X, config(CommConfig(**comm)), mesh=make_mesh(4))
    close(y, reference()[0])
    assert int(stats.dropped_rows) == 0


@pytest.mark.parametrize("split", [P("expert"), P(None, "expert"), P()])
def test_capacity_does_not_depend_on_where_x_lies(split):
    """First come in the order of x, jitted or not, whatever the sharding."""
    cfg = config(CommConfig(capacity_factor=0.5))
    mesh = make_mesh(4)
    x = jax.device_put(X3, NamedSharding(mesh, split))
    want, stats = moe(PARAMS, X, cfg)
    assert int(stats.dropped_rows) > 0
    close(moe(PARAMS, x, cfg, mesh=mesh)[0], want)
    close(jax.jit(lambda x: moe(PARAMS, x, cfg, mesh=mesh)[0])(x), want)


@pytest.mark.parametrize("mesh", [None, (4, 1)])
def test_no_tokens_at_all(mesh):
    on = mesh and make_mesh(*mesh)
    y, stats = jax.jit(lambda p, x: moe(p, x, BASE, mesh=on))(PARAMS, X[:0])
    assert y.shape == (0, H) and int(stats.tokens) == 0 and int(stats.counts.sum()) == 0
    assert moe(PARAMS, X3[:, :0], BASE, mesh=on)[0].shape == (4, 0, H)


def test_inside_a_shard_map_of_ones_own():
    """The stages and the whole layer, called where the axes are manual already."""
    mesh = make_mesh(4)
    cfg = config(CommConfig(recv_rows_factor=None))

    def stages(p, x):
        from jax_ep.experts import apply_experts

        routing = jax_ep.route(jax_ep.router_logits(x, p["router"]["kernel"]), cfg.router)
        plan = jax_ep.make_plan(routing.experts, cfg, axis_name="expert")
        there = jax_ep.dispatch(x, routing, plan, cfg)
        rows = apply_experts(there.rows, there.index, there.group_sizes, there.weights, p["experts"], cfg)
        return jax_ep.combine(rows, there, routing, cfg)

    specs = {"router": {"kernel": P()}, "experts": {n: P("expert") for n in ("gate", "up", "down")}}
    for body in (stages, lambda p, x: moe(p, x, cfg)[0], lambda p, x: moe(p, x, cfg, mesh=mesh)[0]):
        run = jax.shard_map(body, mesh=mesh, in_specs=(specs, P("expert")), out_specs=P("expert"), check_vma=False)
        close(jax.jit(run)(PARAMS, X), reference()[0])


def test_experts_that_the_ranks_do_not_divide():
    """60 on 8: padded to 64, by the layer once or by moe on the fly; equal to one device."""
    cfg = config(num_experts=60)
    mesh = make_mesh(8)
    layer = MoELayer(cfg, mesh, rngs=nnx.Rngs(0))
    assert layer.experts["up"].shape == (64, H, I) and "60 <padded with empty experts to 64 on 8" in repr(cfg)
    padded = jax.device_get(layer.params())
    true = {**padded, "experts": {n: w[:60] for n, w in padded["experts"].items()}}
    want = moe(true, X, cfg)[0]
    close(layer(X)[0], want)
    close(moe(true, X, cfg, mesh=mesh)[0], want)
    loss = lambda p: jnp.square(moe(p, X, cfg, mesh=mesh)[0]).sum()
    grads = jax.jit(jax.grad(loss))(padded)
    assert all(float(jnp.abs(g[60:]).max()) == 0 for g in grads["experts"].values())


# --- dtypes and layouts


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mode", ["dense", "allgather", "padded", "packed"])
def test_sixteen_bit(dtype, mode):
    """Within the rounding of the dtype of the float32 layer, forward and backward, several rounds included."""
    comm = CommConfig(recv_rows_factor=1.0) if mode == "packed" else CommConfig(mode=mode)
    cfg = config(comm, dtype=dtype)
    mesh = make_mesh(4)
    run = jax.jit(
        lambda p, x: (
            moe(p, x, cfg, mesh=mesh)[0],
            jax.grad(lambda p, x: jnp.square(moe(p, x, cfg, mesh=mesh)[0].astype(jnp.float32)).sum(), (0, 1))(p, x),
        )
    )
    y, grads = run(PARAMS, X)
    assert y.dtype == jnp.dtype(dtype) and jax.tree.leaves(grads)[0].dtype == jnp.float32
    eps = float(jnp.finfo(dtype).eps)
    close(y, reference()[0], 8 * eps)
    close(grads, reference()[1], 16 * eps)


@pytest.mark.parametrize("shape", [(32, H), (4, 8, H), (2, 16, H), (1, 32, H), (32, 1, H)])
def test_shapes(shape):
    mesh = make_mesh(4, 2)
    mask = jnp.arange(32).reshape(shape[:-1]) % 3 > 0
    y, stats = jax.jit(lambda p, x, m: moe(p, x, BASE, mesh=mesh, token_mask=m))(PARAMS, X.reshape(shape), mask)
    assert y.shape == shape and int(stats.tokens) == int(mask.sum())
    want = jnp.where(mask.reshape(-1, 1), reference()[0], 0)
    close(y, want.reshape(shape))


def test_masked_rows_may_hold_anything():
    """NaN in a masked token reaches no output and no gradient."""
    mesh = make_mesh(4)
    mask = jnp.arange(32) % 2 == 0
    dirty = jnp.where(mask[:, None], X, jnp.nan)
    loss = lambda p, x: jnp.square(moe(p, x, BASE, mesh=mesh, token_mask=mask)[0]).sum()
    value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(PARAMS, dirty)
    want, want_grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(PARAMS, X)
    close((value, grads), (want, want_grads), 1e-6)


def test_unused_tails_of_every_buffer_may_hold_nan():
    """Between the stages, rows that nobody sent become NaN, forward and in the cotangents, and nothing changes."""
    from jax_ep.experts import apply_experts

    mesh = make_mesh(4)

    @jax.custom_vjp
    def poison(rows, used):
        return jnp.where(used[:, None], rows, jnp.nan)

    poison.defvjp(lambda r, u: (poison(r, u), u), lambda u, d: (poison(d, u), None))

    def body(cfg, p, x, mask):
        routing = jax_ep.route(jax_ep.router_logits(x, p["router"]["kernel"]), cfg.router)
        routing = Routing(jnp.where(mask[:, None], routing.experts, -1), routing.weights)
        transport = cfg.comm.transport if cfg.comm.mode == "packed" else "all_to_all"
        plan = jax_ep.make_plan(routing.experts, cfg, axis_name="expert", transport=transport)
        there = jax_ep.dispatch(x, routing, plan, cfg)
        rows = there.rows.shape[0]
        place = jnp.arange(there.index.shape[0])
        index = jnp.where(place < there.group_sizes.sum(), there.index, rows)
        used = jnp.zeros(rows, bool).at[index].set(True, mode="drop")
        out = apply_experts(poison(there.rows, used), there.index, there.group_sizes, there.weights, p["experts"], cfg)
        return jax_ep.combine(poison(out, used), there, routing, cfg)

    specs = {"router": {"kernel": P()}, "experts": {n: P("expert") for n in ("gate", "up", "down")}}
    mask = jnp.arange(32) % 5 != 1
    dense = config(CommConfig(mode="dense"))
    loss = lambda p, x: jnp.square(moe(p, x, dense, token_mask=mask)[0]).sum()
    want = jax.grad(loss, (0, 1))(PARAMS, X)
    for comm in (
        CommConfig(mode="padded"),
        CommConfig(transport="ragged", recv_rows_factor=None),
        CommConfig(transport="all_to_all", recv_rows_factor=None),
    ):
        run = jax.shard_map(
            functools.partial(body, config(comm)),
            mesh=mesh,
            in_specs=(specs, P("expert"), P("expert")),
            out_specs=P("expert"),
            check_vma=False,
        )
        grads = jax.jit(jax.grad(lambda p, x, run=run: jnp.square(run(p, x, mask)).sum(), (0, 1)))(PARAMS, X)
        assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))
        close(grads, want, 1e-4)


# --- choices and refusals


class Card:
    def __init__(self, platform, kind, process=0):
        self.platform, self.device_kind, self.process_index = platform, kind, process


@pytest.mark.parametrize(
    ("cards", "want"),
    [
        ([Card("cpu", "cpu")] * 4, "all_to_all"),
        ([Card("tpu", "TPU v5e")] * 4, "ragged"),
        ([Card("gpu", "NVIDIA GeForce RTX 4090")] * 4, "all_to_all"),
        ([Card("gpu", "NVIDIA H100 80GB HBM3")] * 4, "ragged"),
        ([Card("gpu", "NVIDIA A100-SXM4-80GB")] * 8, "ragged"),
        ([Card("gpu", "NVIDIA H100 80GB HBM3")] * 16, "all_to_all"),
        ([Card("gpu", "NVIDIA H100 80GB HBM3", i // 2) for i in range(4)], "all_to_all"),
    ],
    ids=lambda v: v if isinstance(v, str) else f"{len(v)}x{v[0].device_kind}",
)
def test_auto_transport(cards, want):
    devices = np.array(cards, object).reshape(1, -1)
    mesh = types.SimpleNamespace(devices=devices, shape={"data": 1, "expert": len(cards)})
    assert resolve_transport(BASE, mesh) == want
    assert resolve_transport(config(CommConfig(transport="ragged")), mesh) == "ragged"
    assert resolve_transport(BASE, None) == "all_to_all"


GOOD = Routing(jnp.zeros((32, K), jnp.int32), jnp.ones((32, K)))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (dict(x=X[:, :8]), "x="),
        (dict(x=X[0]), "x="),
        (dict(x=X.astype(jnp.int32)), "x="),
        (dict(token_mask=jnp.ones(31, bool)), "token_mask="),
        (dict(token_mask=jnp.ones(32)), "token_mask="),
        (dict(routing=GOOD._replace(weights=jnp.ones((32, 3)))), "routing.weights="),
        (dict(routing=GOOD._replace(experts=jnp.zeros((32, K)))), "routing.experts="),
        (dict(routing=GOOD._replace(experts=jnp.zeros((16, K), jnp.int32))), "routing.experts="),
        (dict(routing=GOOD._replace(probs=jnp.zeros((32, 3)))), "routing.probs="),
        (dict(routing=Routing(jnp.zeros((32, 0), jnp.int32), jnp.ones((32, 0)))), "routing.experts="),
        (dict(params={**PARAMS, "router": {"kernel": jnp.zeros((H, 3))}}), "params"),
        (dict(params={}), "params"),
        (dict(params={"experts": PARAMS["experts"]}), "params"),
        (dict(params={**PARAMS, "experts": {n: w[:4] for n, w in PARAMS["experts"].items()}}), "params"),
        (dict(params={**PARAMS, "experts": {**PARAMS["experts"], "down": jnp.zeros((E, 3, H))}}), "params"),
        (dict(params={**PARAMS, "experts": {**PARAMS["experts"], "up_bias": jnp.zeros((E, I))}}), "params"),
        (dict(config=config(num_shared_experts=1)), "params"),
        (dict(config=dataclasses.replace(BASE, expert_axis="model", token_axes=("data", "model"))), "expert_axis="),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_refusals_name_the_field(call, named):
    arguments = dict(params=PARAMS, x=X, config=BASE, mesh=make_mesh(4)) | call
    with pytest.raises(ConfigError, match=f"{named}.*works"):
        moe(**arguments)
