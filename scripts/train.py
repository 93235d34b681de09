"""Trains a mixture-of-experts decoder on text as bytes, and goes on where it was stopped or killed.

    python scripts/train.py                                          configs/tiny_lm.py on Python's own sources
    python scripts/train.py --data notes.txt more.txt steps=1000 learning_rate=2e-3 --out out/notes
    python scripts/train.py mode=padded expert_parallel=2 data_parallel=1 accumulation=2
    python scripts/generate.py --model out/train/model --prompt "def "

The same command again resumes from the newest whole checkpoint in OUT/checkpoints, on this or another mesh; steps=N
lets a finished run go on. Ctrl-C or SIGTERM ends it after a step, with a checkpoint. Nothing is ever deleted but older
checkpoints of the run: another one takes another --out.

Without accelerators it simulates devices on the CPU and says so. Writes OUT/progress.jsonl as it goes, then OUT/model
(for scripts/generate.py and the hub's tools), OUT/train.png and OUT/train.json.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import jax
from rich.console import Console

from _common import (
    Parser,
    UsageError,
    environment,
    load_train_config,
    override,
    published_family,
    refuse_bad_folder,
    run_main,
    simulate_devices,
    visible_devices,
    write_files,
)
from _tokens import TOKENIZER, byte_tokenizer_file
from _train_progress import FILE, Display, ProgressFile, Record, read_records, refuse_foreign
from _train_report import counted, picture, print_heading, print_summary
from jax_ep import make_mesh
from jax_ep.distributed import Watchdog, join
from jax_ep.layer import resolve_transport
from jax_ep.models import save_pretrained
from jax_ep.models.decoder import Decoder, decoder_shapes, place_params
from jax_ep.overlap import check_flags
from jax_ep.training import manifest
from jax_ep.training.config import TrainConfig
from jax_ep.training.data import VOCABULARY, Split, Windows, read_documents, split, unigram_entropy
from jax_ep.training.loop import CHECKPOINTS, Result, TrainingStopped, train
from jax_ep.training.step import TrainState, model_params

RECORD, PICTURE, MODEL = "train.json", "train.png", "model"
AT_ONCE_S = 3.0  # for the run to end itself after a second signal
SET_ELSEWHERE = dict.fromkeys(
    ("model.moe.expert_axis", "model.moe.token_axes"), "expert_parallel and data_parallel, which make the mesh"
)
TIMED = (
    "a step: from handing it to the devices until its metrics are on the host, while the next one's text is made; "
    "compilation, validation, checkpoints and what is written are in total_s alone"
)


def main(argv: Sequence[str]) -> None:
    args = _arguments(argv)
    try:
        _run(args)
    except KeyboardInterrupt:
        _end_now(args.out, signal.SIGINT)


def _end_now(folder: Path, signum: int) -> NoReturn:
    """Without waiting for what other threads do: a checkpoint that is being written may never be."""
    with contextlib.suppress(OSError, ValueError):
        print(f"train.py: interrupted; {_how_to_go_on(folder)}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    os._exit(128 + signum)


def _run(args: argparse.Namespace) -> None:
    begun = time.perf_counter()
    config: TrainConfig = override(load_train_config(args.config), args.overrides, elsewhere=SET_ELSEWHERE)
    if config.model.overlap_moe_expert_parallel_comm:
        check_flags(os.environ.get("XLA_FLAGS", ""))
    watchdog = Watchdog(args.out, args.deadline)
    refuse_bad_folder(args.out, RECORD, PICTURE, FILE)
    refuse_foreign(args.out)
    if (args.out / MODEL).exists() and not (args.out / MODEL).is_dir():
        rule = f"{args.out / MODEL} is a file, and the model's folder goes there"
        raise UsageError(f"out={str(args.out)!r}: {rule}; --out another folder works")
    documents = read_documents(args.data)
    text = split(documents, config.sequence_length)
    _refuse_finished(args.out, config, text.facts)
    _refuse_unknown_bytes(config, text)
    simulate_devices(args.devices, config.expert_parallel * config.data_parallel, in_order=True)
    join()
    mesh = make_mesh(config.expert_parallel, config.data_parallel, _devices(config))
    record = _record(args, config, mesh, documents.source, text)
    console = Console(quiet=jax.process_index() > 0)
    print_heading(console, record)
    with watchdog, _signals(args.out) as came:
        result: Result | TrainingStopped
        try:
            result = _train(args.out, config, mesh, text, console, watchdog, came)
        except TrainingStopped as error:  # in all processes alike, so that none has to end another
            result = error
        if isinstance(result, Result) and not result.ended_early:
            watchdog.beat("export")
            record["model"]["family"], notes = _export(args.out / MODEL, config, mesh, result.state)
    if isinstance(result, TrainingStopped):
        raise UsageError(str(result))
    if result.ended_early:
        signum = signal.Signals(came[0] if came else signal.SIGTERM)  # another process' is this one's too
        what = f"ended by {signum.name} after step {result.step} of {config.steps}"
        print(f"train.py: {what}; {_how_to_go_on(args.out)}", file=sys.stderr)
        sys.exit(128 + signum)
    if jax.process_index() == 0:
        record["notes"] += notes
        record["times"] = {"compile_s": result.compile_s, "total_s": time.perf_counter() - begun}
        _finish(args.out, record, console)


def _how_to_go_on(folder: Path) -> str:
    checkpoints = folder / CHECKPOINTS
    if not any(checkpoints.glob("[0-9]*")):
        return "no checkpoint has been written"
    return f"the newest checkpoint is in {checkpoints}, from which the same command goes on"


def _train(
    folder: Path,
    config: TrainConfig,
    mesh: jax.sharding.Mesh,
    text: Split,
    console: Console,
    watchdog: Watchdog,
    came: list[int],
) -> Result:
    """The run, which ends early once a signal `came`."""
    train_windows, held_out = (
        Windows(half, config.sequence_length, config.seed) for half in (text.train, text.validation)
    )
    listeners: list[ProgressFile | Display] = []

    def tell(told: Record) -> None:
        for listener in listeners:
            listener.add(told)

    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            listeners.append(stack.enter_context(contextlib.closing(ProgressFile(folder))))
            listeners.append(stack.enter_context(Display(console, config.steps)))
        return train(
            config,
            mesh,
            train_windows,
            held_out,
            folder,
            facts=text.facts,
            on_record=tell,
            watchdog=watchdog,
            stop=lambda: bool(came),
        )


@contextlib.contextmanager
def _signals(folder: Path) -> Iterator[list[int]]:
    """The first SIGINT or SIGTERM that comes: the run ends after its step. Another one ends it at once.

    Python's handlers wait for the main thread, which a compilation or a step may hold for minutes. So a thread is woken
    too: it says that the first one was heard, and ends what does not end itself after another.
    """
    came: list[int] = []
    over = threading.Event()
    heard, wake = os.pipe()
    os.set_blocking(wake, False)
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for signum, handler in before.items():
            signal.signal(signum, handler)

    def listen() -> None:
        count = 0
        while told := os.read(heard, 1):
            count += told[0] in before
            if told[0] in before and count == 1:
                with contextlib.suppress(OSError):
                    os.write(2, b"train.py: ending after this step, with a checkpoint; again: at once\n")
            elif count > 1 and not over.wait(AT_ONCE_S):
                _end_now(folder, told[0])
        os.close(heard)

    def handle(signum: int, _: FrameType | None) -> None:
        came.append(signum)
        restore()

    threading.Thread(target=listen, daemon=True).start()
    woken = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for signum in before:
        signal.signal(signum, handle)
    try:
        yield came
    finally:
        restore()
        signal.set_wakeup_fd(woken)
        over.set()
        os.close(wake)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="train.py", description=__doc__)
    parser.add_argument("--config", default="tiny_lm", help="a file in configs/, or a path (default: %(default)s)")
    parser.add_argument("--data", nargs="+", metavar="FILE", help="text to train on (default: Python's own sources)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/train"),
        help="folder of the run, made or gone on with (default: out/train)",
    )
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="devices to simulate without accelerators, in each process (default: what the mesh needs)",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=600.0,
        metavar="S",
        help="several processes: seconds that one may be silent, compilation included (default: %(default)s)",
    )
    text = "fields of the config, as in steps=1000 or top_k=4"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=text)
    args = parser.parse_known_or_refuse(argv)
    if args.data is not None:  # as in --data notes.txt steps=1000
        fields = [item for item in args.data if "=" in item and not Path(item).exists()]
        args.overrides += fields
        args.data = [item for item in args.data if item not in fields]
    if args.devices is not None and args.devices < 1:
        raise UsageError(f"devices={args.devices}: must be at least 1; --devices 8 works")
    return args


def _refuse_finished(folder: Path, config: TrainConfig, facts: dict[str, Any]) -> None:
    try:
        record = json.loads((folder / RECORD).read_bytes())
        done = record["result"]["steps"]
        about = {"config": record["config"], "data": {name: record["data"][name] for name in facts}}
        differences = manifest.differences(about, config, facts)
    except (OSError, ValueError, LookupError, TypeError):  # no record, or none of ours
        return
    if isinstance(done, int) and done >= config.steps:
        if differences:
            rule = f"holds another run, which is finished: {'; '.join(differences)}"
            raise UsageError(f"out={str(folder)!r}: {rule}; --out another folder works")
        more = f"steps={2 * done} goes on from there, and --out another folder begins anew"
        raise UsageError(f"out={str(folder)!r}: this run is finished, {counted(done, 'step')} of it; {more}")


def _refuse_unknown_bytes(config: TrainConfig, text: Split) -> None:
    largest = int(max(text.train.max(), text.validation.max()))
    if largest >= config.model.vocab_size:
        rule = f"the text has byte {largest}; vocab_size={VOCABULARY} works"
        raise UsageError(f"vocab_size={config.model.vocab_size}: {rule}")


def _devices(config: TrainConfig) -> list[Any]:
    """The first devices that the mesh needs; of several processes all that there are."""
    need, have, processes = config.expert_parallel * config.data_parallel, visible_devices(None), jax.process_count()
    if need > len(have) or (processes > 1 and need != len(have)):
        data_parallel = config.data_parallel if len(have) % config.data_parallel == 0 else 1
        works = f"expert_parallel={len(have) // data_parallel} data_parallel={data_parallel} works"
        if have[0].platform == "cpu" and need % processes == 0:
            works += f", and so does --devices {need // processes}" + " in each process" * (processes > 1)
        sizes = f"expert_parallel={config.expert_parallel}, data_parallel={config.data_parallel}"
        raise UsageError(f"{sizes}: needs {counted(need, 'device')} and there are {len(have)}; {works}")
    return have[:need]


def _record(
    args: argparse.Namespace, config: TrainConfig, mesh: jax.sharding.Mesh, source: str, text: Split
) -> dict[str, Any]:
    """What train.json says before its figures."""
    moe, shapes = config.model.moe, decoder_shapes(config.model)
    parameters = sum(a.size for a in jax.tree.leaves(shapes))
    routed = sum(a.size for a in jax.tree.leaves(shapes["layers"]["moe"]["experts"]))
    tokens = config.steps * config.batch_size * config.sequence_length
    notes = []
    if jax.default_backend() == "cpu":
        notes.append(
            f"{counted(mesh.size, 'simulated device')} on this machine's cores and memory: tokens/s and TFLOP/s say "
            "nothing about accelerators"
        )
    if config.zero_experts:
        notes.append("zero_experts: the routed experts' output is held at zero")
    return {
        "environment": {**environment(mesh.size), "processes": jax.process_count()},
        "model": {
            "name": Path(args.config).stem,
            "parameters": parameters,
            "active_parameters": parameters - routed + routed * moe.router.top_k // moe.num_experts,
            "experts": moe.num_experts,
            "top_k": moe.router.top_k,
            "dtype": moe.dtype,
            "mesh": dict(mesh.shape),
            "mode": moe.comm.mode,
            "transport": resolve_transport(moe, mesh) if moe.comm.mode == "packed" else None,
        },
        "config": dataclasses.asdict(config),
        "data": {
            "source": source,
            **text.facts,
            "unigram_entropy": unigram_entropy(text.validation),
            "tokens": tokens,
            "epochs": tokens / len(text.train),
        },
        "notes": notes,
    }


def _export(
    folder: Path, config: TrainConfig, mesh: jax.sharding.Mesh, state: TrainState
) -> tuple[str | None, list[str]]:
    """Writes the model as the hub has it, where a published family is like it. Every process calls this.

    Returns:
      the family, and notes.
    """
    model = config.model
    bytewise = model.vocab_size == VOCABULARY
    if bytewise and not model.stop_tokens:
        model = dataclasses.replace(model, stop_tokens=(0,))  # ends every document
    family = published_family(model)
    if family is None:
        return None, ["the model was not exported: no published family is like it"]
    params = place_params(model_params(state.params, config), model, mesh)
    save_pretrained(Decoder(model, mesh, params=params), folder, family)
    if bytewise and jax.process_index() == 0:
        write_files(folder, {TOKENIZER: byte_tokenizer_file()})
    return family, [] if bytewise else [f"vocab_size={model.vocab_size}: no {TOKENIZER} was written, ids are bytes"]


def _finish(folder: Path, record: dict[str, Any], console: Console) -> None:
    """The picture and the record; the record last, as it says that the run is finished."""
    told = read_records(folder / FILE)
    steps = [r for r in told if r["kind"] == "step"]
    validations = [r for r in told if r["kind"] == "validation"]
    if not steps or not validations:
        raise UsageError(f"out={str(folder)!r}: {FILE} has lost the run's steps; --out another folder works")
    _add_results(record, steps, validations)
    record["times"]["starts"] = sum(r["kind"] == "start" for r in told)
    record["timed"] = TIMED
    files = [folder / RECORD]
    try:
        write_files(folder, {PICTURE: picture(record, told)})
        files.append(folder / PICTURE)
    except ImportError:
        record["notes"].append("no picture was drawn: it needs matplotlib; pip install matplotlib works")
    write_files(folder, {RECORD: (json.dumps(record, indent=2) + "\n").encode()})
    print_summary(console, record)
    if record["model"]["family"] is not None:
        files.append(folder / MODEL)
    console.print(f"written: {', '.join(map(str, files))}", soft_wrap=True, highlight=False)
    if record["model"]["family"] is not None:
        console.print(
            f'python scripts/generate.py --model {folder / MODEL} --prompt "def " lets it write', soft_wrap=True
        )


def _add_results(record: dict[str, Any], steps: list[Record], validations: list[Record]) -> None:
    """What the whole run came to, earlier starts included."""
    final = validations[-1]
    finite = [r for r in validations if r["loss"] is not None]
    best = min(finite, key=lambda r: r["loss"], default={"loss": None, "step": None})
    unigram = record["data"]["unigram_entropy"]
    seconds = sum(r["seconds"] for r in steps)
    last = steps[-1]
    record["result"] = {
        "steps": last["step"],
        "final_loss": last["cross_entropy"],
        "final_validation": final["loss"],
        "best_validation": best["loss"],
        "best_step": best["step"],
        "percent_under_unigram": None if final["loss"] is None else 100 * (1 - final["loss"] / unigram),
        "skipped_steps": last["skipped_steps"],
        "dropped_rows": sum(r["dropped_rows"] for r in steps),
        "rounds": max(r["rounds"] for r in steps),
        "peak_bytes": max(r["peak_bytes"] for r in steps),
        "peak_of": last["peak_of"],
    }
    mean = lambda field: sum(r[field] * r["seconds"] for r in steps) / seconds
    record["times"] |= {
        "steps_s": seconds,
        "steps_per_s": len(steps) / seconds,
        "tokens_per_s": mean("tokens_per_s"),
        "tflops_per_device": mean("tflops_per_device"),
    }


if __name__ == "__main__":
    run_main(main)
