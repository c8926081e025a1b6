"""Tests of events that only processes can have: signals, lost nodes, missing resources, a driver that dies."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import psutil
import pytest
import ray
from ray._private.node import Node
from ray._private.parameter import RayParams

from separation.cluster import cluster
from separation.group import PoolSpec, RefLost, Worker, WorkerDied
from separation.processes import alive, descendants, kill
from separation.rendezvous import join_process_group
from separation.resources import ResourcesMissing
from separation.supervise import DeadlineExceeded, deadline, together
from tests.integration.separation_bench import ROOT, TOY, Bench, fresh, on_ray, raises
from tests.support.forked_workers import forked_workers
from tests.support.marked import left_after, marked_processes

pytestmark = pytest.mark.serial


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return on_ray(tmp_path_factory.mktemp("logs"))


async def test_sigkill_in_a_call_is_noticed_and_the_others_go_on(bench: Bench) -> None:
    async with fresh(bench, 1) as victim:
        call = asyncio.create_task(victim.call("sleep", 600.0))
        elsewhere = asyncio.create_task(bench.toys.workers[2].call("sleep", 1.0))
        await asyncio.sleep(0.2)
        os.kill(victim.pid, signal.SIGKILL)
        error = await raises(WorkerDied, call)
        assert str(bench.logs) in error.reason
        assert await elsewhere == 1.0


async def test_a_stopped_process_is_killed_before_its_place_is_reused(bench: Bench) -> None:
    hung = await bench.toys.replace(1)
    process = psutil.Process(hung.pid)
    os.kill(hung.pid, signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded):
        async with deadline(0.5, "a call to a stopped process"):
            await hung.call("hello")
    replacement = await bench.toys.replace(1)
    assert not alive(process)
    assert replacement.pid != hung.pid
    assert await replacement.call("hello")


@contextmanager
def second_node(gpus: str) -> Iterator[list[psutil.Process]]:
    """Another Ray node on this machine, which takes devices of these numbers for its GPUs; yields its processes.

    Started as `ray start` does, but in this process, and with what a node needs to run alone.
    """
    given = RayParams(
        gcs_address=ray.get_runtime_context().gcs_address,
        num_cpus=4,
        num_gpus=len(gpus.split(",")),
        object_store_memory=100_000_000,
        node_manager_port=0,
        min_worker_port=0,
        max_worker_port=0,
    )
    given.dashboard_agent_listen_port = None
    before, nodes = descendants(os.getpid()), list[Node]()
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=gpus), forked_workers():
        how = {"head": False, "shutdown_at_exit": False, "spawn_reaper": False}
        nodes.append(Node(given, **how))
    started = [process for process in descendants(os.getpid()) if process not in before]
    try:
        wait_for_nodes(2)
        yield started
    finally:
        for process in started:
            for each in (*descendants(process.pid), process):
                kill(each)
        nodes[0].kill_all_processes(check_alive=False, wait=True)
    wait_for_nodes(1)


def wait_for_nodes(count: int) -> None:
    end = time.monotonic() + 180
    while len([node for node in ray.nodes() if node["Alive"]]) != count:
        assert time.monotonic() < end, f"there are not {count} nodes"
        time.sleep(0.1)


async def check_lost_node(bench: Bench, node: list[psutil.Process]) -> None:
    """Kills the processes of the node with the GPUs while a worker there is called."""
    async with cluster([PoolSpec("away", TOY, 1, gpus_per_worker=1.0)], start_deadline=180) as groups:
        away, home = groups["away"].workers[0], bench.toys.workers[2]
        _, (small, large) = await away.call_split("split_unevenly", 200_000, returns=3)
        call = asyncio.create_task(away.call("sleep", 600.0))
        await asyncio.sleep(0.2)
        for process in node:
            kill(process)
        await raises(WorkerDied, call)
        await raises(RefLost, groups["away"].fetch(large))
        await raises(RefLost, home.call("total", large))
        assert await home.call("total", small) == 2.0, "a small result travelled with the answer"


@pytest.mark.chaos
async def test_workers_see_the_gpus_of_their_seats_and_a_lost_node_means_dead_workers_and_lost_refs(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """No GPU is needed: Ray tells each worker the numbers of its devices without looking at any.

    The node with the GPUs is lost afterwards; a second one would take seconds to start.
    """
    own = {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}
    pools = [
        PoolSpec("owner", TOY, 2, gpus_per_worker=1.0, process_group=True, expandable_segments=True),
        PoolSpec("chooser", TOY, 1, gpus_per_worker=1.0, expandable_segments=True, environment=own),
        PoolSpec("none", TOY, 3, expandable_segments=True),
    ]

    async def seen(worker: Worker) -> tuple[str | None, str | None]:
        names = "CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF"
        return await worker.call("os:getenv", names[0]), await worker.call("os:getenv", names[1])

    caplog.set_level(logging.INFO, logger="separation.ray_cluster")
    with second_node(gpus="4,5,6") as node:
        async with cluster(pools, start_deadline=180) as groups:
            owners = await together(*(seen(worker) for worker in groups["owner"].workers))
            (chooser,) = await together(*(seen(worker) for worker in groups["chooser"].workers))
            assert {number for number, _ in [*owners, chooser]} == {"4", "5", "6"}
            assert [settings for _, settings in owners] == ["expandable_segments:True"] * 2
            assert chooser[1] is None, "the allocator is left to what the pool's environment says"
            nothing = await together(*(seen(worker) for worker in groups["none"].workers))
            assert nothing == [("", None)] * 3
            assert await seen(await groups["none"].replace(0)) == ("", None)
            assert await seen(await groups["owner"].replace(1)) == owners[1]
            made = [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]
            strategies = [
                group["strategy"] for group in made if len(group["bundles"]) == 2 and "GPU" in group["bundles"][0]
            ]
            assert strategies == ["STRICT_PACK"]
        await check_lost_node(bench, node)
    (spread,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("owner: on")]
    assert spread.startswith("owner: on 1 node (") and spread.endswith("owner-0, owner-1)")


async def test_a_process_group_meets_and_meets_again_after_a_death(bench: Bench) -> None:
    ranks = bench.groups["ranks"]
    await join_process_group(ranks, timeout=180)
    assert await together(*(worker.call("all_reduce") for worker in ranks.workers)) == [3.0, 3.0]
    ranks.workers[1].kill()
    await ranks.replace(1)
    await join_process_group(ranks, timeout=180)
    assert await together(*(worker.call("all_reduce") for worker in ranks.workers)) == [3.0, 3.0]


async def test_what_never_fits_is_refused_with_a_table(bench: Bench) -> None:
    with pytest.raises(ResourcesMissing) as caught:
        async with cluster([PoolSpec("big", TOY, 1000)], start_deadline=60):
            pytest.fail("it started")
    table = [line.split() for line in str(caught.value).splitlines()]
    assert ["CPU", "1000", "8", "992"] in table


SCRIPT = """
import asyncio, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from separation.cluster import cluster
from separation.group import PoolSpec

async def main():
    pools = [PoolSpec("trainer", "tests.unit.separation.toy_object:Toy", 1, gpus_per_worker=1.0)]
    async with cluster(pools, start_deadline=120) as groups:
        (worker,) = groups["trainer"].workers
        print(await worker.call("hello"), flush=True)
        print(await worker.call("os:getpriority", 0, 0) - os.getpriority(0, 0), flush=True)
        job = asyncio.create_task(worker.call("sleep", 600.0))
        await asyncio.sleep(0.2)
        await job

asyncio.run(main())
"""


@pytest.mark.parametrize("ending", ["interrupt", "kill"])
def test_no_process_outlives_the_driver(ending: str, tmp_path: Path) -> None:
    mark = f"mark-{uuid.uuid4()}"
    script = tmp_path / "driver.py"
    script.write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"TEST_MARK": mark}
    driver = subprocess.Popen(
        [sys.executable, str(script), str(ROOT)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    assert "hello from trainer-0" in driver.stdout.readline()
    assert driver.stdout.readline() == "0\n", "workers are as nice as the driver, not more"
    running = marked_processes(mark)
    assert len(running) > 3, "the mark must be inherited for this test to mean much"
    driver.send_signal(signal.SIGINT if ending == "interrupt" else signal.SIGKILL)
    _, errors = driver.communicate(timeout=180)
    assert driver.returncode != 0
    if ending == "kill":
        assert left_after(180, lambda: marked_processes(mark)) == []
    else:
        assert "KeyboardInterrupt" in errors
        # All are killed by then; a busy machine takes a moment to end them, what was forgotten lives for a minute.
        assert left_after(20, lambda: marked_processes(mark)) == []
