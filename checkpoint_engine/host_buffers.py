"""Reused host buffers for payloads: a page's first use costs several times as much as the copy into it."""

import contextlib
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from checkpoint_engine.digest import ByteArray
from checkpoint_engine.layout import Layout

MAX_SPARE_BUFFERS = 2  # Largest number of unused buffers that stay allocated.


@dataclass(frozen=True)
class HostBuffer:
    """One buffer. It is in use as long as something refers to `data` or to an array or tensor made of `data`."""

    data: ByteArray  # uint8 [nbytes]
    views: list[Tensor]  # The layout's tensors in the buffer; references to them do not keep it in use.


class HostBuffers:
    """Buffers of one layout, for any thread. A buffer becomes spare when the last reference to it is dropped."""

    def __init__(self, layout: Layout, *, pinned: bool = False) -> None:
        """`pinned`: buffers are page-locked, for copies from a GPU."""
        self._layout, self._pinned = layout, pinned
        self._spare: deque[HostBuffer] = deque()

    def reserve(self, count: int) -> None:
        """Allocates and touches buffers until `count` are spare."""
        while len(self._spare) < count:
            self._spare.append(self._allocate())

    def take(self) -> HostBuffer:
        """Returns a spare buffer with its old contents, or a new one."""
        try:
            buffer = self._spare.pop()
        except IndexError:
            buffer = self._allocate()
        while len(self._spare) > MAX_SPARE_BUFFERS:
            with contextlib.suppress(IndexError):
                self._spare.popleft()
        # Made from a memoryview, so that arrays and tensors made of `data` refer to it, not to the buffer's own array.
        data: ByteArray = np.frombuffer(buffer.data.data, np.uint8)
        weakref.finalize(data, self._spare.append, buffer).atexit = False  # deque.append takes no lock
        return HostBuffer(data, buffer.views)

    def _allocate(self) -> HostBuffer:
        memory = self._layout.empty(pinned=self._pinned).zero_()
        return HostBuffer(memory.numpy(), list(self._layout.views(memory).values()))
