"""Collectives of co-shipped blocks, read off programs lowered for CUDA: payload, and control apart."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_ep import CommConfig, ModelConfig, MoEConfig, RouterConfig, balance_loss, make_mesh
from jax_ep.aot import count_collectives, host_calls
from jax_ep.block.coship import parallel_block, sequential_stack
from jax_ep.models.decoder import init_decoder

pytestmark = pytest.mark.slow

RANKS, LAYERS, B, S, H = 4, 3, 4, 32, 16


@functools.cache
def lowered(form: str, kv: str, backward: bool, **fields: Any) -> str:
    """A form on two replicas of four ranks; fields of its CommConfig, or `recompute`."""
    recompute = fields.pop("recompute", "none")
    comm = CommConfig(**{"recv_rows_factor": None, **fields})
    layer = MoEConfig(H, 8, 8, RouterConfig(2), comm=comm)
    config = ModelConfig(32, LAYERS, 4, 2, 4, layer, recompute=recompute)
    params = jax.eval_shape(lambda: init_decoder(config, jax.random.key(0))["layers"])
    block = sequential_stack
    if form == "parallel":
        block = parallel_block
        params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), params)

    def run(params: Any, x: jax.Array, ids: jax.Array) -> Any:
        y, stats = block(params, x, config, mesh=make_mesh(RANKS, 2), segment_ids=ids, split="zigzag", kv=kv)
        return jnp.square(y).sum() + balance_loss(stats).sum(), stats

    run = jax.value_and_grad(run, (0, 1), has_aux=True) if backward else run
    shapes = jax.ShapeDtypeStruct((B, S, H), jnp.float32), jax.ShapeDtypeStruct((B, S), jnp.int32)
    return jax.jit(run).trace(params, *shapes).lower(lowering_platforms=("cuda",)).as_text()


def payload(text: str, transport: str) -> tuple[int, int]:
    """Payload collectives outside loops, and in the loop over layers."""
    return tuple(count_collectives(text)[{"ragged": "ragged_all_to_all"}.get(transport, transport)])


def control(text: str, transport: str) -> dict[str, tuple[int, int]]:
    """What else there is, (outside, in the loop): of counts, and of sums over the whole mesh."""
    count = count_collectives(text)
    name = {"ragged": "ragged_all_to_all"}.get(transport, transport)
    return {kind: tuple(c) for kind, c in count.items() if kind != name and any(c)}


TRANSPORTS = ("ragged", "all_to_all")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("kv", "each"), [("coship", 2), ("separate", 3)])
def test_the_parallel_block(kv, each, transport):
    """Two payload collectives instead of three, and as many in the backward; of control one all_gather of counts on
    ragged, and one sum of statistics.
    """
    for backward in (False, True):
        text = lowered("parallel", kv, backward, transport=transport)
        assert payload(text, transport) == (each * (1 + backward), 0)
        counts = {"all_gather": (1, 0)} if transport == "ragged" else {}
        found = control(text, transport)
        sums = found.pop("all_reduce")
        assert found == counts and (sums == (1, 0) or backward)  # gradients are sums over the mesh
        assert "stablehlo.while" not in text and host_calls(text) == {}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("kv", "each"), [("coship", 3), ("separate", 6)])
def test_the_sequential_block(kv, each, transport):
    """Three payload collectives a layer for two microbatches instead of six, and one for the stack; as many in the
    backward. On ragged each microbatch's counts are shared once a layer; statistics are summed once for the stack.
    """
    for backward in (False, True):
        if backward and (kv, transport) == ("separate", "all_to_all"):
            continue  # lowering takes seconds, and the other three say it
        text = lowered("sequential", kv, backward, transport=transport)
        assert payload(text, transport) == (1 + backward, each * (1 + backward))
        counts = {"all_gather": (0, 2)} if transport == "ragged" else {}
        found = control(text, transport)
        sums = found.pop("all_reduce")
        assert found == counts and sums[1] == 0 and (sums[0] == 1 or backward)
        assert host_calls(text) == {}
        assert text.count("stablehlo.while") == 1 + backward  # over layers


@pytest.mark.parametrize(("kind", "transport"), [({"dedup": True}, "all_to_all"), ({"wire_dtype": "int8"}, "ragged")])
def test_what_travels_beside_the_rows_adds_no_collective(kind, transport):
    assert payload(lowered("parallel", "coship", True, transport=transport, **kind), transport) == (4, 0)


def test_further_rounds_are_loops_of_their_own():
    """Of each microbatch a dispatch and a combine, in a loop that no key or value takes part in."""
    text = lowered("sequential", "coship", False, transport="all_to_all", recv_rows_factor=0.5)
    assert payload(text, "all_to_all") == (1, 3 + 2 * 2)


def test_what_the_baselines_send_instead():
    """One all_gather for each microbatch's keys and values, or a permutation for each step of a ring."""
    text = lowered("parallel", "all_gather", False, transport="all_to_all")
    assert payload(text, "all_to_all") == (2, 0) and control(text, "all_to_all")["all_gather"] == (1, 0)
    text = lowered("sequential", "ring", False, transport="all_to_all")
    assert payload(text, "all_to_all") == (1, 4)
    assert control(text, "all_to_all")["collective_permute"] == (0, 2 * (RANKS - 1))


def test_recomputation():
    """What is kept by name, keys and values among it, is not sent again; without that all three exchanges are."""
    none, kept, full = (
        lowered("sequential", "coship", True, transport="ragged", recompute=how)
        for how in ("none", "selective", "full")
    )
    assert count_collectives(kept) == count_collectives(none)
    assert payload(full, "ragged") == (2, 9)
