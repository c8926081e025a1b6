"""Process group of one epoch, which moves bytes between its members: torch's, beside any default group."""

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from checkpoint_engine.errors import TransferFailed

BUCKET_BYTES = 8 << 20
TARGET_BUCKETS = 12
"""Buckets per broadcast, about: more cost round trips, fewer leave less to do beside each other."""
MAX_BUCKET_GROWTH = 4
"""Buckets grow with the payload, to so many times BUCKET_BYTES."""
MAX_BUCKETS_UNDER_WAY = 6
"""Enough to keep a link busy while a bucket is digested."""
MIN_GLOO_CONNECTIONS = 2
"""Between two members. Gloo serves each by a thread of its own, and one thread can't keep both of its ends busy."""
POLL_SECONDS = 5e-4
ABORT_LATENCY = timedelta(milliseconds=20)
"""Of a thread that waits for gloo."""
MIN_BYTES_PER_SECOND = 50e6
"""The slowest link that is waited for."""
GROUP_TIMEOUT = timedelta(days=1)
"""Of an NCCL group: torch's watchdog, which ends the process, must never come before our own limits."""
SENDER = 0
"""Rank of the sender in every epoch."""


@dataclass(frozen=True)
class Epoch:
    """One membership: who meets where.

    A collective may take `seconds`, and more by its bytes over MIN_BYTES_PER_SECOND; the set-up may take
    `setup_seconds`, or as long where that is None.
    """

    number: int
    secret: str
    host: str
    port: int
    world: int
    seconds: float
    setup_seconds: float | None = None

    @property
    def setup(self) -> timedelta:
        """How long the set-up may take."""
        return timedelta(seconds=self.seconds if self.setup_seconds is None else self.setup_seconds)

    def limit(self, nbytes: int) -> float:
        """Seconds that a collective of so many bytes may take."""
        return self.seconds + nbytes / MIN_BYTES_PER_SECOND

    @property
    def prefix(self) -> str:
        return f"{self.secret}/{self.number}"


@dataclass(frozen=True)
class Limit:
    """The end of a wait: an abort, or a time of time.monotonic."""

    aborted: threading.Event
    seconds: float
    end: float

    @classmethod
    def of(cls, aborted: threading.Event, seconds: float) -> "Limit":
        return cls(aborted, seconds, time.monotonic() + seconds)

    def check(self) -> None:
        """Raises TransferFailed when the wait is over."""
        if self.aborted.is_set():
            raise TransferFailed("aborted")
        if time.monotonic() > self.end:
            raise TransferFailed(f"no answer within {self.seconds:g} s")

    def pause(self) -> None:
        """A moment's wait, ended by an abort; then `check`."""
        self.aborted.wait(POLL_SECONDS)
        self.check()


class Link(Protocol):
    """What moves bytes between the members of one epoch."""

    def open(self, store: Store, epoch: Epoch, rank: int) -> None: ...

    def broadcast(
        self, buffer: Tensor, limit: Limit, seen: Callable[[int], None], behind: Callable[[], Tensor]
    ) -> None:
        """Fills the buffer uint8 [n] of every member with the sender's, bucket by bucket. Raises TransferFailed.

        `seen(end)` is called beside the transfer of other buckets: when the bytes up to `end` have come or left, or, of
        host memory, are about to leave, so that they leave from the cache. `behind()` gives a buffer uint8 [m] that
        follows in the same way.
        """

    def abort(self) -> None: ...


class TorchLink:
    """A torch process group that is not, and does not touch, the default group."""

    def __init__(self, backend: str) -> None:
        if backend == "nccl" and not dist.is_nccl_available():
            raise ValueError(
                "transport nccl needs a torch built with NCCL; this one has none (use gloo or object_store)"
            )
        self.backend = backend
        self.group: Any = None
        self._sends = False
        self._in_use: list[Tensor] = []
        """What a collective that was cut off may still read or write: kept until the group is gone."""
        self._broadcasting = threading.Lock()

    def open(self, store: Store, epoch: Epoch, rank: int) -> None:
        self._sends = rank == SENDER
        if self.backend == "gloo":
            self.group = gloo_group(store, rank, epoch)
        else:
            self.group = nccl_group(store, rank, epoch.world)

    def broadcast(
        self, buffer: Tensor, limit: Limit, seen: Callable[[int], None], behind: Callable[[], Tensor]
    ) -> None:
        options, end = dist.BroadcastOptions(), 0
        options.rootRank, options.rootTensor = SENDER, 0
        early = self._sends and not buffer.is_cuda
        under_way: deque[tuple[Any, int | None]] = deque()
        with self._broadcasting:
            group = self.group
            if group is None:
                raise TransferFailed("the group is not open")
            self._in_use = [buffer]
            try:
                for bucket in torch.split(buffer, bucket_bytes(buffer.shape[0])):
                    end += bucket.shape[0]
                    if early:
                        seen(end)
                    under_way.append((group.broadcast([bucket], options), None if early else end))
                    if len(under_way) == MAX_BUCKETS_UNDER_WAY:
                        self._settle(*under_way.popleft(), limit, seen)
                self._in_use.append(behind())
                under_way.append((group.broadcast([self._in_use[1]], options), None))
                while under_way:
                    self._settle(*under_way.popleft(), limit, seen)
            finally:
                del group  # or the traceback of a failure would keep it
            if buffer.is_cuda:
                torch.cuda.current_stream(buffer.device).synchronize()
            self._in_use = []

    def _settle(self, work: Any, end: int | None, limit: Limit, seen: Callable[[int], None]) -> None:
        """Waits for a bucket; `seen` is told that it ends at byte `end` of the buffer, unless that is None."""
        while not work.is_completed():
            if self.backend == "gloo":
                _wait(work)
                limit.check()
            else:
                limit.pause()  # NCCL's own wait with a time-out ends the whole group at that time-out
        if self.backend == "nccl" and (error := work.exception()) is not None:
            raise TransferFailed(f"NCCL: {error}")  # a collective that failed counts as completed too
        work.wait()
        if end is not None:
            seen(end)

    def abort(self) -> None:
        """Ends a broadcast under way. The group is torn down here, which may wait for a peer until the deadline."""
        group, self.group = self.group, None
        if group is not None:
            group.abort()
            with self._broadcasting:
                del group
                self._in_use = []


def bucket_bytes(nbytes: int) -> int:
    """Bytes of a bucket for a payload of `nbytes`, the same at every member."""
    return BUCKET_BYTES * max(1, min(MAX_BUCKET_GROWTH, -(-nbytes // (TARGET_BUCKETS * BUCKET_BYTES))))


def gloo_group(store: Store, rank: int, epoch: Epoch) -> Any:
    """A group on the interfaces of GLOO_SOCKET_IFNAME, else on the address by which this member reaches the sender.

    Torch's default is the address that the machine's own name stands for, which may be loopback.
    """
    made: Any = dist.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    own = "" if names else address_towards(epoch.host, epoch.port)
    options = made._Options()
    options._timeout = epoch.setup
    options._devices = [
        made.create_device(interface=names[i % len(names)]) if names else made.create_device(hostname=own)
        for i in range(max(MIN_GLOO_CONNECTIONS, len(names)))
    ]
    options._threads = max(MAX_BUCKETS_UNDER_WAY, 2 * len(names))
    return made(store, rank, epoch.world, options)


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to a host, as the routing table has it; nothing is sent. Raises OSError."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def nccl_group(store: Store, rank: int, world: int) -> Any:
    """A group on the calling thread's current GPU, connected: it waits for its peers here, not in the first collective.

    NCCL does that without a limit and deaf to aborts, so it must happen where somebody watches the clock.
    """
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = GROUP_TIMEOUT
    with _ENVIRONMENT, _variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", ABORT_ONLY):
        group = dist.ProcessGroupNCCL(store, rank, world, options)
    group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return group


_ENVIRONMENT = threading.Lock()
ABORT_ONLY = "2"
"""By default torch's watchdog ends the process when a peer fails; so it aborts the communicator only."""


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """An environment variable that a constructor reads, for as long as it runs."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _wait(work: Any) -> None:
    """Waits without the interpreter's lock and is woken at completion, success or not: the next wait tells."""
    with contextlib.suppress(RuntimeError):
        work.wait(ABORT_LATENCY)
