"""Rules of configuration fields: what values a field takes, and what changing it does to a run.

A rule stands at its field; the checks, the fingerprint of a run and the generated page follow from it:

    threads: int = setting(1, at_least=1, changes=ROUNDING)
"""

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any

WEIGHTS = "weights"
"""The default: other weights, so that a resumed run must have the same value."""
ROUNDING = "rounding"
"""The same mathematics in other shapes: only the order of roundings changes, and a resume warns."""
NOTHING = "nothing"
"""Not a bit of the weights changes, so that it may differ from one part of a run to the next."""

MAX_SEED = 2**63 - 1
"""Largest seed: what torch's generators and `seeds.derive` take."""

BOUNDS: dict[str, Callable[[float, float], bool]] = {
    "at_least": operator.ge,
    "above": operator.gt,
    "at_most": operator.le,
    "below": operator.lt,
}


@dataclass(frozen=True)
class Rule:
    """What is refused whatever the other fields say. None is allowed wherever the field's type allows it."""

    changes: str = WEIGHTS
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    infinite: bool = False
    """Infinity is allowed: it means that there is no limit."""
    pair: bool = False
    """Two numbers; the bounds are those of both."""

    @property
    def bounds(self) -> str:
        """In words, e.g. `at least 0 and below 1`; empty without bounds."""
        return " and ".join(
            f"{name.replace('_', ' ')} {bound if isinstance(bound, int) else f'{bound:g}'}"
            for name, bound in self._given().items()
        )

    def refusal(self, value: Any) -> str | None:
        """What a value must be, where it is not; names outside `choices` are told apart by the caller."""
        numbers = list(value) if isinstance(value, list | tuple) else [value]
        if self.pair and len(numbers) != 2:
            return "two numbers"
        if not self.infinite and any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            return "a finite number"
        bounds = self._given().items()
        holds = all(BOUNDS[name](number, bound) for name, bound in bounds for number in numbers)
        return None if holds else self.bounds

    def _given(self) -> dict[str, float]:
        return {name: bound for name in BOUNDS if (bound := getattr(self, name)) is not None}


def setting(default: Any, **rule: Any) -> Any:
    """A dataclass field with a Rule of these values."""
    return field(default=default, metadata={"rule": Rule(**rule)})


def rule_of(member: Field[Any]) -> Rule:
    """The rule of a field; one without any has Rule's defaults."""
    rule: Rule = member.metadata.get("rule", Rule())
    return rule


def settings(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, Rule]]:
    """Dotted key, value and rule of every field that is not a section, those in dictionaries of sections included."""
    for member in fields(section):
        key, value = prefix + member.name, getattr(section, member.name)
        if is_dataclass(value):
            yield from settings(value, f"{key}.")
            continue
        yield key, value, rule_of(member)
        for name, inner in value.items() if isinstance(value, dict) else ():
            if is_dataclass(inner):
                yield from settings(inner, f"{key}.{name}.")
