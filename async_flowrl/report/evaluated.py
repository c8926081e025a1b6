"""The evaluations of a run for its report: a row each, trained beside held-out terms, with alarms and notices."""

from collections.abc import Sequence
from typing import Any

from async_flowrl.observability.evaluations import (
    DIVERSITY,
    HELD_OUT,
    TRAINED,
    Evaluation,
    between,
    first_comparable,
)
from async_flowrl.observability.hacking import alarms, notices
from async_flowrl.report.thin import chosen, rounded

KINDS = {TRAINED: "trained", HELD_OUT: "held out", DIVERSITY: "diversity"}
MAX_ROWS = 40
EXPLAINED = (
    "Mean ± half of the 95 % interval, errors clustered by prompt; below it, in the same way, the change since the "
    "first evaluation, paired by prompt and noise."
)


def evaluations_of(history: Sequence[Evaluation], on_hacking: str) -> dict[str, Any] | None:
    """`columns` (name and kind of each curve), `rows`, and the sentences that evaluations gave cause for."""
    if not history:
        return None
    names = {name: curve.kind for e in history for name, curve in e.curves.items()}
    ordered = sorted(names, key=lambda name: (list(KINDS).index(names[name]), name != "reward"))
    ordered = [name for name in ordered if not _is_the_reward(name, history)]
    fired = alarms(history) if on_hacking != "ignore" else []
    return {
        "columns": [{"name": name, "kind": KINDS[names[name]]} for name in ordered],
        "rows": [_row(e, history, ordered) for e in chosen(history, MAX_ROWS)],
        "count": len(history),
        "explained": EXPLAINED,
        "alarms": list({alarm.curve: alarm.sentence for alarm in fired}.values()),
        "notices": [notice.sentence for notice in notices(history)],
    }


def _is_the_reward(name: str, history: Sequence[Evaluation]) -> bool:
    """Whether a trained term is the only one, with weight 1, so that its column would be the reward's once more."""
    pairs = [(e.curves.get(name), e.curves.get("reward")) for e in history]
    return name != "reward" and all(
        one and two and one.kind == TRAINED and one.scores == two.scores for one, two in pairs
    )


def _row(evaluation: Evaluation, history: Sequence[Evaluation], names: Sequence[str]) -> dict[str, Any]:
    first = None if evaluation.baseline else first_comparable(history, evaluation)
    return {
        "version": evaluation.version,
        "baseline": evaluation.baseline,
        "steps": evaluation.steps,
        "guidance": evaluation.guidance,
        "cells": {name: _cell(name, evaluation, first) for name in names if name in evaluation.curves},
    }


def _cell(name: str, evaluation: Evaluation, first: Evaluation | None) -> dict[str, Any]:
    found = evaluation.curves[name].estimate()
    moved = None if first is None else between(name, evaluation, first)
    return {
        "mean": rounded(found.mean),
        "half": None if found.high is None else rounded(found.high - found.mean),
        "change": moved and rounded(moved.mean),
        "change_half": moved and rounded(moved.half),
    }
