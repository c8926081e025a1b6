"""Tests of videos: rewards of images score frames of them, and rewards of videos get them whole."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from async_flowrl.cli.serve_rewards import scorer
from async_flowrl.config.schema import Config, RewardConfig, RewardTerm
from async_flowrl.rewards.endpoint import ServerError
from async_flowrl.rewards.http import HTTP
from async_flowrl.rewards.http_contract import ContractError, Limits, read_request, request_body
from async_flowrl.rewards.image_statistics import flicker, motion
from async_flowrl.rewards.registry import check_groups
from async_flowrl.types import ByteArray, Prompt, Scores
from tests.support.reward_server import served
from tests.unit.rewards.own_rewards import own, scored

PROMPT = Prompt(0, "a cat")
FRAMES = np.array([[9, 1, 2, 3, 4], [10, 11, 12, 13, 5]], dtype=np.uint8)
VIDEOS = FRAMES[:, :, None, None, None] * np.ones((2, 5, 8, 8, 3), dtype=np.uint8)


def score(name: str, images: ByteArray = VIDEOS, options: dict[str, Any] | None = None, **settings: Any) -> Scores:
    config = RewardConfig(terms={"mine": own(name, **(options or {}))}, backoff=0.0, **settings)
    return scored(config, PROMPT, images[:1], images[1:])


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


def test_only_a_field_that_is_true_or_false_is_the_flag() -> None:
    assert score("named_by_option", options={"video": "four"}, frames=1).total == (4.0, 4.0)
    term = RewardTerm(name="http", options={"url": "http://127.0.0.1:9", "video": "yes"})
    with pytest.raises(ValueError, match=r"^reward\.terms\.far: the option video .*'yes'$"):
        check_groups(Config(reward=RewardConfig(terms={"far": term})), 5)


def moving(steps: int) -> ByteArray:
    """A dark square on a light ground [5, 48, 64, 3] that moves by so many pixels from frame to frame."""
    video = np.full((5, 48, 64, 3), 220, dtype=np.uint8)
    for index, frame in enumerate(video):
        frame[16:32, 8 + steps * index : 24 + steps * index] = 20
    return video


def test_a_still_video_has_no_motion_and_no_flicker() -> None:
    still, slow, fast = moving(0), moving(1), moving(4)
    assert motion(np.stack([still, slow, fast]), PROMPT) == [0.0, pytest.approx(0.9, abs=0.1), 1.0]
    one = flicker(np.stack([still, slow]), PROMPT)
    changed = 2 * 16 / (48 * 64) * 200  # Two columns of the square's height change by 200 of 255 in each frame.
    assert one == [1.0, pytest.approx(1 - changed / 255)]
    assert motion(still[None, :1], PROMPT) == [0.0] and flicker(still[None, :1], PROMPT) == [1.0]


@pytest.mark.parametrize("encoding", ["png", "multipart"])
@pytest.mark.parametrize("batch", ["group", "one_by_one"])
def test_a_server_gets_videos_and_has_the_scores_of_the_run_itself(batch: str, encoding: str) -> None:
    videos = np.stack([moving(0), moving(1), moving(4)])
    config = RewardConfig(terms={"motion": RewardTerm()})
    with served(scorer(config)) as url:
        http = HTTP(url, video=True, frames=3, batch=batch, encoding=encoding, retries=0)
        assert asyncio.run(http(videos, PROMPT)) == list(motion(videos[:, ::2], PROMPT))
        with pytest.raises(ServerError, match="set video=true"):
            asyncio.run(HTTP(url, retries=0)(videos[:, 0], PROMPT))
        assert asyncio.run(http(videos[:, :1], PROMPT)) == [0.0] * 3, "videos of one frame"
    with served(scorer(RewardConfig(terms={"mine": own("first_pixel_of_one")}, frames=2))) as url:
        found = asyncio.run(HTTP(url, video=True, retries=0)(videos, PROMPT))
        assert [each["score"] for each in found] == [220.0] * 3, "its own reward.frames"


def test_servers_of_images_refuse_videos_by_name() -> None:
    """One of this version whose reward takes images, and one of the first version of the contract."""
    with served(lambda images, prompt: [0.0] * len(images)) as url:
        for videos in (VIDEOS, VIDEOS[:, :1]):
            with pytest.raises(ServerError, match="videos"):
                asyncio.run(HTTP(url, video=True, retries=0)(videos, PROMPT))
    fields = json.loads(request_body([b""] * 4, ["a cat"], 2))  # type: ignore[list-item]
    assert fields["version"] == 2 and fields["frames"] == 2
    assert json.loads(request_body([b""] * 4, ["a cat"]))["version"] == 1  # type: ignore[list-item]
    for wrong in ({"frames": 3}, {"frames": 0}, {"frames": True}, {"frames": 2, "version": 1}):
        with pytest.raises(ContractError):
            read_request({**fields, **wrong}, None, Limits())


def test_a_group_of_more_images_than_a_request_has_is_refused_at_the_start() -> None:
    def config(of_run: int | None = None, **options: Any) -> Config:
        term = RewardTerm(name="http", options={"url": "http://127.0.0.1:9", **options})
        return Config(group_size=8, reward=RewardConfig(terms={"far": term}, frames=of_run))

    check_groups(config(), 32)
    for allowed in (config(32), config(batch="one_by_one"), config(max_images=512), config(video=True)):
        check_groups(allowed, 33)
    for refused in (config(), config(33), config(video=True, frames=None)):
        with pytest.raises(ValueError, match=r"^reward\.terms\.far: .*264 .*256"):
            check_groups(refused, 33)
    # Images to edit count too.
    few = {"max_images": 8}
    for options in (few, few | {"sources": True, "batch": "one_by_one"}, {"max_images": 10, "sources": True}):
        check_groups(config(**options), 1, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^reward\.terms\.far: .*10 .*max_images=8"):
        check_groups(config(sources=True, max_images=8), 1, 2)
