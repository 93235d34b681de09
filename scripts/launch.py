"""Runs a script as several processes of this machine, joined over Gloo: what several hosts do, tried on one.

    python scripts/launch.py scripts/train.py --config tiny_lm --out out/two expert_parallel=2 data_parallel=1
    python scripts/launch.py --processes 4 --devices 2 scripts/train.py --config tiny_lm --out out/four

Each process is given simulated devices and the variables by which the script's join() finds the others. What rank 0
prints is shown as it comes, that of the others with --verbose. Where one fails all are ended and the one at fault is
named, with the end of what it printed; so are all when this program is interrupted or killed. The exit code is 0 where
that of every rank is, 1 where one failed, 130 after an interruption.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from _common import Parser, UsageError, run_main
from _launch import NOISE, RankFailure, Started, end, environment, free_port, joining, wait


def main(argv: Sequence[str]) -> None:
    args = _arguments(argv)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="launch-") as folder:
            _run(args, Path(folder))
    except RankFailure as error:
        print(f"launch.py: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("launch.py: interrupted; all ranks were ended", file=sys.stderr)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(args: argparse.Namespace, folder: Path) -> None:
    port = free_port()
    ranks: list[Started] = []
    shown: list[_Shown] = []
    try:
        for index in range(args.processes):
            variables = environment(args.devices, **joining(index, args.processes, port))
            ranks.append(Started(index, [args.script, *args.arguments], variables, folder / f"rank{index}.log"))
            if index == 0 or args.verbose:
                shown.append(_Shown(ranks[-1]))
        wait(ranks, args.deadline, lambda: _show(shown), [one.rank for one in shown])
    finally:
        end(ranks)
        _show(shown, to_the_end=True)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="launch.py", description=__doc__)
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="ranks (default: %(default)s)")
    parser.add_argument(
        "--devices", type=int, default=1, metavar="N", help="simulated devices of each (default: %(default)s)"
    )
    parser.add_argument(
        "--deadline", type=float, metavar="S", help="ends the job after so many seconds (default: it may take longer)"
    )
    parser.add_argument("--verbose", action="store_true", help="shows what all ranks print, each line with its rank")
    parser.add_argument("script", help="a Python file that calls jax_ep.distributed.join(), as scripts/train.py does")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own")
    args = parser.parse_args(list(argv))
    for name in ("processes", "devices"):
        if getattr(args, name) < 1:
            raise UsageError(f"{name}={getattr(args, name)}: must be at least 1; --{name} 2 works")
    if args.deadline is not None and not args.deadline > 0:
        raise UsageError(f"deadline={args.deadline}: must be seconds above 0; --deadline 600 works")
    if not Path(args.script).is_file():
        raise UsageError(f"script={args.script!r}: there is no such file; scripts/train.py works")
    return args


class _Shown:
    """What a rank prints, as far as it was copied."""

    def __init__(self, rank: Started):
        self.rank = rank
        self.log = rank.log.open("rb")
        self.prefix = f"[{rank.index}] ".encode() if rank.index else b""
        self.rest = b""


def _show(shown: Sequence[_Shown], to_the_end: bool = False) -> None:
    """Copies whole lines, and what follows the last of them in the end."""
    for one in shown:
        *lines, one.rest = (one.rest + one.log.read()).split(b"\n")
        if to_the_end:
            one.log.close()
            lines += [one.rest] if one.rest else []
        kept = [one.prefix + line + b"\n" for line in lines if not line.startswith(NOISE.encode())]
        sys.stdout.buffer.write(b"".join(kept))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    run_main(main)
