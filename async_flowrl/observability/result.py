"""The result of a run in sentences that console and report share: what evaluations measured before and after,
paired prompt by prompt, or what the training reward did."""

from collections.abc import Sequence

from async_flowrl.observability.evaluations import HELD_OUT, Evaluation, between, first_comparable
from async_flowrl.observability.metrics import Metrics
from async_flowrl.observability.statistics import Change

CERTAIN = 0.025
"""One-sided probability below which a change is told from noise."""
REWARD = "reward"
PROMPTS = {"held_out": "held-out prompts", "training": "training prompts"}

Ends = tuple[Evaluation, Evaluation]


def ends_of(history: Sequence[Evaluation]) -> Ends | None:
    """The newest evaluation of a policy version, after the oldest one that is comparable to it; None without both."""
    policy = sorted((e for e in history if not e.baseline), key=lambda each: each.version)
    first = first_comparable(policy, policy[-1]) if policy else None
    return None if first is None else (first, policy[-1])


def result_sentences(history: Sequence[Evaluation], evaluated: str) -> list[str]:
    """The reward, then each held-out term; none without two evaluations that compare. `evaluated`: held_out, training
    or nothing, of the evaluations' prompts. Errors are half of the 95 % interval."""
    ends = ends_of(history)
    if ends is None:
        return []
    reward = reward_sentence(ends, evaluated)
    return [*([] if reward is None else [reward]), *held_out_sentences(ends)]


def reward_sentence(ends: Ends, evaluated: str) -> str | None:
    """What the reward did; None where the two evaluations do not have it from the same terms."""
    first, last = ends
    moved = between(REWARD, last, first)
    if moved is None:
        return None
    prompts = f"{last.curves[REWARD].estimate().prompts} {PROMPTS.get(evaluated, 'evaluated prompts')}"
    span = f"in {last.version} steps" if first.version == 0 else f"between versions {first.version} and {last.version}"
    return f"On {prompts}, the reward went from {_means(REWARD, ends)} {span}: {_change(moved)}."


def held_out_sentences(ends: Ends) -> list[str]:
    """What terms that nothing is trained on say, one sentence each."""
    first, last = ends
    names = [name for name, curve in last.curves.items() if curve.kind == HELD_OUT]
    changes = [(name, moved) for name in names if (moved := between(name, last, first)) is not None]
    return [f"The held-out term {name} went from {_means(name, ends)}: {_change(moved)}." for name, moved in changes]


def tenths(metrics: Sequence[Metrics]) -> tuple[float, float] | None:
    """Mean training reward over the first and the last tenth of the steps that had one, at least one step each."""
    rewards = [line["reward/mean"] for line in metrics if line.get("reward/mean") is not None]
    if not rewards:
        return None
    count = max(1, len(rewards) // 10)
    return sum(rewards[:count]) / count, sum(rewards[-count:]) / count


def training_sentence(first: float | None, last: float | None) -> str:
    """Of a run whose evaluations do not compare: the means over the first and the last tenth of its steps."""
    if first is None or last is None:
        return "No step had a reward."
    return (
        f"The training reward went from {first:.3g} to {last:.3g} (first and last tenth of the steps); no two "
        "evaluations say what that means for fixed prompts and seeds."
    )


def certain(moved: Change) -> bool:
    """Whether a change is told from noise."""
    return min(moved.p_above(), moved.p_below()) <= CERTAIN


def _means(name: str, ends: Ends) -> str:
    before, after = (evaluation.curves[name].estimate().mean for evaluation in ends)
    return f"{before:.3g} to {after:.3g}"


def _change(moved: Change) -> str:
    error = "" if moved.half is None else f" ± {moved.half:.2g}"
    return f"{moved.mean:+.3g}{error}{'' if certain(moved) else ', no more than noise'}"
