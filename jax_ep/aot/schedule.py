"""What a compiled program does, in which order: collectives, from their start to their end, and the products between.

The text is that of a scheduled module, of GPUs or TPUs:

    schedule = read_schedule(jax.jit(f).lower(*args).compile().as_text())

Bytes are those of shapes. A ragged exchange says nothing of how many rows will cross; it counts what fits both of its
buffers (`jax_ep.aot.modelled.sent_bytes` knows more).

Letters: R ranks of a collective, G experts of a rank, H hidden, I intermediate.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from jax_ep.aot.compiled import COLLECTIVES
from jax_ep.aot.hlo import Computation, Instruction, Module, read_module
from jax_ep.aot.products import Product, read_product

_MIB = 2**20


class Collective(NamedTuple):
    """One collective.

    Attributes:
      name, kind: of its start; kind as of `jax_ep.aot.COLLECTIVES`.
      start, end: positions in the schedule. Equal: it is synchronous.
      given, bytes: of its operand (of rows, where it has others) and of its result.
      sent: bytes that one device sends to others, at most.
      ranks: R.
      conditional: it stands in a branch, which runs as one piece: synchronous.
      payload: it carries rows: an all-to-all of either kind, or a gather or scatter of 1 MiB and more.
      op_name: where in the traced program it comes from.
    """

    name: str
    kind: str
    start: int
    end: int
    given: int
    bytes: int
    sent: int
    ranks: int
    conditional: bool
    payload: bool
    op_name: str

    @property
    def asynchronous(self) -> bool:
        return self.end > self.start


class Loop(NamedTuple):
    """A while loop.

    Attributes:
      name, op_name, at: of the instruction.
      trips, body: how often it turns, and what one turn does; None: as often as the data say.
    """

    name: str
    op_name: str
    at: int
    trips: int | None
    body: Schedule | None


class Copy(NamedTuple):
    """A parameter of experts that is copied, transposed or converted before it is used."""

    name: str
    what: str
    bytes: int


class Schedule(NamedTuple):
    """One computation in schedule order. `waits_for[i]` has bit j set where instruction i needs instruction j."""

    collectives: tuple[Collective, ...]
    products: tuple[Product, ...]
    loops: tuple[Loop, ...]
    copies: tuple[Copy, ...]
    waits_for: tuple[int, ...]

    def whole(self) -> list[Schedule]:
        """This one, and the bodies of its loops."""
        bodies = [loop.body for loop in self.loops if loop.body is not None]
        return [self, *(inner for body in bodies for inner in body.whole())]

    def beside(self, collective: Collective) -> list[Product]:
        """Products of experts and attention between its start and its end."""
        return [p for p in self.products if p.place and collective.start < p.at < collective.end]

    def independent(self, collective: Collective, product: Product) -> bool:
        """Whether neither waits for the other."""
        waits = self.waits_for[collective.start] | self.waits_for[collective.end]
        return not (waits >> product.at & 1 or self.waits_for[product.at] >> collective.start & 1)


def read_schedule(text: str) -> Schedule:
    """Reads the entry computation, and bodies of loops whose number of turns is known.

    Raises:
      ValueError: the text is no scheduled HLO module.
    """
    module = read_module(text)
    return _read(module, module.computations[module.entry])


def _read(module: Module, computation: Computation) -> Schedule:
    instructions = computation.instructions
    by_name = {instruction.name: instruction for instruction in instructions}
    position = {instruction.name: i for i, instruction in enumerate(instructions)}
    ends = _ends(instructions)
    collectives, products, loops, copies = list[Collective](), list[Product](), list[Loop](), list[Copy]()
    waits_for = list[int]()
    for at, instruction in enumerate(instructions):
        waits = 0
        for name in instruction.operands:
            if (of := position.get(name)) is not None and of < at:
                waits |= waits_for[of] | 1 << of
        waits_for.append(waits)
        if (inner := _collective_in(module, instruction)) is not None:
            end = position[ends[instruction.name]] if instruction.name in ends else at
            collectives.append(_collective(instruction, inner, at, end, instructions[end], by_name))
        elif instruction.op == "conditional":
            collectives += _of_branch(module, instruction, at, by_name)
        elif instruction.op == "while":
            loops.append(_loop(module, instruction, at))
        elif (product := read_product(module, computation, instruction, at, by_name)) is not None:
            products.append(product)
        elif (copy := _copy(instruction, by_name)) is not None:
            copies.append(copy)
    return Schedule(tuple(collectives), tuple(products), tuple(loops), tuple(copies), tuple(waits_for))


def _ends(instructions: tuple[Instruction, ...]) -> dict[str, str]:
    """Start -> done of what is asynchronous."""
    begun: dict[str, str] = {}
    found: dict[str, str] = {}
    for instruction in instructions:
        if instruction.op.endswith("-start"):
            begun[instruction.name] = instruction.name
        elif instruction.op.endswith(("-update", "-done")) and instruction.operands:
            start = begun.get(instruction.operands[0])
            if start is not None and instruction.op.endswith("-update"):
                begun[instruction.name] = start
            elif start is not None:
                found[start] = instruction.name
    return found


def _kind(op: str) -> str | None:
    kind = op.removesuffix("-start").replace("-", "_")
    return kind if kind in COLLECTIVES else None


def _collective_in(module: Module, instruction: Instruction) -> Instruction | None:
    """The collective that an instruction is or, as an asynchronous wrapper or a fusion, holds."""
    if _kind(instruction.op) is not None:
        return instruction
    if instruction.op not in ("async-start", "fusion"):
        return None
    inside = (each for name in instruction.called("calls") for each in module.computations[name].instructions)
    return next((each for each in inside if _kind(each.op) is not None), None)


def _of_branch(module: Module, instruction: Instruction, at: int, by_name: dict[str, Instruction]) -> list[Collective]:
    """Collectives of the branch that is taken, where that is a constant, or of the one that sends most."""
    branches = list[list[Collective]]()
    for name in instruction.called("branch_computations", "true_computation", "false_computation"):
        inner = _read(module, module.computations[name]).collectives
        where = instruction.op_name
        branches.append([c._replace(start=at, end=at, conditional=True, op_name=c.op_name or where) for c in inner])
    chosen = by_name.get(instruction.operands[0]) if instruction.operands else None
    if chosen is not None and chosen.op == "constant" and chosen.attributes.isdigit() and branches:
        return branches[min(int(chosen.attributes), len(branches) - 1)]
    return max(branches, key=lambda found: sum(one.sent for one in found), default=[])


def _collective(
    outer: Instruction, inner: Instruction, at: int, end: int, done: Instruction, by_name: dict[str, Instruction]
) -> Collective:
    kind = _kind(inner.op)
    assert kind is not None
    if '"is_sync":true' in outer.attributes or '"is_sync":true' in inner.attributes:
        end = at
    results = sum(array.bytes for array in done.results)
    given = [array.bytes for name in outer.operands if name in by_name for array in by_name[name].results]
    operands = given[0] if given and kind == "ragged_all_to_all" else sum(given)
    ranks = _ranks(inner.attributes or outer.attributes)
    share = (ranks - 1) / ranks if ranks else 1.0
    if kind == "ragged_all_to_all":
        sent = min(operands, results) * share
    elif kind == "all_reduce":
        sent = 2 * results * share
    elif kind == "reduce_scatter":
        sent = operands * share
    elif kind in ("collective_permute", "collective_broadcast"):
        sent = results
    else:
        sent = results * share
    gathers = kind in ("all_gather", "reduce_scatter") and max(results, operands) >= _MIB
    payload = gathers or kind in ("ragged_all_to_all", "all_to_all")
    name = outer.op_name or inner.op_name or done.op_name
    return Collective(outer.name, kind, at, end, operands, results, round(sent), ranks, False, payload, name)


def _ranks(attributes: str) -> int:
    """Size of a collective's first group; 0 where the text does not say."""
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return match[1].count(",") + 1
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(match[1])
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", match[1]))
        return math.prod(int(sizes.get(axis, 1)) for axis in re.findall(r"'([^']*)'", match[2]))
    return 0


def _loop(module: Module, instruction: Instruction, at: int) -> Loop:
    known = re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', instruction.attributes)
    trips = int(known[1]) if known else None
    body = _read(module, module.computations[instruction.called("body")[0]]) if known else None
    return Loop(instruction.name, instruction.op_name, at, trips, body)


def _copy(instruction: Instruction, by_name: dict[str, Instruction]) -> Copy | None:
    """A copy of a parameter [G, H, I] of 1 MiB and more."""
    what = re.match(r"(?:wrapped_|loop_|input_)?(copy|transpose|convert)", instruction.name)
    if instruction.op not in ("copy", "transpose", "convert", "fusion") or what is None or not instruction.operands:
        return None
    source = by_name.get(instruction.operands[0])
    while source is not None and source.op in ("bitcast", "get-tuple-element") and source.operands:
        source = by_name.get(source.operands[0])
    if source is None or source.op != "parameter":
        return None
    big = [array.bytes for array in instruction.results if len(array.dims) == 3 and array.bytes >= _MIB]
    return Copy(instruction.name, what[1], sum(big)) if big else None
