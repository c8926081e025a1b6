"""Tests of the simulation of `placement=shared` against (G + T)/N and against toy runs, and of its rule for devices."""

import asyncio
import threading
from itertools import pairwise

import pytest

from async_flowrl.plan.laws import Law
from async_flowrl.plan.one_pool import Device
from async_flowrl.plan.simulate import simulate, traced
from async_flowrl.plan.units import Unit
from async_flowrl.plan.work import Layout, Work, bounds
from async_flowrl.shared.turns import Turns, patience
from separation.virtual import run_virtual
from tests.support.toy import Timing
from tests.support.toy_shared import shared_config, shared_virtual

SLOW = pytest.mark.slow
UNITS = 12
"""Tickets, and groups to train, of a worker in a step."""


def one_pool(n: int, k: int = 1, hand_over: str = "stream", reward: int = 1) -> Layout:
    return Layout(n, n, reward, k, hand_over, placement="shared")


def loads(n: int, g: float, t: float, **more: Law) -> Work:
    """The device-seconds of a step are g * n and t * n, in UNITS tickets and groups for each of n devices."""
    return Work(UNITS * n, Law(g / UNITS), Law(t / UNITS), group_size=4, **more)


@pytest.mark.parametrize(
    ("n", "g", "t"),
    [
        (1, 30.0, 10.0),
        (2, 10.0, 30.0),
        (2, 36.0, 4.0),
        *(pytest.param(*each, marks=SLOW) for each in ((2, 30.0, 10.0), (2, 20.0, 20.0), (8, 30.0, 10.0))),
    ],
)
def test_a_step_takes_g_plus_t_by_n_whatever_the_ratio(n: int, g: float, t: float) -> None:
    """At K = 1 without a reward's time; what is indivisible, a ticket and a group, is all that it may take longer."""
    found = simulate(loads(n, g, t), one_pool(n), steps=12)
    assert found.bounds.overlapped == pytest.approx(g + t)
    assert g + t - 1.0 < found.step_seconds < g + t + (g + t) / UNITS
    assert found.efficiency > 0.97
    assert found.busy("rollout") / found.busy("trainer") == pytest.approx(g / t, rel=0.1)
    assert found.staleness_max == 1


@pytest.mark.parametrize("n", [1, 2, pytest.param(8, marks=SLOW)])
def test_on_policy_all_sample_and_then_all_train(n: int) -> None:
    """K = 0: nobody has a ticket to make at the end of a step. Where units come out even, a batch costs nothing."""
    found = simulate(loads(n, 30.0, 10.0), one_pool(n, 0, "batch"), steps=8)
    assert found.step_seconds == pytest.approx(40.0, rel=0.01)
    assert found.staleness_max == 0


def test_on_policy_a_stream_pays_for_its_barrier() -> None:
    """A device that trains the first groups makes its last tickets late, and the others wait for those."""
    found = simulate(loads(4, 30.0, 10.0), one_pool(4, 0), steps=8)
    assert 42.0 < found.step_seconds < 50.0
    assert found.efficiency == pytest.approx(40.0 / found.step_seconds, rel=0.03)


@pytest.mark.parametrize(("k", "hidden"), [(0, False), (1, True)])
def test_one_device_hides_the_reward_with_a_version_of_staleness(k: int, hidden: bool) -> None:
    """Each group is scored for 8 s by a reward worker of its own; a step of one device has 40 s of work."""
    work = loads(1, 30.0, 10.0, score=Law(8.0))
    found = simulate(work, one_pool(1, k, "batch", reward=UNITS), steps=12)
    assert found.step_seconds == pytest.approx(40.0 if hidden else 48.0, rel=0.01)


def test_rewards_are_the_limit_where_they_are_slower_than_the_devices() -> None:
    found = simulate(loads(2, 30.0, 10.0, score=Law(50.0 / UNITS)), one_pool(2, reward=1), steps=12)
    assert found.bounds.overlapped == pytest.approx(100.0)
    assert found.step_seconds == pytest.approx(100.0, rel=0.02)
    assert found.efficiency > 0.98


def test_against_two_pools_that_no_split_fits() -> None:
    """3 : 1 and 1 : 3 on two devices: an ideal of 1.5; at 1 : 1 both placements do the same."""
    for g, t, gain in ((30.0, 10.0, 1.5), (10.0, 30.0, 1.5), (20.0, 20.0, 1.0)):
        work = loads(2, g, t)
        separate = simulate(work, Layout(1, 1, 1, 1, "stream"), steps=12).step_seconds
        assert separate / simulate(work, one_pool(2), steps=12).step_seconds == pytest.approx(gain, rel=0.04)


def test_few_groups_are_shared_in_parts() -> None:
    """Two groups of four micro-batches on four devices: each trains two."""
    work = Work(2, Law(4.0), Law(8.0), tickets_per_group=4, group_size=4, parts=8)
    assert bounds(work, one_pool(4)).update == pytest.approx(4.0)
    found, units = traced(work, one_pool(4), steps=16)
    assert found.step_seconds == pytest.approx(12.0, rel=0.15)
    trained = [unit for unit in units if unit.place == "trainer-3" and unit.step == 8]
    assert sum(unit.end - unit.start for unit in trained) == pytest.approx(4.0)


@pytest.mark.parametrize(("k", "hand_over"), [(0, "batch"), (0, "stream"), (1, "batch"), (1, "stream"), (2, "stream")])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_plan_of_a_toy_run_is_the_toy_run(k: int, hand_over: str, workers: int) -> None:
    """The toy has the real versions, deliveries and pools of parts; with constant times every step ends together."""
    config = shared_config(k, workers, hand_over=hand_over, steps=8, reward__num_workers=4)
    toy = shared_virtual(config, Timing(generate=1.0, score=0.1, update=0.7, transfer=0.0))
    layout = Layout(workers, workers, 4, k, hand_over, placement="shared")
    plan = simulate(Work(4, Law(1.0), Law(0.7), score=Law(0.1)), layout, steps=8)
    assert plan.ends == pytest.approx([event["ended"] for event in toy.observer.of("step")], abs=1e-6)


def test_a_device_does_one_thing_at_a_time() -> None:
    _, units = traced(loads(2, 30.0, 10.0, score=Law(0.5)), one_pool(2), steps=16)
    for index in (0, 1):
        own = sorted(
            (u for u in units if u.place in (f"rollout-{index}", f"trainer-{index}") and u.end > u.start),
            key=lambda unit: unit.start,
        )
        assert len(own) > 16 * UNITS
        assert all(before.end <= after.start + 1e-9 for before, after in pairwise(own))


def test_the_optimizer_does_not_wait_for_a_ticket_and_its_time_is_not_lost() -> None:
    """It ends 1 s after it began, beside a ticket of 10 s, which takes 11 s."""

    async def both() -> list[Unit]:
        units: list[Unit] = []
        device = Device(0, lambda worker, state: None, units)
        ticket = asyncio.create_task(device.sample(10.0, 2))
        await asyncio.sleep(4.0)
        await device.beside(1.0, 1)
        await ticket
        return units

    assert run_virtual(both()) == [Unit("trainer-0", 1, 4.0, 5.0), Unit("rollout-0", 2, 0.0, 11.0)]


Call = tuple[float, str, float]
"""When it is made, what (`ticket`, `train`, `more`), and for how long."""


@pytest.mark.parametrize(
    "calls",
    [
        [(0.0, "ticket", 1.0), (0.1, "ticket", 1.0), (0.5, "train", 1.0)],
        [(0.0, "train", 1.0), (0.2, "ticket", 1.0), (0.4, "train", 1.0)],
        [(0.0, "more", 2.0), (0.1, "ticket", 1.0), (2.02, "train", 0.5)],
        [(0.0, "more", 0.5), (0.1, "ticket", 1.0), (0.5 + 10 * patience(0.5), "train", 0.5)],
    ],
)
def test_a_device_takes_turns_as_a_process_does(calls: list[Call]) -> None:
    """The order in which the real turns and the device let the same calls compute."""
    assert _of_device(calls) == _of_turns(calls)


def _of_device(calls: list[Call]) -> list[str]:
    async def run() -> list[str]:
        units: list[Unit] = []
        device = Device(0, lambda worker, state: None, units)

        async def call(number: int, when: float, what: str, seconds: float) -> None:
            await asyncio.sleep(when)
            if what == "ticket":
                await device.sample(seconds, number)
            else:
                await device.train(seconds, number, more=what == "more")

        await asyncio.gather(*(call(number, *one) for number, one in enumerate(calls)))
        return [f"{unit.step}" for unit in units]

    return run_virtual(run())


def _of_turns(calls: list[Call]) -> list[str]:
    turns, order, begun = Turns(), list[str](), threading.Event()

    def call(number: int, when: float, what: str, seconds: float) -> None:
        begun.wait()
        pause = threading.Event()
        pause.wait(when)
        with turns.sampling() if what == "ticket" else turns.training(more=what == "more"):
            pause.wait(seconds)
        order.append(f"{number}")

    threads = [threading.Thread(target=call, args=(number, *one)) for number, one in enumerate(calls)]
    for thread in threads:
        thread.start()
    begun.set()
    for thread in threads:
        thread.join(30.0)
    return order
