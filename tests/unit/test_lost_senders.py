"""Tests of a trainer rank that dies, fails or hangs while a new rollout worker waits for its weights.

The rank is blamed, and no rollout worker.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from async_flowrl.config.schema import Config
from async_flowrl.controller.context import Context
from async_flowrl.controller.endpoints import SenderFailed, SenderLate
from separation.group import WorkerDied
from tests.support.toy import toy_config, virtual
from tests.support.toy_growth import ToyGrowth
from tests.support.toy_pool import Fault, ListObserver, Timing, ToyPool, no_fault, once

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


def one_worker(*, elastic: bool) -> Config:
    bounds = {"rollout__min_workers": 1, "rollout__max_workers": 4} if elastic else {}
    return toy_config(0, steps=STEPS, **{"rollout__num_workers": 1, **bounds})


def blamed(
    config: Config,
    disturb: Any,
    fault: Fault = no_fault,
    error: type[Exception] = WorkerDied,
    match: str = "trainer-0 died",
) -> list[str]:
    """Runs a job that its only trainer rank must end with this error; returns the rollout workers with a fault."""
    observer = ListObserver()
    with pytest.raises(error, match=match):
        virtual(config, Timing(generate=20.0), fault, disturb=disturb, observer=observer)
    return [event["worker"] for event in observer.of("fault")]


def test_a_rank_that_dies_before_a_new_worker_gets_its_versions_is_blamed() -> None:
    """The rank is idle, because images take long: nothing else notices its death."""

    async def both_die(ctx: Context, pools: Pools) -> None:
        await worker_dies(ctx, pools)
        while not any(worker.name == "rollout-0.1" for worker in pools["rollout"].workers):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        pools["trainer"].workers[0].kill()

    assert blamed(one_worker(elastic=False), both_die) == ["rollout-0"], "its replacement is not to blame"


@pytest.mark.parametrize(
    ("comes", "elastic"), [(False, False), (False, True), (True, True)], ids=["fixed", "replacement", "newcomer"]
)
@pytest.mark.parametrize(
    ("what", "error", "match"),
    [
        ("raise", SenderFailed, r"trainer-0\.sender\.policy\.payload raised RuntimeError: injected"),
        ("hang", SenderLate, r"trainer-0 has not answered sender\.policy\.payload within the deadline of 30 s"),
    ],
)
def test_a_rank_that_cannot_send_a_version_to_a_new_worker_is_blamed(
    what: str, error: type[Exception], match: str, *, comes: bool, elastic: bool
) -> None:
    """Its third payload: the first two are the proof weights and version 0, which the worker that is there has got."""
    fault, disturb = once("trainer-0", "payload", 3, what), worker_comes if comes else worker_dies
    assert blamed(one_worker(elastic=elastic), disturb, fault, error, match) == ([] if comes else ["rollout-0"])
