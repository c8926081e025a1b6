"""Merges the ranks' statistics of an optimizer step into one; the controller calls `merged` after each step.

It sums in the order of groups and parts, so the numbers do not depend on the number of ranks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from async_flowrl.training.messages import GAP, GroupStats, PartStats, UpdateStats

_NAMES = {"ratio": "ratio/mean"}
"""Name of an algorithm's metric → its name in metrics.jsonl, if they differ."""
_SHARES = {
    "gradient_kept/positive": ("kept_positive", "positive"),
    "gradient_kept/negative": ("kept_negative", "negative"),
}
"""Name in metrics.jsonl → an algorithm's counts of rows of which it is the quotient."""
_COUNTS = {"kept", "nonzero", *(name for pair in _SHARES.values() for name in pair)}


def merged(ranks: Sequence[UpdateStats]) -> UpdateStats:
    """Returns the statistics of the whole optimizer step, with the spans of the first rank.

    `ranks` has the statistics of each rank, and at least one. Without trained parts the first rank's are returned.
    """
    waits = [stats.waited for stats in ranks if stats.waited is not None]
    first = replace(ranks[0], waited=max(waits, default=None))
    parts = sorted((part for stats in ranks for part in stats.parts), key=lambda part: (part.group, part.part))
    if not parts:
        return first
    parts = _probed_once(parts)
    metrics = {**_means(parts, first.rows), **first.metrics}
    metrics |= signal_to_noise([part.squared / first.rows**2 for part in parts], metrics["grad_norm"])
    return replace(first, metrics=metrics, kept=_kept(parts), groups=_groups(parts), parts=tuple(parts))


def _probed_once(parts: Sequence[PartStats]) -> list[PartStats]:
    """Removes GAP of all groups but the lowest: which other groups were probed depends on the order of arrival."""
    lowest = min(part.group for part in parts)
    return [
        part if part.group == lowest else replace(part, sums={n: v for n, v in part.sums.items() if n != GAP})
        for part in parts
    ]


def signal_to_noise(squares: Sequence[float], norm: float) -> dict[str, float]:
    """Returns {"gradient_snr": signal-to-noise ratio} from the gradient's norm and the squared norms of its n parts.

    If the parts have the same mean m and noise of variance v, then E|sum|² = n² m² + n v and E sum|part|² = n m² + n v.
    The ratio is n² m² / (n v): about 0, or below, if the parts agree only by chance; large if they agree. Returns {}
    for a single part and if no noise is left.
    """
    pieces = len(squares)
    if pieces < 2:
        return {}
    noise = (math.fsum(squares) - norm * norm / pieces) * pieces / (pieces - 1)
    return {"gradient_snr": norm * norm / noise - 1.0} if noise > 0.0 else {}


def _means(parts: Sequence[PartStats], denominator: int) -> dict[str, float]:
    """Returns means over all trained rows; only `loss` is its sum divided by `denominator`, as in training."""
    means = {}
    for name in sorted({name for part in parts for name in part.sums}):
        having = [part for part in parts if name in part.sums]
        total = sum(part.sums[name] for part in having)
        if name == "loss":
            means["loss"] = total / denominator
        elif name not in _COUNTS:
            means[_NAMES.get(name, name)] = total / sum(part.rows for part in having)
    for share, (some, of) in _SHARES.items():
        if rows := sum(part.sums.get(of, 0.0) for part in parts):
            means[share] = sum(part.sums[some] for part in parts) / rows
    return means


def _kept(parts: Sequence[PartStats]) -> Mapping[int, tuple[int, int]]:
    """Returns `UpdateStats.kept`."""
    by_age: dict[int, tuple[int, int]] = {}
    for part in parts:
        kept, nonzero = by_age.get(part.age, (0, 0))
        by_age[part.age] = kept + round(part.sums.get("kept", 0.0)), nonzero + round(part.sums.get("nonzero", 0.0))
    return by_age


def _groups(parts: Sequence[PartStats]) -> tuple[GroupStats, ...]:
    groups = []
    for group, of_group in groupby(parts, key=lambda part: part.group):
        its = list(of_group)
        names = sorted({name for part in its for name in part.sums})
        means = {
            _NAMES.get(name, name): sum(part.sums.get(name, 0.0) for part in its)
            / sum(part.rows for part in its if name in part.sums)
            for name in names
        }
        rows = sum(part.rows for part in its)
        groups.append(GroupStats(group, its[0].version, its[0].age, its[0].window_start, rows, means))
    return tuple(groups)
