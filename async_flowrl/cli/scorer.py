"""Scoring of the requests of a reward server: one at a time, in order of arrival."""

import asyncio
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from async_flowrl.config.messages import in_one_line
from async_flowrl.rewards import http_contract as contract
from async_flowrl.rewards.base import PromptRefused, RewardError
from async_flowrl.rewards.call import Result, group_result
from async_flowrl.rewards.http_contract import ContractError, Limits, ScoreReply, ScoreRequest
from async_flowrl.types import ByteArray, Prompt
from separation.supervise import leaves

logger = logging.getLogger(__name__)

# A reward: images uint8 [n, H, W, 3] of one prompt → one result per image.  It is called for one group at a time:
# neighbouring images of a request with the same size and prompt. It raises PromptRefused for a prompt that it does not
# score; any other exception is a failure of the reward.
Score = Callable[[ByteArray, Prompt], Sequence[Any] | Awaitable[Sequence[Any]]]

NOTHING = ScoreRequest((), ())  # Empty request that replaces one whose memory was given back.
HUNG_UP = 499  # Status of a request whose client has hung up, as nginx logs it; nobody receives it.


class Refused(Exception):
    """Raised to answer a request with an error: HTTP status, one sentence, and optionally seconds for Retry-After."""

    def __init__(self, status: int, sentence: str, *, retry_after: int | None = None) -> None:
        super().__init__(sentence)
        self.status, self.retry_after = status, retry_after


@dataclass(frozen=True)
class Settings:
    """Settings of the application: limits of bytes and of waiting requests, and the token, None for none."""

    token: str | None = None
    limits: Limits = field(default_factory=Limits)
    waiting: int = 16
    all_bytes: int = 1024 * 2**20


class Full(Exception):
    """Raised if a request needs more bytes than are free now."""


@dataclass
class Room:
    """A budget of `size` bytes for the bodies of all requests, each from its first byte until its reply."""

    size: int
    reserved: int = 0


@dataclass
class Share:
    room: Room
    reserved: int = 0

    def grow(self, size: int) -> None:
        """Reserves memory up to `size` bytes in total for this request; a smaller size changes nothing. Raises Full."""
        more = max(0, size - self.reserved)
        if self.room.reserved + more > self.room.size:
            raise Full
        self.room.reserved += more
        self.reserved += more

    def close(self) -> None:
        self.room.reserved -= self.reserved
        self.reserved = 0


@dataclass(eq=False)
class PendingRequest:
    request: ScoreRequest
    gone: Callable[[], Awaitable[bool]]  # Returns True if the client has hung up.
    share: Share  # The bytes of the server's memory (`Scorer.room`) that the request has reserved.
    cancelled: bool = False  # True if nobody waits for the reply any more.
    scored: bool = False  # True from its turn on.

    def release(self) -> None:
        self.request = NOTHING
        self.share.close()


class Scorer:
    """Scores requests one at a time, in order of arrival, so a reward need not be thread-safe."""

    # A request whose client hangs up, or whose handler is cancelled, is not scored if it is still waiting. If it is
    # being scored already, it ends after the group that is being scored, and the next one waits for that: a call in a
    # thread cannot be ended.

    def __init__(self, score: Score, settings: Settings) -> None:
        self._score, self._settings = score, settings
        self.room = Room(settings.all_bytes)
        self._turn = asyncio.Lock()
        self._pending: set[PendingRequest] = set()
        self._tasks: set[asyncio.Task[ScoreReply]] = set()

    async def reply(self, pending: PendingRequest) -> ScoreReply:
        """Scores a request, and releases it however that ends.

        Raises ContractError for images that are damaged or too large, and Refused: 429 if too many requests wait, 422
        for a prompt that the reward refuses, 499 if the client hung up before the last group, 500 if the reward fails.
        """
        try:
            if self._full:
                await self.forget_gone()
            if self._full:
                waiting = f"a request is being scored and {self._settings.waiting} are waiting already"
                raise Refused(429, f"{waiting}; ask again later", retry_after=1)
        except BaseException:
            pending.release()
            raise
        self._pending.add(pending)
        task = asyncio.create_task(self._in_turn(pending))
        self._tasks.add(task)
        task.add_done_callback(lambda ended: self._ended(pending, ended))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._forget(pending)
            raise

    async def forget_gone(self) -> None:
        """Frees the places and the memory of waiting requests whose clients have hung up; others can have them."""
        for pending in list(self._pending):
            if await pending.gone():
                self._forget(pending)

    @property
    def _full(self) -> bool:
        return len(self._pending) > self._settings.waiting

    def _forget(self, pending: PendingRequest) -> None:
        pending.cancelled = True
        if not pending.scored:
            self._pending.discard(pending)
            pending.release()

    async def _in_turn(self, pending: PendingRequest) -> ScoreReply:
        async with self._turn:
            await _check_there(pending, "before its turn")
            pending.scored = True
            return await self._scored(pending)

    def _ended(self, pending: PendingRequest, task: "asyncio.Task[ScoreReply]") -> None:
        """Ends a request, whose task may have been cancelled before it began."""
        self._tasks.discard(task)
        self._pending.discard(pending)
        pending.release()
        if not task.cancelled():
            task.exception()  # nobody else looks at it if the handler was cancelled

    async def _scored(self, pending: PendingRequest) -> ScoreReply:
        request, results = pending.request, list[Result]()
        images = await asyncio.to_thread(contract.decode_images, request.images, self._settings.limits)
        for members, prompt in _groups(images, request.prompts):
            await _check_there(pending, f"after {sum(len(result.scores) for result in results)} of its images")
            results.append(await self._group(np.stack(members), prompt))
        scores = tuple(score for result in results for score in result.scores)
        extras = tuple(extra for result in results for extra in _per_image(result))
        return ScoreReply(scores, extras if any(extras) else ())

    async def _group(self, images: ByteArray, prompt: Prompt) -> Result:
        try:
            return group_result("the reward", await call(self._score, images, prompt), len(images))
        except (Exception, SystemExit) as error:
            first = leaves(error)[0]
            if isinstance(first, PromptRefused):
                raise Refused(422, str(first)) from error
            logger.exception("a group could not be scored")
            sentence = str(first) if isinstance(first, RewardError) else f"the reward failed: {in_one_line(first)}"
            raise Refused(500, sentence) from error


async def call(score: Score, images: ByteArray, prompt: Prompt) -> Any:
    """Calls a reward in a thread, awaits its result if it is asynchronous, and returns it; raises what it raises."""

    def called() -> Any:
        try:
            return score(images, prompt)
        except StopIteration as error:  # a future cannot hold it, so the caller would wait for ever
            raise RuntimeError("StopIteration left the reward") from error

    returned = await asyncio.to_thread(called)
    return await returned if inspect.isawaitable(returned) else returned


async def _check_there(pending: PendingRequest, when: str) -> None:
    # Others may find out, while it is looked at here, that the client has hung up.
    if pending.cancelled or await pending.gone() or pending.cancelled:
        raise Refused(HUNG_UP, f"the client hung up {when}")


def _groups(images: Sequence[ByteArray], prompts: Sequence[Prompt]) -> list[tuple[list[ByteArray], Prompt]]:
    # Neighbouring images of equal size and prompt, for one call each. ContractError for metadata nested too deeply.
    try:
        pairs = [list(group) for _, group in groupby(zip(images, prompts, strict=True), key=_group_key)]
    except RecursionError as error:
        raise ContractError("the metadata of a prompt is nested too deeply") from error
    return [([image for image, _ in group], group[0][1]) for group in pairs]


def _group_key(pair: tuple[ByteArray, Prompt]) -> tuple[Any, ...]:
    image, prompt = pair
    return image.shape, prompt.text, prompt.target, prompt.negative, json.dumps(prompt.metadata, sort_keys=True)


def _per_image(result: Result) -> list[dict[str, float | str]]:
    return [{name: values[i] for name, values in result.extras.items()} for i in range(len(result.scores))]
