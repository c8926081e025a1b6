"""Tests of newcomers of an elastic pool that cannot serve, or still load."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from async_flowrl.controller.context import Context
from async_flowrl.controller.pool_size import PoolTooSmall
from async_flowrl.observability.summary import rollout_size
from checkpoint_engine import WeightsMismatch
from separation.group import WorkerFailed
from tests.support.toy import toy_config, virtual
from tests.support.toy_pool import ListObserver, Timing, once
from tests.support.toy_rollout import ToyRollout
from tests.unit.elastic_runs import Pools, SlowLoad, elastic_config, growth_of, run_while


def test_a_newcomer_that_cannot_load_is_turned_away_and_the_next_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    load = ToyRollout.load

    def fails_once(self: ToyRollout) -> Any:
        if self.name == "rollout-2":
            raise ValueError("no such folder on this node")
        return load(self)

    async def arrive(ctx: Context, pools: Pools) -> None:
        await asyncio.sleep(1.0)
        growth_of(pools).arrive()

    monkeypatch.setattr(ToyRollout, "load", fails_once)
    found = run_while(arrive, timing=Timing(generate=3.0))
    (fault,) = found.observer.of("fault")
    assert fault["worker"] == "rollout-2" and "no such folder on this node" in fault["message"]
    assert [event["worker"] for event in found.observer.of("worker_joined")] == ["rollout-2.1"]


def test_a_newcomer_with_other_modules_never_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    prove = ToyRollout.prove
    observer = ListObserver()

    def other(self: ToyRollout, version: int) -> Any:
        proof = prove(self, version)
        return {name: value + 1 for name, value in proof.items()} if self.name == "rollout-2" else proof

    async def arrive(ctx: Context, pools: Pools) -> None:
        await asyncio.sleep(1.0)
        growth_of(pools).arrive()

    monkeypatch.setattr(ToyRollout, "prove", other)
    with pytest.raises(WeightsMismatch, match="rollout-2"):
        virtual(elastic_config(), Timing(generate=3.0), disturb=arrive, observer=observer)
    assert not observer.of("ticket", worker="rollout-2", state="RUNNING")


def unfit(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Every rollout worker fails to load whose name begins so."""
    load = ToyRollout.load

    def fails(self: ToyRollout) -> Any:
        if self.name.startswith(names):
            raise ValueError("no such folder on this node")
        return load(self)

    monkeypatch.setattr(ToyRollout, "load", fails)


def test_a_successor_on_a_node_that_cannot_serve_leaves_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lose(ctx: Context, pools: Pools) -> None:
        await asyncio.sleep(2.0)
        growth_of(pools).end(pools["rollout"].workers[1])
        await asyncio.sleep(0.5)
        growth_of(pools).free += 1

    unfit(monkeypatch, "rollout-1.1")
    found = run_while(lose, elastic_config(most=2), Timing(generate=4.0))
    (left,) = found.observer.of("worker_left")
    assert left["worker"] == "rollout-1.1" and "no such folder on this node" in left["reason"]
    assert [event["worker"] for event in found.observer.of("worker_joined")] == ["rollout-1.2"]


def test_a_pool_of_fixed_size_ends_with_a_successor_that_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    unfit(monkeypatch, "rollout-1.1")
    with pytest.raises(WorkerFailed, match="no such folder on this node"):
        virtual(toy_config(), Timing(), once("rollout-1", "generate", 2, "kill"))


def test_newcomers_that_cannot_serve_do_not_make_a_pool_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come again and again, after pauses that double: an empty pool is given up nevertheless."""
    observer = ListObserver()

    async def replaced_by_unfit(ctx: Context, pools: Pools) -> None:
        growth_of(pools).arrive()
        for worker in list(pools["rollout"].workers):
            growth_of(pools).drain(worker, seconds=0.1)

    unfit(monkeypatch, "rollout-2", "rollout-0.", "rollout-1.")
    config = elastic_config(deadlines__load=600.0)
    with pytest.raises(PoolTooSmall, match=r"0 rollout workers for 1200 s"):
        virtual(config, SlowLoad(generate=4.0), disturb=replaced_by_unfit, observer=observer)
    refused = [event["time"] for event in observer.of("fault", kind="WorkerFailed")]
    pauses = [after - before - 52.0 for before, after in pairwise(refused)]
    assert pauses == pytest.approx([2.0**n for n in range(len(pauses))]) and len(pauses) > 4


def test_a_newcomer_that_still_loads_is_waited_for_and_not_counted() -> None:
    async def two_arrive(ctx: Context, pools: Pools) -> None:
        for worker in list(pools["rollout"].workers):
            growth_of(pools).drain(worker, seconds=0.1)
        await asyncio.sleep(40.0)
        growth_of(pools).arrive()
        growth_of(pools).arrive()

    found = run_while(two_arrive, timing=SlowLoad(generate=4.0))
    assert [event["workers"] for event in found.observer.of("worker_left")] == [1, 0]
    joined = found.observer.of("worker_joined")
    assert [event["workers"] for event in joined] == [1, 2] and joined[0]["time"] > 60.0


def test_a_newcomer_that_was_turned_away_is_not_among_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    async def arrive(ctx: Context, pools: Pools) -> None:
        await asyncio.sleep(1.0)
        growth_of(pools).arrive()

    unfit(monkeypatch, "rollout-2")
    config = elastic_config()
    found = run_while(arrive, config, Timing(generate=3.0))
    assert [event["newcomer"] for event in found.observer.of("worker", worker="rollout-2")] == [True]
    start = [{"event": "worker", "worker": f"rollout-{index}"} for index in range(2)]
    size = rollout_size(config, [*start, *found.observer.events])
    assert size == {"joined": 0, "left": 0, "fewest": 2, "most": 2}
