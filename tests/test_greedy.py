"""Greedy decoding with the cache against the whole forward, every family."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from tiny_models import TINY, with_comm

from jax_ep import CommConfig, make_mesh
from jax_ep.engine import Engine
from jax_ep.models.decoder import Decoder, forward, init_decoder
from jax_ep.sampling import Sampling

PROMPTS = [[5, 17, 80], [9] * 3 + [44, 2, 61, 7, 30, 11, 90, 3], [33]]
PATHS = {"packed": CommConfig(), "dense": CommConfig(mode="dense")}
run_forward = jax.jit(forward, static_argnames=("config", "mesh"))


@pytest.mark.parametrize("family", TINY)
def test_greedy_with_the_cache_is_the_argmax_of_the_whole_forward(family):
    """64 tokens after prompts of different length, packed and dense, on one device and four ranks: each token is the
    argmax of the forward over everything before it, in one pass over the finished sequences.
    """
    config, params = with_comm(TINY[family], PATHS["dense"]), init_decoder(TINY[family], jax.random.key(1))
    length = max(len(p) for p in PROMPTS) + 64

    @functools.cache
    def logits_of(sequences: tuple[tuple[int, ...], ...]) -> np.ndarray:
        ids, mask = np.zeros((2, len(PROMPTS), length), np.int32)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)], mask[row, : len(sequence)] = sequence, 1
        return np.asarray(run_forward(params, ids, config, attention_mask=mask)[0])

    for path in PATHS:
        for ranks in (1, 4):
            mesh = None if ranks == 1 else make_mesh(ranks)
            engine = Engine(Decoder(with_comm(TINY[family], PATHS[path]), mesh, params=params))
            tokens, finish, _ = engine.generate(PROMPTS, Sampling(max_new_tokens=64))
            assert finish == ["length"] * 3 and [len(t) for t in tokens] == [64] * 3
            logits = logits_of(tuple(tuple(p + t) for p, t in zip(PROMPTS, tokens)))
            for row, prompt in enumerate(PROMPTS):
                each = logits[row, len(prompt) - 1 : len(prompt) + 63]
                best = np.sort(each)[:, ::-1]
                sure = best[:, 0] - best[:, 1] > 1e-4  # a tie to rounding may fall either way
                assert np.array_equal(each.argmax(-1)[sure], np.array(tokens[row])[sure]), (family, path, ranks)
                assert sure.sum() > 60
    assert len({token for sequence in tokens for token in sequence}) > 8  # no constant would pass
