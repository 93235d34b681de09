"""Exchanges of several plans, also in opposite directions, in one collective: bit for bit what they are one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep import CommConfig, ConfigError, MoEConfig, Part, RouterConfig, exchange, make_mesh, make_plan
from jax_ep.aot import count_collectives
from jax_ep.transport import Send, exchange_together

R, T, E, K, H, KV = 4, 6, 8, 2, 12, 10
TRANSPORTS = ("ragged", "all_to_all", "all_gather")


def config(dtype="float32", **comm):
    return MoEConfig(H, 8, E, RouterConfig(K), comm=CommConfig(recv_rows_factor=None, **comm), dtype=dtype)


def run(transport, together, experts, x, kv):
    """Dispatch of one half of the tokens beside the combine of the other, and rows with counts of their own, one
    way and back. Sums of what arrived with cotangents that differ by place, and all that arrived.
    """

    def one(experts, x, kv):
        cfg = config()
        first, second = (make_plan(e, cfg, axis_name="expert", transport=transport) for e in jnp.split(experts, 2))
        g = first.geometry
        rows = jnp.tile(x, (-(-g.recv_rows // T), 1))
        away = rows[: g.recv_rows] * 2  # as if it had arrived
        home = rows[: g.home_rows, :5].astype(jnp.bfloat16)
        count = jnp.arange(R)[:, None] % 2 + jnp.arange(R)[None] % 2  # [source, destination], at most 2
        parts = [
            ([Part(home), Part(kv, count.astype(jnp.int32), kv.shape[0])], dict(with_counts=True)),
            ([Part(away)], dict(reverse=True)),
        ]
        plans = (first, second)
        if together:
            sends = [Send(p, plan, **how) for (p, how), plan in zip(parts, plans)]
            done = exchange_together(sends)
        else:
            done = [exchange(p, plan, **how) for (p, how), plan in zip(parts, plans)]
        arrived = [part.rows for send, _ in done for part in send]
        total = sum((a.astype(jnp.float32) * jnp.cos(jnp.arange(a.size)).reshape(a.shape)).sum() for a in arrived)
        return total[None], (arrived, done[0][1].recv_counts)

    spec = P("expert")
    mapped = jax.shard_map(one, mesh=make_mesh(R), in_specs=spec, out_specs=spec, check_vma=False)

    def loss(x, kv):
        total, rest = mapped(experts, x, kv)
        return total.sum(), rest

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(x, kv)


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    experts = jnp.asarray(rng.integers(0, E, (R * T, K)), jnp.int32)
    return (
        experts,
        jnp.asarray(rng.standard_normal((R * T, H)), "f4"),
        jnp.asarray(rng.standard_normal((R * 8, KV)), "f4"),
    )


@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
def test_together_is_bit_for_bit_one_by_one(transport):
    for seed in range(3):
        both = [jax.jit(functools.partial(run, transport, how))(*inputs(seed)) for how in (True, False)]
        jax.tree.map(np.testing.assert_array_equal, *both)
        assert all(np.abs(np.asarray(g)).max() > 0 for g in both[0][1])


@pytest.mark.parametrize("transport", ["ragged", "all_to_all"])
def test_one_collective_forward_and_one_backward(transport):
    counts = {}
    for together in (True, False):
        lowered = (
            jax.jit(functools.partial(run, transport, together)).trace(*inputs()).lower(lowering_platforms=("cuda",))
        )
        kind = {"ragged": "ragged_all_to_all"}.get(transport, transport)
        counts[together] = count_collectives(lowered.as_text())[kind].straight
    assert counts == {True: 2, False: 4}


def refusal(sends):
    def one(experts):
        exchange_together(sends(experts))
        return experts

    spec = P("expert")
    with pytest.raises(ConfigError) as error:
        jax.shard_map(one, mesh=make_mesh(R), in_specs=spec, out_specs=spec, check_vma=False)(inputs()[0])
    return str(error.value)


def whole(plan):
    return [Part(jnp.zeros((plan.geometry.home_rows, 2)))]


def test_what_does_not_go_together_is_refused():
    plan = lambda experts, transport, **comm: make_plan(
        experts, config(**comm), axis_name="expert", transport=transport
    )

    def of_two(first, second):
        def sends(experts):
            return [Send(whole(p), p) for p in (plan(experts, **first), plan(experts, **second))]

        return sends

    said = refusal(of_two(dict(transport="ragged"), dict(transport="all_to_all")))
    assert "sends[1] (axis, transport)=('expert', 'all_to_all')" in said
    assert "('expert', 'ragged') works" in said
    by_expert = dict(transport="ragged", messages="expert")
    assert "messages='expert'" in refusal(of_two(by_expert, by_expert))
    assert "sends=[]" in refusal(lambda experts: [])
    assert "parts=[]" in refusal(lambda experts: [Send([], plan(experts, transport="ragged"))])
