"""ReceiverQueue sends versions to one receiver, in order; delivery.py has one queue per receiver.

A version is sent until it is acknowledged or all retries have failed; then the receiver must be replaced.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checkpoint_engine.base import Ack, DeliveryOptions, DeliveryStats, Header, ReceiverEndpoint, depth, parents
from checkpoint_engine.errors import Verdict, WeightsMismatch, error_names, verdict
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


@dataclass(frozen=True)
class QueueEvents:
    """Callbacks of a receiver queue. The queue ends when it calls `retired` or `failed`."""

    acknowledged: Callable[[str, Ack], None]
    # Called if the receiver must be replaced, with the last error.
    retired: Callable[["ReceiverQueue", BaseException], None]
    failed: Callable[[BaseException], None]  # Called with an error that must stop the run.
    # Fetches the sender's payload of a version once more, after the one of a job was lost with its node.
    payload: Callable[[Header], "asyncio.Future[Any]"]
    # Returns True if newer versions have replaced the one of a job, so that nobody waits for it any more.
    superseded: Callable[["Job"], Awaitable[bool]]
    # Called with a payload that a receiver begins to pass on (`Job.copy`): it must end when the delivery is closed.
    passing_on: Callable[["asyncio.Future[Any]"], None]


class ReceiverQueue:
    """The queue of one receiver. Its task starts at once in the running loop."""

    def __init__(
        self, endpoint: ReceiverEndpoint, options: DeliveryOptions, stats: DeliveryStats, events: QueueEvents
    ) -> None:
        self.endpoint = endpoint
        self._options, self._stats, self._events = options, stats, events
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
        self._stats.acknowledged += 1
        job.settle(True)
        self._events.acknowledged(self.name, ack)

    async def _run(self) -> None:
        try:
            while True:
                self._current = await self._jobs.get()
                error = await self._serve(self._current)
                if error is not None:
                    self._events.retired(self, error)
                    return
                self._current = None
        except Exception as error:  # Delivery.failed() and drain() raise it
            self._events.failed(error)

    async def _serve(self, job: Job) -> BaseException | None:
        # Until the job is acknowledged or needless; returns the last error if the receiver must be replaced.
        # Raises errors that must stop the run.
        error: BaseException | None = None
        for attempt in range(self._options.retries + 1):
            self._stats.retries += attempt > 0
            if error is not None and "RefLost" in error_names(error) and job.parent is None:
                job.payload = self._events.payload(job.header)
            try:
                payload = await self._payload(job)
                async with asyncio.timeout(self._options.deadline):
                    ack = await self.endpoint.receive(job.header, payload, job.slot)
            except Exception as raised:
                error = raised
                judged = verdict(raised)
                if judged is Verdict.STOP:
                    if "VersionGone" not in error_names(raised) or not await self._events.superseded(job):
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

    async def _payload(self, job: Job) -> Any:
        # From the parent in the fan-out tree once, and otherwise from the sender. The sender's payload outlives the
        # version: a parent that has gone on to newer ones (VersionGone) is no error.
        # The sender's payload outlives the version: a parent that has gone on to newer ones (VersionGone) is no error.
        if job.parent is None:
            return await asyncio.shield(job.payload)
        (endpoint, parent), job.parent = job.parent, None
        why: object = "it was given up itself, or too slow"
        if await self._has_it(parent):
            self._events.passing_on(copy := parent.passed_on(endpoint))
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
        """Fails the delivery with an error, unless it has failed already."""
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
