"""An A/B of one switch: which field differs, and what its timings allow to be said."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from _common import UsageError, fields_of, find_field, override, parse_value

# Largest relative differences of losses and of gradients that are rounding: sums in another order. A loss is a mean of
# many values, so in 16 bits about one unit in the last place of a value; gradients are compared as a whole (Frobenius).
TOLERANCES = {"float32": (1e-6, 1e-5), "float16": (1e-3, 1e-2), "bfloat16": (8e-3, 5e-2)}
MIN_RUNS = 3
# Equal sides with normally distributed times are then told apart once in fifty times with 11 runs, once in 25 with 9,
# once in 16 with 3 (simulated). By the middle half of 5 runs it would be once in seven.
MANY_RUNS = 9
_WORDS = {"off": "False", "on": "True"}
_EXAMPLE = "dedup=False:True works"


class Switch(NamedTuple):
    """The one field in which two runs differ.

    Attributes:
      field: its dotted path.
      texts: its values as they were written.
      labels: what the sides are called.
    """

    field: str
    texts: tuple[str, str]
    labels: tuple[str, str]


def read_switch(
    given: Sequence[str], shared: Sequence[str], config: Any, may_differ: Callable[[str], bool], kind: str
) -> Switch:
    """The switch among arguments.

    Args:
      given: "key=A:B" or "key=A,B", as many as the person wrote; one is right.
      shared: "key=value" of both sides.
      config: whose fields they are.
      may_differ: whether a field's two values leave data, mesh and measurement as they are.
      kind: of which config, for the refusal.

    Raises:
      UsageError: none or several, an unknown field (with the nearest), one that may not differ, no two values, values
        that are not of its type, or equal ones.
    """
    if len(given) != 1:
        what = f"{len(given)} switches ({', '.join(given)})" if given else "no switch"
        again = "; run the script once for each" if given else ""
        raise UsageError(f"{what}: exactly one field may differ between the two runs{again}; {_EXAMPLE}")
    key, equals, text = (part.strip() for part in given[0].partition("="))
    parts = [part.strip() for part in text.split(":" if ":" in text else ",", 1)]
    if not equals or not key or len(parts) != 2 or not all(parts):
        raise UsageError(f"{given[0]!r} is no switch: it is written key=A:B; {_EXAMPLE}")
    kinds = fields_of(config)
    field = find_field(key, kinds)
    if not may_differ(field):
        raise UsageError(f"{key}={text}: {field} belongs to what both runs share; a field of {kind} works")
    if kinds[field] is bool:
        parts = [_WORDS.get(part.lower(), part) for part in parts]
    values = [parse_value(key, part, kinds[field]) for part in parts]
    if values[0] == values[1]:
        raise UsageError(f"{key}={text}: both values are {values[0]!r}, so that nothing differs; {_EXAMPLE}")
    for item in shared:
        if find_field(item.partition("=")[0].strip(), kinds) == field:
            raise UsageError(f"{item}: {field} is the switch ({given[0]}); without {item} it works")
    name = field.rsplit(".", 1)[-1]
    return Switch(field, (parts[0], parts[1]), (f"{name}={values[0]}", f"{name}={values[1]}"))


def two_configs(config: Any, shared: Sequence[str], switch: Switch, elsewhere: Mapping[str, str]) -> tuple[Any, Any]:
    """`config` with `shared` and each value of the switch; each is built once, so that neither need be valid without.

    Raises:
      UsageError, ConfigError: as of `override`.
    """
    a, b = (override(config, [*shared, f"{switch.field}={text}"], elsewhere=elsewhere) for text in switch.texts)
    return a, b


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one side's steps gave.

    Attributes:
      label: of the side.
      runs_ms: of timed steps.
      losses: of all steps, warm-up included, in order.
      skipped: steps that changed nothing, as something in them was not finite.
    """

    label: str
    runs_ms: tuple[float, ...]
    losses: tuple[float, ...]
    skipped: int = 0

    @property
    def median_ms(self) -> float:
        return statistics.median(self.runs_ms)

    @property
    def spread_ms(self) -> float:
        """How far the middle half of the runs lies apart, so that one slow run among many does not count; of fewer than
        `MANY_RUNS`, how far all do.
        """
        if len(self.runs_ms) < MANY_RUNS:
            return max(self.runs_ms) - min(self.runs_ms)
        low, _, high = statistics.quantiles(self.runs_ms, n=4, method="inclusive")
        return high - low

    @property
    def nan_steps(self) -> int:
        return sum(not math.isfinite(loss) for loss in self.losses)


class LossDifference(NamedTuple):
    """The largest relative difference of two runs' losses, and at which step, from 1."""

    relative: float
    step: int


def loss_difference(a: Outcome, b: Outcome) -> LossDifference:
    """Of as many steps of each; not finite where a loss is not."""
    pairs = zip(a.losses, b.losses, strict=True)
    apart = [0.0 if x == y else abs(y - x) / abs(x) if x else math.inf for x, y in pairs]
    worst = max(range(len(apart)), key=lambda at: math.inf if math.isnan(apart[at]) else apart[at])
    return LossDifference(apart[worst], worst + 1)


class Verdict(NamedTuple):
    """What may be said.

    Attributes:
      told: whether a difference of times is.
      speedup: of the second side over the first, ratio of medians; None where none is told.
      sentence: for a person.
    """

    told: bool
    speedup: float | None
    sentence: str


def judge(a: Outcome, b: Outcome, dtype: str, gradient_difference: float | None, same_program: bool = False) -> Verdict:
    """Whether times say that a switch helps, and how much.

    Args:
      a, b: the two sides.
      dtype: what is computed in.
      gradient_difference: relative, of the first step; None: not compared.
      same_program: both sides are one program.
    """
    nothing = lambda why: Verdict(False, None, why)
    loss_most, gradient_most = TOLERANCES[dtype]
    for side in (a, b):
        if side.nan_steps:
            step = next(at for at, loss in enumerate(side.losses, 1) if not math.isfinite(loss))
            return nothing(f"no speed-up is told: {side.label} has a loss that is not finite, first at step {step}")
        if side.skipped:
            return nothing(f"no speed-up is told: {side.label} skipped {side.skipped} steps")
    loss = loss_difference(a, b)
    if loss.relative > loss_most:
        where = f"by {loss.relative:.1e} relative at step {loss.step}"
        return nothing(f"no speed-up is told: the losses differ {where}, and {loss_most:.0e} is rounding in {dtype}")
    if gradient_difference is not None and not gradient_difference <= gradient_most:
        rule = f"by {gradient_difference:.1e} relative, and {gradient_most:.0e} is rounding in {dtype}"
        return nothing(f"no speed-up is told: the gradients differ {rule}")
    if same_program:
        return nothing("no difference seen: both sides are the same program, so the switch does nothing here")
    apart, spread = abs(a.median_ms - b.median_ms), max(a.spread_ms, b.spread_ms)
    if apart <= spread:
        why = f"the medians are {apart:.3g} ms apart, and the runs of a side spread over {spread:.3g} ms"
        return nothing(f"no difference seen: {why}")
    ratio = a.median_ms / b.median_ms
    word = "faster" if ratio > 1 else "slower"
    times = f"{b.median_ms:.2f} ms against {a.median_ms:.2f}; the runs of a side spread over {spread:.3g} ms"
    return Verdict(True, ratio, f"{b.label} is {word}: {ratio:.3f} times the speed of {a.label} ({times})")
