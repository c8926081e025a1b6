"""Tests of payload memory: reused only after its last reader, and freed with its owner."""

import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoint_engine.digest import ByteArray
from checkpoint_engine.layout import Layout
from checkpoint_engine.publisher import HostBuffers
from examples.checkpoint_engine.piped_processes import SharedPayload, read
from tests.unit.checkpoint_engine.engine_parts import lora

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


@pytest.mark.extended
def test_a_shared_payload_goes_with_its_last_owner_or_its_process() -> None:
    payload = SharedPayload(np.arange(10, dtype=np.uint8))
    name = payload.reference
    assert read(name)[:10].tolist() == list(range(10))
    del payload
    code = (
        "import numpy as np\n"
        "from examples.checkpoint_engine.piped_processes import SharedPayload\n"
        "payload = SharedPayload(np.zeros(1000, np.uint8))\n"
        "print(payload.reference)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0 and done.stderr == ""
    for gone in (name, done.stdout.strip()):
        with pytest.raises(FileNotFoundError):
            shared_memory.SharedMemory(gone)
