"""The controller's side: every version reaches every receiver, or the receiver is replaced, or the run stops.

    publish(v) ─ stage ─► returns      seal ─► one lane per receiver ─► receive ─► on_ack(name, ack)
                                                     │ corrupted, late: again, at most `retries` times
                                                     │ gone, or still failing: leave, then replace(name, error)
                                                     └ mismatch, or anything unknown: failed() raises, the run stops

Runs on an asyncio loop and takes time only from it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from checkpoint_engine.base import EVALUATION, RING, Ack, Broadcast, Header, ReceiverEndpoint, SenderEndpoint
from checkpoint_engine.errors import VersionGone
from checkpoint_engine.fanout import parents
from checkpoint_engine.outcome import DeliveryOptions, DeliveryStats, Verdict, verdict
from checkpoint_engine.receiver_queue import Job, Lane, LaneEvents

T = TypeVar("T")


class Delivery:
    """Delivers one stream. Make it and use it inside one running loop."""

    def __init__(
        self,
        sender: SenderEndpoint,
        *,
        replace: Callable[[str, BaseException], Awaitable[None]],
        options: DeliveryOptions | None = None,
        broadcast: Broadcast | None = None,
    ) -> None:
        """`replace(name, error)` is awaited after a receiver was given up; the new one then comes by `join`."""
        self.stats = DeliveryStats()
        self._sender, self._replace, self._broadcast = sender, replace, broadcast
        self._options = options or DeliveryOptions()
        self._lanes: dict[str, Lane] = {}
        self._headers: dict[int, Header] = {}
        self._staged: set[int] = set()
        self._kept: dict[int, Header] = {}
        self._placed: Header | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[Callable[[str, Ack], None]] = []
        self._sealing = asyncio.Lock()
        self._failure: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def receivers(self) -> tuple[str, ...]:
        """Names of the receivers that are served."""
        return tuple(self._lanes)

    def on_ack(self, listener: Callable[[str, Ack], None]) -> None:
        """Calls `listener(receiver name, ack)` in the loop for every acknowledgement, resent ones included."""
        self._listeners.append(listener)

    async def publish(self, version: int) -> None:
        """Returns when the version is staged and the tensors may change; delivery goes on in the background."""
        self._check()
        start = self._now()
        await self._call(self._sender.stage(version))
        self.stats.stall_seconds += self._now() - start
        self._staged.add(version)
        self._spawn(self._deliver(version), f"deliver-{version}")

    async def place(self, version: int) -> None:
        """Sends a sealed version to every receiver's evaluation slot, in the background; joiners get it too.

        Raises VersionGone for a version that is neither among the newest `retain` sealed ones nor kept.
        """
        self._check()
        async with self._sealing:
            header = self._kept.pop(version, None) or self._headers.get(version)
            if header is None:
                raise VersionGone(f"version {version} can't be evaluated, only {sorted(self._headers)} are retained")
            await self._call(self._sender.hold(version))
            before, self._placed = self._placed, header
            jobs = await self._enqueue(header, EVALUATION, list(self._lanes.values()))
        self._spawn(self._settle_placed(jobs, before), f"place-{version}")

    async def keep(self, version: int) -> None:
        """Keeps a sealed version for a later `place`, however many newer ones come. Raises VersionGone."""
        async with self._sealing:
            if version not in self._headers:
                raise VersionGone(f"version {version} can't be kept, only {sorted(self._headers)} are retained")
            await self._call(self._sender.hold(version))
            self._kept[version] = self._headers[version]

    async def join(self, receiver: ReceiverEndpoint, versions: Iterable[int] = ()) -> bool:
        """Adds a receiver; True when it holds `versions`, every newer one sealed so far, and the placed one.

        Versions staged but not sealed yet reach it with everybody else. False when the receiver left or failed
        before: its own replacement is under way then. Raises VersionGone for a version that is not retained.
        """
        self._check()
        if receiver.name in self._lanes:
            raise ValueError(f"receiver {receiver.name} has joined already")
        asked = set(versions)
        lost = asked - self._headers.keys() - self._staged
        if lost:
            raise VersionGone(f"versions {sorted(lost)} are not retained, only {sorted(self._headers)} are")
        async with self._sealing:
            # A version evicted while this waited was replaced by newer ones: what needed it is done.
            wanted = sorted(v for v in self._headers if asked and v >= min(asked))
            lane = self._lanes[receiver.name] = Lane(receiver, self._options, self.stats, self._events())
            jobs = []
            for version in wanted:
                jobs += await self._enqueue(self._headers[version], RING, [lane])
            if self._placed is not None:
                jobs += await self._enqueue(self._placed, EVALUATION, [lane])
        return await self._settle(jobs)

    async def leave(self, name: str) -> None:
        """Stops serving a receiver. Leaving twice is fine."""
        lane = self._lanes.pop(name, None)
        if lane is not None:
            lane.task.cancel()
            lane.abandon()

    async def failed(self) -> None:
        """Waits for ever, unless a delivery fails in a way that must stop the run: raises that error."""
        await asyncio.shield(self._failure)

    async def drain(self) -> None:
        """Returns when nothing is under way any more, replacements included; raises what stopped a delivery."""
        while self._tasks and not self._failure.done():
            pending: list[asyncio.Future[Any]] = [*self._tasks, self._failure]
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        self._check()

    async def reset(self) -> None:
        """Forgets every version, for publishing again from an earlier one; receivers stay."""
        async with self._sealing:
            for lane in self._lanes.values():
                lane.abandon()
            self._headers.clear()
            self._placed = None

    async def close(self) -> None:
        """Ends everything under way and waits for it."""
        tasks = [*self._tasks, *(lane.task for lane in self._lanes.values())]
        for name in list(self._lanes):
            await self.leave(name)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._broadcast is not None:
            await self._broadcast.close()

    async def _deliver(self, version: int) -> None:
        start = self._now()
        async with self._sealing:
            lanes = list(self._lanes.values())
            results = await self._send_to_all(version)
            header = await self._seal(version)
            left = self._without_ack(header, lanes, results)
            jobs = await self._enqueue(header, RING, left)
        await self._settle(jobs)
        self.stats.publishes += 1
        self.stats.bytes += header.nbytes
        self.stats.seconds += self._now() - start

    async def _send_to_all(self, version: int) -> dict[str, Ack | BaseException]:
        """Tries the collective transport, which seals the version on its way, with the idle receivers."""
        idle = [lane.endpoint for lane in self._lanes.values() if lane.idle]
        results = await self._broadcast(version, idle) if self._broadcast is not None and idle else {}
        for error in results.values():
            if isinstance(error, BaseException) and verdict(error) is Verdict.STOP:
                raise error
        return results

    async def _seal(self, version: int) -> Header:
        header = self._headers[version] = await self._call(self._sender.seal(version))
        self._staged.discard(version)
        for old in sorted(self._headers)[: -self._options.retain]:
            del self._headers[old]
        return header

    def _without_ack(self, header: Header, lanes: list[Lane], results: dict[str, Ack | BaseException]) -> list[Lane]:
        """Those to be served one by one."""
        left = []
        for lane in lanes:
            ack = results.get(lane.name)
            if isinstance(ack, Ack):
                lane.acknowledge(Job(header, RING, None, self._future()), ack)
            else:
                left.append(lane)
        self.stats.fallbacks += bool(left) and self._broadcast is not None
        return left

    async def _enqueue(self, header: Header, slot: str, lanes: Sequence[Lane]) -> list[Job]:
        if not lanes:
            return []
        payload = await self._call(self._sender.payload(header.version))
        jobs = {lane.name: Job(header, slot, payload, self._future()) for lane in lanes}
        ends = {lane.name: lane.endpoint for lane in lanes}
        plan = parents({name: end.node for name, end in ends.items()}, degree=self._options.degree)
        for name, job in jobs.items():
            parent = plan[name]
            job.parent = None if parent is None else (ends[parent], jobs[parent])
        for lane in lanes:
            if self._lanes.get(lane.name) is lane:
                lane.put(jobs[lane.name])
            else:
                jobs[lane.name].settle(False)
        return list(jobs.values())

    async def _settle(self, jobs: Sequence[Job]) -> bool:
        """Waits for all jobs; True when every one was acknowledged. Raises what stopped the run meanwhile."""
        for job in jobs:
            await asyncio.wait([job.done, self._failure], return_when=asyncio.FIRST_COMPLETED)
            self._check()
        return all(job.done.result() for job in jobs)

    async def _settle_placed(self, jobs: Sequence[Job], before: Header | None) -> None:
        await self._settle(jobs)
        if before is not None and self._placed is not None and before.version != self._placed.version:
            await self._call(self._sender.release(before.version))

    def _events(self) -> LaneEvents:
        return LaneEvents(acknowledged=self._acknowledged, retired=self._retire, failed=self._fail)

    def _acknowledged(self, name: str, ack: Ack) -> None:
        for listener in self._listeners:
            listener(name, ack)

    def _retire(self, lane: Lane, error: BaseException) -> None:
        self.stats.replaced += 1
        if self._lanes.get(lane.name) is lane:
            del self._lanes[lane.name]
        self._spawn(self._call_replace(lane.name, error), f"replace-{lane.name}")
        lane.abandon()

    async def _call_replace(self, name: str, error: BaseException) -> None:
        await self._replace(name, error)

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._options.deadline) as scope:
                return await call
        except TimeoutError as error:
            if not scope.expired():
                raise
            what = getattr(call, "__qualname__", "the sender")
            raise TimeoutError(f"{what} was not done within its deadline of {self._options.deadline:g} s") from error

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()

    def _check(self) -> None:
        if self._failure.done() and (error := self._failure.exception()) is not None:
            raise error

    def _future(self) -> "asyncio.Future[bool]":
        return asyncio.get_running_loop().create_future()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
