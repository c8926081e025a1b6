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
)
from checkpoint_engine.collective_delivery import CollectiveBroadcast
from checkpoint_engine.errors import MemberBusy, Verdict, VersionGone, verdict
from checkpoint_engine.receiver_queue import Background, Job, QueueEvents, ReceiverQueue, planned

logger = logging.getLogger(__name__)


class Delivery:
    """Delivers one stream; it must be made and used inside one running loop."""

    def __init__(
        self,
        sender: SenderEndpoint,
        *,
        replace: Callable[[str, BaseException], Coroutine[Any, Any, None]],
        options: DeliveryOptions | None = None,
        broadcast: CollectiveBroadcast | None = None,
    ) -> None:
        """`replace(name, error)` is awaited after a receiver was given up; its successor must be added by `join`."""
        self.stats = DeliveryStats()
        self._sender, self._replace, self._broadcast = sender, replace, broadcast
        self._options = options or DeliveryOptions()
        self._background, self._now = Background(), asyncio.get_running_loop().time
        self._queues: dict[str, ReceiverQueue] = {}
        self._headers: dict[int, Header] = {}
        self._staged: set[int] = set()
        self._retained: dict[int, Header] = {}
        self._evaluated: Header | None = None
        self._events = QueueEvents(
            acknowledged=self._acknowledged,
            retired=self._retire,
            failed=self._background.fail,
            payload=self._payload,
            superseded=self._superseded,
            passing_on=self._background.add,
        )
        self._listeners: list[Callable[[str, Ack], None]] = []
        self._sealing = asyncio.Lock()
        self._sealed = asyncio.Condition(self._sealing)

    @property
    def receivers(self) -> tuple[str, ...]:
        return tuple(self._queues)

    def on_ack(self, listener: Callable[[str, Ack], None]) -> None:
        """Registers `listener(receiver name, ack)`, which is called in the loop for every acknowledgement."""
        self._listeners.append(listener)

    async def publish(self, version: int) -> None:
        """Returns when the version is staged, so that the tensors may change; delivery goes on in the background."""
        self._background.check()
        await self._sender.stage(version)
        self._staged.add(version)
        self._background.start(self._deliver(version), f"deliver-{version}")

    async def place(self, version: int) -> None:
        """Sends a sealed version to every receiver's evaluation slot, in the background; later receivers get it, too.

        Raises VersionGone if the version is neither among the newest `retain` sealed ones nor retained by `keep`.
        """
        self._background.check()
        async with self._sealing:
            header = self._retained.pop(version, None) or self._headers.get(version)
            if header is None:
                raise VersionGone(f"version {version} can't be evaluated, only {sorted(self._headers)} are retained")
            await self._sender.hold(version)
            before, self._evaluated = self._evaluated, header
            jobs = self._enqueue(header, EVALUATION, list(self._queues.values()))
        self._background.start(self._settle_evaluated(jobs, before), f"evaluate-{version}")

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
        self._background.check()
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
            queue = self._queues[receiver.name] = ReceiverQueue(receiver, self._options, self.stats, self._events)
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
        await self._background.failed()

    async def drain(self) -> None:
        """Waits until all deliveries and replacements are done; raises an error that must stop the run."""
        await self._background.drain()

    async def close(self) -> None:
        """Cancels all deliveries, and what is fetched or passed on for them, and waits until they have ended."""
        queues = [queue.task for queue in self._queues.values()]
        for name in list(self._queues):
            await self.leave(name)
        await asyncio.gather(*queues, return_exceptions=True)
        await self._background.close()
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
        """Broadcasts to idle receivers, if there is a collective transport; returns receiver → Ack or error."""
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
        for old in sorted(self._headers)[: -self._options.retain]:
            del self._headers[old]
        self._sealed.notify_all()
        return header

    def _acknowledge(
        self, header: Header, queues: list[ReceiverQueue], results: dict[str, Ack | BaseException]
    ) -> "dict[str, tuple[ReceiverEndpoint, Job]]":
        """Records the acknowledgements of a broadcast; returns the leaders that it reached, by node."""
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
        """Puts a version into the queues. `holders` (by node) have it already and pass it on within their nodes."""
        if not queues:
            return []
        jobs = planned(header, slot, self._payload(header), queues, holders, self._options)
        for queue in queues:
            if self._queues.get(queue.name) is queue:
                queue.put(jobs[queue.name])
            else:
                jobs[queue.name].settle(False)
        return list(jobs.values())

    def _payload(self, header: Header) -> "asyncio.Future[Any]":
        payload = asyncio.ensure_future(self._sender.payload(header.version))
        self._background.add(payload)
        return payload

    async def _superseded(self, job: Job) -> bool:
        # Whether newer versions take the place of one that the sender has dropped, perhaps before it has sealed the
        # newest of them, for which this waits up to a receiver's deadline.
        if job.slot != RING:
            return False
        try:
            async with asyncio.timeout(self._options.deadline), self._sealed:
                return await self._sealed.wait_for(lambda: job.header.version not in self._headers)
        except TimeoutError:
            return False

    async def _settle(self, jobs: Sequence[Job]) -> bool:
        for job in jobs:
            await self._background.until(job.done)
        return all(job.done.result() for job in jobs)

    async def _settle_evaluated(self, jobs: Sequence[Job], before: Header | None) -> None:
        await self._settle(jobs)
        if before is not None and self._evaluated is not None and before.version != self._evaluated.version:
            await self._sender.release(before.version)

    def _acknowledged(self, name: str, ack: Ack) -> None:
        for listener in self._listeners:
            listener(name, ack)

    def _retire(self, queue: ReceiverQueue, error: BaseException) -> None:
        if self._queues.get(queue.name) is queue:
            del self._queues[queue.name]
        self._background.start(self._replace(queue.name, error), f"replace-{queue.name}")
        queue.abandon()
