"""Hidden states of real text, without downloading any.

Letters: B batch, S sequence, H hidden. The text's bytes pass through a seeded embedding.
"""

from __future__ import annotations

import dataclasses
import sys
import sysconfig
from pathlib import Path

import numpy as np

from _common import UsageError

HISTORY = 4
RECIPE = (
    f"a byte's state is the sum of the seeded embeddings of the last {HISTORY} bytes of its sequence, "
    "each half as large as the one after it, scaled to unit mean square"
)


@dataclasses.dataclass(frozen=True)
class Text:
    """Bytes to work on, and a sentence on where they come from."""

    data: bytes
    source: str


def read_text(path: str | None) -> Text:
    """The bytes of a file; without one, those of the Python standard library's own modules, in order of name.

    Raises:
      UsageError: missing, not a readable file, or empty.
    """
    if path is None:
        return _standard_library()
    file = Path(path)
    if file.is_dir():
        raise UsageError(f"text={path!r}: is a folder, and one file is needed; --text {file / 'FILE'} works")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(f"text={path!r}: cannot be read: {error.strerror}; leave --text out for the default") from None
    if not data:
        raise UsageError(f"text={path!r}: is empty; leave --text out for the default")
    return Text(data, f"{file.name}, {len(data)} bytes")


def _standard_library() -> Text:
    folder = Path(sysconfig.get_paths()["stdlib"])
    try:
        files = sorted(file for file in folder.glob("*.py") if file.is_file())
        data = b"".join(file.read_bytes() for file in files)
    except OSError as error:
        raise UsageError(f"text: {folder} cannot be read: {error.strerror}; --text FILE works") from None
    if not data:
        raise UsageError(f"text: this Python has no standard library sources in {folder}; --text FILE works")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Text(data, f"source files of Python {version}'s standard library, {len(files)} files, {len(data)} bytes")


def sequences(text: Text, batch_size: int, sequence_length: int) -> np.ndarray:
    """B sequences of S bytes [B, S], taken at even distances through the text, so that they differ in kind.

    Raises:
      UsageError: the text has fewer than B * S bytes.
    """
    needed = batch_size * sequence_length
    data = np.frombuffer(text.data, np.uint8)
    if len(data) < needed:
        rule = f"is too short: {len(data)} bytes, and batch_size * sequence_length = {needed} are needed"
        raise UsageError(f"text ({text.source}) {rule}; a longer file or a smaller batch_size works")
    starts = np.linspace(0, len(data) - sequence_length, batch_size).astype(int)
    return data[starts[:, None] + np.arange(sequence_length)]  # [B, S]


def hidden_states(tokens: np.ndarray, hidden_size: int, seed: int = 0) -> np.ndarray:
    """RECIPE: bytes [B, S] -> [B, S, H] float32. The context makes equal bytes differ, as inside a model."""
    embedding = np.random.default_rng(seed).standard_normal((256, hidden_size)).astype(np.float32)
    states = embedding[tokens]  # [B, S, H]
    mixed = states.copy()
    for back in range(1, min(HISTORY, tokens.shape[1])):
        mixed[:, back:] += 0.5**back * states[:, :-back]
    return mixed / np.sqrt(np.square(mixed).mean(-1, keepdims=True))
