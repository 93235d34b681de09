"""The stages of a layer in a caller's own shard_map: make_plan, dispatch, run_experts, combine, extra_rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import CommConfig, ConfigError, MoEConfig, RouterConfig, Routing, init_params, make_mesh, make_plan, moe
from jax_ep.experts import apply_experts

H, I, E, K, R, T = 16, 24, 8, 2, 4, 32
KINDS = ({}, {"dedup": True}, {"num_chunks": 2}, {"messages": "expert"}, {"dedup": True, "num_chunks": 3})


def by_hand(cfg, transport):
    """(experts' params, x, routing) -> y, as the documentation of `jax_ep.paths` has it."""

    def expert_fn(rows, index, sizes, weights, params):
        return apply_experts(rows, index, sizes, weights, params, cfg)

    def run(params, x, experts, weights):
        routing = Routing(experts, weights)
        plan = make_plan(experts, cfg, axis_name="expert", transport=transport)
        dispatched = jax_ep.dispatch(x, routing, plan, cfg)
        rows = jax_ep.run_experts(expert_fn, dispatched, params)
        y = jax_ep.combine(rows, dispatched, routing, cfg)
        more = jax_ep.extra_rounds(x, routing, params, dispatched.plan, expert_fn, cfg)
        return y if more is None else y + more

    specs = (P("expert"),) * 4
    return jax.shard_map(run, mesh=make_mesh(R), in_specs=specs, out_specs=P("expert"), check_vma=False)


def inputs():
    cfg = MoEConfig(H, I, E, RouterConfig(K), CommConfig("dense"))
    params, x = init_params(cfg, jax.random.key(0)), jax.random.normal(jax.random.key(1), (T, H))
    rng = np.random.default_rng(0)
    ids = np.where(rng.random((T, K)) < 0.5, rng.integers(0, 2, (T, K)), rng.integers(0, E, (T, K)))  # skewed
    return cfg, params, x, jnp.asarray(ids, jnp.int32), jnp.asarray(rng.random((T, K)), jnp.float32)


@pytest.mark.parametrize("transport", ["ragged", "all_to_all"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_stages_by_hand_equal_dense(kind, transport):
    dense, params, x, ids, weights = inputs()
    cfg = MoEConfig(H, I, E, RouterConfig(K), CommConfig(recv_rows_factor=0.5, **kind))
    hand = by_hand(cfg, transport)

    def square(run):
        loss = lambda p, x, w: jnp.square(run(p, x, w)).sum()
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(params["experts"], x, weights)

    got = square(lambda p, x, w: hand(p, x, ids, w))
    want = square(lambda p, x, w: moe({**params, "experts": p}, x, dense, routing=Routing(ids, w))[0])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.abs(b).max()))


@pytest.mark.parametrize(
    ("given", "used"), [("auto", "all_to_all"), ("ragged", "ragged"), ("all_gather", "all_gather")]
)
def test_make_plan_takes_the_transport_of_the_config(given, used):
    cfg = MoEConfig(H, I, E, RouterConfig(K), CommConfig(transport=given))

    def run(experts):
        assert make_plan(experts, cfg, axis_name="expert").geometry.transport == used
        return experts

    experts, spec = jnp.zeros((T, K), jnp.int32), P("expert")
    jax.shard_map(run, mesh=make_mesh(R), in_specs=spec, out_specs=spec, check_vma=False)(experts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transport": "auto"}, "transport='auto': must be ragged, all_to_all or all_gather"),
        ({"experts": jnp.zeros((0, 2), jnp.int32)}, r"experts=\[0, 2\]: must be \[T, K\] with at least one of each"),
        ({"experts": jnp.zeros(4, jnp.int32)}, r"experts=\[4\]: must be"),
    ],
)
def test_make_plan_refuses(change, message):
    cfg = MoEConfig(H, I, E, RouterConfig(K))
    arguments = {"experts": jnp.zeros((4, 2), jnp.int32), "transport": "all_to_all"} | change
    with pytest.raises(ConfigError, match=message):
        make_plan(arguments["experts"], cfg, axis_name=None, transport=arguments["transport"])


def test_extra_rounds_want_a_dispatched_plan():
    cfg = MoEConfig(H, I, E, RouterConfig(K), CommConfig(recv_rows_factor=0.5))

    def run(x, experts):
        plan = make_plan(experts, cfg, axis_name="expert")
        routing = Routing(experts, jnp.ones(experts.shape))
        return jax_ep.extra_rounds(x, routing, None, plan, lambda *a: a[0], cfg)

    with pytest.raises(ConfigError, match=r"plan\.rounds=None: they come with the first dispatch"):
        jax.shard_map(run, mesh=make_mesh(R), in_specs=P("expert"), out_specs=P("expert"), check_vma=False)(
            jnp.zeros((T, H)), jnp.zeros((T, K), jnp.int32)
        )


@pytest.mark.parametrize("tokens", [32, 30])
@pytest.mark.parametrize("mode", ["dense", "packed"])
@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (("tensor", "data", "expert"), "EAA"),
        (("tensor", "data", "expert"), "AEA"),
        (("data", "tensor", "expert"), "AAE"),
        (("data", "tensor", "expert"), "EAE"),
    ],
)
def test_meshes_whose_axes_are_of_several_types(names, kinds, mode, tokens):
    dense, params, x, ids, weights = inputs()
    types = tuple(AxisType.Explicit if kind == "E" else AxisType.Auto for kind in kinds)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), names, axis_types=types)
    cfg = MoEConfig(H, I, E, RouterConfig(K), CommConfig(mode))
    routing = Routing(ids[:tokens], weights[:tokens])
    want, _ = moe(params, x[:tokens], dense, routing=routing)
    y, _ = moe(params, x[:tokens], config=cfg, mesh=mesh, routing=routing)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
    with jax.set_mesh(mesh):
        y, _ = jax.jit(moe, static_argnames="config")(params, x[:tokens], config=cfg, routing=routing)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
