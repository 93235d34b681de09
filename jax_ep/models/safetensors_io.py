"""Safetensors files: what they claim is checked before a byte of data is read, and bytes are read where asked for.

The format (github.com/huggingface/safetensors): 8 bytes little-endian, the length of the header; the header, a JSON
object of name -> {"dtype", "shape", "data_offsets"}, padded with spaces; the bytes of the tensors, one after another
without holes or overlaps, little-endian, row-major. Larger models are split over several files, and
model.safetensors.index.json says under "weight_map" which file has which tensor.

Files come from strangers. Whatever a header, an index or a name says wrongly is a ConfigError that names the file and,
where there is one, the tensor.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_ep.config import DTYPES, refuse
from jax_ep.models.folder_files import HEADER_LIMIT, open_regular, parse_json, read_at, read_json, short, why
from jax_ep.models.folder_update import SAVING

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MOST_DIMENSIONS = 32
_LARGEST = 2**63 - 1
_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **{"I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64},
    "C64": 64,
}
_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
assert set(_CODES) == set(DTYPES)


class Tensor(NamedTuple):
    """Where a tensor lies: the format's name of its dtype, its shape, its first byte in the file, its bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def code_of(dtype: Any) -> str:
    """The format's name of one of the three dtypes of parameters."""
    return _CODES[jnp.dtype(dtype).name]


def dtype_of(code: str) -> np.dtype[Any] | None:
    """NumPy's dtype for the format's name; None for what no parameter is stored in."""
    return next((np.dtype(jnp.dtype(name)) for name, known in _CODES.items() if known == code), None)


# Headers.


def _sizes(value: Any) -> bool:
    """Whether a value of a header is a list of sizes."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= _LARGEST for n in value)


def _tensor(where: str, entry: Any, start: int) -> Tensor:
    """One entry of a header, checked by itself. `start`: where the data begins in the file."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        refuse(where, short(entry), "must have dtype, shape and data_offsets", '{"dtype": ..., ...}')
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        refuse(f"{where}.dtype", short(dtype), "is none of the format's", "BF16")
    if not _sizes(shape) or len(shape) > _MOST_DIMENSIONS:
        refuse(f"{where}.shape", short(shape), "must be a list of sizes", [2, 3])
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse(f"{where}.data_offsets", short(offsets), "must be [first byte, byte after the last]", [0, 24])
    bits = _BITS[dtype] * math.prod(shape)
    if bits != 8 * (offsets[1] - offsets[0]):
        rule = f"dtype {dtype} and shape {short(shape)} need {short(bits // 8)} bytes"
        refuse(f"{where}.data_offsets", offsets, rule, short([offsets[0], offsets[0] + bits // 8]))
    return Tensor(dtype, tuple(shape), start + offsets[0], offsets[1] - offsets[0])


class TensorFile:
    """One safetensors file, open, its header checked.

    Attributes:
      name: the file's name.
      tensors: name -> Tensor.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._fd = open_regular(folder, name)
        try:
            self.tensors = self._header()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                refuse(name, why(error), "the header cannot be read", "a whole file")
            raise

    def _header(self) -> dict[str, Tensor]:
        size = os.fstat(self._fd).st_size
        lead = np.empty(8, np.uint8)
        if read_at(self._fd, 0, lead) < 8:
            refuse(self.name, f"{size} bytes", "is truncated: the header's length takes 8", "8 bytes or more")
        length = int(lead.view("<u8")[0])
        if length > min(HEADER_LIMIT, size - 8):
            most = min(HEADER_LIMIT, size - 8)
            rule = f"the file has {size} bytes and the format allows {HEADER_LIMIT}: truncated, or no safetensors file"
            refuse(f"{self.name}.header_length", length, rule, most)
        raw = np.empty(length, np.uint8)
        read_at(self._fd, 8, raw)
        start = 8 + length
        header = parse_json(f"{self.name}.header", raw.tobytes())
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            refuse(f"{self.name}['__metadata__']", short(metadata), "must have texts alone", {"format": "pt"})
        tensors = {name: _tensor(self._where(name), entry, start) for name, entry in header.items()}
        self._check_layout(tensors, start, size)
        return tensors

    def _check_layout(self, tensors: Mapping[str, Tensor], start: int, size: int) -> None:
        """Every byte of the data belongs to exactly one tensor."""
        end, before = start, None
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
            where, at = f"{self._where(name)}.data_offsets", tensor.offset - start
            offsets, right = [at, at + tensor.nbytes], [end - start, end - start + tensor.nbytes]
            if tensor.offset < end:
                refuse(where, offsets, f"overlaps {short(before)}", right)
            if tensor.offset > end:
                refuse(where, offsets, f"leaves {tensor.offset - end} bytes before it that are no tensor's", right)
            end = tensor.offset + tensor.nbytes
            if end > size:
                refuse(where, offsets, f"the file is truncated: it has {size - start} bytes of data", "the whole file")
            before = name
        if end < size:
            rule = f"{size - end} bytes after the last tensor are no tensor's"
            refuse(self.name, f"{size} bytes", rule, f"{end} bytes")

    def _where(self, tensor: str) -> str:
        return f"{self.name}[{short(tensor)}]"

    def read(self, tensor: str, offset: int, out: np.ndarray[Any, Any]) -> None:
        """Fills the contiguous `out` with a tensor's bytes from its byte `offset` on."""
        found = self.tensors[tensor]
        assert 0 <= offset <= offset + out.nbytes <= found.nbytes
        try:
            got = read_at(self._fd, found.offset + offset, out)
        except OSError as error:
            refuse(self._where(tensor), f"{out.nbytes} bytes", f"cannot be read: {why(error)}", "a whole file")
        if got < out.nbytes:
            rule = "the file was truncated while it was read"
            refuse(self._where(tensor), f"{got} bytes", rule, f"{out.nbytes} bytes")

    def close(self) -> None:
        os.close(self._fd)


class Checkpoint(NamedTuple):
    """The open files of a model: tensor name -> the file that has it."""

    files: dict[str, TensorFile]

    def tensor(self, name: str) -> Tensor:
        return self.files[name].tensors[name]

    def where(self, name: str) -> str:
        """A tensor, as error messages call it."""
        return f"{self.files[name].name}[{short(name)}]"


@contextlib.contextmanager
def open_checkpoint(folder: Path) -> Iterator[Checkpoint]:
    """Opens model.safetensors, or the files of model.safetensors.index.json; checks all headers, and the index."""
    if not os.path.isdir(folder):
        refuse("folder", str(folder), "there is no such folder", "one with config.json and model.safetensors")
    try:
        there = set(os.listdir(folder))
    except OSError as error:
        refuse("folder", str(folder), f"cannot be read: {why(error)}", "a folder one may read")
    with contextlib.ExitStack() as stack:

        def opened(name: str) -> TensorFile:
            return stack.enter_context(contextlib.closing(TensorFile(folder, name)))

        if INDEX in there:
            weight_map = _weight_map(folder)
            names = sorted(set(weight_map.values()))
            if SINGLE in there and SINGLE not in names:
                rule = f"has {SINGLE} and {INDEX}, which does not name it: one of them is not this model's"
                refuse("folder", str(folder), rule, f"a folder without {SINGLE}, or without {INDEX}")
            missing = next((item for item in weight_map.items() if item[1] not in there), None)
            if missing:
                where = f"{INDEX}['weight_map'][{short(missing[0])}]"
                refuse(where, short(missing[1]), f"the folder has no such file: {folder}", names[0])
            files = {name: opened(name) for name in names}
            _check_index(weight_map, files)
            yield Checkpoint({name: files[file] for name, file in weight_map.items()})
        elif SINGLE in there:
            file = opened(SINGLE)
            yield Checkpoint(dict.fromkeys(file.tensors, file))
        else:
            refuse("folder", str(folder), _nothing_there(there), f"one with {SINGLE}, or with {INDEX} and its files")


def _nothing_there(there: set[str]) -> str:
    if any(name.startswith(SAVING) for name in there):
        left = next(name for name in sorted(there) if name.startswith(SAVING))
        return f"has no {SINGLE}; saving into it was interrupted, and the files are in {left}/"
    if any(name.endswith((".bin", ".pt", ".pth", ".gguf")) for name in there):
        return f"has no {SINGLE}; other formats are not read, as they can run code or are quantised"
    return f"has no {SINGLE} and no {INDEX}"


def _weight_map(folder: Path) -> dict[str, str]:
    """The index' tensor name -> file name; every file directly in the folder."""
    weight_map = read_json(folder, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        rule = "must say which file has which tensor"
        refuse(f"{INDEX}['weight_map']", short(weight_map), rule, {"lm_head.weight": SINGLE})
    for name, file in weight_map.items():
        where = f"{INDEX}['weight_map'][{short(name)}]"
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            refuse(where, short(file), "must be the name of a .safetensors file", SINGLE)
        if set(file) & set("/\\\0") or file.startswith("."):
            refuse(where, short(file), "names a file outside the folder; files beside the index alone are read", SINGLE)
    return weight_map


def _check_index(weight_map: Mapping[str, str], files: Mapping[str, TensorFile]) -> None:
    """The index and the files' headers say the same."""
    for tensor, name in weight_map.items():
        if tensor not in files[name].tensors:
            where = f"{INDEX}['weight_map'][{short(tensor)}]"
            refuse(where, name, "that file has no such tensor", "the file that has it")
    for file in files.values():
        for tensor in file.tensors:
            said = weight_map.get(tensor)
            if said != file.name:
                rule = "the index does not have it" if said is None else f"the index says it is in {said!r}"
                refuse(f"{file.name}[{short(tensor)}]", "there", rule, "absent")


# Writing.


class FilePlan(NamedTuple):
    """A file to be written: its name, its first bytes, the place of each tensor's first byte, and its size in bytes."""

    name: str
    header: bytes
    offsets: dict[str, int]
    size: int


def plan_files(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], most_bytes: int
) -> tuple[list[FilePlan], bytes | None]:
    """Splits tensors over files of at most `most_bytes` of data where a tensor is not larger itself.

    Args:
      tensors: name -> (the format's dtype, shape), in the order in which they fill the files.
      most_bytes: of a file.

    Returns:
      The files, and the index' content where there are several.
    """
    groups: list[dict[str, int]] = [{}]
    filled = 0
    for name, (code, shape) in tensors.items():
        nbytes = math.prod(shape) * _BITS[code] // 8
        if groups[-1] and filled + nbytes > most_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = nbytes
        filled += nbytes
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    plans = [_plan_file(name, group, tensors) for name, group in zip(names, groups)]
    if count == 1:
        return plans, None
    total = sum(sum(group.values()) for group in groups)
    weight_map = {name: file for file, group in zip(names, groups) for name in group}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return plans, (json.dumps(index, indent=2) + "\n").encode()


def _plan_file(file: str, sizes: Mapping[str, int], tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> FilePlan:
    """Wide dtypes first, then by name, as the hub's own writer does, so that every tensor is aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # the hub's readers insist on it
    at, begins = 0, {}
    for name in sorted(sizes, key=lambda name: (-_BITS[tensors[name][0]], name)):
        code, shape = tensors[name]
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + sizes[name]]}
        begins[name] = at
        at += sizes[name]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    lead = len(text).to_bytes(8, "little") + text
    return FilePlan(file, lead, {name: len(lead) + begin for name, begin in begins.items()}, len(lead) + at)
