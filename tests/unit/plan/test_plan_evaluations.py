"""Tests of evaluations in the planner's simulation: their share of the tickets and their cost; nothing starves."""

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from async_flowrl.plan.advise import advise
from async_flowrl.plan.calibrate import calibrate, evaluation_work
from async_flowrl.plan.laws import Law
from async_flowrl.plan.limits import Limits
from async_flowrl.plan.simulate import Prediction, simulate, traced
from async_flowrl.plan.turns_taken import ticket_times
from async_flowrl.plan.units import Unit
from async_flowrl.plan.work import EvaluationWork, Layout, Work, bounds
from async_flowrl.shared.turns import patience
from async_flowrl.tickets.table import EVALUATION, TRAIN, State, Ticket, TicketTable
from async_flowrl.tickets.ticket import EVALUATION_EVERY_TICKETS
from tests.support.recorded import recorded
from tests.support.toy import Timing, toy_config, virtual
from tests.support.toy_shared import shared_config, shared_virtual

TICKET, GROUP, EVALUATED = 2.5, 0.75, 4.0
"""Seconds of a training ticket, of the training of its group, and of an evaluation ticket."""
MODES = [(0, "batch"), (0, "stream"), (1, "batch"), (1, "stream"), (2, "stream")]


def work(devices: int, *, every: int = 2, tickets: int = 6, score: float = 0.0) -> Work:
    """Twelve tickets and groups per step for each device."""
    evaluation = EvaluationWork(every, tickets, Law(EVALUATED))
    return Work(12 * devices, Law(TICKET), Law(GROUP), score=Law(score), group_size=4, evaluation=evaluation)


def shared(devices: int, k: int, hand_over: str) -> Layout:
    return Layout(devices, devices, 4, k, hand_over, placement="shared")


@cache
def planned(devices: int, k: int, hand_over: str) -> tuple[Prediction, list[Unit]]:
    """Twelve steps with a reward of half a second, simulated once for all tests."""
    return traced(work(devices, score=0.5), shared(devices, k, hand_over), steps=12)


def evaluation_tickets(units: list[Unit], version: int) -> list[Unit]:
    found = [unit for unit in units if unit.evaluation and unit.place.startswith("rollout") and unit.step == version]
    return sorted(found, key=lambda unit: unit.start)


@pytest.mark.parametrize(("k", "hand_over"), MODES)
@pytest.mark.parametrize("devices", [1, 2])
def test_evaluations_that_are_due_while_a_worker_trains_are_all_made_and_no_step_starves(
    devices: int, k: int, hand_over: str
) -> None:
    """One device is the hard case: nobody else could make the evaluation, or train meanwhile."""
    found, units = planned(devices, k, hand_over)
    assert len(found.ends) == 12 and found.staleness_max == k
    for version in range(2, 12, 2):
        assert len(evaluation_tickets(units, version)) == 6
    assert len(found.evaluations) == 5
    # A step takes its own work and at most the tickets of one evaluation, its barrier and the time of a reward.
    own = 12 * (TICKET + GROUP)
    longest = max(after - before for before, after in pairwise(found.ends))
    assert longest < own + 6 * EVALUATED / devices + TICKET + EVALUATED + 0.5


@pytest.mark.parametrize(("k", "hand_over"), MODES)
def test_while_training_tickets_wait_every_fourth_ticket_is_of_the_evaluation(
    k: int, hand_over: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four tickets that the only worker is given in a row while it could have training tickets, one is."""
    given: list[tuple[str, bool]] = []
    """Kind of each ticket, and whether a training ticket waited that the worker could have had."""
    start = TicketTable.start

    def recorded(table: TicketTable, ticket: Ticket, worker: str, **more: Any) -> None:
        waiting = {t.version for t in table.live() if t.kind == TRAIN and t.state is State.PENDING}
        given.append((ticket.kind, bool(waiting & set(table.held[worker].policy))))
        start(table, ticket, worker, **more)

    monkeypatch.setattr(TicketTable, "start", recorded)
    traced(work(1, every=3, tickets=8), shared(1, k, hand_over), steps=8)
    rows = [
        given[first : first + EVALUATION_EVERY_TICKETS] for first in range(len(given) - EVALUATION_EVERY_TICKETS + 1)
    ]
    of_choice = [[kind for kind, _ in row].count(EVALUATION) for row in rows if all(waits for _, waits in row)]
    assert max(of_choice) == 1
    assert of_choice.count(1) >= EVALUATION_EVERY_TICKETS, "the rule was put to the test"


@pytest.mark.parametrize(("k", "hand_over"), MODES)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_device_makes_evaluations_one_unit_at_a_time(devices: int, k: int, hand_over: str) -> None:
    """Neither training nor another ticket runs beside an evaluation ticket."""
    _, units = planned(devices, k, hand_over)
    for index in range(devices):
        places = (f"rollout-{index}", f"trainer-{index}")
        own = sorted((u for u in units if u.place in places and u.end > u.start), key=lambda unit: unit.start)
        assert any(unit.evaluation for unit in own)
        assert all(before.end <= after.start + 1e-9 for before, after in pairwise(own)), "one thing at a time"


@pytest.mark.parametrize("devices", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_evaluations_cost_their_own_work_and_no_more(devices: int) -> None:
    """At K = 1 no device is idle for an evaluation."""
    found = simulate(work(devices, tickets=6 * devices), shared(devices, 1, "stream"), steps=18)
    step = 12 * (TICKET + GROUP) + 3 * EVALUATED
    assert found.bounds.overlapped == pytest.approx(step)
    assert found.step_seconds == pytest.approx(step, rel=0.04)
    assert found.efficiency > 0.96


def test_separate_pools_make_them_in_the_time_that_generation_has_left() -> None:
    """Where training is the limit an evaluation costs nothing; where generation is, its tickets."""
    layout, evaluation = Layout(1, 1, 1, 1, "stream"), EvaluationWork(2, 4, Law(1.0))
    beside = Work(8, Law(0.5), Law(1.0), evaluation=evaluation)
    assert bounds(beside, layout).overlapped == pytest.approx(8.0)
    assert simulate(beside, layout, steps=20).step_seconds == pytest.approx(8.0, rel=0.01)
    limiting = Work(8, Law(1.0), Law(0.5), evaluation=evaluation)
    assert bounds(limiting, layout).overlapped == pytest.approx(8.0 + 2.0)
    assert simulate(limiting, layout, steps=21).step_seconds == pytest.approx(10.0, rel=0.05)


def test_evaluations_larger_than_their_share_fall_behind_and_training_does_not() -> None:
    """Twelve evaluation tickets per step beside eight for training: at most a third as many are made for certain."""
    work = Work(8, Law(1.0), Law(0.5), evaluation=EvaluationWork(2, 24, Law(1.0)))
    layout = Layout(1, 1, 1, 1, "stream")
    found = simulate(work, layout, steps=30)
    assert found.bounds.overlapped == pytest.approx(8.0 + 8.0 / 3)
    assert found.step_seconds == pytest.approx(found.bounds.overlapped, rel=0.05)
    assert min(found.evaluations) > 2 * found.step_seconds, "an evaluation takes longer than the steps between two"
    # Training has time for 30 x 8 / 3 of their 24 tickets; of the 14 that are due no more than one is made after it.
    assert len(found.evaluations) <= 30 * 8 / 3 / 24 + 2


@pytest.mark.parametrize(("k", "hand_over"), MODES)
@pytest.mark.parametrize("workers", [1, 2])
def test_the_plan_of_a_toy_run_with_evaluations_is_the_toy_run(k: int, hand_over: str, workers: int) -> None:
    """Real versions, deliveries and evaluations, from the third step on: each step takes what the plan says.

    With two devices and stale versions only the sum of the steps does.
    """
    config = shared_config(k, workers, hand_over=hand_over, steps=10, reward__num_workers=4, evaluate__every=2)
    toy = shared_virtual(config, Timing(generate=1.0, score=0.1, update=0.7, transfer=0.0))
    tickets = len(toy.evaluated[0].prompts)
    evaluation = EvaluationWork(2, tickets, Law(1.0))
    plan = simulate(
        Work(4, Law(1.0), Law(0.7), score=Law(0.1), evaluation=evaluation),
        Layout(workers, workers, 4, k, hand_over, placement="shared"),
        steps=10,
    )
    ends = [event["ended"] for event in toy.observer.of("step")][2:]
    steps = [after - before for before, after in pairwise(ends)]
    planned = [after - before for before, after in pairwise(plan.ends[2:])]
    if workers == 1 or k == 0:
        assert planned == pytest.approx(steps, abs=1e-6)
    else:  # The toy makes no pause after training, and one ticket of an evaluation, which takes a second and is shared
        # by two devices in effect, may come before the last step in place of after it, since equal devices are chosen.
        assert sum(planned) == pytest.approx(sum(steps), abs=1.0 / 2 + 2 * patience(0.7))


def test_a_plan_from_a_run_has_its_evaluations(tmp_path: Path) -> None:
    config = toy_config(1, steps=16, evaluate__every=4)
    run = virtual(config, Timing(generate=1.0, score=0.1, update=0.7))
    learnt = calibrate(recorded(tmp_path / "run", run, config)).work.evaluation
    assert learnt is not None
    assert (learnt.every, learnt.tickets) == (4, len(run.evaluated[0].prompts))
    assert learnt.generate.mean == pytest.approx(1.0, rel=0.05)


def test_an_evaluation_ticket_that_was_made_twice_is_one_ticket() -> None:
    of = {"event": "ticket", "kind": EVALUATION, "step": 4, "worker": "rollout-0"}
    told = [(0, State.RUNNING), (0, State.SCORING), (0, State.PENDING), (1, State.RUNNING), (1, State.SCORING)]
    told += [(0, State.RUNNING), (0, State.SCORING)]
    history = [
        of | {"time": float(time), "ordinal": ordinal, "state": state} for time, (ordinal, state) in enumerate(told)
    ]
    found = evaluation_work(toy_config(1, steps=16, evaluate__every=4), history, {})
    assert found is not None and (found.every, found.tickets, found.generate.mean) == (4, 2, 1.0)


def test_a_shared_process_spends_on_an_evaluation_ticket_what_its_span_says() -> None:
    """Not what it waited for its turn; and a training ticket's time is not an evaluation's."""
    of = {"worker": "rollout-0", "step": 4, "time": 0.0}
    history = [
        of | {"event": "span", "name": "generate", "ordinal": 7, "start": 1.0, "end": 2.0},
        of | {"event": "ticket", "kind": TRAIN, "ordinal": 7, "state": State.SCORING},
        of | {"event": "span", "name": "generate", "ordinal": 3, "start": 5.0, "end": 8.0},
        of | {"event": "ticket", "kind": EVALUATION, "ordinal": 3, "state": State.SCORING},
    ]
    assert [(time.ordinal, time.seconds) for time in ticket_times(history, kind=EVALUATION)] == [(3, 3.0)]
    assert [(time.ordinal, time.seconds) for time in ticket_times(history)] == [(7, 1.0)]


def test_the_advice_says_what_evaluations_take_and_when_they_fall_behind() -> None:
    """The command counts them in, with the seconds of the longest."""
    limits = Limits(2, steps=23, share=False)
    beside = advise(Work(8, Law(1.0), Law(1.0), evaluation=EvaluationWork(4, 4, Law(1.0))), limits)
    assert any("every 4 steps, are in these figures; one takes up to" in each for each in beside.sentences)
    behind = advise(Work(8, Law(1.0), Law(1.0), evaluation=EvaluationWork(2, 40, Law(1.0))), limits)
    assert any("fall behind: one takes up to" in each for each in behind.sentences)
    late = advise(Work(8, Law(1.0), Law(1.0), evaluation=EvaluationWork(100, 4, Law(1.0))), limits)
    assert any("later than the simulated steps" in each for each in late.sentences)
    assert not any("valuation" in each for each in advise(Work(8, Law(1.0), Law(1.0)), limits).sentences)
