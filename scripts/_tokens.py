"""Text to ids and ids to text as they come: a tokenizer.json, bytes, or neither."""

from __future__ import annotations

import json
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
    """Ids are the bytes of UTF-8: for models trained on bytes, and those with random weights and a vocabulary of 128
    (ASCII alone) to 256.
    """

    name = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def byte_tokenizer_file() -> bytes:
    """A tokenizer.json that the `tokenizers` package reads and whose ids are the bytes of UTF-8: byte-level BPE, as of
    GPT-2, without a merge.
    """
    whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": _byte_vocabulary(),
        "merges": [],
    }
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": whole,
        "post_processor": None,
        "decoder": whole,
        "model": model,
    }
    return (json.dumps(content, indent=1) + "\n").encode()


def _byte_vocabulary() -> dict[str, int]:
    """Byte-level BPE writes a byte as the character of its number where that prints, and the others in their order as
    those from 256 on (`bytes_to_unicode` of GPT-2's encoder.py).
    """
    prints = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return {chr(byte if byte in prints else next(others)): byte for byte in range(256)}


def _holds_bytes(path: Path) -> bool:
    """Whether a tokenizer.json is that of `byte_tokenizer_file`, which no package is needed to read."""
    try:
        return path.read_bytes() == byte_tokenizer_file()
    except OSError:
        return False


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
    if _holds_bytes(path):
        return ByteTokenizer()
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
