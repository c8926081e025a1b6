"""Payload memory is used again, never while somebody still reads it, and goes when its owner does."""

import asyncio
import subprocess
import sys
import threading
from multiprocessing import shared_memory
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_parts import ALPHA, RANK, ends, lora, sealed

from checkpoint_engine import Publisher, SharedMemoryStore
from checkpoint_engine.digest import ByteArray
from checkpoint_engine.host_buffers import SPARE, HostBuffers, PlainMemory
from checkpoint_engine.layout import Layout
from examples.checkpoint_engine.processes import ProcessSender, SharedPayload

ROOT = Path(__file__).parents[3]


class Counting(PlainMemory):
    def __init__(self) -> None:
        super().__init__()
        self.allocated, self.freed = 0, 0

    def allocate(self, nbytes: int) -> ByteArray:
        self.allocated += 1
        return super().allocate(nbytes)

    def free(self, data: ByteArray) -> None:
        self.freed += 1


def address(data: ByteArray) -> int:
    return int(data.__array_interface__["data"][0])


def test_a_buffer_comes_back_when_its_last_reader_lets_go() -> None:
    buffers = HostBuffers(Layout.of(lora()), PlainMemory())
    first = buffers.take()
    place, kept = address(first.data), torch.from_numpy(first.data[8:16])
    del first
    second = buffers.take()
    assert address(second.data) != place, "a tensor made of a slice of it still reads it"
    del kept
    assert address(buffers.take().data) == place


def test_views_are_the_tensors_and_do_not_hold_the_buffer() -> None:
    tensors = lora()
    buffers = HostBuffers(Layout.of(tensors), PlainMemory())
    taken = buffers.take()
    for view, name in zip(taken.views, sorted(tensors), strict=True):
        view.copy_(tensors[name])
    views = Layout.of(tensors).views(torch.from_numpy(taken.data))
    assert all(torch.equal(views[name], tensors[name]) for name in tensors)
    place, held = address(taken.data), taken.views
    del taken, views
    assert address(buffers.take().data) == place and held


def test_what_was_needed_at_once_is_not_kept_for_ever() -> None:
    memory = Counting()
    buffers = HostBuffers(Layout.of(lora()), memory)
    taken = [buffers.take() for _ in range(8)]
    taken.clear()
    buffers.take()
    assert memory.allocated == 8 and memory.freed == 8 - 1 - SPARE


def test_publishing_takes_no_more_memory_and_never_that_of_a_payload_in_use() -> None:
    tensors, memory = lora(), Counting()
    publisher = Publisher(tensors, alpha=ALPHA, rank=RANK, retain=2)
    publisher.use_memory(memory)
    _, kept = sealed(publisher, 0)
    before = kept.copy()
    for version in range(1, 50):
        for tensor in tensors.values():
            tensor.add_(1.0)
        sealed(publisher, version)
    assert memory.allocated <= 5 and np.array_equal(kept, before)


def test_a_version_leaves_from_where_it_was_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, receiver = ends(lora())
    sender = ProcessSender(publisher)
    monkeypatch.setattr(SharedMemoryStore, "put", None)
    seen = set()
    for version in range(20):
        header, data = sealed(publisher, version)
        payload = asyncio.run(sender.payload(version))
        assert isinstance(payload, SharedPayload) and payload.lasting
        assert sender._store.get(payload.reference).ctypes.data == data.ctypes.data
        assert receiver.receive(header, data).digest == header.digest
        seen.add(payload.reference)
    assert len(seen) <= 5
    sender.close()


def test_what_was_sealed_elsewhere_is_put_once_and_deleted_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, _ = ends(lora())
    sealed(publisher, 0)
    sender = ProcessSender(publisher)
    deleted: list[int] = []
    gone = threading.Event()
    delete = SharedMemoryStore.delete

    def watched(self: SharedMemoryStore, reference: str) -> None:
        delete(self, reference)
        deleted.append(threading.get_ident())
        gone.set()

    monkeypatch.setattr(SharedMemoryStore, "delete", watched)

    async def main() -> str:
        one, other = await sender.payload(0), await sender.payload(0)
        assert one is other and not one.lasting
        return str(one.reference)

    reference = asyncio.run(main())
    assert gone.wait(120.0) and deleted and deleted[0] != threading.get_ident()
    with pytest.raises(FileNotFoundError):
        shared_memory.SharedMemory(reference)
    sender.close()


def test_segments_go_when_the_store_closes_and_arrays_in_use_keep_their_bytes() -> None:
    store = SharedMemoryStore()
    data = store.allocate(5000)
    data.fill(7)
    reference = store.reference(data)
    assert reference is not None and store.reference(np.zeros(3, np.uint8)) is None
    store.close()
    store.close()
    with pytest.raises(FileNotFoundError):
        shared_memory.SharedMemory(reference)
    assert (data == 7).all() and store.reference(data) is None


def test_released_mappings_stay_as_far_as_asked() -> None:
    owner, store = SharedMemoryStore(), SharedMemoryStore()
    store._own = owner._own  # of one process: only what is not its own is mapped
    references = [owner.put(np.full(10, i, np.uint8)) for i in range(4)]
    store._own = {}
    for reference in references:
        store.get(reference)
        store.release(reference, keep=2)
    assert list(store._idle) == references[2:]
    assert store.get(references[2])[0] == 2
    store.release(references[2])
    assert list(store._idle) == references[3:]
    owner.close()


def test_a_process_that_ends_without_closing_leaves_nothing_behind() -> None:
    code = (
        "import asyncio, torch\n"
        "from checkpoint_engine import Publisher\n"
        "from examples.checkpoint_engine.processes import ProcessSender\n"
        "publisher = Publisher({'w': torch.ones(1000)})\n"
        "sender = ProcessSender(publisher)\n"
        "publisher.stage(0); publisher.seal(0)\n"
        "payload = asyncio.run(sender.payload(0))\n"
        "print(payload.reference)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0 and done.stderr == ""
    with pytest.raises(FileNotFoundError):
        shared_memory.SharedMemory(done.stdout.strip())
