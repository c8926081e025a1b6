"""Tests of payload memory: reused only after its last reader, and freed with its owner."""

import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoint_engine.digest import ByteArray
from checkpoint_engine.host_buffers import MAX_SPARE_BUFFERS, HostBuffer, HostBuffers
from checkpoint_engine.layout import Layout
from examples.checkpoint_engine.processes import SharedPayload, read
from tests.unit.checkpoint_engine.engine_parts import ends, lora, sealed

ROOT = Path(__file__).parents[3]


def address(data: ByteArray) -> int:
    return int(data.__array_interface__["data"][0])


def test_a_buffer_comes_back_when_its_last_reader_lets_go() -> None:
    buffers = HostBuffers(Layout.of(lora()))
    first = buffers.take()
    place, kept = address(first.data), torch.from_numpy(first.data[8:16])
    del first
    second = buffers.take()
    assert address(second.data) != place, "a tensor made of a slice of it still reads it"
    del kept
    assert address(buffers.take().data) == place


def test_views_are_the_tensors_and_do_not_hold_the_buffer() -> None:
    tensors = lora()
    buffers = HostBuffers(Layout.of(tensors))
    taken = buffers.take()
    for view, name in zip(taken.views, sorted(tensors), strict=True):
        view.copy_(tensors[name])
    views = Layout.of(tensors).views(torch.from_numpy(taken.data))
    assert all(torch.equal(views[name], tensors[name]) for name in tensors)
    place, held = address(taken.data), taken.views
    del taken, views
    assert address(buffers.take().data) == place and held


def test_what_was_needed_at_once_is_not_kept_for_ever() -> None:
    buffers = HostBuffers(Layout.of(lora()))
    taken = [buffers.take() for _ in range(8)]
    taken.clear()
    assert len(buffers._spare) == 8
    buffers.take()
    assert len(buffers._spare) == MAX_SPARE_BUFFERS + 1, "and the one that was taken, which is back"


def test_publishing_takes_no_more_memory_and_never_that_of_a_payload_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, allocated = HostBuffers._allocate, []

    def counted(self: HostBuffers) -> HostBuffer:
        allocated.append(self)
        return allocate(self)

    monkeypatch.setattr(HostBuffers, "_allocate", counted)
    tensors = lora()
    publisher, _ = ends(tensors)
    _, kept = sealed(publisher, 0)
    before = kept.copy()
    for version in range(1, 50):
        for tensor in tensors.values():
            tensor.add_(1.0)
        sealed(publisher, version)
    assert len(allocated) <= 5 and np.array_equal(kept, before)


def test_a_version_leaves_from_where_it_was_staged() -> None:
    publisher, receiver = ends(lora())
    publisher.stage(0)
    staged = address(publisher._staged[0].host.data)  # type: ignore[union-attr]
    header = publisher.seal(0)
    data = publisher.payload(0)[1]
    assert address(data) == staged and receiver.receive(header, data).digest == header.digest


def test_a_shared_payload_goes_with_its_last_owner_or_its_process() -> None:
    payload = SharedPayload(np.arange(10, dtype=np.uint8))
    name = payload.reference
    assert read(name)[:10].tolist() == list(range(10))
    del payload
    code = (
        "import numpy as np\n"
        "from examples.checkpoint_engine.processes import SharedPayload\n"
        "payload = SharedPayload(np.zeros(1000, np.uint8))\n"
        "print(payload.reference)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0 and done.stderr == ""
    for gone in (name, done.stdout.strip()):
        with pytest.raises(FileNotFoundError):
            shared_memory.SharedMemory(gone)
