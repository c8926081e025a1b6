"""Tests of a rollout pool that grows and shrinks: the weights are those of a pool of fixed size."""

import asyncio
from typing import Any

import pytest

from async_flowrl.controller.context import Context
from async_flowrl.controller.pool_size import PoolTooSmall
from async_flowrl.tickets.table import State
from tests.support.toy import virtual
from tests.support.toy_pool import ListObserver, Timing
from tests.unit.elastic_runs import Pools, elastic_config, growth_of, run_while


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
            growth_of(pools).arrive()

    found = run_while(two_arrive, elastic_config(k), Timing(generate=2.0))
    joined = found.observer.of("worker_joined")
    assert [(event["worker"], event["workers"]) for event in joined] == [("rollout-2", 3), ("rollout-3", 4)]
    for name in ("rollout-2", "rollout-3"):
        made = [event["time"] for event in found.tickets("RUNNING") if event["worker"] == name]
        proof = [event["time"] for event in joined if event["worker"] == name]
        assert made and min(made) >= proof[0], "no ticket before it has joined"
    assert len(found.groups["rollout"].workers) == 4


def test_a_drained_worker_finishes_its_tickets_and_leaves() -> None:
    async def drain(ctx: Context, pools: Pools) -> None:
        await until(lambda: any(t.worker == "rollout-0" and t.state is State.RUNNING for t in ctx.table.live()))
        growth_of(pools).drain(pools["rollout"].workers[0])

    found = run_while(drain)
    (left,) = found.observer.of("worker_left")
    assert (left["worker"], left["reason"], left["workers"]) == ("rollout-0", "its node is drained", 1)
    assert not found.observer.of("fault") and found.table.retried == 0, "nothing is made twice"
    last = max(event["time"] for event in found.tickets("SCORING") if event["worker"] == "rollout-0")
    assert last <= left["time"] and found.groups["rollout"].workers[0].name == "rollout-1"


def test_what_a_drained_worker_cannot_finish_in_time_is_handed_back() -> None:
    async def drain(ctx: Context, pools: Pools) -> None:
        await until(lambda: any(t.worker == "rollout-0" and t.state is State.RUNNING for t in ctx.table.live()))
        growth_of(pools).drain(pools["rollout"].workers[0], seconds=0.5)

    found = run_while(drain, timing=Timing(generate=5.0))
    assert [event["worker"] for event in found.observer.of("worker_left")] == ["rollout-0"]
    assert not found.observer.of("fault") and found.table.retried in (1, 2)


def test_tickets_that_are_handed_back_are_not_suspected() -> None:
    """Nine times in a row the worker with the first ticket leaves; its seventh attempt does not end the run."""

    async def nine_leave(ctx: Context, pools: Pools) -> None:
        for _ in range(9):
            await until(lambda: any(t.ordinal == 0 and t.state is State.RUNNING for t in ctx.table.live()))
            name = next(t.worker for t in ctx.table.live() if t.ordinal == 0)
            growth_of(pools).arrive()
            growth_of(pools).drain(next(w for w in pools["rollout"].workers if w.name == name), seconds=0.1)
            await until(lambda n=name: of(ctx, "worker_left", worker=n))

    found = run_while(nine_leave, timing=Timing(generate=8.0))
    assert max(event["attempt"] for event in found.tickets("RUNNING") if event["ordinal"] == 0) == 10


def test_a_lost_node_without_another_makes_the_pool_smaller_until_one_comes() -> None:
    async def lose(ctx: Context, pools: Pools) -> None:
        await asyncio.sleep(2.0)
        growth_of(pools).end(pools["rollout"].workers[1])
        await until(lambda: of(ctx, "worker_left"))
        growth_of(pools).arrive()

    found = run_while(lose, timing=Timing(generate=4.0))
    assert [event["workers"] for event in found.observer.of("worker_left")] == [1]
    assert [event["worker"] for event in found.observer.of("worker_joined")] == ["rollout-1.1"]


def test_too_few_workers_for_too_long_end_the_run_by_name() -> None:
    async def drain_one(ctx: Context, pools: Pools) -> None:
        growth_of(pools).drain(pools["rollout"].workers[0])

    slow = Timing(generate=20.0)
    with pytest.raises(PoolTooSmall, match=r"1 rollout worker for 60 s, and rollout.min_workers=2: go on with resume"):
        virtual(elastic_config(least=2), slow, disturb=drain_one)
