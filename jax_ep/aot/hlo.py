"""Compiled (scheduled) HLO text as computations and instructions: shapes, bytes, operands, operations of products."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

_BITS = {
    "pred": 8,
    "s4": 4,
    "u4": 4,
    "s8": 8,
    "u8": 8,
    "s16": 16,
    "u16": 16,
    "s32": 32,
    "u32": 32,
    "s64": 64,
    "u64": 64,
}
_BITS |= {"bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>.*?) (?P<op>[a-z][a-z0-9\-]*)\((?P<rest>.*)$"
)
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLEES = re.compile(
    r"\b(calls|to_apply|condition|body|called_computations|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_LONG = 4000  # of an instruction's attributes: a kernel's own code follows later


class Array(NamedTuple):
    """A shape: element type as HLO writes it, and dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return -(-self.elements * _bits(self.dtype) // 8)


class Instruction(NamedTuple):
    """One line of a computation.

    Attributes:
      name, op: as the text has them, without "%".
      results: its arrays, those of tuples one after the other.
      operands: names.
      attributes: what follows the operands; of kernels only the beginning; of constants their value.
      op_name: where in the traced program it comes from; "" where the text does not say.
    """

    name: str
    op: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    op_name: str

    def called(self, *kinds: str) -> list[str]:
        """Computations it calls, by the attribute that names them ("calls", "body", ...)."""
        found = [names for kind, names in _CALLEES.findall(self.attributes) if kind in kinds]
        return [name.strip().lstrip("%") for names in found for name in names.strip("{}").split(",")]


class Computation(NamedTuple):
    """Instructions in the text's order, which is the schedule's where the module is scheduled."""

    name: str
    instructions: tuple[Instruction, ...]

    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}


class Module(NamedTuple):
    """A compiled program."""

    computations: Mapping[str, Computation]
    entry: str


def read_module(text: str) -> Module:
    """Reads compiled.as_text().

    Raises:
      ValueError: the text is no HLO module, or has no schedule.
    """
    if not text.lstrip().startswith("HloModule") or "is_scheduled=true" not in text[:2000]:
        raise ValueError(f"text={text[:40]!r}: is no scheduled HLO module; compiled.as_text() works")
    computations: dict[str, Computation] = {}
    name, entry, lines = "", "", list[Instruction]()
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            name, lines = start["name"], []
            entry = name if start["entry"] else entry
        elif line.startswith("}") and name:
            computations[name], name = Computation(name, tuple(lines)), ""
        elif name and (instruction := _read_line(line)):
            lines.append(instruction)
    if entry not in computations:
        raise ValueError(f"text={text[:40]!r}: has no entry computation; compiled.as_text() works")
    return Module(computations, entry)


def _read_line(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    rest = match["rest"]
    end = _closing(rest)
    op_name = _OP_NAME.search(rest, end)
    results = tuple(_arrays(match["shape"]))
    operands = tuple(_NAME.findall(rest[:end]))
    attributes = rest[:end] if match["op"] == "constant" else rest[end:]
    if op_name and op_name.start() - end > _LONG:
        attributes = attributes[:_LONG]
    elif len(attributes) > _LONG and "ir = " in attributes:
        attributes = attributes[: max(_LONG, op_name.end() - end if op_name else 0)]
    return Instruction(match["name"], match["op"], results, operands, attributes, op_name[1] if op_name else "")


def _closing(rest: str) -> int:
    """Where the parenthesis closes that was open before `rest`."""
    depth = 1
    for match in re.finditer(r"[()]", rest):
        depth += 1 if match.group() == "(" else -1
        if not depth:
            return match.start()
    return len(rest)


def _arrays(shape: str) -> list[Array]:
    found = [(dtype, dims) for dtype, dims in _ARRAY.findall(shape) if _bits(dtype)]
    return [Array(dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in found]


def _bits(dtype: str) -> int:
    return _BITS.get(dtype, 8 if dtype.startswith("f8") else 0)


def matmul_flops(instruction: Instruction, computation: Computation) -> int:
    """Multiplications and additions of a dot, a convolution or a cuBLAS call; 0 for anything else.

    A convolution that XLA has made of a ragged dot skips what its mask leaves out: each row meets one group's matrix.
    """
    if not instruction.operands or not instruction.results:
        return 0
    lhs = computation.by_name().get(instruction.operands[0])
    if lhs is None or not lhs.results:
        return 0
    dims, attributes, out = lhs.results[0].dims, instruction.attributes, instruction.results[0].elements
    if instruction.op == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", attributes)
    elif instruction.op == "custom-call" and "__cublas" in attributes:
        contracted = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', attributes)
    elif instruction.op == "convolution" and (labels := re.search(r"dim_labels=(\w+)_(\w+)->", attributes)):
        taps = re.search(r"window=\{size=([\dx]+)", attributes)
        window = 1 if taps is None or "dilate" in attributes else math.prod(int(n) for n in taps[1].split("x"))
        return 2 * out * dims[labels[1].index("f")] * window
    else:
        return 0
    indices = re.findall(r"\d+", contracted[1]) if contracted else []
    return 2 * out * math.prod(dims[int(i)] for i in indices)
