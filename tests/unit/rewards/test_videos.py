"""Tests of videos: rewards of images score frames of them, and rewards of videos get them whole."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from async_flowrl.config.schema import RewardConfig, RewardTerm
from async_flowrl.rewards.reward_worker import RewardWorker
from async_flowrl.types import ByteArray, Prompt, Scores

FRAMES = np.array([[9, 1, 2, 3, 4], [10, 11, 12, 13, 5]], dtype=np.uint8)
VIDEOS = FRAMES[:, :, None, None, None] * np.ones((2, 5, 8, 8, 3), dtype=np.uint8)


def score(name: str, images: ByteArray = VIDEOS, options: dict[str, Any] | None = None, **settings: Any) -> Scores:
    term = RewardTerm(name=f"tests.unit.rewards.own_rewards:{name}", options=options or {})
    config = replace(RewardConfig(terms={"mine": term}, backoff=0.0), **settings)
    worker = RewardWorker(config, index=0, name="reward-0")
    try:
        return worker.score(worker.reward.weights, Prompt(0, "a cat"), images[:1], images[1:])
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("frames", "how", "expected"),
    [
        (None, "mean", (3.8, 10.2)),
        (3, "mean", (5.0, 9.0)),
        (3, "min", (2.0, 5.0)),
        (2, "first", (9.0, 10.0)),
        (1, "min", (9.0, 10.0)),
        (99, "min", (1.0, 5.0)),
    ],
)
def test_a_reward_of_images_scores_evenly_spaced_frames(
    frames: int | None, how: str, expected: tuple[float, float]
) -> None:
    scores = score("first_pixel_of_one", frames=frames, frame_score=how)
    assert scores.total == scores.by_term["mine"] == pytest.approx(expected)
    assert scores.extras["mine"]["half"] == pytest.approx([value / 2 for value in expected])
    assert scores.extras["mine"]["read"] == ("<9>", "<10>")


def test_a_reward_of_videos_gets_them_whole() -> None:
    assert score("motion", frames=1).total == (5.0, 5.0)
    assert score("motion", options={"scale": 2.0}).total == (10.0, 10.0)
    assert score("motion", VIDEOS[:, 0]).total == (0.0, 0.0), "an image is a video of one frame"
