"""Files from strangers: every lie is one clear error that names the file, and nothing of such a model is loaded."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest

from jax_ep import ConfigError
from jax_ep.models import from_pretrained, save_pretrained
from jax_ep.models import safetensors_io as files
from jax_ep.models.checkpoint import load_params
from jax_ep.models.families import config_from_hub

GOLDEN = Path(__file__).parent / "golden" / "mixtral"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DOWN = "model.layers.1.block_sparse_moe.experts.3.w2.weight"  # [32, 24] float32
NORM = "model.norm.weight"  # [32] float32, the last one in the file


@pytest.fixture
def single(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "hub")
    return tmp_path / "hub"


@pytest.fixture(scope="session")
def several_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    save_pretrained(from_pretrained(GOLDEN), folder, most_file_bytes=60_000)
    return folder


@pytest.fixture
def several(several_files, tmp_path):
    shutil.copytree(several_files, tmp_path / "hub")
    return tmp_path / "hub"


def refused(folder, *said):
    """Loading is refused in one line that says all of `said`, before a byte of any tensor is read."""
    config = config_from_hub(json.loads((GOLDEN / "config.json").read_text()))
    reads, touched = [], []
    real = files.TensorFile.read
    files.TensorFile.read = lambda self, *args: touched.append(args) or real(self, *args)
    try:
        with pytest.raises(ConfigError) as error:
            load_params(folder, config, "mixtral", reads=reads)
    finally:
        files.TensorFile.read = real
    message = str(error.value)
    for part in said:
        assert part in message
    assert "\n" not in message
    assert len(message) < 1500
    assert not reads
    assert not touched
    return message


def split(path):
    """A file's header and data."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:start]), raw[start:]


def join(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_the_untouched_files_load(single, several_files):
    from_pretrained(single)
    from_pretrained(several_files)


# The header's length.


@pytest.mark.parametrize("size", [0, 1, 7])
def test_files_too_short_for_a_length(single, size):
    (single / SINGLE).write_bytes(b"\1" * size)
    refused(single, SINGLE, f"{size} bytes", "truncated")


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, 10**8, 214_809])
def test_header_lengths_past_the_file(single, length):
    raw = (single / SINGLE).read_bytes()
    (single / SINGLE).write_bytes(length.to_bytes(8, "little") + raw[8:])
    refused(single, f"{SINGLE}.header_length={length}")


def test_header_longer_than_the_format_allows(single):
    """The file has that many bytes, so the length is no lie; it is not read all the same."""
    with open(single / SINGLE, "wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)
    refused(single, f"{SINGLE}.header_length=100000001", "allows 100000000")


@pytest.mark.parametrize("length", [0, 1, 100])
def test_header_lengths_that_cut_the_header(single, length):
    raw = (single / SINGLE).read_bytes()
    (single / SINGLE).write_bytes(length.to_bytes(8, "little") + raw[8:])
    refused(single, f"{SINGLE}.header", "JSON")


# The header.

HEADERS = {
    "not JSON": b"{not json}",
    "not UTF-8": b'{"\xff\xfe": 1}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "a list": b"[]",
    "a number": b"1",
    "nested without end": b'{"a":' * 50_000,
    "lists without end": b'{"a":' + b"[" * 100_000,
    "a number without end": b'{"a": ' + b"9" * 10_000 + b"}",
    "zeros": b"\0" * 64,
    "two objects": b"{}{}",
    "a name twice": b'{"a": 1, "a": 1}',
    "a key twice": b'{"a": {"dtype": "F32", "dtype": "F16", "shape": [], "data_offsets": [0, 4]}}',
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_headers_that_are_none(single, header):
    join(single / SINGLE, header, b"\0" * 64)
    refused(single, f"{SINGLE}.header")


@pytest.mark.parametrize("metadata", [1, [], {"format": 1}, None])
def test_metadata_that_is_no_texts(single, metadata):
    header, data = split(single / SINGLE)
    join(single / SINGLE, {**header, "__metadata__": metadata}, data)
    refused(single, SINGLE, "__metadata__")


ENTRIES = {
    "a number": 1,
    "a list": [],
    "nothing": {},
    "no dtype": {"dtype": ...},
    "no shape": {"shape": ...},
    "no offsets": {"data_offsets": ...},
    "something more": {"more": 1},
    "unknown dtype": {"dtype": "F31"},
    "dtype in small letters": {"dtype": "f32"},
    "dtype that is a number": {"dtype": 32},
    "dtype that is a list": {"dtype": ["F32"]},
    "half the dtype": {"dtype": "F16"},
    "twice the dtype": {"dtype": "F64"},
    "twice the shape": {"shape": [64, 24]},
    "half the shape": {"shape": [16, 24]},
    "no dimension": {"shape": []},
    "zeros": {"shape": [0, 24]},
    "negative sizes": {"shape": [-32, -24]},
    "a size that is a text": {"shape": ["32", 24]},
    "a size that is a fraction": {"shape": [32.0, 24]},
    "a size that is True": {"shape": [768, True]},
    "a size that is null": {"shape": [32, None]},
    "a shape that is a number": {"shape": 768},
    "sizes that overflow": {"shape": [2**62, 2**62, 2**62]},
    "a size past 64 bits": {"shape": [2**64 + 32, 24]},
    "infinity": {"shape": [float("inf"), 24]},
    "many dimensions": {"shape": [32, 24] + [1] * 1000},
    "turned offsets": {"data_offsets": [4096, 1024]},
    "negative offsets": {"data_offsets": [-3072, 0]},
    "three offsets": {"data_offsets": [0, 1, 2]},
    "one offset": {"data_offsets": [0]},
    "offsets that are fractions": {"data_offsets": [0.0, 3072.0]},
    "offsets that are an object": {"data_offsets": {"0": 1}},
    "offsets past 64 bits": {"data_offsets": [2**64, 2**64 + 3072]},
    "offsets past the file": {"data_offsets": [2**62, 2**62 + 3072]},
    "offsets of another": {"data_offsets": [0, 3072]},
    "offsets one earlier": {"data_offsets": "earlier"},
    "offsets one later": {"data_offsets": "later"},
}


@pytest.mark.parametrize("lie", ENTRIES.values(), ids=ENTRIES)
def test_entries_that_lie(single, lie):
    header, data = split(single / SINGLE)
    honest = header[DOWN]
    if isinstance(lie, dict) and isinstance(lie.get("data_offsets"), str):
        step = -1 if lie["data_offsets"] == "earlier" else 1
        lie = {"data_offsets": [offset + step for offset in honest["data_offsets"]]}
    if isinstance(lie, dict) and lie:
        lie = {key: value for key, value in {**honest, **lie}.items() if value is not ...}
    join(single / SINGLE, {**header, DOWN: lie}, data)
    message = refused(single, SINGLE)
    assert re.search(r"model\.safetensors\['[\w.]+'\]", message), message


def test_overlap_names_both(single):
    header, data = split(single / SINGLE)
    first, second = "lm_head.weight", "model.embed_tokens.weight"
    header[second]["data_offsets"] = header[first]["data_offsets"]
    join(single / SINGLE, header, data)
    refused(single, first, second, "overlap")


def test_bytes_that_are_no_tensors(single):
    header, data = split(single / SINGLE)
    join(single / SINGLE, header, data + b"\0")
    refused(single, SINGLE, "1 bytes after the last tensor")
    hole = {**header, NORM: {**header[NORM], "data_offsets": [o + 8 for o in header[NORM]["data_offsets"]]}}
    join(single / SINGLE, hole, data + b"\0" * 8)
    refused(single, SINGLE, NORM, "8 bytes before it")


@pytest.mark.parametrize("cut", [1, 128, 5000, 150_000])
def test_truncated_data(single, cut):
    header, data = split(single / SINGLE)
    join(single / SINGLE, header, data[:-cut])
    have = len(data) - cut
    first = min((e["data_offsets"], n) for n, e in header.items() if n[0] != "_" and e["data_offsets"][1] > have)[1]
    refused(single, SINGLE, repr(first), "truncated")


def test_truncated_while_it_is_read(single, monkeypatch):
    """What the header said has been true: the file shrinks afterwards."""
    real = files.TensorFile.read

    def shrinking(self, *args):
        os.truncate(single / SINGLE, 100_000)
        real(self, *args)

    monkeypatch.setattr(files.TensorFile, "read", shrinking)
    with pytest.raises(ConfigError, match=r"model\.safetensors\['.*'\].*truncated while"):
        from_pretrained(single)


def test_random_damage_is_refused_or_harmless(single):
    """A byte of the header changed: either refused, or what is claimed still holds. Seed 0."""
    raw, rng, refusals = (single / SINGLE).read_bytes(), random.Random(0), 0
    length = int.from_bytes(raw[:8], "little")
    for _ in range(400):
        at = rng.choice([rng.randrange(8), rng.randrange(8, 8 + length)])
        changed = raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
        (single / SINGLE).write_bytes(changed)
        try:
            with files.open_checkpoint(single) as checkpoint:
                ends = [(t.offset, t.offset + t.nbytes) for t in map(checkpoint.tensor, checkpoint.files)]
        except ConfigError:
            refusals += 1
            continue
        assert max(end for _, end in ends) == len(raw)
        assert all(begin >= 8 + length for begin, _ in ends)
    assert 200 < refusals < 400


# Tensors that do not fit the model.


def retold(folder, change):
    """The file with a changed header; `change` gets the entries and may return data to put behind the others."""
    header, data = split(folder / SINGLE)
    more = change(header) or b""
    join(folder / SINGLE, header, data + more)


def test_missing_tensor(single):
    header, data = split(single / SINGLE)
    begin, _ = header.pop(NORM)["data_offsets"]
    join(single / SINGLE, header, data[:begin])
    refused(single, NORM, "missing")


def test_extra_tensor(single):
    def add(header):
        at = header[NORM]["data_offsets"][1]
        header["model.extra.weight"] = {"dtype": "F32", "shape": [2], "data_offsets": [at, at + 8]}
        return b"\0" * 8

    retold(single, add)
    refused(single, "model.extra.weight", SINGLE)


@pytest.mark.parametrize("shape", [[24, 32], [768], [32, 24, 1], [1, 32, 24], [16, 48]])
def test_misshapen_tensor(single, shape):
    """As many bytes, so the file is sound."""
    retold(single, lambda header: header[DOWN].update(shape=shape))
    refused(single, f"{DOWN!r}].shape={shape}", "[32, 24]")


@pytest.mark.parametrize("dtype", ["I32", "U32"])
def test_wrongly_typed_tensor(single, dtype):
    """As many bytes, so the file is sound."""
    retold(single, lambda header: header[DOWN].update(dtype=dtype))
    refused(single, f"{DOWN!r}].dtype={dtype!r}")


@pytest.mark.parametrize(("dtype", "said"), [("F16", "float32"), ("BF16", "float32"), ("F8_E4M3", "parameters are")])
def test_tensor_of_another_dtype_than_the_config_says(single, dtype, said):
    """All of the file's bytes are accounted for: the tensor is the last one."""

    def change(header):
        begin, end = header[NORM]["data_offsets"]
        nbytes = 32 * (1 if dtype.startswith("F8") else 2)
        header[NORM].update(dtype=dtype, data_offsets=[begin, begin + nbytes])
        at = begin + nbytes
        header["filler"] = {"dtype": "U8", "shape": [end - at], "data_offsets": [at, end]}

    retold(single, change)
    header, data = split(single / SINGLE)
    begin, _ = header.pop("filler")["data_offsets"]
    join(single / SINGLE, header, data[:begin])
    refused(single, f"{NORM!r}].dtype={dtype!r}", said)


def test_a_model_of_other_sizes(single):
    config = config_from_hub(json.loads((GOLDEN / "config.json").read_text()) | {"num_hidden_layers": 1})
    with pytest.raises(ConfigError, match=r"model\.layers\.1\."):
        load_params(single, config, "mixtral")
    config = config_from_hub(json.loads((GOLDEN / "config.json").read_text()) | {"num_local_experts": 9})
    with pytest.raises(ConfigError, match=r"experts\.8\..*missing"):
        load_params(single, config, "mixtral")
    with pytest.raises(ConfigError, match="family"):
        load_params(single, config, "mixtral_8x7b")


# Which files.


def test_no_model(single, tmp_path):
    refused(tmp_path / "nowhere", "no such folder")
    refused(single / SINGLE, "no such folder")
    (single / SINGLE).unlink()
    refused(single, SINGLE)
    (single / "pytorch_model.bin").write_bytes(b"")
    refused(single, "other formats are not read")
    with pytest.raises(ConfigError, match=r"config\.json"):
        from_pretrained(tmp_path)


def test_two_models(several):
    shutil.copy(GOLDEN / SINGLE, several / SINGLE)
    refused(several, SINGLE, INDEX)


def test_an_index_of_one_file(single):
    """As some models on the hub have it."""
    header, _ = split(single / SINGLE)
    (single / INDEX).write_text(json.dumps({"weight_map": {name: SINGLE for name in header if name[0] != "_"}}))
    from_pretrained(single)


def shard_of(folder, tensor=DOWN):
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][tensor]


def test_missing_file(several):
    shard = shard_of(several)
    shard.unlink()
    refused(several, shard.name, "no such file")


LINKS = {
    "to a file outside": lambda shard, outside: outside / "elsewhere.safetensors",
    "to a file beside it": lambda shard, outside: Path("beside.safetensors"),
    "to nothing": lambda shard, outside: outside / "nothing",
    "to itself": lambda shard, outside: shard,
    "to a device": lambda shard, outside: Path("/dev/zero"),
}


@pytest.mark.parametrize("target", LINKS.values(), ids=LINKS)
@pytest.mark.parametrize("what", ["shard", "single", "index", "config"])
def test_links_are_refused(single, several_files, tmp_path, target, what):
    folder = single
    if what in ("shard", "index"):
        shutil.copytree(several_files, tmp_path / "several")
        folder = tmp_path / "several"
    path = {
        "shard": shard_of(several_files),
        "single": Path(SINGLE),
        "index": Path(INDEX),
        "config": Path("config.json"),
    }
    path = folder / path[what].name
    shutil.copy(path, tmp_path / "elsewhere.safetensors")
    path.rename(folder / "beside.safetensors") if target is LINKS["to a file beside it"] else path.unlink()
    path.symlink_to(target(path, tmp_path))
    if what == "config":
        with pytest.raises(ConfigError, match=r"config\.json.*is a link"):
            from_pretrained(folder)
    else:
        refused(folder, path.name, "is a link")


def test_what_is_no_file(several):
    shard = shard_of(several)
    shard.unlink()
    os.mkfifo(shard)  # nobody writes into it: opening it must not wait
    refused(several, shard.name, "regular file")
    shard.unlink()
    shard.mkdir()
    refused(several, shard.name, "regular file")


def test_the_hubs_cache(single, several_files, tmp_path):
    """snapshots/REVISION/name -> ../../blobs/HASH, and no other link there."""
    cache = tmp_path / "models--who--what"
    snapshot = cache / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for i, path in enumerate(sorted(several_files.iterdir())):
        shutil.copy(path, cache / "blobs" / f"hash{i}")
        (snapshot / path.name).symlink_to(f"../../blobs/hash{i}")
    from_pretrained(snapshot)
    (tmp_path / "link").symlink_to(snapshot)
    from_pretrained(tmp_path / "link")
    shard = shard_of(several_files).name
    (snapshot / shard).unlink()
    (snapshot / shard).symlink_to(several_files / shard)
    refused(snapshot, shard, "is a link")
    (snapshot / shard).unlink()
    (cache / "blobs" / "more").symlink_to(several_files / shard)  # a link to a link
    (snapshot / shard).symlink_to("../../blobs/more")
    refused(snapshot, shard, "is a link")


NAMES = [
    "../elsewhere.safetensors",
    "../hub/{shard}",
    "/etc/passwd",
    "{folder}/{shard}",
    "./{shard}",
    "below/{shard}",
    "..\\{shard}",
    "..",
    ".",
    "",
    "config.json",
    "{shard}\0",
    "{shard}\n",
    ".safetensors",
    None,
    1,
    ["{shard}"],
]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_an_index_that_names_what_it_must_not(several, tmp_path, name):
    shard = shard_of(several)
    shutil.copy(shard, tmp_path / "elsewhere.safetensors")
    (several / "below").mkdir()
    shutil.copy(shard, several / "below" / shard.name)
    index = json.loads((several / INDEX).read_text())
    told = name.replace("{folder}", str(several)).replace("{shard}", shard.name) if isinstance(name, str) else name
    index["weight_map"] = {n: told if file == shard.name else file for n, file in index["weight_map"].items()}
    (several / INDEX).write_text(json.dumps(index))
    refused(several, INDEX, "weight_map")


def test_an_index_that_disagrees_with_the_files(several):
    index = json.loads((several / INDEX).read_text())
    weight_map = index["weight_map"]
    shard, other = weight_map[DOWN], next(file for file in weight_map.values() if file != weight_map[DOWN])

    def told(**changes):
        new = {name: file for name, file in {**weight_map, **changes}.items() if file}
        (several / INDEX).write_text(json.dumps({**index, "weight_map": new}))

    told(**{DOWN: other})
    refused(several, DOWN, other)
    told(**{DOWN: None})
    refused(several, DOWN, shard, "index")
    told(**{"model.extra.weight": shard})
    refused(several, "model.extra.weight", shard, INDEX)
    told()
    from_pretrained(several)


def test_a_tensor_in_two_files(several):
    shard, norm = shard_of(several), shard_of(several, NORM)
    assert shard != norm
    header, data = split(shard)
    at = len(data)
    join(shard, {**header, NORM: {"dtype": "F32", "shape": [32], "data_offsets": [at, at + 128]}}, data + b"\0" * 128)
    refused(several, NORM, shard.name, norm.name)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b'{"a":1,"a":1}']
)
def test_an_index_that_is_none(several, content):
    (several / INDEX).write_bytes(content)
    refused(several, INDEX)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"model_type": "mixtral", "model_type": "olmoe"}'])
def test_a_config_that_is_none(single, content):
    (single / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        from_pretrained(single)


def test_names_from_files_do_not_flood_the_message(single):
    retold(single, lambda header: header.update({"x" * 50_000: header.pop(DOWN)}))
    refused(single, DOWN)
    retold(single, lambda header: header.update({DOWN: header[NORM], "y" * 50_000 + "\n\x1b[31m": header[NORM]}))
    refused(single)


def test_open_files_are_closed(several):
    before = len(os.listdir("/proc/self/fd"))
    shard_of(several, NORM).write_bytes(b"damaged!")
    for _ in range(3):
        refused(several)
    assert len(os.listdir("/proc/self/fd")) == before
