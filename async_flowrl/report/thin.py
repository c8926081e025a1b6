"""Thinning of curves and lists for a report, without randomness."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

MAX_POINTS = 400
"""Largest number of points of a curve."""
T = TypeVar("T")


@dataclass(frozen=True)
class Buckets:
    """Divides `count` values into buckets of equally many consecutive values, one per point, at most MAX_POINTS."""

    count: int

    @property
    def width(self) -> int:
        return max(1, -(-self.count // MAX_POINTS))

    def lasts(self, values: Sequence[float]) -> list[Any]:
        """The last value of each bucket; used for x axes."""
        return [rounded(values[min(start + self.width, self.count) - 1]) for start in range(0, self.count, self.width)]

    def line(self, values: Sequence[float | None]) -> dict[str, list[Any]]:
        """`y`: the mean of each bucket, ignoring None; `low` and `high`: its range, if buckets hold several values.

        A bucket with None only gives None.
        """
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
    """At most `most` of the values, evenly spaced, with the first and the last one (the last only if `most` is 1)."""
    if len(values) <= most:
        return list(values)
    if most < 2:
        return list(values[-most:]) if most else []
    last = len(values) - 1
    return [values[i] for i in sorted({round(index * last / (most - 1)) for index in range(most)})]


def rounded(value: Any) -> Any:
    """A float rounded to six significant digits; other values unchanged."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
