"""Comparison of a run with its plan: what the first half of its steps predicts of the second half."""

import json
from pathlib import Path
from typing import Any

from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.observability.summary import WARM_UP_STEPS
from async_flowrl.plan.calibrate import NothingToLearn, actual, calibrate
from async_flowrl.plan.show import comparison
from async_flowrl.plan.simulate import simulate

POOLS = ("rollout", "trainer")
"""Pools whose busy shares are compared."""
MIN_STEPS = 8
"""Steps after the warm-up that a comparison needs: half of them to learn from, half to predict."""
MAX_SIMULATED_STEPS = 60
"""Of a run's steps; simulating more of them changes nothing."""


def predicted_against_actual(run: Path) -> dict[str, Any] | None:
    """Prediction for the second half of a run's steps, by laws from the first half, and what that half really took.

    `sentence` says it in words. None for runs that are too short, and where the rollout pool changed its size. A gap is
    time that the schedule does not explain: evaluations and checkpoints, pools that slow each other down, or work that
    changed over the run.
    """
    try:
        whole = calibrate(run)
        count = whole.steps - WARM_UP_STEPS - whole.config.max_staleness
        if count < MIN_STEPS or whole.resized:
            return None
        half = whole.began + WARM_UP_STEPS + count // 2
        learnt = calibrate(run, last=half)
    except NothingToLearn:
        return None
    measured = actual(run, first=half)
    if measured is None:
        return None
    steps = min(whole.config.total_steps, MAX_SIMULATED_STEPS) + learnt.layout.max_staleness + WARM_UP_STEPS
    plan = simulate(learnt.work, learnt.layout, steps=steps)
    compared: dict[str, Any] = {
        "predicted": {"step_seconds": plan.step_seconds} | {pool: plan.busy(pool) for pool in POOLS},
        "actual": {"step_seconds": measured.step_seconds} | {pool: measured.busy.get(pool, 0.0) for pool in POOLS},
        "deviation": measured.step_seconds / plan.step_seconds - 1.0,
        "learnt_from_steps": [whole.began + WARM_UP_STEPS, half],
    }
    return {**compared, "sentence": comparison(compared)}


def add_prediction(run: Path) -> str | None:
    """Adds `plan` to a run's summary.json; returns the sentence, or None for a run that is too short."""
    directory = RunDirectory(run)
    compared = predicted_against_actual(run)
    directory.write_summary({**json.loads(directory.summary.read_text()), "plan": compared})
    return None if compared is None else str(compared["sentence"])
