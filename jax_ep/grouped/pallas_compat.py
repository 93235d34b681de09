"""Pallas Triton as JAX 0.10.2 to 0.12 have it: the one place that knows what differs between them.

* The backend follows the type of the compiler's parameters: newer JAX takes Mosaic GPU without them.
* JAX 0.12 asks which card it lowers for, and knows those that are here and some by name. Where a program is lowered
  for CUDA on a host without a card, to count its collectives say, it is told the oldest card that the kernels run on;
  what is compiled for a card that is only described, that card (`know_card`).
* JAX 0.12 warns that its Triton backend is going to be removed; pyproject.toml lets that warning pass in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

OLDEST = "8.0"  # compute capability


def know_card(device_kind: str, compute_capability: str) -> None:
    """Tells JAX what a device is that is not here, as in know_card("GeForce RTX 3090", "8.6").

    JAX 0.12 has a table for it and no public way in. It looks there for names that do not begin with NVIDIA; with one
    that does, it knows some cards and asks the device that is here about others.
    """
    try:
        from jax._src.pallas.triton import gpu_info
    except ImportError:
        return  # before 0.12: nothing asks
    digits = int(compute_capability.replace(".", ""))
    info = gpu_info.GpuInfo(gpu_version=None, arch_name=compute_capability, compute_capability=digits)
    gpu_info.registry[device_kind] = lambda: info


know_card("cpu", OLDEST)

ds = pl.ds
program_id = pl.program_id


def dot(a: jax.Array, b: jax.Array, trans_a: bool = False, trans_b: bool = False) -> jax.Array:
    """a @ b in float32. What is float32 already is multiplied as such, not as TensorFloat-32."""
    exact = jax.lax.Precision.HIGHEST if a.dtype.itemsize > 2 else None
    return triton.dot(a, b, trans_a=trans_a, trans_b=trans_b, precision=exact)


load, store = triton.load, triton.store


def call(
    kernel: Callable[..., None],
    arguments: Sequence[jax.Array],
    results: Sequence[tuple[tuple[int, ...], jax.typing.DTypeLike]],
    programs: int,
    *,
    name: str,
    warps: int,
    stages: int,
    interpret: bool,
) -> list[jax.Array]:
    """Runs `programs` programs of a kernel, each of which sees all arguments and results whole.

    Args:
      kernel: called with a reference for every argument, then for every result.
      arguments: arrays.
      results: their shapes and dtypes.
      programs: how many.
      name: what profiles and compiled texts call it.
      warps, stages: Triton's num_warps and num_stages.
      interpret: run it as plain JAX operations, on any platform.
    """
    run = pl.pallas_call(
        kernel,
        [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results],
        grid=(programs,),
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )
    return run(*arguments)
