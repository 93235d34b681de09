"""Documents, their held-out part, and the order of windows: seeded, resumable anywhere, the same from any shard."""

from __future__ import annotations

import hashlib
import math
import random
import tracemalloc
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiny_models import TINY

from jax_ep import ConfigError
from jax_ep.training.config import TrainConfig
from jax_ep.training.data import Windows, batch, place_rows, read_documents, split, unigram_entropy

S = 8


def windows(count: int, seed: int = 0, tail: int = 3) -> Windows:
    """Windows whose first token says which they are, and a tail that makes up none."""
    tokens = np.arange(count * S + tail, dtype=np.uint8)
    tokens[: count * S : S] = np.arange(count)
    return Windows(tokens, S, seed)


def which(rows: np.ndarray) -> list[int]:
    return rows[:, 0].tolist()


def write(folder: Path, contents: dict[str, bytes]) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return [str(folder / name) for name in contents]


def some_files(count: int = 30) -> dict[str, bytes]:
    """Files of different lengths; what is in each is in no other."""
    return {f"{at}.txt": f"<{at}>".encode() * (20 + 7 * at % 50) for at in range(count)}


# The order.


def test_every_epoch_is_another_permutation():
    made = windows(20)
    epochs = [which(made.rows(20 * epoch, 20)) for epoch in range(5)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5
    assert which(windows(20, seed=1).rows(0, 20)) != epochs[0]
    assert which(windows(20).rows(0, 20)) == epochs[0]


def test_the_order_is_the_one_that_checkpoints_were_made_with():
    assert which(windows(10).rows(0, 20)) == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7, 5, 3, 7, 8, 2, 4, 1, 0, 6, 9]
    assert which(windows(10, seed=2**40).rows(10**9, 5)) == [1, 2, 3, 4, 0]


@pytest.mark.parametrize("seed", range(4))
def test_a_resume_anywhere_goes_on_with_exactly_the_rest(seed):
    print(f"seed {seed}")
    chance = random.Random(seed)
    made, total = windows(13, seed), 13 * 6
    whole = made.rows(0, total)
    assert whole.dtype == np.int32
    assert whole.shape == (total, S)
    position, pieces = 0, []
    while position < total:  # stopped and resumed, each time with another batch size and object
        count = min(chance.choice([1, 2, 5, 13, 20, 31]), total - position)
        pieces.append(windows(13, seed).rows(position, count))
        position += count
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    for epoch in range(6):
        assert sorted(which(whole[13 * epoch : 13 * (epoch + 1)])) == list(range(13))
    assert made.rows(5, 0).shape == (0, S)


def test_windows_are_pieces_of_the_text_and_do_not_overlap():
    tokens = np.random.default_rng(0).integers(0, 256, 5 * S + 4).astype(np.uint8)
    made = Windows(tokens, S)
    assert len(made) == 5
    rows = made.rows(0, 5)
    np.testing.assert_array_equal(sorted(rows.tolist()), sorted(tokens[: 5 * S].reshape(5, S).tolist()))


@pytest.mark.parametrize(
    "spec", [P(), P(None, ("data", "expert")), P(None, "data", "expert"), P("data", None, "expert")], ids=str
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_made_shard_by_shard_is_the_whole(mesh, spec, accumulation):
    if spec and spec[0] and accumulation == 1:
        spec = P(*reversed(spec[:2]), spec[2])
    config = TrainConfig(TINY["mixtral"], batch_size=16, sequence_length=S, steps=1, accumulation=accumulation)
    made = windows(20)
    whole = made.rows(12, 16).reshape(accumulation, 16 // accumulation, S)
    got = batch(made, 12, config, NamedSharding(mesh(4, 2), spec))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, whole)
    for shard in got.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])


def test_a_shard_makes_only_its_own_rows(mesh):
    made, asked = windows(20), []

    class Spy(Windows):
        def at(self, positions):
            asked.append(positions.ravel().tolist())
            return made.at(positions)

    place_rows(Spy(np.zeros(20 * S, np.uint8), S), 3, (16,), NamedSharding(mesh(4, 2), P(("data", "expert"))))
    assert sorted(asked) == [[at, at + 1] for at in range(3, 19, 2)]


# Documents.


def test_the_default_text_is_the_standard_library():
    documents = read_documents()
    train, validation, facts = split(documents, 128)
    total = len(train) + len(validation)
    assert total == sum(len(file.data) + 1 for file in documents.files) > 1_000_000
    assert 0.08 < len(validation) / total <= 0.1
    assert facts["files"] == len(documents.files) == np.sum(train == 0) + np.sum(validation == 0)
    assert "standard library" in documents.source


def test_held_out_are_whole_files(tmp_path):
    contents = some_files()
    train, validation, facts = split(read_documents(write(tmp_path, contents)), S)
    halves = [half.tobytes().split(b"\0") for half in (train, validation)]
    assert [half.pop() for half in halves] == [b"", b""]  # each ends with a separator
    assert sorted(halves[0] + halves[1]) == sorted(contents.values())
    assert 0.07 < len(validation) / (len(train) + len(validation)) <= 0.1
    assert facts["files"] == 30
    assert facts["held_out"].startswith(f"{len(halves[1])} of 30 files: ")
    assert facts["train_bytes"] == len(train)
    assert facts["validation_sha256"] == hashlib.sha256(validation.tobytes()).hexdigest()


def test_folders_and_the_order_of_files_change_nothing(tmp_path):
    contents = some_files() | {"same.txt": b"a" * 50}
    here = write(tmp_path / "here", contents) + write(tmp_path / "here" / "more", {"same.txt": b"b" * 60})
    there = write(tmp_path / "z" / "there", contents) + write(tmp_path / "zz", {"same.txt": b"b" * 60})
    random.Random(0).shuffle(there)
    first, second = (split(read_documents(paths), S) for paths in (here, there))
    np.testing.assert_array_equal(first.train, second.train)
    np.testing.assert_array_equal(first.validation, second.validation)
    assert first.facts == second.facts


def test_facts_tell_texts_and_what_is_held_out_apart(tmp_path):
    contents = some_files()
    documents = read_documents(write(tmp_path / "a", contents))
    contents["3.txt"] = contents["3.txt"][:-1] + b"!"
    changed = read_documents(write(tmp_path / "b", contents))
    facts = [split(documents, S).facts, split(changed, S).facts, split(documents, S, seed=1).facts]
    assert len({(each["train_sha256"], each["validation_sha256"]) for each in facts}) == 3
    assert facts[0]["held_out"] != facts[2]["held_out"]


def test_one_file_alone_is_cut_and_says_so(tmp_path):
    data = bytes(range(1, 201))
    train, validation, facts = split(read_documents(write(tmp_path, {"only.bin": data})), S)
    assert train.tobytes() == data[:181]
    assert validation.tobytes() == data[181:] + b"\0"
    assert facts["held_out"] == "the last tenth of only.bin"
    assert len(split(read_documents([str(tmp_path / "only.bin")]), 20).validation) == 20


def test_two_files_and_files_too_small_to_be_alone(tmp_path):
    two = split(read_documents(write(tmp_path / "two", {"a": b"a" * 90, "b": b"b" * 80})), S)
    assert two.validation.tobytes() == b"b" * 80 + b"\0"
    small = split(read_documents(write(tmp_path / "small", {"a": b"a" * 90, "b": b"b" * 80, "c": b"c" * 3})), S)
    assert small.validation.tobytes() == b"b" * 80 + b"\0ccc\0"


def test_equal_contents_count_once(tmp_path):
    paths = write(tmp_path, {"a": b"one text", "b": b"another text", "c": b"one text"})
    documents = read_documents([*paths, paths[1]])
    assert [file.name for file in documents.files] == ["a", "b"]
    assert documents.source == "2 files (a, b), 20 bytes"


def test_bytes_that_are_no_text_are_fine(tmp_path):
    data = bytes(range(1, 256)) * 2
    documents = read_documents(write(tmp_path, {"any.bin": data}))
    assert documents.files[0].data == data
    assert documents.source == "any.bin, 510 bytes"


REFUSED = {
    "no file": ([], S, ["data=[]", "at least one file"]),
    "missing": (["missing"], S, ["missing", "cannot be read: No such file", "standard library"]),
    "a folder": (["good", "folder"], S, ["folder", "is a folder", "FILE works"]),
    "empty": (["good", "empty"], S, ["empty", "is empty", "standard library"]),
    "byte 0": (["good", "utf16"], S, ["data='utf16'", "byte 0, at 1", "UTF-8 works"]),
    "validation": (
        ["good"],
        31,
        ["good, 300 bytes", "30 bytes are left for validation", "310 bytes", "sequence_length=30 w"],
    ),
    "training": (["x", "y", "z"], 160, ["x, y, z", "151 bytes are left for training", "sequence_length=151 work"]),
    "two files": (["good", "tiny"], S, ["good, tiny", "5 bytes are left for validation", "sequence_length=5 work"]),
    "next to nothing": (["tiny"], S, ["tiny", "0 bytes are left for validation", "80 bytes of text work"]),
    "no length": (["good"], 0, ["sequence_length=0", "at least 1"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_file_and_what_works(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    write(tmp_path, {"good": b"good" * 75, "empty": b"", "tiny": b"tiny", "utf16": "text".encode("utf-16-le")})
    write(tmp_path, {"x": b"x" * 100, "y": b"y" * 100, "z": b"z" * 150})
    paths, length, words = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        split(read_documents(paths), length)
    for word in words:
        assert word in str(refused.value)


def test_windows_refuse_what_fills_none():
    with pytest.raises(ConfigError, match="sequence_length=8: there are 7 tokens"):
        Windows(np.zeros(7, np.uint8), S)
    for first, count in ((-1, 2), (0, -1), (0.5, 2)):
        with pytest.raises(ConfigError, match="must be an integer of at least 0"):
            windows(4).rows(first, count)


def test_the_text_is_copied_once(tmp_path):
    size = 8 * 2**20
    data = np.random.default_rng(0).integers(1, 256, size).astype(np.uint8).tobytes()
    paths = write(tmp_path, {"a": data[: size // 2], "b": data[size // 2 :]})
    tracemalloc.start()
    try:
        documents = read_documents(paths)
        train, validation, _ = split(documents, S)
        Windows(train, 1024).rows(0, 2)
        unigram_entropy(validation)
        assert tracemalloc.get_traced_memory()[1] < 2.5 * size
    finally:
        tracemalloc.stop()


def test_unigram_entropy_in_nats():
    assert unigram_entropy(np.full(10, 7, np.uint8)) == 0
    assert math.isclose(unigram_entropy(np.tile(np.arange(4, dtype=np.uint8), 3 * 2**18)), math.log(4))
    skewed = np.array([0, 0, 0, 255], np.uint8)
    assert math.isclose(unigram_entropy(skewed), -0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert jax.numpy.isclose(unigram_entropy(np.arange(256, dtype=np.uint8)), math.log(256))
