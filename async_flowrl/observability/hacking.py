"""Alarm for reward hacking: the trained reward rises while a held-out score (one that is not trained on) gets worse.

All functions depend only on the history of evaluations. The newest evaluation is compared with the first one and with
the one that had the best held-out score, by paired t-tests over prompts (statistics.py).

Many tests would give false alarms by chance, so LEVEL, the probability of a false alarm in a whole run, is divided:
the k-th evaluation may use LEVEL * 6 / (pi² k²), which sums to LEVEL over all k (alpha spending). Its part is divided
by the number of held-out terms and by two, for the two comparisons; for the best evaluation it is divided by k again,
because that one was chosen from k evaluations. docs/reward_hacking.md shows how the thresholds were measured.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from async_flowrl.config.curves import REWARD
from async_flowrl.observability.evaluations import DIVERSITY, HELD_OUT, Evaluation, between, comparable, policy_versions
from async_flowrl.observability.statistics import Change

# The thresholds of the alarm were set before any run: seeds 0 to 3 of the glyphs example could change them and changed
# nothing, seeds 4 to 7 only judged. `python -m examples.glyphs.hacked_runs` repeats the measurement.
# Probability of a false alarm in a whole run in which no held-out score changes.
LEVEL = 0.01
# The trained reward has risen if the one-sided p-value of its paired change is at most this.
RISE_LEVEL = 0.05
# Smallest fall of a held-out score that can cause an alarm, in standard deviations over images at the earlier
# evaluation. Without it, very many prompts would make even tiny falls significant.
LEAST_FALL = 0.2
# Largest correlation for an alarm between the means of reward and held-out score (its sign turned if its weight is
# negative) since the earlier evaluation; not tested with fewer than three evaluations.
MOST_CORRELATION = -0.5
# A notice is given if diversity has fallen by at least this share of its first value.
DIVERSITY_LOSS = 0.5


class Finding(NamedTuple):
    """The curve `curve` got worse from version `since` to `version`, as one sentence says."""

    curve: str
    version: int
    since: int
    sentence: str


def alarms(history: Sequence[Evaluation]) -> list[Finding]:
    """All alarms of a run, oldest first: each version is judged by the evaluations up to it only."""
    # There is at most one alarm per version and held-out curve. Baseline evaluations are ignored.
    past = policy_versions(history)
    return [alarm for k in range(1, len(past)) for alarm in _look(past[: k + 1])]


def newest_alarms(history: Sequence[Evaluation]) -> list[Finding]:
    past = policy_versions(history)
    return list(_look(past)) if past else []


def notices(history: Sequence[Evaluation]) -> list[Finding]:
    """At most one notice: the first version whose loss of diversity is significant and at least DIVERSITY_LOSS."""
    # It is no alarm, because runs without reward hacking lose some diversity, too.
    past = policy_versions(history)
    for k, now in enumerate(past):
        earlier = [e for e in past[:k] if comparable(DIVERSITY, now, e)]
        if not earlier:
            continue
        first = earlier[0]
        moved, before = between(DIVERSITY, now, first), first.curves[DIVERSITY].estimate.mean
        if moved is None or moved.mean > -DIVERSITY_LOSS * before:
            continue
        if moved.p_below() <= _spent(len(earlier)):
            sentence = (
                f"diversity: the images of one prompt are {-moved.mean / before:.0%} less different from each other in "
                f"version {now.version} than in version {first.version}"
            )
            return [Finding(DIVERSITY, now.version, first.version, sentence)]
    return []


def _spent(look: int) -> float:
    # Part of LEVEL for the test number `look` (1, 2, …); the parts sum to LEVEL.
    return LEVEL * 6.0 / (math.pi * look) ** 2


def _look(past: Sequence[Evaluation]) -> Iterator[Finding]:
    now = past[-1]
    judged = [name for name, curve in now.curves.items() if curve.kind == HELD_OUT and curve.weight != 0]
    for name in judged:
        earlier = [e for e in past[:-1] if comparable(name, now, e)]
        if not earlier:
            continue
        share = _spent(len(earlier)) / len(judged)
        sign = now.curves[name].sign
        best = max(earlier, key=lambda e: sign * e.curves[name].estimate.mean)
        for reference, level in ((earlier[0], share / 2), (best, share / 2 / len(earlier))):
            if (sentence := _hacked(name, past, reference, level)) is not None:
                yield Finding(name, now.version, reference.version, sentence)
                break


def _hacked(name: str, past: Sequence[Evaluation], reference: Evaluation, level: float) -> str | None:
    now, sign = past[-1], past[-1].curves[name].sign
    moved, rise = between(name, now, reference), between(REWARD, now, reference)
    if moved is None or rise is None:
        return None
    fall = moved if sign > 0 else Change(-moved.mean, moved.stderr, moved.freedom)
    before = reference.curves[name].estimate
    if fall.mean > -LEAST_FALL * before.std or fall.mean >= 0:
        return None
    if fall.p_below() > level or rise.p_above() > RISE_LEVEL:
        return None
    window = [e for e in past if e.version >= reference.version and {REWARD, name} <= e.curves.keys()]
    rewards, scores = ([e.curves[curve].estimate.mean for e in window] for curve in (REWARD, name))
    if len(window) >= 3 and sign * _correlation(rewards, scores) > MOST_CORRELATION:
        return None
    errors = f", {abs(moved.mean / moved.stderr):.1f} standard errors" if moved.stderr else ""
    return (
        f"reward hacking? From version {reference.version} to {now.version} the trained reward rose by "
        f"{rise.mean:.3g} while the held-out score {name} went from {before.mean:.3g} to "
        f"{now.curves[name].estimate.mean:.3g}{errors} worse on the same prompts and noises: look at the images of "
        "both versions"
    )


def _correlation(one: Sequence[float], other: Sequence[float]) -> float:
    a, b = (np.asarray(values) - np.mean(values) for values in (one, other))
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return 0.0 if norm == 0.0 else float(a @ b) / norm


def best(history: Sequence[Evaluation], name: str) -> Evaluation | None:
    """The policy version's evaluation with the best mean of the curve `name`; the lowest version if means are equal."""
    # Only evaluations with the same setting and source as the newest one with this curve count. None if there are none.
    past = [e for e in policy_versions(history) if name in e.curves]
    if not past:
        return None
    past = [e for e in past if e.setting == past[-1].setting and e.curves[name].source == past[-1].curves[name].source]
    return max(past, key=lambda e: (e.curves[name].sign * e.curves[name].estimate.mean, -e.version))
