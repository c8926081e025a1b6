"""Virtual time: an asyncio event loop with a virtual clock, and worker pools without processes that run on it.

A program on it is fast and gives the same result every time. When no callback can run, the clock jumps to the next
timer. There is no selector, no thread and no real sleep: `asyncio.to_thread` and `run_in_executor` run their function
inline. So the order of events depends on the program only.
"""

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable, Coroutine, Sequence
from operator import attrgetter
from typing import Any, NoReturn, TypeVar

from separation.group import Growth, PoolSpec, Ref, Worker
from separation.worker_process import resolve

T = TypeVar("T")


class Deadlock(RuntimeError):
    """No callback can run, no timer is set, and the main task is not done. The message lists every waiting task."""


class HorizonReached(Deadlock):
    """The virtual clock passed the horizon: a task sets timers for ever while the main task waits."""


class Livelock(RuntimeError):
    """Callbacks keep running and the clock stands still, as in `while True: await asyncio.sleep(0)`."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Event loop whose `time()` starts at 0 and advances only when every task waits.

    `horizon`: virtual seconds after which HorizonReached is raised; `rounds_per_instant`: rounds of callbacks without
    progress of the clock after which Livelock is raised.
    """

    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, *, horizon: float = 1e6, rounds_per_instant: int = 1_000_000) -> None:
        super().__init__()
        self.horizon = horizon
        self.rounds_per_instant = rounds_per_instant
        self._now = 0.0
        self._rounds = 0
        self._clock_resolution = 1e-6
        self._selector = self
        self._owner = threading.get_ident()

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """Moves the clock instead of waiting for input; `BaseEventLoop._run_once` calls it.

        `timeout` is in seconds: None means that no timer is set, 0 that callbacks are ready to run.
        """
        if timeout is None:
            raise Deadlock(f"nothing can ever run again at {self._now:.6g} s; waiting:\n{self.waiting()}")
        if timeout <= 0:
            self._rounds += 1
            if self._rounds > self.rounds_per_instant:
                rounds, self._rounds = self._rounds, 0
                raise Livelock(f"{rounds} rounds without the clock moving at {self._now:.6g} s:\n{self.waiting()}")
            return []
        self._rounds = 0
        self._now = max(self._now, self._scheduled[0].when())
        if self._now > self.horizon:
            raise HorizonReached(f"the clock passed its horizon of {self.horizon:.6g} s; waiting:\n{self.waiting()}")
        return []

    def waiting(self) -> str:
        """Returns one line per unfinished task: its name, and the function and line in which it waits."""
        lines = []
        for task in asyncio.all_tasks(self):
            frames = task.get_stack(limit=20)
            where = f"{frames[-1].f_code.co_qualname} line {frames[-1].f_lineno}" if frames else "not started"
            lines.append(f"  {task.get_name()}: {where}")
        return "\n".join(sorted(lines))

    def run_in_executor(  # type: ignore[override]
        self, executor: concurrent.futures.Executor | None, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        """Runs `func` inline; the returned future completes on the loop's next round, as if a thread had run it."""
        future: asyncio.Future[T] = self.create_future()
        try:
            result = contextvars.copy_context().run(func, *args)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self.call_soon(_settle, future, None, error)
        else:
            self.call_soon(_settle, future, result, None)
        return future

    def _process_events(self, event_list: list[Any]) -> None:
        """Does nothing: this loop polls no files."""

    def _write_to_self(self) -> None:
        """Refuses calls from other threads, which would run in real time; `call_soon_threadsafe` calls it."""
        if threading.get_ident() != self._owner:
            raise RuntimeError("a thread called into a virtual-time loop: its timing would not be reproducible")


def _settle(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def run_virtual(main: Coroutine[Any, Any, T], *, horizon: float = 1e6) -> T:
    """Runs `main` to its end in virtual time, cancels the tasks that it left unfinished, and returns its result.

    `horizon` is in virtual seconds. Raises Deadlock, HorizonReached or Livelock if `main` can never end, and otherwise
    whatever `main` raises.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(horizon=horizon)) as runner:
        return runner.run(main)


class VirtualWorker:
    """`separation.group.Worker` around a plain object: a call waits for its duration, then runs the object's method.

    As in a real worker, the calls of one lane (a named queue) run one at a time and in order. A virtual worker never
    dies.
    """

    pid, node = 0, "virtual"

    def __init__(self, pool: str, index: int, target: Any, *, incarnation: int = 0) -> None:
        self.pool, self.index, self.target = pool, index, target
        self.name = f"{pool}-{index}.{incarnation}" if incarnation else f"{pool}-{index}"
        self.lanes: dict[str, asyncio.Lock] = {}

    def duration(self, method: str, args: tuple[Any, ...]) -> float:
        """Returns the virtual seconds that a call takes."""
        return 0.0

    async def call(self, method: str, *args: Any, lane: str = "main") -> Any:
        async with self.lanes.setdefault(lane, asyncio.Lock()):
            return await self.serve(method, args)

    async def call_split(
        self, method: str, *args: Any, returns: int, lane: str = "main"
    ) -> tuple[Any, tuple[Ref, ...]]:
        first, *others = await self.call(method, *args, lane=lane)
        return first, tuple(others)

    async def serve(self, method: str, args: tuple[Any, ...]) -> Any:
        """Waits for the call's duration and runs it; `call` does this once the lane is free."""
        await asyncio.sleep(self.duration(method, args))
        return self.run(method, args)

    def run(self, method: str, args: Sequence[Any]) -> Any:
        """Calls `method` and returns its result.

        `method` is a method of the target, a dotted path to one (`receiver.receive`), or `pkg.module:function`.
        """
        function = resolve(method) if ":" in method else attrgetter(method)(self.target)
        return function(*args)

    async def watch(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError("an event that is never set was set")

    def kill(self) -> None:
        """Does nothing: there is no process."""


class VirtualPool:
    """`separation.group.WorkerGroup` of VirtualWorkers; values are passed directly, not as references."""

    def __init__(self, name: str, workers: Sequence[Worker]) -> None:
        self.spec, self.workers = PoolSpec(name, "", len(workers)), list(workers)
        self.growth: Growth | None = None

    async def replace(self, index: int) -> Worker:
        raise AssertionError(f"{self.workers[index].name} was never lost")

    async def fetch(self, ref: Ref) -> Any:
        return ref

    async def close(self) -> None:
        for worker in self.workers:
            worker.kill()
