"""Interleaved timing."""

import collections
import dataclasses
import itertools
import time

import jax
import jax.numpy as jnp
import pytest

from jax_ep import ConfigError
from jax_ep.bench import Timing, compare_runs
from jax_ep.bench.clock import turns


def test_every_round_runs_all_and_starts_with_another():
    order = []
    functions = {name: lambda name=name: order.append(name) for name in "abc"}
    told = []
    timings = compare_runs(functions, warmup=1, runs=5, on_run=told.append)
    rounds = ["".join(order[i : i + 3]) for i in range(0, 18, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert sorted(r[0] for r in rounds) == ["a", "a", "b", "b", "c", "c"]
    assert told == order
    assert list(timings) == ["a", "b", "c"]
    assert all(len(timing.runs_ms) == 5 for timing in timings.values())


@pytest.mark.parametrize("count", [1, 2, 5, 6, 11])
def test_turns_let_each_follow_each_equally_often(count):
    names = [str(i) for i in range(count)]
    rounds = [turns(names, turn) for turn in range(count * (1 + count % 2))]
    assert all(sorted(order) == sorted(names) for order in rounds)
    follows = collections.Counter(pair for order in rounds for pair in itertools.pairwise(order))
    assert follows == dict.fromkeys(itertools.permutations(names, 2), 1 + count % 2)


def test_times_are_of_each_function_without_warmup_and_callback():
    calls = []

    def slow_at_first():
        time.sleep(0.002 if calls else 0.2)
        calls.append(1)

    timings = compare_runs(
        {"fast": lambda: None, "slow": slow_at_first}, warmup=1, runs=3, on_run=lambda name: time.sleep(0.02)
    )
    assert timings["fast"].median_ms < timings["slow"].min_ms
    assert 2 <= timings["slow"].median_ms < 20


def test_waits_for_results():
    work = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, x: jnp.tanh(x @ x), x))
    x = jnp.full((200, 200), 0.01)
    waited = compare_runs({"work": lambda: {"nested": (work(x),)}}, warmup=1, runs=3)["work"]
    start = time.perf_counter()
    jax.block_until_ready(work(x))
    # Merely dispatching takes microseconds.
    assert waited.median_ms > 0.1 * (time.perf_counter() - start) * 1e3


def test_timing():
    timing = Timing((3.0, 1.0, 2.0, 10.0))
    assert (timing.median_ms, timing.min_ms, timing.max_ms) == (2.5, 1.0, 10.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        timing.runs_ms = ()


@pytest.mark.parametrize(
    ("functions", "counts", "message"),
    [
        ({}, (1, 1), "functions={}: must hold at least one function"),
        ({"a": lambda: None}, (-1, 1), "warmup=-1: must be an integer of at least 0; warmup=5 works"),
        ({"a": lambda: None}, (1, 0), "runs=0: must be an integer of at least 1; runs=5 works"),
        ({"a": lambda: None}, (1, True), "runs=True: must be an integer"),
    ],
)
def test_refusals(functions, counts, message):
    with pytest.raises(ConfigError, match=message):
        compare_runs(functions, warmup=counts[0], runs=counts[1])
