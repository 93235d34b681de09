"""Checkpoints of a training run: written while it goes on, whole or not at all, read back onto any mesh.

orbax writes the arrays, one folder a step, and commits it by a rename when everything is in it; processes of a job
write and read their own shards. checkpoint.json (see manifest.py) beside the arrays says which run they are of and what
was written. So it is noticed when
  - a file of the newest checkpoint is missing, cut short or empty, or the JSON or orbax's own records have a byte
    changed, before anything is read from it;
  - any byte of the values has changed, or a value has come to another place, once they are on the devices: sums over
    them, taken before they left the devices that saved them, are compared. They are not cryptographic, and two changes
    that cancel each other, a chance of one in four billion, pass.
Not noticed is a change of what nothing is taken from: the empty rows that pad experts, orbax's notes for people.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jax_ep.config import ConfigError, refuse
from jax_ep.training import manifest
from jax_ep.training.config import TrainConfig
from jax_ep.training.step import TrainState, state_shapes, state_shardings

_ARRAYS = "state"  # of a checkpoint's folder, where the arrays lie
_UNFINISHED = ".orbax-checkpoint-tmp"
_ASIDE = ".broken"
_OURS = re.compile(rf"\d+(({re.escape(_UNFINISHED)}|{re.escape(_ASIDE)}).*)?")
_SPLIT_BYTES = 1 << 24  # of a shard that several devices hold, from which on each writes a part
_OTHER = "another folder"


class Restored(NamedTuple):
    """A state on its devices, and sentences about checkpoints that are not as they should be."""

    state: TrainState
    says: list[str]


class Checkpoints:
    """The checkpoints of one run, in a folder that all its processes share and no other run uses.

    Every process of a job makes one and calls the same methods in the same order. `close` it, also after an error: a
    save that is under way at the end of the process is lost otherwise.
    """

    def __init__(
        self, folder: str | os.PathLike[str], config: TrainConfig, mesh: Mesh, facts: Mapping[str, Any]
    ) -> None:
        """Makes `folder` where it is missing.

        Args:
          folder: <folder>/<step> will hold a checkpoint.
          config: of the run; the newest config.keep_checkpoints stay.
          mesh: that states are restored on.
          facts: of the data, JSON values: a checkpoint of other data is refused.

        Raises:
          ConfigError: a folder that holds something else, or cannot be written to.
        """
        self.folder = Path(folder).absolute()
        self._config, self._mesh, self._facts = config, mesh, manifest.as_json(facts)
        self._manager: ocp.CheckpointManager | None = None
        _hush_orbax()
        self._on_first(self._open)

    def newest(self) -> Path | None:
        """The newest checkpoint; that it is still whole is seen when it is restored."""
        steps = self._steps()
        return self.folder / str(steps[0]) if steps else None

    def save(self, state: TrainState) -> None:
        """Starts to write `state`, after what is still being written. When this returns, the state may be used up.

        Older checkpoints go when this one is whole.

        Raises:
          ConfigError: this or the save before could not be written; older checkpoints are as they were.
        """
        self.wait()
        step, flat = int(state.step), manifest.flatten(state)
        self._on_first(lambda: self._check(step, sum(a.nbytes for a in flat.values())))
        about = manifest.manifest(self._config, self._facts, flat)
        try:
            if self._manager is None:
                self._manager = _manager(self.folder, self._config.keep_checkpoints)
            args = ocp.args.Composite(**{_ARRAYS: ocp.args.PyTreeSave(flat, custom_metadata=about)})
            self._manager.save(step, args=args, force=True)
        except Exception as error:
            self._failed(error)

    def wait(self) -> None:
        """Until nothing is being written any more. Raises ConfigError where the last save could not be written."""
        try:
            if self._manager is not None:
                self._manager.wait_until_finished()
        except Exception as error:
            self._failed(error)

    def close(self) -> None:
        """`wait`, and ends what orbax keeps running."""
        self.wait()
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def restore(self) -> Restored | None:
        """The newest checkpoint that is whole, on this mesh, each shard read by the process that has it; None where
        there is none at all.

        It may have been written on a mesh of other sizes, with another shard_weights. One that is not whole is named in
        `says` with what is wrong with it and, once an older one has been read, renamed to <step>.broken, not deleted.

        Raises:
          ConfigError: it is of another model, optimiser or data; or there are checkpoints and none is whole.
        """
        self.wait()
        shapes = state_shapes(self._config, self._mesh)
        broken: dict[int, str] = {}
        for step in _same_everywhere(self._steps()):
            flat, wrong = self._read(step, manifest.flatten(shapes))
            if flat is not None:
                says = self._unfinished()
                for newer, why in broken.items():
                    says.append(f"{self.folder / str(newer)} is not whole: {why}; {self._set_aside(newer)}")
                leaves = [flat[name] for name in manifest.flatten(shapes)]
                return Restored(jax.tree.unflatten(jax.tree.structure(shapes), leaves), says)
            broken[step] = wrong
        if broken:
            said = "; ".join(f"{step}: {why}" for step, why in broken.items())
            refuse("folder", str(self.folder), f"holds checkpoints and none of them is whole ({said})", _OTHER)
        return None

    def _open(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            refuse("folder", str(self.folder), "is a file", _OTHER)
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.folder):
            pass
        strange = sorted(
            e.name
            for e in os.scandir(self.folder)
            if not e.name.startswith(".") and not (_OURS.fullmatch(e.name) and e.is_dir())
        )
        if strange:
            named = ", ".join(strange[:3]) + ", ..." * (len(strange) > 3)
            refuse("folder", str(self.folder), f"holds what is no checkpoint: {named}", _OTHER)

    def _check(self, step: int, size: int) -> None:
        """Refuses what would go wrong half way."""
        have = self._steps()
        if have and have[0] >= step:
            rule = f"holds a checkpoint of step {have[0]} and this run, at step {step}, did not go on from it"
            refuse("folder", str(self.folder), rule, _OTHER)
        disk = shutil.disk_usage(self.folder)
        if disk.total and disk.free < size:  # some file systems tell nothing: all zeros
            raise OSError(0, f"a checkpoint takes {size / 1e9:.3g} GB and {disk.free / 1e9:.3g} GB are free")

    def _read(self, step: int, shapes: manifest.Flat) -> tuple[manifest.Flat | None, str]:
        """The arrays of a checkpoint, or why it is not whole. All processes have the same answer."""
        folder, experts = self.folder / str(step) / _ARRAYS, self._config.model.moe.num_experts
        about, wrong = manifest.read(folder)
        if (wrong := _anywhere(wrong)) is not None:
            return None, wrong
        differences = manifest.differences(about, self._config, self._facts)
        if differences:
            refuse("folder", str(self.folder), f"is of another run: {'; '.join(differences)}", _OTHER)
        misfits = manifest.misfits(about, shapes, experts)
        if misfits:
            rule = f"was written by another version of the library: {', '.join(misfits)} differ"
            refuse("folder", str(self.folder), rule, _OTHER)
        lies = manifest.flatten(state_shardings(self._config, self._mesh))
        onto = {
            n: ocp.ArrayRestoreArgs(sharding=lies[n], global_shape=a.shape, strict=False) for n, a in shapes.items()
        }
        flat: manifest.Flat = {}
        try:
            flat = _handler().restore(epath.Path(folder), args=ocp.args.PyTreeRestore(item=shapes, restore_args=onto))
        except jax.errors.JaxRuntimeError:  # of the devices, not of the files
            raise
        except Exception as error:
            wrong = _why(error)
        if (wrong := _anywhere(wrong)) is not None:
            return None, wrong
        changed = manifest.changed(about, flat, experts)
        return (None, f"the values of {', '.join(changed)} have changed") if changed else (flat, "")

    def _steps(self) -> list[int]:
        """Of the checkpoints there are, the newest first."""
        return sorted((int(e.name) for e in os.scandir(self.folder) if e.name.isdecimal() and e.is_dir()), reverse=True)

    def _unfinished(self) -> list[str]:
        left = sorted(e.name for e in os.scandir(self.folder) if _UNFINISHED in e.name)
        return [f"{self.folder / name} was left unfinished; the next save removes it" for name in left]

    def _set_aside(self, step: int) -> str:
        name = f"{step}{_ASIDE}"
        taken = sum(e.name.startswith(name) for e in os.scandir(self.folder))
        name += f"-{taken + 1}" if taken else ""
        try:
            if jax.process_index() == 0:
                os.rename(self.folder / str(step), self.folder / name)
        except OSError as error:
            return f"it cannot be renamed: {error.strerror}"
        return f"it is now called {name}"

    def _failed(self, error: Exception) -> NoReturn:
        """Refuses after an error of a save. The next one starts afresh."""
        if isinstance(error, ConfigError):
            raise error
        manager, self._manager = self._manager, None
        if manager is not None:
            with contextlib.suppress(Exception):
                manager.close()
        self._refuse(_why(error), error)

    def _refuse(self, why: str, error: Exception | None) -> NoReturn:
        works = "one with room for it, that this user may write to and all processes share"
        try:
            refuse(
                "folder", str(self.folder), f"cannot be written to: {why}; older checkpoints are as they were", works
            )
        except ConfigError as refusal:
            raise refusal from error

    def _on_first(self, step: Callable[[], None]) -> None:
        """Runs a step in the first process; it fails in all where it fails there."""
        error: Exception | None = None
        if jax.process_index() == 0:
            try:
                step()
            except (ConfigError, OSError) as failed:
                error = failed
        told = _anywhere(None if error is None else _why(error))
        if isinstance(error, ConfigError):
            raise error
        if told is not None:
            self._refuse(told, error)


class _Handler(ocp.PyTreeCheckpointHandler):
    """orbax's, which writes checkpoint.json when all processes have written their arrays and before the commit."""

    about: manifest.Manifest | None = None

    def finalize(self, directory: epath.Path) -> None:
        super().finalize(directory)
        assert self.about is not None
        manifest.write(Path(directory), self.about)

    async def async_save(self, directory: Any, args: Any) -> Any:
        self.about = args.custom_metadata
        return await super().async_save(directory, args=ocp.args.PyTreeSave(args.item))


def _handler() -> _Handler:
    """Values are written as they are: they hardly compress, and a changed byte is then a changed value."""
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_SPLIT_BYTES)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return _Handler(use_compression=False, type_handler_registry=registry)


def _manager(folder: Path, keep: int) -> ocp.CheckpointManager:
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(_ARRAYS, ocp.args.PyTreeSave, _handler())
    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(keep), cleanup_tmp_directories=True
    )
    return ocp.CheckpointManager(folder, options=options, handler_registry=registry)


def _why(error: Exception) -> str:
    """An error in one line; of the operating system's, also where others came of it, what that says."""
    cause: BaseException | None = error
    while cause is not None:
        code = re.search(r"os_error_code='(\d+)'", str(cause))
        if code is not None:
            return os.strerror(int(code[1]))
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:200] or type(error).__name__


def _anywhere(wrong: str | None) -> str | None:
    """What is wrong in any process; all have the same answer to whether it is None."""
    if jax.process_count() == 1:
        return wrong
    failed = multihost_utils.process_allgather(np.bool_(wrong is not None))
    return wrong if wrong is not None or not failed.any() else f"process {int(failed.argmax())} could not do it"


def _same_everywhere(steps: list[int]) -> list[int]:
    """The first process' list, for a shared folder may be seen otherwise by another host for a while."""
    if jax.process_count() == 1:
        return steps
    count = int(multihost_utils.broadcast_one_to_all(np.int32(len(steps))))
    mine = np.resize(np.array([*steps, 0], np.int32), count)
    return multihost_utils.broadcast_one_to_all(mine).tolist() if count else []


@functools.cache  # once a process
def _hush_orbax() -> None:
    """When a write fails, orbax logs it several times with tracebacks, and each write still under way complains of an
    event loop that is gone. What failed is raised as well, and said in one line by `Checkpoints`; but in a job only
    when the other processes have come as far, for which orbax waits up to 20 minutes. So one line of it stays there.
    """
    logging.getLogger("absl").addFilter(_keep)
    before = sys.unraisablehook

    def hook(told: Any) -> None:
        if told.object is not None or str(told.exc_value) != "Event loop is closed":
            before(told)

    sys.unraisablehook = hook


def _keep(record: logging.LogRecord) -> bool:
    if "orbax" not in Path(record.pathname).parts:
        return True
    error = record.exc_info and record.exc_info[1]
    if jax.process_count() == 1 or record.threadName != "async_save" or not isinstance(error, Exception):
        return False
    why = _why(error)
    record.msg, record.args, record.exc_info = "a checkpoint cannot be written: %s", (why,), None
    return True
