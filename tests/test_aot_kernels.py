"""What scripts/aot_kernels.py finds in compiled programs, and refuses. (Compiling itself needs the CUDA compiler.)"""

from __future__ import annotations

import re
from importlib import resources

import pytest

import aot_kernels
from _common import UsageError
from jax_ep.aot.hosts import cards, described_devices
from jax_ep.config import ConfigError

KERNEL = (
    '  %pallas_call.{n} = bf16[8,4]{{1,0}} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", '
    'metadata={{op_name="jit(f)/experts/jit(expert_mlp)/jit(mlp_forward)/{name}/pallas_call"}}\n'
)
ROUTER = (
    '  %dot.1 = f32[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, metadata={op_name="jit(f)/route/dot_general"}\n'
)
FORWARD = KERNEL.format(n=1, name="moe_hidden") + KERNEL.format(n=2, name="moe_product") + ROUTER


def test_a_layer_on_kernels_has_no_faults() -> None:
    assert aot_kernels.kernels_in(FORWARD) == {"moe_hidden": 1, "moe_product": 1, "moe_weight_gradient": 0}
    assert aot_kernels.faults(FORWARD, 2) == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (KERNEL.format(n=3, name="moe_product"), "3 kernels, not 2"),
        (ROUTER.replace("route", "experts/ragged_dot"), "1 products of experts"),
        ("  %while.1 = (s32[]) while(%tuple), condition=%c, body=%b\n", "a loop"),
    ],
)
def test_what_it_should_not_have_is_named(line: str, fault: str) -> None:
    (found,) = aot_kernels.faults(FORWARD + line, 2)
    assert found.startswith(fault)


def test_every_published_layer_is_in_bfloat16_and_on_one_device() -> None:
    for name in aot_kernels.CONFIGS.split(","):
        layer = aot_kernels.layer_of(name)
        assert (layer.dtype, layer.param_dtype, layer.grouped_backend) == ("bfloat16", "bfloat16", "auto")


@pytest.mark.parametrize("argv", [["--cards", "h1000"], ["token=5"], ["tokens=many"], ["tokens=0"]])
def test_unknown_cards_and_keys_are_refused(argv: list[str]) -> None:
    with pytest.raises((UsageError, ConfigError)):
        aot_kernels._arguments(argv)


def test_cards_describe_themselves() -> None:
    for card in cards():
        text = (resources.files("jax_ep") / "aot" / "cards" / f"{card}.textproto").read_text()
        assert card.removeprefix("rtx").upper() in text
        major = int(re.search(r"major: (\d+)", text)[1])
        assert major >= 8  # the kernels need no less
    with pytest.raises(ConfigError, match="rtx4090"):
        described_devices("rtx2080", 1)
