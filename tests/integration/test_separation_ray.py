"""Tests of pools that behave alike as threads and as Ray actors."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from separation.cluster import cluster
from separation.group import PoolSpec, WorkerDied, WorkerFailed
from tests.integration.separation_bench import TOY, Bench, fresh, on_ray, raises


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.serial)])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    logs = tmp_path_factory.mktemp("logs")
    if request.param == "ray":
        yield on_ray(logs)
    else:
        made = Bench(request.param, logs)
        yield made
        made.close()


@pytest.mark.parametrize(
    ("method", "args", "kind", "message"),
    [
        ("fail", ("boo",), "KeyError", "boo"),
        ("fail_strangely", (), "Unpicklable", "a lock inside"),
        ("return_lock", (), "TypeError", "lock"),
        ("no_such_method", (), "AttributeError", "no_such_method"),
        ("os:no_such_function", (), "AttributeError", "no_such_function"),
    ],
)
async def test_errors_arrive_with_kind_message_and_remote_traceback(
    bench: Bench, method: str, args: tuple[Any, ...], kind: str, message: str
) -> None:
    worker = bench.toys.workers[0]
    error = await raises(WorkerFailed, worker.call(method, *args))
    assert await worker.call("hello"), "the worker lives on"
    assert (error.worker, error.method, error.kind) == (worker.name, method, kind)
    assert message in error.message
    assert kind in error.remote_traceback


async def test_a_worker_that_is_unusable_counts_as_dead(bench: Bench) -> None:
    died = await raises(WorkerDied, bench.toys.workers[0].call("give_up", "the device is gone"))
    assert (died.worker, died.reason) == (bench.toys.workers[0].name, "the device is gone")


async def test_lanes_run_beside_main(bench: Bench) -> None:
    worker = bench.toys.workers[0]
    waiting = asyncio.create_task(worker.call("wait"))
    await worker.call("release", lane="sync")
    assert await waiting == "released"
    error = await raises(ValueError, worker.call("hello", lane="fast"))
    assert "main, sync" in str(error)


async def test_cancelling_the_await_does_not_stop_the_method(bench: Bench) -> None:
    async with fresh(bench, 0) as worker:
        job = asyncio.create_task(worker.call("note", "first", 0.3))
        queued = asyncio.create_task(worker.call("note", "second"))
        await asyncio.sleep(0.1)
        job.cancel()
        queued.cancel()
        await raises(asyncio.CancelledError, job)
        assert await worker.call("note", "third") == ["first", "second", "third"]


async def test_refs_travel_between_workers_and_are_read_only(bench: Bench) -> None:
    one, other, _ = bench.toys.workers
    first, refs = await one.call_split("split", 100_000, returns=3)
    assert first == {"count": 100_000}
    assert len(refs) == 2
    assert await other.call("total", *refs) == 500_000.0
    assert await other.call("writeable", refs[0]) is False
    array = await bench.toys.fetch(refs[1])
    assert array.dtype == np.float32 and array[0] == 3.0
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1.0
    error = await raises(WorkerFailed, one.call_split("split", 5, returns=2))
    assert (error.kind, error.message) == ("TypeError", "split must return a tuple of 2 items, got 3 items")
    await raises(TypeError, bench.toys.fetch("not a ref"))


async def test_kill_ends_the_calls_under_way_and_nobody_else(bench: Bench) -> None:
    victim, other = bench.toys.workers[1], bench.toys.workers[2]
    calls = [asyncio.create_task(victim.call("wait")), asyncio.create_task(victim.call("hello"))]
    elsewhere = asyncio.create_task(other.call("sleep", 1.0))
    await asyncio.sleep(0.1)
    victim.kill()
    for call in calls:
        assert (await raises(WorkerDied, call)).worker == victim.name
    await raises(WorkerDied, victim.call("hello"))
    await raises(WorkerDied, victim.call_split("split", 1, returns=3))
    assert await elsewhere == 1.0
    replacement = await bench.toys.replace(1)
    assert bench.toys.workers[1] is replacement
    assert replacement.name == f"toy-1.{int((victim.name + '.0').split('.')[1]) + 1}"
    assert await replacement.call("note", "only") == ["only"]
    await raises(WorkerDied, victim.call("hello"))


@pytest.mark.extended
async def test_a_worker_that_cannot_be_built_says_why(bench: Bench) -> None:
    pools = [PoolSpec("toy", TOY, 1, {"fail": "no such model"})]
    with pytest.raises(WorkerFailed, match="no such model"):
        async with cluster(pools, backend=bench.backend, start_deadline=180):
            pytest.fail("it started")
    with pytest.raises(WorkerFailed, match="nowhere"):
        async with cluster([PoolSpec("toy", "nowhere:Toy", 1)], backend=bench.backend, start_deadline=180):
            pytest.fail("it started")
