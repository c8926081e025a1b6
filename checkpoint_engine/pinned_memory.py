"""Pinned (page-locked) host memory of about the size that is needed, also for whole models.

torch's allocator rounds up to a power of two, so a version of 41 GB would take 64 GiB. A large buffer is therefore
ordinary memory that CUDA page-locks (cudaHostRegister). A small one comes from torch's allocator, which keeps it:
page-locking and releasing may wait for the whole GPU.
"""

import mmap
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

cuda: Any = torch.cuda  # torch.cuda as Any, because its functions of CUDA's runtime have no types.
EXACT_FROM_BYTES = 1 << 30  # Size from which a buffer is page-locked by itself instead of rounded up to a power of two.


def pinned_bytes(nbytes: int) -> int:
    if nbytes < EXACT_FROM_BYTES:
        return 1 << max(0, nbytes - 1).bit_length()
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def pinned(nbytes: int) -> Tensor:
    """Returns a page-locked buffer uint8 [nbytes] in host memory, with any contents. Needs a CUDA device.

    Unlike torch's allocator, this knows nothing of copies that are under way: whoever queues one must refer to the
    buffer until it has ended, as HostCopy (side_stream.py) does. Raises MemoryError if CUDA cannot page-lock the
    memory, OSError if there is none.
    """
    if nbytes < EXACT_FROM_BYTES:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    size = pinned_bytes(nbytes)
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_DONTFORK)  # after a fork, a page that this process writes would be replaced by a copy
    memory = np.frombuffer(mapping, np.uint8)
    address = memory.ctypes.data
    _check(cuda.cudart().cudaHostRegister(address, size, 0), f"page-lock {size:,} bytes of host memory")
    # Each tensor and array made of this array refers to it, so it ends when nothing can use the memory any more.
    weakref.finalize(memory, _release, address, mapping).atexit = False
    return torch.from_numpy(memory)[:nbytes]


def _release(address: int, mapping: mmap.mmap) -> None:
    # The mapping is unmapped only after this call, since it is referred to until then.
    _check(cuda.cudart().cudaHostUnregister(address), f"release {len(mapping):,} page-locked bytes")


def _check(code: int, what: str) -> None:
    if int(code) != 0:
        raise MemoryError(f"CUDA can't {what}: {cuda.cudart().cudaGetErrorString(code)}")
