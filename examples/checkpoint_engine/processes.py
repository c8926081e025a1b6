"""Ends in other processes of one host: calls over a multiprocessing connection, payloads in shared memory.

    publishing process                       connection                    receiving process
    Delivery ─ ProcessSender                                               serve(connection, receiver)
             └ ProcessReceiver ──────────── call, answer ────────────────►   lane "sync", lane "control"

A process that dies is seen at once: its connection ends, and every call under way raises ConnectionResetError.
"""

import asyncio
import itertools
import os
import socket
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from checkpoint_engine.base import RING, Ack, Draft, Header
from checkpoint_engine.collective import CollectiveReceiver, CollectiveSender, Member
from checkpoint_engine.digest import ByteArray
from checkpoint_engine.errors import TransferFailed
from checkpoint_engine.object_store import LocalSender, SharedMemoryStore
from checkpoint_engine.process_group import Epoch
from checkpoint_engine.publisher import Publisher
from checkpoint_engine.receiver import Receiver

CONTROL = "abort_group"
"""The call that must get through while another is under way: it has a thread of its own at the receiver."""
MAPPED = 4
"""Buffers of a publisher that stay mapped at a receiver: mapping costs more than the copy out of it."""
_Call = tuple[int, str, tuple[Any, ...]]


class SharedPayload:
    """A payload in shared memory; it stays there at least as long as something refers to this object."""

    def __init__(self, reference: str, data: ByteArray | None, drop: Callable[[str], None] | None = None) -> None:
        """`data` is what stays in use, `drop` is called with the reference afterwards.

        Without `drop` the segment is one of the publisher's buffers: `lasting`, later versions will be in it too.
        """
        self.reference, self.lasting, self._data = reference, drop is None, data
        if drop is not None:
            weakref.finalize(self, drop, reference)


class ProcessSender(LocalSender):
    """A publisher of this process, whose payloads the other processes of this host can map."""

    def __init__(self, publisher: Publisher, *, member: Member | None = None) -> None:
        """`member` is needed for a collective transport (`make_member`)."""
        super().__init__(publisher)
        self._store = SharedMemoryStore()
        publisher.use_memory(self._store)
        self._payloads: weakref.WeakValueDictionary[int, SharedPayload] = weakref.WeakValueDictionary()
        self._group = None if member is None else CollectiveSender(publisher, member)

    async def payload(self, version: int) -> Any:
        data = self.publisher.payload(version)[1]
        reference = self._store.reference(data)
        if reference is not None:
            return SharedPayload(reference, data)
        found = self._payloads.get(version)
        if found is None:
            found = SharedPayload(await asyncio.to_thread(self._store.put, data), data, self._delete)
            self._payloads[version] = found
        return found

    async def address(self) -> tuple[str, int]:
        return await asyncio.to_thread(self._sender.address)

    async def open_group(self, epoch: Epoch, rank: int) -> None:
        await asyncio.to_thread(self._sender.open, epoch, rank)

    async def ready(self, epoch: int, draft: Draft) -> None:
        self._sender.ready(epoch, draft)

    async def send(self, draft: Draft) -> None:
        await asyncio.to_thread(self._sender.send, draft)

    async def abort_group(self) -> None:
        self._sender.abort()

    def close(self) -> None:
        """Ends the group's store and the shared memory; call it when the delivery is closed."""
        if self._group is not None:
            self._group.close()
        self._store.close()

    def _delete(self, reference: str) -> None:
        """In a thread: giving a segment's pages back takes the kernel longer than a loop may wait."""
        threading.Thread(target=self._store.delete, args=(reference,), daemon=True).start()

    @property
    def _sender(self) -> CollectiveSender:
        if self._group is None:
            raise TransferFailed("this sender has no place in a group: give it a member")
        return self._group


class ProcessReceiver:
    """A receiver that is served in another process, as a delivery sees it. Its calls belong to one running loop."""

    def __init__(self, connection: Connection, name: str, *, node: str = "local") -> None:
        self.name, self.node = name, node
        self._connection = connection
        self._numbers = itertools.count()
        self._calls: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = {}
        self._lock = threading.Lock()
        self._lost = False
        self._outbox: SimpleQueue[_Call | None] = SimpleQueue()
        for work in (self._read, self._write):
            threading.Thread(target=work, name=f"{name}-{work.__name__}", daemon=True).start()

    async def receive(self, header: Header, payload: SharedPayload, slot: str = RING) -> Ack:
        ack: Ack = await self._call("receive", header, payload.reference, slot, payload.lasting)
        return ack

    async def relay(self, header: Header, slot: str = RING) -> SharedPayload:
        return SharedPayload(await self._call("relay", header, slot), None, self._forget)

    async def open_group(self, epoch: Epoch, rank: int) -> None:
        await self._call("open_group", epoch, rank)

    async def ready(self, epoch: int, draft: Draft) -> None:
        await self._call("ready", epoch, draft)

    async def accept(self, draft: Draft) -> Ack:
        ack: Ack = await self._call("accept", draft)
        return ack

    async def abort_group(self) -> None:
        await self._call(CONTROL)

    def close(self) -> None:
        """Hangs up: the other process's `serve` ends, and calls under way raise ConnectionResetError."""
        self._outbox.put(None)

    async def _call(self, method: str, *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        number = next(self._numbers)
        with self._lock:
            if self._lost:
                raise ConnectionResetError(f"{self.name} is gone")
            self._calls[number] = (loop, future)
        self._outbox.put((number, method, arguments))
        return await future

    def _forget(self, reference: str) -> None:
        self._outbox.put((-1, "forget", (reference,)))

    def _write(self) -> None:
        """A thread: a process that does not read must not block the loop."""
        while (call := self._outbox.get()) is not None:
            try:
                self._connection.send(call)
            except OSError:
                return
        with self._lock:
            if not self._connection.closed:
                _hang_up(self._connection)

    def _read(self) -> None:
        try:
            while True:
                number, value, error = self._connection.recv()
                self._answer(number, value, error)
        except (EOFError, OSError):
            with self._lock:
                self._lost = True
                self._connection.close()
                waiting = list(self._calls)
            for number in waiting:
                self._answer(number, None, ConnectionResetError(f"{self.name} is gone"))
            self._outbox.put(None)

    def _answer(self, number: int, value: Any, error: BaseException | None) -> None:
        with self._lock:
            loop, future = self._calls.pop(number, (None, None))
        if loop is None or future is None or loop.is_closed():
            return

        def settle() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

        loop.call_soon_threadsafe(settle)


class serve:  # noqa: N801 - read as a verb
    """Answers a `ProcessReceiver` from threads of this process, beside whatever reads the receiver's tensors.

    A context manager; `connected` turns False when the other side hangs up.
    """

    def __init__(self, connection: Connection, receiver: Receiver, *, member: Member | None = None) -> None:
        self._connection, self._receiver = connection, receiver
        self._store = SharedMemoryStore()
        self._group = None if member is None else CollectiveReceiver(receiver, member)
        self._lock = threading.Lock()
        self._lanes: list[SimpleQueue[_Call | None]] = [SimpleQueue(), SimpleQueue()]
        self._ended = threading.Event()
        for lane in self._lanes:
            threading.Thread(target=self._work, args=(lane,), name="serve", daemon=True).start()
        threading.Thread(target=self._read, name="serve-read", daemon=True).start()

    @property
    def connected(self) -> bool:
        return not self._ended.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Blocks until the other side hangs up; False when it has not after `seconds`."""
        return self._ended.wait(seconds)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._end()

    def __enter__(self) -> "serve":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self) -> None:
        self._ended.set()
        for lane in self._lanes:
            lane.put(None)

    def _read(self) -> None:
        try:
            while True:
                call: _Call = self._connection.recv()
                self._lanes[call[1] == CONTROL].put(call)
        except (EOFError, OSError):
            self._end()

    def _work(self, lane: SimpleQueue[_Call | None]) -> None:
        while (call := lane.get()) is not None:
            number, method, arguments = call
            value, error = None, None
            try:
                value = getattr(self, f"_do_{method}")(*arguments)
            except Exception as raised:  # travels to the caller, who judges it
                error = raised.with_traceback(None)
            if method == "receive":
                self._store.release(arguments[1], keep=MAPPED if arguments[3] else 0)
            try:
                with self._lock:
                    if number >= 0:
                        self._connection.send((number, value, error))
            except OSError:
                return

    def _do_receive(self, header: Header, reference: str, slot: str, lasting: bool) -> Ack:
        return self._receiver.receive(header, self._store.get(reference), slot)

    def _do_relay(self, header: Header, slot: str) -> str:
        held, data = self._receiver.export(header.stream, header.version, slot=slot)
        if held.digest != header.digest:
            raise TransferFailed(f"version {header.version} held here is another one")
        return self._store.put(data)

    def _do_forget(self, reference: str) -> None:
        self._store.delete(reference)

    def _do_open_group(self, epoch: Epoch, rank: int) -> None:
        self._member().open(epoch, rank)

    def _do_ready(self, epoch: int, draft: Draft) -> None:
        self._member().ready(epoch, draft)

    def _do_accept(self, draft: Draft) -> Ack:
        return self._member().accept(draft)

    def _do_abort_group(self) -> None:
        if self._group is not None:
            self._group.abort()

    def _member(self) -> CollectiveReceiver:
        if self._group is None:
            raise TransferFailed("this receiver has no place in a group: serve it with a member")
        return self._group


def _hang_up(connection: Connection) -> None:
    """Ends a connection at both sides; closing it would not, while a thread of this process reads from it."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
