"""A delivery in virtual time whose ends are in memory, with faults that a test chooses."""

import asyncio
from collections.abc import Callable
from typing import Any

from checkpoint_engine import Delivery, DeliveryOptions, Publisher, Receiver
from tests.unit.checkpoint_engine.engine_parts import ALPHA, RANK, End, Sender, blank, flipped, lora


class Rig:
    """A delivery with ends in memory; replacements join by themselves when `replacing`."""

    def __init__(self, *, capacity: int = 2, replacing: bool = False, **options: Any) -> None:
        self.tensors = lora(modules=1, width=8)
        self.sender = Sender(Publisher(self.tensors, alpha=ALPHA, rank=RANK, retain=capacity))
        self.capacity, self.replacing = capacity, replacing
        self.replaced: list[tuple[str, str]] = []
        self.ends: dict[str, End] = {}
        self.options = DeliveryOptions(retain=capacity, **options)
        self.delivery = Delivery(self.sender, replace=self.replace, options=self.options)

    def end(self, name: str, fault: Callable[..., Any] | None = None, node: str = "n0") -> End:
        receiver = Receiver(blank(self.tensors), alpha=ALPHA, rank=RANK, capacity=self.capacity)
        self.ends[name] = End(receiver, name, fault=fault, node=node)
        return self.ends[name]

    async def join(self, name: str, fault: Callable[..., Any] | None = None, node: str = "n0") -> None:
        await self.delivery.join(self.end(name, fault, node), ())

    async def replace(self, name: str, error: BaseException) -> None:
        self.replaced.append((name, type(error).__name__))
        if self.replacing:
            await asyncio.sleep(1.0)
            await self.delivery.join(self.end(f"{name}'"), self.sender.publisher.retained())

    async def publish(self, *versions: int) -> None:
        for version in versions:
            await self.delivery.publish(version)
            await self.delivery.drain()

    def held(self, name: str) -> list[int]:
        return [version for _, version, slot in self.ends[name].receiver.held() if slot == "ring"]


def failing(times: int, error: Callable[[], BaseException] | None = None) -> Callable[..., Any]:
    """The first `times` attempts flip a bit, or raise `error()`."""

    async def fault(attempt: int, header: Any, payload: Any) -> Any:
        if attempt > times:
            return payload
        if error is None:
            return flipped(payload, 3)
        raise error()

    return fault


async def hang(attempt: int, header: Any, payload: Any) -> Any:
    await asyncio.sleep(1e5)
