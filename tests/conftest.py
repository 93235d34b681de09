"""Eight simulated CPU devices, whatever the machine has; implicit rank promotion is an error."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

DEVICES = 8


def _with_device_count(flags: str, count: int) -> str:
    kept = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags)
    return f"{kept} --xla_force_host_platform_device_count={count}".strip()


os.environ["XLA_FLAGS"] = _with_device_count(os.environ.get("XLA_FLAGS", ""), DEVICES)
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
