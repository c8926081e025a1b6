"""Real processes, really killed: a rollout worker, a trainer rank, the driver. The weights do not notice."""

import os
import signal
from pathlib import Path

import pytest

from async_flowrl.prove import digest, events, finish, killed, start, undisturbed, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "run", [])


def pid_of(folder: Path, worker: str) -> int:
    return int([event["pid"] for event in events(folder, "worker") if event["worker"] == worker][-1])


def test_a_killed_rollout_worker_and_a_killed_driver(expected: str, tmp_path: Path) -> None:
    assert killed(tmp_path / "run", []) == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_trainer_rank(expected: str, tmp_path: Path, ranks: int) -> None:
    folder = tmp_path / "run"
    several = [f"trainer.num_workers={ranks}", "trainer.micro_batch_size=8"] if ranks > 1 else []
    wanted = undisturbed(tmp_path / "whole", several) if several else expected
    run = start(folder, [*several, "debug.delays.generate=0.2"])
    wait_for(run, folder, lambda: (folder / "checkpoints" / "step_3").exists(), "checkpoint 3 is written")
    wait_for(run, folder, lambda: any(e["step"] == 4 for e in events(folder, "step")), "step 4 is done")
    os.kill(pid_of(folder, f"trainer-{ranks - 1}"), signal.SIGKILL)
    finish(run, folder)
    assert [event["step"] for event in events(folder, "rollback")] in ([3], [6])
    assert digest(folder) == wanted


def test_all_rollout_workers_killed_at_once(expected: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(folder, ["rollout.num_workers=2", "debug.delays.generate=0.2"])
    wait_for(run, folder, lambda: any(e["step"] == 2 for e in events(folder, "step")), "step 2 is done")
    for name in ("rollout-0", "rollout-1"):
        os.kill(pid_of(folder, name), signal.SIGKILL)
    finish(run, folder)
    assert len(events(folder, "fault")) >= 2
    assert digest(folder) == expected
