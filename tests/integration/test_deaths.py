"""Tests with SIGKILL on real processes: after the death of any of them, the weights are the undisturbed ones."""

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from async_flowrl.cli.verify import verify
from benchmarks import prove
from benchmarks.prove import SHORT_RUN, digest, events, finish, killed, running_worker, start, undisturbed, wait_for
from separation.processes import alive
from tests.integration.runs import lines
from tests.support.killed_trainer import PHASES, drawn, run_killed

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "run", [])


def test_a_killed_rollout_worker_and_a_killed_driver(expected: str, tmp_path: Path) -> None:
    assert killed(tmp_path / "run", []) == expected


def test_a_killed_driver_and_a_reward_that_is_not_deterministic(tmp_path: Path) -> None:
    """Every score is a random number: the trained ones are those of the first time only if they were kept."""
    folder = tmp_path / "run"
    dice = ["~reward.terms.color", "+reward.terms={dice: {name: 'tests.integration.brightness:Dice'}}"]

    def scored() -> list[dict[str, Any]]:
        return lines(folder / "scores.jsonl")

    run = start(folder, [*dice, "disturb.update=0.3"])
    wait_for(run, folder, lambda: (folder / "checkpoints" / "step_3").exists(), "checkpoint 3 is written")
    wait_for(run, folder, lambda: max(line["step"] for line in scored()) >= 5, "a group of step 5 is scored")
    run.send_signal(signal.SIGKILL)
    run.wait()
    known = scored()
    finish(start(folder, [*dice, "resume=auto"]), folder)
    (back,) = [event["step"] for event in events(folder, "rollback")]
    assert [line for line in known if line["step"] >= back], "nothing was there to reuse"
    assert scored()[: len(known)] == known
    totals = {(line["step"], line["group"]): line["total"] for line in scored()}
    assert len(totals) == len(scored()), "a group was scored twice"
    for line in lines(folder / "metrics.jsonl"):
        own = [total for (step, _), total in totals.items() if step == line["step"]]
        assert line["reward/mean"] == pytest.approx(np.mean(own), rel=1e-12)
    assert [row for row in verify(folder) if not row[1]] == []


ALONE, TWO = "trainer.num_workers=1", "trainer.num_workers=2"
BY_GLOO = "checkpoint_engine.transport=gloo"
HYBRID = ("trainer.num_workers=4", "trainer.shard=hybrid", "trainer.shard_size=2")


@pytest.mark.parametrize(
    ("victim", "settings"),
    [
        (0, (ALONE,)),
        (1, (TWO,)),
        (0, (TWO, BY_GLOO, "hand_over=stream")),
        (0, (TWO, "trainer.ema_decay=0.9", "evaluate.every=3")),
        (0, (TWO, "trainer.shard=full")),
        (3, HYBRID),
        (0, HYBRID),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else " ".join(value),
)
def test_a_killed_trainer_rank(expected: str, tmp_path: Path, victim: int, settings: tuple[str, ...]) -> None:
    """All ranks start again with the state that was kept, in place of the checkpoint of step 3."""
    folder = tmp_path / "run"
    run = start(folder, [*settings, "disturb.generate=0.2"])
    wait_for(run, folder, lambda: (folder / "checkpoints" / "step_3").exists(), "checkpoint 3 is written")
    wait_for(run, folder, lambda: any(e["step"] == 4 for e in events(folder, "step")), "step 4 is done")
    (pid,) = [event["pid"] for event in events(folder, "worker") if event["worker"] == f"trainer-{victim}"]
    os.kill(pid, signal.SIGKILL)
    finish(run, folder)
    (back,) = [event["step"] for event in events(folder, "rollback")]
    died = next(event["time"] for event in events(folder, "fault") if event["worker"] == f"trainer-{victim}")
    trained = max(event["step"] + 1 for event in events(folder, "step") if event["time"] < died)
    assert trained - 1 <= back <= trained
    assert digest(folder) == expected
    assert [row for row in verify(folder) if not row[1]] == []


def test_a_hung_rollout_worker_is_killed_before_its_slot_is_used_again(expected: str, tmp_path: Path) -> None:
    """It is stopped in the middle of a ticket, as a process that waits for a device for ever would be."""
    folder = tmp_path / "run"
    slow = ["rollout.num_workers=2", "disturb.generate=0.5", "disturb.constant=true"]
    run = start(folder, [*slow, "deadlines.generate=10"])
    hung = wait_for(run, folder, lambda: running_worker(folder, step=2), "a ticket of step 2 is RUNNING")
    name = next(event["worker"] for event in events(folder, "worker") if event["pid"] == hung)
    process = psutil.Process(hung)
    os.kill(hung, signal.SIGSTOP)
    slot = name.split(".")[0]
    wait_for(
        run,
        folder,
        lambda: f"{slot}.1" in {event["worker"] for event in events(folder, "worker")},
        "its slot is used again",
    )
    assert not alive(process), "the hung process still lives"
    finish(run, folder)
    (fault,) = events(folder, "fault")
    assert (fault["worker"], fault["kind"]) == (name, "DeadlineExceeded")
    assert digest(folder) == expected


SEED = int(os.environ.get("KILL_SEED", "0"))
"""Another seed draws other instants: KILL_SEED=$RANDOM pytest -m slow tests/integration/test_deaths.py."""
STEPS = 24
MAX_SECONDS = 900.0


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "ranks", "settings"),
    [
        ("none", 2, ("trainer.shard=none",)),
        ("hybrid", 4, ("trainer.shard=hybrid", "trainer.shard_size=2")),
        ("shared", 2, ("placement=shared", "rollout.num_workers=2")),
    ],
)
def test_ten_kills_of_trainer_ranks(tmp_path: Path, name: str, ranks: int, settings: tuple[str, ...]) -> None:
    calm, folder, kills = tmp_path / "calm", tmp_path / "run", drawn(SEED, name, ranks=ranks)
    own = [f"total_steps={STEPS}", f"trainer.num_workers={ranks}", "save.every=1000", *settings]
    finish(start(calm, own), calm)
    killed = run_killed(kills, folder, *SHORT_RUN, *own, seconds=MAX_SECONDS)
    assert killed == [f"{kill.step} {kill.rank} {kill.phase}" for kill in kills]
    assert Counter(kill.phase for kill in kills) == dict.fromkeys(PHASES, 2)
    assert len(events(folder, "rollback")) == len(killed), "each death is a recovery"
    assert digest(folder) == digest(calm)
    assert [row for row in verify(folder) if not row[1]] == []
    print(json.dumps([event["step"] for event in events(folder, "rollback")]))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("place", [0, 1], ids=["on one rank", "in shares of two ranks"])
def test_the_rows_of_whole_weights_have_one_digest(tmp_path: Path, place: int) -> None:
    """A case raises NotProven if its disturbance does not happen. Every step changes the weights, so they differ."""
    family = prove.whole_weights([])[place]
    assert "tune=full" in family.overrides and ("trainer.shard=full" in family.overrides) == bool(place)
    digests = prove.run_cases(family, tmp_path)
    assert len(digests) == len(family.cases) >= 2 and len(set(digests.values())) == 1
    for number in range(len(family.cases)):
        versions = prove.events(tmp_path / f"{family.folder}_{number}", "version")
        sent = {event["digest"] for event in versions if event["state"] == "sent" and event["stream"] == "policy"}
        assert len(sent) == 7, "versions 0 to 6, each of which is another, also when it is sent again"
