"""Broadcasts over NCCL through cupy, without torch.distributed's groups. Unverified: it has not run on a GPU yet.

`pip install async-flowrl[nccl]` brings cupy. The communicator's unique id travels through the epoch's store.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from checkpoint_engine.errors import TransferFailed
from checkpoint_engine.process_group import BUCKET_BYTES, SENDER, Epoch, Limit

UNIQUE_ID_KEY = "nccl-unique-id"
cuda: Any = torch.cuda
"""Its stream and event classes are untyped."""


def load_nccl() -> Any:
    """cupy's NCCL binding. Raises ValueError in one sentence where there is none."""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise ValueError(
            f"transport pynccl needs cupy with NCCL, which could not be imported ({error}): "
            "pip install async-flowrl[nccl], or use nccl, gloo or object_store"
        ) from error
    if not nccl.available:
        raise ValueError("transport pynccl needs a cupy built with NCCL; this one has none")
    return nccl


class PyncclLink:
    """A `Link` on one NcclCommunicator and one CUDA stream of its own."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._nccl = load_nccl()
        self._device = torch.device(device)
        self._communicator: Any = None
        self._stream: Any = None

    def open(self, store: Store, epoch: Epoch, rank: int) -> None:
        """The sender makes the unique id; every other member waits for it in the store, until the store's time-out."""
        if rank == SENDER:
            store.set(UNIQUE_ID_KEY, as_text(self._nccl.get_unique_id()))
        unique_id = from_text(store.get(UNIQUE_ID_KEY).decode())
        with torch.cuda.device(self._device):
            self._communicator = self._nccl.NcclCommunicator(epoch.world, unique_id, rank)
            self._stream = cuda.Stream(self._device)

    def broadcast(
        self, buffer: Tensor, limit: Limit, seen: Callable[[int], None], behind: Callable[[], Tensor]
    ) -> None:
        """Fills the buffer uint8 [n] on the device of every member with the sender's. Raises TransferFailed."""
        self._fill(buffer, limit, seen)
        self._fill(behind(), limit, lambda end: None)

    def _fill(self, buffer: Tensor, limit: Limit, seen: Callable[[int], None]) -> None:
        communicator, stream = self._communicator, self._stream
        if communicator is None or stream is None:
            raise TransferFailed("the group is not open")
        under_way: list[tuple[Any, int]] = []
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            for start in range(0, buffer.shape[0], BUCKET_BYTES):
                bucket = buffer[start : start + BUCKET_BYTES]
                pointer, count = bucket.data_ptr(), bucket.shape[0]
                communicator.broadcast(pointer, pointer, count, self._nccl.NCCL_UINT8, SENDER, stream.cuda_stream)
                done = cuda.Event()
                done.record(stream)
                under_way.append((done, start + count))
        for done, end in under_way:
            while not done.query():
                limit.pause()
            seen(end)
        communicator.check_async_error()

    def abort(self) -> None:
        """Frees whoever waits in a kernel of this communicator, here."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()


def as_text(unique_id: tuple[int, ...]) -> str:
    """cupy gives the id as 128 signed numbers; as text they are hexadecimal bytes."""
    return bytes(value & 0xFF for value in unique_id).hex()


def from_text(text: str) -> tuple[int, ...]:
    """The inverse of `as_text`."""
    return tuple(value - 256 if value > 127 else value for value in bytes.fromhex(text))
