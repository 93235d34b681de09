"""Files of a folder replaced all together: written beside the old ones in a folder of their own, then moved over.

Whatever fails before or during the moves leaves the old files as they were. A process killed between two moves leaves
a folder that is refused when it is loaded, since the file that names the others goes first and comes last; the old and
the new files are then under `.saving-*`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SAVING = ".saving-"  # folders of unfinished updates begin so


class FolderUpdate:
    """One replacement of files in `folder`, which is made where missing.

    Attributes:
      folder: where the files shall be.
      new: where they are written until `commit`. `token` makes its name one of its own.
      state: in words, what became of the old files after an error.
    """

    def __init__(self, folder: Path, token: str) -> None:
        self.folder = folder
        self.new = folder / f"{SAVING}{token}"
        self.state = "the files in it are as they were"
        self._made: list[Path] = []

    def begin(self) -> None:
        """Makes the folders. Raises OSError where it cannot."""
        missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        for path in (*reversed(missing), self.new):
            path.mkdir()
            self._made.append(path)

    def create(self, name: str, content: bytes, size: int | None = None) -> None:
        """A new file that begins with `content` and has `size` bytes. Raises OSError."""
        with open(self.new / name, "xb") as file:
            file.write(content)
            file.truncate(size or len(content))
            file.flush()
            os.fsync(file.fileno())

    def commit(self, names: Collection[str], replaced: Callable[[str], bool], heads: Collection[str]) -> None:
        """Moves the new files over the old ones.

        Args:
          names: the new files.
          replaced: says of a name whether an old file that has it goes.
          heads: names without which the rest is nothing: they leave first and arrive last.

        Raises:
          OSError: with every old file back in its place.
        """
        old = self.new / "old"
        old.mkdir()
        leaving = [entry.name for entry in os.scandir(self.folder) if replaced(entry.name)]
        moves = [(self.folder / name, old / name) for name in sorted(leaving, key=lambda name: name not in heads)]
        moves += [(self.new / name, self.folder / name) for name in sorted(names, key=lambda name: name in heads)]
        begun: list[tuple[Path, Path]] = []
        try:
            for source, target in moves:
                if source.is_dir() and not source.is_symlink():
                    raise IsADirectoryError(0, f"{source} is a folder")
                begun.append((source, target))
                os.rename(source, target)
            _sync(self.folder)
        except BaseException:
            self._move_back(begun)
            raise
        shutil.rmtree(self.new, ignore_errors=True)

    def _move_back(self, begun: Sequence[tuple[Path, Path]]) -> None:
        """Undoes moves, of which the last may not have happened."""
        for source, target in reversed(begun):
            if os.path.lexists(target) and not os.path.lexists(source):
                try:
                    os.rename(target, source)
                except OSError:
                    self.state = f"old files that could not be moved back are in {self.new}"
                    self._made.clear()  # nothing is removed

    def abort(self) -> None:
        """Removes what `begin` and the writers made."""
        if self.new in self._made:
            shutil.rmtree(self.new, ignore_errors=True)
        for path in reversed(self._made):
            with contextlib.suppress(OSError):
                path.rmdir()


def _sync(folder: Path) -> None:
    """The folder's entries onto the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_at(fd: int, offset: int, array: np.ndarray[Any, Any]) -> None:
    """All bytes of a contiguous array into a file. Raises OSError."""
    view = array.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + (1 << 30)], offset + done)
