"""A sender and receivers in one process that meet over gloo, with link faults that a test chooses."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from torch import Tensor

from checkpoint_engine import RING, Ack, Delivery, Header, Publisher, Receiver, TransferFailed
from checkpoint_engine.base import Draft
from checkpoint_engine.collective import CollectiveReceiver
from checkpoint_engine.collective_delivery import CollectiveBroadcast
from checkpoint_engine.process_group import Epoch, Limit, TorchLink
from examples.checkpoint_engine.piped_processes import ProcessSender, read
from tests.unit.checkpoint_engine.engine_parts import ALPHA, PATIENCE, RANK, blank, lora


def gloo() -> TorchLink:
    return TorchLink("gloo")


class Local:
    """A receiver of this process that can join groups."""

    node = "local"

    def __init__(
        self, receiver: Receiver, name: str, link: Callable[[], TorchLink] = lambda: TorchLink("gloo")
    ) -> None:
        self.receiver, self.name = receiver, name
        self.group = CollectiveReceiver(receiver)
        self.group.new_link = lambda transport: link()  # type: ignore[method-assign]

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


TRAILER, PAYLOAD = range(1 << 9), range(1 << 9, 1 << 40)
"""Their lengths, here."""


class FlippingLink(TorchLink):
    """Flips a bit of the `at`-th byte of what it receives, where that is of one of these lengths."""

    def __init__(self, at: int, lengths: range) -> None:
        super().__init__("gloo")
        self.at, self.lengths = at, lengths

    def broadcast(
        self, buffer: Tensor, limit: Limit, seen: Callable[[int], None], behind: Callable[[], Tensor]
    ) -> None:
        last, left = behind(), True

        def spoil(end: int) -> None:
            nonlocal left
            if left and buffer.shape[0] in self.lengths and self.at < end:
                buffer[self.at] ^= 1
                left = False
            seen(end)

        super().broadcast(buffer, limit, spoil, lambda: last)
        if last.shape[0] in self.lengths:
            last[self.at] ^= 1


class LinkedRig:
    """One publisher and receivers in this process, over gloo."""

    def __init__(self, tensors: dict[str, Tensor], *, link: Callable[[], TorchLink] | None = None) -> None:
        self.tensors = tensors
        self.publisher = Publisher(tensors, alpha=ALPHA, rank=RANK)
        self.sender = ProcessSender(self.publisher, "gloo")
        self.replaced: list[str] = []
        self.broadcast = CollectiveBroadcast(self.sender, setup_seconds=PATIENCE, ready_seconds=PATIENCE)
        self.delivery = Delivery(self.sender, replace=self.replace, broadcast=self.broadcast)
        self.link = link or gloo
        self.ends: list[Local] = []

    async def replace(self, name: str, error: BaseException) -> None:
        self.replaced.append(name)

    async def join(self, name: str, **options: float) -> Local:
        options = {"alpha": ALPHA, "rank": RANK} | options
        end = Local(Receiver(blank(self.tensors), **options), name, self.link)  # type: ignore[arg-type]
        self.ends.append(end)
        await self.delivery.join(end)
        return end

    async def publish(self, version: int) -> None:
        await self.delivery.publish(version)
        await self.delivery.drain()


@contextlib.asynccontextmanager
async def linked(*, link: Callable[[], TorchLink] | None = None, width: int = 512) -> AsyncIterator[LinkedRig]:
    made = LinkedRig(lora(width=width), link=link)
    try:
        async with asyncio.timeout(240.0):
            yield made
    finally:
        await made.delivery.close()
        made.sender.close()
        for end in made.ends:
            end.group.abort()
