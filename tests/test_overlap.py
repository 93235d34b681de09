"""Overlap switches: the same values, another program, and every rule's refusal with the value that it suggests.

H hidden, I intermediate, E experts, K top_k, R ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from tiny_models import TINY, tiny_model, with_comm
from waits import Step, steps, steps_of_scans

from jax_ep import CommConfig, ConfigError, MoEConfig, OverlapConfig, RouterConfig, init_params, make_mesh, moe
from jax_ep.aot import count_collectives
from jax_ep.block.microbatch import microbatch_stack
from jax_ep.experts import swiglu
from jax_ep.grouped import ExpertWeights, expert_mlp
from jax_ep.models.decoder import forward, init_decoder, loss
from jax_ep.overlap import after, check_flags
from jax_ep.training.config import TrainConfig

H, I, E, K, R = 16, 24, 8, 2, 4
FIELD = "overlap_moe_expert_parallel_comm"
ROOM = CommConfig(recv_rows_factor=None)


def layer(comm: CommConfig = ROOM, overlap: OverlapConfig | None = None, **fields: Any) -> MoEConfig:
    fields = {"num_shared_experts": 1, **fields}
    return MoEConfig(H, I, E, RouterConfig(K), comm, overlap or OverlapConfig(), **fields)


def assert_same(ours: Any, theirs: Any, tolerance: float) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(map(np.asarray, jax.tree.leaves(ours)), map(np.asarray, jax.tree.leaves(theirs))):
        assert np.isfinite(a).all()
        assert np.abs(a - b).max(initial=0) <= tolerance * max(1.0, np.abs(b).max(initial=0))


# ------------------------------------------------------------------------------------------------------------- layers


def loss_of_layer(config: MoEConfig) -> tuple[Any, Any, jax.Array]:
    """A function on R devices, and its arguments: parameters and x."""
    mesh = make_mesh(R, devices=jax.devices()[:R])
    params, x = init_params(config, jax.random.key(0), ranks=R), jax.random.normal(jax.random.key(1), (40, H))
    return lambda params, x: jnp.square(moe(params, x, config, mesh=mesh)[0]).mean(), params, x


@functools.cache
def layer_run(config: MoEConfig) -> tuple[Any, str]:
    """Loss, gradients of parameters and x; and the program for GPUs."""
    loss, *args = loss_of_layer(config)
    traced = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(*args)
    return traced.lower().compile()(*args), traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("comm", [ROOM, dataclasses.replace(ROOM, num_chunks=3), CommConfig(mode="padded")], ids=str)
@pytest.mark.parametrize("switch", ["delay_wgrad_compute", "moe_shared_expert_overlap"])
def test_a_switch_of_a_layer_changes_the_program_and_no_value(comm: CommConfig, switch: str) -> None:
    (off, program), (on, other) = layer_run(layer(comm)), layer_run(layer(comm, OverlapConfig(**{switch: True})))
    assert_same(on, off, 1e-6)
    assert program != other
    assert count_collectives(program) == count_collectives(other)


@pytest.mark.parametrize(("transport", "messages"), [("ragged", "rank"), ("all_to_all", "expert")])
def test_pieces_change_the_program_and_no_value(transport: str, messages: str) -> None:
    comm = CommConfig(transport=transport, recv_rows_factor=1.25, messages=messages)
    (off, program), (on, other) = (layer_run(layer(dataclasses.replace(comm, num_chunks=n))) for n in (1, 4))
    assert_same(on, off, 1e-6)
    assert program != other


@pytest.mark.parametrize("backend", ["auto", "ragged_dot"])
def test_delayed_weight_gradients_wait_for_the_gradient_of_rows(backend: str) -> None:
    rows, index, sizes = jnp.ones((6, H)), jnp.arange(7) % 6, jnp.array([3, 2])
    experts = ExpertWeights(jnp.ones((2, H, I)), jnp.ones((2, H, I)), jnp.ones((2, I, H)))

    def barriers(delay: bool) -> list[str]:
        how: dict[str, Any] = {"activation": swiglu, "backend": backend, "delay_wgrad": delay}
        run = jax.grad(lambda r, e: expert_mlp(r, index, sizes, jnp.ones(7), e, **how).sum(), (0, 1))
        text = jax.jit(run).trace(rows, experts).lower(lowering_platforms=("cuda",)).as_text()
        return re.findall(r"optimization_barrier.*", text)

    assert not barriers(False)
    (barrier,) = barriers(True)
    # The gradient of rows, then what those of the experts are products of: x, d_y, h, d_gate and d_up.
    waiting = [f"tensor<6x{H}xf32>", f"tensor<7x{I}xf32>"]
    assert [barrier.count(kind) for kind in waiting] == [3, 3], barrier


def of_kind(found: list[Step], kind: str) -> list[int]:
    return [i for i, step in enumerate(found) if step.kind == kind]


def assert_in_turn(found: list[Step], beside: dict[int, tuple[int, ...]]) -> None:
    """Every exchange waits for the one before; it and what is said to be beside it (number of an exchange: numbers of
    runs of experts) wait for nothing of each other.
    """
    exchanges, experts = of_kind(found, "exchange"), of_kind(found, "experts")
    for before, i in itertools.pairwise(exchanges):
        assert before in found[i].needs, (before, i)
    for a, several in beside.items():
        for b in several:
            i, j = exchanges[a], experts[b]
            assert i not in found[j].needs, (a, b)
            assert j not in found[i].needs, (a, b)


@pytest.mark.parametrize("pieces", [1, 3])
def test_shared_experts_are_beside_the_first_dispatch(pieces: int) -> None:
    comm = dataclasses.replace(ROOM, transport="all_to_all", num_chunks=pieces)
    found = steps(*loss_of_layer(layer(comm, OverlapConfig(moe_shared_expert_overlap=True))))
    shared, first = of_kind(found, "shared"), of_kind(found, "exchange")[0]
    assert len(shared) == 3
    assert not found[first].needs & {*shared}
    assert found[of_kind(found, "experts")[0]].needs >= {*shared, first}


def test_pieces_go_in_turn_forward_and_backward() -> None:
    comm = dataclasses.replace(ROOM, transport="all_to_all", num_chunks=3)
    run, params, x = loss_of_layer(layer(comm))
    # Experts of the pieces and the rank's own; in the backward its own, and then the pieces from the last on.
    forward, backward = {1: (0,), 2: (1,), 3: (2,), 4: (3,)}, {5: (4,), 6: (5,), 7: (6,), 8: (7,)}
    assert_in_turn(steps(run, params, x), forward)
    assert_in_turn(steps(jax.grad(run, (0, 1)), params, x), forward | backward)


def test_microbatches_go_in_turn_forward_and_backward() -> None:
    config = tiny_model(RouterConfig(2), {"comm": dataclasses.replace(ROOM, transport="all_to_all")}, **{FIELD: True})
    mesh, ids = make_mesh(2, devices=jax.devices()[:2]), jnp.zeros((4, 3), jnp.int32)
    params = init_decoder(config, jax.random.key(0), ranks=2)
    forward, backward = steps_of_scans(jax.grad(lambda p: loss(p, ids, config, mesh=mesh)[0]), params)
    # Of a layer: combine of b, dispatch of a, of b, combine of a; experts of a and of b, its own and what came.
    assert_in_turn(forward, {2: (0, 1), 3: (2, 3)})
    assert_in_turn(backward, {0: (0, 1), 1: (2, 3)})


def test_after_ties_both_and_in_the_backward_too() -> None:
    first, then = {"a": jnp.ones(3), "n": jnp.arange(2)}, (jnp.ones(2), None)
    run = lambda first, then: after(first, then)
    assert jax.tree.map(jnp.shape, run(first, then)) == ({"a": (3,), "n": (2,)}, ((2,), None))
    backward = jax.grad(lambda a, b: sum(x.sum() for x in after(a, b)), argnums=(0, 1))
    for function in (lambda a, b: after(a, b), backward):
        text = jax.jit(function).lower(jnp.ones(3), jnp.ones(2)).as_text()
        assert re.search(r"optimization_barrier.*tensor<3xf32>, tensor<2xf32>", text), text


# ------------------------------------------------------------------------------------------------------- microbatches


@functools.cache
def model_run(config: Any, ranks: int, data: int) -> tuple[Any, str]:
    """Loss, logits and gradients of a batch with padding; and the program for GPUs."""
    mesh = make_mesh(ranks, data, jax.devices()[: ranks * data])
    params = init_decoder(config, jax.random.key(0), ranks=ranks)
    ids = jax.random.randint(jax.random.key(1), (4 * ranks * data, 7), 0, config.vocab_size)
    mask = jnp.arange(7)[None] < jnp.array([7, 5, 7, 1] * ranks * data)[:, None]

    def total(params: Any) -> Any:
        logits, stats = forward(params, ids, config, mesh=mesh, attention_mask=mask)
        return loss(params, ids, config, mesh=mesh, attention_mask=mask)[0], (
            jnp.where(mask[..., None], logits, 0),
            stats,
        )

    run = jax.jit(jax.value_and_grad(total, has_aux=True))
    traced = run.trace(params)
    return traced.lower().compile()(params), traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("family", "recompute", "ranks", "data"),
    [
        ("qwen2_moe", "selective", 4, 1),
        pytest.param("mixtral", "none", 2, 2, marks=pytest.mark.slow),
        pytest.param("gpt_oss", "none", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_two_microbatches_change_the_program_and_no_value(family: str, recompute: str, ranks: int, data: int) -> None:
    plain = dataclasses.replace(with_comm(TINY[family], ROOM), recompute=recompute)
    delayed = dataclasses.replace(plain.moe, overlap=OverlapConfig(delay_wgrad_compute=True))
    both = dataclasses.replace(plain, overlap_moe_expert_parallel_comm=True, moe=delayed)
    (off, program), (on, other) = model_run(plain, ranks, data), model_run(both, ranks, data)
    # Statistics that say how rows travelled differ between whole and half batches.
    count = lambda result: result[0][1][1]._replace(rounds=0, wire_rows=0)
    for of in (lambda r: r[0][0], lambda r: r[0][1][0], lambda r: r[1], count):
        assert_same(of(on), of(off), 1e-6)
    assert program != other


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_two_microbatches_take_as_many_collectives_as_one_after_the_other(recompute: str) -> None:
    """In a layer two forward and two backward for each half, and the last combine by itself."""
    comm = dataclasses.replace(ROOM, transport="all_to_all")
    mesh, ids = make_mesh(2, devices=jax.devices()[:2]), jnp.zeros((4, 3), jnp.int32)

    def in_layers_and_beside(config: Any) -> tuple[int, int]:
        params = init_decoder(config, jax.random.key(0), ranks=2)
        run = jax.jit(jax.grad(lambda p: loss(p, ids, config, mesh=mesh)[0]))
        found = count_collectives(run.trace(params).lower(lowering_platforms=("cuda",)).as_text())["all_to_all"]
        return found.loop, found.straight

    plain = tiny_model(RouterConfig(2), {"comm": comm}, recompute=recompute)
    assert in_layers_and_beside(plain) == (4, 0)
    assert in_layers_and_beside(dataclasses.replace(plain, overlap_moe_expert_parallel_comm=True)) == (8, 2)


# -------------------------------------------------------------------------------------------------------------- rules


def refused(make: Any, field: str, rule: str) -> Any:
    """The value that the refusal says works."""
    with pytest.raises(ConfigError) as refusal:
        make()
    message = str(refusal.value)
    found = re.fullmatch(rf"{field}=(.*?): (.*); {field}=(.*) works", message)
    assert found, message
    assert re.search(rule, found[2]), message
    return found[3]


model = functools.partial(tiny_model, RouterConfig(2))
DELAY, SHARED = OverlapConfig(delay_wgrad_compute=True), OverlapConfig(moe_shared_expert_overlap=True)
ON = {FIELD: True}
MODEL_RULES: dict[str, tuple[Any, Any, str, str]] = {
    "delay needs the two microbatches": ({"overlap": DELAY}, {}, "delay_wgrad_compute", f"needs {FIELD}=True"),
    "shared experts are off with it": (
        {"overlap": SHARED, "num_shared_experts": 1},
        ON,
        "moe_shared_expert_overlap",
        "the other microbatch is beside",
    ),
    "full recomputation": ({}, {**ON, "recompute": "full"}, "recompute", "sent again"),
    "key/value rows beside": ({}, {**ON, "kv_coship": "zigzag"}, FIELD, "two microbatches already"),
    "dense": ({"comm": CommConfig(mode="dense")}, ON, "mode", "send packed rows"),
    "padded": ({"comm": CommConfig(mode="padded")}, ON, "mode", "send packed rows"),
    "pieces": ({"comm": CommConfig(num_chunks=2)}, ON, "num_chunks", "one packed buffer"),
    "a message an expert": ({"comm": CommConfig(messages="expert")}, ON, "messages", "one packed buffer"),
    "capacity": ({"comm": CommConfig(capacity_factor=1.0)}, ON, "capacity_factor", "over the whole batch"),
    "split sequences": ({"shard_sequence": True}, ON, "shard_sequence", "sequences are whole"),
}


@pytest.mark.parametrize("name", MODEL_RULES)
def test_rules_of_models(name: str) -> None:
    of_layer, of_model, field, rule = MODEL_RULES[name]
    works = eval(refused(lambda: model(of_layer, **of_model), field, rule))
    if field in ("mode", "num_chunks", "messages", "capacity_factor"):
        of_layer = {"comm": CommConfig(**{field: works})}
    elif field in ("delay_wgrad_compute", "moe_shared_expert_overlap"):
        of_layer = {**of_layer, "overlap": OverlapConfig(**{field: works})}
    else:
        of_layer, of_model = {**of_layer, **({field: works} if field in of_layer else {})}, {**of_model}
        of_model |= {field: works} if field in of_model else {}
    model(of_layer, **of_model)


LAYER_RULES = {
    "dense": ({"comm": CommConfig(mode="dense"), "overlap": DELAY}, "delay_wgrad_compute", "exchanges nothing"),
    "allgather": ({"comm": CommConfig(mode="allgather"), "overlap": SHARED}, "moe_shared_expert_overlap", "nothing"),
    "no shared experts": ({"overlap": SHARED, "num_shared_experts": 0}, "moe_shared_expert_overlap", "no shared"),
}


@pytest.mark.parametrize("name", LAYER_RULES)
def test_rules_of_layers(name: str) -> None:
    fields, field, rule = LAYER_RULES[name]
    works = eval(refused(lambda: layer(**fields), field, rule))
    layer(**{**fields, "overlap": OverlapConfig(**{field: works})})


def test_one_expert_leaves_nothing_to_exchange() -> None:
    one = lambda overlap: MoEConfig(H, I, 1, RouterConfig(1), ROOM, overlap)
    assert refused(lambda: one(DELAY), "delay_wgrad_compute", "num_experts=1") == "False"
    one(OverlapConfig())
    single = lambda on: tiny_model(RouterConfig(1), experts=1, **{FIELD: on})
    assert refused(lambda: single(True), FIELD, "num_experts=1") == "False"
    single(False)


@pytest.mark.parametrize("overlap", [DELAY, SHARED])
def test_one_rank_has_no_exchange(overlap: OverlapConfig) -> None:
    config = layer(overlap=overlap)
    (field,) = [name for name, on in dataclasses.asdict(overlap).items() if on]
    params, x = init_params(config, jax.random.key(0)), jnp.ones((4, H))
    for mesh in (None, make_mesh(1, 2, jax.devices()[:2])):
        run = functools.partial(moe, params, x, config, mesh=mesh)
        assert refused(run, field, "axis of size 1; make_mesh") == "False"


def test_microbatches_need_two_ranks_and_an_even_batch_on_each() -> None:
    config = model(**ON)
    params = init_decoder(config, jax.random.key(0), ranks=2)
    stack = functools.partial(microbatch_stack, params["layers"], config=config)
    assert refused(lambda: stack(jnp.ones((4, 3, 32))), FIELD, "axis of size 1") == "False"
    mesh = make_mesh(2, 2, jax.devices()[:4])
    assert refused(lambda: stack(jnp.ones((12, 3, 32)), mesh=mesh), "batch", "a multiple of 8: 2 replicas") == "16"


def test_a_mesh_with_a_pipeline_is_refused() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("pipe", "expert"), axis_types=(AxisType.Auto,) * 2)
    config = layer(overlap=DELAY, token_axes=("expert",))
    run = lambda: moe(init_params(config, jax.random.key(0), ranks=2), jnp.ones((4, H)), config, mesh=mesh)
    assert refused(run, "delay_wgrad_compute", "axis 'pipe'") == "False"


def test_training_wants_even_batches_and_whole_weights() -> None:
    train = functools.partial(TrainConfig, model(**ON), steps=4, sequence_length=8, expert_parallel=2, data_parallel=2)
    assert refused(lambda: train(batch_size=12), "batch_size", "2 . expert_parallel . data_parallel") == "16"
    assert refused(lambda: train(batch_size=16, shard_weights=True), "shard_weights", "one shard_map") == "False"
    train(batch_size=16)


def test_collectives_in_command_buffers_are_refused() -> None:
    name = "xla_gpu_enable_command_buffer"
    flag = f"--{name}="
    bad = f"--xla_a=1 {flag}FUSION,COLLECTIVES --xla_b"
    more = {  # + and - add to XLA's own list
        bad: "FUSION",
        f"{flag}+COLLECTIVES": "-COLLECTIVES",
        f"{flag}-fusion,+collectives": "-fusion,-COLLECTIVES",
        f"{bad} {flag}+CUBLAS": "+CUBLAS,-COLLECTIVES",
    }
    for flags, works in more.items():
        assert refused(functools.partial(check_flags, flags), name, "not scheduled") == repr(works)
        check_flags(f"{flags} {flag}{works}")
    for good in ("", f"{flag}FUSION", f"{bad} {flag}", f"{flag}-COLLECTIVES,+FUSION"):
        check_flags(good)
