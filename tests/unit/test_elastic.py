"""Tests of a rollout pool that grows and shrinks: the weights are those of a pool of fixed size."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from async_flowrl.config.schema import Config
from async_flowrl.controller.context import Context
from async_flowrl.controller.pool_size import PoolTooSmall
from async_flowrl.tickets.table import State
from checkpoint_engine import WeightsMismatch
from tests.support.run_checks import check_bound, check_once, check_watermarks
from tests.support.toy import Disturbance, ToyRun, calm_run, toy_config, virtual
from tests.support.toy_pool import ListObserver, Timing, ToyPool, no_fault
from tests.support.toy_rollout import ToyRollout

STEPS = 6

Pools = Mapping[str, ToyPool]


def elastic_config(k: int = 1, *, least: int = 1, most: int = 4, **changes: Any) -> Config:
    bounds = {"rollout__min_workers": least, "rollout__max_workers": most}
    return toy_config(k, steps=STEPS, **{"rollout__num_workers": 2, **bounds, **changes})


def run_while(disturb: Disturbance, config: Config | None = None, timing: Timing | None = None) -> ToyRun:
    """A run to which something happens; its weights are those of a pool of two that nothing happens to."""
    config = config or elastic_config()
    found = virtual(config, timing, no_fault, disturb=disturb)
    k = config.max_staleness
    assert found.digest == calm_run(toy_config(k, steps=STEPS)).digest
    check_bound(found, k)
    check_once(found)
    check_watermarks(found)
    return found


def of(ctx: Context, event: str, **match: Any) -> list[dict[str, Any]]:
    assert isinstance(ctx.observer, ListObserver)
    return ctx.observer.of(event, **match)


async def until(true: Any) -> None:
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_workers_join_while_the_run_goes_on_and_serve_after_their_proof(k: int) -> None:
    async def two_arrive(ctx: Context, pools: Pools) -> None:
        for _ in range(3):  # one more than there may be
            await asyncio.sleep(1.0)
            pools["rollout"].growth.arrive()

    found = run_while(two_arrive, elastic_config(k), Timing(generate=2.0))
    joined = found.observer.of("worker_joined")
    assert [(event["worker"], event["workers"]) for event in joined] == [("rollout-2", 3), ("rollout-3", 4)]
    for name in ("rollout-2", "rollout-3"):
        made = [event["time"] for event in found.tickets("RUNNING") if event["worker"] == name]
        proof = [event["time"] for event in joined if event["worker"] == name]
        assert made and min(made) >= proof[0], "no ticket before it has joined"
    assert len(found.groups["rollout"].workers) == 4


def drained_at_work(**how: float) -> Disturbance:
    async def drain(ctx: Context, pools: Pools) -> None:
        await until(lambda: any(t.worker == "rollout-0" and t.state is State.RUNNING for t in ctx.table.live()))
        pools["rollout"].growth.drain(pools["rollout"].workers[0], **how)

    return drain


def test_a_drained_worker_finishes_its_tickets_and_leaves() -> None:
    found = run_while(drained_at_work())
    (left,) = found.observer.of("worker_left")
    assert (left["worker"], left["reason"], left["workers"]) == ("rollout-0", "its node is drained", 1)
    assert not found.observer.of("fault") and found.table.retried == 0, "nothing is made twice"
    last = max(event["time"] for event in found.tickets("SCORING") if event["worker"] == "rollout-0")
    assert last <= left["time"] and found.groups["rollout"].workers[0].name == "rollout-1"


def test_what_a_drained_worker_cannot_finish_in_time_is_handed_back() -> None:
    found = run_while(drained_at_work(seconds=0.5), timing=Timing(generate=5.0))
    assert [event["worker"] for event in found.observer.of("worker_left")] == ["rollout-0"]
    assert not found.observer.of("fault") and found.table.retried in (1, 2)


def test_tickets_that_are_handed_back_are_not_suspected() -> None:
    """Nine times in a row the worker with the first ticket leaves; its seventh attempt does not end the run."""

    async def nine_leave(ctx: Context, pools: Pools) -> None:
        for _ in range(9):
            await until(lambda: any(t.ordinal == 0 and t.state is State.RUNNING for t in ctx.table.live()))
            name = next(t.worker for t in ctx.table.live() if t.ordinal == 0)
            pools["rollout"].growth.arrive()
            pools["rollout"].growth.drain(next(w for w in pools["rollout"].workers if w.name == name), seconds=0.1)
            await until(lambda n=name: of(ctx, "worker_left", worker=n))

    found = run_while(nine_leave, timing=Timing(generate=8.0))
    assert max(event["attempt"] for event in found.tickets("RUNNING") if event["ordinal"] == 0) == 10


def test_a_lost_node_without_another_makes_the_pool_smaller_until_one_comes() -> None:
    async def lose(ctx: Context, pools: Pools) -> None:
        await asyncio.sleep(2.0)
        pools["rollout"].growth.end(pools["rollout"].workers[1])
        await until(lambda: of(ctx, "worker_left"))
        pools["rollout"].growth.arrive()

    found = run_while(lose, timing=Timing(generate=4.0))
    assert [event["workers"] for event in found.observer.of("worker_left")] == [1]
    assert [event["worker"] for event in found.observer.of("worker_joined")] == ["rollout-1.1"]


def test_too_few_workers_for_too_long_end_the_run_by_name() -> None:
    async def drain_one(ctx: Context, pools: Pools) -> None:
        pools["rollout"].growth.drain(pools["rollout"].workers[0])

    slow = Timing(generate=20.0)
    with pytest.raises(PoolTooSmall, match=r"1 rollout worker for 60 s, and rollout.min_workers=2: go on with resume"):
        virtual(elastic_config(least=2), slow, disturb=drain_one)


def test_a_newcomer_with_other_modules_never_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    prove = ToyRollout.prove
    observer = ListObserver()

    def other(self: ToyRollout, version: int) -> Any:
        proof = prove(self, version)
        return {name: value + 1 for name, value in proof.items()} if self.name == "rollout-2" else proof

    async def arrive(ctx: Context, pools: Pools) -> None:
        await asyncio.sleep(1.0)
        pools["rollout"].growth.arrive()

    monkeypatch.setattr(ToyRollout, "prove", other)
    with pytest.raises(WeightsMismatch, match="rollout-2"):
        virtual(elastic_config(), Timing(generate=3.0), disturb=arrive, observer=observer)
    assert not observer.of("ticket", worker="rollout-2", state="RUNNING")
