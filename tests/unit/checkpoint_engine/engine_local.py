"""A sender and receivers in one process that meet over gloo."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from torch import Tensor

from checkpoint_engine import RING, Ack, Delivery, Header, Publisher, Receiver, TransferFailed
from checkpoint_engine.base import Draft
from checkpoint_engine.collective import CollectiveReceiver
from checkpoint_engine.collective_delivery import CollectiveBroadcast
from checkpoint_engine.process_group import Epoch
from examples.checkpoint_engine.piped_processes import ProcessSender, read
from tests.unit.checkpoint_engine.engine_parts import ALPHA, PATIENCE, RANK, blank


class Local:
    """A receiver of this process that can join groups."""

    def __init__(self, tensors: dict[str, Tensor], name: str, node: str = "local") -> None:
        self.receiver, self.name, self.node = Receiver(blank(tensors), alpha=ALPHA, rank=RANK), name, node
        self.group = CollectiveReceiver(self.receiver)

    async def receive(self, header: Header, payload: Any, slot: str = RING) -> Ack:
        return await asyncio.to_thread(self.receiver.receive, header, read(payload.reference), slot)

    async def relay(self, header: Header, slot: str = RING) -> Any:
        raise TransferFailed("nothing is passed on here")

    async def open_group(self, epoch: Epoch, rank: int) -> None:
        await asyncio.to_thread(self.group.open, epoch, rank)

    async def ready(self, epoch: int, draft: Draft) -> None:
        self.group.ready(epoch, draft)

    async def accept(self, draft: Draft) -> Ack:
        return await asyncio.to_thread(self.group.accept, draft)

    async def abort_group(self) -> None:
        self.group.abort()


class Linked:
    """A publisher that delivers to receivers of this process, none of which may be given up."""

    def __init__(self, tensors: dict[str, Tensor], **options: Any) -> None:
        self.publisher = Publisher(tensors, alpha=ALPHA, rank=RANK)
        self.sender = ProcessSender(self.publisher, "gloo")
        self.broadcast = CollectiveBroadcast(self.sender, setup_seconds=PATIENCE, ready_seconds=PATIENCE, **options)
        self.delivery = Delivery(self.sender, replace=self.replace, broadcast=self.broadcast)

    async def replace(self, name: str, error: BaseException) -> None:
        raise AssertionError(f"{name} was given up") from error

    async def publish(self, version: int) -> None:
        await self.delivery.publish(version)
        await self.delivery.drain()


@contextlib.asynccontextmanager
async def linked(tensors: dict[str, Tensor], ends: Sequence[Local], **options: Any) -> AsyncIterator[Linked]:
    made = Linked(tensors, **options)
    try:
        async with asyncio.timeout(240.0):
            for end in ends:
                await made.delivery.join(end)
            yield made
    finally:
        await made.delivery.close()
        made.sender.close()
        for end in ends:
            end.group.abort()
