"""Toy runs of the loop in each of its modes."""

from typing import Any

from tests.support.run_checks import STEPS
from tests.support.toy import ToyRun, calm_run, toy_config
from tests.support.toy_pool import Timing

MODES = {"sync": (0, "batch"), "stream": (0, "stream"), "one_step_off": (1, "batch"), "fully_async": (3, "stream")}
SHAKEN = Timing(seed=7, spread=0.9, slow={"rollout-1": 3.0})
TICKETS_PER_STEP = 4


def run(mode: str = "one_step_off", *, timing: Timing | None = None, **changes: Any) -> ToyRun:
    k, hand_over = MODES[mode]
    return calm_run(toy_config(k, hand_over=hand_over, steps=STEPS, **changes), timing)


def inverted(found: ToyRun) -> bool:
    """Whether some training ticket was finished before one with a lower ordinal."""
    order = [event["ordinal"] for event in found.tickets("SCORING")]
    return order != sorted(order)
