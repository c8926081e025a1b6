"""Tests of the seats of reward workers on a Ray cluster; custom resources stand for devices."""

import asyncio
import time
from collections.abc import Mapping

import numpy as np
import pytest
import ray

from async_flowrl.config.schema import Config, RewardTerm
from async_flowrl.config.scoring_pools import scoring_pools
from async_flowrl.run.pools import reward_spec
from async_flowrl.types import Prompt, Scores
from separation.cluster import cluster
from separation.group import WorkerGroup
from tests.integration.seated import JUDGE, LATER

DEVICES = "tests.integration.seated:devices"
PROMPT, IMAGES = Prompt(0, "red"), np.zeros((2, 8, 8, 3), np.uint8)


async def scores(groups: Mapping[str, WorkerGroup]) -> dict[str, Scores]:
    """By worker."""
    return {
        worker.name: await worker.call("score", ("color", "judge", "threads"), PROMPT, IMAGES)
        for pool, group in groups.items()
        for worker in group.workers
        if pool != LATER
    }


@pytest.mark.extended
@pytest.mark.usefixtures("ray_here")
def test_workers_have_seats_and_see_no_gpu() -> None:
    """On a cluster without GPUs, with two devices for the judge and one for the held-out term."""
    config = Config()
    config.model.dtype = "float32"
    config.reward.terms = {
        "color": RewardTerm(),
        "judge": RewardTerm(name=DEVICES, workers=2, gpus_per_worker=0.5),
        "threads": RewardTerm(name="tests.integration.seated:threads", threads=3),
    }
    config.evaluate.reward.terms = {"later": RewardTerm(name=DEVICES, gpus_per_worker=0.75)}

    async def test() -> None:
        async with cluster([reward_spec(pool, config) for pool in scoring_pools(config)]) as groups:
            found, left = await scores(groups), ray.available_resources()
            assert sorted(found) == ["reward-0", f"{JUDGE}-0", f"{JUDGE}-1", "reward/threads-0"]
            assert [found[f"{JUDGE}-{index}"].by_term["judge"] for index in range(2)] == [(0.0, 0.0)] * 2
            assert found["reward/threads-0"].by_term == {"threads": (3.0, 3.0)}
            assert list(found["reward-0"].by_term) == ["color"]
            assert left.get(JUDGE, 0) == left.get(LATER, 0) == 0
            later = await groups[LATER].workers[0].call("score", ("later",), PROMPT, IMAGES)
            assert later.by_term == {"later": (0.0, 0.0)}
            groups[JUDGE].workers[1].kill()
            await groups[JUDGE].replace(1)
            assert (await scores(groups))[f"{JUDGE}-1.1"].by_term == found[f"{JUDGE}-1"].by_term

    asyncio.run(test())
    limit = time.monotonic() + 60
    while ray.available_resources().get(JUDGE) != 2:  # Ray learns of it with its next report
        assert time.monotonic() < limit, "the seats are not given back"
        time.sleep(0.1)
