"""That generation and training really happen at the same time, and that time is booked where it is spent."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest

from tests.integration.runs import Run, train, train_here_on_ray

WORK = ("group_size=16", "trainer.micro_batch_size=16", "total_steps=14")
DELAY = 0.2
TWO = "reward.num_workers=2"
"""One per group of a step, so that no group waits for another one's score."""
STAGES = ("generate", "score", "update", "publish")


@pytest.mark.usefixtures("ray_here")
def test_one_step_off_overlaps_generation_and_training(tmp_path: Path) -> None:
    """At least 0.8 of what could overlap does; in sync, nothing does."""
    overlapped = train_here_on_ray(tmp_path / "one_step_off", "one_step_off", *WORK).summary
    assert overlapped["overlap"]["share"] >= 0.8
    assert overlapped["bound"]["generation"] > 0 and overlapped["bound"]["update"] > 0
    in_turn = train_here_on_ray(tmp_path / "sync", "sync", *WORK).summary
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


@pytest.fixture(scope="module")
def undelayed(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[float]]:
    return seconds(train(tmp_path_factory.mktemp("undelayed"), "sync", TWO))


@pytest.mark.parametrize("stage", STAGES)
def test_a_delay_moves_the_seconds_of_its_stage_and_of_no_other(
    undelayed: Mapping[str, list[float]], tmp_path: Path, stage: str
) -> None:
    """The quickest call of a stage shows it: whatever else a busy machine does can only make a call longer."""
    found = seconds(train(tmp_path, "sync", TWO, f"debug.delays.{stage}={DELAY}", "debug.delays.constant=true"))
    moved = {name: min(found[name]) - min(undelayed[name]) for name in STAGES}
    assert moved.pop(stage) == pytest.approx(DELAY, abs=DELAY / 2)
    assert all(abs(others) < DELAY / 2 for others in moved.values()), moved


def test_the_pools_account_for_injected_time(tmp_path: Path) -> None:
    """All of it in the pool that spent it, and as waiting in the one that waited."""
    run = train(tmp_path, "sync", f"debug.delays.generate={DELAY}", "debug.delays.constant=true")
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
