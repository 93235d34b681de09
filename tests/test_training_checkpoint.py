"""Checkpoints of training: whole or not at all, back onto any mesh, and a clear line where something is wrong."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jax_ep import CommConfig, ConfigError, ModelConfig, MoEConfig, RouterConfig, make_mesh
from jax_ep.training import checkpoint, manifest
from jax_ep.training.checkpoint import Checkpoints
from jax_ep.training.config import TrainConfig
from jax_ep.training.step import TrainState, state_shapes, state_shardings

EXPERTS = 6  # 8 on 4 ranks
MOE = MoEConfig(16, 12, EXPERTS, RouterConfig(2, score_function="sigmoid", selection_bias=True), num_shared_experts=1)
MODEL = ModelConfig(vocab_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, moe=MOE)
CONFIG = TrainConfig(MODEL, 8, 8, 100, expert_parallel=4, data_parallel=2, bias_update_rate=0.01, keep_checkpoints=2)
ONE = dataclasses.replace(CONFIG, expert_parallel=1, data_parallel=1)  # device, so that no expert is padded
FACTS = {"hash": "5eed", "bytes": 4096}


def mesh_of(config: TrainConfig) -> jax.sharding.Mesh:
    size = config.expert_parallel * config.data_parallel
    return make_mesh(config.expert_parallel, config.data_parallel, jax.devices()[:size])


def checkpoints(folder: Path, config: TrainConfig = CONFIG, facts=FACTS) -> closing[Checkpoints]:
    return closing(Checkpoints(folder, config, mesh_of(config), facts))


@functools.cache
def layout(config: TrainConfig) -> tuple[manifest.Flat, manifest.Flat, jax.tree_util.PyTreeDef]:
    """Shapes and shardings of the state by name, and its structure."""
    shapes, lies = (of(config, mesh_of(config)) for of in (state_shapes, state_shardings))
    return manifest.flatten(shapes), manifest.flatten(lies), jax.tree.structure(shapes)


def values_of(step: int, config: TrainConfig = CONFIG) -> manifest.Flat:
    """A state of which every value tells its step and its place; what pads the experts is 0, as in training."""

    def values(name: str, like: jax.ShapeDtypeStruct) -> np.ndarray:
        if like.dtype == np.int32:
            return np.full(like.shape, 8 * step if name == "sequences" else step, np.int32)
        rows = (2, EXPERTS, *like.shape[2:]) if manifest.of_experts(name) else like.shape
        a = np.random.default_rng([step, *name.encode()]).normal(size=rows).astype(like.dtype)
        return np.pad(a, [(0, new - old) for new, old in zip(like.shape, rows, strict=True)])

    return {name: values(name, like) for name, like in layout(config)[0].items()}


def state_of(step: int, config: TrainConfig = CONFIG) -> TrainState:
    _, lies, structure = layout(config)
    return jax.tree.unflatten(structure, jax.device_put(list(values_of(step, config).values()), list(lies.values())))


def same(state: TrainState, step: int, config: TrainConfig = CONFIG) -> None:
    """`state` is that of `step`, laid out as `config` says."""
    _, lies, structure = layout(config)
    assert jax.tree.structure(state) == structure
    got = manifest.flatten(state)
    for name, a in values_of(step, config).items():
        assert got[name].sharding == lies[name], name
        assert got[name].dtype == a.dtype, name
        np.testing.assert_array_equal(np.asarray(got[name]), a, err_msg=name)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Whole checkpoints of steps 10 and 20."""
    folder = tmp_path_factory.mktemp("saved") / "made" / "here"
    with checkpoints(folder) as to:
        assert to.restore() is None
        assert to.newest() is None
        for step in (10, 20):
            to.save(state_of(step))
        to.wait()
        assert to.newest() == folder / "20"
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


@pytest.mark.parametrize(("experts", "data"), [(4, 2), (2, 1), (1, 1), (8, 1)])
def test_a_state_comes_back_on_any_mesh(saved, experts, data):
    sizes = {"expert_parallel": experts, "data_parallel": data}
    config = dataclasses.replace(CONFIG, **sizes, shard_weights=experts == 2)
    with checkpoints(saved, config) as of:
        state, says = of.restore()
    assert says == []
    same(state, 20, config)
    assert int(state.sequences) == 160


def test_what_does_not_change_what_is_learnt_may_differ(saved):
    moe = dataclasses.replace(MOE, comm=CommConfig("padded"), shard_sequence=False)
    model = dataclasses.replace(MODEL, moe=moe, recompute="full", max_position=128, stop_tokens=(0,))
    new = {"batch_size": 12, "accumulation": 3, "steps": 30, "max_bad_steps": 1, "keep_checkpoints": 1}
    new |= {"evaluate_every": 7, "evaluate_sequences": 8, "checkpoint_every": 9}
    with checkpoints(saved, dataclasses.replace(CONFIG, model=model, **new)) as of:
        same(of.restore().state, 20)


def test_a_checkpoint_of_another_run_is_refused(saved):
    """Each field is named with both values, and nothing is read or renamed."""
    moe = dataclasses.replace(MOE, intermediate_size=20, router=dataclasses.replace(MOE.router, top_k=1))
    model = dataclasses.replace(MODEL, moe=moe, tie_embeddings=True, balance_loss_coef=0.5)
    optimizer = dataclasses.replace(CONFIG.optimizer, learning_rate=0.5, clip_norm=None)
    new = {"seed": 3, "sequence_length": 4, "z_loss_coef": 0.25, "bias_update_rate": 0.0, "zero_experts": True}
    config, before = dataclasses.replace(CONFIG, model=model, optimizer=optimizer, **new), contents(saved)
    with (
        checkpoints(saved, config, {"hash": "0ther", "files": 3}) as of,
        pytest.raises(ConfigError, match=r"folder='.*/here': is of another run: ") as refusal,
    ):
        of.restore()
    for said in (
        "model.moe.intermediate_size is 12 in it and 20 here",
        "model.moe.router.top_k is 2 in it and 1 here",
        "model.tie_embeddings is False in it and True here",
        "model.balance_loss_coef is 0.0 in it and 0.5 here",
        "optimizer.learning_rate is 0.001 in it and 0.5 here",
        "optimizer.clip_norm is 1.0 in it and None here",
        "seed is 0 in it and 3 here",
        "sequence_length is 8 in it and 4 here",
        "z_loss_coef is 0.0 in it and 0.25 here",
        "bias_update_rate is 0.01 in it and 0.0 here",
        "zero_experts is False in it and True here",
        "data.hash is '5eed' in it and '0ther' here",
        "data.bytes is 4096 in it and absent here",
        "data.files is absent in it and 3 here",
    ):
        assert said in str(refusal.value)
    assert str(refusal.value).count(" in it and ") == 14
    assert "\n" not in str(refusal.value)
    assert contents(saved) == before


def test_arrays_of_another_version_are_refused(saved, monkeypatch):
    """Same config, another structure, as another release of the optimiser may have."""
    other = lambda *given: dict(zip(("a", "step"), state_shapes(*given)[:2], strict=True))
    monkeypatch.setattr(checkpoint, "state_shapes", other)
    with checkpoints(saved) as of, pytest.raises(ConfigError, match=r"another version of the library: a, opt_state"):
        of.restore()


def test_the_state_may_be_used_up_once_it_is_being_saved(tmp_path):
    """Devices that are the host share its memory: what is still being written must not change under it."""
    shape = (2, 8, 256, 64)  # large enough that the steps overtake the writing
    like = lambda *_: {"step": jax.ShapeDtypeStruct((), np.int32), "a": jax.ShapeDtypeStruct(shape, np.float32)}
    state = {"step": np.int32(0), "a": np.arange(np.prod(shape), dtype=np.float32).reshape(shape)}
    mesh = mesh_of(CONFIG)
    split = jax.NamedSharding(mesh, jax.P(("data",), "expert"))
    lies = {"step": jax.NamedSharding(mesh, jax.P()), "a": split}
    step = jax.jit(lambda s: jax.tree.map(lambda a: a + 1, s), donate_argnums=0, out_shardings=lies)
    state = step(jax.device_put(state, lies))
    with pytest.MonkeyPatch.context() as patched, checkpoints(tmp_path) as to:
        patched.setattr(checkpoint, "state_shapes", like)
        patched.setattr(checkpoint, "state_shardings", lambda *_: lies)
        for _ in range(3):
            want = np.array(state["a"], copy=True)
            to.save(_Step(state))
            for _ in range(5):
                state = step(state)
            jax.block_until_ready(state)
            restored = to.restore()
            np.testing.assert_array_equal(np.asarray(restored.state["a"]), want)
            for _ in range(2):  # what was read may be used up as well, though copies may have been read once
                restored = restored._replace(state=step(restored.state))
            np.testing.assert_array_equal(np.asarray(restored.state["a"]), want + 1 + 1)


class _Step(dict):
    """A state of two arrays, one of them its step."""

    step = property(lambda self: self["step"])


jax.tree_util.register_pytree_with_keys(
    _Step,
    lambda s: ([(jax.tree_util.DictKey(name), s[name]) for name in sorted(s)], tuple(sorted(s))),
    lambda names, leaves: dict(zip(names, leaves, strict=True)),
)


def test_the_newest_stay(folder):
    with checkpoints(folder) as to:
        for step in (30, 40, 50):
            to.save(state_of(step))
            assert (folder / f"{step - 10}").is_dir()  # not before the newer one is whole
        to.wait()
        assert sorted(os.listdir(folder)) == ["40", "50"]
        same(to.restore().state, 50)


def largest(arrays: Path) -> Path:
    return max((p for p in arrays.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def cut(path: Path, size: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * size)])


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 4
    path.write_bytes(data)


DAMAGE = {
    "no manifest": (lambda a: (a / "checkpoint.json").unlink(), "it has no checkpoint.json"),
    "half a manifest": (lambda a: cut(a / "checkpoint.json", 0.5), "checkpoint.json is damaged"),
    "an empty manifest": (lambda a: cut(a / "checkpoint.json", 0), "checkpoint.json is damaged"),
    "another manifest": (lambda a: (a / "checkpoint.json").write_text("[1]"), "checkpoint.json is damaged"),
    "a manifest changed": (lambda a: flip(a / "checkpoint.json", 0.4), "checkpoint.json is damaged"),
    "no names": (lambda a: (a / "_METADATA").unlink(), "_METADATA is missing"),
    "half the names": (lambda a: cut(a / "_METADATA", 0.5), r"_METADATA has \d+ bytes and was written with \d+"),
    "no tree": (lambda a: (a / "manifest.ocdbt").unlink(), "manifest.ocdbt is missing"),
    "the tree changed": (lambda a: flip(a / "manifest.ocdbt", 0.5), "manifest.ocdbt is damaged"),
    "half the values": (lambda a: cut(largest(a), 0.5), r"ocdbt.process_0/d/\w+ has \d+ bytes and was written with"),
    "empty values": (lambda a: cut(largest(a), 0), "ocdbt.process_0/d/.* has 0 bytes"),
    "no values": (lambda a: largest(a).unlink(), r"ocdbt.process_0/d/\w+ is missing"),
    "a folder for a file": (
        lambda a: ((p := largest(a)).unlink(), p.mkdir()),
        r"ocdbt\S+ (has \d+ bytes|cannot be read: Is a d)",
    ),
    "values changed": (lambda a: flip(largest(a), 0.3), r"ocdbt.process_0/d/\w+ is damaged"),
    "no arrays": (shutil.rmtree, "it has no checkpoint.json"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_the_next_older_is_taken_where_the_newest_is_not_whole(folder, how):
    damage, why = DAMAGE[how]
    damage(folder / "20" / "state")
    before = contents(folder / "20")
    with checkpoints(folder) as of:
        state, says = of.restore()
    same(state, 10)
    (said,) = says
    assert re.fullmatch(rf"{re.escape(str(folder))}/20 is not whole: {why}.*; it is now called 20\.broken", said)
    assert contents(folder / "20.broken") == before
    assert sorted(os.listdir(folder)) == ["10", "20.broken"]


def test_a_run_goes_on_after_broken_checkpoints(folder):
    """It writes the same steps again, and what is broken neither counts as a checkpoint nor is deleted."""
    for name in ("20.broken", "20.broken-2"):
        (folder / "20" / "state" / "checkpoint.json").unlink()
        with checkpoints(folder) as of:
            state, says = of.restore()
            assert says[0].endswith(f"it is now called {name}")
            same(state, 10)
            of.save(state_of(20))
    with checkpoints(folder) as of:
        for step in (30, 40):
            of.save(state_of(step))
        same(of.restore().state, 40)
    assert sorted(os.listdir(folder)) == ["20.broken", "20.broken-2", "30", "40"]


def test_what_cannot_be_renamed_is_said(folder, monkeypatch):
    (folder / "20" / "state" / "checkpoint.json").unlink()

    def rename(*_):
        raise PermissionError(13, "Permission denied")

    with checkpoints(folder) as of:
        with monkeypatch.context() as patched:
            patched.setattr(os, "rename", rename)
            state, says = of.restore()
        assert says[0].endswith("it cannot be renamed: Permission denied")
        same(state, 10)
        with pytest.raises(ConfigError, match="holds a checkpoint of step 20 and this run, at step 15, did not"):
            of.save(state_of(15))


def test_a_changed_value_of_a_large_file_is_noticed(tmp_path, monkeypatch):
    """Large files are not read to check them; what comes of them on the devices is. Any byte of any value."""
    monkeypatch.setattr(manifest, "_SMALL", -1)
    with checkpoints(tmp_path, ONE) as to:
        to.save(state_of(10, ONE))
        to.save(state_of(20, ONE))
    # Between values files hold notes of which some are never read: which byte is which differs from run to run.
    value = np.asarray(state_of(20, ONE).params["layers"]["moe"]["experts"]["up"]).tobytes()
    files = [file for file in (tmp_path / "20" / "state").rglob("*") if file.is_file() and value in file.read_bytes()]
    assert len(files) == 1, "values are written as they are, in one piece"
    rng, file = random.Random(0), files[0]
    kept = file.read_bytes()
    begin = kept.index(value)
    for at in rng.choices(range(begin, begin + len(value)), k=8):
        data = bytearray(kept)
        data[at] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        with checkpoints(tmp_path, ONE) as of:
            state, says = of.restore()
        same(state, 10, ONE)
        assert re.search(r"20 is not whole: the values of \S+ have changed; ", says[0]), at
        (tmp_path / "20.broken").rename(tmp_path / "20")
    file.write_bytes(kept)
    with checkpoints(tmp_path, ONE) as of:
        same(of.restore().state, 20, ONE)


def test_sums_know_places_and_no_padding():
    """Two experts exchanged have other sums; experts padded otherwise, or with anything, the same."""
    a = np.random.default_rng(0).normal(size=(2, 8, 4, 4)).astype(np.float32)
    a[:, EXPERTS:] = 0
    name, of = "a.experts.up", lambda a: int(manifest.sums({name: a}, EXPERTS)[0])
    padded = np.concatenate([a[:, :EXPERTS], np.full_like(a, np.nan)], axis=1)
    assert of(a) == of(a[:, :EXPERTS]) == of(padded)
    assert len({of(a), of(a[::-1]), of(a[:, [1, 0, *range(2, 8)]]), of(a[..., ::-1]), of(a.swapaxes(2, 3))}) == 5
    for dtype in ("float16", "int8", "bool"):
        few = (a[:, :, 0] > 0).astype(dtype)
        assert of(few[..., None]) != of(np.roll(few, 1, 0)[..., None])


def test_nothing_whole_is_refused(folder):
    """A run does not start anew where there was one."""
    (folder / "20" / "state" / "checkpoint.json").unlink()
    cut(largest(folder / "10" / "state"), 0.5)
    before = contents(folder)
    with (
        checkpoints(folder) as of,
        pytest.raises(ConfigError, match=r"none of them is whole \(20: it has no checkpoint.json; 10: ocdbt\S+ has"),
    ):
        of.restore()
    assert contents(folder) == before


def test_what_a_killed_run_left_unfinished(folder):
    """It is no checkpoint, is named, and goes when the next one is written."""
    left = folder / "30.orbax-checkpoint-tmp"
    shutil.copytree(folder / "20", left)
    with checkpoints(folder) as of:
        state, says = of.restore()
        assert says == [f"{left} was left unfinished; the next save removes it"]
        same(state, 20)
        of.save(state_of(30))
    assert sorted(os.listdir(folder)) == ["20", "30"]


def test_another_run_does_not_write_among_these(folder):
    with checkpoints(folder) as to, pytest.raises(ConfigError, match="holds a checkpoint of step 20 and this run, at"):
        to.save(state_of(20))


def test_a_full_disk(folder):
    """A limit on the size of files stands in for it. The error comes with the next call, and later saves work."""
    before, limits = contents(folder), resource.getrlimit(resource.RLIMIT_FSIZE)
    why = (
        rf"folder='{re.escape(str(folder))}': cannot be written to: File too large; older checkpoints are as they were"
    )
    with checkpoints(folder) as to:

        def save_and(then) -> None:
            to.save(state_of(30))
            then()

        for limit in (100, 30_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            try:
                with pytest.raises(ConfigError, match=why):
                    save_and(to.wait if limit == 100 else lambda: to.save(state_of(40)))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert contents(folder).items() >= before.items()
            assert to.newest() == folder / "20"
        to.save(state_of(50))
        same(to.restore().state, 50)
    assert sorted(os.listdir(folder)) == ["20", "50"]


def test_a_disk_without_room(folder, monkeypatch):
    before = contents(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=10**9, free=1000))
    rule = r"cannot be written to: a checkpoint takes \S+ GB and 1e-06 GB are free; older checkpoints are as they were"
    with checkpoints(folder) as to, pytest.raises(ConfigError, match=rule):
        to.save(state_of(30))
    assert contents(folder) == before


def test_folders_that_cannot_be(tmp_path, folder):
    """Works for root as well, whom no permission stops."""
    (tmp_path / "file").write_text("")
    cases = {
        tmp_path / "file": "is a file",
        tmp_path / "file" / "below": "cannot be written to: Not a directory",
        Path("/proc/self/jax_ep"): "cannot be written to: No such file or directory",
        Path("/proc/self/task"): "cannot be written to: |holds what is no checkpoint",
    }
    for path, why in cases.items():
        with pytest.raises(ConfigError, match=rf"folder='{path}': {why}"):
            Checkpoints(path, CONFIG, mesh_of(CONFIG), FACTS)
    (folder / "notes.txt").write_text("mine")
    (folder / "20k").mkdir()
    with pytest.raises(ConfigError, match=r"holds what is no checkpoint: 20k, notes\.txt"):
        Checkpoints(folder, CONFIG, mesh_of(CONFIG), FACTS)
    (folder / "notes.txt").unlink()
    (folder / "20k").rmdir()
    for name in ("4", "4.broken"):
        (folder / name).write_text("mine")
        with pytest.raises(ConfigError, match=rf"holds what is no checkpoint: {re.escape(name)}; "):
            Checkpoints(folder, CONFIG, mesh_of(CONFIG), FACTS)
        assert (folder / name).read_text() == "mine"
        (folder / name).unlink()
    with checkpoints(folder) as to:
        to.save(state_of(30))
        to.wait()
        gone = Path(shutil.move(folder, tmp_path / "gone"))
        folder.write_text("in the way")
        with pytest.raises(ConfigError, match="cannot be written to: Not a directory"):
            to.save(state_of(40))
    assert sorted(os.listdir(gone)) == ["20", "30"]


KILLED = """
import sys
from pathlib import Path
from test_training_checkpoint import ONE, checkpoints, state_of

with checkpoints(Path(sys.argv[1]), ONE) as to:
    restored = to.restore()
    step = 0 if restored is None else int(restored.state.step)
    while True:
        step += 1
        to.save(state_of(step, ONE))
"""


def test_a_run_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    """Runs that do nothing but save are killed, go on from what they left, and are killed again."""
    rng, reached = random.Random(time.time_ns()), {tmp_path / f"run{n}": 0 for n in range(3)}
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    for _ in range(2):
        runs = {f: subprocess.Popen([sys.executable, "-c", KILLED, str(f)], env=env) for f in reached}
        try:
            for folder, run in runs.items():
                until = time.monotonic() + 120
                while not folder.exists() or max(map(_step, os.listdir(folder)), default=0) < reached[folder] + 2:
                    assert run.poll() is None, "a run ended by itself"
                    assert time.monotonic() < until, "a run saves nothing"
                    time.sleep(0.01)
                time.sleep(rng.uniform(0, 0.1))
                run.send_signal(signal.SIGKILL)
                run.wait()
        finally:
            for run in runs.values():
                run.kill()
                run.wait()
        for folder in reached:
            with checkpoints(folder, ONE) as of:
                newest, (state, says) = of.newest(), of.restore()
            assert newest.name == str(int(state.step)), "what was committed is whole"
            assert all("left unfinished" in line for line in says)
            same(state, int(state.step), ONE)
            assert int(state.step) >= reached[folder] + 2
            reached[folder] = int(state.step)


def _step(name: str) -> int:
    return int(name) if name.isdecimal() else 0


def test_the_library_starts_without_orbax():
    run = "import sys, jax_ep; assert not {m for m in sys.modules if m.startswith('orbax')}"
    subprocess.run([sys.executable, "-c", run], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
