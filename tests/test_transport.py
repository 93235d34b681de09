"""Ragged all-to-all and the packed exchange against NumPy loops: values, transposes, headers, lowered programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep import ConfigError, Part, exchange, make_mesh, ragged_all_to_all
from jax_ep import plan as planning
from jax_ep.plan import Geometry
from jax_ep.transport import parts, ragged, share_counts
from jax_ep.transport.all_gather import emulated_ragged_all_to_all
from jax_ep.transport.all_to_all import swap


def sharded(f, ranks, in_count, out_count=1, check_vma=False):
    mesh = make_mesh(ranks)
    specs = (P("expert"),) * in_count
    out = P("expert") if out_count == 1 else (P("expert"),) * out_count
    return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma)


# --- ragged_all_to_all


def draw_slices(rng, ranks, per_peer, rows, out_rows):
    """Sizes and offsets [R, R * u] of a legal exchange: slices do not overlap, leave gaps, and many are empty."""
    n = ranks * per_peer
    sizes = rng.integers(0, 4, (ranks, n)) * (rng.random((ranks, n)) < 0.7)
    inputs = np.zeros((ranks, n), int)
    for s in range(ranks):
        at = 0
        for j in rng.permutation(n):
            inputs[s, j] = at
            at += sizes[s, j]
        assert at <= rows
    outputs = np.zeros((ranks, n), int)
    for d in range(ranks):
        at = 0
        arrivals = [(s, d * per_peer + i) for s in range(ranks) for i in range(per_peer)]
        rng.shuffle(arrivals)
        for s, j in arrivals:
            outputs[s, j] = at  # an empty slice shares its offset with the next one
            at += sizes[s, j] + rng.integers(0, 2) * (sizes[s, j] > 0)
        assert at <= out_rows
    recv = sizes.reshape(ranks, ranks, per_peer).swapaxes(0, 1).reshape(ranks, n)
    return [a.astype(np.int32) for a in (inputs, sizes, outputs, recv)]


def ragged_oracle(operand, output, inputs, sizes, outputs, ranks, per_peer):
    """operand [R, n, ...], output [R, M, ...]."""
    result = output.copy()
    for s in range(ranks):
        for j in range(ranks * per_peer):
            for row in range(sizes[s, j]):
                result[j // per_peer, outputs[s, j] + row] = operand[s, inputs[s, j] + row]
    return result


@functools.cache
def ragged_program(ranks, check_vma=True):
    def call(operand, output, *slices):
        return ragged_all_to_all(operand, output, *slices, axis_name="expert")

    run = sharded(call, ranks, 6, check_vma=check_vma)
    both = jax.value_and_grad(lambda a, b, ct, *s: (run(a, b, *s) * ct).sum(), (0, 1))
    return jax.jit(run), jax.jit(both)


@pytest.mark.parametrize(
    ("ranks", "per_peer", "check_vma"),
    [(4, 1, True), (4, 1, False), (4, 3, True), (8, 1, True), (8, 2, False), (1, 2, True)],
)
def test_ragged_all_to_all_equals_oracle_and_transposes(ranks, per_peer, check_vma):
    rows, out_rows, width = 4 * ranks * per_peer, 5 * ranks * per_peer, 3
    forward, both = ragged_program(ranks, check_vma)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        slices = draw_slices(rng, ranks, per_peer, rows, out_rows)
        operand = rng.normal(size=(ranks, rows, width)).astype(np.float32)
        output = rng.normal(size=(ranks, out_rows, width)).astype(np.float32)
        cotangent = rng.normal(size=output.shape).astype(np.float32)
        flat = [a.reshape(-1, *a.shape[2:]) for a in (operand, output, *slices)]
        want = ragged_oracle(operand, output, *slices[:3], ranks, per_peer)
        np.testing.assert_array_equal(np.asarray(forward(*flat)).reshape(want.shape), want)
        _, (d_operand, d_output) = both(*flat[:2], cotangent.reshape(-1, width), *flat[2:])
        want_operand, want_output = np.zeros_like(operand), cotangent.copy()
        inputs, sizes, outputs, _ = slices
        for s in range(ranks):
            for j in range(ranks * per_peer):
                for row in range(sizes[s, j]):
                    d, there = j // per_peer, outputs[s, j] + row
                    want_operand[s, inputs[s, j] + row] += cotangent[d, there]
                    want_output[d, there] = 0
        np.testing.assert_array_equal(np.asarray(d_operand).reshape(operand.shape), want_operand)
        np.testing.assert_array_equal(np.asarray(d_output).reshape(output.shape), want_output)


def test_ragged_all_to_all_lowers_to_the_native_op_elsewhere():
    forward, both = ragged_program(4)
    shapes = [jax.ShapeDtypeStruct((4 * n, 8), jnp.float32) for n in (6, 9)]
    slices = [jax.ShapeDtypeStruct((16,), jnp.int32)] * 4
    for platform in ("cuda", "tpu"):
        text = forward.trace(*shapes, *slices).lower(lowering_platforms=(platform,)).as_text()
        assert text.count("@ragged_all_to_all") == 1 and "all_gather" not in text
        text = both.trace(*shapes, shapes[1], *slices).lower(lowering_platforms=(platform,)).as_text()
        assert text.count("@ragged_all_to_all") == 2 and "all_gather" not in text
    text = forward.trace(*shapes, *slices).lower(lowering_platforms=("cpu",)).as_text()
    assert "@ragged_all_to_all" not in text and "all_gather" in text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(output=jnp.zeros((8, 4))), "output"),
        (dict(output=jnp.zeros((8, 3), jnp.int32)), "output"),
        (dict(send_sizes=jnp.zeros(3, jnp.int32)), "send_sizes"),
        (dict(recv_sizes=jnp.zeros(0, jnp.int32)), "recv_sizes"),
        (dict(input_offsets=jnp.zeros((4, 1), jnp.int32)), "input_offsets"),
        (dict(output_offsets=jnp.zeros(4)), "output_offsets"),
    ],
)
def test_ragged_all_to_all_refuses(change, named):
    good = dict(operand=jnp.zeros((8, 3)), output=jnp.zeros((8, 3)))
    good |= {n: jnp.zeros(4, jnp.int32) for n in ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")}
    with pytest.raises(ConfigError, match=named):
        sharded(lambda x: ragged_all_to_all(axis_name="expert", **(good | change)), 4, 1)(jnp.zeros(4))


@pytest.mark.parametrize(("rows", "out_rows"), [(0, 5), (5, 0)])
def test_ragged_all_to_all_of_no_rows(rows, out_rows):
    """Nothing can be sent: the result is what was there."""
    none = jnp.zeros(16, jnp.int32)
    output = jnp.arange(4 * out_rows * 2.0).reshape(-1, 2)
    got = sharded(lambda a, b, *s: ragged_all_to_all(a, b, *s, axis_name="expert"), 4, 6)(
        jnp.zeros((4 * rows, 2)), output, none, none, none, none
    )
    np.testing.assert_array_equal(got, output)


# --- parts


@pytest.mark.parametrize(
    "dtypes", [("float32",), ("bfloat16", "float32"), ("int8", "float32", "bool"), ("float16", "int32")]
)
def test_pack_keeps_every_bit(dtypes):
    rng = np.random.default_rng(0)
    rows = []
    for i, dtype in enumerate(dtypes):
        bits = rng.integers(0, 256, (6, (i + 1) * jnp.dtype(dtype).itemsize), np.uint8)
        rows.append(jnp.asarray(bits % 2, jnp.bool_) if dtype == "bool" else jnp.asarray(bits.view(dtype)))
    buffer = parts.pack(rows, parts.unit_bytes(rows))
    assert buffer.nbytes == sum(r.nbytes for r in rows)
    for before, after in zip(rows, parts.unpack(buffer, rows), strict=True):
        assert after.dtype == before.dtype
        np.testing.assert_array_equal(np.asarray(after).view(np.uint8), np.asarray(before).view(np.uint8))


@pytest.mark.parametrize(
    ("width", "dtype", "integers"), [(1, "bfloat16", 9), (3, "float32", 3), (64, "float16", 5), (8, "int8", 1)]
)
def test_header_rides_in_the_same_collective(width, dtype, integers):
    ranks, quota = 4, 3
    rng = np.random.default_rng(1)
    head = rng.integers(-(2**31), 2**31, (ranks, ranks, integers)).astype(np.int32)
    rows = rng.normal(size=(ranks, ranks, quota, width)).astype(dtype)

    def move(rows, head):
        unit = parts.unit_bytes([rows, head])
        buffer, told = swap([parts.pack([rows], unit), parts.to_columns(head, unit)], [1, 1], "expert", ranks)
        return parts.unpack(buffer, [rows])[0], parts.from_columns(told, integers, head.dtype)

    run = jax.jit(sharded(move, ranks, 2, 2))
    args = jnp.asarray(rows.reshape(-1, width)), jnp.asarray(head.reshape(-1, integers))
    moved, told = run(*args)
    np.testing.assert_array_equal(told, head.swapaxes(0, 1).reshape(-1, integers))
    np.testing.assert_array_equal(
        np.asarray(moved).view(np.uint8), rows.swapaxes(0, 1).reshape(-1, width).view(np.uint8)
    )
    text = run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.all_to_all") == 1


# --- exchange


@pytest.mark.parametrize("transport", ["ragged", "all_to_all", "all_gather"])
def test_exchange_and_its_transpose(transport):
    """Rows of two parts arrive where a loop puts them, rows nobody sent are zeros, and the cotangents go home the
    same way.
    """
    ranks, tokens, top_k, experts, width = 4, 6, 2, 8, 3
    g = Geometry(tokens, top_k, experts, ranks, quota=2, transport=transport)

    def run(ids, hidden, scale, step):
        plan = planning.start_plan(ids, g, jax.lax.axis_index("expert"), "expert")
        (plan,) = share_counts([plan])
        _, plan = exchange([Part(hidden)], plan, with_counts=True)
        step = step[0]
        home, away = planning.home(plan, step), planning.away(plan, step)
        if not g.ragged:  # every row of a dense all_to_all travels, so callers leave the empty ones zero
            hidden, scale = (jnp.where(home.assignment[:, None] < g.assignments, a, 0) for a in (hidden, scale))

        def send(hidden, scale):
            rows = [p.rows for p in exchange([Part(hidden), Part(scale)], plan, step=step)[0]]
            return rows

        (hidden_there, scale_there), pull = jax.vjp(send, hidden, scale)
        weight = jnp.arange(g.recv_rows, dtype=jnp.float32)[:, None] + 1
        back = pull([hidden_there * weight, (scale_there * 0 + weight).astype(scale.dtype)])
        return hidden_there, scale_there, *back, home.assignment, home.slot, away.index

    program = jax.jit(sharded(run, ranks, 4, 7))
    for seed in range(4):
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, experts + 2, (ranks, tokens, top_k))
        if seed == 3:
            ids[:] = 5  # all to one rank
        hidden = rng.normal(size=(ranks, g.home_rows, width)).astype(np.float32)
        scale = rng.normal(size=(ranks, g.home_rows, 1)).astype(jnp.bfloat16)
        flat = [jnp.asarray(a.reshape(-1, *a.shape[2:])) for a in (ids.astype(np.int32), hidden, scale)]
        for step in range(3):
            out = program(*flat, jnp.full(ranks, step, jnp.int32))
            there, scale_there, d_hidden, d_scale, assignment, slot, _ = (
                np.asarray(a).reshape(ranks, -1, *a.shape[1:]) for a in out
            )
            moved = 0
            want, want_scale = np.zeros_like(there), np.zeros_like(scale_there)
            want_d, want_d_scale = np.zeros_like(hidden), np.zeros_like(scale)
            arrived = np.zeros(ranks, int)
            for d in range(ranks):
                for s in range(ranks):
                    rows = [h for h in range(g.home_rows) if travels(s, d, h, assignment, slot, ids, g)]
                    for place, h in enumerate(rows):
                        c = arrived[d] if g.ragged else s * g.quota + place
                        want[d, c], want_scale[d, c] = hidden[s, h], scale[s, h]
                        want_d[s, h], want_d_scale[s, h] = hidden[s, h] * np.float32(c + 1), c + 1
                        arrived[d] += 1
                        moved += 1
            assert moved or step
            np.testing.assert_array_equal(there, want)
            np.testing.assert_array_equal(scale_there, want_scale)
            filled = np.ones((ranks, g.home_rows, 1), bool) if g.ragged else assignment[..., None] < g.assignments
            np.testing.assert_array_equal(np.where(filled, d_hidden, 0), want_d)
            np.testing.assert_array_equal(np.where(filled, d_scale, 0), want_d_scale)


@pytest.mark.parametrize("transport", ["ragged", "all_gather"])
@pytest.mark.parametrize("with_keys", [False, True])
def test_own_rows_do_not_cross(monkeypatch, transport, with_keys):
    """The collective is handed no row for the rank itself, there or back, and those rows arrive all the same."""
    ranks, g = 4, Geometry(6, 2, 8, 4, quota=12, transport=transport)

    def spy(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
        """The real thing, spoilt where a rank sends to itself."""
        me = jax.lax.axis_index(axis_name)
        slices = (input_offsets, send_sizes, output_offsets, recv_sizes)
        moved = emulated_ragged_all_to_all(operand, output, *slices, axis_name=axis_name)
        return jnp.where((send_sizes[me] > 0) | (recv_sizes[me] > 0), 0, moved)

    for name in ("native_or_emulated", "emulated_ragged_all_to_all"):
        monkeypatch.setattr(ragged, name, spy)
    keys = [Part(jnp.ones((4 * 5, 2)), jnp.full((4, 4), 5), 20)] if with_keys else []

    def run(ids, hidden):
        (plan,) = share_counts([planning.start_plan(ids, g, jax.lax.axis_index("expert"), "expert")])
        there, _ = exchange([Part(hidden), *keys], plan)
        back, _ = exchange(there, plan, reverse=True)
        return back[0].rows, plan.send_counts

    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, 8, (ranks * 6, 2)), jnp.int32)
    hidden = jnp.asarray(rng.normal(size=(ranks * 12, 3)), jnp.float32)
    back, counts = jax.jit(sharded(run, ranks, 2, 2))(ids, hidden)
    assert np.diagonal(np.asarray(counts).reshape(ranks, ranks)).any()
    np.testing.assert_array_equal(back, hidden)


@pytest.mark.parametrize(
    ("ranks", "rows", "reverse", "named"),
    [
        (1, 12, False, "plan ranks=1: one rank exchanges nothing"),
        (4, 11, False, r"parts\[0\].rows"),
        (4, 12, True, "away"),
    ],
)
def test_exchange_refuses(ranks, rows, reverse, named):
    g = Geometry(6, 2, 8, ranks, quota=2, transport="ragged")
    plan = planning.start_plan(jnp.zeros((6, 2), jnp.int32), g, jnp.int32(0), "expert")
    with pytest.raises(ConfigError, match=named):
        exchange([Part(jnp.zeros((rows, 3)))], plan, reverse=reverse)
    with pytest.raises(ConfigError, match="with_counts"):
        planning.away(plan)


def travels(s, d, h, assignment, slot, ids, g):
    """Whether home row h of rank s goes to rank d now, read off the (separately tested) home map."""
    a = assignment[s, h]
    if a >= g.assignments or slot[s].reshape(-1)[a] != h:
        return False
    return ids[s].reshape(-1)[a] // g.local_experts == d


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ([], r"parts=\[\]: must hold at least one"),
        ([jnp.zeros((12, 3))], r"parts\[0\]='ArrayImpl': must be a Part of arrays"),
        ([Part([[0.0] * 3] * 12)], r"parts\[0\]='Part': must be a Part of arrays"),
        ([Part(jnp.zeros((12, 3), jnp.int4))], r"parts\[0\].rows='int4': must be of a real dtype"),
        ([Part(jnp.zeros((12, 3), jnp.complex64))], r"parts\[0\].rows='complex64'"),
        ([Part(jax.random.split(jax.random.key(0), (12, 3)))], r"parts\[0\].rows='key<fry>'"),
        ([Part(jnp.zeros((12, 3)), wire_dtype="int4")], r"parts\[0\].wire_dtype='int4'"),
        ([Part(jnp.zeros((12, 3), jnp.int32), wire_dtype="int8")], r"wire_dtype='int8': rows are int32"),
        ([Part(jnp.zeros((12, 3)), capacity=12)], r"parts\[0\].capacity=12"),
    ],
)
def test_exchange_refuses_parts_that_are_none(parts, named):
    g = Geometry(6, 2, 8, 4, quota=12, transport="ragged")
    plan = planning.start_plan(jnp.zeros((6, 2), jnp.int32), g, jnp.int32(0), "expert")
    with pytest.raises(ConfigError, match=named):
        exchange(parts, plan)
