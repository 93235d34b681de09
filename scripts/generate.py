"""Generates text, or ids, from a model: prompts of any length in one batch, tokens as they come, and the speed.

    python scripts/generate.py                                       a tiny model with random weights: the whole road
    python scripts/generate.py --model FOLDER --prompt "Once upon"   of config.json, *.safetensors, tokenizer.json
    python scripts/generate.py --model FOLDER --ids 1,15043,29892 --ids 1,2 mode=padded
    python scripts/generate.py --config olmoe_1b_7b num_layers=2 dtype=float32 --temperature 0.8 --top-p 0.9 --seed 3

Without --model the weights are random and what comes out means nothing. Without accelerators it simulates devices on
the CPU and says so. Writes OUT/generate.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from _common import (
    Parser,
    UsageError,
    environment,
    load_model_config,
    nearest,
    override,
    published_family,
    refuse_bad_folder,
    run_main,
    simulate_devices,
    visible_devices,
    write_files,
)
from _tokens import TOKENIZER, ByteTokenizer, TextStream, Tokenizer, printable, tokenizer_of
from jax_ep import CommConfig, ModelConfig, make_mesh
from jax_ep.engine import Engine, Generation, Speed, Token
from jax_ep.models import from_pretrained, save_pretrained
from jax_ep.models.decoder import Decoder, decoder_shapes
from jax_ep.sampling import Sampling

RECORD = "generate.json"
PROMPTS = ("Once upon a time", "Two roads", "E")
THROUGH_FILES = 2**28  # random models up to this many bytes are saved and loaded, to show that road
MEANINGLESS = "the weights are random: what follows the prompts means nothing"


def main(argv: Sequence[str]) -> None:
    args = _arguments(argv)
    simulate_devices(args.devices)
    folder = args.out or Path("out/generate")
    refuse_bad_folder(folder, RECORD)
    sampling = _sampling(args)
    console, progress = Console(), Console(stderr=True)
    mesh = _mesh(args)
    begun = time.perf_counter()
    with progress.status("loading the model"):
        decoder, tokenizer, notes = _load(args, mesh)
    notes += _devices_note(mesh)
    for note in notes:
        console.print(f"note: {note}", highlight=False)
    prompts = _prompts(args, decoder.config, tokenizer)
    print(f"ready after {time.perf_counter() - begun:.1f} s\n")

    engine, speed = Engine(decoder), Speed()
    stream = engine.stream(prompts, sampling, speed)
    with progress.status("compiling"):
        first = next(stream)
    result = _show(itertools.chain([first], stream), prompts, tokenizer, speed)
    record = _record(args, mesh, decoder.config, tokenizer, sampling, prompts, result, notes)
    _print_result(console, record)
    write_files(folder, {RECORD: (json.dumps(record, indent=2) + "\n").encode()})
    print(f"written: {folder / RECORD}")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="generate.py", description=__doc__)
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="config.json and *.safetensors, as the hub has them"
    )
    parser.add_argument("--config", metavar="NAME", help="random weights: a file in configs/ (default: tiny_decoder)")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be given again")
    parser.add_argument("--ids", action="append", metavar="1,2,3", help="a prompt as ids; may be given again")
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="N", help="a prompt (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (the default)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw among these (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="prompt i draws with seed + i (default: %(default)s)")
    parser.add_argument("--stop-tokens", metavar="1,2", help="ids that end a sequence (default: the model's)")
    parser.add_argument("--dtype", help="of a loaded model's parameters and computation (default: its own)")
    parser.add_argument("--expert-parallel", type=int, metavar="R", help="ranks the experts are spread over")
    parser.add_argument("--data-parallel", type=int, default=1, metavar="D", help="replicas of that (default: 1)")
    parser.add_argument("--out", type=Path, help="folder for the record (default: out/generate)")
    parser.add_argument(
        "--devices", type=int, metavar="N", help="devices to simulate without accelerators (default: 8)"
    )
    text = "fields of the model, as in num_layers=2; with --model those of how tokens travel, as in mode=padded"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=text)
    args = parser.parse_known_or_refuse(argv)
    if args.devices is not None and args.devices < 1:
        raise UsageError(f"devices={args.devices}: must be at least 1; --devices 8 works")
    args.ids = [_ids("ids", text) for text in args.ids or ()]
    if args.model is not None and args.config is not None:
        raise UsageError("--model and --config: a folder has its own configuration; --model alone works")
    if args.model is None and args.dtype is not None:
        raise UsageError(
            f"dtype={args.dtype!r}: is for --model; dtype={args.dtype} without dashes works for random weights"
        )
    return args


def _sampling(args: argparse.Namespace) -> Sampling:
    stop = None if args.stop_tokens is None else tuple(_ids("stop-tokens", args.stop_tokens, empty=True))
    return Sampling(args.max_new_tokens, args.temperature, args.top_p, args.seed, stop)


def _ids(option: str, text: str, empty: bool = False) -> list[int]:
    try:
        ids = [int(part) for part in text.replace(" ", ",").split(",") if part]
    except ValueError:
        ids = []
        empty = False
    if not ids and not empty:
        raise UsageError(f"{option}={text!r}: must be ids with commas between; --{option} 1,2,3 works")
    return ids


def _mesh(args: argparse.Namespace) -> jax.sharding.Mesh:
    """All accelerators there are, or four simulated devices, unless the person says."""
    have = visible_devices(args.devices)
    ranks = args.expert_parallel
    if ranks is None:
        each = max(1, len(have) // max(1, args.data_parallel))
        ranks = min(4, each) if have[0].platform == "cpu" else each
    need = max(ranks, 1) * max(args.data_parallel, 1)
    return make_mesh(ranks, args.data_parallel, have[:need] if len(have) >= need else None)


def _devices_note(mesh: jax.sharding.Mesh) -> list[str]:
    device = mesh.devices.flat[0]
    if device.platform != "cpu":
        return []
    return [f"{mesh.size} CPU devices are simulated: times say nothing about accelerators"]


def _load(args: argparse.Namespace, mesh: jax.sharding.Mesh) -> tuple[Decoder, Tokenizer | None, list[str]]:
    """The model on its mesh, how its text is read, and what the person should know."""
    if args.model is not None:
        if not args.model.is_dir():
            raise UsageError(
                f"model={str(args.model)!r}: there is no such folder, and nothing is fetched; without --model a random "
                "one is made"
            )
        tokenizer = tokenizer_of(args.model, wanted=bool(args.prompt))
        comm = _comm(args.overrides)
        notes = [] if tokenizer else [f"no {TOKENIZER}, or no package tokenizers to read it: ids in, ids out"]
        return from_pretrained(args.model, mesh, comm, args.dtype), tokenizer, notes
    config: ModelConfig = override(load_model_config(args.config or "tiny_decoder"), args.overrides)
    decoder = Decoder(config, mesh, rngs=nnx.Rngs(args.seed))
    notes = [MEANINGLESS]
    tokenizer = ByteTokenizer() if 128 <= config.vocab_size <= 256 else None
    size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(decoder_shapes(config)))
    family = published_family(config)
    if family is None or size > THROUGH_FILES:
        why = "no published family is like it" if family is None else f"it has {size / 2**20:.0f} MiB"
        return decoder, tokenizer, [*notes, f"the model was not taken through files: {why}"]
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(decoder, folder, family)
        decoder = from_pretrained(folder, mesh, config.moe.comm, config.moe.param_dtype)
    return (
        decoder,
        tokenizer,
        [*notes, f"it was saved as a {family} checkpoint of {size / 2**20:.1f} MiB and loaded again"],
    )


def _comm(overrides: Sequence[str]) -> CommConfig:
    """How tokens travel; all else is the loaded model's."""
    fields = [field.name for field in dataclasses.fields(CommConfig)]
    for key in (item.partition("=")[0].strip() for item in overrides):
        if key not in fields:
            rule = "with --model only how tokens travel can be set"
            raise UsageError(f"unknown key {key!r}: {rule}{nearest(key, fields)}")
    return override(CommConfig(), overrides)


def _prompts(args: argparse.Namespace, config: ModelConfig, tokenizer: Tokenizer | None) -> list[list[int]]:
    texts = list(args.prompt or ())
    if texts and tokenizer is None:
        raise UsageError(f"prompt={texts[0]!r}: nothing reads text for this vocabulary; --ids 1,2,3 works")
    if not texts and not args.ids:
        if tokenizer is None:
            rng = np.random.default_rng(args.seed)
            return [rng.integers(0, config.vocab_size, length).tolist() for length in (16, 9, 1)]
        texts = list(PROMPTS)
    encoded = [] if tokenizer is None else [tokenizer.encode(text) for text in texts]
    for text, ids in zip(texts, encoded):
        if not ids:
            raise UsageError(f"prompt={text!r}: holds no token; --prompt {PROMPTS[0]!r} works")
    return encoded + args.ids


def _show(stream: Iterable[Token], prompts: list[list[int]], tokenizer: Tokenizer | None, speed: Speed) -> Generation:
    """Prints tokens as they come: the text of one prompt in a line, of several in a row a step."""
    tokens: list[list[int]] = [[] for _ in prompts]
    finish = ["" for _ in prompts]
    texts = [TextStream(tokenizer) if tokenizer else None for _ in prompts]
    for i, prompt in enumerate(prompts):
        print(f"prompt {i}: {printable(tokenizer.decode(prompt)) if tokenizer else ' '.join(map(str, prompt))}")
    row: list[str] = []
    for token in stream:
        mine, text = tokens[token.sequence], texts[token.sequence]
        mine.append(token.id)
        finish[token.sequence] = token.finish or ""
        piece = str(token.id) if text is None else text.add(token.id, token.finish is not None)
        if len(prompts) == 1:
            print(f"{piece} " if text is None else printable(piece), end="", flush=True)
            continue
        row.append(f"{token.sequence}: {piece if text is None else repr(piece)}")
        if all(len(t) == len(mine) or f for t, f in zip(tokens, finish)):  # the step is complete
            print(f"{len(mine):5}  {'  '.join(row)}", flush=True)
            row = []
    print("\n" if len(prompts) == 1 else "")
    return Generation(tokens, finish, speed)


def _record(
    args: argparse.Namespace,
    mesh: jax.sharding.Mesh,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    sampling: Sampling,
    prompts: list[list[int]],
    result: Generation,
    notes: list[str],
) -> dict[str, Any]:
    speed = result.speed
    text = lambda ids: None if tokenizer is None else tokenizer.decode(ids)
    return {
        "environment": environment(mesh.size),
        "model": {
            "source": str(args.model) if args.model else f"random weights, configs/{args.config or 'tiny_decoder'}",
            "num_layers": config.num_layers,
            "num_experts": config.moe.num_experts,
            "dtype": config.moe.dtype,
            "mode": config.moe.comm.mode,
            "mesh": dict(mesh.shape),
            "tokenizer": None if tokenizer is None else tokenizer.name,
        },
        "sampling": {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "stop_tokens": list(config.stop_tokens if sampling.stop_tokens is None else sampling.stop_tokens),
        },
        "sequences": [
            {"prompt_ids": p, "new_ids": t, "prompt": text(p), "text": text(t), "finish": f}
            for p, t, f in zip(prompts, result.tokens, result.finish, strict=True)
        ],
        "speed": {
            "prefill_tokens": speed.prefill_tokens,
            "prefill_s": speed.prefill_s,
            "prefill_tokens_per_s": speed.prefill_tokens_per_s,
            "decode_tokens": speed.decode_tokens,
            "decode_s": speed.decode_s,
            "decode_tokens_per_s": speed.decode_tokens_per_s,
            "compile_s": speed.compile_s,
        },
        "timed": "prefill: prompts handed over until each one's first token is on the host; decode: the tokens after "
        "that, printing included; padding and compilation are in neither",
        "notes": notes,
    }


def _print_result(console: Console, record: dict[str, Any]) -> None:
    table = Table("prompt", "new tokens", "ended by", "text" if record["model"]["tokenizer"] else "ids")
    for i, row in enumerate(record["sequences"]):
        new = " ".join(map(str, row["new_ids"])) if row["text"] is None else printable(row["text"])
        table.add_row(str(i), str(len(row["new_ids"])), row["finish"], Text(new))
    console.print(table)
    speed = record["speed"]
    for name in ("prefill", "decode"):
        rate = speed[f"{name}_tokens_per_s"]
        said = "no token" if rate is None else f"{rate:.1f} tokens/s"
        print(f"{name}: {speed[f'{name}_tokens']} tokens in {speed[f'{name}_s']:.3f} s, {said}")
    print(f"compilation took {speed['compile_s']:.1f} s and is in neither; nor is padding")


if __name__ == "__main__":
    run_main(main)
