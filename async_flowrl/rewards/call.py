"""The calls of one term for one group: one call for all images, or one per image with retries for a failed image."""

import asyncio
import inspect
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

from async_flowrl.rewards.base import RewardError
from async_flowrl.rewards.results import Extra, Result, group_result, image_result, joined
from async_flowrl.types import ByteArray, Failure, Prompt, Span


@dataclass(frozen=True)
class Attempts:
    """The limits of a pointwise term (a term that is called once per image).

    `retries` per image; `backoff`, the seconds before the first retry, doubled for each further one; `concurrency`, the
    number of images of a group that are scored at a time.
    """

    retries: int = 0
    backoff: float = 0.0
    concurrency: int = 8


@dataclass(frozen=True)
class TermScores:
    """One term's scores and extras of a group in image order, or its `failure`; `retries` counts repeated calls."""

    span: Span
    scores: tuple[float, ...] = ()
    extras: Mapping[str, tuple[Extra, ...]] = field(default_factory=dict)
    failure: Failure | None = None
    retries: int = 0


@dataclass
class _Calls:
    """A term's calls for one group."""

    name: str
    reward: Callable[..., Any]
    prompt: Prompt
    executor: Executor
    retries: int = 0

    @property
    def where(self) -> str:
        return f"reward {self.name!r} on prompt {self.prompt.text!r}"

    async def call(self, images: ByteArray) -> Any:
        """Calls the reward and awaits its result. Raises RewardError, whose cause is the reward's own exception."""
        try:
            result = await asyncio.get_running_loop().run_in_executor(self.executor, self._called, images)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            raise RewardError(
                f"reward {self.name!r} failed on prompt {self.prompt.text!r}: {type(error).__name__}: {error}"
            ) from error

    def _called(self, images: ByteArray) -> Any:
        try:
            return self.reward(images, self.prompt)
        except StopIteration as error:  # a future cannot hold it, so the caller would wait for ever
            raise RuntimeError("StopIteration left the reward") from error

    async def image(self, image: ByteArray, attempts: Attempts, places: asyncio.Semaphore) -> Result:
        """Returns one image's result after at most `attempts.retries` retries. Raises the last try's RewardError."""
        for attempt in range(attempts.retries + 1):
            try:
                async with places:
                    return image_result(self.where, await self.call(image))
            except RewardError:
                if attempt == attempts.retries:
                    raise
            self.retries += 1
            await asyncio.sleep(attempts.backoff * 2**attempt)
        raise AssertionError("unreachable")


async def score_term(
    name: str,
    reward: Callable[..., Any],
    pointwise: bool,
    prompt: Prompt,
    images: ByteArray,
    executor: Executor,
    attempts: Attempts,
) -> TermScores:
    """Returns one term's results for images uint8 [n, H, W, 3]. A RewardError is not raised but stored in `failure`."""
    start = time.time()
    calls = _Calls(name, reward, prompt, executor)
    scores_of_term = TermScores(Span(f"score/{name}", start, start))
    try:
        if pointwise:
            result = await _pointwise(calls, images, attempts)
        else:
            result = group_result(calls.where, await calls.call(images), len(images))
        scores_of_term = replace(scores_of_term, scores=result.scores, extras=result.extras)
    except RewardError as error:
        text = "".join(traceback.format_exception(error))
        scores_of_term = replace(scores_of_term, failure=Failure(str(error), final=pointwise, traceback=text))
    return replace(scores_of_term, span=Span(f"score/{name}", start, time.time()), retries=calls.retries)


async def _pointwise(calls: _Calls, images: ByteArray, attempts: Attempts) -> Result:
    """Scores the images concurrently. The first failure cancels the other calls and is raised once all have ended."""
    places = asyncio.Semaphore(attempts.concurrency)
    tasks = [asyncio.ensure_future(calls.image(image, attempts, places)) for image in images]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return joined(calls.where, results)
