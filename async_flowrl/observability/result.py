"""What evaluations measured before and after a run, in sentences; the changes are paired prompt by prompt."""

from collections.abc import Sequence

from async_flowrl.observability.evaluations import HELD_OUT, Evaluation, between, first_comparable

CERTAIN = 0.025
"""One-sided probability below which a change is told from noise."""
REWARD = "reward"
PROMPTS = {"held_out": "held-out prompts", "training": "training prompts"}


def result_sentences(history: Sequence[Evaluation], evaluated: str) -> list[str]:
    """The reward, then each held-out term; none without two evaluations that compare. `evaluated`: held_out, training
    or nothing, of the evaluations' prompts. Errors are half of the 95 % interval."""
    policy = sorted((e for e in history if not e.baseline), key=lambda each: each.version)
    first = first_comparable(policy, policy[-1]) if policy else None
    if first is None:
        return []
    last = policy[-1]
    held_out = [name for name, curve in last.curves.items() if curve.kind == HELD_OUT]
    said = [_went(name, first, last, evaluated) for name in (REWARD, *held_out)]
    return [sentence for sentence in said if sentence is not None]


def _went(name: str, first: Evaluation, last: Evaluation, evaluated: str) -> str | None:
    moved = between(name, last, first)
    if moved is None:
        return None
    before, after = (evaluation.curves[name].estimate() for evaluation in (first, last))
    error = "" if moved.half is None else f" ± {moved.half:.2g}"
    noise = ", no more than noise" if min(moved.p_above(), moved.p_below()) > CERTAIN else ""
    went = f"{before.mean:.3g} to {after.mean:.3g}"
    if name != REWARD:
        return f"The held-out term {name} went from {went}: {moved.mean:+.3g}{error}{noise}."
    prompts = PROMPTS.get(evaluated, "evaluated prompts")
    span = f"in {last.version} steps" if first.version == 0 else f"between versions {first.version} and {last.version}"
    return f"On {after.prompts} {prompts}, the reward went from {went} {span}: {moved.mean:+.3g}{error}{noise}."
