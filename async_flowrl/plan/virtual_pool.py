"""Pools of workers in virtual time, for a controller that runs without worker processes."""

import asyncio
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NoReturn

from separation.group import Growth, PoolSpec, Ref, Worker
from separation.host import resolve


class VirtualWorker:
    """A `separation.group.Worker` over a plain object: a call waits for its duration, then runs the object's method.

    As in a real worker, calls on one lane run one at a time, in order. This one never dies.
    """

    pid, node = 0, "virtual"

    def __init__(self, pool: str, index: int, target: Any, *, incarnation: int = 0) -> None:
        self.pool, self.index, self.target = pool, index, target
        self.name = f"{pool}-{index}.{incarnation}" if incarnation else f"{pool}-{index}"
        self._lanes: dict[str, asyncio.Lock] = {}

    def duration(self, method: str, args: tuple[Any, ...]) -> float:
        """Virtual seconds that a call takes."""
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
        """One call, once its lane is free."""
        await asyncio.sleep(self.duration(method, args))
        return self.run(method, args)

    def run(self, method: str, args: Sequence[Any]) -> Any:
        """The result of the target's method (or of a part's: `receiver.receive`), or of `pkg.module:function`."""
        function = resolve(method) if ":" in method else attrgetter(method)(self.target)
        return function(*args)

    async def watch(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets that event")

    def kill(self) -> None:
        """Nothing: there is no process."""


class VirtualPool:
    """A `separation.group.WorkerGroup` of VirtualWorkers. Values are passed as they are, without refs."""

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
