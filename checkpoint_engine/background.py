"""The work of a delivery that goes on in the background: its first error ends the delivery; closing ends the work."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Background:
    """Tasks and futures of one delivery; it must be made and used inside one running loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._optional: set[asyncio.Future[Any]] = set()
        self._failure: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Starts a task; its error fails the delivery."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def add(self, optional: "asyncio.Future[Any]") -> None:
        """Adds a future whose error only those that wait for it must know; `close` cancels it."""
        if not optional.done():
            self._optional.add(optional)
            optional.add_done_callback(self._optional.discard)
        optional.add_done_callback(_seen)

    def fail(self, error: BaseException) -> None:
        """Fails the delivery with an error, unless it has failed already."""
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()

    def check(self) -> None:
        """Raises the error with which the delivery has failed, if it has."""
        if self._failure.done() and (error := self._failure.exception()) is not None:
            raise error

    async def failed(self) -> None:
        """Waits until the delivery fails, and raises the error."""
        await asyncio.shield(self._failure)

    async def until(self, done: "asyncio.Future[Any]") -> None:
        """Waits until a future is done. Raises the error with which the delivery fails before or by then."""
        await asyncio.wait([done, self._failure], return_when=asyncio.FIRST_COMPLETED)
        self.check()

    async def drain(self) -> None:
        """Waits until no task is left; raises the error with which the delivery fails."""
        while self._tasks and not self._failure.done():
            pending: list[asyncio.Future[Any]] = [*self._tasks, self._failure]
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        self.check()

    async def close(self) -> None:
        """Cancels all tasks and futures, and waits until they have ended."""
        under_way: list[asyncio.Future[Any]] = [*self._tasks, *self._optional]
        for each in under_way:
            each.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)


def _seen(ended: "asyncio.Future[Any]") -> None:
    """Takes the error of a future that perhaps nobody waits for, so that asyncio does not report it as forgotten."""
    if not ended.cancelled():
        ended.exception()
