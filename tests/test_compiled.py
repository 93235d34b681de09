"""Reading lowered and compiled programs."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jax_ep.aot import COLLECTIVES, CollectiveCount, count_collectives, host_calls

RANKS = 4


def on_mesh(f):
    mesh = Mesh(jax.devices()[:RANKS], ("e",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("e"), out_specs=P("e"), check_vma=False))


def lowered(f, platform="cuda"):
    return on_mesh(f).trace(jnp.ones((8 * RANKS, 4))).lower(lowering_platforms=(platform,)).as_text()


def compiled(f):
    return on_mesh(f).lower(jnp.ones((8 * RANKS, 4))).compile().as_text()


def nonzero(counts):
    assert list(counts) == list(COLLECTIVES)
    return {kind: tuple(count) for kind, count in counts.items() if any(count)}


@jax.jit
def private(x):
    """Lowered as a function of its own, once, however often it is called."""
    return jax.lax.psum(x, "e")


def everything(x, ragged):
    y = x
    if ragged:
        sizes = jnp.full(RANKS, 2, jnp.int32)
        offsets = 2 * jnp.arange(RANKS, dtype=jnp.int32)
        y = jax.lax.ragged_all_to_all(x, jnp.zeros_like(x), offsets, sizes, offsets, sizes, axis_name="e")

    def turn(carry):
        step, y = carry
        y = private(jax.lax.all_to_all(y, "e", 0, 0, tiled=True))
        return step + 1, y + jax.lax.ppermute(y, "e", [(0, 1)])

    _, y = jax.lax.while_loop(lambda carry: carry[1].sum() < 9, turn, (0, y))
    y = jax.lax.cond(y.sum() > 0, lambda y: jax.lax.all_gather(y, "e").sum(0), lambda y: y, y)
    y = jax.lax.scan(lambda y, _: (private(y), None), y, None, length=3)[0]
    return jax.lax.psum_scatter(private(y), "e", tiled=True)


EVERYTHING = {
    "all_to_all": (0, 1),
    "all_gather": (1, 0),  # in a branch
    "all_reduce": (1, 2),
    "reduce_scatter": (1, 0),
    "collective_permute": (0, 1),
}


def test_lowered_for_cuda():
    counts = count_collectives(lowered(functools.partial(everything, ragged=True)))
    assert nonzero(counts) == {"ragged_all_to_all": (1, 0), **EVERYTHING}
    assert counts["all_reduce"] == CollectiveCount(straight=1, loop=2)


@pytest.mark.parametrize("read", [functools.partial(lowered, platform="cpu"), compiled], ids=["lowered", "compiled"])
def test_for_cpu(read):
    text = read(functools.partial(everything, ragged=False))
    assert nonzero(count_collectives(text)) == EVERYTHING
    assert host_calls(text) == {}


def test_functions_count_as_often_as_they_are_called():
    @jax.jit
    def looping(x):
        return jax.lax.fori_loop(0, 3, lambda _, x: private(x), private(x))

    assert nonzero(count_collectives(lowered(lambda x: looping(looping(x))))) == {"all_reduce": (2, 2)}
    # A loop in a loop, and a straight collective of a function that a loop calls.
    nested = lambda x: jax.lax.fori_loop(0, 2, lambda _, x: looping(x), x)
    assert nonzero(count_collectives(lowered(nested))) == {"all_reduce": (0, 2)}


def test_platforms_that_are_not_lowered_do_not_count():
    def f(x):
        gather = lambda x: jax.lax.all_gather(x, "e").sum(0)
        return jax.lax.platform_dependent(x, cpu=gather, default=lambda x: jax.lax.psum(x, "e"))

    assert nonzero(count_collectives(lowered(f, "cuda"))) == {"all_reduce": (1, 0)}
    assert nonzero(count_collectives(lowered(f, "cpu"))) == {"all_gather": (1, 0)}


def test_gradients():
    def f(x):
        return jax.grad(lambda x: (jax.lax.all_to_all(x, "e", 0, 0, tiled=True) ** 2).sum())(x)

    assert nonzero(count_collectives(lowered(f))) == {"all_to_all": (2, 0)}


def test_callbacks():
    def f(x):
        jax.debug.callback(lambda x: None, x.sum())
        same = jax.pure_callback(lambda x: x, x, x)
        return jax.lax.fori_loop(0, 2, lambda _, x: jax.pure_callback(lambda x: x, x, x), same)

    program = jax.jit(f).trace(jnp.ones(3)).lower()
    assert host_calls(program.as_text()) == {"callback": 3}
    assert host_calls(program.compile().as_text()) == {"callback": 3}


def test_generic_form_and_braces_in_strings():
    text = """
    module @m attributes {note = "stablehlo.infeed { } @x", mhlo.num_partitions = 1 : i32} {
      func.func public @main(%arg0: tensor<4xf32> {jax.result_info = "}"}, %t: !stablehlo.token) -> tensor<4xf32> {
        %0 = "stablehlo.while"(%arg0) <{a = #stablehlo.b<c>}> ({
        ^bb0(%arg1: tensor<4xf32>):
          %8 = "stablehlo.custom_call"(%arg1) <{call_target_name = "a_gpu_callback"}> : (tensor<4xf32>) -> tensor<i1>
          stablehlo.return %8 : tensor<i1>
        }, {
        ^bb0(%arg1: tensor<4xf32>):
          %9 = "func.call"(%arg1) <{callee = @"odd name"}> : (tensor<4xf32>) -> tensor<4xf32>
          "stablehlo.return"(%9) : (tensor<4xf32>) -> ()
        }) : (tensor<4xf32>) -> tensor<4xf32>
        %1 = "stablehlo.case"(%i) ({
          %2 = call @"odd name"(%0) : (tensor<4xf32>) -> tensor<4xf32>
          stablehlo.return %2 : tensor<4xf32>
        }, {
          %3:2 = "stablehlo.infeed"(%t) <{infeed_config = "}{"}> : (!stablehlo.token) -> (tensor<4xf32>, !mhlo.token)
          stablehlo.return %3#0 : tensor<4xf32>
        }) : (tensor<i32>) -> tensor<4xf32>
        return %1 : tensor<4xf32>
      }
      func.func private @"odd name"(%arg0: tensor<4xf32>) -> tensor<4xf32> {
        %0 = "stablehlo.collective_broadcast"(%arg0) : (tensor<4xf32>) -> tensor<4xf32>
        return %0 : tensor<4xf32>
      }
      func.func private @unused(%arg0: tensor<4xf32>) -> tensor<4xf32> {
        %0 = "stablehlo.all_gather"(%arg0) : (tensor<4xf32>) -> tensor<4xf32>
        return %0 : tensor<4xf32>
      }
    }
    """
    assert nonzero(count_collectives(text)) == {"collective_broadcast": (1, 1)}
    assert host_calls(text) == {"callback": 1, "infeed": 1}


def test_asynchronous_pairs_are_one():
    text = """HloModule m, is_scheduled=true

%body (p: (f32[8])) -> (f32[8]) {
  %p = (f32[8]{0:T(256)}) parameter(0)
  %s = (f32[8]{0}, f32[8]{0}) collective-permute-start(%p), source_target_pairs={{0,1}}
  ROOT %d = f32[8]{0} collective-permute-done(%s), metadata={op_name="all-to-all(x)"}
}

%wrapped (q: f32[8]) -> f32[8] {
  ROOT %r = f32[8]{0} ragged-all-to-all(%q), replica_groups={{0,1}}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %start = ((f32[8]), f32[8]) async-start(%x), calls=%wrapped
  %done = f32[8] async-done(%start)
  %w = f32[8] while(%done), condition=%condition, body=%body
  ROOT %c = f32[8] conditional(%w, %w), branch_computations={%wrapped, %wrapped}
}
"""
    assert nonzero(count_collectives(text)) == {"ragged_all_to_all": (3, 0), "collective_permute": (0, 1)}


def test_no_program():
    with pytest.raises(ValueError, match=r"has no entry function; lowered\.as_text\(\)"):
        count_collectives("module @m {}")
