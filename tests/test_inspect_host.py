"""Hosts that are not here: their table, whether a model fits, and what scripts/inspect_host.py says and refuses.
(Compiling for them needs compilers that tests do not have: compiled texts are stored ones.)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import _inspect
import inspect_host
from _common import UsageError, load_model_config, override
from _inspect import Asked, Compiled
from _inspect_picture import draw, pieces
from _inspect_report import devices_needed, make_record, print_report
from jax_ep.aot import hosts as hosts_module
from jax_ep.aot.fits import Saved, bytes_by_key, memory_lines, saved_bytes
from jax_ep.aot.hosts import Host, cards, described_devices, flags_for, get_host, hosts, xla_flags
from jax_ep.aot.modelled import Bar
from jax_ep.aot.schedule import read_schedule
from jax_ep.config import ConfigError

COMPILED = Path(__file__).parent / "compiled"
GB = 10**9
SMALL = ["hidden_size=32", "intermediate_size=16", "num_experts=16", "top_k=2", "num_heads=2", "num_kv_heads=1"]
SMALL += ["head_dim=16", "vocab_size=64", "num_layers=3", "stop_tokens=()"]


def asked(*argv: str) -> Asked:
    return inspect_host.read_arguments(inspect_host._arguments(argv))


# Hosts.


def test_every_host_is_described() -> None:
    assert hosts() == ["2xrtx4090", "8xrtx4090", "2xrtx3090", "8xh100", "tpu-v5e-8"]
    for name in hosts():
        host = get_host(name)
        assert host.platform == "tpu" or host.card in cards()
        assert host.name.startswith(f"{host.devices}x") or host.name.endswith(f"-{host.devices}")
        assert 15 * GB < host.memory_bytes < 90 * GB
        assert 50 < host.tflops < 1000 and 5e11 < host.memory_rate < 4e12
        assert host.link_rate < host.memory_rate and 1e-6 <= host.link_latency <= 1e-4


def test_memory_and_its_rate_agree_with_the_compilers_description() -> None:
    for name in hosts():
        host = get_host(name)
        if host.platform == "cuda":
            text = (Path(hosts_module.__file__).parent / "cards" / f"{host.card}.textproto").read_text()
            rate, size = (float(re.search(rf"{key}: (\d+)", text)[1]) for key in ("memory_bandwidth", "memory_size"))
            assert host.memory_rate == pytest.approx(rate, rel=0.01)
            assert host.memory_bytes == pytest.approx(size, rel=0.03)


def test_an_unknown_host_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="nearest: 8xrtx4090"):
        get_host("8xrtx409")


def test_a_host_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "card.textproto").write_text("")
    file = tmp_path / "mine.toml"
    file.write_text('like = "8xrtx4090"\ndevices = 4\nlink_rate = 12e9\ncard = "card.textproto"\n')
    host = get_host(str(file))
    assert (host.name, host.devices, host.link_rate, host.tflops) == ("mine", 4, 12e9, 165.2)
    assert host.card == str(tmp_path / "card.textproto")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('like = "8xrtx4090"\nlink_speed = 1e9', "link_speed.*there are.*link_rate"),
        ("devices = 2", "lacks these fields"),
        ('like = "9xrtx4090"', "must be one of"),
        ('like = "8xrtx4090"\ndevices = 0', "devices=0"),
        ('like = "8xrtx4090"\nplatform = "rocm"', "platform='rocm'"),
        ("devices = ", "cannot be read"),
    ],
)
def test_a_file_that_is_no_host_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        get_host(str(file))


def test_flags_are_those_of_the_platform_and_the_transport() -> None:
    scheduler = "xla_gpu_enable_latency_hiding_scheduler"
    assert flags_for(get_host("8xh100"), "ragged") == {scheduler: True}
    assert flags_for(get_host("8xrtx4090")) == {scheduler: True}
    ragged = flags_for(get_host("8xrtx4090"), "ragged")
    assert ragged == {scheduler: True, "xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback": True}
    assert flags_for(get_host("tpu-v5e-8"), "ragged") == {}
    assert xla_flags({scheduler: True}) == f"--{scheduler}=true"


@pytest.mark.parametrize(("name", "package"), [("8xh100", "jax[cuda13]"), ("tpu-v5e-8", "libtpu")])
def test_a_compiler_that_is_missing_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(**_: Any) -> Any:
        raise RuntimeError("no\nsuch plugin")

    monkeypatch.setattr(hosts_module.topologies, "get_topology_desc", missing)
    with pytest.raises(ConfigError, match=re.escape(f"pip install {package}")) as refusal:
        described_devices(get_host(name))
    assert "\n" not in str(refusal.value)


def test_a_number_of_tpus_that_is_no_grid_is_refused() -> None:
    with pytest.raises(ConfigError, match="devices=6"):
        described_devices(get_host("tpu-v5e-8"), 6)


# Whether a model fits.


@pytest.mark.parametrize(("devices", "held", "fits"), [(2, 4, False), (4, 2, False), (8, 1, True)])
def test_mixtral_on_24_gb_cards(devices: int, held: int, fits: bool) -> None:
    """45.1 G values of experts over the cards, 1.6 G whole on each, 2 bytes each."""
    config = load_model_config("mixtral_8x7b")
    lines = memory_lines(config, devices, "prefill", tokens=2048, temporaries=GB)
    experts = 32 * held * 3 * 4096 * 14336
    attention = 4096 * (2 * 4096 + 2 * 1024)
    rest = 32 * (attention + 4096 * 8 + 2 * 4096) + 2 * 32000 * 4096 + 4096
    assert [line.bytes for line in lines[:2]] == [2 * experts, 2 * rest]
    sums = bytes_by_key(lines)
    assert sums["kv_cache"] == 2048 * 32 * 2 * 8 * 128 * 2
    assert sums["temporaries"] == GB and sums["optimizer"] == sums["gradients"] == 0
    assert (sum(sums.values()) <= get_host("2xrtx4090").memory_bytes) == fits


def test_training_holds_masters_gradients_and_two_moments() -> None:
    config = override(load_model_config("olmoe_1b_7b"), ["param_dtype=float32"])
    sums = bytes_by_key(memory_lines(config, 8, "train", 2048, temporaries=5, saved=Saved(1000, 70)))
    assert sums["gradients"] == sums["parameters"] and sums["optimizer"] == 2 * sums["parameters"]
    assert sums["activations"] == 1000 * config.num_layers + 70 + 2048 * config.vocab_size * 4
    assert sums["kv_cache"] == 0


def test_decode_holds_a_cache_of_every_sequence() -> None:
    config = load_model_config("qwen3_30b_a3b")
    lines = memory_lines(config, 8, "decode", tokens=3, temporaries=0, context=1000)
    assert bytes_by_key(lines)["kv_cache"] == 3 * 1000 * 48 * 2 * 4 * 128 * 2


def test_what_a_backward_keeps_depends_on_recompute(mesh: Any) -> None:
    config = override(load_model_config("qwen3_30b_a3b"), [*SMALL, "vocab_size=512", "hidden_size=64"])
    kept = {
        how: saved_bytes(dataclasses.replace(config, recompute=how), mesh(8), 32)
        for how in ("none", "selective", "full")
    }
    assert kept["full"].layer < kept["selective"].layer < kept["none"].layer
    assert kept["full"].layer == pytest.approx(32 * 64 * 2, abs=8)  # a layer's input, bfloat16
    assert all(saved.outside >= 32 * 512 * 4 for saved in kept.values())  # logits


# The script.


def test_arguments_are_those_of_the_model() -> None:
    one = asked("--host", "8xh100", "--config", "mixtral_8x7b", "num_chunks=4", "transport=ragged", "--devices", "4")
    assert one.host.name == "4xh100"
    assert (one.host.devices, one.task, one.tokens, one.flags, one.layers) == (4, "train", 2048, True, None)
    assert one.config.moe.comm.num_chunks == 4 and one.config.moe.param_dtype == "float32"
    delayed = asked("delay_wgrad_compute=True", "num_chunks=2")  # which a layer may have, and a model not alone
    assert delayed.moe.overlap.delay_wgrad_compute and delayed.moe.comm.num_chunks == 2
    assert not delayed.config.moe.overlap.delay_wgrad_compute
    two = asked("--decode", "--flags", "off", "param_dtype=bfloat16")
    assert (two.task, two.tokens, two.flags, two.layers) == ("decode", 8, False, None)
    assert asked("--prefill", "--layers", "3").layers == 3
    assert asked("--config", "tiny_lm", "overlap_moe_expert_parallel_comm=True").layers == 2  # of two
    assert asked("--prefill").config.moe.param_dtype == "bfloat16"


@pytest.mark.parametrize(
    "argv",
    [
        ["--host", "8xh10"],
        ["--config", "mixtral"],
        ["chunks=4"],
        ["--mode", "packt"],
        ["--train", "--decode"],
        ["--devices", "0"],
        ["--tokens", "-1"],
        ["--layers", "100"],
        ["--decode", "--layers", "2"],
        ["--decode", "overlap_moe_expert_parallel_comm=True"],
        ["--prefill", "delay_wgrad_compute=True"],
        ["--flag", "on"],
    ],
)
def test_what_is_unknown_is_refused(argv: list[str]) -> None:
    with pytest.raises((UsageError, ConfigError)):
        asked(*argv)


def test_no_compiler_is_one_line_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(**_: Any) -> Any:
        raise RuntimeError("no such plugin")

    monkeypatch.setattr(hosts_module.topologies, "get_topology_desc", missing)
    with pytest.raises(ConfigError, match=re.escape("pip install jax[cuda13]")):
        inspect_host.main(["--host", "8xh100", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_hosts_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    inspect_host.main(["--host", "list"])
    assert capsys.readouterr().out.split() == hosts()


def record_of(one: Asked, text: str, transport: str) -> dict[str, Any]:
    compiled = Compiled((COMPILED / f"{text}.txt").read_text(), 2 * GB, transport, flags_for(one.host, transport))
    saved = Saved(10**8, 10**6) if one.task == "train" else None
    return make_record(one, compiled, read_schedule(compiled.text), saved)


def test_the_record_says_what_was_seen(capsys: pytest.CaptureFixture[str]) -> None:
    one = asked("--host", "8xh100", "--prefill", "num_chunks=2")
    record = json.loads(json.dumps(record_of(one, "gpu_ragged_scheduled", "ragged")))
    assert set(record) >= {"host", "devices", "fits", "bytes_per_device", "collectives", "warnings", "flags"}
    sizes = record["bytes_per_device"]
    assert record["fits"] and sizes["total"] == sum(n for key, n in sizes.items() if key not in ("total", "card"))
    assert sizes["total"] == sum(line["bytes"] for line in record["arithmetic"])
    hidden = sum(c["modelled_hidden_ms"] for c in record["collectives"])
    assert hidden == pytest.approx(record["modelled_ms"]["hidden"])
    assert record["hidden_fraction"] == pytest.approx(hidden / record["modelled_ms"]["communication"])
    assert 0.9 < record["hidden_of_hideable"] < 1
    assert [c["asynchronous"] for c in record["collectives"] if c["payload"]] == [True] * 4
    assert any("2 of 4 payload collectives have no product" in said for said in record["warnings"])
    print_report(record, needed=8)
    printed = capsys.readouterr().out
    assert "modelled, not measured" in printed and "36.55%" in printed and "fits, with" in printed


def test_a_blocking_exchange_is_warned_of_with_the_flag() -> None:
    one = asked("--host", "8xh100", "--prefill", "num_chunks=2", "--flags", "off")
    warned = record_of(one, "gpu_ragged_unscheduled", "ragged")["warnings"]
    assert any("3 of 4" in said and "--xla_gpu_enable_latency_hiding_scheduler=true" in said for said in warned)


def test_an_exchange_that_waits_for_the_host_is_warned_of() -> None:
    one = asked("--host", "8xrtx4090", "--prefill", "num_chunks=2", "transport=ragged")
    record = record_of(one, "gpu_ragged_scheduled", "ragged")
    assert any("transport=all_to_all" in said for said in record["warnings"])
    assert [c["host_synchronous"] for c in record["collectives"] if c["payload"]] == [True] * 4


def test_what_does_not_fit_says_by_how_much_and_where_it_would(capsys: pytest.CaptureFixture[str]) -> None:
    one = asked("--host", "2xrtx4090", "--config", "mixtral_8x7b", "--prefill")
    compiled = Compiled((COMPILED / "gpu_ragged_scheduled.txt").read_text(), GB, "all_to_all", {})
    record = make_record(one, compiled, read_schedule(compiled.text), None)
    assert not record["fits"]
    needed = devices_needed(one, GB, None)
    assert needed == 8
    print_report(record, needed)
    printed = capsys.readouterr().out
    over = (record["bytes_per_device"]["total"] - record["bytes_per_device"]["card"]) / GB
    assert f"does not fit: {over:.1f} GB too much" in printed and "on 8 such devices it would" in printed
    assert "32 layers x 4 experts x 3 x 4096 x 14336 x 2 B" in printed


def test_a_loop_nobody_asked_for_is_warned_of() -> None:
    text = (COMPILED / "gpu_ragged_scheduled.txt").read_text()
    one = asked("--host", "8xh100", "--prefill", "num_chunks=2")
    assert not any("a loop" in said for said in record_of(one, "gpu_ragged_scheduled", "ragged")["warnings"])
    other = text.replace("extra_rounds", "plan/searchsorted")
    compiled = Compiled(other, GB, "ragged", {})
    warned = make_record(one, compiled, read_schedule(other), None)["warnings"]
    assert sum("a loop that the layer did not ask for" in said for said in warned) == 2


def test_a_collective_is_drawn_hidden_where_products_are() -> None:
    bar = Bar(1.0, 5.0, None)  # type: ignore[arg-type]
    drawn = pieces(bar, [(0.0, 2.0), (3.0, 4.0), (4.0, 4.5)])
    assert drawn == [(1.0, 2.0, "hidden"), (2.0, 3.0, "exposed"), (3.0, 4.5, "hidden"), (4.5, 5.0, "exposed")]


def test_the_picture_is_a_png() -> None:
    one = asked("--host", "8xrtx4090", "num_chunks=2")
    record = record_of(one, "gpu_all_to_all_backward", "all_to_all")
    products, collectives = inspect_host.shown(
        read_schedule((COMPILED / "gpu_all_to_all_backward.txt").read_text()), one
    )
    assert draw(products, collectives, record).startswith(b"\x89PNG")


def test_both_programs_lower_for_devices_that_are_here(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled for hosts elsewhere, here lowered for simulated devices."""
    one = asked("--tokens", "8", *SMALL, "--layers", "2", "--prefill")
    eight = mesh(8)
    assert "all_to_all" in _inspect._decoder(one, eight).as_text()
    for task in ("train", "prefill"):
        layer = dataclasses.replace(one, task=task, layers=None)
        assert "all_to_all" in _inspect.lowered_layer(layer.moe, eight, layer.tokens, layer.task == "train").as_text()


def test_the_mesh_is_one_row_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    monkeypatch.setattr(_inspect, "described_devices", lambda host: jax.devices()[: host.devices])
    made = _inspect.host_mesh(dataclasses.replace(get_host("8xh100"), devices=4))
    assert made.shape == {"data": 1, "expert": 4} and np.size(made.devices) == 4


def test_a_hosts_fields_are_checked() -> None:
    with pytest.raises(ConfigError, match="tflops"):
        dataclasses.replace(get_host("8xh100"), tflops=0.0)
    assert isinstance(get_host("8xh100"), Host)
    assert isinstance(inspect_host._arguments([]), argparse.Namespace)
