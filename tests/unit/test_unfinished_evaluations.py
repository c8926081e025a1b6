"""Tests of evaluations under way when their attempt ends: made by the next one, or said to be missing."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from async_flowrl.types import EVALUATION
from tests.support.toy_pool import ListObserver, Timing, World, no_fault
from tests.support.toy_recovery import Groups, Outside, evaluations, kill_after, rollbacks, run_controller
from tests.unit.recovery_runs import config, go


@pytest.mark.parametrize(("k", "number"), [(0, 1), (0, 3), (1, 5), (3, 8)])
def test_an_evaluation_that_its_attempt_did_not_finish_is_made_by_the_next(k: int, number: int, tmp_path: Path) -> None:
    settings = {"evaluate__every": 2, "evaluate__before_training": True, "save__every": 1, "k": k}
    assert go(tmp_path / "calm", **settings) is None
    begun = 0

    def count(worker: str, method: str, call: int) -> None:
        nonlocal begun
        begun += method == "generate/evaluation"

    async def kill_in_evaluation(outside: Outside, groups: Groups) -> None:
        while begun < number:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        outside.kill()

    left = go(tmp_path / "run", count, disturb=kill_in_evaluation, **settings)
    assert left is not None
    assert len(evaluations(left)) == (number - 1) // 2, "the disturbance did not happen"
    assert go(left, **settings) is None
    assert sorted(evaluations(left)) == [0, 2, 4, 6]
    assert evaluations(left) == evaluations(tmp_path / "calm")


@pytest.mark.parametrize("tune", ["lora", "full"])
def test_a_slow_evaluation_is_made_by_the_next_controller_if_its_weights_are_held(
    tune: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A LoRA's are a part of the checkpoint; of whole weights it is said that they are gone."""

    class SlowEvaluation(Timing):
        def duration(self, worker: str, method: str, call: int, args: tuple[Any, ...] = ()) -> float:
            slow = method == "generate" and args[0][0].kind == EVALUATION and args[0][0].version == 2
            return 15.0 if slow else super().duration(worker, method, call, args)

    settings = config(0, evaluate__every=2, save__every=1, tune=tune)
    left = run_controller(
        settings, tmp_path / "run", World(SlowEvaluation(), no_fault, ListObserver()), disturb=kill_after(26.0)
    )
    assert left is not None
    assert 2 not in evaluations(left)
    assert run_controller(settings, left, World(Timing(), no_fault, ListObserver())) is None
    assert rollbacks(left)[0] > 2
    gone = "versions [2] were being evaluated when their attempt ended; their weights are gone" in caplog.text
    assert gone == (tune == "full")
    assert sorted(evaluations(left)) == ([4, 6] if gone else [2, 4, 6])
