"""Text to ids and ids to text as they come: a tokenizer.json, bytes, or neither."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from _common import UsageError

TOKENIZER = "tokenizer.json"
_UNFINISHED = "\ufffd"  # what a decoder makes of bytes that are no whole character yet


class Tokenizer(Protocol):
    """What `TextStream` and the script ask of one."""

    name: str

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Ids are the bytes of UTF-8: for models with random weights and a vocabulary of 128 (ASCII alone) to 256."""

    name = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


class FileTokenizer:
    """A tokenizer.json, through the `tokenizers` package."""

    name = TOKENIZER

    def __init__(self, path: Path):
        try:
            import tokenizers
        except ImportError:
            raise UsageError(
                f"{path}: reading it needs tokenizers; pip install tokenizers works, and so does --ids without it"
            ) from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises Exception itself
            raise UsageError(f"{path}: cannot be read: {error}; --ids 1,2,3 works without it") from None
        self._tokenizer.no_padding()  # the file may ask for both, which would change the prompt
        self._tokenizer.no_truncation()

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def tokenizer_of(folder: Path, wanted: bool) -> Tokenizer | None:
    """The tokenizer beside a model's weights; None where there is none, or where only ids are given and the package
    that reads it is missing.

    Raises:
      UsageError: text has to be read (`wanted`) and there is nothing to read it with.
    """
    path = folder / TOKENIZER
    if not path.is_file():
        if wanted:
            raise UsageError(f"prompt: there is no {TOKENIZER} in {str(folder)!r} to read text with; --ids 1,2,3 works")
        return None
    try:
        return FileTokenizer(path)
    except UsageError:
        if wanted:
            raise
        return None


class TextStream:
    """The text of one sequence, a piece a token: characters appear once all their tokens are there."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._begin = self._shown = 0  # ids before _begin are settled; the text of those before _shown is out

    def add(self, token: int, last: bool = False) -> str:
        """The text that this token adds. Decoding starts a few ids back, as spaces depend on what stands before."""
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[self._begin : self._shown])
        after = self._tokenizer.decode(self._ids[self._begin :])
        if len(after) <= len(before) or (after.endswith(_UNFINISHED) and not last and self._waiting() < 4):
            return ""
        self._begin, self._shown = self._shown, len(self._ids)
        return after[len(before) :]

    def _waiting(self) -> int:
        return len(self._ids) - self._shown


def printable(text: str) -> str:
    """Text that moves no cursor and rings no bell; line ends stay."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
