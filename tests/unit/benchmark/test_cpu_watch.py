"""Tests of the thread with which the benchmark records the CPU seconds of a process."""

import os
import time

import pytest

from async_flowrl.benchmark import measure
from async_flowrl.benchmark.measure import CpuWatch


def test_cpu_is_what_the_process_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a reading before and one after half a second of CPU time, however long that took; 0.02 s are two ticks
    of the kernel's counter."""
    monkeypatch.setattr(measure, "POLL_SECONDS", 0.01)
    began = time.process_time()
    watch = CpuWatch(os.getpid())

    def read_again() -> None:
        readings, deadline = len(watch._used), time.monotonic() + 300.0
        while len(watch._used) < readings + 2:  # The first of them may have been under way.
            assert time.monotonic() < deadline, "the thread reads nothing"
            time.sleep(0.01)

    read_again()
    used = time.process_time()
    while time.process_time() < used + 0.5:
        sum(range(1000))
    read_again()
    watch.stop()
    first, last = watch._times[0], watch._times[-1]
    seconds = watch.share(first, last + 1.0) * (last - first)
    assert 0.5 - 0.02 <= seconds <= time.process_time() - began + 0.02


def test_the_share_of_cpu_is_that_between_the_readings_inside() -> None:
    watch = CpuWatch(os.getpid())
    watch.stop()
    watch._times, watch._used = [10.0, 11.0, 12.0, 13.0], [5.0, 6.0, 6.0, 6.5]
    assert watch.share(10.0, 11.5) == 1.0
    assert watch.share(11.0, 12.5) == 0.0
    assert watch.share(9.0, 14.0) == 0.5
    assert watch.share(11.5, 12.5) == watch.share(20.0, 30.0) == 0.0, "fewer than two readings"
