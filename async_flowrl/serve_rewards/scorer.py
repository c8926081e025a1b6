"""Scoring of the requests of a reward server: one at a time, in order of arrival.

`app.py` reads the requests and writes the replies.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from async_flowrl.rewards import http_contract as contract
from async_flowrl.rewards.base import RewardError
from async_flowrl.rewards.http_contract import ContractError, Limits, ScoreReply, ScoreRequest
from async_flowrl.rewards.results import Result, group_result
from async_flowrl.serve_rewards.bodies import Room
from async_flowrl.types import ByteArray, Prompt

logger = logging.getLogger(__name__)

Score = Callable[[ByteArray, Prompt], Sequence[Any] | Awaitable[Sequence[Any]]]
"""A reward: images uint8 [n, H, W, 3] of one prompt → one result per image. It is called for one group at a time."""

OWN = "async_flowrl"
"""Name of our own contract among the dialects."""
HUNG_UP = 499
"""Status of a request whose client has hung up, as nginx logs it; nobody receives it."""


class Refused(Exception):
    """Raised to answer a request with an error: HTTP status, one sentence, and optionally seconds for Retry-After."""

    def __init__(self, status: int, sentence: str, *, retry_after: int | None = None) -> None:
        super().__init__(sentence)
        self.status, self.retry_after = status, retry_after


def refused(error: ContractError) -> Refused:
    return Refused(413 if isinstance(error, contract.TooMuch) else 400, str(error))


@dataclass(frozen=True)
class Settings:
    """Settings of the application; server.py makes them from the command line.

    `dialect` is served beside our own contract. `waiting` is the number of requests that may wait beside the one being
    scored. `all_bytes` limits the bodies of all requests that arrive, wait or are scored, together. `token=None` asks
    for no token.
    """

    token: str | None = None
    limits: Limits = field(default_factory=Limits)
    dialect: str = OWN
    waiting: int = 16
    all_bytes: int = 1024 * 2**20


@dataclass(eq=False)
class Asked:
    """A request that waits for its turn or is being scored, and `held`, which is closed at its end."""

    request: ScoreRequest
    gone: Callable[[], Awaitable[bool]]
    """Returns True if the client has hung up."""
    held: ExitStack
    cancelled: bool = False
    scored: bool = False
    """True from its turn on."""


class Scorer:
    """Scores requests one at a time, in order of arrival, so a reward need not be thread-safe.

    A request whose client hangs up, or whose handler is cancelled, is not scored if it is still waiting. If it is being
    scored already, the next one waits for its end: a call in a thread cannot be ended.
    """

    def __init__(self, score: Score, settings: Settings) -> None:
        self._score, self._settings = score, settings
        self.room = Room(settings.all_bytes)
        self._turn = asyncio.Lock()
        self._asked: set[Asked] = set()
        self._tasks: set[asyncio.Task[ScoreReply]] = set()

    async def reply(self, asked: Asked) -> ScoreReply:
        """Scores a request.

        Raises Refused: 429 if too many requests wait, 400, 413 or 422 for bad input, 499 if the client hung up before
        its turn, 500 if the reward fails.
        """
        if (waiting := len(self._asked)) > self._settings.waiting:
            asked.held.close()
            raise Refused(429, f"{waiting} requests are waiting already; ask again later", retry_after=1)
        self._asked.add(asked)
        task = asyncio.create_task(self._in_turn(asked))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            asked.cancelled = True
            raise

    async def forget_gone(self) -> None:
        """Frees the places and the memory of waiting requests whose clients have hung up; others can have them."""
        for asked in list(self._asked):
            if (asked.cancelled or await asked.gone()) and not asked.scored:
                asked.cancelled = True
                asked.held.close()
                self._asked.discard(asked)

    async def _in_turn(self, asked: Asked) -> ScoreReply:
        try:
            with asked.held:
                async with self._turn:
                    if asked.cancelled or await asked.gone():
                        raise Refused(HUNG_UP, "the client hung up before its turn")
                    asked.scored = True
                    return await self._scored(asked.request)
        finally:
            self._asked.discard(asked)

    def _ended(self, task: "asyncio.Task[ScoreReply]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # nobody else looks at it if the handler was cancelled

    async def _scored(self, request: ScoreRequest) -> ScoreReply:
        try:
            images = await asyncio.to_thread(contract.decode_images, request.images, self._settings.limits)
        except ContractError as error:
            raise refused(error) from error
        pairs = list(zip(images, request.prompts, strict=True))
        results = [
            await self._group(np.stack([image for image, _ in group]), group[0][1])
            for group in (list(members) for _, members in groupby(pairs, key=_group_key))
        ]
        scores = tuple(score for result in results for score in result.scores)
        extras = tuple(extra for result in results for extra in _per_image(result))
        return ScoreReply(scores, extras if any(extras) else ())

    async def _group(self, images: ByteArray, prompt: Prompt) -> Result:
        try:
            returned = await asyncio.to_thread(self._score, images, prompt)
            if inspect.isawaitable(returned):
                returned = await returned
            return group_result("the reward", returned, len(images))
        except RewardError as error:
            logger.exception("a group could not be scored")
            raise Refused(500, str(error)) from error
        except ValueError as error:
            raise Refused(422, str(error)) from error
        except Exception as error:
            logger.exception("a group could not be scored")
            raise Refused(500, f"the reward failed: {type(error).__name__}: {error}") from error


def _group_key(pair: tuple[ByteArray, Prompt]) -> tuple[Any, ...]:
    """Returns the key of a group: neighbouring images of equal size and prompt are scored in one call."""
    image, prompt = pair
    return image.shape, prompt.text, prompt.target, prompt.negative, repr(prompt.metadata)


def _per_image(result: Result) -> list[dict[str, float | str]]:
    return [{name: values[i] for name, values in result.extras.items()} for i in range(len(result.scores))]
