"""Delivery runs in the controlling process and brings every version of one stream to every receiver.

    publish(v) ─ stage ─► returns      seal ─► one queue per receiver ─► receive ─► on_ack(name, ack)
                                                     │ corrupted, late: again, at most `retries` times
                                                     │ gone, or still failing: leave, then replace(name, error)
                                                     └ mismatch, or anything unknown: failed() raises, the run stops

async_flowrl/controller/weights.py uses it. It runs in one asyncio loop and takes all time from that loop.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from checkpoint_engine.base import (
    EVALUATION,
    RING,
    Ack,
    DeliveryOptions,
    DeliveryStats,
    Header,
    ReceiverEndpoint,
    SenderEndpoint,
    depth,
    parents,
)
from checkpoint_engine.collective_delivery import CollectiveBroadcast
from checkpoint_engine.errors import MemberBusy, Verdict, VersionGone, WeightsMismatch, error_names, verdict
from checkpoint_engine.process_group import MIN_BYTES_PER_SECOND

logger = logging.getLogger(__name__)


# Seconds, besides those of the transfer, after which the receivers below a slow receiver turn to the sender.
RELAY_SECONDS = 2.0


@dataclass
class Job:
    """The sending of one version to one receiver; `done` is True when acknowledged, False when given up or needless."""

    header: Header
    slot: str
    # The sender's payload, which may still have to be fetched: one for all receivers of a version.
    payload: "asyncio.Future[Any]"
    done: "asyncio.Future[bool]"
    # The receiver that passes the payload on (see base.py), and its job; None: `payload` is used.
    parent: "tuple[ReceiverEndpoint, Job] | None" = None
    depth: int = 0  # Number of receivers through which the payload passes before it arrives here.
    # The payload as this receiver passes it on; None until a receiver below it has asked for it.
    copy: "asyncio.Future[Any] | None" = None

    def passed_on(self, endpoint: ReceiverEndpoint) -> "asyncio.Future[Any]":
        """Returns the payload that this job's receiver passes on: one copy for all that it serves, to save memory."""
        if self.copy is None:
            self.copy = asyncio.ensure_future(endpoint.relay(self.header, self.slot))
        return self.copy

    def settle(self, acknowledged: bool) -> None:
        if not self.done.done():
            self.done.set_result(acknowledged)


class ReceiverQueue:
    """Sends versions to one receiver, in order, each until it is acknowledged or all retries have failed."""

    def __init__(self, endpoint: ReceiverEndpoint, delivery: "Delivery") -> None:
        self.endpoint, self._delivery = endpoint, delivery
        self._options, self._stats = delivery.options, delivery.stats
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()
        self._current: Job | None = None
        self.task = asyncio.get_running_loop().create_task(self._run(), name=f"receiver-{endpoint.name}")

    @property
    def name(self) -> str:
        return self.endpoint.name

    @property
    def idle(self) -> bool:
        return self._current is None and self._jobs.empty()

    def put(self, job: Job) -> None:
        self._jobs.put_nowait(job)

    def abandon(self) -> None:
        if self._current is not None:
            self._current.settle(False)
        while not self._jobs.empty():
            self._jobs.get_nowait().settle(False)

    def acknowledge(self, job: Job, ack: Ack) -> None:
        # Raises WeightsMismatch if it does not name the version that was sent.
        header = job.header
        if ack != Ack(header.stream, header.version, header.digest, job.slot):
            sent = f"{header.stream} {header.version} ({header.digest[:12]}, {job.slot})"
            raise WeightsMismatch(f"{self.name} acknowledged {ack}, but was sent {sent}")
        job.settle(True)
        self._delivery.on_ack(self.name, ack)

    async def _run(self) -> None:
        try:
            while True:
                self._current = await self._jobs.get()
                error = await self._serve(self._current)
                if error is not None:
                    self._delivery.retire(self, error)
                    return
                self._current = None
        except Exception as error:  # Delivery.failed() and drain() raise it
            self._delivery.background.fail(error)

    async def _serve(self, job: Job) -> BaseException | None:
        # Until the job is acknowledged or needless; returns the last error if the receiver must be replaced.
        # Raises errors that must stop the run.
        error: BaseException | None = None
        for attempt in range(self._options.retries + 1):
            self._stats.retries += attempt > 0
            if error is not None and "RefLost" in error_names(error) and job.parent is None:
                job.payload = self._delivery.payload(job.header)
            try:
                payload = await self._payload(job)
                ack = await self._receive(job, payload)
            except Exception as raised:
                error = raised
                judged = verdict(raised)
                if judged is Verdict.STOP:
                    if "VersionGone" not in error_names(raised) or not await self._delivery.superseded(job):
                        raise
                    title = job.header.title
                    logger.info("%s goes on without %s, for which it was too late: %s", self.name, title, raised)
                    job.settle(False)
                    return None
                self._stats.corrupt += "TransferCorrupted" in error_names(raised)
                if judged is Verdict.REPLACE:
                    break
            else:
                self.acknowledge(job, ack)
                return None
        return error

    async def _receive(self, job: Job, payload: Any) -> Ack:
        seconds = self._options.deadline
        try:
            async with asyncio.timeout(seconds):
                return await self.endpoint.receive(job.header, payload, job.slot)
        except TimeoutError as late:
            raise TimeoutError(str(late) or f"{self.name} did not take {job.header.title} in {seconds:g} s") from late

    async def _payload(self, job: Job) -> Any:
        # From the parent in the fan-out tree once, and otherwise from the sender. The sender's payload outlives the
        # version: a parent that has gone on to newer ones (VersionGone) is no error.
        if job.parent is None:
            return await asyncio.shield(job.payload)
        (endpoint, parent), job.parent = job.parent, None
        why: object = "it was given up itself, or too slow"
        if await self._has_it(parent):
            self._delivery.background.add(copy := parent.passed_on(endpoint))
            try:
                async with asyncio.timeout(self._options.deadline):
                    return await asyncio.shield(copy)
            except Exception as error:
                if verdict(error) is Verdict.STOP and "VersionGone" not in error_names(error):
                    raise
                self._stats.fallbacks += 1
                why = repr(error)
        title = job.header.title
        logger.warning("%s gets %s from the sender, not passed on by %s: %s", self.name, title, endpoint.name, why)
        return await asyncio.shield(job.payload)

    async def _has_it(self, parent: Job) -> bool:
        # A slow parent must not delay all receivers below it.
        seconds = (parent.depth + 1) * (RELAY_SECONDS + parent.header.nbytes / MIN_BYTES_PER_SECOND)
        await asyncio.wait([parent.done], timeout=min(seconds, self._options.deadline))
        return parent.done.done() and parent.done.result()


class Delivery:
    """Delivers one stream; it must be made and used inside one running loop."""

    def __init__(
        self,
        sender: SenderEndpoint,
        *,
        replace: Callable[[str, BaseException], Coroutine[Any, Any, None]],
        options: DeliveryOptions | None = None,
        broadcast: CollectiveBroadcast | None = None,
        on_ack: Callable[[str, Ack], None] = lambda name, ack: None,
    ) -> None:
        """`replace(name, error)` is awaited after a receiver was given up; `join` must then add its replacement."""
        self.stats = DeliveryStats()
        self._sender, self._replace, self._broadcast, self.on_ack = sender, replace, broadcast, on_ack
        self.options = options or DeliveryOptions()
        self.background, self._now = Background(), asyncio.get_running_loop().time
        self._queues: dict[str, ReceiverQueue] = {}
        self._headers: dict[int, Header] = {}
        self._staged: set[int] = set()
        self._retained: dict[int, Header] = {}
        self._evaluated: Header | None = None
        self._sealing = asyncio.Lock()
        self._sealed = asyncio.Condition(self._sealing)

    @property
    def receivers(self) -> tuple[str, ...]:
        return tuple(self._queues)

    async def publish(self, version: int) -> None:
        """Returns when the version is staged, so that the tensors may change; delivery goes on in the background."""
        self.background.check()
        await self._sender.stage(version)
        self._staged.add(version)
        self.background.start(self._deliver(version), f"deliver-{version}")

    async def place(self, version: int) -> None:
        """Sends a sealed version to every receiver's evaluation slot, in the background; later receivers get it, too.

        Raises VersionGone if the version is neither among the newest `retain` sealed ones nor retained by `keep`.
        """
        self.background.check()
        async with self._sealing:
            header = self._retained.pop(version, None) or self._headers.get(version)
            if header is None:
                raise VersionGone(f"version {version} can't be evaluated, only {sorted(self._headers)} are retained")
            await self._sender.hold(version)
            before, self._evaluated = self._evaluated, header
            jobs = self._enqueue(header, EVALUATION, list(self._queues.values()))
        self.background.start(self._settle_evaluated(jobs, before), f"evaluate-{version}")

    async def keep(self, version: int) -> None:
        """Retains a sealed version for a later `place`, regardless of newer ones. Raises VersionGone if it is gone."""
        async with self._sealing:
            if version not in self._headers:
                raise VersionGone(f"version {version} can't be kept, only {sorted(self._headers)} are retained")
            await self._sender.hold(version)
            self._retained[version] = self._headers[version]

    async def restore(self, version: int) -> None:
        """Stages, seals and retains a version for a later `place` alone: older than those that are published."""
        async with self._sealing:
            await self._sender.stage(version)
            header = await self._sender.seal(version)
            await self._sender.hold(version)
            self._retained[version] = header

    async def join(self, receiver: ReceiverEndpoint, versions: Iterable[int] = ()) -> bool:
        """Adds a receiver and sends it `versions`, all newer sealed versions, and the evaluation version.

        Returns True when it has them, False if it left or failed before. Versions that are staged but not sealed reach
        it later. Raises VersionGone if a version is not retained, ValueError if the name has joined already.
        """
        self.background.check()
        if receiver.name in self._queues:
            raise ValueError(f"receiver {receiver.name} has joined already")
        requested = set(versions)
        missing = requested - self._headers.keys() - self._staged
        if missing:
            raise VersionGone(f"versions {sorted(missing)} are not retained, only {sorted(self._headers)} are")
        oldest = min(requested) if requested else max(self._headers, default=-1) + 1
        async with self._sealing:
            # Versions evicted while this waited are left out: newer ones have replaced them.
            newer = [self._headers[version] for version in sorted(self._headers) if version >= oldest]
            queue = self._queues[receiver.name] = ReceiverQueue(receiver, self)
            jobs = [job for header in newer for job in self._enqueue(header, RING, [queue])]
            if self._evaluated is not None:
                jobs += self._enqueue(self._evaluated, EVALUATION, [queue])
        return await self._settle(jobs)

    async def leave(self, name: str) -> None:
        """Stops serving a receiver; does nothing if it has left already."""
        queue = self._queues.pop(name, None)
        if queue is not None:
            queue.task.cancel()
            queue.abandon()

    async def failed(self) -> None:
        """Waits until a delivery fails with an error that must stop the run, and raises that error."""
        await self.background.failed()

    async def drain(self) -> None:
        """Waits until all deliveries and replacements are done; raises an error that must stop the run."""
        await self.background.drain()

    async def close(self) -> None:
        """Cancels all deliveries, and what is fetched or passed on for them, and waits until they have ended."""
        queues = [queue.task for queue in self._queues.values()]
        for name in list(self._queues):
            await self.leave(name)
        await asyncio.gather(*queues, return_exceptions=True)
        await self.background.close()
        if self._broadcast is not None:
            await self._broadcast.close()

    async def _deliver(self, version: int) -> None:
        start = self._now()
        async with self._sealing:
            queues = list(self._queues.values())
            results = await self._send_to_all(version, queues)
            header = await self._seal(version)
            holders = self._acknowledge(header, queues, results)
            left = [queue for queue in queues if not isinstance(results.get(queue.name), Ack)]
            jobs = self._enqueue(header, RING, left, holders)
        await self._settle(jobs)
        self.stats.publishes += 1
        self.stats.bytes += header.nbytes
        self.stats.seconds += self._now() - start
        if self._broadcast is not None:
            await self._broadcast.regroup([queue.endpoint for queue in self._queues.values() if queue.idle])

    async def _send_to_all(self, version: int, queues: Sequence[ReceiverQueue]) -> dict[str, Ack | BaseException]:
        if self._broadcast is None:
            return {}
        idle, busy = ([queue.endpoint for queue in queues if queue.idle == state] for state in (True, False))
        try:
            results = await self._broadcast(version, idle, busy)
        except MemberBusy as why:
            self.stats.member_busy += 1
            logger.info("version %d goes without %s: %s", version, self._broadcast.name, why)
            return {}
        errors = [result for result in results.values() if isinstance(result, BaseException)]
        self.stats.fallbacks += bool(errors or (queues and not results))
        if stopping := [error for error in errors if verdict(error) is Verdict.STOP]:
            raise stopping[0]
        return results

    async def _seal(self, version: int) -> Header:
        header = self._headers[version] = await self._sender.seal(version)
        self._staged.discard(version)
        for old in sorted(self._headers)[: -self.options.retain]:
            del self._headers[old]
        self._sealed.notify_all()
        return header

    def _acknowledge(
        self, header: Header, queues: list[ReceiverQueue], results: dict[str, Ack | BaseException]
    ) -> "dict[str, tuple[ReceiverEndpoint, Job]]":
        # A leader is the only member of its node in the group, and passes versions on there; small groups have none.
        holders: dict[str, tuple[ReceiverEndpoint, Job]] = {}
        for queue in queues:
            if isinstance(ack := results.get(queue.name), Ack):
                future = asyncio.get_running_loop().create_future
                job = Job(header, RING, payload=future(), done=future())
                queue.acknowledge(job, ack)
                if self._broadcast is not None and self._broadcast.has_leaders(len(queues)):
                    holders.setdefault(queue.endpoint.node, (queue.endpoint, job))
        return holders

    def _enqueue(
        self,
        header: Header,
        slot: str,
        queues: Sequence[ReceiverQueue],
        holders: "Mapping[str, tuple[ReceiverEndpoint, Job]]" = MappingProxyType({}),
    ) -> list[Job]:
        if not queues:
            return []
        jobs = planned(header, slot, self.payload(header), queues, holders, self.options)
        for queue in queues:
            if self._queues.get(queue.name) is queue:
                queue.put(jobs[queue.name])
            else:
                jobs[queue.name].settle(False)
        return list(jobs.values())

    def payload(self, header: Header) -> "asyncio.Future[Any]":
        payload = asyncio.ensure_future(self._sender.payload(header.version))
        self.background.add(payload)
        return payload

    async def superseded(self, job: Job) -> bool:
        # Whether newer versions take the place of one that the sender has dropped, perhaps before it has sealed the
        # newest of them, for which this waits up to a receiver's deadline.
        if job.slot != RING:
            return False
        try:
            async with asyncio.timeout(self.options.deadline), self._sealed:
                return await self._sealed.wait_for(lambda: job.header.version not in self._headers)
        except TimeoutError:
            return False

    async def _settle(self, jobs: Sequence[Job]) -> bool:
        for job in jobs:
            await self.background.until(job.done)
        return all(job.done.result() for job in jobs)

    async def _settle_evaluated(self, jobs: Sequence[Job], before: Header | None) -> None:
        await self._settle(jobs)
        if before is not None and self._evaluated is not None and before.version != self._evaluated.version:
            await self._sender.release(before.version)

    def retire(self, queue: ReceiverQueue, error: BaseException) -> None:
        if self._queues.get(queue.name) is queue:
            del self._queues[queue.name]
        self.background.start(self._replace(queue.name, error), f"replace-{queue.name}")
        queue.abandon()


def planned(
    header: Header,
    slot: str,
    payload: "asyncio.Future[Any]",
    queues: Sequence[ReceiverQueue],
    holders: "Mapping[str, tuple[ReceiverEndpoint, Job]]",
    options: DeliveryOptions,
) -> dict[str, Job]:
    """Returns by receiver the jobs that send a version to all `queues`; `holders` pass it on within their nodes."""
    future = asyncio.get_running_loop().create_future
    jobs = {queue.name: Job(header, slot, payload, future()) for queue in queues}
    ends = {queue.name: queue.endpoint for queue in queues}
    sources = {name: (ends[name], jobs[name]) for name in jobs} | {
        end.name: (end, job) for end, job in holders.values()
    }
    plan = parents(
        {name: end.node for name, end in ends.items()},
        {node: end.name for node, (end, _) in holders.items()},
        max_fan_out=options.max_fan_out,
        node_fan_out=options.node_fan_out,
    )
    for name, job in jobs.items():
        parent = plan[name]
        job.parent = None if parent is None else sources[parent]
        job.depth = depth(plan, name)
    return jobs


class Background:
    """Tasks and futures of one delivery; it must be made and used inside one running loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._optional: set[asyncio.Future[Any]] = set()
        self._failure: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Starts a task; its error fails the delivery."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def add(self, optional: "asyncio.Future[Any]") -> None:
        """Adds a future whose error only those that wait for it must know; `close` cancels it."""
        if not optional.done():
            self._optional.add(optional)
            optional.add_done_callback(self._optional.discard)
        optional.add_done_callback(_retrieve_error)

    def fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()

    def check(self) -> None:
        if self._failure.done() and (error := self._failure.exception()) is not None:
            raise error

    async def failed(self) -> None:
        await asyncio.shield(self._failure)

    async def until(self, done: "asyncio.Future[Any]") -> None:
        await asyncio.wait([done, self._failure], return_when=asyncio.FIRST_COMPLETED)
        self.check()

    async def drain(self) -> None:
        while self._tasks and not self._failure.done():
            pending: list[asyncio.Future[Any]] = [*self._tasks, self._failure]
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        self.check()

    async def close(self) -> None:
        under_way: list[asyncio.Future[Any]] = [*self._tasks, *self._optional]
        for future in under_way:
            future.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)


def _retrieve_error(ended: "asyncio.Future[Any]") -> None:
    # Takes the error of a future that perhaps nobody waits for, so that asyncio does not report it as forgotten.
    if not ended.cancelled():
        ended.exception()
