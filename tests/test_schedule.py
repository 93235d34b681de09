"""Reading compiled schedules: stored texts, cut down from real ones (Qwen3 30B-A3B's layer, 2048 tokens a device, two
chunks), and small written ones; and what is modelled from them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from jax_ep.aot.hosts import get_host
from jax_ep.aot.modelled import (
    Prediction,
    collective_seconds,
    hideable,
    host_synchronous,
    live_parts,
    predict,
    product_seconds,
    sent_bytes,
)
from jax_ep.aot.schedule import Schedule, read_schedule
from jax_ep.config import CommConfig, MoEConfig, RouterConfig

FOLDER = Path(__file__).parent / "compiled"
TOKENS, TOP_K, HIDDEN, INTERMEDIATE, RANKS = 2048, 8, 2048, 768, 8
LAYER = MoEConfig(HIDDEN, INTERMEDIATE, 128, RouterConfig(TOP_K), dtype="bfloat16", param_dtype="bfloat16")
STORED = {
    "gpu_ragged_scheduled": "8xh100",
    "gpu_ragged_unscheduled": "8xh100",
    "gpu_all_to_all_backward": "8xrtx4090",
    "tpu_ragged": "tpu-v5e-8",
}


def stored(name: str) -> Schedule:
    return read_schedule((FOLDER / f"{name}.txt").read_text())


def modelled(schedule: Schedule, host: str) -> Prediction:
    return predict(schedule, get_host(host), LAYER, live_parts(schedule, LAYER, TOKENS, RANKS))


def predicted(name: str) -> tuple[Schedule, Prediction]:
    schedule = stored(name)
    return schedule, modelled(schedule, STORED[name])


# Stored texts.


def test_with_the_flag_every_ragged_exchange_is_asynchronous() -> None:
    schedule = stored("gpu_ragged_scheduled")
    payload = [one for one in schedule.collectives if one.payload]
    assert [one.kind for one in payload] == ["ragged_all_to_all"] * 4
    assert all(one.asynchronous and one.ranks == RANKS for one in payload)
    beside = [[product.kernel for product in schedule.beside(one)] for one in payload]
    assert beside == [[], [], ["moe_hidden", "moe_product"], ["moe_hidden", "moe_product"]]


def test_without_it_they_are_not() -> None:
    schedule = stored("gpu_ragged_unscheduled")
    payload = [one for one in schedule.collectives if one.payload]
    assert [one.asynchronous for one in payload] == [False, False, False, True]
    assert not any(schedule.beside(one) for one in payload)  # the last has loops and additions beside it, no products


def test_a_ragged_exchange_sends_what_both_of_its_buffers_hold() -> None:
    rows = TOKENS // 2 * TOP_K  # of one of two pieces
    for name in ("gpu_ragged_scheduled", "gpu_ragged_unscheduled", "tpu_ragged"):
        sent = [one.sent for one in stored(name).collectives if one.payload]
        assert sent == [rows * HIDDEN * 2 * (RANKS - 1) // RANKS] * 4


def test_an_exchange_that_takes_rows_and_brings_others_sends_both() -> None:
    """Half of its rows arrive where there is room for twice as many, and half start there."""
    rows = "u16[300,16]{1,0}"
    schedule = program(
        f"%out = {rows} parameter(2)",
        f"%room = {rows} parameter(3)",
        f"%r = {rows} ragged-all-to-all(%out, %room), replica_groups={{{{0,1,2,3}}}}",
    )
    (one,) = schedule.collectives
    assert one.sent == 300 * 32 * 3 // 4
    assert sent_bytes(one, LAYER) == 200 * 32 * 3 // 4
    every = dataclasses.replace(LAYER, comm=CommConfig(recv_rows_factor=None))
    assert sent_bytes(one, every) == one.sent


def test_an_all_to_all_sends_its_whole_buffer() -> None:
    payload = [one for one in stored("gpu_all_to_all_backward").collectives if one.payload]
    rows = 2 * TOKENS // 2 * TOP_K  # recv_rows_factor=2
    assert len(payload) == 8
    assert {one.bytes for one in payload} == {rows * HIDDEN * 2, rows * HIDDEN * 2 + 8 * 34 * 2}  # counts travel along
    assert all(one.asynchronous for one in payload)


def test_the_backward_has_weight_gradients_beside_its_last_exchanges() -> None:
    schedule = stored("gpu_all_to_all_backward")
    last = [one for one in schedule.collectives if one.payload][-1]
    assert [product.kernel for product in schedule.beside(last)] == ["moe_weight_gradient"] * 2
    kernels = [product.kernel for product in schedule.products if product.kernel]
    assert {kernel: kernels.count(kernel) for kernel in kernels} == {
        "moe_hidden": 3,
        "moe_product": 9,
        "moe_weight_gradient": 9,
    }


def test_a_tpu_schedule_reads_alike() -> None:
    schedule = stored("tpu_ragged")
    payload = [one for one in schedule.collectives if one.payload]
    assert all(one.asynchronous for one in payload)
    assert [len(schedule.beside(one)) for one in payload] == [0, 3, 3, 3]
    assert {one.kind for one in schedule.collectives if not one.asynchronous} == {"all_gather", "all_reduce"}


def test_a_tpus_own_ragged_dot_is_no_masked_product() -> None:
    products = [product for product in stored("tpu_ragged").products if product.place]
    assert not any(product.masked for product in products)
    rows = {"experts": 2 * TOKENS // 2 * TOP_K, "own_experts": 2 * TOKENS * TOP_K // RANKS}
    assert all(product.flops == 2 * rows[product.place] * HIDDEN * INTERMEDIATE for product in products)


@pytest.mark.parametrize("name", STORED)
def test_routers_products_do_not_count(name: str) -> None:
    other = [product for product in stored(name).products if not product.place]
    assert other and all("/route/" in product.op_name for product in other)


@pytest.mark.parametrize("name", STORED)
def test_loops_are_those_of_further_rounds(name: str) -> None:
    loops = stored(name).loops
    assert loops and all(loop.trips is None and loop.body is None for loop in loops)
    assert all("extra_rounds" in loop.op_name or "own_experts" in loop.op_name for loop in loops)


# What is modelled.


@pytest.mark.parametrize("name", STORED)
def test_products_of_real_rows_are_those_of_the_layer(name: str) -> None:
    """Whatever the buffers hold: tokens x K x three matrices, once in the forward."""
    schedule = stored(name)
    live = live_parts(schedule, LAYER, TOKENS, RANKS)
    flops = sum(p.flops * live[p.place] for p in schedule.products if p.place and p.forward)
    assert flops == pytest.approx(2 * TOKENS * TOP_K * 3 * HIDDEN * INTERMEDIATE)


@pytest.mark.parametrize("name", STORED)
def test_nothing_hides_more_than_could_be_hidden(name: str) -> None:
    schedule, prediction = predicted(name)
    assert 0 <= prediction.hidden <= prediction.hideable + 1e-9
    assert prediction.hideable <= prediction.communication + 1e-9
    host = get_host(STORED[name])
    assert prediction.communication == pytest.approx(
        sum(collective_seconds(c, host, LAYER) for c in schedule.collectives)
    )
    assert 0 < prediction.rows_communication < prediction.communication
    assert prediction.rows_hidden <= min(prediction.hidden, prediction.rows_hideable) + 1e-9
    slower = max(prediction.communication, prediction.computation)
    assert slower - 1e-9 <= prediction.total <= prediction.communication + prediction.computation + 1e-9


def test_the_flag_is_what_hides() -> None:
    (_, on), (_, off) = predicted("gpu_ragged_scheduled"), predicted("gpu_ragged_unscheduled")
    assert off.hidden == 0 and off.hidden_of_hideable == 0
    assert on.hidden_fraction is not None and on.hidden_fraction > 0.4
    assert on.hideable == pytest.approx(off.hideable)  # the same operations
    assert on.total < off.total


def test_traffic_of_the_layer_on_pcie() -> None:
    """About 5.9 ms for ragged bytes at 20 GB/s against about 1 ms of products at the card's full rate."""
    host = get_host("8xrtx4090")
    schedule = stored("gpu_ragged_scheduled")
    sent = sum(one.sent for one in schedule.collectives if one.payload)
    assert sent / host.link_rate == pytest.approx(5.9e-3, rel=0.01)
    flops = 2 * TOKENS * TOP_K * 3 * HIDDEN * INTERMEDIATE
    assert flops / (host.tflops * 1e12) == pytest.approx(0.94e-3, rel=0.01)


def test_through_nccl_a_ragged_exchange_waits_for_the_host_and_hides_nothing() -> None:
    schedule, host = stored("gpu_ragged_scheduled"), get_host("8xrtx4090")
    waiting = [one for one in schedule.collectives if host_synchronous(one, host)]
    assert [one.kind for one in waiting] == ["ragged_all_to_all"] * 4
    assert not any(host_synchronous(one, get_host("8xh100")) for one in schedule.collectives)
    prediction = modelled(schedule, host.name)
    payload = sum(collective_seconds(one, host, LAYER) for one in waiting)
    assert prediction.hidden <= prediction.communication - payload + 1e-9


def test_a_product_of_few_rows_takes_as_long_as_its_weights_do() -> None:
    host = get_host("8xh100")
    product = stored("gpu_ragged_scheduled").products[1]
    weights = 2 * 16 * HIDDEN * INTERMEDIATE * 2
    assert product.weight_bytes == weights
    assert product_seconds(product, host, 0.0) == pytest.approx(weights / (0.8 * host.memory_rate))
    assert product_seconds(product, host, 1.0) == pytest.approx(product.flops / (0.6 * host.tflops * 1e12))


# Small texts.

HEAD = "HloModule jit_f, is_scheduled=true\n\n"
DOT = "%{n} = f32[64,32]{{1,0}} dot(%{a}, %w), lhs_contracting_dims={{1}}, "
DOT += 'metadata={{op_name="jit(f)/attention/{n}/dot"}}'


def program(*lines: str, before: str = "") -> Schedule:
    parameters = ("%x = f32[64,16]{1,0} parameter(0)", "%w = f32[16,32]{1,0} parameter(1)")
    body = "\n".join(f"  {line}" for line in (*parameters, *lines))
    return read_schedule(f"{HEAD}{before}ENTRY %main () -> () {{\n{body}\n}}\n")


def test_an_asynchronous_wrapper_is_the_collective_inside() -> None:
    wrapped = (
        "%wrapped () -> () {\n  %p = f32[64,16]{1,0} parameter(0)\n"
        "  ROOT %a = f32[64,16]{1,0} all-to-all(%p), replica_groups={{0,1},{2,3}}\n}\n\n"
    )
    schedule = program(
        "%s = ((f32[64,16]{1,0}), f32[64,16]{1,0}) async-start(%x), calls=%wrapped",
        DOT.format(n="mine", a="x"),
        "%d = f32[64,16]{1,0} async-done(%s)",
        DOT.format(n="after", a="d"),
        before=wrapped,
    )
    (one,) = schedule.collectives
    assert (one.kind, one.ranks, one.bytes, one.sent, one.asynchronous) == ("all_to_all", 2, 4096, 2048, True)
    assert [product.name for product in schedule.beside(one)] == ["mine"]
    assert [schedule.independent(one, product) for product in schedule.products] == [True, False]


@pytest.mark.parametrize(
    ("groups", "ranks"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=mesh['data'=2,'expert'=4] {'expert'}", 4),
        ("replica_groups=mesh['data'=2,'expert'=4] {'data','expert'}", 8),
    ],
)
def test_replica_groups_are_read_in_every_form(groups: str, ranks: int) -> None:
    schedule = program(f"%r = f32[64,16]{{1,0}} all-reduce(%x), {groups}, to_apply=%add")
    assert schedule.collectives[0].ranks == ranks
    assert schedule.collectives[0].sent == round(2 * 4096 * (ranks - 1) / ranks)
    assert not schedule.collectives[0].asynchronous and not schedule.collectives[0].payload


def test_a_pair_that_the_compiler_made_synchronous_is_so() -> None:
    schedule = program(
        "%s = ((f32[64,16]{1,0}), f32[64,16]{1,0}) all-to-all-start(%x), replica_groups={{0,1}}, "
        'backend_config={"collective_backend_config":{"is_sync":true}}',
        "%d = f32[64,16]{1,0} all-to-all-done(%s)",
    )
    assert not schedule.collectives[0].asynchronous


def test_a_masked_dense_product_is_found() -> None:
    masked = (
        "%y = bf16[64,32]{1,0} dot(%rows, %weights), lhs_contracting_dims={0,2}, rhs_contracting_dims={0,1}, "
        'metadata={op_name="jit(f)/experts/ragged_dot_general"}'
    )
    schedule = program(
        "%rows = bf16[4,64,16]{2,1,0} broadcast(%x)", "%weights = bf16[4,16,32]{2,1,0} parameter(2)", masked
    )
    (product,) = schedule.products
    assert product.masked and not product.grouped and product.place == "experts"
    assert product.flops == 4 * 2 * 64 * 16 * 32  # all rows, all four experts


def test_a_cublas_call_counts_as_its_product() -> None:
    schedule = program(
        '%y = (f32[64,32]{1,0}, s8[1024]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", '
        'metadata={op_name="jit(f)/attention/dot"}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["1"]}}}'
    )
    assert [product.flops for product in schedule.products] == [2 * 64 * 16 * 32]


def test_copied_weights_are_found() -> None:
    schedule = program(
        "%experts = bf16[16,256,256]{2,1,0} parameter(2)",
        "%copy.1 = bf16[16,256,256]{1,2,0} copy(%experts)",
        "%copy.2 = f32[64,16]{1,0} copy(%x)",
    )
    assert [(copy.name, copy.what, copy.bytes) for copy in schedule.copies] == [("copy.1", "copy", 2 * 2**20)]


def test_a_loop_of_known_turns_counts_that_often() -> None:
    body = (
        "%body () -> () {\n  %x = f32[64,16]{1,0} parameter(0)\n  %w = f32[16,32]{1,0} parameter(1)\n"
        "  %s = ((f32[64,16]{1,0}), f32[64,16]{1,0}) all-to-all-start(%x), replica_groups={{0,1}}\n"
        f"  {DOT.format(n='beside', a='x')}\n"
        "  %d = f32[64,16]{1,0} all-to-all-done(%s)\n}\n\n"
    )
    known = 'backend_config={"known_trip_count":{"n":"3"}}'
    schedule = program(f"%l = (s32[]) while(%x), condition=%c, body=%body, {known}", before=body)
    (loop,) = schedule.loops
    assert loop.trips == 3 and loop.body is not None
    once, whole = (modelled(s, "8xh100") for s in (loop.body, schedule))
    assert whole.hidden == pytest.approx(3 * once.hidden) and whole.hidden > 0
    assert whole.hidden_fraction == pytest.approx(once.hidden_fraction)


@pytest.mark.parametrize(("index", "kinds"), [(0, ["all_gather"]), (1, ["all_to_all"]), (None, ["all_to_all"])])
def test_a_collective_in_a_branch_is_synchronous(index: int | None, kinds: list[str]) -> None:
    """The branch of a constant index, else the one that sends most."""
    branch = (
        "%{name} () -> () {{\n  %p = f32[64,16]{{1,0}} parameter(0)\n"
        "  ROOT %{name}.c = f32[{rows},16]{{1,0}} {op}(%p), replica_groups={{{{0,1}}}}\n}}\n\n"
    )
    before = branch.format(name="a", rows=16, op="all-gather") + branch.format(name="b", rows=64, op="all-to-all")
    schedule = program(
        "%i = s32[] " + ("parameter(2)" if index is None else f"constant({index})"),
        "%r = f32[64,16]{1,0} conditional(%i, %x, %x), branch_computations={%a, %b}",
        DOT.format(n="after", a="r"),
        before=before,
    )
    assert [one.kind for one in schedule.collectives] == kinds
    assert all(one.conditional and not one.asynchronous for one in schedule.collectives)
    assert not schedule.independent(schedule.collectives[0], schedule.products[0])
    assert modelled(schedule, "8xh100").hidden == 0


def test_a_product_covers_one_collective_at_a_time() -> None:
    """Two exchanges beside one product: what could be hidden is that product, not twice it."""
    start = "%s{n} = ((f32[64,16]{{1,0}}), f32[64,16]{{1,0}}) all-to-all-start(%x), replica_groups={{{{0,1}}}}"
    schedule = program(
        start.format(n=1),
        start.format(n=2),
        DOT.format(n="first", a="x"),
        "%d1 = f32[64,16]{1,0} all-to-all-done(%s1)",
        DOT.format(n="second", a="d1"),
        "%d2 = f32[64,16]{1,0} all-to-all-done(%s2)",
    )
    first, second = schedule.products
    communication = dict.fromkeys(schedule.collectives, 5.0)
    assert hideable(schedule, communication, {first: 3.0, second: 0.0}) == pytest.approx(3)
    assert hideable(schedule, communication, {first: 3.0, second: 9.0}) == pytest.approx(8)  # second: the other alone
    assert hideable(schedule, communication, {first: 9.0, second: 3.0}) == pytest.approx(10)


@pytest.mark.parametrize("text", ["module @jit_f {", "HloModule jit_f, entry_computation_layout={()->()}", HEAD])
def test_what_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"compiled\.as_text"):
        read_schedule(text)
