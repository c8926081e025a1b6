"""Rewards as a user writes them, which the tests name by their path, and what a worker says of images."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from async_flowrl.config.schema import RewardConfig, RewardTerm
from async_flowrl.rewards.base import PromptRefused
from async_flowrl.rewards.reward_worker import RewardWorker
from async_flowrl.types import ByteArray, Prompt, Scores

meeting = threading.Barrier(2)


def own(name: str, weight: float = 1.0, **options: Any) -> RewardTerm:
    """The term of one of the rewards below."""
    return RewardTerm(weight=weight, name=f"{__name__}:{name}", options=options)


def scored(config: RewardConfig, prompt: Prompt, *images: ByteArray) -> Scores:
    """Scores of a group, whose images may come in several tickets, by a worker of these terms."""
    worker = RewardWorker(config, index=0, name="reward-0")
    try:
        return worker.score(worker.reward.weights, prompt, *images)
    finally:
        worker.close()


def constant(images: ByteArray, prompt: Prompt, value: float = 0.25) -> list[float]:
    return [value] * len(images)


def first_pixel(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    return images[:, 0, 0, 0].astype(np.float64)


def meets_another(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    meeting.wait(timeout=120)
    return [1.0] * len(images)


async def meets_another_async(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    await asyncio.to_thread(meeting.wait, 120)
    return [2.0] * len(images)


class OfOneSize:
    """A reward for images of one size, in pixels."""

    def __init__(self, size: int) -> None:
        self.size = size

    def check(self, prompt: Prompt) -> None:
        if prompt.resolution != self.size:
            raise ValueError(f"{self.size} px, got {prompt.resolution}")

    def __call__(self, images: ByteArray, prompt: Prompt) -> list[float]:
        return [1.0] * len(images)


def too_few(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    return [1.0]


async def breaks(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    raise ConnectionError("the judge is away")


async def breaks_in_a_group(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(breaks(images, prompt))
    return []


def leaves(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    raise SystemExit(3)


async def leaves_async(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    raise SystemExit(3)


def refuses(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    raise PromptRefused("such prompts are not scored")


async def refuses_in_a_group(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(refuses, images, prompt))
    return []


class RefusesOne:
    pointwise = True

    def __call__(self, image: ByteArray, prompt: Prompt) -> float:
        return refuses(image[None], prompt)[0]


def runs_out(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    return next(iter(()))


class Judge:
    """Not deterministic, wants targets, keeps something that belongs to one event loop."""

    deterministic = False
    needs_target = True

    def __init__(self, bonus: float = 0.0) -> None:
        self.bonus = bonus
        self.loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, images: ByteArray, prompt: Prompt) -> Sequence[float]:
        self.loop = self.loop or asyncio.get_running_loop()
        assert self.loop is asyncio.get_running_loop(), "the worker changed its event loop"
        return [self.bonus + len(prompt.target or "")] * len(images)


def first_pixel_of_one(image: ByteArray, prompt: Prompt, scale: float = 1.0) -> dict[str, float | str]:
    value = float(image[0, 0, 0])
    return {"score": scale * value, "half": value / 2, "read": f"<{value:.0f}>"}


first_pixel_of_one.pointwise = True  # type: ignore[attr-defined]


class PointwiseJudge:
    """Async. Fails for the image 2 `failures` times before it answers; counts its calls."""

    pointwise = True
    deterministic = False

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.calls: list[int] = []

    async def __call__(self, image: ByteArray, prompt: Prompt) -> float:
        value = int(image[0, 0, 0])
        self.calls.append(value)
        if value == 2 and self.calls.count(value) <= self.failures:
            raise ConnectionError("the judge is away")
        return float(value)


class MeetsItself:
    """Two images at a time, or never."""

    pointwise = True

    def __call__(self, image: ByteArray, prompt: Prompt) -> float:
        meeting.wait(timeout=120)
        return 1.0


def motion(videos: ByteArray, prompt: Prompt, scale: float = 1.0) -> list[float]:
    """What is different in the last frame, of videos [n, F, H, W, 3]."""
    first, last = videos[:, 0].astype(float), videos[:, -1].astype(float)
    return [scale * float(np.abs(b - a).mean()) for a, b in zip(first, last, strict=True)]


motion.video = True  # type: ignore[attr-defined]


def named_by_option(images: ByteArray, prompt: Prompt, video: str = "") -> list[float]:
    """An option of the name of a flag, which it is not."""
    return [float(len(video))] * len(images)


seen: list[Sequence[ByteArray]] = []


def near_its_source(images: ByteArray, prompt: Prompt, sources: Sequence[ByteArray], bonus: float = 0.0) -> list[float]:
    seen.append(sources)
    return [bonus - abs(float(image[0, 0, 0]) - float(sources[-1][0, 0, 0])) for image in images]


class OneNearItsSource:
    pointwise = sources = True

    async def __call__(self, image: ByteArray, prompt: Prompt, sources: Sequence[ByteArray]) -> float:
        return near_its_source(image[None], prompt, sources)[0]


near_its_source.sources = True  # type: ignore[attr-defined]


def takes_no_sources(images: ByteArray, prompt: Prompt) -> list[float]:
    return [0.0] * len(images)


takes_no_sources.sources = True  # type: ignore[attr-defined]
