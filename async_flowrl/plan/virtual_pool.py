"""Worker pools without processes, with which the controller runs in virtual time (see `virtual_time`)."""

import asyncio
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NoReturn

from separation.group import Growth, PoolSpec, Ref, Worker
from separation.worker_process import resolve


class VirtualWorker:
    """`separation.group.Worker` around a plain object: a call waits for its duration, then runs the object's method.

    As in a real worker, the calls of one lane (a named queue) run one at a time and in order. A virtual worker never
    dies.
    """

    pid, node = 0, "virtual"

    def __init__(self, pool: str, index: int, target: Any, *, incarnation: int = 0) -> None:
        self.pool, self.index, self.target = pool, index, target
        self.name = f"{pool}-{index}.{incarnation}" if incarnation else f"{pool}-{index}"
        self._lanes: dict[str, asyncio.Lock] = {}

    def duration(self, method: str, args: tuple[Any, ...]) -> float:
        """Returns the virtual seconds that a call takes."""
        return 0.0

    async def call(self, method: str, *args: Any, lane: str = "main") -> Any:
        async with self._lanes.setdefault(lane, asyncio.Lock()):
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
