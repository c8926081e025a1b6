"""Toy runs of one attempt after another, and the undisturbed run that they must be equal to."""

from pathlib import Path
from typing import Any

from async_flowrl.cli.verify import verify
from async_flowrl.config.schema import Config
from tests.chaos.recovery_schedules import STEPS, undisturbed
from tests.support.toy import toy_config
from tests.support.toy_pool import Fault, Timing, World, no_fault
from tests.support.toy_recovery import Disturb, logged, run_controller, summary


def config(k: int = 1, **changes: Any) -> Config:
    settings = {"resume": "auto", "monitor__progress": False, "save__every": 2} | changes
    return toy_config(k, steps=STEPS, **settings)


def go(
    root: Path, fault: Fault = no_fault, *, timing: Timing | None = None, disturb: Disturb | None = None, **changes: Any
) -> Path | None:
    return run_controller(config(**changes), root, World(timing or Timing(), fault), disturb=disturb)


def check_equal(found: Path, k: int = 1) -> None:
    """Weights, logged rewards and trained tickets are those of the undisturbed run, whose reward is deterministic."""
    assert not (found / "scores.jsonl").exists()
    assert summary(found)["weights_digest"] == undisturbed(k).digest
    assert logged(found) == undisturbed(k).lines
    assert [row for row in verify(found) if not row[1]] == []
