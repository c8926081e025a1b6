"""The part of summary.json about evaluations and reward hacking."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from async_flowrl.config.curves import best_curve
from async_flowrl.config.schema import Config
from async_flowrl.observability.evaluations import Evaluation, between, first_of
from async_flowrl.observability.hacking import alarms, best, notices
from async_flowrl.observability.statistics import CHANGE_FIELDS


def summarise_evaluations(config: Config, history: Sequence[Evaluation]) -> dict[str, Any]:
    """The values of the keys `evaluations` and `hacking` of summary.json; a missing evaluation is None."""
    policy = sorted((e for e in history if not e.baseline), key=lambda each: each.version)
    baseline = next((e for e in history if e.baseline), None)
    judged = config.evaluate.on_hacking != "ignore"
    return {
        "evaluations": {
            "first": _row(policy[0], history) if policy else None,
            "last": _row(policy[-1], history) if policy else None,
            "baseline": _row(baseline, history) if baseline else None,
            "best": best_row(config, history),
        },
        "hacking": {
            "alarms": [alarm.sentence for alarm in alarms(history)] if judged else [],
            "notices": [notice.sentence for notice in notices(history)],
        },
    }


def best_row(config: Config, history: Sequence[Evaluation]) -> dict[str, Any] | None:
    """`curve`, `version` and `mean` of the best version; None if no best version is kept or none was evaluated."""
    curve = best_curve(config)
    chosen = None if curve is None else best(history, curve)
    if curve is None or chosen is None:
        return None
    return {"curve": curve, "version": chosen.version, "mean": chosen.curves[curve].estimate().mean}


def _row(evaluation: Evaluation, history: Sequence[Evaluation]) -> dict[str, Any]:
    curves = {}
    for name, curve in evaluation.curves.items():
        first = None if evaluation.baseline else first_of(name, history, evaluation)
        moved = None if first is None else between(name, evaluation, first)
        paired = dict.fromkeys(CHANGE_FIELDS) if moved is None else moved.fields()
        curves[name] = {"kind": curve.kind, **asdict(curve.estimate()), **paired}
    return {
        "version": evaluation.version,
        "steps": evaluation.steps,
        "guidance": evaluation.guidance,
        "curves": curves,
    }
