"""LocalGroup is a pool whose workers are threads of this process (`backend="local"` of cluster.py), e.g. for tests.

As in a pool of Ray actors, arguments and results are pickled, and numpy arrays that arrive are read-only.
"""

import asyncio
import concurrent.futures
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from separation.group import Growth, PoolSpec, Ref, Worker
from separation.supervise import deadline, together
from separation.worker_process import CallTable, Host, RemoteError, pick_lane, settle

_GRACE_SECONDS = 5.0  # Seconds that `LocalGroup.close` waits for running methods.


class Parcel:
    """A pickled value; the data of its arrays is stored as immutable copies. It is the Ref of local workers."""

    def __init__(self, value: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        self._head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        self._buffers = [bytes(buffer.raw()) for buffer in buffers]

    def open(self) -> Any:
        """Returns a new object on each call; its arrays share the parcel's read-only memory."""
        return pickle.loads(self._head, buffers=self._buffers)


class Lane(concurrent.futures.Executor):
    """An executor with one daemon thread, which runs calls in order. A call that hangs does not keep Python running."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "concurrent.futures.Future[Any]":
        """Queues the call and returns its future; the thread is started with the first call."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._queue.put(job)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Makes the thread end after the calls that are queued. Returns at once; both arguments are ignored."""
        self._queue.put(None)

    def join(self, until: float) -> None:
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()


class LocalWorker:
    """A worker whose lanes are threads of this process; implements the protocol `Worker` (group.py)."""

    def __init__(self, spec: PoolSpec, index: int, name: str) -> None:
        self.name, self.pool, self.index = name, spec.name, index
        self.pid, self.node = os.getpid(), "127.0.0.1"
        self._spec = spec
        self._host = Host(name, threads=spec.threads)
        self._calls = CallTable(name)
        self._lanes = {lane: Lane(f"{name}/{lane}") for lane in ("main", *spec.lanes)}

    async def build(self) -> None:
        arguments = {**self._spec.arguments, "index": self.index, "name": self.name}
        parcel = Parcel(arguments)
        factory = self._spec.factory
        await self._submit("main", factory, lambda: self._host.build(factory, parcel.open()))

    async def call(self, method: str, *args: Any, lane: str = "main") -> Any:
        (result,) = await self._parcels(lane, method, args, lambda *opened: (self._host.run(method, *opened),))
        return result.open()

    async def call_split(
        self, method: str, *args: Any, returns: int, lane: str = "main"
    ) -> tuple[Any, tuple[Ref, ...]]:
        split = self._host.run_split
        first, *rest = await self._parcels(lane, method, args, lambda *opened: split(method, returns, *opened))
        return first.open(), tuple(rest)

    async def watch(self) -> NoReturn:
        await self._calls.watch()

    def kill(self) -> None:
        """Marks the worker as dead. A method that runs now goes on to its end, and its result is discarded."""
        self._calls.declare_dead("killed")
        for lane in self._lanes.values():
            lane.shutdown()

    def join(self, until: float) -> None:
        for lane in self._lanes.values():
            lane.join(until)

    async def _parcels(self, lane: str, method: str, args: Sequence[Any], work: Callable[..., Any]) -> list[Parcel]:
        parcels = [arg if isinstance(arg, Parcel) else Parcel(arg) for arg in args]
        packed: list[Parcel] = await self._submit(
            lane, method, lambda: [Parcel(result) for result in work(*(parcel.open() for parcel in parcels))]
        )
        return packed

    async def _submit(self, lane: str, method: str, work: Callable[[], Any]) -> Any:
        executor = pick_lane(self._lanes, lane, self.name)
        answer = self._calls.open()

        def answered(job: "asyncio.Future[Any]") -> None:
            error = job.exception()
            if isinstance(error, SystemExit):
                self._calls.declare_dead(f"SystemExit: {error}")
            settle(answer, value=None if error else job.result(), error=self._failure(method, error))

        asyncio.get_running_loop().run_in_executor(executor, work).add_done_callback(answered)
        return await answer

    def _failure(self, method: str, error: BaseException | None) -> BaseException | None:
        if error is None:
            return None
        remote = error if isinstance(error, RemoteError) else RemoteError.of(error)
        return remote.failure(self.name, method)


class LocalGroup:
    """A pool of LocalWorkers of fixed size; implements `WorkerGroup`. `start_deadline`: seconds to build workers."""

    def __init__(self, spec: PoolSpec, *, start_deadline: float) -> None:
        self.spec = spec
        self.growth: Growth | None = None
        self.workers: list[Worker] = []
        self._hosts: list[LocalWorker] = []
        self._start_deadline = start_deadline
        self._incarnations = [0] * spec.num_workers

    async def start(self) -> None:
        workers = [LocalWorker(self.spec, index, f"{self.spec.name}-{index}") for index in range(self.spec.num_workers)]
        self.workers, self._hosts = list(workers), workers
        async with deadline(self._start_deadline, f"starting the pool {self.spec.name}"):
            await together(*(worker.build() for worker in workers))

    async def replace(self, index: int) -> Worker:
        self.workers[index].kill()
        self._incarnations[index] += 1
        fresh = LocalWorker(self.spec, index, f"{self.spec.name}-{index}.{self._incarnations[index]}")
        self.workers[index] = fresh
        self._hosts.append(fresh)
        async with deadline(self._start_deadline, f"starting {fresh.name}"):
            await fresh.build()
        return fresh

    async def fetch(self, ref: Ref) -> Any:
        if not isinstance(ref, Parcel):
            raise TypeError(f"fetch needs a ref that a call returned, got {type(ref).__name__}")
        return ref.open()

    async def close(self) -> None:
        """Kills every worker and waits at most 5 s for running methods; Python may abort if it exits while they run."""
        until = time.monotonic() + _GRACE_SECONDS
        for worker in self.workers:
            worker.kill()
        for host in self._hosts:
            host.join(until)
