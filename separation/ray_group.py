"""RayGroup is a pool whose workers are Ray actors, each in a process of its own (`backend="ray"` of cluster.py).

Ray does not restart them when they die, because a restarted process would lack its state and still have the old name.
Instead `RayGroup.replace` makes a new worker with a new name.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

import psutil
import ray
from ray import exceptions
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from separation.group import Growth, PoolSpec, Ref, Worker, WorkerDied
from separation.host import ProcessHost, Surroundings
from separation.node_checks import code_of, compare_code
from separation.processes import alive, descendants, kill, process_of
from separation.ray_errors import DEATHS, one_line, translate
from separation.ray_seats import ReservedSeat, Seats
from separation.supervise import deadline, together
from separation.worker import CallTable, pick_lane, settle

_WATCH = "watch"
"""Lane of the call that ends only with the process."""
SILENT = (
    "; it said nothing before: Ray's logs on its node (/tmp/ray/session_latest/logs) may, or whether that disk is full"
)
"""Added to the reason of a death if the process ended before it could write to a log."""


def node_address() -> str:
    """Returns the IP address of the node on which this process runs."""
    return str(ray.util.get_node_ip_address())


class RayWorker:
    """A worker in a Ray actor (a ProcessHost, host.py); implements `Worker` (group.py).

    The lane "main" is the actor's default queue; each other lane is a Ray concurrency group with one thread.
    """

    def __init__(
        self,
        spec: PoolSpec,
        index: int,
        name: str,
        *,
        seat: ReservedSeat,
        log_dir: Path | None,
        code: Mapping[str, str] | None,
    ) -> None:
        """Creates the actor without waiting for its process.

        `code` (see `code_of`) is compared with the node's; None on a cluster of one node.
        """
        if _WATCH in spec.lanes:
            raise ValueError(f"the lane name {_WATCH!r} is taken")
        self.name, self.pool, self.index = name, spec.name, index
        self.pid, self.node = 0, ""
        self._spec, self._code = spec, code
        self._log = log_dir.absolute() / f"{name}.log" if log_dir is not None else None
        self._calls = CallTable(name)
        self._lanes: dict[str, dict[str, str]] = {"main": {}}
        self._lanes |= {lane: {"concurrency_group": lane} for lane in spec.lanes}
        self.process: psutil.Process | None = None
        """The actor's process; None before `build`, and if it is on another machine."""
        self._gone = asyncio.Event()
        self._actor = self._create(seat)
        ended = self._actor.watch.options(concurrency_group=_WATCH).remote().as_future()
        ended.add_done_callback(self._ended)

    async def build(self) -> None:
        """Builds the worker's object. Raises WorkerFailed, WorkerDied, or OtherCode if the node's code differs."""
        arguments = {**self._spec.arguments, "index": self.index, "name": self.name}
        self.pid, *created_on = await self._answer("start", self._actor.identity.remote())
        self.process = process_of(self.pid, *created_on)
        self.node = await self.call("separation.ray_fence:settle_in", self._code is not None)
        if self._code:
            there = await self.call("separation.node_checks:code_of", list(self._code))
            compare_code(self._code, there, node=self.node, worker=self.name)
        await self._answer(self._spec.factory, self._actor.build.remote(self._spec.factory, arguments))

    async def call(self, method: str, *args: Any, lane: str = "main") -> Any:
        options = pick_lane(self._lanes, lane, self.name)
        self._calls.check()
        return await self._answer(method, self._actor.run.options(**options).remote(method, *args))

    async def call_split(
        self, method: str, *args: Any, returns: int, lane: str = "main"
    ) -> tuple[Any, tuple[Ref, ...]]:
        options = pick_lane(self._lanes, lane, self.name)
        self._calls.check()
        split = self._actor.run_split.options(num_returns=returns, **options).remote(method, returns, *args)
        first, *rest = [split] if returns == 1 else split
        return await self._answer(method, first), tuple(rest)

    async def watch(self) -> NoReturn:
        await self._calls.watch()

    def kill(self) -> None:
        self._end("killed")

    async def gone(self) -> None:
        """Waits until Ray knows that the process has ended."""
        await self._gone.wait()

    def _create(self, seat: ReservedSeat) -> Any:
        """Creates the actor at the seat, with one concurrency group per lane; Ray never restarts it."""
        share = dict(seat.share)
        owns_gpu = share.get("GPU", 0) > 0
        lanes = dict.fromkeys((*self._spec.lanes, _WATCH), 1)
        options = ray.remote(concurrency_groups=lanes)(ProcessHost).options(
            num_cpus=share.pop("CPU", 0),
            num_gpus=share.pop("GPU", 0),
            resources=share,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=seat.group, placement_group_bundle_index=seat.bundle
            ),
        )
        return options.remote(
            self.name,
            threads=self._spec.threads,
            surroundings=Surroundings(dict(self._spec.environment), owns_gpu, self._spec.allocator if owns_gpu else ""),
            log_file=str(self._log) if self._log else None,
        )

    async def _answer(self, method: str, ref: Any) -> Any:
        answer, loop = self._calls.open(), asyncio.get_running_loop()

        def answered(result: "Future[Any]") -> None:
            error = result.exception()
            settle(answer, value=None if error else result.result(), error=error and self._translate(method, error))

        def arrived(result: "Future[Any]") -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(answered, result)

        # Called in a thread of Ray's. `as_future` would take the loop another turn for every answer.
        ref.future().add_done_callback(arrived)
        return await answer

    def _translate(self, method: str, error: BaseException) -> BaseException:
        if isinstance(error, DEATHS):
            reason = self._end(one_line(error))
            return WorkerDied(self.name, reason)
        return translate(error, self.name, method)

    def _ended(self, watch: "asyncio.Future[Any]") -> None:
        self._gone.set()
        if not watch.cancelled() and (error := watch.exception()) is not None:
            self._end(one_line(error))

    def _where_to_look(self) -> str:
        if not self.pid:
            return SILENT
        return f"; its output is in {self._log}" if self._log else ""

    def _end(self, reason: str) -> str:
        """Declares the worker dead, kills its remaining processes, and returns the reason of the first call."""
        if self._calls.reason is None:
            self._calls.declare_dead(reason + ("" if reason == "killed" else self._where_to_look()))
            if self.process is not None and alive(self.process):
                for process in [self.process, *descendants(self.pid)]:
                    kill(process)
            if ray.is_initialized():
                ray.kill(self._actor, no_restart=True)
        return str(self._calls.reason)


class RayGroup:
    """A pool of RayWorkers; implements `WorkerGroup` (group.py).

    In a pool of fixed size, the successor of a worker takes the same seat, `reserved[index]`. An elastic pool has
    `seats`: its workers may join and leave, and a successor may get another seat.
    """

    def __init__(
        self,
        spec: PoolSpec,
        reserved: Sequence[ReservedSeat],
        *,
        start_deadline: float,
        log_dir: Path | None = None,
        seats: Seats | None = None,
    ) -> None:
        self.spec = spec
        self.growth: Growth | None = None
        several = seats is not None or sum(bool(node["Alive"]) for node in ray.nodes()) > 1
        self._code = code_of(spec.same_code) if several else None
        self._reserved = dict(enumerate(reserved))
        self._seats = seats
        self._log_dir = log_dir
        self._start_deadline = start_deadline
        self._incarnations = dict.fromkeys(self._reserved, 0)
        self._hosts = {index: self._create(index) for index in self._reserved}
        self.workers: list[Worker] = list(self._hosts.values())

    async def start(self) -> None:
        """Builds all workers at the same time. Raises WorkerFailed, WorkerDied, OtherCode or DeadlineExceeded."""
        async with deadline(self._start_deadline, f"starting the pool {self.spec.name}", report=self._unready):
            await together(*(host.build() for host in self._hosts.values()))

    async def replace(self, index: int) -> Worker:
        old = self._hosts[index]
        old.kill()
        async with deadline(self._start_deadline, f"replacing {old.name}"):
            await old.gone()
            if self._seats is not None:
                self._reserved[index] = await self._seats.successor(self._reserved[index])
            self._incarnations[index] += 1
            fresh = self._hosts[index] = self._create(index)
            self.workers[[worker.index for worker in self.workers].index(index)] = fresh
            await fresh.build()
        return fresh

    def seat(self, index: int) -> ReservedSeat:
        return self._reserved[index]

    async def add(self, seat: ReservedSeat) -> Worker:
        """Adds one more worker on a seat of its own and returns it, built; several may be added at the same time.

        Its index is the lowest that is free. Raises as `start` does; the seat is still taken then.
        """
        index = next(index for index in range(self.spec.most) if index not in self._hosts)
        self._reserved[index] = seat
        self._incarnations[index] = self._incarnations.get(index, -1) + 1
        fresh = self._hosts[index] = self._create(index)
        try:
            async with deadline(self._start_deadline, f"starting {fresh.name}"):
                await fresh.build()
        except BaseException:
            fresh.kill()
            del self._hosts[index], self._reserved[index]
            raise
        self.workers.append(fresh)
        self.workers.sort(key=lambda worker: worker.index)
        return fresh

    async def remove(self, index: int) -> None:
        """Kills the worker with this index, if there is one, removes it from the pool and gives its seat back."""
        if (host := self._hosts.pop(index, None)) is None:
            return
        host.kill()
        self.workers[:] = [worker for worker in self.workers if worker.index != index]
        if self._seats is not None:
            await self._seats.give_back(self._reserved.pop(index))

    async def fetch(self, ref: Ref) -> Any:
        if not isinstance(ref, ray.ObjectRef):
            raise TypeError(f"fetch needs a ref that a call returned, got {type(ref).__name__}")
        try:
            return await ref
        except exceptions.RayError as error:
            raise translate(error, self.spec.name, "fetch") from error

    async def close(self) -> None:
        self.kill()
        await together(*(host.gone() for host in self._hosts.values()))

    def processes(self) -> list[psutil.Process]:
        """Returns the live processes of the workers that run on this machine."""
        return [host.process for host in self._hosts.values() if host.process is not None and alive(host.process)]

    def kill(self) -> None:
        """Kills every worker without waiting."""
        for host in self._hosts.values():
            host.kill()

    def _create(self, index: int) -> RayWorker:
        incarnation = self._incarnations[index]
        name = f"{self.spec.name}-{index}" + (f".{incarnation}" if incarnation else "")
        seat = self._reserved[index]
        return RayWorker(self.spec, index, name, seat=seat, log_dir=self._log_dir, code=self._code)

    def _unready(self) -> str:
        waiting = [host.name for host in self._hosts.values() if not host.pid]
        return f"no process yet: {', '.join(waiting)}" if waiting else f"pid {os.getpid()} waits for their factories"
