"""Parameters from the hub's files onto meshes and back: every tensor, every bit, and no byte that is not needed.

tests/golden/README.md says where the files come from.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import CommConfig, ConfigError
from jax_ep.models import from_pretrained, save_pretrained
from jax_ep.models.checkpoint import load_params, save_params
from jax_ep.models.decoder import Decoder, decoder_shardings
from jax_ep.models.families import config_from_hub

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = ["mixtral", "olmoe", "qwen3_moe", "gpt_oss"]
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(jnp.bfloat16), "F16": np.dtype(np.float16)}
CODES = {dtype.name: code for code, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
families = pytest.mark.parametrize("family", FAMILIES)


# A reader and a writer that know the format and the hub's names, and nothing of the library.


def read_file(path):
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    assert header.pop("__metadata__") == {"format": "pt"}
    tensors = {}
    for name, entry in header.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(raw[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def read_folder(folder):
    """All tensors; through the index where there is one, which has to be right."""
    if not (folder / INDEX).exists():
        assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
        return read_file(folder / "model.safetensors")
    index = json.loads((folder / INDEX).read_text())
    files = {name: read_file(folder / name) for name in set(index["weight_map"].values())}
    assert {path.name for path in folder.glob("*.safetensors")} == set(files)
    found = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert sum(map(len, files.values())) == len(found)
    return found


def write_file(path, tensors):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        code = CODES[tensor.dtype.name]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(t.tobytes() for t in tensors.values()))


def write_folder(folder, family, tensors, files=1, **changes):
    """A checkpoint over several files, its tensors dealt out in turn, and its config.json."""
    folder.mkdir(parents=True)
    hub = json.loads((GOLDEN / family / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(hub))
    if files == 1:
        write_file(folder / "model.safetensors", tensors)
        return folder
    names = [f"part-{i}.safetensors" for i in range(files)]
    weight_map = {tensor: names[i % files] for i, tensor in enumerate(tensors)}
    for name in names:
        write_file(folder / name, {tensor: tensors[tensor] for tensor in tensors if weight_map[tensor] == name})
    total = sum(tensor.nbytes for tensor in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return folder


def golden(family):
    return read_file(GOLDEN / family / "model.safetensors")


def config_of(family, **changes):
    return config_from_hub(json.loads((GOLDEN / family / "config.json").read_text()), **changes)


def expected(family, t, c):
    """The parameters, by hand from the hub's names: matrices turned, layers and experts stacked."""

    def layers(name, turn=True):
        each = [t[f"model.layers.{y}.{name}"] for y in range(c.num_layers)]
        return np.stack([a.T if turn and a.ndim == 2 else a for a in each])

    def an_expert_each(name):
        return np.stack([layers(name.format(e)) for e in range(c.moe.num_experts)], axis=1)

    tree = {"attention_norm": layers("input_layernorm.weight"), "moe_norm": layers("post_attention_layernorm.weight")}
    for letter in "qkvo":
        tree[letter] = layers(f"self_attn.{letter}_proj.weight")
        if family == "gpt_oss":
            tree[f"{letter}_bias"] = layers(f"self_attn.{letter}_proj.bias")
        if family in ("olmoe", "qwen3_moe") and letter in "qk":
            tree[f"{letter}_norm"] = layers(f"self_attn.{letter}_norm.weight")
    if family == "gpt_oss":
        tree["sinks"] = layers("self_attn.sinks")
        router = {"kernel": layers("mlp.router.weight"), "bias": layers("mlp.router.bias")}
        fused, bias = (layers(f"mlp.experts.gate_up_proj{end}", turn=False) for end in ("", "_bias"))
        experts = {"gate": fused[..., ::2], "up": fused[..., 1::2], "down": layers("mlp.experts.down_proj", turn=False)}
        experts |= {"gate_bias": bias[..., ::2], "up_bias": bias[..., 1::2]}
        experts["down_bias"] = layers("mlp.experts.down_proj_bias", turn=False)
    else:
        block = "block_sparse_moe" if family == "mixtral" else "mlp"
        theirs = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        router = {"kernel": layers(f"{block}.gate.weight")}
        experts = {
            ours: an_expert_each(f"{block}.experts.{{}}.{their}.weight")
            for ours, their in zip(("gate", "up", "down"), theirs)
        }
    tree["moe"] = {"router": router, "experts": experts}
    whole = {"embed": t["model.embed_tokens.weight"], "final_norm": t["model.norm.weight"]}
    return {**whole, "layers": tree, "lm_head": t["lm_head.weight"].T}


def bits(array):
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def same(got, want):
    """Two trees have the same leaves, bit for bit."""
    got_leaves, want_leaves = (jax.tree_util.tree_flatten_with_path(tree) for tree in (got, want))
    assert got_leaves[1] == want_leaves[1]
    for (path, ours), (_, theirs) in zip(got_leaves[0], want_leaves[0]):
        assert ours.dtype == theirs.dtype, path
        assert np.array_equal(bits(np.asarray(ours)), bits(np.asarray(theirs))), path


def same_tensors(got, want):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert got[name].tobytes() == tensor.tobytes(), name


def padded(tree, experts):
    """Empty experts, all zeros, up to a number of them."""
    pad = lambda a: np.pad(a, [(0, 0), (0, experts - a.shape[1]), *[(0, 0)] * (a.ndim - 2)])
    moe = tree["layers"]["moe"]
    moe = {**moe, "experts": {name: pad(a) for name, a in moe["experts"].items()}}
    return {**tree, "layers": {**tree["layers"], "moe": moe}}


# Loading.


@families
@pytest.mark.parametrize("files", [1, 3])
def test_every_tensor_lies_where_its_name_says(family, files, mesh, tmp_path):
    tensors, config = golden(family), config_of(family)
    folder = write_folder(tmp_path / "hub", family, tensors, files)
    want = expected(family, tensors, config)
    same(load_params(folder, config, family), want)
    for ranks in (1, 2, 4, 8):
        params = load_params(folder, config, family, mesh(ranks))
        same(params, padded(want, config.moe.padded_experts(ranks)))
        jax.tree.map(
            lambda a, s: pytest.fail(str(s)) if a.sharding != s else None,
            params,
            decoder_shardings(config, mesh(ranks)),
        )
        shard = params["layers"]["moe"]["experts"]["up"].addressable_shards[-1]
        assert shard.data.shape[1] == config.moe.padded_experts(ranks) // ranks


def test_ranks_that_hold_empty_experts_alone(mesh, tmp_path):
    """Five experts on eight ranks: the last three ranks read none and hold zeros."""
    tensors = {n: t for n, t in golden("mixtral").items() if not re.search(r"experts\.[567]\.", n)}
    tensors |= {n: t[:5] for n, t in tensors.items() if n.endswith("gate.weight")}
    folder = write_folder(tmp_path / "hub", "mixtral", tensors, num_local_experts=5)
    config = config_from_hub(json.loads((folder / "config.json").read_text()))
    reads = []
    params = load_params(folder, config, "mixtral", mesh(8), reads=reads)
    same(params, padded(expected("mixtral", tensors, config), 8))
    assert {d for read in reads if ".experts." in read.tensor for d in read.devices} == set(range(5))
    save_params(params, config, "mixtral", tmp_path / "saved")
    same_tensors(read_folder(tmp_path / "saved"), tensors)


@families
@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (4, 2), (8, 1)])
def test_a_rank_reads_its_experts_only_and_once(family, ranks, replicas, mesh):
    tensors, config, reads = golden(family), config_of(family), []
    load_params(GOLDEN / family, config, family, mesh(ranks, replicas), reads=reads)
    own = config.moe.padded_experts(ranks) // ranks
    everyone = tuple(range(ranks * replicas))
    covered = {name: [] for name in tensors}
    for read in reads:
        covered[read.tensor].append((read.offset, read.offset + read.nbytes))
        if ".experts." not in read.tensor:
            assert sorted(read.devices) == list(everyone)
            continue
        rank = min(read.devices)
        assert sorted(read.devices) == [rank + ranks * replica for replica in range(replicas)]
        if family == "gpt_oss":  # all experts in one tensor: its rows
            row = tensors[read.tensor].nbytes // config.moe.num_experts
            assert (read.offset, read.nbytes) == (rank * own * row, own * row)
        else:
            assert int(re.search(r"experts\.(\d+)\.", read.tensor)[1]) // own == rank
            assert (read.offset, read.nbytes) == (0, tensors[read.tensor].nbytes)
    for name, spans in covered.items():  # all bytes, none twice
        ends = [0, *(end for _, end in sorted(spans))]
        assert [begin for begin, _ in sorted(spans)] == ends[:-1], name
        assert ends[-1] == tensors[name].nbytes, name


def test_what_the_kernel_reads_is_what_is_said(mesh, tmp_path, monkeypatch):
    """Every byte that a system call returned is a header's or in the list of reads."""
    counted, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: counted.append(preadv(*args)) or counted[-1])
    folder, reads = write_folder(tmp_path / "hub", "qwen3_moe", golden("qwen3_moe"), files=3), []
    load_params(folder, config_of("qwen3_moe"), "qwen3_moe", mesh(8), reads=reads)
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in folder.glob("*.safetensors"))
    index = (folder / INDEX).stat().st_size
    assert sum(counted) == headers + index + sum(read.nbytes for read in reads)


def test_dense_mode_has_every_expert_everywhere(mesh):
    config = config_of("mixtral", comm=CommConfig(mode="dense"))
    reads = []
    params = load_params(GOLDEN / "mixtral", config, "mixtral", mesh(4), reads=reads)
    same(params, expected("mixtral", golden("mixtral"), config))
    assert params["layers"]["moe"]["experts"]["up"].is_fully_replicated
    assert all(len(read.devices) == 4 for read in reads)
    assert len({read.tensor for read in reads}) == len(reads)


def test_devices_that_share_host_memory_do_not_share_updates(mesh):
    """On CPU, replicas are one piece of memory; a program that takes its argument over must not write into it."""
    config = config_of("mixtral")
    params = load_params(GOLDEN / "mixtral", config, "mixtral", mesh(4))
    want = golden("mixtral")["model.embed_tokens.weight"] + 1
    moved = jax.jit(lambda a: a + 1, donate_argnums=0)(params["embed"])
    for shard in moved.addressable_shards:
        assert np.array_equal(shard.data, want)


# Dtypes.


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_keeps_its_bits(family, dtype, mesh, tmp_path):
    tensors = {name: tensor.astype(dtype) for name, tensor in golden(family).items()}
    for name, tensor in tensors.items():  # infinities, a negative zero and odd NaNs are bits like others
        tensor.reshape(-1)[:3] = [np.inf, -np.inf, -0.0]
        bits(tensor).reshape(-1)[3] = np.array(np.nan, tensor.dtype).view(f"u{tensor.itemsize}") | 5
        assert np.shares_memory(bits(tensor), tensor), name
    folder = write_folder(tmp_path / "hub", family, tensors, dtype=dtype)
    config = config_from_hub(json.loads((folder / "config.json").read_text()))
    assert config.moe.param_dtype == dtype
    params = load_params(folder, config, family, mesh(4))
    same(params, expected(family, tensors, config))
    save_params(params, config, family, tmp_path / "saved", most_file_bytes=30_000)
    same_tensors(read_folder(tmp_path / "saved"), tensors)
    same(load_params(tmp_path / "saved", config, family, mesh(4)), params)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_conversion_on_the_way(family, stored, wanted, mesh, tmp_path):
    tensors = {name: tensor.astype(stored) for name, tensor in golden(family).items()}
    folder = write_folder(tmp_path / "hub", family, tensors, dtype=stored)
    decoder = from_pretrained(folder, mesh(2), dtype=wanted)
    assert (decoder.config.moe.dtype, decoder.config.moe.param_dtype) == (wanted, wanted)
    converted = {name: tensor.astype(wanted) for name, tensor in tensors.items()}
    same(decoder.params(), expected(family, converted, decoder.config))


def test_conversion_that_would_overflow_is_refused(mesh, tmp_path):
    tensors = golden("mixtral")
    name = "model.layers.1.block_sparse_moe.experts.6.w2.weight"
    tensors[name] = tensors[name] * np.float32(1e9)
    folder = write_folder(tmp_path / "hub", "mixtral", tensors)
    with pytest.raises(ConfigError, match=re.escape(name)) as refused:
        from_pretrained(folder, mesh(2), dtype="float16")
    assert "float16" in str(refused.value)
    from_pretrained(folder, mesh(2), dtype="bfloat16")


def test_dtype_that_is_none(mesh):
    for dtype in ("float64", "int8", "nonsense"):
        with pytest.raises(ConfigError, match="dtype"):
            load_params(GOLDEN / "mixtral", config_of("mixtral"), "mixtral", dtype=dtype)


def test_config_without_a_dtype_takes_the_files(tmp_path):
    tensors = {name: tensor.astype(jnp.bfloat16) for name, tensor in golden("mixtral").items()}
    folder = write_folder(tmp_path / "hub", "mixtral", tensors, dtype=None)
    decoder = from_pretrained(folder)
    assert decoder.config.moe.param_dtype == "bfloat16"
    same(decoder.params(), expected("mixtral", tensors, decoder.config))


# Saving.


@families
@pytest.mark.parametrize("most_file_bytes", [10**9, 40_000, 1])
def test_load_save_load(family, most_file_bytes, mesh, tmp_path):
    decoder = from_pretrained(GOLDEN / family, mesh(8))
    save_pretrained(decoder, tmp_path / "new" / "saved", most_file_bytes=most_file_bytes)
    tensors = read_folder(tmp_path / "new" / "saved")
    same_tensors(tensors, golden(family))
    count = len(list((tmp_path / "new" / "saved").glob("*.safetensors")))
    assert count == {10**9: 1, 1: len(tensors)}.get(most_file_bytes, count) and (count > 1) == (most_file_bytes < 10**9)
    again = from_pretrained(tmp_path / "new" / "saved", mesh(2))
    assert again.config == decoder.config
    assert again.family == family
    same(again.params(), from_pretrained(GOLDEN / family, mesh(2)).params())


def test_the_hubs_own_reader(mesh, tmp_path):
    safetensors = pytest.importorskip("safetensors", reason="an extra: pip install jax_ep[hub]")
    decoder = from_pretrained(GOLDEN / "gpt_oss", mesh(4))
    save_pretrained(decoder, tmp_path)
    want = golden("gpt_oss")
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(want)
        same_tensors({name: file.get_tensor(name) for name in want}, want)


def laid_out(params, mesh, where):
    """Parameters as a training loop may have them."""
    if where == "numpy":
        return jax.tree.map(np.asarray, params)
    if where == "one device":
        return jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), params)
    whole = NamedSharding(mesh(2, 2), P())
    params = jax.tree.map(lambda a: jax.device_put(a, whole), params)
    if where == "last axis split":
        split = lambda a: jax.device_put(a, NamedSharding(mesh(2, 2), P(*[None] * (a.ndim - 1), "data")))
        return jax.tree.map(split, params)
    layers = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh(2, 2), P("data"))), params["layers"])
    up = layers["moe"]["experts"]["up"]  # and one of the two that a fused tensor is made of in another way
    layers["moe"]["experts"]["up"] = jax.device_put(up, NamedSharding(mesh(2, 2), P("expert", "data")))
    return {**params, "layers": layers}


@pytest.mark.parametrize("where", ["numpy", "one device", "last axis split", "layers split"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_parameters_that_lie_otherwise(family, where, mesh, tmp_path):
    config = config_of(family)
    params = load_params(GOLDEN / family, config, family, mesh(8))  # qwen3_moe's twelve experts: padded
    save_params(laid_out(params, mesh, where), config, family, tmp_path)
    same_tensors(read_folder(tmp_path), golden(family))


def test_trees_that_do_not_fit_are_refused_and_nothing_is_written(mesh, tmp_path):
    config = config_of("olmoe")
    params = load_params(GOLDEN / "olmoe", config, "olmoe", mesh(2))
    layers = params["layers"]
    experts = layers["moe"]["experts"]
    half, more = {n: a[:, :4] for n, a in experts.items()}, {**experts, "up": jnp.concatenate([experts["up"]] * 2, 1)}
    with_experts = lambda new: {**params, "layers": {**layers, "moe": {**layers["moe"], "experts": new}}}
    trees = {
        "lm_head": {name: value for name, value in params.items() if name != "lm_head"},
        "layers.extra": {**params, "layers": {**layers, "extra": layers["q"]}},
        "layers.k": {**params, "layers": {**layers, "k": layers["q"][:, :5]}},
        "embed": {**params, "embed": params["embed"].astype(jnp.bfloat16)},
        "layers.moe.experts.": with_experts(half),
        "layers.moe.experts.down": with_experts(more),
    }
    for name, tree in trees.items():
        with pytest.raises(ConfigError, match=re.escape(name)):
            save_params(tree, config, "olmoe", tmp_path / "saved")
    with pytest.raises(ConfigError, match="most_file_bytes"):
        save_params(params, config, "olmoe", tmp_path / "saved", most_file_bytes=0)
    with pytest.raises(ConfigError, match="mixtral"):
        save_params(params, config, "mixtral", tmp_path / "saved")
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match="family"):
        save_pretrained(decoder, tmp_path / "saved")
    assert not list(tmp_path.iterdir())
    save_pretrained(decoder, tmp_path / "saved", "olmoe")
    same(from_pretrained(tmp_path / "saved").params(), decoder.params())


# What was there before.


def contents(folder):
    """Every file below a folder: bytes, or where it points to."""
    paths = sorted(folder.rglob("*"))
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in paths
        if path.is_symlink() or path.is_file()
    }


def test_an_older_model_makes_way_and_the_rest_stays(mesh, tmp_path):
    decoder, folder = from_pretrained(GOLDEN / "mixtral", mesh(2)), tmp_path / "saved"
    save_pretrained(decoder, folder, most_file_bytes=20_000)
    assert len(list(folder.iterdir())) > 10
    (folder / "tokenizer.json").write_text("{}")
    other = from_pretrained(GOLDEN / "gpt_oss", mesh(2))
    save_pretrained(other, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    same_tensors(read_folder(folder), golden("gpt_oss"))
    save_pretrained(decoder, folder, most_file_bytes=100_000)
    same_tensors(read_folder(folder), golden("mixtral"))
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert from_pretrained(folder).family == "mixtral"


def test_a_linked_file_is_replaced_and_what_it_points_to_is_not(tmp_path):
    shutil.copytree(GOLDEN / "mixtral", tmp_path / "real")
    before = contents(tmp_path / "real")
    (tmp_path / "saved").mkdir()
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "saved" / name).symlink_to(tmp_path / "real" / name)
    save_pretrained(from_pretrained(tmp_path / "real"), tmp_path / "saved")
    assert contents(tmp_path / "real") == before
    assert not any(path.is_symlink() for path in (tmp_path / "saved").iterdir())


@pytest.fixture
def old_model(tmp_path):
    """A folder with a model in several files, and what is in it."""
    folder = tmp_path / "saved"
    save_pretrained(from_pretrained(GOLDEN / "olmoe"), folder, most_file_bytes=60_000)
    (folder / "tokenizer.json").write_text("{}")
    return folder, contents(folder)


def test_a_full_disk_leaves_the_old_files(old_model, tmp_path):
    """A limit on the size of files stands in for it: the kernel refuses to write past it."""
    folder, before = old_model
    decoder = from_pretrained(GOLDEN / "mixtral")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (1000, 100_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with pytest.raises(ConfigError, match=r"cannot be written to: File too large.*as they were"):
                save_pretrained(decoder, folder)
            with pytest.raises(ConfigError, match=r"cannot be written to"):
                save_pretrained(decoder, tmp_path / "new" / "folder")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert contents(folder) == before
        assert not (tmp_path / "new").exists()
    same(from_pretrained(folder).params(), from_pretrained(GOLDEN / "olmoe").params())


@pytest.mark.parametrize("call", ["pwrite", "fsync", "mkdir", "rename"])
def test_an_error_at_any_call_leaves_the_old_files(old_model, call, monkeypatch):
    """Each kind of call fails the first, second, ... time, until saving no longer makes as many."""
    folder, before = old_model
    decoder, real = from_pretrained(GOLDEN / "mixtral"), getattr(os, call)
    failed_at = 0
    while True:
        left = failed_at

        def failing(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == -1:
                raise PermissionError(13, "Permission denied")
            return real(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(os, call, failing)
            try:
                save_pretrained(decoder, folder, most_file_bytes=150_000)
            except ConfigError as refusal:
                assert "Permission denied" in str(refusal)  # noqa: PT017
            else:
                break
        assert contents(folder) == before, f"{call} number {failed_at}"
        failed_at += 1 if failed_at < 8 else 20
    assert failed_at >= (1 if call == "mkdir" else 3)
    same_tensors(read_folder(folder), golden("mixtral"))


def test_old_files_that_cannot_be_moved_back_are_not_lost(old_model, monkeypatch):
    """The second rename fails, and every one after it: what was moved stays where the message says."""
    folder, before = old_model
    decoder, real, moved = from_pretrained(GOLDEN / "mixtral"), os.rename, []

    def failing(source, target):
        if moved:
            raise OSError(5, "Input/output error")
        moved.append(source)
        real(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(ConfigError, match=r"could not be moved back are in .*\.saving-"):
        save_pretrained(decoder, folder)
    after = contents(folder)
    assert moved == [folder / INDEX]
    (kept,) = [name for name in after if name.endswith(f"old/{INDEX}")]
    assert after[kept] == before[INDEX]
    assert {name: after[name] for name in before if name != INDEX} == {n: b for n, b in before.items() if n != INDEX}
    with pytest.raises(ConfigError, match=r"saving into it was interrupted.*\.saving-"):
        from_pretrained(folder)


def test_an_interruption_leaves_the_old_files(old_model, monkeypatch):
    folder, before = old_model
    decoder, real = from_pretrained(GOLDEN / "mixtral"), os.rename

    def interrupted(source, target):
        real(source, target)
        if target == folder / "config.json":
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(decoder, folder)
    assert contents(folder) == before


def test_folders_that_cannot_be(tmp_path):
    decoder = from_pretrained(GOLDEN / "mixtral")
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="cannot be written to"):
            save_pretrained(decoder, folder)
    (tmp_path / "odd" / "model.safetensors").mkdir(parents=True)
    (tmp_path / "odd" / "model.safetensors" / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="is a folder"):
        save_pretrained(decoder, tmp_path / "odd")
    assert contents(tmp_path) == {"file": b"mine", "odd/model.safetensors/mine": b"mine"}
