"""Tests of page-locked memory: what it takes, and when CUDA is told to lock and to release it.

There is no CUDA here, so its functions are replaced; tests/gpu/test_pinned_memory.py runs them.
"""

import ctypes
import gc
import mmap
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from checkpoint_engine import Layout, side_stream
from checkpoint_engine.publisher import MAX_SPARE_BUFFERS, HostBuffers
from checkpoint_engine.side_stream import EXACT_FROM_BYTES, page_locks, pinned, pinned_bytes

SMALL = 3 * mmap.PAGESIZE
"""Size from which buffers are page-locked by themselves in these tests."""


class Driver:
    """What CUDA is asked for; `refuses` is its answer to the next request, 0 means success."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        """Address → bytes."""
        self.released: list[int] = []
        self.refuses = 0
        self.forgotten = 0

    def register(self, address: int, size: int, flags: int) -> int:
        assert address % mmap.PAGESIZE == 0 and size % mmap.PAGESIZE == 0 and flags == 0
        if not self.refuses:
            self.locked[address] = size
        return self.refuses

    def forget(self) -> None:
        self.forgotten += 1

    def unregister(self, address: int) -> int:
        size = self.locked.pop(address)
        assert ctypes.string_at(address + size - 1, 1), "it is still mapped"
        self.released.append(size)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    page_locks.cache_clear()
    driver = Driver()
    functions = SimpleNamespace(
        cudaHostRegister=driver.register,
        cudaHostUnregister=driver.unregister,
        cudaGetErrorString=lambda code: f"error {code}",
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: functions)
    monkeypatch.setattr(side_stream, "forget_error", driver.forget)
    monkeypatch.setattr(side_stream, "EXACT_FROM_BYTES", SMALL)
    yield driver
    page_locks.cache_clear()


@pytest.mark.parametrize(
    ("nbytes", "taken"),
    [
        (1, 1),
        (5_000_000, 1 << 23),
        (EXACT_FROM_BYTES - 1, EXACT_FROM_BYTES),
        (EXACT_FROM_BYTES, EXACT_FROM_BYTES),
        (EXACT_FROM_BYTES + 1, EXACT_FROM_BYTES + mmap.PAGESIZE),
        (41_000_000_000, -(-41_000_000_000 // mmap.PAGESIZE) * mmap.PAGESIZE),
    ],
)
def test_a_large_buffer_takes_its_own_size_and_a_small_one_a_power_of_two(nbytes: int, taken: int) -> None:
    assert pinned_bytes(nbytes) == taken
    assert nbytes < EXACT_FROM_BYTES or taken - nbytes < mmap.PAGESIZE


@pytest.mark.extended
def test_what_is_locked_is_what_the_plan_counts_and_is_released_with_the_last_reference(driver: Driver) -> None:
    nbytes = SMALL + 8
    buffer = pinned(nbytes)
    assert buffer.dtype == torch.uint8 and buffer.shape == (nbytes,)
    assert driver.locked == {buffer.data_ptr(): pinned_bytes(nbytes)}
    part = buffer[nbytes - 8 :].view(torch.int64)
    array = np.frombuffer(buffer.numpy().data, np.uint8)
    del buffer
    gc.collect()
    part.fill_(7)
    del part
    gc.collect()
    assert driver.locked and array[-8] == 7
    del array
    gc.collect()
    assert driver.locked == {} and driver.released == [mmap.PAGESIZE, pinned_bytes(nbytes)]


def test_buffers_that_are_sent_are_locked_once_and_released_when_too_many_are_spare(driver: Driver) -> None:
    layout = Layout.of({"weight": torch.empty(SMALL, dtype=torch.uint8), "bias": torch.empty(3)})
    buffers = HostBuffers(layout, pinned=True)
    used = [buffers.take() for _ in range(MAX_SPARE_BUFFERS + 2)]
    used[0].data[:] = 1
    assert list(driver.locked.values()) == len(used) * [pinned_bytes(layout.nbytes)]
    used.clear()
    gc.collect()
    again = buffers.take()
    gc.collect()
    assert len(driver.locked) == MAX_SPARE_BUFFERS + 1 and driver.released == [
        mmap.PAGESIZE,
        pinned_bytes(layout.nbytes),
    ]
    assert again.data.ctypes.data in driver.locked


def test_where_no_page_can_be_locked_a_large_buffer_is_torchs(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver.refuses = 801
    monkeypatch.setattr(torch, "empty", lambda size, *, dtype, pin_memory: (size, pin_memory))
    assert [pinned(SMALL), pinned(SMALL)] == 2 * [(SMALL, True)]
    assert driver.locked == {} and driver.forgotten == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_buffer_that_has_no_room_is_refused(driver: Driver) -> None:
    driver.refuses = 2
    with pytest.raises(MemoryError, match=f"{mmap.PAGESIZE:,} bytes"):
        pinned(SMALL)
    driver.refuses = 0
    assert page_locks()
    driver.refuses = 2
    with pytest.raises(MemoryError, match=f"{pinned_bytes(SMALL):,} bytes"):
        pinned(SMALL)
