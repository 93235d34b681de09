"""Reads a lowered (StableHLO) or compiled (HLO) program as text: which collectives, which calls to the host.

Two texts answer two questions. The lowered one, of any platform, has the collectives this library asked for:

    jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()

The compiled one also has what the partitioner added, and what the compiler merged:

    jax.jit(f).lower(*args).compile().as_text()
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from typing import NamedTuple

COLLECTIVES = (
    "ragged_all_to_all",
    "all_to_all",
    "all_gather",
    "all_reduce",
    "reduce_scatter",
    "collective_permute",
    "collective_broadcast",
)
_HOST = ("infeed", "outfeed", "send", "recv")


class CollectiveCount(NamedTuple):
    """Collectives of one kind in a program's text.

    Attributes:
      straight: operations that run exactly once a call. Those in branches count as if every branch were taken.
      loop: operations inside while loops, each counted once, however often the loop turns.
    """

    straight: int = 0
    loop: int = 0


@dataclasses.dataclass
class _Function:
    """One function or computation: its own operations and calls, each with whether a loop holds it."""

    ops: Counter[tuple[str, bool]] = dataclasses.field(default_factory=Counter)
    calls: Counter[tuple[str, bool]] = dataclasses.field(default_factory=Counter)


def count_collectives(text: str) -> dict[str, CollectiveCount]:
    """Counts the collectives of a program, through every function it calls.

    Args:
      text: a lowered module (StableHLO) or a compiled one (HLO, "HloModule ...").

    Returns:
      A CollectiveCount for every name in COLLECTIVES. A function called twice counts twice; one that is never called
      does not count. An asynchronous start and done pair is one.

    Raises:
      ValueError: the text has no entry function.
    """
    ops = _reachable(text)
    return {kind: CollectiveCount(ops[kind, False], ops[kind, True]) for kind in COLLECTIVES}


def host_calls(text: str) -> dict[str, int]:
    """Counts what makes a program talk to its host: "callback", "infeed", "outfeed", "send", "recv". {}: nothing does.

    Args:
      text: as for `count_collectives`.

    Raises:
      ValueError: the text has no entry function.
    """
    ops = _reachable(text)
    counts = {kind: ops[kind, False] + ops[kind, True] for kind in ("callback", *_HOST)}
    return {kind: count for kind, count in counts.items() if count}


def _reachable(text: str) -> Counter[tuple[str, bool]]:
    """Operations of the entry function and of everything it calls, by (kind, inside a loop)."""
    functions, entry = _read_hlo(text) if text.lstrip().startswith("HloModule") else _read_stablehlo(text)
    if entry not in functions:
        raise ValueError(f"text={text[:40]!r}: has no entry function; lowered.as_text() or compiled.as_text() works")

    @functools.cache
    def total(name: str) -> Counter[tuple[str, bool]]:
        function = functions.get(name, _Function())
        ops = Counter(function.ops)
        for (callee, called_in_loop), times in function.calls.items():
            for (kind, in_loop), count in total(callee).items():
                ops[kind, in_loop or called_in_loop] += times * count
        return ops

    return total(entry)


def _kind(op: str) -> str | None:
    """The name we count an operation or custom-call target under, if we count it."""
    if op in COLLECTIVES or op in _HOST:
        return op
    return "callback" if "callback" in op else None


_SYMBOL = r'@(?:"[^"]*"|[\w$.\-]+)'
_TOKEN = re.compile(
    rf"""(?P<define>\bfunc\.func\s+(?:\w+\s+)?{_SYMBOL})
    | (?P<call>(?:\bcall\s+|\bcallee\s*=\s*|\bdecomposition\s*=\s*){_SYMBOL})
    | (?P<target>\b(?:stablehlo\.)?custom_call\s*{_SYMBOL}|\bcall_target_name\s*=\s*"[^"]*")
    | (?P<op>(?<![#!])\bstablehlo\.\w+)
    | (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<loop>\b(?:cond|do)\s*\{{)
    | (?P<region>\(\{{)
    | (?P<next>\}}\s*,\s*\{{)
    | (?P<open>\{{)
    | (?P<close>\}})""",
    re.VERBOSE,
)


def _read_stablehlo(text: str) -> tuple[dict[str, _Function], str]:
    """Functions of an MLIR module, by its braces. Reads the pretty form of an operation and the generic quoted one."""
    functions: dict[str, _Function] = {}
    current = _Function()
    inside = [False]  # for every open brace, whether a while loop holds it
    generic_while = False
    for match in _TOKEN.finditer(text):
        token, what = match.group(), match.lastgroup
        if what == "define":
            current = functions.setdefault(_symbol(token), _Function())
        elif what == "call":
            current.calls[_symbol(token), inside[-1]] += 1
        elif what == "target":
            kind = _kind(_symbol(token) if "@" in token else token.split('"')[1])
            if kind is not None:
                current.ops[kind, inside[-1]] += 1
        elif what in ("op", "string"):
            name = token.strip('"')
            if name.startswith("stablehlo."):
                generic_while = what == "string" and name == "stablehlo.while"
                kind = _kind(name.removeprefix("stablehlo."))
                if kind is not None:
                    current.ops[kind, inside[-1]] += 1
        elif what == "close":
            inside.pop()
        elif what != "next":  # "}, {" leads from one region of an operation to the next: in a loop or not, as before
            starts_loop = what == "loop" or (what == "region" and generic_while)
            generic_while = generic_while and what != "region"
            inside.append(inside[-1] or starts_loop)
    return functions, "main"


def _symbol(token: str) -> str:
    return token.split("@", 1)[1].strip('"')


_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*? (?P<op>[a-z][a-z0-9\-]*)\((?P<rest>.*)$")
_CALLEES = re.compile(
    r"\b(?:condition|body|to_apply|calls|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CALLING = ("while", "conditional", "call", "fusion", "async-start")


def _read_hlo(text: str) -> tuple[dict[str, _Function], str]:
    """Computations of a compiled module, line by line."""
    functions: dict[str, _Function] = {}
    current, entry = _Function(), ""
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            current = functions.setdefault(start["name"], _Function())
            entry = start["name"] if start["entry"] else entry
        elif instruction := _INSTRUCTION.match(line):
            op, rest = instruction["op"], instruction["rest"]
            if op in _CALLING:
                for names in _CALLEES.findall(rest):
                    for name in names.strip("{}").split(","):
                        current.calls[name.strip().lstrip("%"), op == "while"] += 1
            elif op == "custom-call" and (target := _TARGET.search(rest)):
                op = target[1]
            kind = _kind(op.removesuffix("-start").replace("-", "_"))
            if kind is not None:
                current.ops[kind, False] += 1
    return functions, entry
