"""compare.py with packed's options: alone, as overrides, and swept. In this process, on its simulated devices."""

import dataclasses

import pytest
from compare_runs import run_compare

import _sweep
from jax_ep import CommConfig, MoEConfig, RouterConfig, byte_ledger, count_routing

pytestmark = pytest.mark.slow

B, S, H, E, K, R = 4, 12, 32, 8, 4, 4
SIZES = f"batch_size={B} sequence_length={S} moe.hidden_size={H} intermediate_size=16 num_experts={E} top_k={K}".split()
FIELDS = ["dedup", "num_chunks", "recv_rows_factor", "wire_dtype", "messages", "transport"]
VARIANTS = {
    "baseline": {},
    "dedup=True": {"dedup": True},
    "num_chunks=2": {"num_chunks": 2},
    "num_chunks=4": {"num_chunks": 4},
    "recv_rows_factor=1.0": {"recv_rows_factor": 1.0},
    "recv_rows_factor=1.25": {"recv_rows_factor": 1.25},
    "wire_dtype=int8": {"wire_dtype": "int8"},
    "wire_dtype=float8_e4m3fn": {"wire_dtype": "float8_e4m3fn"},
    "messages=expert": {"messages": "expert"},
    "transport=ragged": {"transport": "ragged"},
    "together": {"recv_rows_factor": 1.25, "dedup": True, "wire_dtype": "int8"},
}


def ledger_of(run, **comm):
    """Of the layer's own routing, with these options."""
    config = dataclasses.replace(run.bench.config, comm=CommConfig(**comm))
    replicas, ranks = run.bench.mesh.devices.shape
    counts = count_routing(run.bench.experts, config, ranks=ranks, replicas=replicas)
    return byte_ledger(config, counts)


def run_here(folder, name, *arguments):
    return run_compare(folder, name, "Bench", [*SIZES, *arguments])


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """All fields on four devices, away from one round for whatever comes, whose programs are the smallest."""
    options = ["--devices", str(R), "--expert-parallel", str(R), "recv_rows_factor=None", "--sweep", ",".join(FIELDS)]
    return run_here(tmp_path_factory.mktemp("sweep"), "sweep", *options)


def test_sweep_record(sweep):
    record = sweep.record
    keys = [
        "environment",
        "workload",
        "timed",
        "timed_region",
        "swept",
        "variants",
        "refused",
        "reference_bytes",
        "notes",
    ]
    assert list(record) == keys
    assert record["swept"] == FIELDS
    assert record["timed"] == "forward"
    assert record["refused"] == {}
    assert record["workload"]["packed"] == dataclasses.asdict(CommConfig(recv_rows_factor=None))
    assert sum(record["workload"]["tokens_per_expert"]) == B * S * K
    unit = 2 * B * S * H * 4
    assert record["reference_bytes"] == {"tensor_parallel": unit, "ideal": unit * K, "padded": unit * K * R}
    notes = " ".join(record["notes"])
    assert "variants take turns" in notes
    assert "wire_dtype rounds rows" in notes
    assert "not to the token" not in notes


@pytest.mark.parametrize("name", VARIANTS)
def test_sweep_variants(sweep, name):
    assert list(sweep.record["variants"]) == list(VARIANTS)
    v, base = sweep.record["variants"][name], sweep.record["variants"]["baseline"]
    assert v["changed"] == VARIANTS[name]
    comm = {"recv_rows_factor": None, **VARIANTS[name]}
    assert v["comm"] == dataclasses.asdict(CommConfig(**comm))
    ledger = ledger_of(sweep, **comm)
    assert v["bytes"] == ledger["forward"]
    assert v["rounds"] == ledger["rounds"]
    assert v["transport"] == ledger["transport"]
    assert v["shard_ratio"] == ledger["shard_ratio"]
    assert len(v["runs_ms"]) == 2
    assert v["time_ratio"] == pytest.approx(v["median_ms"] / base["median_ms"])
    assert v["wire_ratio"] == pytest.approx(v["bytes"]["wire"] / base["bytes"]["wire"])
    assert v["dropped_rows"] == 0
    assert v["relative_difference_gradients"] is None
    rounded = v["comm"]["wire_dtype"] is not None
    least, most = (1e-3, 0.1) if rounded else (0, 1e-5)
    assert least <= v["relative_difference"] < most
    assert (v["max_abs_diff"] > 1e-4) == rounded


def test_sweep_payload_in_closed_form(sweep):
    payload = {name: v["bytes"]["payload"] for name, v in sweep.record["variants"].items()}
    rows = B * S * K
    pairs = {(token, expert // (E // R)) for token, chosen in enumerate(sweep.bench.experts) for expert in chosen}
    for name in VARIANTS:
        moved = len(pairs) if VARIANTS[name].get("dedup") else rows
        there = H if "wire_dtype" in VARIANTS[name] else 4 * H
        assert payload[name] == moved * (there + 4 * H)
    assert len(pairs) < rows
    assert sweep.record["variants"]["recv_rows_factor=1.0"]["rounds"] > 1


def test_sweep_output(sweep):
    assert sweep.png.startswith(b"\x89PNG")
    assert len(sweep.png) > 40_000
    for words in (*VARIANTS, "simulated", "baseline: packed with", "rel. diff", "sweep.json", "x1.00"):
        assert words in sweep.stdout


def test_sweep_backward_with_capacity_and_what_is_refused(tmp_path):
    options = ["--expert-parallel", "2", "data_parallel=2", "--backward", "--sweep", "dedup,messages"]
    comm = {"messages": "expert", "capacity_factor": 0.75, "recv_rows_factor": None, "wire_dtype": "int8"}
    run = run_here(tmp_path, "sweep", *options, *(f"{field}={value}" for field, value in comm.items()))
    record = run.record
    assert record["timed"] == "forward+backward"
    assert list(record["variants"]) == ["baseline", "messages=rank"]
    assert record["variants"]["baseline"]["comm"] == dataclasses.asdict(CommConfig(**comm))
    assert list(record["refused"]) == ["dedup=True"]
    assert "messages='rank' works" in record["refused"]["dedup=True"]
    assert any(note.startswith("dedup=True is refused") for note in record["notes"])
    for v in record["variants"].values():
        assert 0 < v["dropped_rows"] < B * S * K
        rows = B * S * K - v["dropped_rows"]
        assert v["bytes"]["payload"] == rows * (H + 3 * H * 4)  # there as int8; back, and cotangents both ways
        assert v["relative_difference_gradients"] > 0
    assert "rel. grads" in run.stdout


def test_options_of_packed_as_overrides(tmp_path):
    options = {"dedup": True, "num_chunks": 2, "wire_dtype": "int8"}
    overrides = [f"{field}={value}" for field, value in options.items()]
    run = run_here(tmp_path, "compare", "--expert-parallel", "4", "--modes", "packed", "recv_rows_factor=2", *overrides)
    m = run.record["modes"]["packed"]
    assert run.record["workload"]["packed"] == dataclasses.asdict(CommConfig(**options))
    assert m["bytes"] == ledger_of(run, **options)["forward"]
    assert m["rounds"] == ledger_of(run, **options)["rounds"]
    assert 1e-3 < m["relative_difference"] < 0.1
    assert m["collectives"]["all_to_all"]["straight"] == 4
    assert run.record["one_device"]["max_abs_diff"] < 1e-5  # where nothing travels, nothing is rounded
    assert any("wire_dtype rounds rows on their way to the experts in packed" in note for note in run.record["notes"])


def names(fields, **comm):
    layers, refused = _sweep.variants(MoEConfig(16, 32, 4, RouterConfig(2), CommConfig(**comm)), fields, None)
    assert next(iter(layers)) == "baseline"
    return list(layers)[1:], list(refused)


def test_variants_leave_out_the_baselines_own_values():
    assert names(["dedup"], dedup=True) == (["dedup=False"], [])
    assert names(["num_chunks"], num_chunks=2) == (["num_chunks=1", "num_chunks=4"], [])
    assert names(["wire_dtype"], wire_dtype="int8") == (["wire_dtype=None", "wire_dtype=float8_e4m3fn"], [])
    assert names(["transport"]) == (["transport=ragged"], [])  # auto is all_to_all on CPU
    assert names(["transport"], transport="ragged") == (["transport=all_to_all"], [])


def test_variants_together_are_savings_that_the_baseline_lacks():
    fields = ["wire_dtype", "dedup", "recv_rows_factor"]
    assert "together" not in names(["dedup"])[0]
    layers, _ = _sweep.variants(MoEConfig(16, 32, 4, RouterConfig(2)), fields, None)
    assert list(layers)[-1] == "together"
    assert layers["together"].comm == CommConfig(dedup=True, recv_rows_factor=1.25, wire_dtype="int8")
    assert "together" in names(fields, dedup=True)[0]
    assert "together" not in names(fields, dedup=True, wire_dtype="float8_e4m3fn")[0]
    assert "together" not in names(fields, dedup=True, recv_rows_factor=1.0)[0]
    assert names(["dedup", "wire_dtype"], messages="expert")[1] == ["dedup=True", "together"]


def test_swept_fields_once_each_in_their_order():
    assert _sweep.swept_fields(" wire_dtype, dedup,,wire_dtype") == ["wire_dtype", "dedup"]
    assert set(_sweep.VALUES) < {field.name for field in dataclasses.fields(CommConfig)}
