"""Tests of evaluations beside training: they change nothing, hold nothing up, and get their share."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_checks import check_bound, check_evaluation, check_watermarks
from tests.support.toy_pool import Timing
from tests.support.toy_recovery import Groups, Outside, evaluations, kill_after, rollbacks
from tests.unit.loop_runs import MODES, SHAKEN, run
from tests.unit.recovery_runs import go


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_changes_nothing_and_sees_its_own_version_only(mode: str) -> None:
    plain = run(mode, timing=SHAKEN)
    found = run(mode, timing=SHAKEN, evaluate__every=2, evaluate__before_training=True)
    check_evaluation(found, [0, 2, 4, 6])
    assert found.digest == plain.digest
    assert found.published() == plain.published()
    check_bound(found, MODES[mode][0])
    check_watermarks(found)


def test_evaluation_is_no_barrier() -> None:
    """While an evaluation is under way training tickets are started, and steps are finished."""
    found = run(
        "one_step_off",
        timing=Timing(generate=0.5, update=0.5, evaluation={3: 12.0, 6: 12.0}),
        evaluate__every=3,
        rollout__num_workers=3,
    )
    begun = found.tickets("PENDING", kind="evaluation")[::2]
    ended = found.tickets("TRAINED", kind="evaluation")[::2]
    assert [event["version"] for event in begun] == [3, 6]
    during = [e for e in found.observer.of("step") if begun[0]["time"] < e["started"] < ended[0]["time"]]
    assert during, "training stood still"
    assert [e for e in found.tickets("RUNNING") if begun[0]["time"] < e["time"] < ended[0]["time"]]


def test_a_second_evaluation_waits_for_the_first_and_loses_nothing() -> None:
    timing = Timing(generate=1.0, score=0.1, slow={})
    found = run("one_step_off", timing=timing, evaluate__every=1, rollout__num_workers=1)
    check_evaluation(found, [1, 2, 3, 4, 5, 6])
    alive: set[int] = set()
    for event in found.observer.of("ticket", kind="evaluation"):
        (alive.discard if event["state"] == "TRAINED" else alive.add)(event["version"])
        assert len(alive) <= 1


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
    settings: dict[str, Any] = {"k": 0, "evaluate__every": 2, "save__every": 1, "tune": tune}
    left = go(tmp_path / "run", timing=Timing(evaluation={2: 15.0}), disturb=kill_after(26.0), **settings)
    assert left is not None
    assert 2 not in evaluations(left)
    assert go(left, **settings) is None
    assert rollbacks(left)[0] > 2
    gone = "versions [2] were being evaluated when their attempt ended; their weights are gone" in caplog.text
    assert gone == (tune == "full")
    assert sorted(evaluations(left)) == ([4, 6] if gone else [2, 4, 6])
