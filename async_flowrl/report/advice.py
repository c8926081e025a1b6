"""Results of a run for its report: the sentences at its head, the table of evaluations, and warnings with advice.

The advice repeats the table in docs/metrics.md.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from async_flowrl.config.curves import REWARD
from async_flowrl.observability.evaluations import DIVERSITY, HELD_OUT, TRAINED, Evaluation, between, since_first
from async_flowrl.observability.hacking import alarms, notices
from async_flowrl.observability.metrics import Metrics
from async_flowrl.observability.result import (
    MAX_P_VALUE,
    ends_of,
    reward_sentence,
    tenths,
    term_sentences,
    training_sentence,
)
from async_flowrl.observability.summary import warnings_of
from async_flowrl.report.records import Records
from async_flowrl.report.series import chosen

KINDS = {TRAINED: "trained", HELD_OUT: "held out", DIVERSITY: "diversity"}
MAX_ROWS = 40
EXPLAINED = (
    "Mean ± half of the 95 % interval, errors clustered by prompt; below it, in the same way, the change since the "
    "first evaluation, paired by prompt and noise."
)
# Last steps over which a metric is averaged.
RECENT_STEPS = 50
ERROR = "± is half the 95 % interval of the change, paired by prompt and noise, its error clustered by prompt."


def result_of(run: Records) -> dict[str, Any]:
    """The entries `result` (sentences), `change` (paired) and `training` (start and end), or None each.

    `of` is equal for runs whose changes can be compared; `tone` is "good", "bad" or "neutral".
    """
    ends, trained = ends_of(run.policy), tenths(run.metrics)
    moved = between(REWARD, ends[1], ends[0]) if ends else None
    headline = reward_sentence(ends, str(run.summary.get("evaluation_prompts"))) if ends else None
    training = training_sentence(*trained or (None, None)) if run.metrics else "No step has been trained yet."
    change, tone = None, "neutral"
    if ends and moved:
        before, after = (evaluation.curves[REWARD].estimate.mean for evaluation in ends)
        of = [ends[1].setting, ends[1].curves[REWARD].source]
        change = {"before": before, "after": after, "mean": moved.mean, "half": moved.half, "of": of}
        tone = "good" if moved.p_above() <= MAX_P_VALUE else "bad" if moved.p_below() <= MAX_P_VALUE else "neutral"
    result = {
        "state": state_sentence(run),
        "about": about(run),
        "error": ERROR if change and change["half"] is not None else "",
        "headline": headline or training,
        "more": term_sentences(ends) if ends else [],
        "tone": "bad" if run.state in ("failed", "unfinished") else tone,
    }
    rewards = {"first": trained[0], "last": trained[1]} if trained else None
    return {"result": result, "change": change, "training": rewards}


def about(run: Records) -> str:
    terms = run.setting("reward.terms") or {}
    weights = {name: term.get("weight", 1.0) if isinstance(term, dict) else 1.0 for name, term in terms.items()}
    rewards = " + ".join(name if weight == 1 else f"{weight:g} × {name}" for name, weight in weights.items())
    parts = {
        "model": run.setting("model.path"),
        "algorithm": run.setting("algorithm.name"),
        "mode": run.summary.get("mode") or run.setting("mode"),
        "reward": rewards,
        "prompts": run.setting("data.train"),
    }
    return " · ".join(f"{name} {value}" for name, value in parts.items() if value)


def state_sentence(run: Records) -> str:
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


def evaluations_of(history: Sequence[Evaluation], on_hacking: str) -> dict[str, Any] | None:
    """The table as a dictionary; None without evaluations. `count` is the number of evaluations before thinning.

    `rows` has at most MAX_ROWS of them. `alarms` holds the newest sentence per held-out curve.
    """
    if not history:
        return None
    names = {name: curve.kind for e in history for name, curve in e.curves.items()}
    ordered = sorted(names, key=lambda name: (list(KINDS).index(names[name]), name != "reward"))
    newest = {alarm.curve: alarm.sentence for alarm in alarms(history)} if on_hacking != "ignore" else {}
    return {
        "columns": [{"name": name, "kind": KINDS[names[name]]} for name in ordered],
        "rows": [_row(e, history, ordered) for e in chosen(history, MAX_ROWS)],
        "count": len(history),
        "explained": EXPLAINED,
        "alarms": list(newest.values()),
        "notices": [notice.sentence for notice in notices(history)],
    }


def _row(evaluation: Evaluation, history: Sequence[Evaluation], names: Sequence[str]) -> dict[str, Any]:
    return {
        "version": evaluation.version,
        "baseline": evaluation.baseline,
        "steps": evaluation.steps,
        "guidance": evaluation.guidance,
        "cells": {name: _cell(name, evaluation, history) for name in names if name in evaluation.curves},
    }


def _cell(name: str, evaluation: Evaluation, history: Sequence[Evaluation]) -> dict[str, Any]:
    estimate, moved = evaluation.curves[name].estimate, since_first(name, evaluation, history)
    return {
        "mean": estimate.mean,
        "half": None if estimate.high is None else estimate.high - estimate.mean,
        "change": moved and moved.mean,
        "change_half": moved and moved.half,
    }


class Rule(NamedTuple):
    """Warns if `holds` is true for the mean of a metric over the last RECENT_STEPS steps, of at least `min_steps`.

    `text` is a template with {value} and {steps}, `todo` the advice, `panel` the id of the chart that shows the metric.
    """

    key: str
    holds: Callable[[float], bool]
    text: str
    todo: str
    panel: str
    min_steps: int = 1


RULES = (
    Rule(
        "zero_std_ratio",
        lambda share: share > 0.5,
        "In {value:.0%} of the groups of the last {steps} steps all images had the same score: nothing was learned "
        "from them.",
        "If all scores are high, the task is solved: use harder prompts. If the images of a prompt have become alike, "
        "the model has collapsed, and equal scores give no gradient that could repair it: go back to an earlier "
        "checkpoint and set algorithm.max_kl_per_update.",
        "flat",
        min_steps=5,
    ),
    Rule(
        "gradient_snr",
        lambda ratio: ratio < 0.01,
        "Over the last {steps} steps the gradient was mostly noise: its signal-to-noise ratio (gradient_snr) was "
        "{value:.2g} on average.",
        "Use more images per step, algorithm.same_initial_noise=true, earlier denoising steps (algorithm.window), "
        "fewer lora.targets, or a smaller learning rate that falls.",
        "snr",
        min_steps=50,
    ),
    Rule(
        "trust_region/scale",
        lambda scale: scale < 0.3,
        "The limit algorithm.max_kl_per_update shortened the updates of the last {steps} steps to {value:.0%} of their "
        "length on average.",
        "You can leave it so. A smaller learning rate makes Adam's momentum match the updates that are really applied.",
        "trust",
        min_steps=20,
    ),
    Rule(
        "effective_sample_size",
        lambda share: share < 0.5,
        "Importance weights reduced the effective sample size to {value:.0%} over the last {steps} steps.",
        "Use a smaller max_staleness or learning rate, or algorithm.correction=mask.",
        "ess",
    ),
)


def advice_for(run: Records, evaluations: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """All warnings of a run: from evaluations, from its records, then from RULES.

    Each has `text`, `todo` (advice, may be ""), `panel` (id of the chart that shows it, or None) and `level`, "alarm"
    or "warning". `evaluations` is the result of `evaluations_of`.
    """
    advice: list[dict[str, Any]] = []
    for sentence in (evaluations or {}).get("alarms", []):
        todo = "save.best keeps the best version; evaluate.on_hacking=stop ends such a run."
        advice.append({"text": sentence, "todo": todo, "panel": "held_out", "level": "alarm"})
    for sentence in (evaluations or {}).get("notices", []):
        todo = "Look at the images; where variety matters, a smaller learning rate or an earlier version keeps more."
        advice.append({"text": sentence, "todo": todo, "panel": "diversity", "level": "warning"})
    shown_already = {entry["text"] for entry in advice}
    recorded = [*run.summary.get("failed", []), *run.summary.get("warnings", warnings_of(run.metrics))]
    plain = [{"text": s, "todo": "", "panel": None, "level": "warning"} for s in recorded if s not in shown_already]
    return [*advice, *plain, *filter(None, (_applied(rule, run.metrics) for rule in RULES))]


def _applied(rule: Rule, metrics: Sequence[Metrics]) -> dict[str, Any] | None:
    values = [line[rule.key] for line in metrics if line.get(rule.key) is not None][-RECENT_STEPS:]
    if len(values) < rule.min_steps or not rule.holds(value := fmean(values)):
        return None
    text = rule.text.format(value=value, steps=len(values))
    return {"text": text, "todo": rule.todo, "panel": rule.panel, "level": "warning"}
