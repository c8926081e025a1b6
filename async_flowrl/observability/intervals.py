"""Set operations on time intervals (start, end) in seconds."""

import math
from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted, disjoint intervals that cover the same time as the given ones; empty intervals are dropped."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def intersect(one: Iterable[Interval], other: Iterable[Interval]) -> list[Interval]:
    """The time that is in both arguments, each sorted and disjoint as `union` returns it."""
    left, right = list(one), list(other)
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(one: Iterable[Interval], other: Iterable[Interval]) -> list[Interval]:
    """The time that is in `one` and not in `other`, each sorted and disjoint as `union` returns it."""
    edges = (-math.inf, *(edge for interval in other for edge in interval), math.inf)
    return intersect(one, zip(edges[::2], edges[1::2], strict=True))


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
