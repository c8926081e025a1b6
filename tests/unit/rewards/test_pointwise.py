"""Tests of pointwise rewards: one image per call, several calls at a time, and only failed calls are repeated."""

from typing import Any

import numpy as np

from async_flowrl.config.schema import RewardConfig
from async_flowrl.rewards.reward_worker import RewardWorker
from async_flowrl.types import Prompt, Scores
from tests.unit.rewards.own_rewards import own

PROMPT = Prompt(3, "a cat")
IMAGES = np.arange(6, dtype=np.uint8)[:, None, None, None] * np.ones((6, 8, 8, 3), dtype=np.uint8)


def score(name: str, options: dict[str, Any] | None = None, **settings: Any) -> tuple[Scores, Any]:
    """The scores, and the reward object."""
    config = RewardConfig(terms={"mine": own(name, **(options or {}))}, backoff=0.0, **settings)
    worker = RewardWorker(config, index=0, name="reward-0")
    try:
        return worker.score(worker.reward.weights, PROMPT, IMAGES[:2], IMAGES[2:]), worker.reward.terms[0].reward
    finally:
        worker.close()


def test_every_image_is_scored_alone_and_in_order() -> None:
    scores, _ = score("first_pixel_of_one", {"scale": 2.0})
    assert scores.total == scores.by_term["mine"] == (0.0, 2.0, 4.0, 6.0, 8.0, 10.0)
    assert scores.extras["mine"]["half"] == (0.0, 0.5, 1.0, 1.5, 2.0, 2.5)
    assert scores.extras["mine"]["read"][5] == "<5>"


def test_only_the_image_that_failed_is_tried_again() -> None:
    scores, judge = score("PointwiseJudge", {"failures": 2}, retries=3)
    assert scores.total == (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    assert sorted(judge.calls) == [0, 1, 2, 2, 2, 3, 4, 5]
    assert scores.retries == {"mine": 2} and not scores.failed


def test_an_image_that_fails_for_good_fails_its_group_and_not_as_zero() -> None:
    scores, judge = score("PointwiseJudge", {"failures": 9}, retries=1)
    assert scores.by_term == {} and scores.failed["mine"].final
    assert "ConnectionError: the judge is away" in scores.failed["mine"].reason
    assert judge.calls.count(2) == 2


def test_plain_functions_run_on_several_threads() -> None:
    scores, _ = score("MeetsItself", concurrency=2)
    assert scores.total == (1.0,) * 6
