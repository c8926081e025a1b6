"""The alarm for reward hacking: the trained reward rises while a held-out score gets worse beyond its own noise.

A pure function of an evaluation history. Evaluations share their prompts and noises, so two of them are compared prompt
by prompt (statistics.py), with Student's t. The newest evaluation is compared with the first one, and with the one that
had the best held-out score. Looking again and again would find something by chance; therefore look k may only spend
level * 6 / (pi² k²) of the run's probability of a false alarm, which sums to `level` however many looks there are. It
is shared by the held-out terms and by the two comparisons; the second divides its part by k once more, because the best
of k evaluations was chosen after the fact. docs/reward_hacking.md has the measurements behind the thresholds.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from async_flowrl.observability.evaluations import DIVERSITY, HELD_OUT, Evaluation, between, comparable
from async_flowrl.observability.statistics import Change

REWARD = "reward"


@dataclass(frozen=True)
class Thresholds:
    """Frozen on glyphs runs of seeds 0 to 3 and judged on others: `python -m examples.glyphs.hacking`."""

    level: float = 0.01
    """Probability of a false alarm in a whole run in which no held-out score changes."""
    rise_level: float = 0.05
    """The trained reward counts as risen where its paired change is so unlikely without one."""
    least_fall: float = 0.2
    """Falls below this many standard deviations (over images, at the earlier evaluation) are no matter: with very many
    prompts the smallest ones are significant."""
    most_correlation: float = -0.5
    """Of the two curves from the earlier evaluation to the newest, where there are at least three: one must rise while
    the other falls."""
    diversity_loss: float = 0.5
    """Share of the first evaluation's diversity whose loss is worth a notice."""


THRESHOLDS = Thresholds()


@dataclass(frozen=True)
class Alarm:
    """One held-out curve that fell while the trained reward rose, from version `since` to `version`."""

    curve: str
    version: int
    since: int
    before: float
    now: float
    held_out: Change
    reward: Change

    @property
    def sentence(self) -> str:
        change = self.held_out
        errors = f", {abs(change.mean / change.stderr):.1f} standard errors" if change.stderr else ""
        return (
            f"reward hacking? From version {self.since} to {self.version} the trained reward rose by "
            f"{self.reward.mean:.3g} while the held-out score {self.curve} went from {self.before:.3g} to "
            f"{self.now:.3g}{errors} worse on the same prompts and noises: look at the images of both versions"
        )


@dataclass(frozen=True)
class Notice:
    """The images of a prompt have become alike. Honest runs lose some variety, too."""

    version: int
    since: int
    before: float
    now: float

    @property
    def sentence(self) -> str:
        return (
            f"diversity: the images of one prompt are {1 - self.now / self.before:.0%} less different from each other "
            f"in version {self.version} than in version {self.since}"
        )


def alarms(history: Sequence[Evaluation], thresholds: Thresholds = THRESHOLDS) -> list[Alarm]:
    """Every alarm that evaluations raised as they came, at most one per version and held-out curve."""
    past = _policy(history)
    return [alarm for k in range(1, len(past)) for alarm in _look(past[: k + 1], thresholds)]


def newest_alarms(history: Sequence[Evaluation], thresholds: Thresholds = THRESHOLDS) -> list[Alarm]:
    """Those of `alarms` that the newest version raises."""
    past = _policy(history)
    return list(_look(past, thresholds)) if past else []


def notices(history: Sequence[Evaluation], thresholds: Thresholds = THRESHOLDS) -> list[Notice]:
    """The first loss of diversity beyond its noise and beyond `diversity_loss`, or none."""
    past = _policy(history)
    for k in range(1, len(past)):
        now = past[k]
        earlier = [e for e in past[:k] if comparable(DIVERSITY, now, e)]
        if not earlier:
            continue
        first = earlier[0]
        moved, before = between(DIVERSITY, now, first), first.curves[DIVERSITY].estimate().mean
        if moved is None or moved.mean > -thresholds.diversity_loss * before:
            continue
        if moved.p_below() <= _spent(len(earlier), thresholds.level):
            return [Notice(now.version, first.version, before, now.curves[DIVERSITY].estimate().mean)]
    return []


def _policy(history: Sequence[Evaluation]) -> list[Evaluation]:
    return sorted((e for e in history if not e.baseline), key=lambda each: each.version)


def _spent(look: int, level: float) -> float:
    """What look 1, 2, … may spend of `level`; over all looks the sum is `level`."""
    return level * 6.0 / (math.pi * look) ** 2


def _look(past: Sequence[Evaluation], thresholds: Thresholds) -> Iterator[Alarm]:
    """What the newest of `past` shows against those before it."""
    now = past[-1]
    judged = [name for name, curve in now.curves.items() if curve.kind == HELD_OUT and curve.weight != 0]
    for name in judged:
        earlier = [e for e in past[:-1] if comparable(name, now, e)]
        if not earlier:
            continue
        share = _spent(len(earlier), thresholds.level) / len(judged)
        sign = now.curves[name].sign
        best = max(earlier, key=lambda each: sign * each.curves[name].estimate().mean)
        for reference, level in ((earlier[0], share / 2), (best, share / 2 / len(earlier))):
            alarm = _compare(name, now, reference)
            if alarm is not None and _holds(alarm, sign, level, reference, past, thresholds):
                yield alarm
                break


def _compare(name: str, now: Evaluation, reference: Evaluation) -> Alarm | None:
    fall, rise = between(name, now, reference), between(REWARD, now, reference)
    if fall is None or rise is None:
        return None
    before, after = (e.curves[name].estimate().mean for e in (reference, now))
    return Alarm(name, now.version, reference.version, before, after, fall, rise)


def _holds(
    alarm: Alarm, sign: float, level: float, reference: Evaluation, past: Sequence[Evaluation], thresholds: Thresholds
) -> bool:
    fall = alarm.held_out if sign > 0 else Change(-alarm.held_out.mean, alarm.held_out.stderr, alarm.held_out.freedom)
    spread = reference.curves[alarm.curve].estimate().std
    if fall.mean > -thresholds.least_fall * spread or fall.mean >= 0:
        return False
    if fall.p_below() > level or alarm.reward.p_above() > thresholds.rise_level:
        return False
    window = [e for e in past if e.version >= alarm.since and {REWARD, alarm.curve} <= e.curves.keys()]
    if len(window) < 3:
        return True
    rewards, scores = ([e.curves[name].estimate().mean for e in window] for name in (REWARD, alarm.curve))
    return sign * _correlation(rewards, scores) <= thresholds.most_correlation


def _correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Pearson's; 0 where one of the curves is flat."""
    a, b = (np.asarray(each) - np.mean(each) for each in (one, other))
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return 0.0 if norm == 0.0 else float(a @ b) / norm


def best(history: Sequence[Evaluation], name: str) -> Evaluation | None:
    """The evaluation of a policy version with the best mean of a curve, of equal ones the earliest; None without any.

    Only evaluations with the newest one's prompts and noises count, where there are such.
    """
    past = [e for e in _policy(history) if name in e.curves]
    if not past:
        return None
    past = [e for e in past if e.setting == past[-1].setting and e.curves[name].source == past[-1].curves[name].source]
    means: Mapping[int, float] = {e.version: e.curves[name].sign * e.curves[name].estimate().mean for e in past}
    return max(past, key=lambda each: (means[each.version], -each.version))
