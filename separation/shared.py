"""Pools that share their workers: one process hosts one object with several parts, and each part is a pool's worker.

Whoever uses such a pool need not know of the others. A worker has a name in each of the pools (`rollout-0` and
`trainer-0`); the death of its process is the death of all of them, and whoever asks first has it replaced for all.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from separation.group import Growth, Ref, Worker, WorkerDied, WorkerFailed, WorkerGroup, seated
from separation.worker import pick_lane


@dataclass(frozen=True)
class Part:
    """One part of a pool's workers, which is a pool of its own: what it is called, and on which lanes its calls run."""

    pool: str
    """Name of the pool, and of the attribute of the hosted object that its methods are looked up in."""
    lanes: Mapping[str, str]
    """Its lanes, `main` among them → lanes of the worker."""


class PartWorker:
    """One part of a worker. Its own name is in the errors of its calls."""

    def __init__(self, whole: Worker, part: Part) -> None:
        self.whole, self._part = whole, part
        self.name = f"{part.pool}{whole.name.removeprefix(whole.pool)}"
        self.pool, self.index, self.pid, self.node = part.pool, whole.index, whole.pid, whole.node

    async def call(self, method: str, *args: Any, lane: str = "main") -> Any:
        with self._by_its_name():
            return await self.whole.call(self._path(method), *args, lane=self._lane(lane))

    async def call_split(
        self, method: str, *args: Any, returns: int, lane: str = "main"
    ) -> tuple[Any, tuple[Ref, ...]]:
        with self._by_its_name():
            return await self.whole.call_split(self._path(method), *args, returns=returns, lane=self._lane(lane))

    async def watch(self) -> NoReturn:
        with self._by_its_name():
            await self.whole.watch()

    def kill(self) -> None:
        """Kills the process, and so all of its parts."""
        self.whole.kill()

    def _path(self, method: str) -> str:
        return method if ":" in method else f"{self._part.pool}.{method}"

    def _lane(self, lane: str) -> str:
        return pick_lane(self._part.lanes, lane, self.name)

    @contextmanager
    def _by_its_name(self) -> Iterator[None]:
        try:
            yield
        except WorkerDied as error:
            raise WorkerDied(self.name, error.reason) from error
        except WorkerFailed as error:
            method = error.method.removeprefix(f"{self._part.pool}.")
            raise WorkerFailed(self.name, method, error.kind, error.message, error.remote_traceback) from error


class Successors:
    """The workers of a pool that is shared, each replaced once however many ask."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self._built = {worker.index: worker for worker in group.workers}
        self._replacing: dict[int, asyncio.Task[Worker]] = {}
        self._watches = {worker.name: self._watch(worker) for worker in group.workers}

    async def of(self, before: Worker) -> Worker:
        """The worker in the place of `before`, which is killed if it is still there. Raises as `replace` of the pool.

        Whoever waits may be cancelled: the replacement goes on for the others.
        """
        index = before.index
        if index not in self._replacing:
            present = self._built[index]
            if present is not before and not self._watches[present.name].done():
                return present
            task = asyncio.create_task(self._replace(index), name=f"the successor of {present.name}")
            task.add_done_callback(lambda ended: _forgotten(self._replacing, index, ended))
            self._replacing[index] = task
        return await asyncio.shield(self._replacing[index])

    def present(self, index: int) -> Worker:
        """The worker that was built last in this place."""
        return self._built[index]

    async def settle(self) -> None:
        """Ends what is under way: nobody is replaced any more."""
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
        """Ends when the worker does."""
        watch = asyncio.create_task(worker.watch(), name=f"watch {worker.name}")
        watch.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return watch


def _forgotten(tasks: dict[int, "asyncio.Task[Worker]"], index: int, ended: "asyncio.Task[Worker]") -> None:
    del tasks[index]
    if not ended.cancelled():
        ended.exception()  # whoever waited has it


class PartGroup:
    """The pool of one part of a pool's workers."""

    def __init__(self, successors: Successors, part: Part) -> None:
        whole = successors.group
        lanes = tuple(lane for lane in part.lanes if lane != "main")
        self.spec = replace(whole.spec, name=part.pool, lanes=lanes)
        self.growth: Growth | None = None
        self._successors, self._part = successors, part
        self._parts = {worker.index: PartWorker(worker, part) for worker in whole.workers}
        self.workers: list[Worker] = list(self._parts.values())

    async def replace(self, index: int) -> Worker:
        """The successor of this pool's worker: the one that another part has asked for already, if that lives."""
        return self._seat(await self._successors.of(self._parts[index].whole))

    def follow(self, index: int) -> Worker:
        """The worker that sits there now, for a pool that did not ask for it. Nothing is replaced."""
        present = self._successors.present(index)
        return seated(self, index) if present is self._parts[index].whole else self._seat(present)

    async def fetch(self, ref: Ref) -> Any:
        return await self._successors.group.fetch(ref)

    async def close(self) -> None:
        """Kills the workers with all of their parts."""
        await self._successors.group.close()

    def _seat(self, whole: Worker) -> Worker:
        fresh = PartWorker(whole, self._part)
        self.workers[[worker.index for worker in self.workers].index(whole.index)] = fresh
        self._parts[whole.index] = fresh
        return fresh


@asynccontextmanager
async def in_parts(group: WorkerGroup, parts: Sequence[Part]) -> AsyncIterator[dict[str, PartGroup]]:
    """The pools, by name, that share the workers of `group`."""
    successors = Successors(group)
    try:
        yield {part.pool: PartGroup(successors, part) for part in parts}
    finally:
        await successors.settle()
