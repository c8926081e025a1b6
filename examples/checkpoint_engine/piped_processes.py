"""Sender and receiver of a checkpoint_engine `Delivery` for processes of one host, without Ray.

Calls go over pipes, and payloads (the bytes of one version) through shared memory.

    publishing process                        channel                         receiving process
    Delivery ─ ProcessSender                                                  serve(channel, receiver)
             └ ProcessReceiver ───────────── call, answer ─────────────────►

A channel is two connections. One carries the calls, one after another; the other carries only aborts, which must arrive
while a call is still running. A call to a process that has died raises ConnectionResetError.
"""

import asyncio
import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.shared_memory import SharedMemory
from operator import attrgetter
from typing import Any

import numpy as np

from checkpoint_engine import RING, Ack, Draft, Header, Publisher, Receiver, TransferFailed
from checkpoint_engine.collective import CollectiveReceiver, CollectiveSender
from checkpoint_engine.digest import ByteArray
from checkpoint_engine.process_group import Epoch
from checkpoint_engine.transports import OBJECT_STORE

Channel = tuple[Connection, Connection]
"""One end of a channel: the connection for calls and the connection for aborts."""
_Thread = tuple[Connection, ThreadPoolExecutor]
"""A connection and the only thread that uses it."""


def channel(context: BaseContext) -> tuple[Channel, Channel]:
    """Returns the two ends of a new channel: one for this process, one to pass to the other process."""
    (our_calls, their_calls), (our_aborts, their_aborts) = context.Pipe(), context.Pipe()
    return (our_calls, our_aborts), (their_calls, their_aborts)


class SharedPayload:
    """Copy of a payload uint8 [n] in POSIX shared memory; the memory is freed when this object is deleted."""

    def __init__(self, data: ByteArray) -> None:
        segment = SharedMemory(create=True, size=data.shape[0])
        np.ndarray(data.shape, np.uint8, segment.buf)[:] = data
        segment.close()
        self.reference = segment.name
        weakref.finalize(self, segment.unlink)


def read(reference: str) -> ByteArray:
    """Returns a copy, uint8 [n], of the payload in the shared memory named `reference` (`SharedPayload.reference`)."""
    segment = SharedMemory(reference)
    try:
        return np.array(segment.buf)
    finally:
        segment.close()


class ProcessSender:
    """Sender of a delivery whose `Publisher` is in this process (protocol `SenderEndpoint` of checkpoint_engine.base).

    Slow work runs in threads, beside the event loop.
    """

    def __init__(self, publisher: Publisher, transport: str = OBJECT_STORE) -> None:
        self.publisher = publisher
        self._group = None if transport == OBJECT_STORE else CollectiveSender(publisher)

    async def stage(self, version: int) -> None:
        await asyncio.to_thread(self.publisher.stage, version)

    async def seal(self, version: int) -> Header:
        return await asyncio.to_thread(self.publisher.seal, version)

    async def payload(self, version: int) -> SharedPayload:
        return await asyncio.to_thread(SharedPayload, self.publisher.payload(version)[1])

    async def hold(self, version: int) -> None:
        self.publisher.hold(version)

    async def release(self, version: int) -> None:
        self.publisher.release(version)

    async def address(self) -> tuple[str, int]:
        return await asyncio.to_thread(self._sender.address)

    async def open_group(self, epoch: Epoch, rank: int) -> None:
        await asyncio.to_thread(self._sender.open, epoch, rank)

    async def draft(self, version: int) -> Draft:
        return self.publisher.draft(version)

    async def ready(self, epoch: int, draft: Draft) -> None:
        self._sender.ready(epoch, draft)

    async def send(self, draft: Draft) -> None:
        await asyncio.to_thread(self._sender.send, draft)

    async def abort_group(self) -> None:
        self._sender.abort()

    def close(self) -> None:
        """Ends the store at which the group's members meet; call it after closing the delivery."""
        if self._group is not None:
            self._group.abort()
            self._group = None

    @property
    def _sender(self) -> CollectiveSender:
        if self._group is None:
            raise TransferFailed("this sender has no place in a group: give it another transport")
        return self._group


class ProcessReceiver:
    """Receiver of a delivery that lives in another process, which runs `serve` (protocol `ReceiverEndpoint`)."""

    def __init__(self, connections: Channel, name: str, *, node: str = "local") -> None:
        self.name, self.node = name, node
        self._calls, self._aborts = ((each, ThreadPoolExecutor(1, thread_name_prefix=name)) for each in connections)

    async def receive(self, header: Header, payload: SharedPayload, slot: str = RING) -> Ack:
        ack: Ack = await self._call("receive", header, payload.reference, slot)
        return ack

    async def relay(self, header: Header, slot: str = RING) -> Any:
        raise TransferFailed("processes of one host get every payload from the sender")

    async def open_group(self, epoch: Epoch, rank: int) -> None:
        await self._call("group.open", epoch, rank)

    async def ready(self, epoch: int, draft: Draft) -> None:
        await self._call("group.ready", epoch, draft)

    async def accept(self, draft: Draft) -> Ack:
        ack: Ack = await self._call("group.accept", draft)
        return ack

    async def abort_group(self) -> None:
        await self._call("group.abort", by=self._aborts)

    def close(self) -> None:
        """Closes the channel: `serve` sets its event over there, and a running call raises ConnectionResetError."""
        for connection, _ in (self._calls, self._aborts):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)  # close() would not wake a thread that is reading

    async def _call(self, method: str, *arguments: Any, by: _Thread | None = None) -> Any:
        connection, thread = by or self._calls
        return await asyncio.get_running_loop().run_in_executor(thread, self._exchange, connection, method, *arguments)

    def _exchange(self, connection: Connection, method: str, *arguments: Any) -> Any:
        try:
            connection.send((method, arguments))
            value, error = connection.recv()
        except (EOFError, OSError) as gone:
            raise ConnectionResetError(f"{self.name} is gone") from gone
        if error is not None:
            raise error
        return value


class _Service:
    """Object whose methods a `ProcessReceiver` calls by name."""

    def __init__(self, receiver: Receiver, group: CollectiveReceiver | None) -> None:
        self._receiver, self.group = receiver, group

    def receive(self, header: Header, reference: str, slot: str) -> Ack:
        return self._receiver.receive(header, read(reference)[: header.nbytes], slot)


@contextlib.contextmanager
def serve(
    connections: Channel, receiver: Receiver, *, group: CollectiveReceiver | None = None
) -> Iterator[threading.Event]:
    """Answers a `ProcessReceiver` in threads of this process while the body of the `with` statement runs.

    Yields an event that is set when the other side closes the channel. `group` is the receiver's place in a collective
    group; None for shared memory.
    """
    service, ended = _Service(receiver, group), threading.Event()
    for connection in connections:
        threading.Thread(target=_answer, args=(connection, service, ended), daemon=True).start()
    try:
        yield ended
    finally:
        if service.group is not None:
            service.group.abort()


def _answer(connection: Connection, service: _Service, ended: threading.Event) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            method, arguments = connection.recv()
            value, error = None, None
            try:
                value = attrgetter(method)(service)(*arguments)
            except Exception as raised:  # is raised again in the calling process
                error = raised.with_traceback(None)
            connection.send((value, error))
    ended.set()
