"""Tests of the planner's simulation against closed forms, published simulation results, and toy runs."""

from itertools import pairwise

import pytest

from async_flowrl.plan.laws import Law
from async_flowrl.plan.simulate import Prediction, simulate
from async_flowrl.plan.work import Layout, Work, balance, bounds
from tests.support.toy import Timing, toy_config, virtual

SLOW = pytest.mark.slow
EVEN_TIMES = [
    (0.05, "batch", 0, 2.03),
    (0.05, "batch", 1, 1.03),
    (0.05, "stream", 0, 1.12),
    (0.05, "stream", 1, 1.00),
    (0.3, "batch", 0, 2.08),
    (0.3, "batch", 2, 1.00),
    (0.3, "stream", 0, 1.12),
    (0.3, "stream", 1, 1.00),
]
UNEVEN_TIMES = [
    (0.3, "batch", 1, 1.06),
    (1.0, "batch", 0, 2.24),
    (1.0, "batch", 1, 1.18),
    (1.0, "stream", 0, 1.29),
    (1.0, "stream", 1, 1.04),
]
"""Variation of durations (standard deviation ÷ mean), hand_over, max_staleness, and the other simulator's seconds."""


def predict(
    *, g: float, t: float, k: int, hand_over: str = "stream", n: int = 8, groups: int = 64, steps: int = 12, **more: Law
) -> Prediction:
    """Generation takes g and training t seconds per step with n rollout workers and one trainer, all constant."""
    work = Work(groups, Law(g * n / groups), Law(t / groups), **more)
    return simulate(work, Layout(n, 1, 1, k, hand_over), steps=steps)


@pytest.mark.parametrize(
    ("g", "t"), [pytest.param(1.0, 1.0, marks=SLOW), (1.0, 0.5), (0.5, 1.0), pytest.param(1.2, 1.0, marks=SLOW)]
)
def test_sync_is_the_sum_and_one_step_off_the_maximum(g: float, t: float) -> None:
    assert predict(g=g, t=t, k=0, hand_over="batch", groups=16).step_seconds == pytest.approx(g + t)
    assert predict(g=g, t=t, k=1, hand_over="batch", groups=16).step_seconds == pytest.approx(max(g, t))
    assert predict(g=g, t=t, k=2, groups=16).step_seconds == pytest.approx(max(g, t))


@pytest.mark.parametrize("per_worker", [1, 4, *(pytest.param(each, marks=SLOW) for each in (2, 8))])
def test_streaming_on_policy_waits_only_for_the_last_tickets(per_worker: int) -> None:
    """With constant times the last of w bursts of n groups is all that is trained after generation has ended."""
    prediction = predict(g=1.0, t=1.0, k=0, n=8, groups=8 * per_worker)
    assert prediction.step_seconds == pytest.approx(1.0 + 1.0 / per_worker)


def test_ranks_that_stream_take_whole_groups_so_the_last_one_is_the_work_of_one() -> None:
    """A group each second, 1.5 s of training by one rank: the last of four is there at 4 s, and trained at 5.5 s."""
    work = Work(4, Law(1.0), Law(1.5))
    streamed = simulate(work, Layout(1, 2, 1, 0, "stream"), steps=30)
    assert streamed.step_seconds == pytest.approx(5.5)
    assert streamed.busy("trainer") == pytest.approx(4 * 1.5 / 2 / 5.5)
    assert simulate(work, Layout(1, 2, 1, 0, "batch"), steps=30).step_seconds == pytest.approx(4 + 4 * 1.5 / 2)
    shared = simulate(Work(2, Law(1.0), Law(1.5), parts=8), Layout(1, 2, 1, 0, "stream"), steps=30)
    assert shared.step_seconds == pytest.approx(2 + 1.5 / 2), "two groups are split over both ranks"
    half_serial = simulate(Work(4, Law(0.01), Law(1.5), serial=0.5), Layout(1, 2, 1, 0, "stream"), steps=30)
    assert half_serial.step_seconds == pytest.approx(4 * 1.5 * 0.75, rel=0.02), "as measured, where all are busy"


def test_publishing_is_hidden_by_staleness_and_paid_without() -> None:
    deliver, stage = Law(0.1), Law(0.02)
    assert predict(g=1, t=1, k=0, hand_over="batch", deliver=deliver).step_seconds == pytest.approx(2.1)
    assert predict(g=1, t=1, k=2, deliver=deliver).step_seconds == pytest.approx(1.0)
    assert predict(g=0.5, t=1, k=1, deliver=deliver, stage=stage).step_seconds == pytest.approx(1.02)


def test_rewards_are_hidden_unless_they_are_the_limit() -> None:
    assert predict(g=1, t=0.5, k=1, groups=16, score=Law(0.06)).step_seconds == pytest.approx(1.0, rel=0.01)
    limited = predict(g=1, t=0.5, k=1, groups=16, score=Law(0.1))
    assert limited.step_seconds == pytest.approx(1.6, rel=0.01)
    assert limited.busy("reward") == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("cv", "hand_over", "k", "published"),
    [*(pytest.param(*each, marks=SLOW) for each in EVEN_TIMES), *UNEVEN_TIMES],
)
def test_an_independent_simulation_gives_the_same_step_times(
    cv: float, hand_over: str, k: int, published: float
) -> None:
    """8 workers, 64 groups, G = T = 1, trainer CV 0.05: figures of a simulator that shares no code with this one.

    Streamed without staleness: list scheduling of log-normal durations, groups trained in the order in which they end.
    """
    work = Work(64, Law(8 / 64, cv), Law(1 / 64, 0.05))
    prediction = simulate(work, Layout(8, 1, 1, k, hand_over), steps=14)
    assert prediction.step_seconds == pytest.approx(published, rel=0.06)


@pytest.mark.parametrize("k", [0, 1, 2, 4])
@pytest.mark.parametrize("cv", [0.0, 1.0])
def test_no_sample_is_older_than_the_bound(k: int, cv: float) -> None:
    work = Work(8, Law(0.5, cv), Law(0.1, cv))
    prediction = simulate(work, Layout(4, 1, 1, k, "stream"), steps=40)
    assert prediction.staleness_max == k
    assert prediction.staleness == pytest.approx(sum(min(step, k) for step in range(40)) / 40)


def test_a_slow_worker_costs_only_its_share() -> None:
    """One of eight takes twice as long: 7.5 workers' worth, where a fixed division would double the step."""
    work = Work(64, Law(8 / 64, 0.05), Law(0.5 / 64))
    layout = Layout(8, 1, 1, 1, "stream", slow=(2.0,))
    assert bounds(work, layout).generation == pytest.approx(8 / 7.5)
    assert simulate(work, layout, steps=16).step_seconds == pytest.approx(8 / 7.5, rel=0.03)


def test_busy_shares_and_bytes() -> None:
    work = Work(8, Law(0.5), Law(0.125), ticket_bytes=1000, adapter_bytes=7)
    prediction = simulate(work, Layout(2, 1, 1, 1, "batch"), steps=20)
    assert prediction.busy("rollout") == pytest.approx(1.0)
    assert prediction.busy("trainer") == pytest.approx(0.5)
    assert prediction.pools["trainer"]["wait_data"] == pytest.approx(0.5)
    assert prediction.adapter_bytes == 2 * 2 * 7
    assert 8 * 1000 <= prediction.payload_bytes <= 2 * 8 * 1000


def test_more_ranks_shorten_an_update_but_for_its_serial_part() -> None:
    work = Work(4, Law(0.1), Law(1.0), serial=0.2, group_size=4)
    assert simulate(work, Layout(4, 4, 1, 1), steps=12).step_seconds == pytest.approx(4 * (0.2 + 0.8 / 4))
    assert simulate(work, Layout(4, 3, 1, 1), steps=12).step_seconds == pytest.approx(4 * (0.2 + 0.8 / 3))


def test_ranks_without_a_part_make_no_update_shorter() -> None:
    """Four parts: three ranks take as long as two, and eight as long as four."""
    work = Work(4, Law(0.1), Law(1.0), group_size=4, parts=4)
    seconds = [simulate(work, Layout(4, ranks, 1, 1), steps=12).step_seconds for ranks in (1, 2, 3, 4, 8)]
    assert seconds == pytest.approx([4.0, 2.0, 2.0, 1.0, 1.0])


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 6 steps"):
        simulate(Work(4, Law(1.0), Law(1.0)), Layout(1, 1, 1, 2), steps=5)


@pytest.mark.parametrize(("k", "hand_over"), [(0, "batch"), (0, "stream"), (1, "batch"), (1, "stream"), (2, "stream")])
@pytest.mark.parametrize("workers", [1, 3])
def test_the_plan_of_a_toy_run_is_the_toy_run(k: int, hand_over: str, workers: int) -> None:
    """The toy run has the real trainer group, publisher and receivers; with constant times the steps end together.

    As many reward workers as groups: who is scored first of several at the same instant is chance.
    """
    timing = Timing(generate=1.0, score=0.1, update=0.7, transfer=0.05)
    config = toy_config(k, hand_over=hand_over, steps=8, rollout__num_workers=workers, reward__num_workers=4)
    toy = virtual(config, timing)
    work = Work(4, Law(1.0), Law(0.7), score=Law(0.1), deliver=Law(0.05))
    plan = simulate(work, Layout(workers, 1, config.reward.num_workers, k, hand_over), steps=8)
    ends = [event["ended"] for event in toy.observer.of("step")]
    steps = [after - before for before, after in pairwise(ends)]
    planned = [after - before for before, after in pairwise(plan.ends)]
    assert planned == pytest.approx(steps, abs=1e-6)


def test_balance_of_whole_devices() -> None:
    """Shares of the devices that the best split uses, for generation : training = ratio : 1."""
    assert balance(1, 1, 8) == pytest.approx(1.0)
    assert balance(2, 1, 4) == pytest.approx(0.75)
    assert balance(3, 1, 2) == pytest.approx(2 / 3)
    assert balance(5, 1, 4) == pytest.approx(0.9)
    assert balance(8, 1, 4) == pytest.approx(0.84, abs=0.01)


def test_a_law_draws_the_same_for_the_same_event() -> None:
    law = Law(2.0, 0.5)
    draws = [law.draw(f"ticket {index}") for index in range(4000)]
    assert draws == [law.draw(f"ticket {index}") for index in range(4000)]
    assert sum(draws) / len(draws) == pytest.approx(2.0, rel=0.03)
    measured = Law.measured(draws)
    assert measured.cv == pytest.approx(0.5, rel=0.1)
    assert {measured.draw(str(i)) for i in range(50)} <= set(draws)
    assert measured.scaled(3.0).mean == pytest.approx(3 * measured.mean)
    with pytest.raises(ValueError, match="finite"):
        Law(-1.0)
