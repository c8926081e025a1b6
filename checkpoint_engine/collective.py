"""Broadcasts over a process group of their own: gloo or nccl through torch.distributed, beside any default group.

One group per membership epoch, on a store prefix that carries the run's secret. Before each collective every member
says that it is ready; each has a finite deadline; on the first failure all members abort, which frees those still
waiting, and whoever lacks the version gets it another way. Collectives of one process run on one lane, in the order
in which the controller starts them.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from checkpoint_engine.base import RING, Ack, Header
from checkpoint_engine.errors import TransferFailed
from checkpoint_engine.publisher import Publisher
from checkpoint_engine.receiver import Receiver

BUCKET_BYTES = 64 << 20
POLL_SECONDS = 5e-4
SENDER = 0
"""Rank of the sender in every epoch."""


@dataclass(frozen=True)
class Epoch:
    """One membership: who meets where. `seconds` bounds the set-up and each collective."""

    number: int
    secret: str
    host: str
    port: int
    world: int
    seconds: float

    @property
    def prefix(self) -> str:
        return f"{self.secret}/{self.number}"


class Link(Protocol):
    """What moves bytes between the members of one epoch."""

    def open(self, store: Store, epoch: Epoch, rank: int) -> None: ...

    def broadcast(self, buffer: Tensor, aborted: threading.Event, seconds: float) -> None:
        """Fills the buffer uint8 [n] of every member with the sender's. Raises TransferFailed."""
        ...

    def abort(self) -> None: ...


class TorchLink:
    """A torch process group that is not, and does not touch, the default group."""

    def __init__(self, backend: str) -> None:
        if backend == "nccl" and not dist.is_nccl_available():
            raise ValueError(
                "transport nccl needs a torch built with NCCL; this one has none (use gloo or object_store)"
            )
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"a torch link is gloo or nccl, got {backend!r}")
        self.backend = backend
        self._group: Any = None

    def open(self, store: Store, epoch: Epoch, rank: int) -> None:
        limit = timedelta(seconds=epoch.seconds)
        if self.backend == "gloo":
            self._group = dist.ProcessGroupGloo(store, rank, epoch.world, limit)
        else:
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(store, rank, epoch.world, options)

    def broadcast(self, buffer: Tensor, aborted: threading.Event, seconds: float) -> None:
        group, limit = self._group, time.monotonic() + seconds
        if group is None:
            raise TransferFailed("the group is not open")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        for bucket in torch.split(buffer, BUCKET_BYTES):
            work = group.broadcast([bucket], options)
            while not work.is_completed():
                if aborted.wait(POLL_SECONDS) or time.monotonic() > limit:
                    raise TransferFailed("aborted" if aborted.is_set() else f"no answer within {seconds:g} s")
            work.wait()
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()

    def abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class Member:
    """One process's place in the group, epoch after epoch. `abort` may come from another thread at any time."""

    def __init__(self, link: Callable[[], Link], device: torch.device | str = "cpu") -> None:
        """`device` is where the link's buffers live."""
        self._make, self._device = link, torch.device(device)
        self._link: Link | None = None
        self._epoch: Epoch | None = None
        self._stores: list[Store] = []
        self._buffer: Tensor | None = None
        self._aborted = threading.Event()

    def open(self, epoch: Epoch, rank: int, store: Store | None = None) -> None:
        """Meets the other members; the sender brings the store it serves. Raises TransferFailed.

        The meeting is a thread's: torch can't be interrupted in it and exceeds its time-out where peers are missing.
        """
        self.abort()
        aborted = self._aborted = threading.Event()
        meeting: Future[tuple[Link, list[Store]]] = Future()
        arguments = (meeting, epoch, rank, store)
        threading.Thread(target=self._meet, args=arguments, name="open-group", daemon=True).start()
        limit = time.monotonic() + epoch.seconds
        while not meeting.done():
            if aborted.wait(POLL_SECONDS) or time.monotonic() > limit:
                meeting.add_done_callback(_discard)
                why = "aborted" if aborted.is_set() else f"not everybody came within {epoch.seconds:g} s"
                raise TransferFailed(f"epoch {epoch.number} could not be opened as rank {rank}: {why}")
        try:
            self._link, self._stores = meeting.result()
        except RuntimeError as error:
            raise TransferFailed(
                f"epoch {epoch.number} could not be opened as rank {rank}: {_first_line(error)}"
            ) from error
        self._epoch = epoch
        if aborted.is_set():
            self.abort()
            raise TransferFailed(f"epoch {epoch.number} could not be opened as rank {rank}: aborted")

    def _meet(self, meeting: "Future[tuple[Link, list[Store]]]", epoch: Epoch, rank: int, store: Store | None) -> None:
        try:
            if store is None:
                limit = timedelta(seconds=epoch.seconds)
                store = TCPStore(epoch.host, epoch.port, None, False, limit, wait_for_workers=False)
            prefixed, link = PrefixStore(epoch.prefix, store), self._make()
            link.open(prefixed, epoch, rank)
        except BaseException as error:  # raised where `open` waits for it
            meeting.set_exception(error)
        else:
            meeting.set_result((link, [store, prefixed]))

    def ready(self, epoch: int, nbytes: int) -> None:
        """Confirms that this member is in the epoch and has room for a payload. Raises TransferFailed."""
        if self._epoch is None or self._epoch.number != epoch:
            raise TransferFailed(f"not a member of epoch {epoch}")
        if self._buffer is None or self._buffer.shape[0] != nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def broadcast(self, payload: Tensor | None = None) -> Tensor:
        """Sends the payload uint8 [n] (the sender), or receives it, on the host; valid until the next broadcast."""
        link, epoch, buffer = self._link, self._epoch, self._buffer
        if link is None or epoch is None or buffer is None:
            raise TransferFailed("broadcast before the members were ready")
        if payload is not None:
            buffer = payload if self._device.type == "cpu" else buffer.copy_(payload)
        try:
            link.broadcast(buffer, self._aborted, epoch.seconds)
        except RuntimeError as error:
            self.abort()
            raise TransferFailed(f"broadcast in epoch {epoch.number} failed: {_first_line(error)}") from error
        return buffer.cpu()

    def abort(self) -> None:
        """Leaves the epoch; a collective under way ends with TransferFailed, here and at the other members."""
        self._aborted.set()
        link, self._link, self._epoch = self._link, None, None
        self._stores = []
        if link is not None:
            # Tearing a group down waits for its threads, which may wait for a peer until the deadline.
            threading.Thread(target=link.abort, name="abort-group", daemon=True).start()

    def close(self) -> None:
        self.abort()
        self._buffer = None


class CollectiveSender:
    """The sending process's part: serves the store, and sends what a publisher retains."""

    def __init__(self, publisher: Publisher, member: Member, *, host: str = "127.0.0.1") -> None:
        self._publisher, self._member, self._host = publisher, member, host
        self._server: TCPStore | None = None

    def address(self) -> tuple[str, int]:
        """Where the members meet: host and port of a store that lives as long as this object."""
        if self._server is None:
            limit = timedelta(seconds=300)
            self._server = TCPStore(self._host, 0, None, True, limit, wait_for_workers=False)
        return self._host, self._server.port

    def open(self, epoch: Epoch, rank: int = SENDER) -> None:
        self.address()
        if self._server is None:
            raise TransferFailed("the sender is closed")
        self._server.set_timeout(timedelta(seconds=epoch.seconds))
        self._member.open(epoch, rank, self._server)

    def ready(self, epoch: int, header: Header) -> None:
        self._member.ready(epoch, header.nbytes)

    def send(self, header: Header) -> None:
        """Broadcasts a retained version. Raises TransferFailed, VersionGone."""
        self._member.broadcast(torch.from_numpy(self._publisher.payload(header.version)[1]))

    def abort(self) -> None:
        self._member.abort()

    def close(self) -> None:
        self._member.close()
        self._server = None


class CollectiveReceiver:
    """A receiving process's part: takes a broadcast and hands it to the receiver, which verifies it."""

    def __init__(self, receiver: Receiver, member: Member) -> None:
        self._receiver, self._member = receiver, member

    def open(self, epoch: Epoch, rank: int) -> None:
        self._member.open(epoch, rank)

    def ready(self, epoch: int, header: Header) -> None:
        self._member.ready(epoch, header.nbytes)

    def accept(self, header: Header, slot: str = RING) -> Ack:
        """Raises TransferFailed, and whatever `Receiver.receive` raises."""
        return self._receiver.receive(header, self._member.broadcast(), slot)

    def abort(self) -> None:
        self._member.abort()

    def close(self) -> None:
        self._member.close()


def _discard(meeting: "Future[tuple[Link, list[Store]]]") -> None:
    """A group that opened after it was given up."""
    if meeting.exception() is None:
        meeting.result()[0].abort()


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
