"""Comparison of a run with the planner: the first half of its steps predicts the second; made when a run has ended."""

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
"""Fewest steps after the warm-up for a comparison: one half is learnt from, the other half is predicted."""
MAX_SIMULATED_STEPS = 60
"""Upper limit of the run's steps that are simulated; the prediction settles long before that."""


def predicted_against_actual(run: Path) -> dict[str, Any] | None:
    """Predicts the second half of a run's steps from the durations of the first half and compares it with the records.

    The result has `predicted` and `actual` (seconds per step, each pool's busy share), `deviation` (actual ÷ predicted
    - 1), `learnt_from_steps` [first, end) and `sentence`; it is None if the run is too short, recorded too little, or
    its rollout pool changed its size. Deviations come from checkpoints, evaluations that the first half did not
    have, pools that slow each other down, or work that changed.
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
    """Writes the comparison, or null, as `plan` into the run's summary.json. Returns its sentence, or None."""
    directory = RunDirectory(run)
    compared = predicted_against_actual(run)
    directory.write_summary({**json.loads(directory.summary.read_text()), "plan": compared})
    return None if compared is None else str(compared["sentence"])
