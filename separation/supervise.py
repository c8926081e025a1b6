"""Helpers for asyncio: background tasks whose failures are always raised, and waits with a time limit.

All time comes from the running loop, so tests can use a loop with virtual time.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")
_BODY = "the body"  # Name of the block's body in notes.


class DeadlineExceeded(TimeoutError):
    """Raised if a body of `deadline` took longer than `seconds`; `what` names it in the message."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(f"{what} was not done within its deadline of {seconds:g} s")
        self.what, self.seconds = what, seconds

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.what, self.seconds)


@asynccontextmanager
async def limited(seconds: float, late: Callable[[], Exception]) -> AsyncIterator[None]:
    """Raises `late()` if the body takes longer; cancellations and TimeoutErrors of the body itself are not changed."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise late() from error


def deadline(
    seconds: float, what: str, *, report: Callable[[], str] | None = None
) -> AbstractAsyncContextManager[None]:
    """As `limited`, with a DeadlineExceeded; `report()` then returns a note for the error."""

    def late() -> DeadlineExceeded:
        error = DeadlineExceeded(what, seconds)
        if report is not None:
            error.add_note(report())
        return error

    return limited(seconds, late)


@asynccontextmanager
async def supervised(*coroutines: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """Runs coroutines as tasks beside the body and cancels them at its end: `async with supervised(a(), b()):`.

    A failing task cancels the body; a task that returns early changes nothing. The first failure, of the body or of a
    task, is raised by the block with its own traceback, and later failures become its notes. Tasks are cancelled in
    reverse order of their start, and each one is awaited before the next is cancelled.
    """
    body = asyncio.current_task()
    if body is None:
        raise RuntimeError("supervised() needs a running task")
    failures: list[tuple[str, BaseException]] = []
    ending = interrupted = False

    def ended(task: asyncio.Task[Any]) -> None:
        nonlocal interrupted
        if task.cancelled() or (failure := task.exception()) is None:
            return
        failures.append((task.get_name(), failure))
        if not ending and not interrupted:
            interrupted = True
            body.cancel()

    tasks = [asyncio.create_task(coroutine, name=getattr(coroutine, "__qualname__", None)) for coroutine in coroutines]
    for task in tasks:
        task.add_done_callback(ended)
    try:
        yield
    except BaseException as error:
        if not (interrupted and isinstance(error, asyncio.CancelledError)):
            failures.append((_BODY, error))
    ending = True
    if interrupted:
        body.uncancel()
    await _end(tasks, failures)
    if failures:
        first = _with_notes(failures)
        context = first.__context__
        try:
            raise first
        finally:
            first.__context__ = context


async def _end(tasks: Sequence[asyncio.Task[Any]], failures: list[tuple[str, BaseException]]) -> None:
    for task in reversed(tasks):
        task.cancel()
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                failures.append((_BODY, error))
    await asyncio.sleep(0)


def _with_notes(failures: Sequence[tuple[str, BaseException]]) -> BaseException:
    where, error = failures[0]
    first, *others = leaves(error)
    if where != _BODY:
        first.add_note(f"raised in the background task {where}")
    later = [(where, leaf) for leaf in others]
    later += [(name, leaf) for name, failure in failures[1:] for leaf in leaves(failure)]
    for name, other in later:
        if not isinstance(other, asyncio.CancelledError) and other is not first:
            first.add_note(f"then {name} failed too: {type(other).__name__}: {other}")
    return first


def leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for member in error.exceptions for leaf in leaves(member)]


async def together(*coroutines: Coroutine[Any, Any, T]) -> list[T]:
    """Returns all results in order. The first failure cancels the others and is raised when they have ended."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


class Signal:
    """A condition variable for coroutines; a notification is for all waiting coroutines or only for one worker's."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._own: dict[str, asyncio.Event] = {}

    def notify(self, who: str | None = None) -> None:
        """Wakes the coroutines that wait in `wait(who)`, at a cost that does not grow with the pool; None wakes all."""
        if who is not None:
            if event := self._own.pop(who, None):
                event.set()
            return
        self._event.set()
        self._event = asyncio.Event()
        waiting, self._own = self._own, {}
        for event in waiting.values():
            event.set()

    async def wait(self, who: str | None = None) -> None:
        """Waits for the next notification of all; with `who`, also for the next notification of `who`."""
        await (self._event if who is None else self._own.setdefault(who, asyncio.Event())).wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when `condition()` is True; it is checked at once and after every notification of all."""
        while not condition():
            await self._event.wait()
