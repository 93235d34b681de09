"""Host memory of loading, and what each of several processes reads: scripts/load_memory.py on a small checkpoint."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).parent / "golden"


def test_load_memory(tmp_path):
    """The bound on memory, every rank's own experts, and the same files again from one process and from four."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", str(ROOT / "scripts/load_memory.py"), "--gigabytes", "0.15"]
    command += ["--folder", str(tmp_path), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out" / "load_memory.json").read_text())
    assert record["expert_share"] == pytest.approx(0.9, abs=0.01)
    one, ranks, experts = record["simulated"], record["processes"], record["expert_bytes"]
    others = record["file_bytes"] - experts
    assert one["placed_bytes"] == experts + 4 * others
    assert one["peak_bytes"] <= 1.25 * one["placed_bytes"]
    assert one["expert_bytes_read_by_device"] == {str(device): experts // 4 for device in range(4)}
    assert [rank["process"] for rank in ranks] == [0, 1, 2, 3]
    for rank in ranks:
        assert (rank["expert_bytes_read"], rank["other_bytes_read"]) == (experts // 4, others)
        assert rank["placed_bytes"] == experts // 4 + others
        assert 0 <= rank["kernel_read_bytes"] - experts // 4 - others < 4e6
    assert one["same_files"] and ranks[0]["same_files"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


ONE_FAILS = """
import os, sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from jax_ep import ConfigError, make_mesh
from jax_ep.models import from_pretrained, save_pretrained
decoder = from_pretrained(sys.argv[3], make_mesh(2))
save_pretrained(decoder, sys.argv[4])
real = os.pwrite
def full(fd, data, at):
    raise OSError(28, "No space left on device")
os.pwrite = full if jax.process_index() == 1 else real
try:
    save_pretrained(decoder, sys.argv[4], most_file_bytes=50_000)
except ConfigError as error:
    print(error)
"""


def test_a_save_that_fails_in_one_process_fails_in_all(tmp_path):
    source = GOLDEN / "gpt_oss"  # every rank writes into the same tensors
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    commands = [
        [sys.executable, "-c", ONE_FAILS, address, str(i), str(source), str(tmp_path / "saved")] for i in range(2)
    ]
    running = [subprocess.Popen(c, env=environment, stdout=subprocess.PIPE, text=True) for c in commands]
    said = [process.communicate(timeout=100)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert "another process failed" in said[0]
    assert "No space left on device" in said[1]
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["config.json", "model.safetensors"]
    saved, original = (read_header_and_data(folder / "model.safetensors") for folder in (tmp_path / "saved", source))
    assert saved == original


def read_header_and_data(path):
    """Every tensor's dtype, shape and bytes, by name."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    entries = {name: entry for name, entry in json.loads(raw[8:start]).items() if name != "__metadata__"}
    span = lambda entry: slice(*(start + offset for offset in entry["data_offsets"]))
    return {name: (entry["dtype"], entry["shape"], raw[span(entry)]) for name, entry in entries.items()}
