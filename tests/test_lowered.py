"""What the layer asks of a machine, read off programs lowered for CUDA on this one: collectives, loops, calls to the
host.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import CHECKPOINT_NAMES, CommConfig, MoEConfig, RouterConfig, init_params, make_mesh, moe
from jax_ep.aot import count_collectives, host_calls
from jax_ep.routing import balance_loss, z_loss

H, I, E, K, T = 16, 32, 8, 2, 32
EXCHANGES = ("ragged_all_to_all", "all_to_all", "all_gather", "reduce_scatter", "collective_permute")


def config(**comm):
    return MoEConfig(H, I, E, RouterConfig(K), comm=CommConfig(**comm))


def forward(cfg, mesh):
    def run(params, x):
        y, stats = moe(params, x, cfg, mesh=mesh)
        return y, stats

    return run


def with_backward(cfg, mesh, policy=None):
    def layer(params, x):
        y, stats = moe(params, x, cfg, mesh=mesh)
        return jnp.square(y).sum() + balance_loss(stats) + z_loss(stats)

    layer = layer if policy is None else jax.checkpoint(layer, policy=policy)
    return jax.value_and_grad(layer, (0, 1))


@functools.cache
def lowered(kind, cfg, ranks=4, data=1, policy_names=None):
    mesh = make_mesh(ranks, data)
    make = {"forward": forward, "backward": with_backward}[kind]
    if policy_names is not None:
        make = functools.partial(make, policy=jax.checkpoint_policies.save_only_these_names(*policy_names))
    params = jax.eval_shape(functools.partial(init_params, cfg, ranks=ranks), jax.random.key(0))
    x = jax.ShapeDtypeStruct((T, H), jnp.float32)
    return jax.jit(make(cfg, mesh)).trace(params, x).lower(lowering_platforms=("cuda",)).as_text()


def counts(text, loop=False):
    return {k: (c.loop if loop else c.straight) for k, c in count_collectives(text).items() if k in EXCHANGES}


def exactly(**kinds):
    return {k: kinds.get(k, 0) for k in EXCHANGES}


ONE_ROUND = dict(recv_rows_factor=None)


def test_packed_ragged_exchanges():
    """Two payload collectives and one of counts forward; two more payload ones for the backward."""
    cfg = config(transport="ragged", **ONE_ROUND)
    assert counts(lowered("forward", cfg)) == exactly(ragged_all_to_all=2, all_gather=1)
    assert counts(lowered("backward", cfg)) == exactly(ragged_all_to_all=4, all_gather=1)


def test_packed_all_to_all_needs_no_control_collective():
    cfg = config(transport="all_to_all", **ONE_ROUND)
    assert counts(lowered("forward", cfg)) == exactly(all_to_all=2)
    assert counts(lowered("backward", cfg)) == exactly(all_to_all=4)


def test_padded_and_allgather_exchanges():
    assert counts(lowered("forward", config(mode="padded"))) == exactly(all_to_all=2)
    assert counts(lowered("backward", config(mode="padded"))) == exactly(all_to_all=4)
    assert counts(lowered("forward", config(mode="allgather"))) == exactly(all_gather=1, reduce_scatter=1)
    # Cotangents of the sums go to everyone; those of tokens and of weights come home.
    assert counts(lowered("backward", config(mode="allgather"))) == exactly(all_gather=2, reduce_scatter=3)


@pytest.mark.parametrize("transport", ["ragged", "all_to_all"])
@pytest.mark.parametrize(
    ("kind", "pieces"),
    [({"dedup": True}, 1), ({"wire_dtype": "int8"}, 1), ({"dedup": True, "wire_dtype": "float8_e4m3fn"}, 1)]
    + [({"num_chunks": n, "dedup": dedup}, n) for n in (2, 3) for dedup in (False, True)],
    ids=str,
)
def test_what_travels_beside_the_rows_adds_no_collective(kind, pieces, transport):
    """Two payload collectives forward and as many in the backward, n + 2 of n pieces; one of counts, or none."""
    cfg = config(transport=transport, **kind, **ONE_ROUND)
    name, control = {"ragged": ("ragged_all_to_all", 1)}.get(transport, (transport, 0))
    each = 2 if pieces == 1 else pieces + 2
    for direction, times in (("forward", 1), ("backward", 2)):
        text = lowered(direction, cfg)
        assert counts(text) == exactly(**{name: times * each}, **({"all_gather": 1} if control else {}))
        assert counts(text, loop=True) == exactly() and "stablehlo.while" not in text


def test_a_message_an_expert():
    """One collective on ragged; on all_to_all one a local expert."""
    ragged = config(transport="ragged", messages="expert", **ONE_ROUND)
    assert counts(lowered("forward", ragged)) == exactly(ragged_all_to_all=2, all_gather=1)
    assert counts(lowered("backward", ragged)) == exactly(ragged_all_to_all=4, all_gather=1)
    loop = config(transport="all_to_all", messages="expert", **ONE_ROUND)
    assert counts(lowered("forward", loop)) == exactly(all_to_all=2 * E // 4)
    assert counts(lowered("backward", loop)) == exactly(all_to_all=4 * E // 4)
    pieces = config(transport="ragged", messages="expert", num_chunks=3, **ONE_ROUND)  # no exchanges in one
    assert counts(lowered("forward", pieces)) == exactly(ragged_all_to_all=6, all_gather=1)


@pytest.mark.parametrize("transport", ["ragged", "all_to_all"])
def test_a_loop_only_where_rounds_can_be_needed(transport):
    name = {"ragged": "ragged_all_to_all"}.get(transport, transport)
    once = config(transport=transport, recv_rows_factor=4.0)  # 4 ranks: room for everything
    for kind in ("forward", "backward"):
        assert counts(lowered(kind, once), loop=True) == exactly()
        assert lowered(kind, once).count("stablehlo.while") == 0
    for kind in ({}, {"dedup": True}, {"wire_dtype": "int8"}):
        more = config(transport=transport, recv_rows_factor=1.0, **kind)
        straight, loop = counts(lowered("forward", more)), counts(lowered("forward", more), loop=True)
        assert straight[name] == 2 and loop[name] == 2
        straight, loop = counts(lowered("backward", more)), counts(lowered("backward", more), loop=True)
        # Forward, and a backward that sends rows and cotangents in one exchange and brings both gradients back in
        # another.
        assert straight[name] == 4 and loop == exactly(**{name: 4})


@pytest.mark.parametrize("mode", ["dense", "allgather", "padded", "packed"])
@pytest.mark.parametrize("data", [1, 2])
def test_one_reduction_for_statistics_and_no_call_to_the_host(mode, data):
    comm = dict(mode=mode, transport="ragged") if mode == "packed" else dict(mode=mode)
    text = lowered("forward", config(**comm), 4, data)
    assert count_collectives(text)["all_reduce"].straight == 1
    assert host_calls(text) == {} == host_calls(lowered("backward", config(**comm), 4, data))


@pytest.mark.parametrize("transport", ["ragged", "all_to_all"])
@pytest.mark.parametrize("kind", [{}, {"dedup": True, "wire_dtype": "int8"}, {"num_chunks": 2}], ids=str)
@pytest.mark.parametrize("factor", [None, 1.0])
def test_a_policy_that_keeps_the_named_rows_adds_no_collective(transport, factor, kind):
    cfg = config(transport=transport, recv_rows_factor=factor, **kind)
    plain = lowered("backward", cfg)
    kept = lowered("backward", cfg, policy_names=CHECKPOINT_NAMES)
    assert count_collectives(kept) == count_collectives(plain)
    nothing_kept = lowered("backward", cfg, policy_names=("none of them",))
    assert sum(counts(nothing_kept).values()) > sum(counts(kept).values())


@pytest.mark.parametrize("mode", ["allgather", "padded"])
def test_the_policy_holds_for_the_other_paths(mode):
    cfg = config(mode=mode)
    kept = lowered("backward", cfg, policy_names=CHECKPOINT_NAMES)
    assert count_collectives(kept) == count_collectives(lowered("backward", cfg))


def test_a_sequence_over_the_expert_axis_adds_no_collective():
    """Compiled, so that what the partitioner adds is seen: [B, S, H] split on both axes costs what flat tokens cost."""
    cfg = config(transport="all_to_all", **ONE_ROUND)
    mesh = make_mesh(4, 2)
    params = jax.eval_shape(functools.partial(init_params, cfg, ranks=4), jax.random.key(0))

    def compiled(shape, spec):
        layouts = jax.tree.map(lambda _: NamedSharding(mesh, P()), params)
        layouts["experts"] = jax.tree.map(lambda _: NamedSharding(mesh, P("expert")), params["experts"])
        x_layout = NamedSharding(mesh, spec)
        stats = NamedSharding(mesh, P())
        jitted = jax.jit(forward(cfg, mesh), in_shardings=(layouts, x_layout), out_shardings=(x_layout, stats))
        text = jitted.lower(params, jax.ShapeDtypeStruct(shape, jnp.float32)).compile().as_text()
        return count_collectives(text)

    flat = compiled((64, H), P(("data", "expert")))
    assert flat["all_to_all"].straight == 2 and flat["collective_permute"].straight == flat["all_gather"].straight == 0
    assert compiled((4, 16, H), P("data", "expert")) == flat
    by_batch = MoEConfig(H, I, E, RouterConfig(K), comm=cfg.comm, shard_sequence=False)
    cfg = by_batch
    assert compiled((8, 8, H), P(("data", "expert"))) == flat


@pytest.mark.parametrize("weights", [P("expert", None, "tensor"), P("expert", "tensor")], ids=str)
def test_the_compiler_finds_no_loop_for_its_own_collectives(weights):
    """On a mesh with a further axis it partitions the experts' products. In a loop that ranks leave at different times
    its collectives would wait for each other for ever.
    """
    grid = np.array(jax.devices()).reshape(2, 2, 2)
    mesh = Mesh(grid, ("data", "expert", "tensor"), axis_types=(AxisType.Auto,) * 3)
    params = init_params(config(**ONE_ROUND), jax.random.key(0))
    place = {"router": NamedSharding(mesh, P()), "experts": NamedSharding(mesh, weights)}
    layouts = {group: jax.tree.map(lambda _, group=group: place[group], sub) for group, sub in params.items()}
    x_layout = NamedSharding(mesh, P(("data", "expert"), "tensor"))
    run = jax.jit(with_backward(config(**ONE_ROUND), mesh), in_shardings=(layouts, x_layout))
    counted = count_collectives(run.lower(params, jnp.zeros((T, H))).compile().as_text())
    assert counted["all_to_all"].straight >= 4  # the layer's, and some of the partitioner's
    assert not any(count.loop for count in counted.values()), counted


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_lowers_for_machines_that_are_not_here(platform):
    cfg = config(transport="ragged")
    params = init_params(cfg, jax.random.key(0), ranks=4)
    run = jax.jit(with_backward(cfg, make_mesh(4)))
    text = run.trace(params, jnp.zeros((T, H))).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("ragged_all_to_all") >= 4
