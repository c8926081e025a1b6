"""Pools that share their processes: a process hosts one object, and each pool sees one attribute of it as its worker.

A process has a worker name in each pool, such as `rollout-0` and `trainer-0`. When it dies, its workers in all pools
are dead; the first request to replace one replaces the process, and the other pools get the same replacement.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, NoReturn, cast

from separation.group import Growth, Ref, Worker, WorkerDied, WorkerFailed, WorkerGroup
from separation.worker_process import pick_lane

# Pool → lane of its workers → lane of the process that runs its calls; `main` is among the lanes of each pool. The
# pool's name is that of the attribute of the hosted object that has the methods of its workers.
SubPools = Mapping[str, Mapping[str, str]]


class SubWorker:
    """Worker of one of the pools that share processes; errors of its calls name it as in that pool."""

    def __init__(self, process: Worker, pool: str, lanes: Mapping[str, str]) -> None:
        self.process, self._lanes = process, lanes
        self.name = f"{pool}{process.name.removeprefix(process.pool)}"
        self.pool, self.index, self.pid, self.node = pool, process.index, process.pid, process.node

    async def call(self, method: str, *args: Any, lane: str = "main") -> Any:
        with self._by_its_name():
            return await self.process.call(self._path(method), *args, lane=self._lane(lane))

    async def call_split(
        self, method: str, *args: Any, returns: int, lane: str = "main"
    ) -> tuple[Any, tuple[Ref, ...]]:
        with self._by_its_name():
            return await self.process.call_split(self._path(method), *args, returns=returns, lane=self._lane(lane))

    async def watch(self) -> NoReturn:
        with self._by_its_name():
            await self.process.watch()

    def kill(self) -> None:
        self.process.kill()

    def _path(self, method: str) -> str:
        return method if ":" in method else f"{self.pool}.{method}"

    def _lane(self, lane: str) -> str:
        return pick_lane(self._lanes, lane, self.name)

    @contextmanager
    def _by_its_name(self) -> Iterator[None]:
        try:
            yield
        except WorkerDied as error:
            raise WorkerDied(self.name, error.reason) from error
        except WorkerFailed as error:
            method = error.method.removeprefix(f"{self.pool}.")
            raise WorkerFailed(self.name, method, error.kind, error.message, error.remote_traceback) from error


class Replacements:
    """Processes of a shared pool and their replacements; a dead process is replaced once, however many pools ask."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self._built = {worker.index: worker for worker in group.workers}
        self._replacing: dict[int, asyncio.Task[Worker]] = {}
        self._watches = {worker.name: self._watch(worker) for worker in group.workers}

    async def of(self, before: Worker) -> Worker:
        """Returns the replacement of the process `before`, which is killed if it still lives."""
        # It is the process that was started last at this index if that one is another and lives; otherwise the pool
        # starts a new one. If a waiting caller is cancelled, the replacement goes on for the others.
        index = before.index
        if index not in self._replacing:
            present = self._built[index]
            if present is not before and not self._watches[present.name].done():
                return present
            task = asyncio.create_task(self._replace(index), name=f"the replacement of {present.name}")
            task.add_done_callback(lambda ended: _forgotten(self._replacing, index, ended))
            self._replacing[index] = task
        return await asyncio.shield(self._replacing[index])

    def present(self, index: int) -> Worker:
        return self._built[index]

    async def settle(self) -> None:
        tasks = [*self._replacing.values(), *self._watches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _replace(self, index: int) -> Worker:
        fresh = await self.group.replace(index)
        self._built[index], self._watches[fresh.name] = fresh, self._watch(fresh)
        return fresh

    @staticmethod
    def _watch(worker: Worker) -> "asyncio.Task[NoReturn]":
        watch = asyncio.create_task(worker.watch(), name=f"watch {worker.name}")
        watch.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return watch


def _forgotten(tasks: dict[int, "asyncio.Task[Worker]"], index: int, ended: "asyncio.Task[Worker]") -> None:
    del tasks[index]
    if not ended.cancelled():
        ended.exception()  # Marks it as retrieved, because the callers that wait get the error themselves.


class SubGroup:
    def __init__(self, replacements: Replacements, pool: str, lanes: Mapping[str, str]) -> None:
        processes = replacements.group
        self.spec = replace(processes.spec, name=pool, lanes=tuple(lane for lane in lanes if lane != "main"))
        self.growth: Growth | None = None
        self._replacements, self._lanes = replacements, lanes
        self.workers: list[Worker] = [SubWorker(process, pool, lanes) for process in processes.workers]

    async def replace(self, index: int) -> Worker:
        """Returns the worker's replacement; starts no process if another pool has had one started that lives."""
        return self._seat(await self._replacements.of(self._process(index)))

    def follow(self, index: int) -> Worker:
        """Returns the present worker at `index`, also if another pool had its process replaced; replaces nothing."""
        present = self._replacements.present(index)
        return self.workers[index] if present is self._process(index) else self._seat(present)

    def _process(self, index: int) -> Worker:
        return cast("SubWorker", self.workers[index]).process  # Such a pool has a fixed size.

    async def fetch(self, ref: Ref) -> Any:
        return await self._replacements.group.fetch(ref)

    async def close(self) -> None:
        await self._replacements.group.close()

    def _seat(self, process: Worker) -> Worker:
        self.workers[process.index] = SubWorker(process, self.spec.name, self._lanes)
        return self.workers[process.index]


@asynccontextmanager
async def sub_groups(group: WorkerGroup, sub_pools: SubPools) -> AsyncIterator[dict[str, SubGroup]]:
    """Context that splits `group` into pools that share its processes; yields pool name → worker group."""
    replacements = Replacements(group)
    try:
        yield {pool: SubGroup(replacements, pool, lanes) for pool, lanes in sub_pools.items()}
    finally:
        await replacements.settle()
