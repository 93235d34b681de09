"""Products of matrices in a compiled program: where they belong, and how much they compute and move.

Letters: G experts of a rank, M rows, H hidden, I intermediate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from jax_ep.aot.hlo import Computation, Instruction, Module, matmul_flops

KERNELS = ("moe_hidden", "moe_product", "moe_weight_gradient")
_PLACE = re.compile(r"/(own_experts|shared_experts|experts|attention)/")


class Product(NamedTuple):
    """One product of matrices, or several in one kernel.

    Attributes:
      name, at: of the instruction, and its position in the schedule.
      place: "experts", "own_experts", "shared_experts", "attention", or "": another (router, logits).
      kernel: the grouped kernel, or "".
      flops: of all M rows of its buffer, real or not.
      grouped: it skips rows that are not real, and a row meets one expert's matrix.
      bytes: of operands and results; `weight_bytes` of those [G, H, I] among them.
      masked: a dense product of all rows with all experts stands where a grouped one was meant: G times the work.
      op_name: where in the traced program it comes from.
    """

    name: str
    at: int
    place: str
    kernel: str
    flops: int
    grouped: bool
    bytes: int
    weight_bytes: int
    masked: bool
    op_name: str

    @property
    def forward(self) -> bool:
        """Whether it is part of the forward, and not one that is recomputed."""
        return not any(word in self.op_name for word in ("transpose(", "rematted"))


def read_product(
    module: Module, computation: Computation, instruction: Instruction, at: int, by_name: dict[str, Instruction]
) -> Product | None:
    """The product that an instruction is, if it is one: a kernel, a cuBLAS call, a dot, or a fusion that holds one."""
    operands = [array for name in instruction.operands if name in by_name for array in by_name[name].results]
    arrays = (*operands, *instruction.results)
    op_name, kernel, grouped = instruction.op_name, "", False
    if instruction.op == "custom-call" and "xla.gpu.triton" in instruction.attributes:
        kernel = next((name for name in KERNELS if f"/{name}/" in op_name), "")
        if not kernel:
            return None
        if kernel == "moe_weight_gradient":
            rows = max(array.dims[0] for array in operands if len(array.dims) == 2)
            matrices = [array for array in instruction.results if len(array.dims) == 3]
        else:
            rows = instruction.results[0].dims[0]
            matrices = [array for array in operands if len(array.dims) == 3]
        flops = sum(2 * rows * array.dims[1] * array.dims[2] for array in matrices)
        grouped = True
    else:
        inside = list(_matmuls(module, computation, instruction))
        flops = sum(count for count, _ in inside)
        if not flops:
            return None
        op_name = next((name for _, name in inside if _PLACE.search(name)), op_name)
        native = re.search(r'"is_ragged_dot":true,"num_groups_in_ragged_dot":"(\d+)"', instruction.attributes)
        if native:  # the TPU's own
            flops //= int(native[1])
            grouped = True
    masked = "ragged_dot" in op_name and not grouped
    place = _PLACE.findall(op_name)
    where = "" if "/route/" in op_name or not place else place[-1]
    moved = sum(array.bytes for array in arrays)
    weights = sum(array.bytes for array in arrays if len(array.dims) == 3) if where else 0
    return Product(instruction.name, at, where, kernel, flops, grouped, moved, weights, masked, op_name)


def _matmuls(module: Module, computation: Computation, instruction: Instruction) -> Iterator[tuple[int, str]]:
    """Operations and origin of every product of matrices that an instruction is or holds."""
    if flops := matmul_flops(instruction, computation):
        if instruction.results[0].dtype not in ("s32", "u32"):  # a sum of counts that became a product
            yield flops, instruction.op_name
    elif instruction.op in ("fusion", "call", "async-start"):
        for name in instruction.called("calls", "to_apply"):
            for inner in module.computations[name].instructions:
                yield from _matmuls(module, module.computations[name], inner)
