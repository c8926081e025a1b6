"""Copies between GPU and host on a CUDA stream of their own, through pinned (page-locked) memory.

A copy on the default stream would begin only after all work that the main thread has queued there: a whole image, or a
whole optimizer step.
"""

import functools
import logging
import mmap
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from checkpoint_engine.digest import ByteArray

logger = logging.getLogger(__name__)

PINNED_BLOCK_BYTES = 4 << 20  # Bytes of one copy between host and GPU.
cuda: Any = torch.cuda  # torch.cuda as Any, because its streams, events and functions of CUDA's runtime have no types.


def concrete(device: torch.device | str) -> torch.device:
    """Returns the device with its index; for `cuda` without one, the calling thread's current GPU."""
    named = torch.device(device)
    return torch.device("cuda", cuda.current_device()) if named.type == "cuda" and named.index is None else named


class SideStream:
    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, cuda.Stream(device)

    @classmethod
    def of(cls, device: torch.device) -> "SideStream | None":
        """Returns a new stream; None on a CPU, where copies are synchronous."""
        return cls(device) if device.type == "cuda" else None

    @contextmanager
    def current(self) -> Iterator[None]:
        with cuda.device(self._device), cuda.stream(self._stream):
            yield

    def wait(self, event: Any) -> None:
        if event is not None:
            self._stream.wait_event(event)

    def record(self) -> Any:
        """Returns an event after the work queued so far. A thread that waits for it sleeps instead of spinning."""
        event = cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def synchronize(self) -> None:
        self._stream.synchronize()


def on(side: SideStream | None) -> AbstractContextManager[None]:
    return nullcontext() if side is None else side.current()


def recorded(device: torch.device) -> Any:
    """Returns an event after what the calling thread has queued on a device; None on a CPU."""
    if device.type != "cuda":
        return None
    event = cuda.Event()
    event.record(cuda.current_stream(device))
    return event


class HostCopy:
    """An asynchronous copy of a GPU buffer uint8 [n] into pinned host memory, block by block."""

    # The buffer must be complete at the start, because the copy waits for no stream but `side`, and must not change
    # until `wait` has returned for its last byte. Where the copy is dropped before, its end is waited for, because only
    # then may its memory be used for something else or released.

    def __init__(self, source: Tensor, target: Tensor, side: SideStream) -> None:
        self.source, self._end = source, 0
        self._under_way: deque[tuple[int, Any]] = deque()
        weakref.finalize(self, _wait_for_rest, self._under_way, (source, target)).atexit = False
        with side.current():
            for start in range(0, source.shape[0], PINNED_BLOCK_BYTES):
                end = min(start + PINNED_BLOCK_BYTES, source.shape[0])
                target[start:end].copy_(source[start:end], non_blocking=True)
                self._under_way.append((end, side.record()))

    def wait(self, end: int) -> None:
        while self._end < end:
            self._end, event = self._under_way.popleft()
            event.synchronize()


def _wait_for_rest(under_way: deque[tuple[int, Any]], memory: tuple[Tensor, Tensor]) -> None:
    # Nobody has waited for these blocks; `memory`, the two ends of the copy, is referred to until they are done.
    if under_way:
        _, last = under_way[-1]
        last.synchronize()


@dataclass
class _Block:
    memory: Tensor  # uint8 [PINNED_BLOCK_BYTES], pinned
    copied: Any = None  # Event after the last copy from or to the block; None before the first.

    def settle(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


class PinnedBlocks:
    """Two pinned blocks for copies to or from a GPU: one is copied while the other is digested."""

    def __init__(self, side: SideStream) -> None:
        self._side = side
        new = (torch.empty(PINNED_BLOCK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
        self._blocks = deque(_Block(memory) for memory in new)

    def upload(self, data: ByteArray, target: Tensor) -> ByteArray:
        """Copies host bytes [n <= PINNED_BLOCK_BYTES] to `target` on the GPU; returns their copy in pinned memory."""
        block = self._next()
        block.settle()
        staged = block.memory[: data.shape[0]]
        copied: ByteArray = staged.numpy()
        copied[:] = data
        self._copy(target, staged, block)
        return copied

    def download(self, source: Tensor) -> Iterator[ByteArray]:
        """Yields the bytes of `source` [n] on the GPU in blocks; each is valid until the next one is requested."""
        coming: tuple[_Block, int] | None = None
        for part in torch.split(source, PINNED_BLOCK_BYTES):
            block = self._next()
            self._copy(block.memory[: part.shape[0]], part, block)
            if coming is not None:
                yield _arrived(*coming)
            coming = block, part.shape[0]
        if coming is not None:
            yield _arrived(*coming)

    def settle(self) -> None:
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


EXACT_FROM_BYTES = 1 << 30  # Size from which a buffer is page-locked by itself instead of rounded up to a power of two.


def pinned_bytes(nbytes: int) -> int:
    if nbytes < EXACT_FROM_BYTES:
        return 1 << max(0, nbytes - 1).bit_length()
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def pinned(nbytes: int) -> Tensor:
    """Returns a page-locked buffer uint8 [nbytes] in host memory, with any contents. Needs a CUDA device.

    Whoever queues a copy must refer to the buffer until it has ended, as HostCopy does. Raises MemoryError if CUDA
    cannot page-lock the memory, OSError if there is none.
    """
    # torch's allocator rounds up to a power of two, so a version of 41 GB would take 64 GiB. A large buffer is
    # therefore ordinary memory that CUDA page-locks. A small one comes from torch's allocator, which keeps it:
    # page-locking and releasing may wait for the whole GPU.
    if nbytes < EXACT_FROM_BYTES or not page_locks():
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.from_numpy(_locked(pinned_bytes(nbytes)))[:nbytes]


class PageLockRefused(MemoryError):
    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code  # Of CUDA's runtime.


UNSUPPORTED = (304, 800, 801)  # cudaErrorOperatingSystem, cudaErrorNotPermitted, cudaErrorNotSupported


@functools.cache
def page_locks() -> bool:
    """Returns whether CUDA page-locks ordinary memory, which some virtual machines and sandboxes refuse. Asked once.

    Raises MemoryError if it could, but has no room.
    """
    try:
        _locked(mmap.PAGESIZE)
    except PageLockRefused as error:
        if error.code not in UNSUPPORTED:
            raise
        logger.warning("large buffers take up to twice their size of host memory here: %s", error)
        forget_error()
        return False
    return True


def forget_error() -> None:
    """Takes the calling thread's last error from CUDA: torch would raise it when it next launches a kernel there."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _locked(size: int) -> ByteArray:
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_DONTFORK)  # after a fork, a page that this process writes would be replaced by a copy
    memory = np.frombuffer(mapping, np.uint8)
    address = memory.ctypes.data
    _check(cuda.cudart().cudaHostRegister(address, size, 0), f"page-lock {size:,} bytes of host memory")
    # Each tensor and array made of this array refers to it, so it ends when nothing can use the memory any more.
    weakref.finalize(memory, _release, address, mapping).atexit = False
    return memory


def _release(address: int, mapping: mmap.mmap) -> None:
    # The mapping is unmapped only after this call, since it is referred to until then.
    _check(cuda.cudart().cudaHostUnregister(address), f"release {len(mapping):,} page-locked bytes")


def _check(code: int, what: str) -> None:
    if int(code) != 0:
        raise PageLockRefused(int(code), f"CUDA can't {what}: {cuda.cudart().cudaGetErrorString(code)}")
