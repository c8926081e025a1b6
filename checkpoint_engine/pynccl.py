"""Broadcasts over NCCL through cupy, without torch.distributed's groups. Unverified: it has not run on a GPU yet.

`pip install async-flowrl[nccl]` brings cupy, which uses the libnccl.so.2 that torch has loaded. The communicator's
unique id travels through the epoch's store.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from checkpoint_engine.errors import TransferFailed
from checkpoint_engine.process_group import SENDER, Epoch, Limit, bucket_bytes
from checkpoint_engine.side_stream import concrete, cuda

UNIQUE_ID_KEY = "nccl-unique-id"


def load_nccl() -> Any:
    """cupy's NCCL binding. Raises ValueError in one sentence where there is none, or an older one than 14."""
    try:
        import cupy
        from cupy.cuda import nccl
    except ImportError as error:
        raise ValueError(
            f"transport pynccl needs cupy, which could not be imported ({error}): "
            "pip install async-flowrl[nccl], or use nccl, gloo or object_store"
        ) from error
    if int(cupy.__version__.split(".")[0]) < 14:
        raise ValueError(f"transport pynccl needs cupy 14 or newer, this is {cupy.__version__}")
    if not nccl.available:
        raise ValueError(
            "transport pynccl needs libnccl.so.2, which cupy did not find: a torch for CUDA brings it "
            "(nvidia-nccl-cu12 or nvidia-nccl-cu13); or use gloo or object_store"
        )
    return nccl


class PyncclLink:
    """A `Link` on one NcclCommunicator and one CUDA stream of its own."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._nccl = load_nccl()
        self._device = concrete(device)
        self._communicator: Any = None
        self._stream: Any = None
        self._asking = threading.Lock()

    def open(self, store: Store, epoch: Epoch, rank: int) -> None:
        """The sender makes the unique id; every other member waits for it in the store, until the store's time-out.

        NCCL waits for the members without a limit. Raises TransferFailed.
        """
        with torch.cuda.device(self._device), _named("joining"):
            if rank == SENDER:
                store.set(UNIQUE_ID_KEY, self._nccl.get_unique_id().hex())
            unique_id = bytes.fromhex(store.get(UNIQUE_ID_KEY).decode())
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
        # NCCL gets a bare address: after an abort nothing else would keep the memory from being given to others.
        buffer.record_stream(stream)
        with torch.cuda.device(self._device):
            for bucket in torch.split(buffer, bucket_bytes(buffer.shape[0])):
                pointer, count = bucket.data_ptr(), bucket.shape[0]
                with _named("broadcast"):
                    communicator.broadcast(pointer, pointer, count, self._nccl.NCCL_UINT8, SENDER, stream.cuda_stream)
                done = cuda.Event()
                done.record(stream)
                under_way.append((done, count))
        end = 0
        for done, count in under_way:
            while not done.query():
                self._check(communicator)
                limit.pause()
            end += count
            seen(end)
        self._check(communicator)

    def _check(self, communicator: Any) -> None:
        """Raises TransferFailed where NCCL has noticed that a peer is gone; the kernel would wait for it for ever.

        A communicator that `abort` frees in another thread must not be asked any more.
        """
        with self._asking, _named("broadcast"):
            if communicator is not self._communicator:
                raise TransferFailed("aborted")
            communicator.check_async_error()

    def abort(self) -> None:
        """Frees whoever waits in a kernel of this communicator, here."""
        with self._asking:
            communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()


@contextmanager
def _named(what: str) -> Iterator[None]:
    """cupy's NcclError is a RuntimeError; for a code that it has no name for, making one raises a KeyError."""
    try:
        yield
    except (RuntimeError, KeyError) as error:
        raise TransferFailed(f"NCCL, {what}: {error}") from error
