"""Tests of local workers in virtual time, and of small helpers for the host."""

import asyncio
import os
import subprocess
import time

import psutil
import pytest

from separation.cluster import cluster
from separation.group import PoolSpec, WorkerDied
from separation.processes import alive, descendants, identity, kill_remaining, machine, process_of
from separation.worker_process import thread_environment

TOY = "tests.unit.separation.toy_object:Toy"


async def test_local_workers_run_in_virtual_time() -> None:
    async with cluster([PoolSpec("toy", TOY, 2)], backend="local", start_deadline=10) as groups:
        one, other = groups["toy"].workers
        first, refs = await one.call_split("split", 10, returns=3)
        assert first == {"count": 10}
        assert await other.call("total", *refs) == 50.0
        assert await one.call("note", 7) == [7]
    with pytest.raises(WorkerDied, match="toy-0 died: killed"):
        await one.call("hello")


def test_a_hung_local_worker_does_not_hold_the_end() -> None:
    async def main() -> None:
        async with cluster([PoolSpec("toy", TOY, 1)], backend="local", start_deadline=120) as groups:
            call = asyncio.create_task(groups["toy"].workers[0].call("wait"))
            await asyncio.sleep(0.05)
        with pytest.raises(WorkerDied):
            await call

    asyncio.run(main())


def test_threads_of_every_numeric_library_are_set() -> None:
    assert set(thread_environment(3).values()) == {"3"}
    assert "OMP_NUM_THREADS" in thread_environment(3)


def test_kill_remaining_ends_processes_of_this_machine() -> None:
    child = subprocess.Popen(["sleep", "600"])
    created = psutil.Process(child.pid).create_time()
    process = process_of(child.pid, created, machine())
    assert process is not None and alive(process)
    assert process_of(child.pid, created - 1, machine()) is None, "a process that reuses the pid must not be touched"
    assert process_of(*identity()) == psutil.Process()
    assert process in descendants(os.getpid())
    assert process_of(child.pid, created, "another machine") is None
    assert kill_remaining([process], grace=0.0) == [process]
    while process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert not alive(process), "a process whose exit code waits to be collected is gone"
    assert process not in descendants(os.getpid())
    child.wait()
    assert not alive(process) and kill_remaining([process], grace=0.0) == []
    assert process_of(child.pid, created, machine()) is None and descendants(child.pid) == []
