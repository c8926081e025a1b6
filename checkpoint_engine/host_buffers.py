"""Host buffers for payloads, used again: a fresh page costs several times as much as the copy into it."""

import contextlib
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from checkpoint_engine.digest import ByteArray
from checkpoint_engine.layout import Layout

MAX_SPARE_BUFFERS = 2
"""Buffers that stay allocated while nobody uses them."""


@dataclass(frozen=True)
class HostBuffer:
    """One buffer, in use until nothing refers to `data` or a view of it any more."""

    data: ByteArray
    """uint8 [nbytes]"""
    views: list[Tensor]
    """The layout's tensors in it; they don't keep it in use."""


class HostBuffers:
    """Buffers of one layout. Any thread may take one; each returns by itself, in whatever thread it is let go of."""

    def __init__(self, layout: Layout, *, pinned: bool = False) -> None:
        """`pinned` memory is for copies from a GPU."""
        self._layout, self._pinned = layout, pinned
        self._spare: deque[HostBuffer] = deque()

    def reserve(self, count: int) -> None:
        """Makes sure of spare buffers whose pages have been touched."""
        while len(self._spare) < count:
            self._spare.append(self._allocate())

    def take(self) -> HostBuffer:
        """A spare buffer, or a new one; its bytes are whatever was in it."""
        try:
            buffer = self._spare.pop()
        except IndexError:
            buffer = self._allocate()
        while len(self._spare) > MAX_SPARE_BUFFERS:
            with contextlib.suppress(IndexError):
                self._spare.popleft()
        # A view whose base is no array: it lives exactly as long as somebody has it, or an array or tensor made of it.
        data: ByteArray = np.frombuffer(buffer.data.data, np.uint8)
        weakref.finalize(data, self._spare.append, buffer).atexit = False  # deque.append takes no lock
        return HostBuffer(data, buffer.views)

    def _allocate(self) -> HostBuffer:
        memory = self._layout.empty(pinned=self._pinned).zero_()
        return HostBuffer(memory.numpy(), list(self._layout.views(memory).values()))
