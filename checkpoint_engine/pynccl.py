"""PyncclLink broadcasts over NCCL through cupy, without a torch process group. It has not run on a GPU yet."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from checkpoint_engine.errors import TransferFailed
from checkpoint_engine.process_group import SENDER, Epoch, Limit, bucket_bytes
from checkpoint_engine.side_stream import cuda

UNIQUE_ID_KEY = "nccl-unique-id"


def load_nccl() -> Any:
    """Returns cupy's NCCL binding. Raises ValueError, one sentence, if there is none or cupy is older than 14."""
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
    """A Link (process_group.py) with one NCCL communicator and one CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._nccl = load_nccl()
        self._device = device
        self._communicator: Any = None
        self._stream: Any = None
        self._asking = threading.Lock()

    def open(self, store: Store, epoch: Epoch, rank: int) -> None:
        """Joins the group: the sender writes the unique id to the store, and the others wait for it. TransferFailed."""
        # That wait ends at the store's time-out; the wait of NCCL for all members has no limit.
        with torch.cuda.device(self._device), _named("joining"):
            if rank == SENDER:
                store.set(UNIQUE_ID_KEY, self._nccl.get_unique_id().hex())
            unique_id = bytes.fromhex(store.get(UNIQUE_ID_KEY).decode())
            self._communicator = self._nccl.NcclCommunicator(epoch.world, unique_id, rank)
            self._stream = cuda.Stream(self._device)

    def broadcast(
        self, buffer: Tensor, limit: Limit, arrived: Callable[[int], None], behind: Callable[[], Tensor]
    ) -> None:
        """Copies the sender's buffer uint8 [n] to every member's device; see `Link`. Raises TransferFailed."""
        self._fill(buffer, limit, arrived)
        self._fill(behind(), limit, lambda end: None)

    def _fill(self, buffer: Tensor, limit: Limit, arrived: Callable[[int], None]) -> None:
        communicator, stream = self._communicator, self._stream
        if communicator is None or stream is None:
            raise TransferFailed("the group is not open")
        under_way: list[tuple[Any, int]] = []
        stream.wait_stream(torch.cuda.current_stream(self._device))
        # NCCL gets only an address; without this, torch could reuse the memory after an abort while NCCL writes to it.
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
            arrived(end)
        self._check(communicator)

    def _check(self, communicator: Any) -> None:
        # Raises TransferFailed if NCCL has noticed that a peer is gone, for which its kernel would wait for ever. The
        # lock keeps `abort` in another thread from freeing the communicator meanwhile.
        with self._asking, _named("broadcast"):
            if communicator is not self._communicator:
                raise TransferFailed("aborted")
            communicator.check_async_error()

    def abort(self) -> None:
        """Aborts the communicator, which ends kernels of this process that wait in it."""
        with self._asking:
            communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, KeyError) as error:
        raise TransferFailed(f"NCCL, {what}: {error}") from error
