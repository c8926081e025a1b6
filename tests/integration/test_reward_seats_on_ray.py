"""Tests of the seats of reward workers on a Ray cluster; custom resources stand for devices."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
import pytest
import ray

from async_flowrl.config.schema import Config, RewardTerm
from async_flowrl.config.scoring_pools import scoring_pools
from async_flowrl.run.pools import reward_spec
from async_flowrl.types import Prompt, Scores
from separation.cluster import cluster
from separation.group import WorkerGroup
from separation.resources import ResourcesMissing
from tests.integration.seated import JUDGE, LATER
from tests.support.ray_cluster import start_ray

PROMPT, IMAGES = Prompt(0, "red"), np.zeros((2, 8, 8, 3), np.uint8)


def seated(workers: int, gpus: float, *, held_out: float = 0.0) -> Config:
    """A shared pool of one worker, `workers` of the judge's own, and one for a held-out term."""
    config = Config()
    config.model.dtype = "float32"
    judge = RewardTerm(name="tests.integration.seated:devices", workers=workers, gpus_per_worker=gpus)
    threads = RewardTerm(name="tests.integration.threaded:threads", threads=3)
    config.reward.terms = {"color": RewardTerm(), "judge": judge, "threads": threads}
    later = RewardTerm(name="tests.integration.seated:devices", gpus_per_worker=held_out)
    config.evaluate.reward.terms = {"later": later}
    return config


def on_ray(config: Config, use: Callable[[Mapping[str, WorkerGroup]], Awaitable[Any]]) -> Any:
    """What `use` returns of the reward pools of a configuration."""

    async def started() -> Any:
        async with cluster([reward_spec(pool, config) for pool in scoring_pools(config)]) as groups:
            return await use(groups)

    return asyncio.run(started())


async def scores(groups: Mapping[str, WorkerGroup]) -> dict[str, Scores]:
    """By worker."""
    return {
        worker.name: await worker.call("score", ("color", "judge", "threads", "none"), PROMPT, IMAGES)
        for pool, group in groups.items()
        for worker in group.workers
        if pool != LATER
    }


@pytest.mark.extended
@pytest.mark.usefixtures("ray_here")
def test_workers_have_seats_and_see_no_gpu() -> None:
    """On a cluster without GPUs, with two devices for the judge and one for the held-out term."""

    async def use(groups: Mapping[str, WorkerGroup]) -> tuple[dict[str, Scores], dict[str, float], dict[str, Scores]]:
        before, left = await scores(groups), ray.available_resources()
        later = await groups[LATER].workers[0].call("score", ("later",), PROMPT, IMAGES)
        assert later.by_term == {"later": (0.0, 0.0)} and left.get(LATER, 0) == 0
        groups[JUDGE].workers[1].kill()
        await groups[JUDGE].replace(1)
        return before, left, await scores(groups)

    found, left, after = on_ray(seated(2, 0.5, held_out=0.75), use)
    assert sorted(found) == ["reward-0", f"{JUDGE}-0", f"{JUDGE}-1", "reward/threads-0"]
    assert [found[f"{JUDGE}-{index}"].by_term["judge"] for index in range(2)] == [(0.0, 0.0)] * 2
    assert found["reward/threads-0"].by_term == {"threads": (3.0, 3.0)}
    assert list(found["reward-0"].by_term) == ["color"]
    assert left.get(JUDGE, 0) == 0
    assert after[f"{JUDGE}-1.1"].by_term == found[f"{JUDGE}-1"].by_term
    limit = time.monotonic() + 60
    while ray.available_resources().get(JUDGE) != 2:  # Ray learns of it with its next report
        assert time.monotonic() < limit, "the seats are not given back"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.serial
def test_a_seat_on_a_gpu_is_what_its_worker_sees() -> None:
    """Ray believes in GPUs that it is told of: two judges share the first, and workers without a seat see none."""
    ray.shutdown()
    start_ray(num_gpus=1)
    try:
        config = seated(2, 0.5)
        config.reward.terms["none"] = RewardTerm(name="tests.integration.seated:devices")
        found = on_ray(config, scores)
        assert [found[f"{JUDGE}-{index}"].total for index in range(2)] == [(1.0, 1.0)] * 2
        assert found["reward-0"].by_term["none"] == (0.0, 0.0)
        with pytest.raises(ResourcesMissing, match=r"it has 1 GPU and 2 are needed"):
            on_ray(seated(2, 0.6), scores)
    finally:
        ray.shutdown()
