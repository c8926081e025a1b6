"""Tensors that lie in one storage of host memory, as a trainer's do: they are copied and sampled by few operations."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from checkpoint_engine.digest import ByteArray
from checkpoint_engine.layout import Layout, dtype_of

PLAIN = (Tensor, torch.nn.Parameter)
"""Classes of tensors that have memory; a rehearsed plan computes with subclasses that have none."""
MAX_CACHED_RUNS = 16
"""Largest number of layouts for which it is remembered which bytes are copied together."""


@dataclass(frozen=True)
class Together:
    """Contiguous tensors of one dtype in one storage of host memory."""

    elements: Tensor
    """The whole storage [n] in the dtype of the tensors."""
    offsets: tuple[int, ...]
    """The element at which each tensor begins."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Together | None":
        """Returns the tensors as one, or None where they do not lie so. Where they lie is looked up every time, because
        a parameter may have been given other memory."""
        first = tensors[0]
        if first.device.type != "cpu" or type(first) not in PLAIN:
            return None
        dtype, storage = first.dtype, first.untyped_storage()
        memory, size = storage.data_ptr(), storage.nbytes()  # Two storages may begin at one address.
        offsets: list[int] = []
        for tensor in tensors:
            of_tensor = tensor.untyped_storage()
            same = tensor.dtype is dtype and of_tensor.data_ptr() == memory and of_tensor.nbytes() == size
            if not same or not tensor.is_contiguous():
                return None
            offsets.append(int(tensor.storage_offset()))
        count = size // dtype.itemsize
        return cls(first.detach().as_strided((count,), (1,), 0), tuple(offsets))

    def copy_to(self, layout: Layout, target: ByteArray) -> bool:
        """Copies the tensors into a buffer uint8 [nbytes] with their layout; returns False if they must be cast to it.

        Neighbours are copied at once, by the copy of the C library, which is faster than one thread of torch for some
        hundred megabytes, because it then does not read the target into the cache.
        """
        runs = _runs(layout, self.offsets, self.elements.dtype)
        if runs is None:
            return False
        memory: ByteArray = self.elements.view(torch.uint8).numpy()
        for start, place, size in runs:
            target[place : place + size] = memory[start : start + size]
        return True


@lru_cache(MAX_CACHED_RUNS)
def _runs(layout: Layout, offsets: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, int, int], ...] | None:
    """Returns first byte in the storage, first byte in the layout, and size, of tensors that adjoin each other in both.

    None if tensors are sent in another dtype.
    """
    runs: list[tuple[int, int, int]] = []
    for entry, offset in zip(layout.entries, offsets, strict=True):
        if dtype_of(entry) is not dtype:
            return None
        begin = offset * dtype.itemsize
        start, place, size = runs[-1] if runs else (begin, entry.offset, 0)
        if (start + size, place + size) == (begin, entry.offset):
            runs[-1:] = [(start, place, size + entry.nbytes)]
        else:
            runs.append((begin, entry.offset, entry.nbytes))
    return tuple(runs)
