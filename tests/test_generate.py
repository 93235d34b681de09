"""What people meet in generate.py: the run without arguments, models in folders, text as it comes, refusals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import generate
from _common import UsageError
from _tokens import ByteTokenizer, TextStream, printable
from jax_ep import ConfigError, make_mesh
from jax_ep.engine import Engine
from jax_ep.models import from_pretrained
from jax_ep.sampling import Sampling

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
MIXTRAL = ROOT / "tests" / "golden" / "mixtral"


def run(out: Path, *arguments: Any) -> dict[str, Any]:
    generate.main([*map(str, arguments), "--out", str(out)])
    return json.loads((out / "generate.json").read_text())


def test_without_arguments_the_whole_road_works_and_says_that_it_means_nothing(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    command = [sys.executable, "-W", "error", str(ROOT / "scripts/generate.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for said in (
        "means nothing",
        "simulated",
        "saved as a qwen3_moe checkpoint",
        "prefill: 26 tokens",
        "decode: 93 tokens",
    ):
        assert said in done.stdout
    assert "compilation took" in done.stdout and "is in neither" in done.stdout
    steps = [line.split()[0] for line in done.stdout.splitlines() if "  0: '" in line]
    assert steps == [str(i + 1) for i in range(32)]
    record = json.loads((tmp_path / "out/generate/generate.json").read_text())
    assert record["environment"]["simulated"] and record["model"]["mesh"] == {"data": 1, "expert": 4}
    assert [len(row["new_ids"]) for row in record["sequences"]] == [32] * 3
    assert [row["prompt"] for row in record["sequences"]] == list(generate.PROMPTS)
    speed = record["speed"]
    assert speed["decode_tokens_per_s"] == pytest.approx(93 / speed["decode_s"])
    assert any("means nothing" in note for note in record["notes"])


def test_a_folder_without_a_tokenizer_takes_ids_and_gives_ids(tmp_path, capsys):
    options = ["--max-new-tokens", 5, "--expert-parallel", 2, "mode=padded", "--stop-tokens", ""]
    record = run(tmp_path, "--model", MIXTRAL, "--ids", "1,2,3", "--ids", "7", *options)
    engine = Engine(from_pretrained(MIXTRAL, make_mesh(2)))
    wanted = engine.generate([[1, 2, 3], [7]], Sampling(max_new_tokens=5, stop_tokens=()))
    assert [row["new_ids"] for row in record["sequences"]] == wanted.tokens
    assert record["model"]["mode"] == "padded" and record["model"]["tokenizer"] is None
    out = capsys.readouterr().out
    assert "ids in, ids out" in out and "means nothing" not in out
    assert f"    1  0: {wanted.tokens[0][0]}  1: {wanted.tokens[1][0]}\n" in out
    drawn = ["--temperature", 1.5, "--top-p", 0.9, "--ids", "7", *options]
    first = run(tmp_path, "--model", MIXTRAL, *drawn, "--seed", 4)["sequences"][0]["new_ids"]
    assert run(tmp_path, "--model", MIXTRAL, *drawn, "--seed", 4)["sequences"][0]["new_ids"] == first
    assert run(tmp_path, "--model", MIXTRAL, *drawn, "--seed", 5)["sequences"][0]["new_ids"] != first
    assert f"\n{' '.join(map(str, first))} \n" in capsys.readouterr().out  # one prompt: one line, as it comes


def test_a_tokenizer_beside_the_weights_is_used(tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path / "model"
    shutil.copytree(MIXTRAL, folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.enable_padding(length=9, pad_id=3, pad_token="w3")  # neither of which may touch a prompt
    words.enable_truncation(2)
    words.save(str(folder / "tokenizer.json"))
    options = ["--model", folder, "--max-new-tokens", 4, "--expert-parallel", 1, "--stop-tokens", ""]
    record = run(tmp_path, *options, "--prompt", "w5 w6 w7")
    (row,) = record["sequences"]
    assert row["prompt_ids"] == [5, 6, 7] and record["model"]["tokenizer"] == "tokenizer.json"
    assert row["text"] == " ".join(f"w{i}" for i in row["new_ids"])
    assert f"\n{row['text']}\n" in capsys.readouterr().out

    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=r"tokenizer\.json: cannot be read"):
        generate.main(["--model", str(folder), "--prompt", "w5"])
    assert run(tmp_path, *options, "--ids", "5,6,7")["sequences"][0]["new_ids"] == row["new_ids"]


def test_text_comes_in_whole_characters():
    text = "aé€𝄞 z"
    stream = TextStream(ByteTokenizer())
    ids = ByteTokenizer().encode(text)
    pieces = [stream.add(i, last=at == len(ids) - 1) for at, i in enumerate(ids)]
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "𝄞", " ", "z"]
    broken = TextStream(ByteTokenizer())
    assert broken.add(0xE2) == "" and broken.add(0x82, last=True) == "\ufffd"
    assert printable("a\x1b[2J\nb") == "a\\x1b[2J\nb"


def test_refusals_come_before_the_work():
    wrong = [
        (["--model", "/nowhere"], UsageError, "no such folder"),
        (["--model", str(MIXTRAL), "--prompt", "text"], UsageError, "no tokenizer.json"),
        (["--model", str(MIXTRAL), "--config", "tiny_decoder"], UsageError, "--model alone works"),
        (["--model", str(MIXTRAL), "num_layers=2"], UsageError, "unknown key 'num_layers'"),
        (["--config", "mini_infer"], UsageError, "get_model_config"),
        (["--config", "tiny_decoderr"], UsageError, "nearest: tiny_decoder"),
        (["--dtype", "bfloat16"], UsageError, "is for --model"),
        (["--ids", "1,x"], UsageError, "ids='1,x'"),
        (["--ids", ""], UsageError, "ids=''"),
        (["--prompt", ""], UsageError, "holds no token"),
        (["--temprature", "1"], UsageError, "nearest: --temperature"),
        (["--temperature", "-1"], ConfigError, "temperature=-1.0"),
        (["--max-new-tokens", "0"], ConfigError, "max_new_tokens=0"),
        (["--max-new-tokens", "2000"], ConfigError, "meant for 1024 positions"),
        (["--ids", "128"], ConfigError, "vocab_size=128"),
        (["--expert-parallel", "16"], ConfigError, "needs 16 devices"),
        (["--devices", "0"], UsageError, "devices=0"),
    ]
    for arguments, kind, message in wrong:
        with pytest.raises(kind, match=message):
            generate.main(arguments)
