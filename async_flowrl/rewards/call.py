"""The calls of one term for one group, and the checks of what it returns.

A term is called once for all images, or once per image with retries for a failed image. It returns numbers, or one
mapping per image with `score` and extras: further numbers or strings about an image, which are logged beside the score.
"""

import asyncio
import inspect
import math
import re
import reprlib
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np

from async_flowrl.config.error_text import in_one_line, shortened
from async_flowrl.config.resolution import spaced_frames
from async_flowrl.config.schema import RewardConfig
from async_flowrl.image_file import opened
from async_flowrl.rewards.base import PromptRefused, Reward, RewardError
from async_flowrl.types import ByteArray, Failure, Prompt, Requests, Scores, Span
from separation.supervise import leaves

# Losses are computed in float32, whose largest number is about 3.4e38.
MAX_SCORE = 1e30
# Most extras of a term, and most characters of a text extra; a longer text is cut.
MAX_EXTRAS, MAX_CHARACTERS = 32, 500
# Characters of a prompt in messages; of a longer one its beginning and its end.
MAX_PROMPT = 200
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = MAX_PROMPT
# Names of a term's own metrics (`reward/<term>/mean`); an extra of such a name is refused.
STATISTICS = ("mean", "std", "group_std", "zero_std_ratio", "missing", "failures", "retries")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")

Extra = float | str
Sources = Sequence[ByteArray]
"""The images that a prompt edits, each uint8 [H, W, 3]."""

# `reward.frame_score` → a video's number, from those of its frames.
OF_FRAMES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda numbers: math.fsum(numbers) / len(numbers),
    "min": min,
    "first": lambda numbers: numbers[0],
}


@dataclass(frozen=True)
class Result:
    """The scores of n images by one term, and its extras: name → n values."""

    scores: tuple[float, ...]
    extras: Mapping[str, tuple[Extra, ...]] = field(default_factory=dict)


def group_result(where: str, returned: object, count: int) -> Result:
    """Checks what a reward returned for `count` images: a sequence of numbers, or of mappings with the same keys.

    Raises RewardError, whose message begins with `where`, if it is anything else.
    """
    if isinstance(returned, Sequence) and any(isinstance(result, Mapping) for result in returned):
        if len(returned) != count:
            raise RewardError(f"{where} must return {count} results, got {len(returned)}")
        return joined(where, [image_result(where, result) for result in returned])
    return Result(_numbers(where, returned, (count,)))


def image_result(where: str, returned: object) -> Result:
    """Checks what a reward returned for one image: a number or a mapping. Raises RewardError if it is anything else."""
    if not isinstance(returned, Mapping):
        return Result(_numbers(where, returned, None))
    if "score" not in returned:
        raise RewardError(f"{where} must return a mapping with 'score', got the keys {sorted(map(str, returned))}")
    scores = image_result(where, returned["score"]).scores
    extras = {name: (_extra(where, name, value),) for name, value in returned.items() if name != "score"}
    if len(extras) > MAX_EXTRAS:
        raise RewardError(f"{where} must return at most {MAX_EXTRAS} extras, got {len(extras)}")
    return Result(scores, extras)


def joined(where: str, results: Sequence[Result]) -> Result:
    """Joins the results of single images. Raises RewardError unless all have the same extras, as numbers or as text."""
    kinds = [{name: isinstance(values[0], str) for name, values in result.extras.items()} for result in results]
    for one in kinds:
        if one != kinds[0]:
            extras = f"the extras {sorted(kinds[0])} and {sorted(one)} (or one as a number here and as text there)"
            raise RewardError(f"{where} must say the same of every image, got {extras}")
    values = {name: tuple(result.extras[name][0] for result in results) for name in sorted(kinds[0])}
    return Result(tuple(result.scores[0] for result in results), values)


def check_size(where: str, number: float) -> None:
    if abs(number) > MAX_SCORE:
        raise RewardError(f"{where} is {number:g}; numbers beyond {MAX_SCORE:g} overflow in the loss: scale them down")


def _numbers(where: str, returned: object, shape: tuple[int] | None) -> tuple[float, ...]:
    """Returns the checked numbers. Raises RewardError for another shape; None is one number, in any shape."""
    count = "one finite number" if shape in (None, (1,)) else f"{shape[0]} finite numbers"
    or_mappings = ", or a list with a mapping for each image" if isinstance(returned, Mapping) else ""
    must = f"{where} must return {count}{or_mappings}"
    try:
        values = np.asarray(returned)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors of a GPU or with a gradient
        raise RewardError(f"{must}, got {returned!r}: {error}") from error
    if values.size and values.dtype.kind not in "biuf":
        raise RewardError(f"{must}, got {returned!r}")
    if (values.size != 1) if shape is None else (values.shape != shape):
        raise RewardError(f"{must}, got shape {list(values.shape)}: {returned!r}")
    numbers = tuple(values.astype(np.float64).flatten().tolist())
    if not all(math.isfinite(number) for number in numbers):
        raise RewardError(f"{must}, got {list(numbers)}")
    for number in numbers:
        check_size(f"{where}: a score", number)
    return numbers


def _extra(where: str, name: object, value: object) -> Extra:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RewardError(f"{where}: an extra's name must be a word of letters, digits, '_', '-' and '.', got {name!r}")
    if name in STATISTICS:
        raise RewardError(f"{where}: an extra must not be called {name!r}, which metrics use for the score itself")
    if isinstance(value, str):
        return shortened(value, MAX_CHARACTERS)
    if isinstance(value, Real | np.bool_ | np.ndarray) or hasattr(value, "__array__"):
        return image_result(f"{where}: the extra {name!r}", value).scores[0]
    raise RewardError(f"{where}: the extra {name!r} must be a finite number or a string, got {type(value).__name__}")


@dataclass(frozen=True)
class Term:
    """One reward of the sum; `name` is its key under `reward.terms`."""

    name: str
    weight: float
    reward: Reward
    # A group without this term's score gets no reward.
    required: bool = True
    # The reward is called once per image instead of once per group.
    pointwise: bool = False
    # The reward is called with videos, not with frames of them.
    video: bool = False
    # The reward is called with the images that the prompt edits, too.
    sources: bool = False
    # The reward scores only evaluations, and has no part in the sum.
    held_out: bool = False


def frames_to_score(images: ByteArray, count: int | None, *, video: bool) -> tuple[ByteArray, int]:
    """Returns what a reward is called with, and how many of these belong to one image or video.

    Of videos uint8 [n, F, H, W, 3] they are `count` evenly spaced frames (None: all), [n k, H, W, 3]. A reward of
    videos gets those, and an image as a video of one frame.
    """
    if video:
        return images if images.ndim == 5 else images[:, None], 1
    if images.ndim == 4:
        return images, 1
    chosen = spaced_frames(images.shape[1], count or images.shape[1])
    return images[:, chosen].reshape(-1, *images.shape[2:]), len(chosen)


def results_of_videos(result: Result, frames: int, how: str) -> Result:
    """Returns the results of videos, by `how` (a key of OF_FRAMES), from those of `frames` images of each, in order.

    A text beside the score is that of the first frame.
    """

    if frames == 1:
        return result

    def reduced(values: Sequence[Any]) -> tuple[Any, ...]:
        parts = [values[start : start + frames] for start in range(0, len(values), frames)]
        return tuple(part[0] if isinstance(part[0], str) else OF_FRAMES[how](part) for part in parts)

    return Result(reduced(result.scores), {name: reduced(values) for name, values in result.extras.items()})


def read_sources(prompt: Prompt) -> Sources:
    """Reads the images that a prompt edits. Raises ValueError if a file is gone, or has other bytes."""
    return [np.asarray(opened(image)) for image in prompt.images]


async def call(
    reward: Callable[..., Any],
    images: ByteArray,
    prompt: Prompt,
    executor: Executor | None = None,
    *,
    sources: Sources | None = None,
) -> Any:
    """Calls a reward in a thread, awaits its result if it is asynchronous, and returns it; raises what it raises.

    Unless `sources` is None, they are the reward's third argument.
    """

    def called() -> Any:
        try:
            return reward(images, prompt, *([] if sources is None else [sources]))
        except StopIteration as error:  # a future cannot hold it, so the caller would wait for ever
            raise RuntimeError("StopIteration left the reward") from error

    result = await asyncio.get_running_loop().run_in_executor(executor, called)
    return await result if inspect.isawaitable(result) else result


async def score_term(
    term: Term,
    prompt: Prompt,
    images: ByteArray,
    executor: Executor,
    config: RewardConfig,
    sources: asyncio.Future[Sources] | None = None,
) -> Scores:
    """Returns one term's results for images uint8 [n, H, W, 3]. A RewardError is not raised but stored in `failed`.

    `config` has the retries of one image, the seconds before the first, and how many images are scored at a time. Of
    videos uint8 [n, F, H, W, 3], a reward without `video` gets `config.frames` frames as images. `sources` is the third
    argument of a reward that has one.
    """
    images, frames = frames_to_score(images, config.frames, video=term.video)
    start, name, shown = time.time(), term.name, _SHOWN.repr(prompt.text)
    where, scores, retries = f"reward {name!r} on prompt {shown}", Scores((), {}), 0

    async def called(part: ByteArray) -> Any:
        """Calls the reward and awaits its result. Raises RewardError, whose cause is the reward's own exception."""
        try:
            edited = None if sources is None else await sources
            return await call(term.reward, part, prompt, executor, sources=edited)
        except (Exception, SystemExit) as error:
            if isinstance(refusal := leaves(error)[0], PromptRefused):
                raise PromptRefused(f"reward {name!r}: {refusal}") from error
            raise RewardError(f"reward {name!r} failed on prompt {shown}: {in_one_line(error)}") from error

    async def scored(image: ByteArray, places: asyncio.Semaphore) -> Result:
        """Returns one image's result after at most `config.retries` retries. Raises the last try's RewardError."""
        nonlocal retries
        attempt = 0
        while True:
            try:
                async with places:
                    return image_result(where, await called(image))
            except RewardError as error:
                if attempt == config.retries or isinstance(error, PromptRefused):
                    raise
            retries += 1
            await asyncio.sleep(config.backoff * 2**attempt)
            attempt += 1

    try:
        if term.pointwise:
            places = asyncio.Semaphore(config.concurrency)
            result = joined(where, await _all(scored(image, places) for image in images))
        else:
            result = group_result(where, await called(images), len(images))
        result = results_of_videos(result, frames, config.frame_score)
        distances = await _distances(where, term, images[::frames], executor)
        extras = {name: result.extras} if result.extras else {}
        scores = replace(scores, by_term={name: result.scores}, extras=extras, distances=distances)
    except RewardError as error:
        text = "".join(traceback.format_exception(error))
        refused = isinstance(error, PromptRefused)
        failure = Failure(str(error), final=term.pointwise or refused, traceback=text, refused=refused)
        scores = replace(scores, failed={name: failure})
    requests = term.reward.counted() if hasattr(term.reward, "counted") else Requests()
    return replace(
        scores,
        spans=(Span(f"score/{name}", start, time.time()),),
        retries={name: retries} if retries else {},
        requests={name: requests} if requests.sent else {},
    )


async def _all(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Awaits the calls concurrently. The first failure cancels the others and is raised once all have ended."""
    tasks = [asyncio.ensure_future(each) for each in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _distances(where: str, term: Term, images: ByteArray, executor: Executor) -> dict[str, float]:
    """Returns a held-out term's mean cosine distance of the images; empty without `features`. Raises RewardError."""
    if not term.held_out or len(images) < 2 or not hasattr(term.reward, "features"):
        return {}
    loop = asyncio.get_running_loop()
    try:
        return {term.name: await loop.run_in_executor(executor, cosine_distance, term.reward, images)}
    except (Exception, SystemExit) as error:
        raise RewardError(f"{where} has no features of the images: {in_one_line(error)}") from error


def cosine_distance(reward: Any, images: ByteArray) -> float:
    """Returns the mean of 1 - cosine over all pairs of images, by the vectors `reward.features(images)` [n, d].

    A zero vector has cosine 0 to every other. Raises ValueError if the features are not n vectors of finite numbers.
    """
    features = np.asarray(reward.features(images), dtype=np.float64)
    if features.ndim != 2 or len(features) != len(images):
        raise ValueError(f"expected {len(images)} vectors, got an array of shape {list(features.shape)}")
    if not np.isfinite(features).all():
        raise ValueError("expected vectors of finite numbers, got NaN or infinity")
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    unit = features / np.where(lengths > 0.0, lengths, 1.0)
    return float(np.mean(1.0 - (unit @ unit.T)[np.triu_indices(len(images), k=1)]))
