"""Tests of evaluations beside training: they change nothing, hold nothing up, and get their share."""

from typing import Any

import pytest

from async_flowrl.tickets.table import EVALUATION
from tests.support.run_checks import check_bound, check_evaluation, check_watermarks
from tests.support.toy_pool import Timing
from tests.unit.loop_runs import MODES, SHAKEN, run


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_changes_nothing_and_sees_its_own_version_only(mode: str) -> None:
    plain = run(mode, timing=SHAKEN)
    found = run(mode, timing=SHAKEN, evaluate__every=2, evaluate__before_training=True)
    check_evaluation(found, [0, 2, 4, 6])
    assert found.digest == plain.digest
    assert found.published() == plain.published()
    check_bound(found, MODES[mode][0])
    check_watermarks(found)


class SlowEvaluation(Timing):
    """Evaluation tickets take 12 seconds, training tickets half a second."""

    def duration(self, worker: str, method: str, call: int, args: tuple[Any, ...] = ()) -> float:
        if method == "generate":
            return 12.0 if args[0][0].kind == EVALUATION else 0.5
        return super().duration(worker, method, call, args)


def test_evaluation_is_no_barrier() -> None:
    """While an evaluation is under way training tickets are started, and steps are finished."""
    found = run("one_step_off", timing=SlowEvaluation(update=0.5), evaluate__every=3, rollout__num_workers=3)
    begun = found.tickets("PENDING", kind="evaluation")[::2]
    ended = found.tickets("TRAINED", kind="evaluation")[::2]
    assert [event["version"] for event in begun] == [3, 6]
    during = [e for e in found.observer.of("step") if begun[0]["time"] < e["started"] < ended[0]["time"]]
    assert during, "training stood still"
    assert [e for e in found.tickets("RUNNING") if begun[0]["time"] < e["time"] < ended[0]["time"]]


def test_an_evaluation_has_a_guaranteed_share() -> None:
    """A pool that is never idle still takes every fourth ticket from it."""
    found = run("fully_async", timing=Timing(update=0.1), evaluate__every=2, rollout__num_workers=1)
    begun, ended = (found.tickets(state, kind="evaluation")[::2] for state in ("PENDING", "TRAINED"))
    for first, last in zip(begun, ended, strict=True):
        others = [e for e in found.tickets("RUNNING") if first["time"] < e["time"] < last["time"]]
        assert len(others) <= 8


def test_a_second_evaluation_waits_for_the_first_and_loses_nothing() -> None:
    timing = Timing(generate=1.0, score=0.1, slow={})
    found = run("one_step_off", timing=timing, evaluate__every=1, rollout__num_workers=1)
    check_evaluation(found, [1, 2, 3, 4, 5, 6])
    alive: set[int] = set()
    for event in found.observer.of("ticket", kind="evaluation"):
        (alive.discard if event["state"] == "TRAINED" else alive.add)(event["version"])
        assert len(alive) <= 1
