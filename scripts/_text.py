"""Hidden states of real text, without downloading any.

Letters: B batch, S sequence, H hidden. The text's bytes pass through a seeded embedding.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from _common import UsageError
from jax_ep.training.data import read_documents

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
      ConfigError: missing, not a readable file, or empty.
    """
    documents = read_documents(None if path is None else [path], field="text")
    return Text(b"".join(file.data for file in documents.files), documents.source)


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
