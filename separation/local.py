"""Workers that are threads of this process, with the behaviour of the ones that are processes.

Arguments and results are pickled on their way, so that no memory is shared by accident: what arrives is a copy, and
numpy arrays in it are read-only, as they are when they come out of Ray's object store.
"""

import asyncio
import concurrent.futures
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from separation.group import Growth, PoolSpec, Ref, Worker, WorkerFailed
from separation.host import Host, RemoteError
from separation.supervise import deadline, together
from separation.worker import CallTable, pick_lane, settle

_GRACE_SECONDS = 5.0
"""Seconds that closing waits for what is under way."""


class Parcel:
    """A pickled value whose buffers are immutable copies."""

    def __init__(self, value: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        self._head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        self._buffers = [bytes(buffer.raw()) for buffer in buffers]

    def open(self) -> Any:
        """A new object each time; arrays share the parcel's read-only memory."""
        return pickle.loads(self._head, buffers=self._buffers)


class Lane(concurrent.futures.Executor):
    """One daemon thread: calls run in order, and a hung one can't hold the interpreter's exit."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "concurrent.futures.Future[Any]":
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
        """The thread ends after what is queued."""
        self._queue.put(None)

    def join(self, until: float) -> None:
        """Waits for the thread's end, until `time.monotonic()` is `until`."""
        if self._thread is not None:
            self._thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()


class LocalWorker:
    """A Host whose lanes are threads."""

    def __init__(self, spec: PoolSpec, index: int, name: str) -> None:
        self.name, self.pool, self.index = name, spec.name, index
        self.pid, self.node = os.getpid(), "127.0.0.1"
        self._spec = spec
        self._host = Host(name, threads=spec.threads)
        self._calls = CallTable(name)
        self._lanes = {lane: Lane(f"{name}/{lane}") for lane in ("main", *spec.lanes)}

    async def build(self) -> None:
        """Builds the hosted object. Raises WorkerFailed."""
        arguments = {**self._spec.arguments, "index": self.index, "name": self.name}
        parcel = Parcel(arguments)
        factory = self._spec.factory
        await self._submit("main", factory, lambda: self._host.build(factory, parcel.open()))

    async def call(self, method: str, *args: Any, lane: str = "main") -> Any:
        parcels = [_pack(arg) for arg in args]
        result: Parcel = await self._submit(
            lane, method, lambda: Parcel(self._host.run(method, *[parcel.open() for parcel in parcels]))
        )
        return result.open()

    async def call_split(
        self, method: str, *args: Any, returns: int, lane: str = "main"
    ) -> tuple[Any, tuple[Ref, ...]]:
        parcels = [_pack(arg) for arg in args]

        def work() -> list[Parcel]:
            results = self._host.run_split(method, returns, *[parcel.open() for parcel in parcels])
            return [Parcel(result) for result in results]

        first, *rest = await self._submit(lane, method, work)
        return first.open(), tuple(rest)

    async def watch(self) -> NoReturn:
        await self._calls.watch()

    def kill(self) -> None:
        """Marks it dead. A method under way runs on to its end, unheard."""
        self._calls.declare_dead("killed")
        for lane in self._lanes.values():
            lane.shutdown()

    def join(self, until: float) -> None:
        for lane in self._lanes.values():
            lane.join(until)

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
        return WorkerFailed(self.name, method, remote.kind, remote.message, remote.remote_traceback)


def _pack(value: Any) -> Parcel:
    return value if isinstance(value, Parcel) else Parcel(value)


class LocalGroup:
    """A pool of LocalWorkers."""

    def __init__(self, spec: PoolSpec, *, start_deadline: float) -> None:
        self.spec = spec
        self.growth: Growth | None = None
        self.workers: list[Worker] = []
        self._hosts: list[LocalWorker] = []
        self._start_deadline = start_deadline
        self._incarnations = [0] * spec.num_workers

    async def start(self) -> None:
        """Builds all workers side by side. Raises WorkerFailed or DeadlineExceeded."""
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
        """Waits a little for what is under way: an interpreter that exits while a thread computes may abort."""
        until = time.monotonic() + _GRACE_SECONDS
        for worker in self.workers:
            worker.kill()
        for host in self._hosts:
            host.join(until)
