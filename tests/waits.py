"""What waits for what in a traced program: of each exchange and each run of experts, which others it needs first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

# Called once, with arguments in the order of their own.
_CALLS = (
    "jit",
    "pjit",
    "shard_map",
    "custom_vjp_call",
    "custom_jvp_call",
    "remat",
    "remat2",
    "checkpoint",
    "closed_call",
)


class Step(NamedTuple):
    """An all_to_all ("exchange"), a call of expert_mlp ("experts") or a product of the "shared" experts.

    Attributes:
      kind: of them.
      needs: numbers of the steps that it waits for.
    """

    kind: str
    needs: frozenset[int]


def steps(run: Callable[..., Any], *args: Any) -> list[Step]:
    """Of `run`, traced, in its order."""
    return _steps(jax.make_jaxpr(run)(*args).jaxpr)


def steps_of_scans(run: Callable[..., Any], *args: Any) -> list[list[Step]]:
    """Of the body of each scan of `run` that has any."""
    return [found for body in _bodies(jax.make_jaxpr(run)(*args).jaxpr) if (found := _steps(body))]


def _steps(program: Jaxpr) -> list[Step]:
    found: list[Step] = []
    _walk(program, [frozenset()] * len(program.invars), found)
    return found


def _inner(eqn: Any) -> list[Jaxpr]:
    held = [a for value in eqn.params.values() for a in (value if isinstance(value, tuple) else (value,))]
    return [a.jaxpr if isinstance(a, ClosedJaxpr) else a for a in held if isinstance(a, ClosedJaxpr | Jaxpr)]


def _bodies(program: Jaxpr) -> Iterator[Jaxpr]:
    for eqn in program.eqns:
        for inner in _inner(eqn):
            yield from [inner] if eqn.primitive.name == "scan" else _bodies(inner)


def _kind(eqn: Any) -> str | None:
    if eqn.params.get("name") == "expert_mlp":
        return "experts"
    if eqn.primitive.name == "dot_general" and "shared_experts" in str(eqn.source_info.name_stack):
        return "shared"
    return "exchange" if eqn.primitive.name == "all_to_all" else None


def _walk(program: Jaxpr, given: list[frozenset[int]], found: list[Step]) -> list[frozenset[int]]:
    """What each result needs, by what each argument does."""
    needs = dict(zip(program.invars, given, strict=True))
    of = lambda atom: frozenset() if isinstance(atom, Literal) else needs.get(atom, frozenset())
    for eqn in program.eqns:
        ins, inner, kind = [of(atom) for atom in eqn.invars], _inner(eqn), _kind(eqn)
        outs = [frozenset().union(*ins)] * len(eqn.outvars)
        if kind is not None:
            found.append(Step(kind, outs[0]))
            outs = [outs[0] | {len(found) - 1}] * len(eqn.outvars)
        elif eqn.primitive.name in _CALLS and inner and len(inner[0].invars) == len(ins):
            outs = _walk(inner[0], ins, found)
        needs.update(zip(eqn.outvars, outs, strict=True))
    return [of(atom) for atom in program.outvars]
