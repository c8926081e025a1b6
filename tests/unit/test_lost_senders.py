"""Tests of a trainer rank that dies while a new rollout worker waits for its weights: the rank is blamed."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from async_flowrl.config.schema import Config
from async_flowrl.controller.context import Context
from async_flowrl.controller.deaths import SenderLost
from async_flowrl.controller.share_payload import ShardedPayload
from async_flowrl.controller.worker_proof import WorkerProof
from separation.group import Worker
from tests.support.toy import toy_config, virtual
from tests.support.toy_growth import ToyGrowth
from tests.support.toy_pool import ListObserver, Timing, ToyPool, no_fault

STEPS = 6
Pools = Mapping[str, ToyPool]


async def worker_dies(ctx: Context, pools: Pools) -> None:
    await asyncio.sleep(7.3)
    pools["rollout"].workers[0].kill()


async def worker_comes(ctx: Context, pools: Pools) -> None:
    await asyncio.sleep(7.3)
    growth: Any = pools["rollout"].growth
    assert isinstance(growth, ToyGrowth)
    growth.arrive()


def blamed(config: Config, disturb: Any) -> list[str]:
    """Runs a job that must end with the death of its only trainer rank; returns the rollout workers with a fault."""
    observer = ListObserver()
    with pytest.raises(SenderLost, match="trainer-0 died") as raised:
        virtual(config, Timing(generate=20.0), no_fault, disturb=disturb, observer=observer)
    assert raised.value.worker == "trainer-0"
    return [event["worker"] for event in observer.of("fault")]


def test_a_rank_that_dies_before_a_new_worker_gets_its_versions_is_blamed() -> None:
    """The rank is idle, because images take long: nothing else notices its death."""

    async def both_die(ctx: Context, pools: Pools) -> None:
        await worker_dies(ctx, pools)
        while not any(worker.name == "rollout-0.1" for worker in pools["rollout"].workers):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        pools["trainer"].workers[0].kill()

    config = toy_config(0, steps=STEPS, rollout__num_workers=1)
    assert blamed(config, both_die) == ["rollout-0"], "its successor is not to blame"


def test_a_rank_that_dies_with_the_node_of_its_canary_is_blamed() -> None:
    """A new worker cannot get the canary, and nobody is left to make it again."""

    async def node_dies(ctx: Context, pools: Pools) -> None:
        await worker_dies(ctx, pools)
        weights: Any = ctx.weights
        weights.proof.canary.payload.lost = True
        pools["trainer"].workers[0].kill()

    config = toy_config(0, steps=STEPS, rollout__num_workers=1)
    assert blamed(config, node_dies) == ["rollout-0"], "its successor is not to blame"


@pytest.mark.parametrize("elastic", [False, True], ids=["replacement", "newcomer"])
def test_a_rank_that_dies_while_it_sends_a_bucket_to_a_new_worker_is_blamed(
    elastic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the proof of the new worker, whose canary comes in shares."""
    prove = WorkerProof.of

    async def dies(self: WorkerProof, worker: Worker) -> None:
        if worker.name not in ("rollout-0.1", "rollout-1"):
            return await prove(self, worker)
        ranks = self.trainers.living.workers
        ranks[0].kill()
        await ShardedPayload(ranks, "sender.policy.piece", -1, 256, 30.0).bucket(0, 0)
        raise AssertionError("a dead rank has answered")

    monkeypatch.setattr(WorkerProof, "of", dies)
    bounds = {"rollout__min_workers": 1, "rollout__max_workers": 4} if elastic else {}
    config = toy_config(0, steps=STEPS, **{"rollout__num_workers": 1, **bounds})
    found = blamed(config, worker_comes if elastic else worker_dies)
    assert found == ([] if elastic else ["rollout-0"])
