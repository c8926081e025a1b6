"""Small adapters, and in-memory ends of a delivery with faults that a test chooses."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from checkpoint_engine import RING, Ack, Draft, Header, LoraModule, Publisher, Receiver
from checkpoint_engine.layout import sample as sample_of

RANK, ALPHA = 4, 8.0
PATIENCE = 60.0
"""Seconds for each handshake of a group where nobody is meant to be late: a busy machine takes a few at times."""


def lora(seed: int = 0, *, modules: int = 3, width: int = 16, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for i in range(modules):
        tensors[f"block.{i}.lora_A.weight"] = torch.randn(RANK, width, generator=generator).to(dtype)
        tensors[f"block.{i}.lora_B.weight"] = torch.randn(width, RANK, generator=generator).to(dtype)
    return tensors


def blank(tensors: Mapping[str, Tensor]) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.zeros_like(tensor)) for name, tensor in tensors.items()}


def modules_of(tensors: Mapping[str, Tensor], *, scaling: float = ALPHA / RANK) -> dict[str, LoraModule]:
    names = sorted({name.split(".lora_")[0] for name in tensors})
    return {n: LoraModule(tensors[f"{n}.lora_A.weight"], tensors[f"{n}.lora_B.weight"], scaling) for n in names}


def ends(tensors: Mapping[str, Tensor], *, capacity: int = 2) -> tuple[Publisher, Receiver]:
    publisher = Publisher(tensors, alpha=ALPHA, rank=RANK, retain=capacity)
    return publisher, Receiver(blank(tensors), alpha=ALPHA, rank=RANK, capacity=capacity)


def sealed(publisher: Publisher, version: int) -> tuple[Header, np.ndarray[Any, np.dtype[np.uint8]]]:
    publisher.stage(version)
    publisher.seal(version)
    return publisher.payload(version)


def flipped(data: np.ndarray[Any, np.dtype[np.uint8]], at: int, bit: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    copy = data.copy()
    copy[at] ^= 1 << bit
    return copy


def freeze(publisher: Publisher, version: int) -> None:
    """From now on the publisher stages the bytes of a retained version instead of its tensors."""
    stale = list(publisher.layout.views(torch.from_numpy(publisher.payload(version)[1].copy())).values())
    copy = publisher.copied

    def frozen(slot: int, sources: list[Tensor]) -> Any:
        return replace(copy(slot, stale), sample=sample_of(publisher.layout, sources))

    publisher.copied = frozen  # type: ignore[method-assign]


class Gone(ConnectionError):
    """The receiver's process died."""


class Sender:
    """A publisher behind virtual delays; every element of version v is v."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.served: list[int] = []

    async def stage(self, version: int) -> None:
        for tensor in self.publisher.tensors.values():
            tensor.fill_(float(version))
        self.publisher.stage(version, deadline=0.0)

    async def seal(self, version: int) -> Header:
        await asyncio.sleep(0.1)
        return self.publisher.seal(version)

    async def payload(self, version: int) -> Any:
        self.served.append(version)
        return self.publisher.payload(version)[1]

    async def hold(self, version: int) -> None:
        self.publisher.hold(version)

    async def release(self, version: int) -> None:
        self.publisher.release(version)


class End:
    """A receiver behind `fault(attempt, header, payload)`, which may sleep, raise or return other bytes."""

    def __init__(self, receiver: Receiver, name: str, *, node: str = "n0", fault: Callable[..., Any] | None = None):
        self.receiver, self.name, self.node, self.fault = receiver, name, node, fault
        self.attempts = 0
        self.relayed: list[int] = []

    async def receive(self, header: Header, payload: Any, slot: str = RING) -> Ack:
        self.attempts += 1
        if self.fault is not None:
            payload = await self.fault(self.attempts, header, payload)
        return self.receiver.receive(header, payload, slot)

    async def relay(self, header: Header, slot: str = RING) -> Any:
        self.relayed.append(header.version)
        return self.receiver.export(header.stream, header.version, slot=slot)[1]


def resealed(header: Header, data: np.ndarray[Any, np.dtype[np.uint8]], **changes: Any) -> Header:
    """A header as another sender would honestly have made it."""
    names = ("stream", "version", "layout", "alpha", "rank")
    draft = Draft(**{name: getattr(header, name) for name in names} | changes)
    return draft.sealed(draft.layout.digests(data))
