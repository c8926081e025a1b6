"""ProcessPool is a pool of real processes without Ray, for tests that kill trainer ranks.

The processes are started by `tests/support/forked.py` and called through pipes.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from separation.group import PoolSpec, WorkerDied
from separation.local import Parcel
from separation.worker_process import RemoteError, resolve
from tests.support.forked import CONTEXT

LANES = ("main", "control", "publish", "save", "sync")


def serve(lanes: dict[str, Connection], factory: str, arguments: dict[str, Any]) -> None:
    """Runs in the process: builds one object and answers the calls of each lane in a thread of its own."""
    import torch

    torch.set_num_threads(1)
    target = resolve(factory)(**arguments)
    threads = [threading.Thread(target=answer, args=(lane, target)) for lane in lanes.values()]
    for thread in threads:
        thread.start()
    for thread in threads:  # once the main thread has ended, Python runs no new calls in executors
        thread.join()


def answer(lane: Connection, target: Any) -> None:
    while (asked := lane.recv()) is not None:
        method, args = asked
        try:
            found = resolve(method) if ":" in method else target
            for name in [] if ":" in method else method.split("."):
                found = getattr(found, name)
            lane.send((True, found(*args)))
        except Exception as error:  # any error is sent to the caller
            remote = RemoteError.of(error)
            lane.send((False, (remote.kind, remote.message, remote.remote_traceback)))


class ProcessWorker:
    """One process; implements `separation.group.Worker`.

    Refs are plain values here, and those of threads (`separation.local.Parcel`) are opened before they are sent.
    """

    node = "127.0.0.1"

    def __init__(self, pool: str, index: int, incarnation: int, factory: str, arguments: dict[str, Any]) -> None:
        self.pool, self.index = pool, index
        self.name = f"{pool}-{index}" + (f".{incarnation}" if incarnation else "")
        pipes = {lane: CONTEXT.Pipe() for lane in LANES}
        self._lanes = {lane: ours for lane, (ours, _) in pipes.items()}
        self._locks = {lane: asyncio.Lock() for lane in LANES}
        theirs = {lane: end for lane, (_, end) in pipes.items()}
        own = {**arguments, "index": index, "name": self.name}
        self._process = CONTEXT.Process(target=serve, args=(theirs, factory, own), daemon=True)
        self._process.start()
        for end in theirs.values():
            end.close()
        self.pid = self._process.pid or 0
        self._threads = ThreadPoolExecutor(8)

    async def call(self, method: str, *args: Any, lane: str = "main") -> Any:
        return await asyncio.shield(asyncio.ensure_future(self._ask(method, args, lane)))

    async def _ask(self, method: str, args: tuple[Any, ...], lane: str) -> Any:
        async with self._locks[lane]:
            try:
                opened = tuple(each.open() if isinstance(each, Parcel) else each for each in args)
                self._lanes[lane].send((method, opened))
                good, value = await self._in_thread(self._lanes[lane].recv)
            except (EOFError, OSError) as error:
                raise WorkerDied(self.name, f"its process ended during {method}") from error
        if not good:
            raise RemoteError(*value).failure(self.name, method)
        return value

    async def call_split(
        self, method: str, *args: Any, returns: int, lane: str = "main"
    ) -> tuple[Any, tuple[Any, ...]]:
        first, *others = await self.call(method, *args, lane=lane)
        return first, tuple(others)

    async def watch(self) -> NoReturn:
        await self.gone()
        raise WorkerDied(self.name, "its process ended")

    def kill(self) -> None:
        self._process.kill()

    async def gone(self) -> None:
        await self._in_thread(self._process.join)

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


class ProcessPool:
    """A `separation.group.WorkerGroup` of ProcessWorkers; `factory` is named `pkg.module:attr`."""

    growth: Any = None

    def __init__(self, name: str, size: int, factory: str, arguments: dict[str, Any]) -> None:
        self.spec = PoolSpec(name, factory, size)
        self._arguments, self._incarnations = arguments, [0] * size
        self.workers: list[Any] = [self._build(index) for index in range(size)]

    def _build(self, index: int) -> ProcessWorker:
        return ProcessWorker(self.spec.name, index, self._incarnations[index], self.spec.factory, self._arguments)

    async def replace(self, index: int) -> ProcessWorker:
        self.workers[index].kill()
        await self.workers[index].gone()
        self._incarnations[index] += 1
        self.workers[index] = fresh = self._build(index)
        return fresh

    async def fetch(self, ref: Any) -> Any:
        return ref

    async def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            await worker.gone()


def die() -> NoReturn:
    """Kills the calling process by SIGKILL."""
    os.kill(os.getpid(), 9)
    raise AssertionError("unreachable")
