"""Background tasks that cannot fail unnoticed, and waits that cannot last for ever.

All time comes from the running loop, so everything here works under a loop whose clock jumps.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class DeadlineExceeded(TimeoutError):
    """`what` was not done within `seconds`."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(f"{what} was not done within its deadline of {seconds:g} s")
        self.what, self.seconds = what, seconds

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.what, self.seconds)


@asynccontextmanager
async def deadline(seconds: float, what: str, *, report: Callable[[], str] | None = None) -> AsyncIterator[None]:
    """Raises DeadlineExceeded when the body takes longer; `report` is asked for a note at that moment.

    A cancellation from elsewhere and a TimeoutError of the body's own pass unchanged.
    """
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        late = DeadlineExceeded(what, seconds)
        if report is not None:
            late.add_note(report())
        raise late from error


def supervised(*coroutines: Coroutine[Any, Any, Any]) -> "Supervision":
    """`async with supervised(a(), b()):` runs a and b beside the body and ends them with it.

    The first failure, of the body or of a task, is what leaves the block: itself, with its own traceback; what failed
    after it is added as notes. A failing task cancels the body. A task may end early without ending anything else.
    Tasks are ended last started first, each one awaited before the next is told. An exception group counts as its first
    member, the rest as notes.
    """
    return Supervision(coroutines)


class Supervision:
    """The context manager of `supervised`."""

    def __init__(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> None:
        self._coroutines = coroutines
        self._tasks: list[asyncio.Task[Any]] = []
        self._failures: list[tuple[str, BaseException]] = []
        self._interrupted = False
        self._closing = False

    async def __aenter__(self) -> Self:
        body = asyncio.current_task()
        if body is None:
            raise RuntimeError("supervised() needs a running task")
        self._body = body
        for coroutine in self._coroutines:
            task = asyncio.create_task(coroutine, name=getattr(coroutine, "__qualname__", None))
            task.add_done_callback(self._ended)
            self._tasks.append(task)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._closing = True
        cancelled = isinstance(error, asyncio.CancelledError)
        if error is not None and not (cancelled and self._interrupted):
            self._failures.append(("the body", error))
        if self._interrupted:
            self._body.uncancel()
        await self._close()
        if not self._failures:
            return False
        first = self._with_notes()
        if first is error:
            return False
        context = first.__context__
        try:
            raise first
        finally:
            first.__context__ = context

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or (failure := task.exception()) is None:
            return
        self._failures.append((task.get_name(), failure))
        if not self._closing and not self._interrupted:
            self._interrupted = True
            self._body.cancel()

    async def _close(self) -> None:
        for task in reversed(self._tasks):
            task.cancel()
            while not task.done():
                try:
                    await asyncio.wait([task])
                except asyncio.CancelledError as error:
                    self._failures.append(("the body", error))
        await asyncio.sleep(0)

    def _with_notes(self) -> BaseException:
        where, first = self._failures[0]
        leaves = _leaves(first)
        if where != "the body":
            leaves[0].add_note(f"raised in the background task {where}")
        others = [(where, leaf) for leaf in leaves[1:]]
        others += [(name, leaf) for name, failure in self._failures[1:] for leaf in _leaves(failure)]
        for name, other in others:
            if not isinstance(other, asyncio.CancelledError) and other is not leaves[0]:
                leaves[0].add_note(f"then {name} failed too: {type(other).__name__}: {other}")
        return leaves[0]


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for member in error.exceptions for leaf in _leaves(member)]


async def together(*coroutines: Coroutine[Any, Any, T]) -> list[T]:
    """All results in order. The first failure cancels the others, waits for them, and is raised as itself."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def retry(
    attempt: Callable[[], Awaitable[T]],
    *,
    times: int,
    backoff: float,
    on: tuple[type[Exception], ...],
    failed: Callable[[int, Exception], None] | None = None,
) -> T:
    """Awaits `attempt()` up to `times` times, pausing backoff, 2·backoff, 4·backoff … seconds after errors in `on`.

    `failed(n, error)` hears of each failed attempt, n from 1. The last error is raised as it is, with a note.
    """
    if times < 1:
        raise ValueError(f"retry needs times >= 1, got {times}")
    for count in range(1, times + 1):
        try:
            return await attempt()
        except on as error:
            if failed is not None:
                failed(count, error)
            if count == times:
                error.add_note(f"attempt {count} of {times}")
                raise
        await asyncio.sleep(backoff * 2 ** (count - 1))
    raise AssertionError("unreachable: the last attempt returns or raises")
