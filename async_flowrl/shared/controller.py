"""The controller's part of `placement=shared`: deadlines, announced versions, and which processes train."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from async_flowrl.config.schema import Config
from async_flowrl.controller.deadlines import TICKETS_PER_WORKER, SeparatePools
from async_flowrl.controller.endpoints import RolloutEndpoint
from async_flowrl.types import POLICY
from checkpoint_engine import RING, Ack, DeliveryOptions, Header
from separation.group import Worker
from separation.supervise import DeadlineExceeded, deadline, supervised

# Number of receivers that the sender serves itself, larger than any pool: no receiver passes a version on.
UNLIMITED_FAN_OUT = 1 << 30


async def _hung(worker: Worker, seconds: float, what: str) -> None:
    """Asks the worker every `seconds` for how long it has computed its present ticket; runs until it is cancelled.

    Raises DeadlineExceeded if that is longer than `seconds`, or if the worker does not answer within `seconds`.
    """
    while True:
        await asyncio.sleep(seconds)
        async with deadline(seconds, f"{what}: {worker.name}'s answer how long it has been at that"):
            at_work: float = await worker.call("seconds_at_work", lane="control")
        if at_work > seconds:
            raise DeadlineExceeded(what, seconds)


class LocalVersions(RolloutEndpoint):
    """Receiver in a process that also trains, which takes versions from its own trainer rank.

    All ranks step by the same exact sum, so each makes every version itself. A version is announced, and its digest
    compared; the bytes are sent only if the rank has not made it, e.g. after it has just joined.
    """

    async def receive(self, header: Header, payload: Any, slot: str = RING) -> Ack:
        """Delivers the version. Raises WeightsMismatch if the process's rank has made other weights."""
        if header.stream == POLICY:
            ack: Ack | None = await self._deliver("keep_local", header, slot)
            if ack is not None:
                return ack
        return await super().receive(header, payload, slot)


class SharedPool(SeparatePools):
    """The controller's view of processes that sample and train: rollout worker i and trainer rank i are one process.

    A ticket may wait for training and training for a ticket. `generate_seconds` is longer than `update_seconds`, which
    is longer than `_hung` needs to find a ticket that hangs. So the deadline of the call that hangs passes before that
    of the call that waits for it, and the error names the one that hangs.
    """

    endpoint = LocalVersions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.training = set[int]()

    def generate_seconds(self, tickets: int) -> float:
        """As in SeparatePools; the tickets may have to wait for a whole training step and then for one more call."""
        return super().generate_seconds(tickets) + 2 * self.update_seconds(self.config.prompts_per_step + 1)

    def update_seconds(self, calls: int) -> float:
        """As in SeparatePools; the calls may have to wait for the ticket that the process is making.

        If that ticket hangs, `_hung` finds it within two times `deadlines.generate` per ticket of the worker, which has
        at most TICKETS_PER_WORKER batches of tickets. This deadline is longer.
        """
        config = self.config
        waiting = (2 * TICKETS_PER_WORKER + 1) * config.deadlines.generate * config.rollout.tickets_per_batch
        return super().update_seconds(calls) + waiting

    @asynccontextmanager
    async def time_for_tickets(self, worker: Worker, tickets: int, what: str) -> AsyncIterator[None]:
        """As in SeparatePools; the time in which the worker's process trains does not count."""
        seconds = self.config.deadlines.generate * tickets
        async with super().time_for_tickets(worker, tickets, what), supervised(_hung(worker, seconds, what)):
            yield

    def delivery_options(self, stream: str) -> DeliveryOptions:
        """As in SeparatePools; versions of the policy are announced, so nobody has to pass them on."""
        options = super().delivery_options(stream)
        if stream != POLICY:
            return options
        return replace(options, max_fan_out=UNLIMITED_FAN_OUT, node_fan_out=UNLIMITED_FAN_OUT)

    def begin_training(self, ranks: Iterable[int]) -> None:
        self.training.update(ranks)

    def end_training(self, ranks: Iterable[int]) -> set[int]:
        """As in SeparatePools; a process without training work can make tickets again."""
        ended = self.training.intersection(ranks)
        self.training -= ended
        return ended

    def trains(self, index: int) -> bool:
        return index in self.training
