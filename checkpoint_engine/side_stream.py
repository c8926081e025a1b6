"""Copies between a GPU and the host that wait for nobody else's work there: on a stream of their own, by pinned memory.

All threads of a process share the default stream, so a copy on it begins only when everything has ended that the main
lane has queued there: a whole image, or a whole optimizer step.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from checkpoint_engine.digest import ByteArray
from checkpoint_engine.layout import BLOCK_BYTES

cuda: Any = torch.cuda
"""Its stream and event classes are untyped."""


def concrete(device: torch.device | str) -> torch.device:
    """The device with its index, as tensors have it: `cuda` alone is the calling thread's current GPU."""
    named = torch.device(device)
    return torch.device("cuda", cuda.current_device()) if named.type == "cuda" and named.index is None else named


class SideStream:
    """A CUDA stream of one lane's own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, cuda.Stream(device)

    @classmethod
    def of(cls, device: torch.device) -> "SideStream | None":
        """None on a CPU, where copies are done when they return."""
        return cls(device) if device.type == "cuda" else None

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes it the calling thread's stream: for allocations, copies, and collectives, which follow that one."""
        with cuda.device(self._device), cuda.stream(self._stream):
            yield

    def wait(self, event: Any) -> None:
        """Lets what is queued from here on begin after an event; None is in the past."""
        if event is not None:
            self._stream.wait_event(event)

    def record(self) -> Any:
        """An event behind what is queued here. Who synchronises with it sleeps, and doesn't spin."""
        event = cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def synchronize(self) -> None:
        """Returns when everything queued here is done."""
        self._stream.synchronize()


def on(side: SideStream | None) -> AbstractContextManager[None]:
    """`side.current()`, where there is one."""
    return nullcontext() if side is None else side.current()


def recorded(device: torch.device) -> Any:
    """An event behind what the calling thread has queued on a device; None on a CPU."""
    if device.type != "cuda":
        return None
    event = cuda.Event()
    event.record(cuda.current_stream(device))
    return event


class HostCopy:
    """A buffer uint8 [n] of a device on its way into pinned host memory. It must not change before the last byte came.

    What is copied has to be there: the copy waits for no other stream.
    """

    def __init__(self, source: Tensor, target: Tensor, side: SideStream) -> None:
        self.source, self._end = source, 0
        self._under_way: deque[tuple[int, Any]] = deque()
        with side.current():
            for start in range(0, source.shape[0], BLOCK_BYTES):
                end = min(start + BLOCK_BYTES, source.shape[0])
                target[start:end].copy_(source[start:end], non_blocking=True)
                self._under_way.append((end, side.record()))

    def wait(self, end: int) -> None:
        """Returns when the bytes up to `end` are in host memory."""
        while self._end < end:
            self._end, event = self._under_way.popleft()
            event.synchronize()


@dataclass
class _Block:
    memory: Tensor
    """uint8 [BLOCK_BYTES], pinned"""
    copied: Any = None
    """Event behind its last copy."""

    def settle(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


class PinnedBlocks:
    """Two pinned blocks through which bytes go to or come from a device: one travels while the other is digested."""

    def __init__(self, side: SideStream) -> None:
        self._side = side
        self._blocks = deque(_Block(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)) for _ in range(2))

    def upload(self, data: ByteArray, target: Tensor) -> ByteArray:
        """Copies host bytes [n], at most a block, to the device; returns them as they lie in pinned memory."""
        block = self._next()
        block.settle()
        staged = block.memory[: data.shape[0]]
        copied: ByteArray = staged.numpy()
        copied[:] = data
        self._copy(target, staged, block)
        return copied

    def download(self, source: Tensor) -> Iterator[ByteArray]:
        """The device's bytes [n], a block at a time; each is valid until the next one is asked for."""
        coming: tuple[_Block, int] | None = None
        for part in torch.split(source, BLOCK_BYTES):
            block = self._next()
            self._copy(block.memory[: part.shape[0]], part, block)
            if coming is not None:
                yield _arrived(*coming)
            coming = block, part.shape[0]
        if coming is not None:
            yield _arrived(*coming)

    def settle(self) -> None:
        """Returns when every copy is done."""
        self._side.synchronize()

    def _next(self) -> _Block:
        self._blocks.rotate()
        return self._blocks[0]

    def _copy(self, target: Tensor, source: Tensor, block: _Block) -> None:
        with self._side.current():
            target.copy_(source, non_blocking=True)
        block.copied = self._side.record()


def _arrived(block: _Block, nbytes: int) -> ByteArray:
    block.settle()
    data: ByteArray = block.memory[:nbytes].numpy()
    return data
