"""The calls under way of a worker, of either kind, and the death that ends them all at once."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from separation.group import WorkerDied

T = TypeVar("T")

log = logging.getLogger(__name__)


class CallTable:
    """The unanswered calls of one worker. After `declare_dead` each of them, and each later one, raises WorkerDied.

    Late answers of a dead worker are discarded: it may already have been replaced.
    """

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.reason: str | None = None
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[Any]] = set()

    def check(self) -> None:
        """Raises WorkerDied if the worker is dead."""
        if self.reason is not None:
            raise WorkerDied(self.worker, self.reason)

    def open(self) -> "asyncio.Future[Any]":
        """A future that a caller awaits. Raises WorkerDied."""
        self.check()
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    def declare_dead(self, reason: str) -> None:
        """Fails every open call. The first reason is kept."""
        if self.reason is not None:
            return
        self.reason = reason
        log.info("%s died: %s", self.worker, reason)
        for future in list(self._waiting):
            settle(future, error=WorkerDied(self.worker, reason))

    async def watch(self) -> NoReturn:
        """Waits for the death and raises it."""
        await self.open()
        raise AssertionError("unreachable: nobody answers this call")


def settle(future: "asyncio.Future[Any]", *, value: Any = None, error: BaseException | None = None) -> None:
    """Answers a call unless it was answered, cancelled or its worker declared dead before."""
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


def pick_lane(lanes: Mapping[str, T], lane: str, worker: str) -> T:
    """The lane of that name. Raises ValueError naming those there are."""
    if lane not in lanes:
        raise ValueError(f"{worker} has no lane {lane!r}; it has {', '.join(lanes)}")
    return lanes[lane]
