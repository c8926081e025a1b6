"""The report's table of evaluations: a row per evaluation, a column per score, with alarms and notices."""

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
    """The table as a dictionary; None without evaluations. `count` is the number of evaluations before thinning.

    `rows` has at most MAX_ROWS of them. `alarms` holds the newest sentence per held-out curve, and is empty if
    `on_hacking` (the setting evaluate.on_hacking) is "ignore".
    """
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
    """True if a trained term always has the reward's scores (a single term of weight 1), so it needs no column."""
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
    estimate = evaluation.curves[name].estimate()
    moved = None if first is None else between(name, evaluation, first)
    return {
        "mean": rounded(estimate.mean),
        "half": None if estimate.high is None else rounded(estimate.high - estimate.mean),
        "change": moved and rounded(moved.mean),
        "change_half": moved and rounded(moved.half),
    }
