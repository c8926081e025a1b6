"""CallTable holds the unanswered calls of one worker (Ray actor or thread); the worker's death ends them all.

RayWorker (ray_pool.py) and LocalWorker (local.py) use it.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from separation.group import WorkerDied

T = TypeVar("T")

log = logging.getLogger(__name__)


class CallTable:
    """The unanswered calls of one worker. After `declare_dead`, each of them and each later call raises WorkerDied.

    Late answers of a dead worker are discarded, because it may already have been replaced.
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
        """Returns a future for the answer of a new call. Raises WorkerDied if the worker is dead."""
        self.check()
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    def declare_dead(self, reason: str) -> None:
        """Ends every open call with WorkerDied. Only the first call has an effect; its reason is kept."""
        if self.reason is not None:
            return
        self.reason = reason
        log.info("%s died: %s", self.worker, reason)
        for future in list(self._waiting):
            settle(future, error=WorkerDied(self.worker, reason))

    async def watch(self) -> NoReturn:
        """Waits until the worker dies and raises WorkerDied."""
        await self.open()
        raise AssertionError("unreachable: nobody answers this call")


def settle(future: "asyncio.Future[Any]", *, value: Any = None, error: BaseException | None = None) -> None:
    """Answers a call with a value or an error, unless the call was answered, cancelled or ended by a death before."""
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


def pick_lane(lanes: Mapping[str, T], lane: str, worker: str) -> T:
    """Returns the worker's lane named `lane`. Raises ValueError, which names the existing lanes."""
    if lane not in lanes:
        raise ValueError(f"{worker} has no lane {lane!r}; it has {', '.join(lanes)}")
    return lanes[lane]
