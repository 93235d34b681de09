"""The loop: what it records, resuming on the same and another mesh, steps that are not finite, and ending early."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_training import get_train_config

from jax_ep import ConfigError
from jax_ep.models import decoder
from jax_ep.models.decoder import loss
from jax_ep.training import diagnose, loop
from jax_ep.training.data import Windows

CONFIG = get_train_config()
B, S = CONFIG.batch_size, CONFIG.sequence_length
RARE = 255  # a token that no text here has
FACTS = {"train_sha256": "a", "validation_sha256": "b"}


@pytest.fixture(scope="module", autouse=True)
def _compiled_once():
    """One program a config and mesh for all tests here, in which the rare token is embedded as NaN."""
    embed = decoder.embed

    def poisoned(params, input_ids, config, place):
        rows = embed(params, input_ids, config, place)
        return jnp.where(input_ids[..., None] == RARE, jnp.nan, rows)

    diagnose._program.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "embed", poisoned)
        for name in ("make_step", "make_evaluate"):
            patch.setattr(loop, name, functools.lru_cache(getattr(loop, name)))
        yield
    diagnose._program.cache_clear()


def windows(seed: int = 0, count: int = 40) -> Windows:
    """Text with structure: every byte follows from the one before, but for one in eight."""
    rng = np.random.default_rng(seed)
    text = np.zeros(count * S, np.uint8)
    for at in range(1, len(text)):
        text[at] = rng.integers(0, 100) if rng.random() < 0.125 else (3 * int(text[at - 1]) + 1) % 100
    return Windows(text, S, CONFIG.seed)


class Poisoned(Windows):
    """Has the rare token in every sequence of some steps."""

    def __init__(self, like: Windows, steps: Iterable[int]):
        self.__dict__.update(like.__dict__)
        self._bad = steps

    def at(self, positions: np.ndarray) -> np.ndarray:
        rows = super().at(positions)
        rows[..., 0] = np.where(np.isin(positions // B + 1, list(self._bad)), RARE, rows[..., 0])
        return rows


def run(folder, mesh, text=None, until: int | None = None) -> tuple[loop.Result, list[loop.Record]]:
    """`train`, ended early after step `until`, and its records."""
    told: list[loop.Record] = []
    ends = lambda: told[-1]["step"] == until
    text = windows() if text is None else text
    where: dict[str, Any] = {"facts": FACTS, "on_record": told.append, "stop": ends}
    return loop.train(CONFIG, mesh, text, windows(1, 21), folder, **where), told


def of_kind(told, kind):
    return [record for record in told if record["kind"] == kind]


def losses(told):
    return {record["step"]: record["loss"] for record in of_kind(told, "step")}


def assert_same_weights(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a.params, b.params)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, mesh):
    return run(tmp_path_factory.mktemp("unbroken"), mesh(2))


def test_records_of_a_run(unbroken, mesh):
    result, told = unbroken
    assert (result.step, result.ended_early) == (CONFIG.steps, False) and result.compile_s > 0
    kinds = [(record["kind"], record["step"]) for record in told]
    steps = [("step", i) for i in range(1, 9)]
    assert kinds == [("start", 0), *steps[:4], ("validation", 4), *steps[4:], ("validation", 8)]
    for record in of_kind(told, "step"):
        assert record["tokens_per_s"] == pytest.approx(B * S / record["seconds"])
        assert 0 < record["load_entropy_worst"] <= record["load_entropy"] <= 1
        assert 1 <= record["load_max_over_mean"] <= 2  # top 2 of 4
        assert record["load_worst_layer"] in (0, 1) and record["dropped_rows"] == 0 and record["rounds"] >= 1
        assert not record["skipped"] and record["skipped_steps"] == 0 and record["peak_bytes"] > 0
        assert record["peak_of"] == "process" and record["tflops_per_device"] > 0
        whole = record["cross_entropy"] + CONFIG.model.balance_loss_coef * record["balance"]
        assert record["loss"] == pytest.approx(whole, rel=1e-5)
    assert losses(told)[8] < losses(told)[1] - 0.3

    # 20 sequences are asked for: two whole batches of 8.
    last = of_kind(told, "validation")[-1]
    assert (last["sequences"], last["predictions"]) == (16, 16 * (S - 1))
    ids = jnp.asarray(windows(1, 21).rows(0, 16))
    _, parts = loss(jax.device_get(result.state.params), ids, CONFIG.model)
    assert last["loss"] == pytest.approx(float(parts.cross_entropy), rel=1e-5)


def test_a_run_that_was_ended_goes_on_as_if_it_had_not_been(tmp_path, mesh, unbroken):
    ended, before = run(tmp_path, mesh(2), until=3)
    assert (ended.step, ended.ended_early) == (3, True)
    result, after = run(tmp_path, mesh(2))
    assert result.step == CONFIG.steps
    assert after[0]["step"] == 3 and after[0]["says"] == [f"going on from {tmp_path / loop.CHECKPOINTS / '3'}"]
    assert losses(before) | losses(after) == losses(unbroken[1])
    assert sorted([*losses(before), *losses(after)]) == list(range(1, 9))
    assert of_kind(after, "validation")[-1]["loss"] == of_kind(unbroken[1], "validation")[-1]["loss"]
    assert_same_weights(result.state, unbroken[0].state)

    again, nothing = run(tmp_path, mesh(2))  # finished
    assert of_kind(nothing, "step") == [] and again.step == CONFIG.steps and again.compile_s == 0
    assert of_kind(nothing, "validation") == of_kind(unbroken[1], "validation")[-1:]
    assert_same_weights(again.state, unbroken[0].state)


@pytest.mark.parametrize(("wanted", "count", "rows"), [(20, 21, [8, 8]), (7, 21, [4]), (1, 21, [4]), (64, 5, [4])])
def test_kv_coship_is_validated_on_pairs_for_each_replica(mesh, monkeypatch, wanted, count, rows):
    monkeypatch.setattr(loop, "make_evaluate", lambda *_: lambda params, ids: (seen.append(len(ids)), len(ids)))
    seen: list[int] = []
    coshipped = dataclasses.replace(CONFIG.model, kv_coship="contiguous")
    config = dataclasses.replace(CONFIG, model=coshipped, data_parallel=2, evaluate_sequences=wanted)
    monkeypatch.setattr(jax, "device_get", lambda told: [(1.0, n) for _, n in told])
    told = loop._validation(config, mesh(2, 2), windows(1, count))(None)
    assert seen == rows and told["sequences"] == sum(rows)
    with pytest.raises(ConfigError, match=rf"evaluate_sequences={wanted}: .*takes 4 sequences.*held-out text has 3 "):
        loop._validation(config, mesh(2, 2), windows(1, 3))


def test_a_run_goes_on_on_another_mesh(tmp_path, mesh, unbroken):
    run(tmp_path, mesh(2), until=3)
    result, after = run(tmp_path, mesh(1, 2))
    wanted = losses(unbroken[1])
    assert losses(after) == pytest.approx({step: wanted[step] for step in range(4, 9)}, abs=1e-5)
    assert result.step == CONFIG.steps


def test_a_step_that_is_not_finite_is_skipped_counted_and_placed(tmp_path, mesh):
    result, told = run(tmp_path, mesh(2), text=Poisoned(windows(), [4, 5, 7]))  # two in a row may be
    steps = of_kind(told, "step")
    assert [record["step"] for record in steps if record["skipped"]] == [4, 5, 7]
    assert [record["skipped_steps"] for record in steps] == [0, 0, 0, 1, 2, 2, 3, 3]
    assert ["where" in record for record in steps] == [record["skipped"] for record in steps]
    assert "embed" in steps[3]["where"]
    assert not math.isfinite(steps[3]["loss"]) and math.isfinite(steps[5]["loss"])
    assert steps[4]["learning_rate"] == steps[3]["learning_rate"] == steps[5]["learning_rate"]  # no update was made
    assert result.step == CONFIG.steps and int(result.state.skipped) == 3


def test_too_many_in_a_row_stop_the_run_and_the_last_good_checkpoint_is_named(tmp_path, mesh):
    told: list[loop.Record] = []
    text = Poisoned(windows(), range(4, 100))
    with pytest.raises(loop.TrainingStopped, match=r"step 6: 3 steps in a row were not finite .*embed.*") as stopped:
        loop.train(CONFIG, mesh(2), text, windows(1), tmp_path, facts=FACTS, on_record=told.append)
    assert [record["skipped"] for record in of_kind(told, "step")] == [False] * 3 + [True] * 3
    # Steps 2, 4 and 6 are due for a checkpoint, and none is written while steps are skipped.
    names = [file.name for file in (tmp_path / loop.CHECKPOINTS).iterdir()]
    assert len(names) == 1 and names[0] in str(stopped.value)
    assert "max_bad_steps=6 goes on past them, and a lower learning_rate makes" in str(stopped.value)
    _, after = run(tmp_path, mesh(2))  # with other data it gets past
    assert after[0]["step"] == 2 and sorted(losses(after)) == list(range(3, 9))
    assert not any(record["skipped"] for record in of_kind(after, "step"))


def test_the_layer_is_named_and_a_run_without_a_checkpoint_says_so(tmp_path, mesh, monkeypatch):
    def poison(params):
        params["layers"]["k"] = params["layers"]["k"].at[1].set(jnp.nan)

    poison_state(monkeypatch, poison)
    with pytest.raises(
        loop.TrainingStopped, match=r"step 3: 3 steps in a row .*layer 1.*there is no checkpoint yet"
    ) as stopped:
        run(tmp_path, mesh(2))
    assert str(stopped.value).endswith("; a lower learning_rate makes another run")  # more steps would not help
    assert [path for path in (tmp_path / loop.CHECKPOINTS).iterdir() if path.is_file()] == []


def poison_state(monkeypatch, poison):
    """Fresh states have parameters that `poison` has changed, where they lay."""
    fresh = loop.init_state

    def init_state(config, mesh):
        state = fresh(config, mesh)
        lies = jax.tree.map(lambda a: a.sharding, state.params)
        params = jax.tree.map(lambda a: a, state.params)
        poison(params)
        return state._replace(params=jax.device_put(params, lies))

    monkeypatch.setattr(loop, "init_state", init_state)


def test_the_watchdog_hears_what_comes_next(tmp_path, mesh):
    heard: list[str] = []

    class Listening:
        beat = staticmethod(heard.append)

    where: dict[str, Any] = {"facts": FACTS, "on_record": lambda _: None, "watchdog": Listening()}
    ends = lambda: heard[-1] == "step 4 wait"
    loop.train(CONFIG, mesh(2), windows(), windows(1), tmp_path, stop=ends, **where)
    step = lambda i: [f"step {i}", f"step {i} wait"]
    last = ["step 4 validation", "step 4 checkpoint", "last checkpoint"]
    wanted = [*step(1), *step(2), "step 2 checkpoint", *step(3), *step(4), *last]
    assert heard == ["restore", "compile", *wanted]


def test_expert_load():
    counts = np.array([[5, 5, 5, 5], [10, 10, 0, 0], [20, 0, 0, 0]])
    load = loop.expert_load(counts)
    assert load["load_entropy"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert load["load_entropy_worst"] == 0 and load["load_worst_layer"] == 2
    assert load["load_max_over_mean"] == 4
    assert loop.expert_load(np.zeros((2, 4), int))["load_entropy"] == 0


def test_a_device_that_tells_its_memory_is_believed(monkeypatch):
    class Device:
        def __init__(self, peak):
            self.peak = peak

        def memory_stats(self):
            return {"peak_bytes_in_use": self.peak}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device(5), Device(7)])
    assert loop.peak_memory() == (7, "device")
    monkeypatch.setattr(jax, "local_devices", lambda: [])
    peak, whose = loop.peak_memory()
    assert whose == "process" and 2**26 < peak < 2**36


def test_checkpoints_are_closed_whatever_happens(tmp_path, mesh, monkeypatch):
    closed = []

    class Closing(loop.Checkpoints):
        def close(self):
            closed.append(self)
            super().close()

    monkeypatch.setattr(loop, "Checkpoints", Closing)

    def interrupt(record):
        if record["kind"] == "step":
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        loop.train(CONFIG, mesh(2), windows(), windows(1), tmp_path, facts=FACTS, on_record=interrupt)
    assert len(closed) == 1


def test_all_processes_end_where_one_is_asked_to(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for other in (False, True):
        gathered = lambda mine, other=other: np.array([mine, other])
        monkeypatch.setattr(loop.multihost_utils, "process_allgather", gathered)
        assert [loop._anywhere(mine) for mine in (False, True)] == [other, True]
