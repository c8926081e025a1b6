"""Links move the bytes of broadcasts between the members of one epoch; TorchLink uses its own torch process group."""

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType, Store

from checkpoint_engine.errors import TransferFailed
from checkpoint_engine.side_stream import recorded

BUCKET_BYTES = 8 << 20  # Smallest size of the pieces (buckets) in which a payload is broadcast.
# Approximate number of buckets per broadcast: more cost round trips, fewer leave less work that can overlap.
TARGET_BUCKETS = 12
MAX_BUCKET_GROWTH = 4  # Buckets grow with the payload up to this multiple of BUCKET_BYTES.
# Number of buckets that are sent at a time, enough to keep the network busy while a bucket is digested.
MAX_BUCKETS_UNDER_WAY = 6
# Connections between two members. Gloo serves each by one thread, which alone cannot keep both ends busy.
MIN_GLOO_CONNECTIONS = 2
POLL_SECONDS = 5e-4
ABORT_LATENCY = timedelta(milliseconds=20)  # Longest time until a thread that waits for gloo notices an abort.
MIN_BYTES_PER_SECOND = 50e6  # Time limits of transfers assume at least this speed.
# Time-out of an NCCL group, so long that torch's watchdog never acts before the limits of this module.
GROUP_TIMEOUT = timedelta(days=1)
SENDER = 0  # Rank of the sender in every epoch.


@dataclass(frozen=True)
class Epoch:
    """One group, whose `world` members meet at the TCP store `host`:`port` within `setup_seconds` (None: `seconds`).

    A collective may take `seconds` plus its bytes / MIN_BYTES_PER_SECOND.
    """

    transport: str
    number: int
    secret: str
    host: str
    port: int
    world: int
    seconds: float
    setup_seconds: float | None = None

    @property
    def setup(self) -> timedelta:
        return timedelta(seconds=self.seconds if self.setup_seconds is None else self.setup_seconds)

    def limit(self, nbytes: int) -> float:
        return self.seconds + nbytes / MIN_BYTES_PER_SECOND

    @property
    def prefix(self) -> str:
        return f"{self.secret}/{self.number}"


class Limit:
    """The limit of a wait: an abort, or the time `end` of time.monotonic()."""

    def __init__(self, aborted: threading.Event, seconds: float) -> None:
        self.aborted, self.seconds, self.end = aborted, seconds, time.monotonic() + seconds

    def check(self) -> None:
        if self.aborted.is_set():
            raise TransferFailed("aborted")
        if time.monotonic() > self.end:
            raise TransferFailed(f"no answer within {self.seconds:g} s")

    def pause(self) -> None:
        self.aborted.wait(POLL_SECONDS)
        self.check()


class Link(Protocol):
    def open(self, store: Store, epoch: Epoch, rank: int) -> None: ...

    def broadcast(
        self, buffer: Tensor, limit: Limit, arrived: Callable[[int], None], behind: Callable[[], Tensor]
    ) -> None:
        """Copies the sender's buffer uint8 [n] to every member's, bucket by bucket. Raises TransferFailed.

        `seen(end)` is called, while other buckets are transferred, when the bytes up to `end` have arrived or left; for
        a sender's buffer in host memory, just before they leave, so that they are in the CPU cache. `behind()` returns
        a buffer uint8 [m] that is broadcast after the first.
        """

    def abort(self) -> None: ...


class TorchLink:
    """A Link by a torch process group of the backend gloo or nccl, separate from the default group."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.group: Any = None
        self._sends = False
        # Buffers that an aborted collective may still read or write, kept until the group has been destroyed.
        self.in_use: list[Tensor] = []
        self._broadcasting = threading.Lock()

    def open(self, store: Store, epoch: Epoch, rank: int) -> None:
        self._sends = rank == SENDER
        if self.backend == "gloo":
            self.group = gloo_group(store, rank, epoch)
        else:
            self.group = nccl_group(store, rank, epoch.world)

    def broadcast(
        self, buffer: Tensor, limit: Limit, arrived: Callable[[int], None], behind: Callable[[], Tensor]
    ) -> None:
        options, end = dist.BroadcastOptions(), 0
        options.rootRank, options.rootTensor = SENDER, 0
        early = self._sends and not buffer.is_cuda
        under_way: deque[tuple[Any, int | None]] = deque()
        with self._broadcasting:
            group = self.group
            if group is None:
                raise TransferFailed("the group is not open")
            self.in_use = [buffer]
            try:
                for bucket in torch.split(buffer, bucket_bytes(buffer.shape[0])):
                    end += bucket.shape[0]
                    if early:
                        arrived(end)
                    under_way.append((group.broadcast([bucket], options), None if early else end))
                    if len(under_way) == MAX_BUCKETS_UNDER_WAY:
                        self._settle(*under_way.popleft(), limit, arrived)
                self.in_use.append(behind())
                under_way.append((group.broadcast([self.in_use[1]], options), None))
                while under_way:
                    self._settle(*under_way.popleft(), limit, arrived)
            finally:
                del group  # a traceback would keep the group alive
            if buffer.is_cuda:
                torch.cuda.current_stream(buffer.device).synchronize()
            self.in_use = []

    def _settle(self, work: Any, end: int | None, limit: Limit, arrived: Callable[[int], None]) -> None:
        while not work.is_completed():
            if self.backend == "gloo":
                with contextlib.suppress(RuntimeError):  # `work.wait()` below raises it
                    work.wait(ABORT_LATENCY)
                limit.check()
            else:
                limit.pause()  # NCCL's own wait with a time-out ends the whole group at that time-out
        work.wait()
        if self.backend == "nccl":
            # A collective that failed counts as completed, too, but the stream gets past it only when torch's watchdog
            # has noted the error and aborted the group. (`work.exception()` is a TypeError in torch 2.11.)
            passed = recorded(self.in_use[0].device)
            while passed is not None and not passed.query():
                self._check_nccl()  # the abort itself may hang
                limit.pause()
            self._check_nccl()
        if end is not None:
            arrived(end)

    def _check_nccl(self) -> None:
        group = self.group
        if group is None:
            raise TransferFailed("aborted")
        if (error := group.get_error()) != ErrorType.SUCCESS:
            raise TransferFailed(f"NCCL: {error.name}; the cause is in what torch logs in this process")

    def abort(self) -> None:
        """Aborts a broadcast under way and destroys the group, which may wait for a peer until the deadline."""
        group, self.group = self.group, None
        if group is not None:
            group.abort()
            with self._broadcasting:
                del group
                self.in_use = []


def bucket_bytes(nbytes: int) -> int:
    """Returns the size of a bucket for a payload of `nbytes` bytes, the same at every member."""
    return BUCKET_BYTES * max(1, min(MAX_BUCKET_GROWTH, -(-nbytes // (TARGET_BUCKETS * BUCKET_BYTES))))


def gloo_group(store: Store, rank: int, epoch: Epoch) -> Any:
    """Returns a gloo group on the interfaces GLOO_SOCKET_IFNAME, else on the address that leads to the sender."""
    # Torch's default, the address of the machine's host name, may be loopback.
    gloo: Any = dist.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    hostname = "" if names else address_towards(epoch.host, epoch.port)
    options = gloo._Options()
    options._timeout = epoch.setup
    options._devices = [
        gloo.create_device(interface=names[i % len(names)]) if names else gloo.create_device(hostname=hostname)
        for i in range(max(MIN_GLOO_CONNECTIONS, len(names)))
    ]
    options._threads = max(MAX_BUCKETS_UNDER_WAY, 2 * len(names))
    return gloo(store, rank, epoch.world, options)


def address_towards(host: str, port: int) -> str:
    """Returns this machine's address on the route to a host, by the routing table. Raises OSError if there is none."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def nccl_group(store: Store, rank: int, world: int) -> Any:
    """Returns an NCCL group on the calling thread's current GPU that is already connected to its peers."""
    # Connecting has no time limit and cannot be aborted, so it must be done in a thread that `Member.open` watches.
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = GROUP_TIMEOUT
    with _ENVIRONMENT, _variables(NCCL_ABORT_ONLY):
        group = dist.ProcessGroupNCCL(store, rank, world, options)
    group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return group


_ENVIRONMENT = threading.Lock()
# If a peer fails, torch's watchdog only aborts the communicator, and nobody ends this process where the abort hangs; by
# default either would.
NCCL_ABORT_ONLY = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.pop(name, None) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
