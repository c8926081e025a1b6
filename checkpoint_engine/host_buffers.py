"""Host memory for payloads, used again: a fresh page costs several times as much as the copy into it."""

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from checkpoint_engine.digest import ByteArray
from checkpoint_engine.layout import Layout

SPARE = 2
"""Buffers kept while nobody uses them."""


class HostMemory(Protocol):
    """Where host buffers come from."""

    def allocate(self, nbytes: int) -> ByteArray:
        """A writable buffer uint8 [nbytes]."""
        ...

    def free(self, data: ByteArray) -> None: ...


class PlainMemory:
    """Memory of this process, pinned for copies from a GPU where that is asked for."""

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned

    def allocate(self, nbytes: int) -> ByteArray:
        data: ByteArray = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned).numpy()
        return data

    def free(self, data: ByteArray) -> None:
        """Nothing to do: it goes with the last reference."""


@dataclass(frozen=True)
class HostBuffer:
    """One buffer in use, until nothing refers to `data` or a view of it any more."""

    data: ByteArray
    """uint8 [nbytes]"""
    views: list[Tensor]
    """The layout's tensors in it; they don't keep it in use."""


@dataclass(frozen=True)
class _Owned:
    memory: HostMemory
    data: ByteArray
    views: list[Tensor]


class HostBuffers:
    """Buffers of one layout. Any thread may take one; each returns by itself, in whatever thread it is let go of."""

    def __init__(self, layout: Layout, memory: HostMemory) -> None:
        self._layout, self.memory = layout, memory
        self._spare: deque[_Owned] = deque()

    def use(self, memory: HostMemory) -> None:
        """Takes further buffers from other memory."""
        self.memory = memory
        self._trim(0)

    def reserve(self, count: int) -> None:
        """Makes sure of spare buffers whose pages have been touched."""
        while len(self._spare) < count:
            self._spare.append(self._allocate())

    def take(self) -> HostBuffer:
        try:
            owned = self._spare.pop()
        except IndexError:
            owned = self._allocate()
        self._trim(SPARE)
        # A view whose base is no array: it lives exactly as long as somebody has it, or an array or tensor made of it.
        data: ByteArray = np.frombuffer(owned.data.data, np.uint8)
        weakref.finalize(data, self._spare.append, owned).atexit = False  # deque.append takes no lock
        return HostBuffer(data, owned.views)

    def _allocate(self) -> _Owned:
        data = self.memory.allocate(self._layout.nbytes)
        data.fill(0)
        return _Owned(self.memory, data, list(self._layout.views(torch.from_numpy(data)).values()))

    def _trim(self, count: int) -> None:
        while len(self._spare) > count:
            try:
                owned = self._spare.popleft()
            except IndexError:
                return
            owned.memory.free(owned.data)
