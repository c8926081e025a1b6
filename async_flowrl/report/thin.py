"""Fewer points and rows than there are, the same ones each time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

MAX_POINTS = 400
"""Of a curve."""
T = TypeVar("T")


@dataclass(frozen=True)
class Buckets:
    """`count` values in order, as many consecutive ones to a point as keep the points at MAX_POINTS or fewer."""

    count: int

    @property
    def width(self) -> int:
        return max(1, -(-self.count // MAX_POINTS))

    def lasts(self, values: Sequence[float]) -> list[Any]:
        """The last value of each bucket: of x axes."""
        return [rounded(values[min(start + self.width, self.count) - 1]) for start in range(0, self.count, self.width)]

    def line(self, values: Sequence[float | None]) -> dict[str, list[Any]]:
        """`y`: the mean of what each bucket knows; `low` and `high`: its range, where buckets hold several values."""
        groups = [
            [value for value in values[start : start + self.width] if value is not None]
            for start in range(0, self.count, self.width)
        ]
        line = {"y": [rounded(sum(group) / len(group)) if group else None for group in groups]}
        if self.width > 1:
            line |= {"low": [rounded(min(g)) if g else None for g in groups]}
            line |= {"high": [rounded(max(g)) if g else None for g in groups]}
        return line


def chosen(values: Sequence[T], most: int) -> list[T]:
    """At most `most` of them, evenly spaced, the first and the last included."""
    if len(values) <= most:
        return list(values)
    if most < 2:
        return list(values[-most:]) if most else []
    last = len(values) - 1
    return [values[i] for i in sorted({round(index * last / (most - 1)) for index in range(most)})]


def rounded(value: Any) -> Any:
    """Six significant digits of a float; other values as they are."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
