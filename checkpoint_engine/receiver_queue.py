"""Queue of one receiver: versions reach it in order, each resent until it is acknowledged or given up."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from checkpoint_engine.base import Ack, DeliveryOptions, DeliveryStats, Header, ReceiverEndpoint
from checkpoint_engine.errors import Verdict, WeightsMismatch, error_names, verdict
from checkpoint_engine.process_group import MIN_BYTES_PER_SECOND

logger = logging.getLogger(__name__)

RELAY_SECONDS = 2.0
"""That a receiver may take beside the transfer before those that it is to serve turn to the sender."""


@dataclass
class Job:
    """One version on its way to one receiver. `done` gets True with the acknowledgement, False when given up."""

    header: Header
    slot: str
    payload: Any
    done: "asyncio.Future[bool]"
    parent: "tuple[ReceiverEndpoint, Job] | None" = None
    """Who passes the payload on, in a fan-out tree; None: `payload` is used."""
    depth: int = 0
    """How many pass it on before it is here."""

    def settle(self, acknowledged: bool) -> None:
        if not self.done.done():
            self.done.set_result(acknowledged)


@dataclass(frozen=True)
class QueueEvents:
    """What a receiver queue tells its owner; the last two end it."""

    acknowledged: Callable[[str, Ack], None]
    retired: Callable[["ReceiverQueue", BaseException], None]
    """The receiver must be replaced."""
    failed: Callable[[BaseException], None]
    """The run must stop."""


class ReceiverQueue:
    """Serves one receiver. Starts at once, in the running loop."""

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
        """Gives up every waiting job, and the current one's result."""
        if self._current is not None:
            self._current.settle(False)
        while not self._jobs.empty():
            self._jobs.get_nowait().settle(False)

    def acknowledge(self, job: Job, ack: Ack) -> None:
        """Checks that the acknowledgement names what was sent. Raises WeightsMismatch."""
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
        except Exception as error:  # the top of a supervised task: the run hears of it from failed() and drain()
            self._events.failed(error)

    async def _serve(self, job: Job) -> BaseException | None:
        """Sends until acknowledged; returns the last error when the receiver must be replaced, raises to stop."""
        error: BaseException | None = None
        for attempt in range(self._options.retries + 1):
            self._stats.retries += attempt > 0
            try:
                payload = await self._payload(job)
                async with asyncio.timeout(self._options.deadline):
                    ack = await self.endpoint.receive(job.header, payload, job.slot)
            except Exception as raised:
                error = raised
                judged = verdict(raised)
                if judged is Verdict.STOP:
                    raise
                self._stats.corrupt += "TransferCorrupted" in error_names(raised)
                if judged is Verdict.REPLACE:
                    break
            else:
                self.acknowledge(job, ack)
                return None
        return error

    async def _payload(self, job: Job) -> Any:
        """From the parent in the fan-out tree the first time; from the sender again when that went wrong."""
        if job.parent is None:
            return job.payload
        (endpoint, parent), job.parent = job.parent, None
        why: object = "it was given up itself, or too slow"
        if await self._has_it(parent):
            try:
                async with asyncio.timeout(self._options.deadline):
                    return await endpoint.relay(job.header, job.slot)
            except Exception as error:
                if verdict(error) is Verdict.STOP:
                    raise
                self._stats.fallbacks += 1
                why = repr(error)
        version = f"version {job.header.version} of stream {job.header.stream}"
        logger.warning("%s gets %s from the sender, not passed on by %s: %s", self.name, version, endpoint.name, why)
        return job.payload

    async def _has_it(self, parent: Job) -> bool:
        """Whether the parent acknowledges in time: a slow one must not hold up everybody below it."""
        seconds = (parent.depth + 1) * (RELAY_SECONDS + parent.header.nbytes / MIN_BYTES_PER_SECOND)
        await asyncio.wait([parent.done], timeout=min(seconds, self._options.deadline))
        return parent.done.done() and parent.done.result()
