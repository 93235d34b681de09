"""Unions of intervals, and what is read out of a profile: made-up ones of GPUs, and a real one of the CPU."""

from __future__ import annotations

import itertools
import warnings

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ep import CommConfig, ConfigError, MoEConfig, RouterConfig, moe
from jax_ep.bench.intervals import (
    DeviceTrace,
    collective_names,
    hidden_fraction,
    intersection,
    length,
    read_trace,
    union,
)
from jax_ep.layer import init_params, param_shardings


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ([], []),
        ([(3, 3)], []),
        ([(0, 10), (2, 5)], [(0, 10)]),  # nested
        ([(0, 5), (5, 7)], [(0, 7)]),  # touching
        ([(0, 5), (6, 7)], [(0, 5), (6, 7)]),
        ([(6, 7), (0, 5), (4, 6)], [(0, 7)]),  # out of order
        ([(0, 2), (0, 2), (1, 9), (20, 21), (15, 15)], [(0, 9), (20, 21)]),
        ([(-5, -1), (-2, 3)], [(-5, 3)]),
    ],
)
def test_union(given_, expected):
    assert union(given_) == expected
    assert length(given_) == sum(end - start for start, end in expected)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([], [(0, 5)], []),
        ([(0, 5)], [(5, 9)], []),  # half-open: touching is not meeting
        ([(0, 10)], [(2, 3), (4, 6), (9, 20)], [(2, 3), (4, 6), (9, 10)]),
        ([(0, 4), (2, 6), (8, 9)], [(8, 9), (1, 3), (5, 5)], [(1, 3), (8, 9)]),
    ],
)
def test_intersection(a, b, expected):
    assert intersection(a, b) == intersection(b, a) == expected


_intervals = st.lists(
    st.tuples(st.integers(-8, 8), st.integers(0, 5)).map(lambda pair: (pair[0], sum(pair))), max_size=7
)


@settings(max_examples=200, deadline=None)
@given(_intervals, _intervals)
def test_against_points(a, b):
    points = lambda intervals: {point for start, end in intervals for point in range(start, end)}
    assert points(union(a)) == points(a)
    assert points(intersection(a, b)) == points(a) & points(b)
    assert length(a) == len(points(a))
    for found in (union(a), intersection(a, b)):
        assert all(left[1] < right[0] for left, right in itertools.pairwise(found))
        assert all(start < end for start, end in found)
    if points(a):
        assert hidden_fraction(a, b) == len(points(a) & points(b)) / len(points(a))
    else:
        assert hidden_fraction(a, b) is None


def test_refuses_what_ends_before_it_starts():
    with pytest.raises(ConfigError, match=r"interval=\(3, 1\): must not end before it starts; interval=\(1, 3\) works"):
        union([(3, 1)])


def test_figures_of_a_device():
    trace = DeviceTrace(communication=((0, 10), (20, 30)), computation=((5, 25),))
    assert trace.figures() == {
        "communication_ns": 20,
        "computation_ns": 20,
        "hidden_ns": 10,
        "hideable_ns": 20,
        "span_ns": 30,
        "hidden_fraction": 0.5,
        "hidden_of_hideable": 0.5,
    }
    nothing = DeviceTrace((), ()).figures()
    assert nothing["hidden_fraction"] is None and nothing["hidden_of_hideable"] is None and nothing["span_ns"] == 0


def write_trace(folder, planes):
    """A trace as a file. planes: name -> line -> [(event, start ns, end ns, {stat: value})]."""
    texts = []
    for name, lines in planes.items():
        ids: dict[str, int] = {}
        at = lambda what, ids=ids: ids.setdefault(what, len(ids) + 1)
        body = ""
        for line, events in lines.items():
            inside = ""
            for event, start, end, stats in events:
                told = "".join(
                    f"stats {{ metadata_id: {at(key)} "
                    + (f'str_value: "{value}"' if isinstance(value, str) else f"int64_value: {value}")
                    + " }"
                    for key, value in stats.items()
                )
                times = f"offset_ps: {start * 1000} duration_ps: {(end - start) * 1000}"
                inside += f"events {{ metadata_id: {at(event)} {times} {told} }}"
            body += f'lines {{ name: "{line}" {inside} }}'
        for kind in ("event_metadata", "stat_metadata"):
            body += "".join(f'{kind} {{ key: {i} value {{ id: {i} name: "{what}" }} }}' for what, i in ids.items())
        texts.append(f'planes {{ name: "{name}" {body} }}')
    file = folder / "host.xplane.pb"
    file.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace("".join(texts)))
    return file


GPU = {
    "/device:GPU:0": {
        "Stream #14(Compute)": [
            ("gemm_fusion_dot_3", 0, 100, {"hlo_op": "gemm_fusion_dot.3"}),
            ("loop_all_experts_fusion", 100, 150, {"hlo_op": "loop_all_experts_fusion"}),
            ("MemcpyD2D", 150, 160, {"hlo_op": "copy.3"}),
            ("Memset", 160, 165, {}),
        ],
        "Stream #20(MemcpyP2P,Compute)": [
            ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 50, 120, {"hlo_op": "all-to-all-start.1"}),
            ("void xla::RaggedAllToAllKernelImpl<4>(int)", 200, 210, {}),
            ("MemcpyP2P", 205, 220, {}),
            ("memcpy_like_kernel", 230, 240, {"hlo_op": "ragged-all-to-all-start.2"}),
            ("AllReduceKernelImpl", 235, 245, {"hlo_op": "psum.7"}),
            ("nccl:all_gather", 300, 310, {}),
        ],
        "Stream #31(MemcpyH2D)": [("MemcpyH2D", 0, 1000, {}), ("MemcpyD2H", 0, 1000, {})],
        "XLA Modules": [("jit_step", 0, 5000, {"hlo_op": "jit_step"})],
        "XLA Ops": [("while.3", 0, 5000, {"hlo_op": "while.3"})],
        "Steps": [("1", 0, 5000, {})],
    },
    "/device:GPU:1": {"Stream #14(Compute)": [("fusion", 7, 9, {})]},
    "/host:CPU": {"python": [("step", 0, 9000, {"hlo_op": "add.1"})]},
}


def test_gpu_streams(tmp_path):
    traces = read_trace(write_trace(tmp_path, GPU))
    assert list(traces) == ["GPU:0", "GPU:1"]
    assert traces["GPU:0"].communication == ((50, 120), (200, 220), (230, 245), (300, 310))
    assert traces["GPU:0"].computation == ((0, 165),)
    assert traces["GPU:0"].hidden_ns == 70
    assert traces["GPU:1"] == DeviceTrace((), ((7, 9),))


CPU = {
    "/host:CPU": {
        "tf_XLAEigen/1": [
            ("ThunkExecutor::Execute", 0, 900, {}),
            ("dot.1", 10, 20, {"hlo_op": "dot.1", "device_ordinal": 0}),
            ("end: dot.1", 800, 801, {}),
            ("while.2", 20, 90, {"hlo_op": "while.2", "device_ordinal": 0}),
            ("wrapped_scatter.1", 30, 40, {"hlo_op": "wrapped_scatter.1", "device_ordinal": 0}),
            ("all-to-all.4.clone.1", 40, 60, {"hlo_op": "all-to-all.4.clone.1", "device_ordinal": 0}),
            ("odd.9", 70, 80, {"hlo_op": "odd.9", "device_ordinal": 10}),
            ("reduce-scatter", 75, 85, {"hlo_op": "reduce-scatter", "device_ordinal": 10}),
            ("add.1", 5, 6, {"hlo_op": "add.1"}),
        ],
        "tf_XLAEigen/2": [
            ("psum.31", 50, 65, {"hlo_op": "psum.31", "device_ordinal": 0}),
            ("slice", 55, 56, {"hlo_op": "slice", "device_ordinal": 0}),
            ("Wait: pending_threads=1/8", 0, 900, {}),
        ],
    }
}


def test_cpu_threads(tmp_path):
    file = write_trace(tmp_path, CPU)
    by_name = read_trace(file)
    assert by_name["CPU:0"] == DeviceTrace(((40, 65),), ((10, 20), (30, 40), (55, 56)))
    assert by_name["CPU:10"] == DeviceTrace(((75, 85),), ((70, 80),))
    assert by_name["CPU:all"] == DeviceTrace((), ((5, 6),))
    text = """HloModule jit_step
      %psum.31 = f32[64,16]{1,0} add(%dot, %all-reduce.1), channel_id=1
      ROOT %odd.9 = (u32[1,2]{1,0}, /*index=1*/u32[1,2]{1,0}) all-to-all(%a, %b), channel_id=2
    """
    assert collective_names(text) == {"odd.9"}
    by_text = read_trace(tmp_path, text)
    assert by_text["CPU:0"] == DeviceTrace(((40, 60),), ((10, 20), (30, 40), (50, 65)))
    assert by_text["CPU:10"] == DeviceTrace(((70, 85),), ())


def test_unknown_traces(tmp_path):
    with pytest.raises(ConfigError, match=r"must hold one .xplane.pb, and there are: none"):
        read_trace(tmp_path)
    with pytest.raises(ConfigError, match="there is no such file"):
        read_trace(tmp_path / "none.xplane.pb")
    (tmp_path / "text.xplane.pb").write_text("no trace")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path)
    for planes in ({"/host:CPU": {"python": [("f", 0, 1, {})]}}, CPU | {"/device:TPU:0": {"XLA Ops": []}}):
        with pytest.raises(ConfigError, match=r"no kernel of a GPU and no operation of XLA:CPU .*planes: /host:CPU"):
            read_trace(write_trace(tmp_path, planes))
    with pytest.raises(ConfigError, match=r"there are: host.xplane.pb, text.xplane.pb"):
        read_trace(tmp_path)


def test_a_real_trace(mesh, tmp_path):
    """Forward and backward of a packed layer on four simulated devices: its collectives, and no others."""
    here = mesh(4)
    config = MoEConfig(16, 16, 8, RouterConfig(2), CommConfig(transport="all_to_all"))
    params = jax.device_put(init_params(config, jax.random.key(0), 4), param_shardings(config, here))
    x = jax.random.normal(jax.random.key(1), (64, 16))
    step = jax.jit(jax.value_and_grad(lambda p, x: jnp.square(moe(p, x, config, mesh=here)[0]).mean()))
    compiled = step.lower(params, x).compile()
    jax.block_until_ready(compiled(params, x))
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(compiled(params, x))
    text = compiled.as_text()
    named = collective_names(text)
    assert any(name.startswith("all-to-all") for name in named)
    traces = read_trace(tmp_path, text)
    assert list(traces) == [f"CPU:{i}" for i in range(4)]

    (file,) = tmp_path.rglob("*.xplane.pb")
    seen = {name: ([], []) for name in traces}
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    for event in (event for plane in planes for line in plane.lines for event in line.events):
        with warnings.catch_warnings():  # see read_trace
            warnings.simplefilter("ignore", DeprecationWarning)
            stats = dict(event.stats)
        if (op := stats.get("hlo_op")) and not op.startswith(("while", "call", "conditional")):
            both = seen[f"CPU:{stats['device_ordinal']}"]
            both[op not in named].append((int(event.start_ns), int(event.end_ns)))
    for name, trace in traces.items():
        assert trace == DeviceTrace(*(tuple(union(part)) for part in seen[name]))
        assert len(seen[name][0]) >= 4  # dispatch and combine, forward and backward
        assert 0 < trace.communication_ns <= trace.span_ns and 0 < trace.computation_ns <= trace.span_ns
        assert trace.hidden_ns <= trace.hideable_ns
