"""The members' side of collective transports: broadcasts of versions over a process group of gloo or NCCL.

Members meet at a TCP store, once per epoch (set of members). Every wait has a time limit, and on the first failure all
members abort, which frees those that still wait. Collectives of one process run in one thread, in one order.
"""

import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from checkpoint_engine.base import Ack, Draft
from checkpoint_engine.errors import TransferFailed, WeightsMismatch
from checkpoint_engine.incremental import trailer, trailer_bytes
from checkpoint_engine.process_group import POLL_SECONDS, SENDER, Epoch, Limit, Link
from checkpoint_engine.publisher import SealedVersions
from checkpoint_engine.receiver import Receiver
from checkpoint_engine.side_stream import SideStream, concrete, on
from checkpoint_engine.transports import GLOO, make_link


class Member:
    """Membership of one process in the group of each epoch. Any thread may call `abort` at any time."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """`device`: of versions; `cuda` is the calling thread's current GPU."""
        self._home = concrete(device)
        self._device = self._home  # Device of the link's buffers.
        self._side: SideStream | None = None
        self.link: Link | None = None
        self.epoch: Epoch | None = None
        self._stores: list[Store] = []
        self._buffer: Tensor | None = None
        self._aborted = threading.Event()

    def open(self, epoch: Epoch, rank: int = SENDER) -> None:
        """Joins the epoch's group at the store that the sender serves. Raises TransferFailed, also if aborted.

        Raises ValueError for a transport that cannot be used with this device, or whose library is missing.
        """
        # A separate thread does the work, because torch cannot be interrupted and exceeds its time-out if peers are
        # missing.

        def failed(why: str) -> TransferFailed:
            return TransferFailed(f"epoch {epoch.number} could not be opened as rank {rank}: {why}")

        self.abort()
        self._device = torch.device("cpu") if epoch.transport == GLOO else self._home
        self._side = SideStream.of(self._device)
        aborted = self._aborted = threading.Event()
        meeting: Future[tuple[Link, list[Store]]] = Future()
        _beside("open-group", lambda: self._meet(meeting, epoch, rank))
        seconds = epoch.setup.total_seconds()
        limit = time.monotonic() + seconds
        while not meeting.done():
            if aborted.wait(POLL_SECONDS) or time.monotonic() > limit:
                meeting.add_done_callback(_discard)
                raise failed("aborted" if aborted.is_set() else f"not everybody came within {seconds:g} s")
        try:
            self.link, self._stores = meeting.result()
        except RuntimeError as error:
            raise failed(_first_line(error)) from error
        self.epoch = epoch
        if aborted.is_set():
            self.abort()
            raise failed("aborted")

    def _meet(self, meeting: "Future[tuple[Link, list[Store]]]", epoch: Epoch, rank: int) -> None:
        link = None
        try:
            link = self.new_link(epoch.transport)
            # A new connection, as that of an earlier epoch may still wait for a missing peer.
            store = TCPStore(epoch.host, epoch.port, None, False, epoch.setup, wait_for_workers=False)
            prefixed = PrefixStore(epoch.prefix, store)
            with on(self._side):
                link.open(prefixed, epoch, rank)
                if self._device.type == "cuda":
                    self._connect(link, epoch)
        except BaseException as error:  # raised where `open` waits for it
            meeting.set_exception(error)
            if link is not None:
                _beside("abort-group", link.abort)
        else:
            meeting.set_result((link, [store, prefixed]))

    def new_link(self, transport: str) -> Link:
        return make_link(transport, self._device)

    def _connect(self, link: Link, epoch: Epoch) -> None:
        # Broadcasts one byte, in which NCCL (since 2.22) connects its ranks. This may take as long as the rest of the
        # set-up, so it is done within the set-up's limit, not a delivery's.
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        limit = Limit(threading.Event(), epoch.setup.total_seconds())
        link.broadcast(byte, limit, lambda end: None, lambda: torch.zeros_like(byte))

    def ready(self, epoch: int, draft: Draft) -> None:
        """Raises TransferFailed if this member is not in the epoch."""
        if self.epoch is None or self.epoch.number != epoch:
            raise TransferFailed(f"not a member of epoch {epoch}")

    def broadcast(self, buffer: Tensor, arrived: Callable[[int], None], behind: Callable[[], Tensor]) -> None:
        link, epoch = self.link, self.epoch
        if link is None or epoch is None:
            raise TransferFailed("broadcast before the members were ready")
        try:
            link.broadcast(buffer, Limit(self._aborted, epoch.limit(buffer.shape[0])), arrived, behind)
        except WeightsMismatch:
            self.abort()
            raise
        except RuntimeError as error:
            self.abort()
            raise TransferFailed(f"broadcast in epoch {epoch.number} failed: {_first_line(error)}") from error

    def abort(self) -> None:
        """Leaves the epoch. A collective under way raises TransferFailed here, and at the other members."""
        self._aborted.set()
        link, self.link, self.epoch = self.link, None, None
        self._stores, self._buffer = [], None  # an aborted collective may still write to this buffer
        if link is not None:
            # In a thread: the abort waits for the group's threads, which may wait for a peer until the deadline.
            _beside("abort-group", link.abort)


class CollectiveSender(Member):
    """The sending process's side: serves the store and broadcasts a publisher's versions; see SenderEndpoint."""

    def __init__(self, publisher: SealedVersions, device: torch.device | str = "cpu") -> None:
        super().__init__(device)
        self._publisher = publisher
        self._server: TCPStore | None = None

    def address(self, host: str = "127.0.0.1") -> tuple[str, int]:
        """Returns host and port of the store where members meet; the store lives as long as this object."""
        if self._server is None:
            limit = timedelta(seconds=300)
            self._server = TCPStore(host, 0, None, True, limit, wait_for_workers=False)
        return host, self._server.port

    def send(self, draft: Draft) -> None:
        """Broadcasts a version, and seals it meanwhile if it is not sealed. Raises TransferFailed or VersionGone."""
        sealing = self._publisher.begin(draft.version)

        def digests() -> Tensor:
            return torch.frombuffer(bytearray(trailer(sealing.digested())), dtype=torch.uint8).to(self._device)

        try:
            with on(self._side):
                self.broadcast(sealing.on(self._device), sealing.feed, digests)
        finally:
            sealing.finish()


class CollectiveReceiver(Member):
    """Takes broadcasts for a Receiver, which verifies them; see ReceiverEndpoint."""

    def __init__(self, receiver: Receiver, device: torch.device | str = "cpu") -> None:
        super().__init__(device)
        self._receiver = receiver

    def ready(self, epoch: int, draft: Draft) -> None:
        """Raises TransferFailed if this is not the present epoch, WeightsMismatch if the version does not fit."""
        super().ready(epoch, draft)
        self._receiver.check(draft)

    def accept(self, draft: Draft) -> Ack:
        """Receives a broadcast into the ring (on a GPU, or where the link's buffer is) and digests it meanwhile.

        Raises TransferFailed, TransferCorrupted or WeightsMismatch.
        """
        intake = self._receiver.expect(draft)
        with on(intake.side):
            digests = torch.empty(trailer_bytes(draft.layout), dtype=torch.uint8, device=self._device)
            if intake.storage.device == self._device:
                self.broadcast(intake.storage, intake.arrived, lambda: digests)
            else:
                room = self._buffer
                if room is None or room.shape[0] != draft.nbytes:
                    room = self._buffer = torch.empty(draft.nbytes, dtype=torch.uint8)
                data = room.numpy()
                self.broadcast(room, lambda end: intake.take(data[intake.digests.end : end]), lambda: digests)
            return intake.accept_with(digests.cpu().numpy())


_BESIDE: set[threading.Thread] = set()
MAX_EXIT_SECONDS = 5.0  # Longest time that a process waits at its exit for the threads that open and abort groups.


def _beside(name: str, work: Callable[[], None]) -> None:

    def run() -> None:
        try:
            work()
        finally:
            _BESIDE.discard(thread)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _BESIDE.add(thread)
    thread.start()


@atexit.register
def _wait_beside() -> None:
    # A thread that returns from C++ after the interpreter has ended aborts the process (SIGABRT).
    limit = time.monotonic() + MAX_EXIT_SECONDS
    for thread in list(_BESIDE):
        thread.join(max(0.0, limit - time.monotonic()))


def _discard(meeting: "Future[tuple[Link, list[Store]]]") -> None:
    if meeting.exception() is None:
        meeting.result()[0].abort()


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
