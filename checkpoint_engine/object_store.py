"""Delivery through a store of immutable objects: elastic, one receiver at a time, nothing that can hang together.

The store is whatever can `put` bytes under a reference that travels and `get` them back elsewhere. Endpoints for ends
that live in this process are here too; ends in other processes are the caller's to write (a page of code).
"""

import asyncio
import weakref
from multiprocessing import parent_process, resource_tracker, shared_memory
from typing import Any, Protocol

import numpy as np

from checkpoint_engine.base import RING, Ack, Draft, Header
from checkpoint_engine.digest import ByteArray
from checkpoint_engine.publisher import Publisher
from checkpoint_engine.receiver import Receiver


class ObjectStore(Protocol):
    """Keeps payloads uint8 [n] under references that can be sent to other processes."""

    def put(self, data: ByteArray) -> Any: ...

    def get(self, reference: Any) -> ByteArray:
        """The payload, read-only, without a copy where that can be."""
        ...

    def delete(self, reference: Any) -> None: ...


class _Segment(shared_memory.SharedMemory):
    """One that may still be in use when the interpreter ends."""

    def array(self) -> ByteArray:
        """Keeps the segment mapped: an array made by `np.ndarray(buffer=...)` would be left dangling."""
        buffer = self.buf
        if buffer is None:
            raise ValueError(f"segment {self.name} is closed")
        return np.frombuffer(buffer, np.uint8)

    def __del__(self) -> None:
        _closed(self)


def _closed(segment: _Segment) -> bool:
    try:
        segment.close()
    except BufferError:
        return False
    return True


class SharedMemoryStore:
    """An object store for the processes of one host, on POSIX shared memory. References are segment names.

    The process that put a payload deletes it; `get` maps it, and the mapping ends when `release` is called. It is
    also memory for a publisher's buffers (`allocate`, `free`): such a buffer needs no `put`, it has a `reference`.
    """

    def __init__(self) -> None:
        self._own: dict[str, _Segment] = {}
        self._mapped: dict[str, _Segment] = {}
        self._idle: dict[str, _Segment] = {}
        self._names: dict[int, str] = {}
        self._closing: list[_Segment] = []
        weakref.finalize(self, _unlink_all, self._own)

    def put(self, data: ByteArray) -> str:
        segment = _Segment(create=True, size=data.shape[0])
        segment.array()[: data.shape[0]] = data
        self._own[segment.name] = segment
        return segment.name

    def get(self, reference: str) -> ByteArray:
        segment = self._own.get(reference) or self._mapped.get(reference)
        if segment is None and reference in self._idle:
            segment = self._mapped[reference] = self._idle.pop(reference)
        if segment is None:
            segment = self._mapped[reference] = _Segment(reference)
            if parent_process() is None:
                # The tracker of a process that only attaches would unlink the segment when that process ends; the
                # children of one process share its tracker, which must know the segment until its owner deletes it.
                resource_tracker.unregister(f"/{reference.lstrip('/')}", "shared_memory")
        data = segment.array()
        data.flags.writeable = False
        return data

    def release(self, reference: str, *, keep: int = 0) -> None:
        """Ends a mapping made by `get`, as soon as the arrays taken from it are gone.

        With `keep` it stays mapped, for the next `get`, until so many others were released that way after it.
        """
        segment = self._mapped.pop(reference, None)
        if segment is None:
            return
        if keep:
            self._idle[reference] = segment
        else:
            self._closing.append(segment)
        while len(self._idle) > keep > 0:
            self._closing.append(self._idle.pop(next(iter(self._idle))))
        self._close()

    def delete(self, reference: str) -> None:
        """Deletes a segment that was put here; the second time nothing happens."""
        segment = self._own.pop(reference, None)
        if segment is not None:
            segment.unlink()
            self._closing.append(segment)
            self._close()

    def allocate(self, nbytes: int) -> ByteArray:
        """A writable buffer uint8 [nbytes] in a segment of its own."""
        self._close()
        segment = _Segment(create=True, size=nbytes)
        self._own[segment.name] = segment
        data = segment.array()[:nbytes]
        self._names[_address(data)] = segment.name
        return data

    def reference(self, data: ByteArray) -> str | None:
        """What stands for a buffer that `allocate` gave; None for any other."""
        return self._names.get(_address(data))

    def free(self, data: ByteArray) -> None:
        self.delete(self._names.pop(_address(data), ""))

    def close(self) -> None:
        """Deletes every segment that was put or allocated here; arrays in use keep their bytes."""
        self._names.clear()
        for reference in list(self._own):
            self.delete(reference)

    def _close(self) -> None:
        """Ends mappings that are not needed any more, except where an array still uses them."""
        self._closing = [segment for segment in self._closing if not _closed(segment)]


def _address(data: ByteArray) -> int:
    return int(data.__array_interface__["data"][0])


def _unlink_all(own: dict[str, _Segment]) -> None:
    for segment in own.values():
        segment.unlink()


class LocalSender:
    """A `SenderEndpoint` for a publisher in this process; its work runs in threads, beside the event loop."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher

    async def stage(self, version: int) -> None:
        await asyncio.to_thread(self.publisher.stage, version)

    async def draft(self, version: int) -> Draft:
        return self.publisher.draft(version)

    async def seal(self, version: int) -> Header:
        if version in self.publisher.retained():
            return self.publisher.seal(version)
        return await asyncio.to_thread(self.publisher.seal, version)

    async def payload(self, version: int) -> ByteArray:
        return self.publisher.payload(version)[1]

    async def hold(self, version: int) -> None:
        self.publisher.hold(version)

    async def release(self, version: int) -> None:
        self.publisher.release(version)


class LocalReceiver:
    """A `ReceiverEndpoint` for a receiver in this process; payloads are arrays uint8 [nbytes]."""

    def __init__(self, receiver: Receiver, name: str, *, node: str = "local") -> None:
        self.receiver, self.name, self.node = receiver, name, node

    async def receive(self, header: Header, payload: ByteArray, slot: str = RING) -> Ack:
        return await asyncio.to_thread(self.receiver.receive, header, payload, slot)

    async def relay(self, header: Header, slot: str = RING) -> ByteArray:
        held, data = await asyncio.to_thread(lambda: self.receiver.export(header.stream, header.version, slot=slot))
        return data if held.digest == header.digest else np.empty(0, np.uint8)
