"""Generation: prefill and decode with a KV cache, prompts of different length in one batch, on any mesh and path.

A token is one call of one compiled program, which updates the cache in place and keeps the tokens on the devices. The
host calls it again before it reads what the last call made, so that it can hand out tokens as they come and the devices
still never wait for it. Several tokens a call (a scan) would save nothing but the calls, come in bursts, and go on
after the last sequence has stopped; one call too many is what this costs at most.

Letters: B sequences, S positions of the longest prompt, Z positions of the cache, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import sharding
from jax_ep.config import refuse
from jax_ep.model_config import ModelConfig
from jax_ep.models.cache import KVCache, cache_shardings, forward_cached, init_cache
from jax_ep.models.decoder import Decoder, Params, check_vocabulary, place_params
from jax_ep.sampling import SEEDS, Sampling, Settings, sample, settings_of


class Token(NamedTuple):
    """A token as it comes: the prompt it continues, its id, and why it is the last one ("stop", "length") or None."""

    sequence: int
    id: int
    finish: str | None


@dataclasses.dataclass
class Speed:
    """Tokens and seconds of prefill and decode. Neither holds compilation.

    Attributes:
      prefill_tokens: tokens of the prompts, padding not counted; prefill_s: from handing them over until every
        sequence's first new token is on the host.
      decode_tokens: new tokens after the first ones; decode_s: from there until the last is on the host. While
        streaming, it holds what the caller does between tokens.
      compile_s: tracing and compiling, 0 where it was done before.
    """

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    compile_s: float = 0.0

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return self.prefill_tokens / self.prefill_s if self.prefill_s else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """None where every sequence ended with its first token."""
        return self.decode_tokens / self.decode_s if self.decode_tokens and self.decode_s else None


class Generation(NamedTuple):
    """New tokens of each prompt (a stop token included), why each ended ("stop" or "length"), and the speed."""

    tokens: list[list[int]]
    finish: list[str]
    speed: Speed


class State(NamedTuple):
    """What stays on the devices between calls: the cache, each sequence's last token [B] int32, how many it has got
    [B] int32, and whether it goes on [B] bool.
    """

    cache: KVCache
    tokens: jax.Array
    counts: jax.Array
    going: jax.Array


def advance(
    params: Params,
    input_ids: jax.Array | None,
    new: jax.Array | None,
    state: State,
    settings: Settings,
    config: ModelConfig,
    *,
    mesh: Mesh | None = None,
    draws: bool = True,
    nucleus: bool = True,
) -> tuple[State, jax.Array]:
    """One token more for every sequence that goes on. Pure.

    Args:
      params, config, mesh: as of `forward_cached`.
      input_ids, new: the prompts [B, S] and their lengths [B] (prefill, into an empty cache); None: each sequence's
        last token (decode).
      state: to start from.
      settings: of the sequences.
      draws, nucleus: as of `sample`.

    Returns:
      the state after it, and the tokens made [B] int32: -1 where the sequence had ended before.
    """
    span = None
    if input_ids is None:
        input_ids, new = state.tokens[:, None], state.going
    else:
        span = input_ids.shape[1]
    logits, cache, _ = forward_cached(
        params, input_ids, state.cache, config, mesh=mesh, new=new, span=span, last_only=True
    )
    with jax.named_scope("sample"):
        tokens = sample(logits, settings, state.counts, draws=draws, nucleus=nucleus)
    counts = state.counts + state.going
    stopped = (tokens[:, None] == settings.stops).any(-1)
    going = state.going & ~stopped & (counts < settings.limits)
    return State(cache, tokens, counts, going), jnp.where(state.going, tokens, -1)


class Engine:
    """Generates from a decoder, with its parameters as they are now. Programs are compiled once a shape of batch and
    kept.

    A batch is filled up with sequences that take no part until the mesh's token axes divide it, so any number of
    prompts runs on any mesh, and prompts are padded to the longest; padding travels nowhere. Lengths are rounded up (to
    a power of 2, above 128 to multiples of it) so that few shapes occur.

    Example:
      engine = Engine(decoder)
      for token in engine.stream([[1, 5, 7], [1, 2]], Sampling(temperature=0.8, seed=3)):
          print(token.sequence, token.id)
    """

    def __init__(self, decoder: Decoder):
        self.config = decoder.config
        ambient = jax.sharding.get_mesh()
        self.mesh = None if decoder.mesh is None and ambient.empty else decoder.mesh or ambient
        params = decoder.params()
        self.params = params if self.mesh is None else place_params(params, self.config, self.mesh)
        self._programs: dict[Any, Callable[..., tuple[State, jax.Array]]] = {}

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> Generation:
        """All of `stream` at once; arguments as there."""
        speed, prompts = Speed(), list(prompts)
        tokens: list[list[int]] = [[] for _ in prompts]
        finish = ["" for _ in prompts]
        for token in self.stream(prompts, sampling, speed):
            tokens[token.sequence].append(token.id)
            finish[token.sequence] = token.finish or ""
        return Generation(tokens, finish, speed)

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        speed: Speed | None = None,
    ) -> Iterator[Token]:
        """Yields each token as it comes, in the order of the prompts within a step.

        Args:
          prompts: ids of each, at least one.
          sampling: one for each prompt, or one for all: prompt i then draws with seed + i, so that alone with that seed
            it draws the same. None: Sampling().
          speed: is filled in.

        Raises:
          ConfigError: at the call, not at the first token: no prompts, an empty one, ids outside the vocabulary, or
            more positions than the model is meant for.
        """
        arrays = [np.asarray(prompt) for prompt in prompts]
        return self._stream(arrays, self._check(arrays, sampling), Speed() if speed is None else speed)

    def _stream(self, prompts: list[np.ndarray], samplings: list[Sampling], speed: Speed) -> Iterator[Token]:
        vars(speed).update(vars(Speed()))  # of this stream alone
        size = 1
        if self.mesh is not None:
            axes = sharding.layer_axes(self.config.moe, self.mesh)
            size = axes.ranks * axes.replicas
        rows = -(-len(prompts) // size) * size
        longest = max(len(prompt) for prompt in prompts)
        limits = [s.max_new_tokens for s in samplings]
        width = min(_round_up(longest), max(longest, self.config.max_position))
        room = max(width, _round_up(max(len(p) + n for p, n in zip(prompts, limits))))
        ids, lengths = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt)], lengths[i] = prompt, len(prompt)
        settings = settings_of(samplings, rows, self.config.stop_tokens)
        flags = {
            "draws": any(s.temperature > 0 for s in samplings),
            "nucleus": any(s.temperature > 0 and s.top_p < 1 for s in samplings),
        }
        state = self._empty(rows, room, lengths > 0)
        ids, lengths, settings = (self._put(a) for a in (ids, lengths, settings))

        begun = time.perf_counter()
        prefill = self._program((ids, lengths, state, settings), flags)
        decode = self._program((None, None, state, settings), flags) if max(limits) > 1 else None
        speed.compile_s = time.perf_counter() - begun
        speed.prefill_tokens = sum(len(prompt) for prompt in prompts)

        begun = time.perf_counter()
        state, made = prefill(self.params, ids, lengths, state, settings)
        first_at, counts = None, [0] * len(prompts)
        finish: list[str | None] = [None] * len(prompts)
        stops = [self._stops(s) for s in samplings]
        for step in range(1, max(limits) + 1):
            ahead = None
            if step < max(limits):
                assert decode is not None
                state, ahead = decode(self.params, None, None, state, settings)
            tokens = np.asarray(made)  # waits for it, while the devices go on
            now = time.perf_counter()
            if first_at is None:
                first_at, speed.prefill_s = now, now - begun
            else:
                speed.decode_s = now - first_at
            fresh = []
            for i in range(len(prompts)):
                if finish[i] is None:
                    counts[i] += 1
                    token = int(tokens[i])
                    finish[i] = "stop" if token in stops[i] else "length" if counts[i] == limits[i] else None
                    fresh.append(Token(i, token, finish[i]))
            speed.decode_tokens += len(fresh) if step > 1 else 0
            yield from fresh
            if all(finish):
                break
            made = ahead

    def _program(self, arguments: tuple[Any, ...], flags: dict[str, bool]) -> Callable[..., tuple[State, jax.Array]]:
        """`advance` compiled for these shapes; the state is given away."""
        shapes = jax.tree.map(lambda a: (a.shape, a.dtype.name), arguments)
        key = (jax.tree.structure(arguments), tuple(jax.tree.leaves(shapes)), tuple(flags.items()))
        if key not in self._programs:
            run: Any = functools.partial(advance, config=self.config, mesh=self.mesh, **flags)  # type: ignore[arg-type]
            state = arguments[2]
            outs = None if self.mesh is None else (jax.tree.map(lambda a: a.sharding, state), self._whole())
            compiled = jax.jit(run, donate_argnums=3, out_shardings=outs).lower(self.params, *arguments).compile()
            self._programs[key] = compiled
        return self._programs[key]

    def _whole(self) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, P())

    def _put(self, tree: Any) -> Any:
        """The same values on every device of the mesh, or where the parameters lie."""
        here = getattr(self.params["embed"], "sharding", None)
        return jax.device_put(tree, here if self.mesh is None else self._whole())

    def _empty(self, rows: int, room: int, going: np.ndarray) -> State:
        """A state with an empty cache, made on its devices."""
        create = functools.partial(init_cache, self.config, rows, room)
        here: Any = getattr(self.params["embed"], "sharding", None)
        if self.mesh is not None:
            here = cache_shardings(self.config, self.mesh, rows)
        cache = jax.jit(create, out_shardings=here)()
        nothing = np.zeros(rows, np.int32)
        return State(cache, *(self._put(a) for a in (nothing, nothing.copy(), going)))

    def _stops(self, sampling: Sampling) -> tuple[int, ...]:
        return self.config.stop_tokens if sampling.stop_tokens is None else sampling.stop_tokens

    def _check(self, prompts: list[np.ndarray], sampling: Sampling | Sequence[Sampling] | None) -> list[Sampling]:
        """The prompts, and a Sampling for each."""
        if not prompts:
            refuse("prompts", [], "there must be at least one", [[1, 2, 3]])
        sampling = Sampling() if sampling is None else sampling
        if isinstance(sampling, Sampling):
            samplings = [dataclasses.replace(sampling, seed=(sampling.seed + i) % SEEDS) for i in range(len(prompts))]
        else:
            samplings = list(sampling)
            for one in samplings:
                if not isinstance(one, Sampling):
                    refuse("sampling", type(one).__name__, "must be a Sampling, or one for each prompt", "Sampling()")
        if len(samplings) != len(prompts):
            refuse("sampling", f"{len(samplings)} of them", f"there are {len(prompts)} prompts", "one for all")
        for i, (prompt, one) in enumerate(zip(prompts, samplings, strict=True)):
            field = f"prompts[{i}]"
            if prompt.ndim != 1 or not prompt.size or not np.issubdtype(prompt.dtype, np.integer):
                refuse(field, prompt.tolist(), "must be a sequence of at least one id", [1, 2, 3])
            check_vocabulary(field, prompt, self.config)
            if self._stops(one):
                check_vocabulary("stop_tokens", np.asarray(self._stops(one)), self.config)
            most, meant = self.config.max_position - prompt.size, f"meant for {self.config.max_position} positions"
            if most < 1:
                refuse(f"{field} length", prompt.size, f"the model is {meant}", self.config.max_position - 1)
            if one.max_new_tokens > most:
                rule = f"{field} has {prompt.size} tokens and the model is {meant}"
                refuse("max_new_tokens", one.max_new_tokens, rule, most)
        return samplings


def _round_up(length: int) -> int:
    """To a power of 2, above 128 to a multiple of it."""
    return -(-length // 128) * 128 if length > 128 else 1 << (length - 1).bit_length()
