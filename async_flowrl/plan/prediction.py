"""A run against its own plan: what its first half predicts of its second."""

import json
from pathlib import Path
from typing import Any

from async_flowrl.observability.report import write_report
from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.observability.summary import WARM_UP_STEPS
from async_flowrl.plan.calibrate import NothingToLearn, actual, calibrate
from async_flowrl.plan.show import comparison
from async_flowrl.plan.simulate import simulate

LEAST_STEPS = 8
"""Steps after the warm-up from which a run is compared with its plan: half of them to learn from, half to predict."""


def predicted_against_actual(run: Path) -> dict[str, Any] | None:
    """Learns the laws from the first half of a run's steps and predicts the second half; what that half really took.

    `sentence` says it in words. None for runs too short to tell. A gap is time the schedule does not explain:
    evaluations and checkpoints, pools that slow each other down, or work that changed over the run.
    """
    try:
        whole = calibrate(run)
        count = whole.steps - WARM_UP_STEPS - whole.config.max_staleness
        if count < LEAST_STEPS:
            return None
        half = WARM_UP_STEPS + count // 2
        learnt = calibrate(run, last=half)
    except NothingToLearn:
        return None
    measured = actual(run, first=half)
    if measured is None:
        return None
    steps = min(whole.config.total_steps, 60) + learnt.layout.max_staleness + WARM_UP_STEPS
    plan = simulate(learnt.work, learnt.layout, steps=steps)
    found: dict[str, Any] = {
        "predicted": {
            "step_seconds": plan.step_seconds,
            "rollout": plan.busy("rollout"),
            "trainer": plan.busy("trainer"),
        },
        "actual": {
            "step_seconds": measured.step_seconds,
            "rollout": measured.busy.get("rollout", 0.0),
            "trainer": measured.busy.get("trainer", 0.0),
        },
        "deviation": measured.step_seconds / plan.step_seconds - 1.0,
        "learnt_from_steps": [WARM_UP_STEPS, half],
    }
    return {**found, "sentence": comparison(found)}


def add_prediction(run: Path) -> str | None:
    """Adds `plan` to a run's summary.json and report; returns the sentence, None for a run too short to tell."""
    directory = RunDirectory(run)
    found = predicted_against_actual(run)
    directory.write_summary({**json.loads(directory.summary.read_text()), "plan": found})
    if found is None:
        return None
    if directory.report.exists():
        write_report(run)
    return str(found["sentence"])
