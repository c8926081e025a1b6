"""Tests of overlap: generation and training run at the same time, and each second is booked for its own stage."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.integration.runs import WHOLE, Run, train, train_here_on_ray

WORK = (*WHOLE, "group_size=16", "trainer.micro_batch_size=16", "total_steps=14")
SLEEP = ("debug.delays.slow_worker=8", "total_steps=8")
"""A slow worker sleeps, and is booked as busy: generation takes longest, so that updates fall into it."""
DELAY = 0.7
"""Seconds; nothing in the tiny model takes as long, not even where several processes want the same core."""
STAGES = ("generate", "score", "update", "publish")
pytestmark = pytest.mark.serial("runs")


@pytest.mark.slow
@pytest.mark.usefixtures("ray_here")
def test_processes_that_work_overlap(tmp_path: Path) -> None:
    check_overlap(train_here_on_ray, WORK, 0.8, tmp_path)


def test_one_step_off_overlaps_generation_and_training(tmp_path: Path) -> None:
    check_overlap(train, SLEEP, 0.4, tmp_path)


def check_overlap(how: Callable[..., Run], stages: tuple[str, ...], least: float, tmp_path: Path) -> None:
    """At least 0.8 of what could overlap does on a quiet machine, half of that on any; in sync, nothing does."""
    overlapped = how(tmp_path / "one_step_off", "one_step_off", *stages).summary
    assert overlapped["overlap"]["share"] >= least
    assert overlapped["bound"]["generation"] > 0 and overlapped["bound"]["update"] > 0
    in_turn = train(tmp_path / "sync", "sync", *stages, "total_steps=4").summary
    assert in_turn["overlap"]["share"] < 0.02
    assert in_turn["efficiency"] < overlapped["efficiency"]


def seconds(run: Run) -> dict[str, list[float]]:
    """What every call of each stage took, from the run's own records."""
    tickets: dict[int, dict[str, float]] = {}
    versions: dict[int, dict[str, float]] = {}
    for event in run.events:
        if event["event"] == "ticket" and event["kind"] == "train":
            tickets.setdefault(event["ordinal"], {})[event["state"]] = event["time"]
        elif event["event"] == "version" and event["version"] > 0:
            versions.setdefault(event["version"], {})[event["state"]] = event["time"]
    return {
        "generate": [t["SCORING"] - t["RUNNING"] for t in tickets.values()],
        "score": [t["READY"] - t["SCORING"] for t in tickets.values()],
        "update": run.column("timing/update"),
        "publish": [v["acknowledged"] - v["staged"] for v in versions.values()],
    }


@pytest.mark.parametrize("stage", STAGES)
def test_a_delay_moves_the_seconds_of_its_stage_and_of_no_other(tmp_path: Path, stage: str) -> None:
    """The quickest call of a stage shows it: whatever else a busy machine does can only make a call longer."""
    delayed = [f"debug.delays.{stage}={DELAY}", "debug.delays.constant=true"]
    run = train(tmp_path, "sync", "total_steps=2", "prompts_per_step=1", *delayed)
    quickest = {name: min(found) for name, found in seconds(run).items()}
    assert DELAY <= quickest.pop(stage) < 2 * DELAY
    assert all(others < DELAY for others in quickest.values()), quickest


def test_the_pools_account_for_injected_time(tmp_path: Path) -> None:
    """All of it in the pool that spent it, and as waiting in the one that waited."""
    delayed = [f"debug.delays.generate={DELAY}", "debug.delays.constant=true"]
    run = train(tmp_path, "sync", "total_steps=2", *delayed)
    calls = len(run.tickets("RUNNING")) + len(run.tickets("RUNNING", kind="evaluation"))
    pools = run.summary["pools"]
    assert pools["rollout"]["busy"] >= calls * DELAY
    assert pools["trainer"]["busy"] < calls * DELAY
    assert pools["trainer"]["wait_data"] >= len(run.tickets("RUNNING")) * DELAY


def test_steps_follow_one_another(tmp_path: Path) -> None:
    run = train(tmp_path, "fully_async")
    steps = [event for event in run.events if event["event"] == "step"]
    assert all(one["ended"] == other["started"] for one, other in pairwise(steps))
    assert sum(run.column("timing/step")) == pytest.approx(steps[-1]["ended"] - steps[0]["started"])
