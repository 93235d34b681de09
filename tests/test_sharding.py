"""Meshes, which of their axes a layer uses, and how its arrays lie on them."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import CommConfig, ConfigError, MoEConfig, RouterConfig, init_params, make_mesh, param_shardings
from jax_ep.sharding import ONE_DEVICE, Axes, ambient_mesh, layer_axes, pad_rows, param_specs, place, token_spec

CONFIG = MoEConfig(hidden_size=4, intermediate_size=8, num_experts=6, router=RouterConfig(top_k=2))
AXES = Axes("expert", ("data",), 4, 2)


def config(**changes):
    fields = {"hidden_size": 4, "intermediate_size": 8, "num_experts": 6, "router": RouterConfig(top_k=2)}
    return MoEConfig(**{**fields, **changes})


# ------------------------------------------------------------------------------------------------------------ make_mesh


def test_make_mesh_is_row_major_over_data_and_expert():
    mesh = make_mesh(4, 2)
    assert mesh.axis_names == ("data", "expert")
    assert dict(mesh.shape) == {"data": 2, "expert": 4}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert [d.id for d in mesh.devices.flat] == list(range(8))


def test_make_mesh_takes_the_first_devices_or_the_given_ones():
    assert [d.id for d in make_mesh(2).devices.flat] == [0, 1]
    given = jax.devices()[::-1][:6]
    mesh = make_mesh(expert=3, data=2, devices=given)
    assert list(mesh.devices.flat) == given
    assert make_mesh(np.int64(4)).devices.shape == (1, 4)


@pytest.mark.parametrize("field", ["expert", "data"])
@pytest.mark.parametrize("bad", [0, -1, 2.0, True, None, "2"])
def test_make_mesh_refuses_sizes(field, bad):
    sizes = {"expert": 2, "data": 1, field: bad}
    message = f"{field}={bad!r}: must be an integer of at least 1; {field}=1 works"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        make_mesh(**sizes)
    assert make_mesh(**{**sizes, field: 1}).axis_names == ("data", "expert")


@pytest.mark.parametrize(
    ("expert", "data", "given", "says", "works"),
    [
        (16, 1, None, "the mesh needs 16 devices and 8 are there", 8),
        (8, 2, None, "the mesh needs 16 devices and 8 are there", 4),
        (4, 1, 3, "the mesh needs 4 devices and 3 are given", 3),
        (2, 2, 8, "the mesh needs 4 devices and 8 are given", 4),
    ],
)
def test_make_mesh_refuses_device_counts_and_says_which_expert_works(expert, data, given, says, works):
    devices = None if given is None else jax.devices()[:given]
    with pytest.raises(ConfigError, match=rf"^expert={expert}, data={data}: {says}; expert={works}, data={data} works"):
        make_mesh(expert, data, devices)
    assert make_mesh(works, data, devices).shape["expert"] == works


@pytest.mark.parametrize(("expert", "data", "given"), [(1, 16, None), (1, 2, 3), (4, 3, 8)])
def test_make_mesh_offers_sizes_that_work_where_no_expert_does(expert, data, given):
    devices = None if given is None else jax.devices()[:given]
    with pytest.raises(ConfigError, match="works") as refusal:
        make_mesh(expert, data, devices)
    message = str(refusal.value).partition(";")[2]
    offered = {name: int(size) for name, size in re.findall(r"(expert|data)=(\d+)", message)}
    assert make_mesh(**{"expert": expert, "data": data, **offered}, devices=devices).axis_names == ("data", "expert")


# ----------------------------------------------------------------------------------------------------------- layer_axes


def test_layer_axes_of_the_default_mesh():
    axes = layer_axes(CONFIG, make_mesh(4, 2))
    assert axes == Axes("expert", ("data",), ranks=4, replicas=2)
    assert axes.tokens == ("data", "expert")


def test_layer_axes_without_a_mesh():
    assert layer_axes(CONFIG, None) == ONE_DEVICE
    assert ONE_DEVICE.tokens == ()


def test_layer_axes_count_missing_token_axes_as_one():
    mesh = Mesh(np.array(jax.devices()[:4]), ("expert",))
    assert layer_axes(CONFIG, mesh) == Axes("expert", (), ranks=4, replicas=1)


def test_layer_axes_leave_other_axes_alone_and_keep_the_order_of_token_axes():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("tensor", "ep", "dp"))
    c = config(expert_axis="ep", token_axes=("dp", "ep"))
    assert layer_axes(c, mesh) == Axes("ep", ("dp",), ranks=2, replicas=2, others=True)
    c = config(expert_axis="ep", token_axes=("dp", "tensor", "ep"))
    assert layer_axes(c, mesh) == Axes("ep", ("dp", "tensor"), ranks=2, replicas=4)


def test_layer_axes_refuse_an_axis_that_the_mesh_lacks():
    mesh = Mesh(np.array(jax.devices()[:2]), ("ep",))
    with pytest.raises(ConfigError, match=r"^expert_axis='expert': .*its axes are \('ep',\); expert_axis='ep' works$"):
        layer_axes(CONFIG, mesh)
    assert layer_axes(config(expert_axis="ep", token_axes="ep"), mesh).ranks == 2


def test_layer_axes_of_an_abstract_mesh():
    assert layer_axes(CONFIG, make_mesh(4, 2).abstract_mesh) == AXES


def test_ambient_mesh():
    assert ambient_mesh() is None
    with jax.set_mesh(make_mesh(4, 2)):
        assert layer_axes(CONFIG, ambient_mesh()) == AXES
    assert ambient_mesh() is None


# ----------------------------------------------------------------------------------------------------------- token_spec

BATCH, SEQUENCE = P(("data", "expert"), None), P(("data",), "expert")


@pytest.mark.parametrize(
    ("shape", "shard_sequence", "spec"),
    [
        ((16, 4), None, P(("data", "expert"))),
        ((8, 4), True, P(("data", "expert"))),
        ((12, 4), None, None),
        ((1, 4), None, None),
        ((0, 4), None, P(("data", "expert"))),
        ((2, 4, 4), None, SEQUENCE),
        ((8, 8, 4), None, SEQUENCE),
        ((8, 3, 4), None, BATCH),
        ((3, 8, 4), None, None),
        ((2, 3, 4), None, None),
        ((8, 8, 4), False, BATCH),
        ((8, 8, 4), True, SEQUENCE),
        ((2, 4, 4), False, None),
        ((8, 3, 4), True, None),
    ],
)
def test_token_spec(shape, shard_sequence, spec):
    assert token_spec(config(shard_sequence=shard_sequence), AXES, jnp.zeros(shape)) == spec


@pytest.mark.parametrize(("shape", "spec"), [((4, 8, 4), P(None, "expert")), ((4, 3, 4), P(("expert",), None))])
def test_token_spec_without_other_token_axes(shape, spec):
    assert token_spec(CONFIG, Axes("expert", (), 4, 1), jnp.zeros(shape)) == spec


@pytest.mark.parametrize("lies", [BATCH, SEQUENCE, P(("data", "expert")), P("data", "expert")], ids=str)
def test_token_spec_follows_the_sharding_of_a_concrete_array(lies):
    x = jax.device_put(jnp.zeros((8, 8, 4)), NamedSharding(make_mesh(4, 2), lies))
    assert token_spec(CONFIG, AXES, x) == (SEQUENCE if lies[0] == "data" or lies[0] == ("data",) else BATCH)


@pytest.mark.parametrize("lies", [BATCH, SEQUENCE], ids=str)
def test_token_spec_follows_the_sharding_of_a_tracer_on_explicit_axes(lies):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "expert"), axis_types=(AxisType.Explicit,) * 2)
    seen = []
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.zeros((8, 8, 4)), NamedSharding(mesh, lies))
        jax.eval_shape(lambda a: seen.append(token_spec(CONFIG, AXES, a)), x)
    assert seen == [lies]


# ----------------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("mode", ["packed", "padded", "allgather", "dense"])
def test_param_specs_split_experts_only_and_not_for_dense(mode):
    c = config(comm=CommConfig(mode=mode), num_shared_experts=1, expert_bias=True, shared_gate=True)
    specs = param_specs(c, jax.eval_shape(lambda: init_params(c, jax.random.key(0), ranks=4)))
    assert set(specs) == {"router", "experts", "shared"}
    assert set(specs["experts"]) == {"gate", "up", "down", "gate_bias", "up_bias", "down_bias"}
    assert set(specs["experts"].values()) == {P() if mode == "dense" else P("expert")}
    assert set(specs["router"].values()) | set(specs["shared"].values()) == {P()}


def test_param_shardings_fit_the_padded_parameters():
    mesh = make_mesh(4, 2)
    shardings = param_shardings(CONFIG, mesh)
    shapes = jax.eval_shape(lambda: init_params(CONFIG, jax.random.key(0), ranks=4))
    params = jax.device_put(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), shardings)
    assert params["experts"]["up"].shape == (8, 4, 8)
    assert params["experts"]["up"].sharding == NamedSharding(mesh, P("expert"))
    assert {s.data.shape for s in params["experts"]["up"].addressable_shards} == {(2, 4, 8)}
    assert params["router"]["kernel"].sharding.is_fully_replicated


# ------------------------------------------------------------------------------------------------------ place, pad_rows


def test_place_moves_on_explicit_axes_and_nowhere_else():
    x = jnp.arange(8.0)
    auto = make_mesh(8)
    assert place(x, P("expert"), auto) is x
    explicit = Mesh(np.array(jax.devices()).reshape(1, 8), ("data", "expert"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        moved = place(x, P("expert"), explicit)
    assert moved.sharding.spec == P("expert")
    assert np.array_equal(moved, x)


def test_pad_rows():
    a = jnp.arange(6.0).reshape(3, 2)
    assert pad_rows(a, 3) is a
    assert pad_rows(a, 5, -1).tolist() == [[0, 1], [2, 3], [4, 5], [-1, -1], [-1, -1]]
    assert pad_rows(jnp.ones(2, jnp.bool_), 3).tolist() == [True, True, False]
