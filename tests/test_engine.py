"""Generation: any batch on any mesh, sampling, stopping, streaming, and the cache. Families: test_greedy.py."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import TINY, VOCAB, with_comm

from jax_ep import CommConfig, ConfigError, make_mesh
from jax_ep.engine import Engine, Speed, Token
from jax_ep.models.cache import cache_shardings, forward_cached, init_cache
from jax_ep.models.decoder import Decoder, decoder_shapes, decoder_shardings, forward, init_decoder
from jax_ep.sampling import Sampling, sample, settings_of

PROMPTS = [[5, 17, 80], [9] * 3 + [44, 2, 61, 7, 30, 11, 90, 3], [33]]
PATHS = {"packed": CommConfig(), "dense": CommConfig(mode="dense")}
run_forward = jax.jit(forward, static_argnames=("config", "mesh"))
run_cached = jax.jit(forward_cached, static_argnames=("config", "mesh", "span", "last_only"), donate_argnames="cache")


@functools.cache
def params_of(family: str) -> Any:
    return init_decoder(TINY[family], jax.random.key(1))


@functools.cache
def engine_of(family: str, path: str, ranks: int) -> Engine:
    mesh = None if ranks == 1 else make_mesh(ranks)
    return Engine(Decoder(with_comm(TINY[family], PATHS[path]), mesh, params=params_of(family)))


def test_a_batch_of_any_size_on_any_mesh_is_what_each_prompt_gives_alone():
    alone = engine_of("qwen3_moe", "packed", 1)
    prompts = [[5, 17, 80], [1, 2, 3, 4], [70] * 9, [8, 9, 10], [4, 4, 33]]
    sampling = Sampling(max_new_tokens=6)
    want = [alone.generate([prompt], sampling).tokens[0] for prompt in prompts]
    on_mesh = Engine(Decoder(TINY["qwen3_moe"], make_mesh(expert=2, data=2), params=params_of("qwen3_moe")))
    assert on_mesh.generate(prompts, sampling).tokens == want  # five on four devices
    assert on_mesh.generate(prompts[3:4], sampling).tokens == want[3:4]  # one on four


def test_draws_depend_on_the_seed_and_not_on_the_batch_or_the_mesh():
    engine = engine_of("mixtral", "packed", 1)
    sampling = Sampling(max_new_tokens=12, temperature=0.8, top_p=0.9, seed=40)
    together = engine.generate(PROMPTS, sampling).tokens
    assert engine.generate(PROMPTS, sampling).tokens == together
    assert engine.generate(PROMPTS, dataclasses.replace(sampling, seed=1)).tokens != together
    assert engine_of("mixtral", "packed", 4).generate(PROMPTS, sampling).tokens == together
    assert engine.generate(PROMPTS[1:2], dataclasses.replace(sampling, seed=41)).tokens == together[1:2]
    other_order = [dataclasses.replace(sampling, seed=42), Sampling(max_new_tokens=3), sampling]
    got = engine.generate([PROMPTS[2], PROMPTS[1], PROMPTS[0]], other_order).tokens
    assert (got[0], got[2]) == (together[2], together[0])
    assert got[1] == engine.generate([PROMPTS[1]], Sampling(max_new_tokens=3)).tokens[0]


def test_sampling_has_the_distribution_it_says():
    """4000 sequences that draw once each: frequencies of a temperature, and of what a top-p leaves."""
    rows, probs = 4000, np.array([0.5, 0.3, 0.15, 0.05], np.float32)
    logits = jnp.broadcast_to(jnp.log(probs), (rows, 4))
    counts = jnp.zeros(rows, jnp.int32)
    run = jax.jit(sample, static_argnames=("draws", "nucleus"))

    def frequencies(**fields: Any) -> np.ndarray:
        settings = settings_of([Sampling(seed=i, **fields) for i in range(rows)], rows, ())
        tokens = run(logits, settings, counts, nucleus=fields.get("top_p", 1) < 1)
        return np.bincount(tokens, minlength=4) / rows

    assert np.abs(frequencies(temperature=1.0) - probs).max() < 0.03
    flat = probs**0.5 / (probs**0.5).sum()
    assert np.abs(frequencies(temperature=2.0) - flat).max() < 0.03
    cut = frequencies(temperature=1.0, top_p=0.7)
    assert cut[2:].tolist() == [0, 0] and abs(cut[0] - 0.625) < 0.03
    assert frequencies(temperature=1.0, top_p=0.01).tolist() == [1, 0, 0, 0]
    assert frequencies(temperature=0.0).tolist() == [1, 0, 0, 0]
    assert frequencies(temperature=1e-4).tolist() == [1, 0, 0, 0]


def test_unneeded_work_is_left_out_without_a_difference():
    logits = jax.random.normal(jax.random.key(0), (8, 50))
    settings = settings_of([Sampling(temperature=0.0 if i % 2 else 0.7, seed=i) for i in range(8)], 8, ())
    counts = jnp.arange(8)
    got = sample(logits, settings, counts)
    assert np.array_equal(got, sample(logits, settings, counts, nucleus=False))
    greedy = settings._replace(temperatures=jnp.zeros(8))
    assert np.array_equal(sample(logits, greedy, counts), sample(logits, greedy, counts, draws=False))


def test_stop_tokens_end_a_sequence_and_no_other():
    engine = engine_of("mixtral", "packed", 1)
    tokens = engine.generate(PROMPTS, Sampling(max_new_tokens=12)).tokens
    stop = tokens[0][4]
    first = [sequence.index(stop) if stop in sequence else None for sequence in tokens]
    stopped = engine.generate(PROMPTS, Sampling(max_new_tokens=12, stop_tokens=(95, stop)))
    assert first[0] is not None
    for i, at in enumerate(first):
        assert stopped.tokens[i] == (tokens[i] if at is None else tokens[i][: at + 1])
        assert stopped.finish[i] == ("length" if at is None else "stop")
    # The model's own are taken where none are given, and none where the caller says so.
    config = dataclasses.replace(TINY["mixtral"], stop_tokens=(stop,))
    own = Engine(Decoder(config, params=params_of("mixtral")))
    assert own.generate(PROMPTS[:1], Sampling(max_new_tokens=12)).tokens == stopped.tokens[:1]
    assert own.generate(PROMPTS[:1], Sampling(max_new_tokens=12, stop_tokens=())).tokens == tokens[:1]


def test_tokens_come_one_by_one_and_each_sequence_says_when_it_ends():
    engine = engine_of("mixtral", "packed", 1)
    samplings = [Sampling(max_new_tokens=n) for n in (1, 4, 2)]
    speed = Speed()
    stream = engine.stream(PROMPTS, samplings, speed)
    first = next(stream)
    assert isinstance(first, Token) and first.sequence == 0 and first.finish == "length"
    assert speed.decode_tokens == 0 and speed.prefill_s > 0
    rest = list(stream)
    assert [(t.sequence, t.finish) for t in rest] == [
        (1, None), (2, None), (1, None), (2, "length"), (1, None), (1, "length"),
    ]  # fmt: skip
    assert (speed.prefill_tokens, speed.decode_tokens) == (sum(map(len, PROMPTS)), 4)
    assert speed.decode_s > 0 and speed.decode_tokens_per_s == speed.decode_tokens / speed.decode_s
    whole = engine.generate(PROMPTS, samplings)
    assert whole.tokens[1] == [t.id for t in [first, *rest] if t.sequence == 1]
    assert whole.speed.compile_s < 0.5  # nothing was compiled again
    only_first = engine.generate(PROMPTS, Sampling(max_new_tokens=1)).speed
    assert only_first.decode_tokens_per_s is None and only_first.prefill_tokens_per_s > 0


def test_chunked_prefill_and_uneven_appends_equal_the_whole_forward():
    """A cache takes any number of tokens a sequence and call; logits of all positions, and of the last alone."""
    config, params = TINY["gpt_oss"], params_of("gpt_oss")
    ids = np.random.default_rng(0).integers(0, VOCAB, (3, 14)).astype(np.int32)
    want = np.asarray(run_forward(params, ids, config)[0])
    cache = init_cache(config, 3, 14)
    done = np.zeros(3, int)
    for new in ((4, 2, 0), (4, 4, 4), (0, 1, 4), (4, 4, 3), (2, 3, 3)):
        chunk = np.full((3, 4), 77, np.int32)
        for row, n in enumerate(new):
            chunk[row, :n] = ids[row, done[row] : done[row] + n]
        logits, cache, stats = run_cached(params, chunk, cache, config, new=jnp.array(new))
        for row, n in enumerate(new):
            np.testing.assert_allclose(logits[row, :n], want[row, done[row] : done[row] + n], atol=2e-5)
        assert stats.tokens.tolist() == [sum(new)] * 2
        done += new
    assert cache.lengths.tolist() == [14, 14, 14]
    _, full, _ = run_cached(params, ids[:, :1], cache, config)  # no room: not kept
    assert full.lengths.tolist() == [14, 14, 14]
    empty, new = init_cache(config, 3, 20), jnp.array([14, 3, 9])
    last, cache, _ = run_cached(params, ids, empty, config, new=new, span=14, last_only=True)
    np.testing.assert_allclose(last, want[np.arange(3), [13, 2, 8]], atol=2e-5)
    assert not np.asarray(cache.keys[:, 1, 3:]).any()  # padding is not kept


def test_a_decode_step_updates_its_cache_in_place_and_moves_none_of_it():
    """Beside the cache, which is given away, a step needs room for one layer of it at most, whatever the depth; and on
    a mesh no collective carries it.
    """
    mesh, batch, room = make_mesh(4, 2), 16, 512
    for layers in (2, 8):
        config = dataclasses.replace(TINY["mixtral"], num_layers=layers)
        place = lambda tree, where: jax.tree.map(
            lambda a, at: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at), tree, where
        )
        params = place(decoder_shapes(config, 4), decoder_shardings(config, mesh))
        shapes = jax.eval_shape(functools.partial(init_cache, config, batch, room))
        cache = place(shapes, cache_shardings(config, mesh, batch))
        ids, new = jax.ShapeDtypeStruct((batch, 1), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.bool_)
        compiled = run_cached.lower(params, ids, cache, config, mesh=mesh, new=new, last_only=True).compile()
        memory = compiled.memory_analysis()
        a_layer = 2 * (batch // 8) * room * config.num_kv_heads * config.head_dim * 4
        assert memory.alias_size_in_bytes >= layers * a_layer
        assert memory.temp_size_in_bytes < 1.5 * a_layer
        moved = re.findall(r"= (.*) (?:all-gather|all-to-all|all-reduce|collective-permute)\(", compiled.as_text())
        assert moved and not any(f",{room}," in shape for shape in moved)


def test_refusals_name_what_is_wrong():
    engine = engine_of("mixtral", "packed", 1)
    short = Engine(Decoder(dataclasses.replace(TINY["mixtral"], max_position=8), params=params_of("mixtral")))
    wrong = [
        (lambda: engine.stream([]), "prompts"),
        (lambda: engine.stream([[1], []]), r"prompts\[1\]"),
        (lambda: engine.stream([[1], [0.5]]), r"prompts\[1\]"),
        (lambda: engine.stream([[1, VOCAB]]), r"prompts\[0\] holds=96.*holds=95 works"),
        (lambda: engine.stream([[1]], Sampling(stop_tokens=(VOCAB,))), "stop_tokens"),
        (lambda: engine.stream([[1]], [Sampling()] * 2), "sampling"),
        (lambda: short.stream([[1] * 5], Sampling(max_new_tokens=4)), r"max_new_tokens=4.*max_new_tokens=3 works"),
        (lambda: short.stream([[1] * 8], Sampling(max_new_tokens=1)), r"prompts\[0\] length=8.*=7 works"),
        (lambda: Sampling(max_new_tokens=0), "max_new_tokens"),
        (lambda: Sampling(temperature=-1), "temperature"),
        (lambda: Sampling(top_p=1.5), "top_p"),
        (lambda: Sampling(top_p=0), "top_p"),
        (lambda: Sampling(seed=-1), "seed"),
        (lambda: Sampling(stop_tokens=(1.5,)), "stop_tokens"),
        (lambda: Sampling(seed=2**32), "seed"),
        (lambda: Sampling(stop_tokens=5), "stop_tokens=5: must be a sequence"),
        (lambda: Sampling(temperature=1e-38), "temperature=1e-38: .*temperature=0.7 works"),
        (lambda: Sampling(temperature=10**400), "temperature=1000"),
        (lambda: engine.stream([[1]], [{"max_new_tokens": 2}]), "sampling='dict': must be a Sampling"),
    ]
    for call, message in wrong:
        with pytest.raises(ConfigError, match=f"^{message}"):
            call()
    config, params = TINY["mixtral"], params_of("mixtral")
    with pytest.raises(ConfigError, match=r"^input_ids=\[2, 1\]: the cache holds 3"):
        forward_cached(params, np.ones((2, 1), np.int32), init_cache(config, 3, 4), config)
    with pytest.raises(ConfigError, match=r"^span=5"):
        forward_cached(params, np.ones((3, 1), np.int32), init_cache(config, 3, 4), config, span=5)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1e-40), (1.0, 1e-6), (1e-30, 1.0), (2e-30, 0.5)])
def test_extremes_of_sampling_are_the_likeliest_token(temperature, top_p):
    logits = 1e10 * jnp.array([[1.0, 20.0, 30.0, 25.0], [-3.0, -1.0, -2.0, -9.0]])  # over 1e-30 they overflow
    settings = settings_of([Sampling(temperature=temperature, top_p=top_p)] * 2, 2, ())
    for run in (sample, jax.jit(sample)):
        np.testing.assert_array_equal(run(logits, settings, jnp.zeros(2, jnp.int32)), [2, 1])


def test_a_speed_is_of_one_stream():
    engine, speed = Engine(Decoder(TINY["mixtral"], params=params_of("mixtral"))), Speed()
    for _ in range(2):
        assert len(list(engine.stream([[1, 2]], Sampling(max_new_tokens=3), speed))) == 3
        assert (speed.prefill_tokens, speed.decode_tokens) == (2, 2)
