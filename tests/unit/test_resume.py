"""Tests of controllers that go on: where a killed one was, from an older checkpoint, or from one of another run."""

import asyncio
from pathlib import Path

import pytest

from async_flowrl.controller.resume import Resume
from async_flowrl.observability.evaluations import Evaluation, EvaluationLog
from async_flowrl.run.recovery import with_unevaluated
from async_flowrl.types import EMA, POLICY
from tests.chaos.recovery_schedules import undisturbed
from tests.support.toy_recovery import Groups, Outside, at, events, kill_after, rollbacks, summary
from tests.unit.recovery_runs import check_equal, config, go


@pytest.mark.parametrize(
    ("seconds", "workers"), [(0.0, 1), (1.0, 4), (3.3, 1), (7.9, 4), (12.2, 1), (17.0, 4), (25.0, 1)]
)
def test_a_killed_controller_and_resume(seconds: float, workers: int, tmp_path: Path) -> None:
    left = go(tmp_path / "run", disturb=kill_after(seconds))
    assert left is not None and not (left / "summary.json").exists()
    assert go(left, rollout__num_workers=workers) is None
    assert len(rollbacks(left)) == 1
    check_equal(left)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("grown", [True, False])
def test_a_killed_controller_of_an_elastic_pool_and_resume_with_another_size(
    grown: bool, workers: int, tmp_path: Path
) -> None:
    """It has four workers, or one, when it is killed; after it has gone on all leave, and two come later."""
    bounds = {"rollout__min_workers": 1, "rollout__max_workers": 4}

    async def resize(outside: Outside, groups: Groups) -> None:
        pool = groups["rollout"]
        await asyncio.sleep(0.5)
        for _ in range(2 * grown):
            pool.growth.arrive()
        if not grown:
            pool.growth.drain(pool.workers[0], seconds=0.4)
        await asyncio.sleep(7.0)
        assert len(pool.workers) == (4 if grown else 1)
        outside.kill()

    async def all_leave(outside: Outside, groups: Groups) -> None:
        pool = groups["rollout"]
        await asyncio.sleep(2.5)
        for worker in list(pool.workers):
            pool.growth.drain(worker, seconds=0.3)
        await asyncio.sleep(15.0)
        assert not pool.workers
        pool.growth.arrive()
        pool.growth.arrive()

    left = go(tmp_path / "run", disturb=resize, **bounds)
    assert left is not None
    assert go(left, disturb=all_leave, rollout__num_workers=workers, **bounds) is None
    assert [event["workers"] for event in events(left, "worker_left")][-1] == 0
    assert [event["workers"] for event in events(left, "worker_joined")][-2:] == [1, 2]
    check_equal(left)


def test_an_older_checkpoint_on_purpose(tmp_path: Path) -> None:
    """Later ones are of a history that has ended: a trainer that dies then must not go on from them."""
    root = tmp_path / "run"
    assert go(root, save__keep=9) is None
    older = root / "checkpoints" / "step_2"
    assert go(root, at(add_up_1="kill"), resume=str(older), save__keep=9) is None
    assert rollbacks(root) == [2, 2]
    check_equal(root)


def test_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    """It is copied into the run's own folder before anything else, so that a trainer may die at once."""
    root = tmp_path / "run"
    assert go(tmp_path / "other", save__keep=9) is None
    other = tmp_path / "other" / "checkpoints" / "step_4"
    assert go(root, at(add_up_1="kill"), resume=str(other)) is None
    assert rollbacks(root) == [4, 4]
    assert summary(root)["weights_digest"] == undisturbed(1).digest


def test_of_the_held_versions_only_those_are_kept_whose_evaluation_is_lacking(tmp_path: Path) -> None:
    log = EvaluationLog(tmp_path / "evaluations.jsonl")
    log.add(Evaluation(2, False, "same", 12, 1.0, {}))
    log.add(Evaluation(4, True, "same", 12, 1.0, {}))
    resume = Resume(None, 6, {}, held=frozenset({(POLICY, 2), (POLICY, 4), (EMA, 5)}))
    assert with_unevaluated(config(), resume, log).held == {(POLICY, 4)}
    assert with_unevaluated(config(trainer__ema_decay=0.9), resume, log).held_versions == {5}
