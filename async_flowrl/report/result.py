"""The head of a report: sentences about the result of a run, its state, and what was trained."""

from typing import Any

from async_flowrl.observability.evaluations import between
from async_flowrl.observability.result import (
    MAX_P_VALUE,
    REWARD,
    ends_of,
    held_out_sentences,
    reward_sentence,
    tenths,
    training_sentence,
)
from async_flowrl.observability.statistics import Change
from async_flowrl.report.records import Records

ERROR = "± is half the 95 % interval of the change, paired by prompt and noise, its error clustered by prompt."


def result_of(run: Records) -> dict[str, Any]:
    """The head as a dictionary of texts.

    `state` and `headline` are sentences; `about` says what was trained; `error` explains the ± ("" if there is none);
    `more` lists sentences about held-out terms; `tone` is "good", "bad" or "neutral".
    """
    ends, change = ends_of(run.policy), change_of(run)
    headline = reward_sentence(ends, _prompts(run)) if ends else None
    return {
        "state": state_sentence(run),
        "about": about(run),
        "error": ERROR if change is not None and change[2].half is not None else "",
        "headline": headline or _training(run),
        "more": held_out_sentences(ends) if ends else [],
        "tone": "bad" if run.state in ("failed", "unfinished") else "neutral" if change is None else _tone(change[2]),
    }


def about(run: Records) -> str:
    """Model, algorithm, mode, reward and prompts of the run in one line."""
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


def change_of(run: Records) -> tuple[float, float, Change] | None:
    """(mean reward of the first evaluation, of the last one, paired change); None without two comparable ones."""
    ends = ends_of(run.policy)
    moved = between(REWARD, ends[1], ends[0]) if ends else None
    if ends is None or moved is None:
        return None
    first, last = ends
    return first.curves[REWARD].estimate().mean, last.curves[REWARD].estimate().mean, moved


def state_sentence(run: Records) -> str:
    """One sentence about the state of the run, with the cause if it failed."""
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


def _prompts(run: Records) -> str:
    """Either "held_out" or "training" (see result_sentences); "" if a run that is not finished has not recorded it."""
    if known := run.summary.get("evaluation_prompts"):
        return str(known)
    inputs = [e for e in run.history if e["event"] == "inputs"]
    same = bool(inputs) and inputs[-1].get("train") == inputs[-1].get("evaluation")
    return "training" if same else ""


def _training(run: Records) -> str:
    if not run.metrics:
        return "No step has been trained yet."
    first, last = tenths(run.metrics) or (None, None)
    return training_sentence(first, last)


def _tone(moved: Change) -> str:
    if moved.p_above() <= MAX_P_VALUE:
        return "good"
    return "bad" if moved.p_below() <= MAX_P_VALUE else "neutral"
