"""Result of a run in sentences, for the console and the report.

If two evaluations can be compared, the result is the paired change of their scores from the first to the last one.
Otherwise it is the change of the training reward.
"""

from collections.abc import Sequence

from async_flowrl.config.curves import REWARD
from async_flowrl.observability.evaluations import (
    HELD_OUT,
    TRAINED,
    Evaluation,
    between,
    first_with_setting,
    policy_versions,
)
from async_flowrl.observability.metrics import Metrics
from async_flowrl.observability.statistics import Change

# A change is significant if its one-sided p-value, in either direction, is at most this.
MAX_P_VALUE = 0.025
PROMPTS = {"held_out": "held-out prompts", "training": "training prompts"}

Ends = tuple[Evaluation, Evaluation]


def ends_of(history: Sequence[Evaluation]) -> Ends | None:
    """(oldest evaluation with the newest one's setting, newest evaluation) of policy versions; None without two."""
    policy = policy_versions(history)
    first = first_with_setting(policy, policy[-1]) if policy else None
    return None if first is None else (first, policy[-1])


def result_sentences(history: Sequence[Evaluation], evaluated: str) -> list[str]:
    """One sentence about the reward and those of `term_sentences`; [] without two comparable evaluations.

    `evaluated` is "held_out", "training" or "". The numbers after ± are half the 95 % interval.
    """
    ends = ends_of(history)
    if ends is None:
        return []
    reward = reward_sentence(ends, evaluated)
    return [*([] if reward is None else [reward]), *term_sentences(ends)]


def reward_sentence(ends: Ends, evaluated: str) -> str | None:
    first, last = ends
    moved = between(REWARD, last, first)
    if moved is None:
        return None
    prompts = f"{last.curves[REWARD].estimate.prompts} {PROMPTS.get(evaluated, 'evaluated prompts')}"
    span = f"in {last.version} steps" if first.version == 0 else f"between versions {first.version} and {last.version}"
    return f"On {prompts}, the reward went from {_means(REWARD, ends)} {span}: {change_words(moved)}."


def term_sentences(ends: Ends) -> list[str]:
    """One sentence about each term of the reward, if it has several, and about each held-out term."""
    first, last = ends
    trained = {name: "term" for name, curve in last.curves.items() if curve.kind == TRAINED and name != REWARD}
    held_out = {name: "held-out term" for name, curve in last.curves.items() if curve.kind == HELD_OUT}
    terms = {name for end in ends for name, curve in end.curves.items() if curve.kind == TRAINED} - {REWARD}
    words = (trained if len(terms) > 1 else {}) | held_out
    changes = [(name, moved) for name in words if (moved := between(name, last, first)) is not None]
    return [
        f"The {words[name]} {name} went from {_means(name, ends)}: {change_words(moved)}." for name, moved in changes
    ]


def tenths(metrics: Sequence[Metrics]) -> tuple[float, float] | None:
    """Mean training reward over the first and the last tenth (at least one) of the steps that had one; None without."""
    rewards = [line["reward/mean"] for line in metrics if line.get("reward/mean") is not None]
    if not rewards:
        return None
    count = max(1, len(rewards) // 10)
    return sum(rewards[:count]) / count, sum(rewards[-count:]) / count


def training_sentence(first: float | None, last: float | None) -> str:
    if first is None or last is None:
        return "No step had a reward."
    change = f"went from {first:.3g} to {last:.3g} (first and last tenth of the steps)"
    change = change if first != last else f"was {first:.3g}"
    return f"The training reward {change}; no two evaluations say what that means for fixed prompts and seeds."


def certain(moved: Change) -> bool:
    return min(moved.p_above(), moved.p_below()) <= MAX_P_VALUE


def change_words(moved: Change) -> str:
    if moved.mean == 0 and not moved.half:
        return "no change"
    error = "" if moved.half is None else f" ± {moved.half:.2g}"
    return f"{moved.mean:+.3g}{error}{'' if certain(moved) else ', which chance may explain'}"


def _means(name: str, ends: Ends) -> str:
    before, after = (evaluation.curves[name].estimate.mean for evaluation in ends)
    return f"{before:.3g} to {after:.3g}"
