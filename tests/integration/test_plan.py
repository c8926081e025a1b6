"""Tests of the planner against real processes: one synchronous run predicts the times of other modes and splits."""

from pathlib import Path

import pytest

from async_flowrl.config.compose import compose_config
from async_flowrl.plan.advise import advise
from async_flowrl.plan.calibrate import actual, calibrate
from async_flowrl.plan.foretell import step_time
from async_flowrl.plan.limits import Limits
from async_flowrl.plan.simulate import simulate
from async_flowrl.plan.work import Layout
from tests.integration.gates import steps_recorded
from tests.integration.leaps import PATIENT, leaping_clock
from tests.integration.runs import LOCAL, train
from tests.integration.sleeping import sleep_config, sleeping_run

TOLERANCE = 0.1
DEVICES = 8
UNSEEN = [(1, "stream", 6, 2), (2, "stream", 6, 2), (1, "stream", 4, 4), (1, "batch", 7, 1)]
"""(max_staleness, hand_over, rollout, trainer)."""


def test_a_run_of_one_pool_foretells_what_it_would_take_to_go_on(tmp_path: Path) -> None:
    """A real worker that samples and trains: its spans say how long a step is.

    By a leaping clock that is 4000 s, so that the real work counts for nothing. In sync with one group per step,
    nothing else is under way when the clock leaps, and seems to last as long.
    """
    settings = [*LOCAL, "placement=shared", "prompts_per_step=1"]
    with leaping_clock(generate=3000.0, update=1000.0), steps_recorded():
        run = train(tmp_path, "sync", *settings, *PATIENT, "total_steps=8")
    steps = [event["ended"] - event["started"] for event in run.events if event["event"] == "step"][2:-1]
    took = sum(steps) / len(steps)
    assert took == pytest.approx(4000.0, rel=0.1)
    said = step_time(compose_config("sync", [*settings, "total_steps=20"]), run.root)
    assert said.endswith("for the 12 that are left"), said
    assert float(said.split()[0]) == pytest.approx(took, rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_synchronous_run_predicts_the_others(tmp_path: Path) -> None:
    learnt = calibrate(sleeping_run(tmp_path / "sync", sleep_config(0, "batch", 6, 2)))
    measured: dict[tuple[int, int], float] = {}
    for k, hand_over, rollout, trainer in UNSEEN:
        directory = sleeping_run(tmp_path / f"{k}-{hand_over}-{rollout}", sleep_config(k, hand_over, rollout, trainer))
        found = actual(directory)
        assert found is not None
        predicted = simulate(learnt.work, Layout(rollout, trainer, 2, k, hand_over), steps=60).step_seconds
        assert predicted == pytest.approx(found.step_seconds, rel=TOLERANCE), (k, hand_over, rollout, trainer)
        measured[rollout, trainer] = min(found.step_seconds, measured.get((rollout, trainer), 1e9))
    fastest = min(measured, key=lambda split: measured[split])
    chosen = advise(learnt.work, Limits(DEVICES, reward=2, share=False)).chosen
    assert chosen is not None
    assert abs(chosen.layout.rollout - fastest[0]) <= 1
