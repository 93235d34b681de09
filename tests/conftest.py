"""Eight simulated CPU devices, whatever the machine has; implicit rank promotion is an error."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib.metadata import version

DEVICES = 8


def _test_flags(flags: str) -> str:
    """The caller's flags with our number of devices; and without the code generator's optimisations, unless they say.

    Programs here are small and many, so that nearly all of the time is compilation, which that halves. So does the
    older way to emit fusions, where XLA still has it.
    """
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags)
    if "xla_backend_optimization_level" not in flags:
        flags += " --xla_backend_optimization_level=0"
    if "xla_cpu_enable_concurrency_optimized_scheduler" not in flags:  # see scripts/_common.simulate_devices
        flags += " --xla_cpu_enable_concurrency_optimized_scheduler=false"
    if "xla_cpu_use_fusion_emitters" not in flags and version("jaxlib").startswith("0.10."):
        flags += " --xla_cpu_use_fusion_emitters=false"
    return f"{flags} --xla_force_host_platform_device_count={DEVICES}".strip()


os.environ["XLA_FLAGS"] = _test_flags(os.environ.get("XLA_FLAGS", ""))
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402  (reads the environment)
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
assert len(jax.devices()) == DEVICES, f"tests need {DEVICES} simulated devices and JAX gives {jax.devices()}"


@pytest.fixture(scope="session")
def mesh() -> Callable[..., jax.sharding.Mesh]:
    """mesh(expert, data=1): a mesh of the first expert * data devices."""
    from jax_ep import make_mesh

    return lambda expert, data=1: make_mesh(expert, data, jax.devices()[: expert * data])
