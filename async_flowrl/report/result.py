"""The result of a run in one sentence: what evaluations measured before and after, or what the training reward did."""

from typing import Any

from async_flowrl.observability.evaluations import HELD_OUT, Evaluation, between, first_comparable
from async_flowrl.observability.statistics import Change
from async_flowrl.report.records import Records

CERTAIN = 0.025
"""One-sided probability below which a change is told from noise."""
REWARD = "reward"
ERROR = "± is half the 95 % interval of the change, paired by prompt and noise, its error clustered by prompt."
PROMPTS = {"held_out": "held-out prompts", "training": "training prompts"}


def result_of(run: Records) -> dict[str, Any]:
    """`state` and `headline`, a sentence each; `error`, what ± means; `about`, what was trained; `more`, of held-out
    terms; `tone`: good, bad or neutral."""
    first, last = ends(run)
    moved = between(REWARD, last, first) if first and last else None
    if first is None or last is None or moved is None:
        headline, tone = _training(run), "neutral"
    else:
        headline, tone = _evaluated(run, first, last, moved), _tone(moved)
    return {
        "state": state_sentence(run),
        "about": about(run),
        "error": ERROR if moved is not None and moved.half is not None else "",
        "headline": headline,
        "more": _held_out(first, last) if first and last else [],
        "tone": "bad" if run.state in ("failed", "unfinished") else tone,
    }


def about(run: Records) -> str:
    """What was trained how, in a few words of the configuration."""
    terms = run.setting("reward.terms") or {}
    weights = {name: term.get("weight", 1.0) if isinstance(term, dict) else 1.0 for name, term in terms.items()}
    rewards = " + ".join(name if weight == 1 else f"{weight:g} × {name}" for name, weight in weights.items())
    known = {
        "model": run.setting("model.path"),
        "algorithm": run.setting("algorithm.name"),
        "mode": run.summary.get("mode") or run.setting("mode"),
        "reward": rewards,
        "prompts": run.setting("data.train"),
    }
    return " · ".join(f"{name} {value}" for name, value in known.items() if value)


def ends(run: Records) -> tuple[Evaluation | None, Evaluation | None]:
    """The newest evaluation of a policy version and the oldest that is comparable to it."""
    if not run.policy:
        return None, None
    return first_comparable(run.policy, run.policy[-1]), run.policy[-1]


def change_of(run: Records) -> tuple[float, float, Change] | None:
    """Mean reward of evaluations before and after, and the paired change; None without two that compare."""
    first, last = ends(run)
    moved = between(REWARD, last, first) if first and last else None
    if first is None or last is None or moved is None:
        return None
    return first.curves[REWARD].estimate().mean, last.curves[REWARD].estimate().mean, moved


def state_sentence(run: Records) -> str:
    """Where the run stands."""
    steps = f"{run.steps} of {run.total_steps} steps" if run.total_steps else f"{run.steps} steps"
    because = f": {run.failure}" if run.failure else "; logs/controller.log may say why"
    return {
        "finished": f"Finished: {run.steps} steps.",
        "stopped": f"Stopped in order after {steps}; resume=auto goes on.",
        "running": f"Still running: {steps} so far.",
        "failed": f"Failed after {steps}{because}",
        "unfinished": f"Not finished: it ended after {steps} without a word; resume=auto goes on from its last "
        "checkpoint.",
    }[run.state]


def _evaluated(run: Records, first: Evaluation, last: Evaluation, moved: Change) -> str:
    before, after = (e.curves[REWARD].estimate() for e in (first, last))
    prompts = PROMPTS.get(_prompts(run), "evaluated prompts")
    span = f"in {last.version} steps" if first.version == 0 else f"between versions {first.version} and {last.version}"
    went = f"On {after.prompts} {prompts}, the reward went from {before.mean:.3g} to {after.mean:.3g} {span}"
    error = "" if moved.half is None else f" ± {moved.half:.2g}"
    if min(moved.p_above(), moved.p_below()) > CERTAIN:
        return f"{went}: {moved.mean:+.2g}{error}, no more than noise."
    return f"{went}: {moved.mean:+.3g}{error}."


def _prompts(run: Records) -> str:
    """held_out, training, or nothing where a run that is not finished does not say."""
    if known := run.summary.get("evaluation_prompts"):
        return str(known)
    inputs = [e for e in run.history if e["event"] == "inputs"]
    same = bool(inputs) and inputs[-1].get("train") == inputs[-1].get("evaluation")
    return "training" if same else ""


def _held_out(first: Evaluation, last: Evaluation) -> list[str]:
    """What terms that nothing is trained on say, one sentence each."""
    told = []
    for name, curve in last.curves.items():
        moved = between(name, last, first) if curve.kind == HELD_OUT else None
        if moved is None:
            continue
        before, after = first.curves[name].estimate().mean, curve.estimate().mean
        error = "" if moved.half is None else f" ± {moved.half:.2g}"
        told.append(f"The held-out term {name} went from {before:.3g} to {after:.3g}: {moved.mean:+.3g}{error}.")
    return told


def training_of(run: Records) -> tuple[float, float, int] | None:
    """Mean training reward over the first and the last tenth of the steps that had one, and how many that is."""
    rewards = [line["reward/mean"] for line in run.metrics if line.get("reward/mean") is not None]
    if not rewards:
        return None
    count = max(1, len(rewards) // 10)
    return sum(rewards[:count]) / count, sum(rewards[-count:]) / count, count


def _training(run: Records) -> str:
    found = training_of(run)
    if found is None:
        return "No step has been trained yet." if not run.metrics else "No step had a reward."
    before, after, count = found
    over = "step" if count == 1 else f"{count} steps"
    return (
        f"The training reward went from {before:.3g} (first {over}) to {after:.3g} (last {over}). It was not evaluated "
        "twice on the same prompts and noises."
    )


def _tone(moved: Change) -> str:
    if moved.p_above() <= CERTAIN:
        return "good"
    return "bad" if moved.p_below() <= CERTAIN else "neutral"
