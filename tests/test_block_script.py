"""compare.py --block, in this process on its simulated devices, and block_links.py between processes."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from compare_runs import run_compare
from tiny_models import TINY

import _block
import _block_report
import _common
import _links
import _links_bench
import block_links
import compare
from jax_ep.block.ranges import counts_of
from jax_ep.config import ConfigError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
B, S, H, E, K, R, D = 8, 16, 16, 6, 2, 4, 2  # R does not divide E
SIZES = f"batch_size={B} sequence_length={S} moe.hidden_size={H} intermediate_size=8 num_experts={E} top_k={K}".split()
SIZES += ["num_heads=2", "num_kv_heads=1", "head_dim=4"]
KV_ROW = 2 * 1 * 4 * 4
WAYS = ["coship", "separate", "all_gather", "ring"]


def run_here(folder, *arguments):
    return run_compare(folder, "block", "BlockBench", [*SIZES, *arguments])


@pytest.fixture(scope="module")
def parallel(tmp_path_factory):
    """All ways on two replicas of four ranks, with documents."""
    options = ["--block", "parallel", "--expert-parallel", str(R), f"data_parallel={D}", "--segments", "5"]
    return run_here(tmp_path_factory.mktemp("parallel"), *options, "recv_rows_factor=None")


def test_record_of_a_block(parallel):
    record = parallel.record
    workload = {"batch_size": B, "sequence_length": S, "layers": 1, "hidden_size": H, "num_experts": E, "top_k": K}
    workload |= {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "expert_parallel": R, "data_parallel": D}
    assert {key: record["workload"][key] for key in workload} == workload
    assert (record["block"], record["split"], record["timed"]) == ("parallel", "zigzag", "forward")
    assert list(record["ways"]) == WAYS
    ids = parallel.bench.segment_ids
    assert ids.shape == (B, S)
    assert record["workload"]["documents"] == sum(len(set(row.tolist())) for row in ids) > B
    notes = " ".join(record["notes"])
    assert "Simulated devices" in notes
    assert "control holds the segment ids" in notes
    assert "not to the token" not in notes
    assert "further" not in notes


@pytest.mark.parametrize("kv", WAYS)
def test_ways_of_a_block(parallel, kv):
    m = parallel.record["ways"][kv]
    assert len(m["runs_ms"]) == 2
    assert 0 < m["min_ms"] <= m["median_ms"] <= m["max_ms"]
    assert m["tokens_per_s"] == pytest.approx(B * S / m["median_ms"] * 1e3)
    assert 0 < m["max_abs_diff"] < 1e-5
    assert m["temp_bytes"] > 0
    assert (m["transport"], m["rounds"]) == ("all_to_all", 1)
    kinds = {
        "coship": {"all_to_all": 2},
        "separate": {"all_to_all": 3},
        "all_gather": {"all_to_all": 2, "all_gather": 1},
    }
    assert m["collectives"]["kinds"] == kinds.get(kv, {"all_to_all": 2, "collective_permute": R - 1})
    payload = m["layer"]["forward"]["payload_collectives"]
    assert m["collectives"]["layer"] == {"payload": payload, "control": 0, "sums": 1}
    assert m["collectives"]["stack"] == {"payload": 0, "control": 0, "sums": 0}
    assert m["moved"] == m["bytes"]["forward"]


def test_bytes_of_a_block(parallel):
    """Hidden rows from the routing that ran, key/value rows from the documents, token by token."""
    ways, bench = parallel.record["ways"], parallel.bench
    (chosen,) = bench.chosen
    assert chosen.experts.shape == (B, S, K)
    chunk, local = S // (2 * R), 2
    holder = [min(p // chunk, 2 * R - 1 - p // chunk) for p in range(S)]
    remote = sum(int(e) // local != holder[p] for b, p, k in np.ndindex(B, S, K) for e in [chosen.experts[b, p, k]])
    rows = sum(counts_of("zigzag", B // D, S, R, segments=half).sum() for half in np.split(bench.segment_ids, D))
    for kv in WAYS:
        moved = ways[kv]["moved"]
        assert moved["hidden"]["total"] == remote * 2 * H * 4
        every = B * S * (R - 1)
        assert moved["kv"]["total"] == (rows if kv in ("coship", "separate") else every) * KV_ROW
        told = D * R * (R - 1) * (local + 1) + B * S * (R - 1)  # headers, and the ids of all other positions
        assert moved["control"]["total"] == told * 4
    assert ways["coship"]["bytes"] == {
        way: ways["separate"]["bytes"][way] | {"payload_collectives": 2} for way in ("forward", "backward")
    }
    assert parallel.record["at_expert_bytes"]["forward"]["kv"]["total"] > 0


def test_output_of_a_block(parallel):
    assert parallel.png.startswith(b"\x89PNG")
    assert len(parallel.png) > 30_000
    words = [
        *WAYS,
        "parallel block, zigzag",
        "documents",
        "one device",
        "predicted, not measured",
        "PCIe",
        "block.json",
    ]
    words += [
        "2 payload collectives a layer instead of 3, the same bytes",
        "against ring: 2 payload",
        "at the expert's rank",
    ]
    medians = {kv: way["median_ms"] for kv, way in parallel.record["ways"].items()}
    words += [f"the same bytes; {medians['coship'] / medians['separate']:.2f} of the time here"]
    for word in words:
        assert word in parallel.stdout


@pytest.fixture(scope="module")
def sequential(tmp_path_factory):
    """Two layers, of which the first has a window, on the ragged layout, backward as well."""
    folder = tmp_path_factory.mktemp("sequential")
    (folder / "windowed.py").write_text(WINDOWED)
    options = ["--config", "./windowed.py", "--block", "sequential", "--split", "contiguous", "--backward"]
    return run_here(folder, *options, "--expert-parallel", "2", "--kv", "coship", "transport=ragged")


WINDOWED = """
from jax_ep import CommConfig, ModelConfig, MoEConfig, RouterConfig
from jax_ep.config import WorkloadConfig

moe = MoEConfig(8, 8, 8, RouterConfig(2), comm=CommConfig(recv_rows_factor=None))
get_model_config = lambda: ModelConfig(9, 2, 2, 1, 4, moe, window=3, window_layers=(True, False), stop_tokens=(3,))
get_config = lambda: WorkloadConfig(2, 8, moe, expert_parallel=2)
"""


def test_a_stack_forward_and_backward(sequential):
    record = sequential.record
    assert record["workload"]["layers"] == 2
    assert record["timed"] == "forward+backward"
    (m,) = record["ways"].values()
    assert m["collectives"]["layer"]["payload"] == 6
    assert m["collectives"]["layer"]["control"] == m["layer"]["forward"]["control_collectives"] == 2
    assert m["collectives"]["stack"]["payload"] == 2
    assert m["collectives"]["kinds"] == {"ragged_all_to_all": 6}
    assert m["transport"] == "ragged"
    assert m["relative_difference_gradients"] < 1e-5
    for part in ("hidden", "kv", "wire"):
        both = [m["bytes"][way][part]["total"] for way in ("forward", "backward")]
        assert m["moved"][part]["total"] == sum(both)
    # Over the one border, the window of 3 looks two positions back, and the layer without sees all.
    assert m["bytes"]["forward"]["kv"]["total"] == B * (2 + S // 2) * KV_ROW
    assert len(sequential.bench.chosen) == 2
    assert "not to the token" not in " ".join(record["notes"])
    assert "saves messages, not exposure" in sequential.stdout
    assert "rel. grads" in sequential.stdout
    assert record["at_expert_bytes"] is None


REFUSALS = {
    "form": (["--block", "paralel"], ["block='paralel'", "parallel, sequential"]),
    "way": (["--block", "parallel", "--kv", "cosship"], ["unknown way of keys and values 'cosship'", "coship"]),
    "split": (["--block", "parallel", "--split", "striped"], ["split='striped'", "contiguous, zigzag"]),
    "segments": (["--block", "parallel", "--segments", "0"], ["segments=0", "--segments 64 works"]),
    "modes": (["--block", "parallel", "--modes", "dense"], ["--modes dense", "--block parallel alone works"]),
    "sweep": (["--block", "parallel", "--sweep", "dedup"], ["--sweep dedup", "alone works"]),
    "kv alone": (["--kv", "ring"], ["--kv: only --block has it"]),
    "segments alone": (["--segments", "3"], ["--segments: only --block has it"]),
    "mode": (["--block", "parallel", "mode=padded"], ["mode=padded", "packed"]),
    "layers": (["--block", "parallel", "num_layers=3"], ["num_layers=3", "layers=2"]),
    "coship": (["--block", "parallel", "kv_coship=zigzag"], ["kv_coship=zigzag", "--split"]),
    "no model": (["--block", "parallel", "--config", "mini_infer"], ["must define get_model_config", "tiny_decoder"]),
    "one layer": (["--block", "parallel", "layers=4"], ["layers=4", "a parallel one is one layer"]),
    "recompute": (["--block", "parallel", "recompute=full"], ["recompute=full", "a parallel one is one layer"]),
    "vocabulary": (["--block", "parallel", "vocab_size=3"], ["vocab_size=3", "layers alone"]),
    "replicas": (["--block", "parallel", "data_parallel=3"], ["batch_size=4", "data_parallel=3; batch_size=6 works"]),
    "no layers": (["--block", "sequential", "layers=0"], ["layers=0", "layers=2 works"]),
    "key": (["--block", "parallel", "num_kv_head=1"], ["unknown key 'num_kv_head'", "num_kv_heads"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case, tmp_path, monkeypatch, capsys):
    arguments, words = REFUSALS[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        _common.run_main(compare.main)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    for word in words:
        assert word in err
    assert not any(tmp_path.iterdir())


def test_documents_fill_the_sequences():
    ids = _block.document_ids(3, 400, 10)
    assert ids.shape == (3, 400)
    assert ids[:, 0].tolist() == [0] * 3
    assert set(np.diff(ids, axis=1).reshape(-1).tolist()) == {0, 1}
    lengths = [np.bincount(row)[:-1] for row in ids]
    assert all(1 <= n < 20 for each in lengths for n in each)
    assert 8 < np.concatenate(lengths).mean() < 12
    assert ids[0].tolist() != ids[1].tolist()
    assert _block.document_ids(2, 5, 1).tolist() == [list(range(5))] * 2


def test_a_models_first_layers():
    model = TINY["gpt_oss"]
    assert (model.window, model.window_layers) == (8, (True, False))
    assert [_block.cut(model, n).window_layers for n in (1, 2, 4)] == [None, (True, False), (True, False, True, False)]
    assert _block.cut(model, 1).window == 8
    assert _block.cut(dataclasses.replace(model, window_layers=(False, True)), 1).window is None
    assert _block.cut(TINY["mixtral"], 3).window == 12
    assert _block.cut(TINY["olmoe"], 3).num_layers == 3


def test_collectives_by_purpose():
    gather = '%1 = "stablehlo.all_gather"(%0) <{dim = 0 : i64}> : (tensor<1x4x{}>) -> tensor<4x4x{}>'
    ops = [gather.replace("{}", kind) for kind in ("i32", "f32")]
    ops += ['%2 = "stablehlo.all_to_all"(%1) : (tensor<4xui32>) -> tensor<4xui32>', '"stablehlo.all_reduce"(%2)']
    body = "\n".join(ops)
    text = f"func.func public @main() {{\n{body}\nstablehlo.while(%3 = %2) cond {{ }} do {{ {body}\n{ops[1]} }} }}"
    found = _block.collectives_by_purpose(text, looped=True)
    assert found["layer"] == {"payload": 3, "control": 1, "sums": 1}
    assert found["stack"] == {"payload": 2, "control": 1, "sums": 1}
    assert found["kinds"] == {"all_gather": 2, "all_to_all": 1}
    assert _block.collectives_by_purpose(text, looped=False)["layer"] == found["stack"]


def test_a_prediction_is_latencies_and_the_busiest_ranks_bytes():
    wire = {"total": 9, "largest": 3000, "sent": [3000], "received": [1]}
    layer = {"forward": {"wire": wire, "payload_collectives": 3, "control_collectives": 1}}
    assert _block_report.predicted_us(layer, 20.0, 0.5) == 4 * 20 + 3000 / 500


# ------------------------------------------------------------------------------------------------- between processes


def test_two_processes(tmp_path):
    options = {"processes": 2, "sequences": 8, "runs": 4, "blocks": "parallel", "out": tmp_path}
    given = [f"--{name}={value}" for name, value in options.items()]
    script = str(ROOT / "scripts/block_links.py")
    command = [sys.executable, "-W", "error", script, *given, "moe.hidden_size=16", "num_experts=4"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "block_links.json").read_text())
    assert (record["processes"], record["environment"]["device_count"]) == (2, 2)
    assert record["link"]["latency_us"] > 0
    assert record["link"]["megabytes_s"] > 0
    (row,) = record["rows"]
    assert (row["block"], row["sequence"], row["tokens_per_rank"]) == ("parallel", 8, 8)
    assert row["payload_collectives"] == {"separate": 3, "coship": 2}
    assert row["predicted_ms"] == pytest.approx(record["link"]["latency_us"] / 1e3)
    # All 16 rows a pair, there and back, a header of 3, and all of rank 1's 4 positions of 2 sequences.
    assert row["wire_per_rank"] == 16 * 2 * 16 * 4 + 3 * 4 + 2 * 4 * (2 * 4 * 32 * 4)
    assert set(row["runs_ms"]) == {"separate", "coship"}
    assert all(len(runs) == 4 for runs in row["runs_ms"].values())
    low, high = row["saved_ms"]["quartiles"]
    assert low <= row["saved_ms"]["median"] <= high
    assert record["markdown"] in done.stdout


def row_of(**fields):
    saved = {"median": 0.4, "quartiles": [0.1, 0.6]}
    row = {"block": "parallel", "layers": 1, "tokens_per_rank": 4, "wire_per_rank": 2048, "rounds": 1, "pays": "yes"}
    row |= {"payload_collectives": {"separate": 3, "coship": 2}, "median_ms": {"separate": 2.0, "coship": 1.6}}
    return row | {"saved_ms": saved, "predicted_ms": 0.25} | fields


def test_table_is_markdown():
    link = {"latency_us": 250.0, "megabytes_s": 900.0, "rate": "1gbit", "through": "network namespaces"}
    record = {"environment": {"cpu_cores": 2, "jax": "1.0"}, "processes": 4, "timed": "forward", "split": "zigzag"}
    record |= {"model": "H=1", "link": link, "rows": [row_of(), row_of(block="sequential", layers=2, rounds=2)]}
    text = _links_bench.table(record)
    lines = text.splitlines()
    assert "Gloo over network namespaces of 1gbit: 250 us a collective, and 900 MB/s" in lines[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:6]]
    assert len({len(row) for row in cells}) == 1
    assert cells[2] == ["parallel", "4", "2.0 KiB", "3 / 2", "2.00", "1.60", "+0.40 (+0.10 .. +0.60)", "0.25", "yes"]
    assert cells[3][0] == "sequential, 2 layers"
    assert "further rounds" in lines[-1]


def refused(main, argv, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["block_links.py", *argv])
    with pytest.raises(SystemExit) as stopped:
        _common.run_main(main)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_block_links_refuses(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for argv, words in {
        "--processes 1": "one exchanges nothing; --processes 4 works",
        "--runs 3": "quartiles need 4",
        "--blocks paralel": "blocks='paralel'",
        "--sequences 8,x": "must be integers",
        "--sequences 9": "sequence=9: zigzag over 4 ranks",
        "--split striped": "split='striped'",
        "expert_parallel=8": "set it with --processes",
        "sequence_length=8": "set it with --sequences",
        "runs=9": "set it with --runs",
        "data_parallel=2": "every process is a rank",
        "batch_size=3": "two microbatches; batch_size=4 works",
        "--blocks parallel layers=3": "a parallel one is one layer",
        "num_kv_head=1": "nearest",
    }.items():
        assert words in refused(block_links.main, argv.split(), monkeypatch, capsys)
    assert not any(tmp_path.iterdir())


def test_links_that_cannot_be_made_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(_links.shutil, "which", lambda tool: None)
    said = refused(block_links.main, ["--rate", "1gbit"], monkeypatch, capsys)
    assert "need ip of iproute2; without --rate it works" in said
    monkeypatch.undo()

    ran = []

    def fails(command, **options):
        ran.append(command)
        return subprocess.CompletedProcess(command, int("tbf" in command), "", "RTNETLINK answers: no\n")

    monkeypatch.setattr(_links.subprocess, "run", fails)
    monkeypatch.setattr(_links.shutil, "which", lambda tool: tool)
    refusal = pytest.raises(_common.UsageError, match=r"rate fast .*RTNETLINK answers: no; --rate 500mbit as root")
    with refusal, _links.links(2, "fast"):
        pass
    deleted = [command for command in ran if "delete" in command]
    assert len(deleted) == 3  # two namespaces and the bridge


def test_config_errors_are_of_the_library():
    with pytest.raises(ConfigError, match="layers=0"):
        dataclasses.replace(_block.block_workload("tiny_block", [], {}, _block.BLOCKS), layers=0)
