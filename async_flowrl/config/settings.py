"""Rules of configuration fields: the values that a field takes, and the effect of changing it in a resumed run.

A rule is written at its field. The checks (check.py), the comparison of a checkpoint with the configuration
(controller/resume.py) and docs/configuration.md are made from it:

    threads: int = setting(1, at_least=1, changes=ROUNDING)
"""

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any

# The default: the field changes the trained weights, so a resumed run must have the same value.
WEIGHTS = "weights"
# The field changes only the order of roundings, not the mathematics; a resume with another value warns.
ROUNDING = "rounding"
# The field does not change a bit of the weights, so a resumed run may have another value.
NOTHING = "nothing"

# Largest seed that torch's generators and `seeds.derive` accept.
MAX_SEED = 2**63 - 1

BOUNDS: dict[str, Callable[[float, float], bool]] = {
    "at_least": operator.ge,
    "above": operator.gt,
    "at_most": operator.le,
    "below": operator.lt,
}


@dataclass(frozen=True)
class Rule:
    """The values that a field may have, independent of other fields. None is allowed if the field's type allows it.

    `infinite`: infinity is allowed and means no limit. `pair`: the value is two numbers, and the bounds apply to both.
    """

    changes: str = WEIGHTS
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    infinite: bool = False
    pair: bool = False

    @property
    def bounds(self) -> str:
        """Returns the bounds in words, for example `at least 0 and below 1`; empty if there are none."""
        bounds = ((name, bound if isinstance(bound, int) else f"{bound:g}") for name, bound in self._bounds().items())
        return " and ".join(f"{name.replace('_', ' ')} {bound}" for name, bound in bounds)

    def refusal(self, value: Any) -> str | None:
        """Returns in words what a value must be; None if it is allowed. `choices` are checked by the caller."""
        numbers = list(value) if isinstance(value, list | tuple) else [value]
        if self.pair and len(numbers) != 2:
            return "two numbers"
        if not self.infinite and any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            return "a finite number"
        bounds = self._bounds().items()
        holds = all(BOUNDS[name](number, bound) for name, bound in bounds for number in numbers)
        return None if holds else self.bounds

    def _bounds(self) -> dict[str, float]:
        return {name: bound for name in BOUNDS if (bound := getattr(self, name)) is not None}


_DEFAULT = Rule()
# Metadata of a section whose fields do not change the weights.
FREE = {"rule": Rule(changes=NOTHING)}


def setting(default: Any, **rule: Any) -> Any:
    """Returns a dataclass field with a default and a Rule. The keyword arguments `rule` are the fields of the Rule."""
    return field(default=default, metadata={"rule": Rule(**rule)})


def rule_of(member: Field[Any]) -> Rule:
    rule: Rule = member.metadata.get("rule", _DEFAULT)
    return rule


def settings(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, Rule]]:
    """Yields (dotted key, value, rule) of every field below `section`, also of sections inside dictionaries."""
    for member in fields(section):
        key, value = prefix + member.name, getattr(section, member.name)
        if is_dataclass(value):
            yield from settings(value, f"{key}.")
            continue
        yield key, value, rule_of(member)
        for name, inner in value.items() if isinstance(value, dict) else ():
            if is_dataclass(inner):
                yield from settings(inner, f"{key}.{name}.")
