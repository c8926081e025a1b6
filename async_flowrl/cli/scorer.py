"""Scoring of the requests of a reward server: one at a time, in order of arrival."""

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException

from async_flowrl.config.error_text import in_one_line
from async_flowrl.rewards import http_contract as contract
from async_flowrl.rewards.base import PromptRefused, RewardError
from async_flowrl.rewards.call import Result, Sources, call, group_result
from async_flowrl.rewards.http_contract import ContractError, Limits, ScoreRequest
from async_flowrl.types import ByteArray, ConditionImage, Prompt
from separation.supervise import leaves

logger = logging.getLogger(__name__)

# A reward: images uint8 [n, H, W, 3] of one prompt, or with an attribute `video` that is True also videos uint8
# [n, F, H, W, 3] → one result per image or video. With an attribute `images` that is False it gets videos alone; with
# an attribute `sources` that is True it gets edits alone, and as third argument the images that the prompt edits. It is
# called for one group at a time: neighbouring images of a request with the same size and prompt. It raises
# PromptRefused for a prompt that it does not score; any other exception is a failure of the reward.
Score = Callable[..., Sequence[Any] | Awaitable[Sequence[Any]]]

NOTHING = ScoreRequest((), ())  # Empty request that replaces one whose memory was given back.
AGAIN = {"Retry-After": "1"}
HUNG_UP = 499  # Status of a request whose client has hung up, as nginx logs it; nobody receives it.


@dataclass(eq=False)
class PendingRequest:
    gone: Callable[[], Awaitable[bool]]  # Returns True if the client has hung up.
    request: ScoreRequest = NOTHING
    reserved: int = 0  # Bytes of the server's memory that the request has reserved, from its first one to its reply.
    cancelled: bool = False  # True if nobody waits for the reply any more.
    scored: bool = False  # True from its turn on.


class Scorer:
    """Scores requests one at a time, in order of arrival, so a reward need not be thread-safe."""

    # A request whose client hangs up is not scored if it is still waiting. If it is being scored already, it ends after
    # the group that is being scored: a call in a thread cannot be ended.

    def __init__(self, score: Score, limits: Limits) -> None:
        self._score, self.limits = score, limits
        self.reserved = 0  # Bytes that all requests have reserved.
        self._turn = asyncio.Lock()
        self._pending: set[PendingRequest] = set()

    def reserve(self, pending: PendingRequest, size: int) -> None:
        """Reserves `size` bytes in total for a request; a smaller size changes nothing. HTTPException: 429."""
        more = max(0, size - pending.reserved)
        if self.reserved + more > self.limits.all_bytes:
            full = f"all requests together have {self.limits.all_bytes} bytes already"
            raise HTTPException(429, f"{full}; ask again later", AGAIN)
        self.reserved += more
        pending.reserved += more

    def release(self, pending: PendingRequest) -> None:
        self.reserved -= pending.reserved
        pending.request, pending.reserved = NOTHING, 0

    async def reply(self, pending: PendingRequest) -> list[Result]:
        """Scores a request and returns the results of its groups; releases it however that ends.

        Raises ContractError for images that are damaged or too large, and HTTPException: 429 if too many requests wait,
        422 for a prompt that is refused, 499 if the client hung up before the last group, 500 if the reward fails.
        """
        try:
            if self._full:
                await self.forget_gone()
            if self._full:
                waiting = f"a request is being scored and {self.limits.waiting} are waiting already"
                raise HTTPException(429, f"{waiting}; ask again later", AGAIN)
            self._pending.add(pending)
            async with self._turn:
                await _check_there(pending, "before its turn")
                pending.scored = True
                return await self._scored(pending)
        finally:
            self._pending.discard(pending)
            self.release(pending)

    async def forget_gone(self) -> None:
        """Frees the places and the memory of waiting requests whose clients have hung up; others can have them."""
        for pending in list(self._pending):
            if await pending.gone():
                pending.cancelled = True
                if not pending.scored:
                    self._pending.discard(pending)
                    self.release(pending)

    @property
    def _full(self) -> bool:
        return len(self._pending) > self.limits.waiting

    async def _scored(self, pending: PendingRequest) -> list[Result]:
        request, results = pending.request, list[Result]()
        edits = bool(getattr(self._score, "sources", False))
        if edits is not bool(request.sources):
            has = "edits, and the request has no sources: set sources=true" if edits else "no edits: set sources=false"
            raise ContractError(f"this server scores {has}")
        images = await asyncio.to_thread(contract.decode_images, request.images, self.limits)
        made = len(images) - sum(request.sources)
        prompts, sources = _with_sources(request, images[made:]) if edits else (request.prompts, None)
        images = images[:made]
        if request.frames is None:
            if not getattr(self._score, "images", True):
                raise ContractError("this server scores videos, and the request has images: set video=true")
        else:
            if not getattr(self._score, "video", False):
                raise ContractError("this server scores images, and the request has videos")
            images = _videos(images, request.frames)
        for members, prompt in _groups(images, prompts):
            await _check_there(pending, f"after {sum(len(result.scores) for result in results)} of its images")
            edited = None if sources is None else [sources[image.sha256] for image in prompt.images]
            results.append(await self._group(np.stack(members), prompt, edited))
        return results

    async def _group(self, images: ByteArray, prompt: Prompt, sources: Sources | None) -> Result:
        try:
            return group_result("the reward", await call(self._score, images, prompt, sources=sources), len(images))
        except (Exception, SystemExit) as error:
            first = leaves(error)[0]
            if isinstance(first, PromptRefused):
                raise HTTPException(422, str(first)) from error
            logger.exception("a group could not be scored")
            sentence = str(first) if isinstance(first, RewardError) else f"the reward failed: {in_one_line(first)}"
            raise HTTPException(500, sentence) from error


def _videos(images: Sequence[ByteArray], frames: int) -> list[ByteArray]:
    """Returns videos [frames, H, W, 3] of images in order. Raises ContractError if a video's frames differ in size."""
    videos = [images[start : start + frames] for start in range(0, len(images), frames)]
    for index, video in enumerate(videos):
        if len({frame.shape for frame in video}) > 1:
            raise ContractError(f"video {index} has frames of several sizes")
    return [np.stack(video) for video in videos]


def _with_sources(request: ScoreRequest, images: Sequence[ByteArray]) -> tuple[list[Prompt], dict[str, ByteArray]]:
    """Returns the prompts with the images that they edit, and the pixels of those by the SHA-256 of their files."""
    files = request.images[len(request.images) - len(images) :]
    edited = [
        ConditionImage(hashlib.sha256(file).hexdigest(), (image.shape[0], image.shape[1]), "")
        for file, image in zip(files, images, strict=True)
    ]
    following = iter(edited)
    of_entry = [tuple(islice(following, count)) for count in request.sources]
    of_prompt = of_entry if len(of_entry) == len(request.prompts) else of_entry * len(request.prompts)
    prompts = [replace(prompt, images=each) for prompt, each in zip(request.prompts, of_prompt, strict=True)]
    return prompts, {each.sha256: image for each, image in zip(edited, images, strict=True)}


async def _check_there(pending: PendingRequest, when: str) -> None:
    # Others may find out, while it is looked at here, that the client has hung up.
    if pending.cancelled or await pending.gone() or pending.cancelled:
        raise HTTPException(HUNG_UP, f"the client hung up {when}")


def _groups(images: Sequence[ByteArray], prompts: Sequence[Prompt]) -> list[tuple[list[ByteArray], Prompt]]:
    # Neighbouring images of equal size and prompt, for one call each. ContractError for metadata nested too deeply.
    try:
        pairs = [list(group) for _, group in groupby(zip(images, prompts, strict=True), key=_group_key)]
    except RecursionError as error:
        raise ContractError("the metadata of a prompt is nested too deeply") from error
    return [([image for image, _ in group], group[0][1]) for group in pairs]


def _group_key(pair: tuple[ByteArray, Prompt]) -> tuple[Any, ...]:
    image, prompt = pair
    said = prompt.text, prompt.target, prompt.negative, prompt.images
    return image.shape, *said, json.dumps(prompt.metadata, sort_keys=True)
