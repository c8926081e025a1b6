"""A pool whose workers are Ray actors, each in a process of its own (`backend="ray"` of cluster.py): RayGroup.

Ray does not restart them when they die, because a restarted process would lack its state and still have the old name;
`RayGroup.replace` makes a new worker with a new name. In an elastic pool every seat is a placement group of its own.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import psutil
import ray
from ray import exceptions
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from separation.group import VISIBLE_DEVICES, Growth, NoSeat, PoolSpec, Ref, RefLost, Worker, WorkerDied
from separation.local import Lane
from separation.node import code_of, compare_code
from separation.processes import alive, descendants, kill, process_of
from separation.ray_internals import draining
from separation.resources import Resources
from separation.supervise import deadline, together
from separation.worker_process import CallTable, ProcessHost, RemoteError, pick_lane, settle

T = TypeVar("T")

log = logging.getLogger(__name__)

_WATCH = "watch"  # Lane of the call that ends only with the process.
# Added to the reason of a death if the process ended before it could write to a log.
SILENT = (
    "; it said nothing before: Ray's logs on its node (/tmp/ray/session_latest/logs) may, or whether that disk is full"
)
# Errors of Ray that mean that the actor's process or its node has ended.
DEATHS = (
    exceptions.RayActorError,
    exceptions.ActorPlacementGroupRemoved,
    exceptions.ActorUnschedulableError,
    exceptions.WorkerCrashedError,
    exceptions.NodeDiedError,
)
POLL_SECONDS = 1.0  # Interval of the checks for new seats and for nodes that will end.
# Time in which a starting pool looks for more seats than its smallest size needs. Later seats are used later.
START_SECONDS = 2.0
# Time that the replacement of a lost worker waits for a seat; then the pool goes on without it.
REPLACEMENT_SECONDS = 10.0


@dataclass(frozen=True)
class ReservedSeat:
    group: PlacementGroup
    bundle: int  # Index of the bundle in the placement group.
    share: Resources
    node: str = ""  # Ray's id of the node, for seats of an elastic pool; else empty.


class Seats:
    """The seats of an elastic pool: as many as the cluster has room for, up to `most`."""

    # For every seat that is still missing, a placement group stays requested; Ray's autoscaler may start nodes for
    # these. Calls of Ray run in a thread of their own, because they block while the cluster's head node does not
    # answer.

    def __init__(self, needs: Resources, most: int, reserved: list[PlacementGroup]) -> None:
        # The session removes the groups in `reserved` at its end. This object adds its own groups to the list, and
        # takes them out when they are given back.
        self._needs, self._most, self._reserved = dict(needs), most, reserved
        self._occupied: list[PlacementGroup] = []
        self._waiting: list[PlacementGroup] = []
        # Number of lost workers whose replacements wait for a seat; they get one before new workers do.
        self._replacements = 0
        self._lane, self._one_asks = Lane("seats"), asyncio.Lock()

    def adopt(self, group: PlacementGroup) -> ReservedSeat:
        self._occupied.append(group)
        return ReservedSeat(group, 0, self._needs, _node_of(group) or "")

    async def available(self, seconds: float) -> list[ReservedSeat]:
        end = asyncio.get_running_loop().time() + seconds
        seats: list[ReservedSeat] = []
        while len(self._occupied) < self._most and (seat := await self._until(end)) is not None:
            seats.append(seat)
        return seats

    async def next(self) -> ReservedSeat:
        """Waits for a seat for one more worker, takes it and returns it. Replacements of lost workers come first."""
        while True:
            if not self._replacements and (seat := await self._look()) is not None:
                return seat
            await asyncio.sleep(POLL_SECONDS)

    async def replacement(self, old: ReservedSeat) -> ReservedSeat:
        """Gives a lost worker's seat back and takes a free one, perhaps the same; NoSeat after REPLACEMENT_SECONDS."""
        self._replacements += 1
        end = asyncio.get_running_loop().time() + REPLACEMENT_SECONDS
        try:
            await self.give_back(old)
            if (seat := await self._until(end)) is None:
                raise NoSeat(f"no node has had a seat for {REPLACEMENT_SECONDS:g} s")
            return seat
        finally:
            self._replacements -= 1

    async def _until(self, end: float) -> ReservedSeat | None:
        while (seat := await self._look()) is None and asyncio.get_running_loop().time() <= end:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS / 4)
        return seat

    async def give_back(self, seat: ReservedSeat) -> None:
        """Removes the seat's placement group; does nothing if that was done before."""
        if seat.group in self._occupied:
            self._occupied.remove(seat.group)
            await self._remove(seat.group)

    async def departing(self) -> Mapping[str, float]:
        """Returns node id → seconds until the node ends (infinity: unknown), for nodes that are being drained."""
        return await self._ask(draining, {})

    async def _look(self) -> ReservedSeat | None:
        """Takes and returns a seat if one is free, else None; before that, requests the seats that are missing."""
        async with self._one_asks:
            while len(self._occupied) + len(self._waiting) < self._most:
                if not await self._ask(self._reserve_one, False):
                    return None
        while (found := await self._ask(self._first_placed, None)) is not None:
            group, node = found
            ending = await self.departing()
            if group not in self._waiting:
                continue  # another caller has taken it meanwhile
            if node in ending:
                self._waiting.remove(group)
                await self._remove(group)
                continue
            self._occupied.append(group)  # before it leaves the other list: `_reserve_one` adds up both in its thread
            self._waiting.remove(group)
            return ReservedSeat(group, 0, self._needs, node)
        return None

    def _first_placed(self) -> tuple[PlacementGroup, str] | None:
        # Groups are placed mostly in the order of their requests, so this rarely asks for all that wait.
        for group in list(self._waiting):
            if (node := _node_of(group)) is not None:
                return group, node
        return None

    def _reserve_one(self) -> bool:
        # Runs in the thread, so a cancelled caller cannot lose a placement group.
        if len(self._occupied) + len(self._waiting) < self._most:
            group = placement_group([dict(self._needs)], strategy="PACK")
            self._reserved.append(group)
            self._waiting.append(group)
        return True

    async def _remove(self, group: PlacementGroup) -> None:
        self._reserved.remove(group)
        await self._ask(lambda: remove_placement_group(group), None)

    async def _ask(self, question: Callable[[], T], unanswered: T) -> T:
        # A dead head is noticed in head_watchdog.py. The question runs to its end even if the caller is cancelled.
        try:
            return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._lane, question))
        except exceptions.RayError as error:
            log.info("Ray's head did not answer: %s", error)
            return unanswered


def _node_of(group: PlacementGroup) -> str | None:
    table: dict[str, Any] = placement_group_table(group)
    return str(table["bundles_to_node_id"][0]) if table["state"] == "CREATED" else None


class RayWorker:
    """A worker in a Ray actor (a ProcessHost, worker_process.py); implements `Worker` (group.py)."""

    # The lane "main" is the actor's default queue; each other lane is a Ray concurrency group with one thread.

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
        """Creates the actor without waiting for it; `code` (`code_of`) is compared with the node's, None on one."""
        if _WATCH in spec.lanes:
            raise ValueError(f"the lane name {_WATCH!r} is taken")
        self.name, self.pool, self.index = name, spec.name, index
        self.pid, self.node = 0, ""
        self._spec, self._code = spec, code
        self._log = log_dir.absolute() / f"{name}.log" if log_dir is not None else None
        self._calls = CallTable(name)
        groups = {lane: {"concurrency_group": lane} for lane in spec.lanes}
        self._lanes: dict[str, dict[str, str]] = {"main": {}, **groups}
        # The actor's process; None before `build`, and if it is on another machine.
        self.process: psutil.Process | None = None
        self._gone = asyncio.Event()
        self._actor = self._create(seat)
        ended = self._actor.watch.options(concurrency_group=_WATCH).remote().as_future()
        ended.add_done_callback(self._ended)

    async def build(self) -> None:
        """Builds the worker's object. Raises WorkerFailed, WorkerDied, or OtherCode if the node's code differs."""
        arguments = {**self._spec.arguments, "index": self.index, "name": self.name}
        self.pid, *created_on = await self.call("separation.processes:identity")
        self.process = process_of(self.pid, *created_on)
        self.node = await self.call("separation.head_watchdog:settle_in", self._code is not None)
        if self._code:
            remote = await self.call("separation.node:code_of", list(self._code))
            compare_code(self._code, remote, node=self.node, worker=self.name)
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
        await self._gone.wait()

    def _create(self, seat: ReservedSeat) -> Any:
        share = dict(seat.share)
        owns_gpu = share.get("GPU", 0) > 0
        # Ray has set the visible GPUs of a worker that owns one. Newer versions of it show all GPUs to the others.
        hidden = {} if owns_gpu else {VISIBLE_DEVICES: ""}
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
            environment={**self._spec.environment, **hidden},
            expandable_segments=self._spec.expandable_segments and owns_gpu,
            log_file=str(self._log) if self._log else None,
        )

    async def _answer(self, method: str, ref: Any) -> Any:
        answer = self._calls.open()

        def answered(result: "asyncio.Future[Any]") -> None:
            error = result.exception()
            settle(answer, value=None if error else result.result(), error=error and self._translate(method, error))

        ref.as_future().add_done_callback(answered)
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

    def _end(self, reason: str) -> str:
        if self._calls.reason is None:
            where = f"; its output is in {self._log}" if self._log else ""
            self._calls.declare_dead(reason + ("" if reason == "killed" else where if self.pid else SILENT))
            if self.process is not None and alive(self.process):
                for process in [self.process, *descendants(self.pid)]:
                    kill(process)
            if ray.is_initialized():
                ray.kill(self._actor, no_restart=True)
        return str(self._calls.reason)


class RayGroup:
    """A pool of RayWorkers; a replacement takes its worker's seat. One with `seats` is elastic, and its `growth`."""

    def __init__(
        self,
        spec: PoolSpec,
        reserved: Sequence[ReservedSeat],
        *,
        start_deadline: float,
        log_dir: Path | None,
        seats: Seats | None = None,
    ) -> None:
        self.spec = spec
        self.growth: Growth | None = None
        if seats is not None:
            self.growth, self._seats = self, seats
        several = spec.elastic or sum(bool(node["Alive"]) for node in ray.nodes()) > 1
        self._code = code_of(spec.same_code) if several else None
        self._reserved = dict(enumerate(reserved))
        self._log_dir = log_dir
        self._start_deadline = start_deadline
        self._incarnations = dict.fromkeys(self._reserved, 0)
        self._hosts = {index: self._create(index) for index in self._reserved}
        self.workers: list[Worker] = list(self._hosts.values())

    async def start(self) -> None:
        async with deadline(self._start_deadline, f"starting the pool {self.spec.name}", report=self._unready):
            await together(*(host.build() for host in self._hosts.values()))

    async def replace(self, index: int) -> Worker:
        old = self._hosts[index]
        old.kill()
        async with deadline(self._start_deadline, f"replacing {old.name}"):
            await old.gone()
            if self.growth is not None:
                self._reserved[index] = await self._seats.replacement(self._reserved[index])
            self._incarnations[index] += 1
            fresh = self._hosts[index] = self._create(index)
            self.workers[[worker.index for worker in self.workers].index(index)] = fresh
            await fresh.build()
        return fresh

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
        return [host.process for host in self._hosts.values() if host.process is not None and alive(host.process)]

    def kill(self) -> None:
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

    # What follows implements Growth, for an elastic pool.

    async def seat(self) -> ReservedSeat:
        return await self._seats.next()

    async def fill(self, seat: ReservedSeat) -> Worker:
        """The worker's index is the lowest that is free."""
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

    async def give_back(self, seat: ReservedSeat) -> None:
        await self._seats.give_back(seat)

    async def departures(self, reported: Collection[str]) -> Mapping[str, float]:
        while True:
            ending = await self._seats.departing()
            nodes = {worker.name: self._reserved[worker.index].node for worker in self.workers}
            if departures := {n: ending[node] for n, node in nodes.items() if node in ending and n not in reported}:
                return departures
            await asyncio.sleep(POLL_SECONDS)

    async def release(self, index: int) -> None:
        if (host := self._hosts.pop(index, None)) is not None:
            host.kill()
            self.workers[:] = [worker for worker in self.workers if worker.index != index]
            await self._seats.give_back(self._reserved.pop(index))


def translate(error: BaseException, worker: str, method: str) -> BaseException:
    """Returns Ray's `error` as RefLost, WorkerFailed or WorkerDied; other errors are returned unchanged."""
    cause = getattr(error, "cause", None) or error
    if isinstance(error, exceptions.ObjectLostError) or isinstance(cause, exceptions.ObjectLostError):
        return RefLost(f"a value needed by {worker}.{method} is gone: {one_line(cause)}")
    if not isinstance(error, exceptions.RayTaskError):
        return error
    remote = cause if isinstance(cause, RemoteError) else RemoteError(type(cause).__name__, str(cause), str(error))
    return remote.failure(worker, method)


def one_line(error: BaseException) -> str:
    """Returns the cause in a message of Ray's, on one line of at most 300 characters."""
    text = " ".join(str(error).split())
    for start in ("The actor is dead because ", "Worker exit detail: "):
        if start in text:
            text = text[text.index(start) + len(start) :]
    text = text.split(" Some common causes include")[0]
    return text[:300]
