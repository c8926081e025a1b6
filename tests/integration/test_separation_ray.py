"""The same behaviour from threads and from Ray actors, and what only processes can suffer."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import ray

from separation.cluster import cluster
from separation.group import PoolSpec, RefLost, Worker, WorkerDied, WorkerFailed, WorkerGroup
from separation.placement import ResourcesMissing
from separation.processes import Identity, descendants
from separation.rendezvous import join_gang
from separation.supervise import DeadlineExceeded, deadline, together

T = TypeVar("T")
TOY = "tests.unit.separation.toy:Toy"
ROOT = Path(__file__).resolve().parents[2]


class Bench:
    """One event loop and one set of pools for the whole module: a cluster takes seconds to start."""

    def __init__(self, backend: str, logs: Path) -> None:
        self.backend, self.logs = backend, logs
        self.runner = asyncio.Runner()
        pools = [
            PoolSpec("toy", TOY, 3, {"greeting": "hi"}, lanes=("sync",), threads=1, environment={"TOY": "yes"}),
            PoolSpec("gang", TOY, 2, gpus_per_worker=1.0, gang=True, threads=2),
        ]
        if backend == "ray":
            resources = {"gang": 2.0}
            ray.init(address="local", num_cpus=8, resources=resources, include_dashboard=False, log_to_driver=False)
        else:
            pools = pools[:1]
        self._context = cluster(pools, backend=backend, start_deadline=120, log_dir=logs)
        self.groups: Mapping[str, WorkerGroup] = self.runner.run(self._context.__aenter__())

    def run(self, test: Callable[["Bench"], Coroutine[Any, Any, T]]) -> T:
        async def limited() -> T:
            async with deadline(120, "this test"):
                return await test(self)

        return self.runner.run(limited())

    @property
    def toys(self) -> WorkerGroup:
        return self.groups["toy"]

    def close(self) -> None:
        self.runner.run(self._context.__aexit__(None, None, None))
        self.runner.close()
        if self.backend == "ray":
            assert ray.is_initialized(), "a cluster that was there before is left alone"
            ray.shutdown()


@pytest.fixture(scope="module", params=["local", "ray"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(request.param, tmp_path_factory.mktemp("logs"))
    yield made
    made.close()


@pytest.fixture
def rays(bench: Bench) -> Bench:
    if bench.backend != "ray":
        pytest.skip("about processes")
    return bench


async def raises(kind: type[BaseException], job: Awaitable[Any]) -> Any:
    with pytest.raises(kind) as caught:
        await job
    return caught.value


@asynccontextmanager
async def fresh(bench: Bench, index: int) -> AsyncIterator[Worker]:
    """A worker that a test may break; replaced afterwards."""
    yield await bench.toys.replace(index)
    await bench.toys.replace(index)


def test_workers_are_built_with_their_name_and_index(bench: Bench) -> None:
    async def test(bench: Bench) -> list[str]:
        return await together(*(worker.call("hello") for worker in bench.toys.workers))

    assert bench.run(test) == [f"hi from toy-{index} ({index})" for index in range(3)]
    assert [(worker.name, worker.pool, worker.index) for worker in bench.toys.workers][1] == ("toy-1", "toy", 1)


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
def test_errors_arrive_with_kind_message_and_remote_traceback(
    bench: Bench, method: str, args: tuple[Any, ...], kind: str, message: str
) -> None:
    async def test(bench: Bench) -> WorkerFailed:
        worker = bench.toys.workers[0]
        error: WorkerFailed = await raises(WorkerFailed, worker.call(method, *args))
        assert await worker.call("hello"), "the worker lives on"
        return error

    error = bench.run(test)
    assert (error.worker, error.method, error.kind) == (bench.toys.workers[0].name, method, kind)
    assert message in error.message
    assert kind in error.remote_traceback


def test_main_is_serial_and_in_order(bench: Bench) -> None:
    async def test(bench: Bench) -> None:
        async with fresh(bench, 0) as worker:
            heard = await together(*(worker.call("note", index, 0.2 if index == 0 else 0.0) for index in range(5)))
            assert heard[-1] == [0, 1, 2, 3, 4]
            assert [len(one) for one in heard] == [1, 2, 3, 4, 5]

    bench.run(test)


def test_lanes_run_beside_main(bench: Bench) -> None:
    async def test(bench: Bench) -> None:
        worker = bench.toys.workers[0]
        waiting = asyncio.create_task(worker.call("wait"))
        await worker.call("release", lane="sync")
        assert await waiting == "released"
        error = await raises(ValueError, worker.call("hello", lane="fast"))
        assert "main, sync" in str(error)

    bench.run(test)


def test_cancelling_the_await_does_not_stop_the_method(bench: Bench) -> None:
    async def test(bench: Bench) -> None:
        async with fresh(bench, 0) as worker:
            job = asyncio.create_task(worker.call("note", "first", 0.3))
            queued = asyncio.create_task(worker.call("note", "second"))
            await asyncio.sleep(0.1)
            job.cancel()
            queued.cancel()
            await raises(asyncio.CancelledError, job)
            assert await worker.call("note", "third") == ["first", "second", "third"]

    bench.run(test)


def test_refs_travel_between_workers_and_are_read_only(bench: Bench) -> None:
    async def test(bench: Bench) -> None:
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

    bench.run(test)


def test_arguments_are_copies(bench: Bench) -> None:
    async def test(bench: Bench) -> None:
        async with fresh(bench, 0) as worker:
            mine = ["x"]
            heard = await worker.call("note", mine)
            mine.append("y")
            heard.append("z")
            assert await worker.call("note", 1) == [["x"], 1]

    bench.run(test)


def test_kill_ends_the_calls_under_way_and_nobody_else(bench: Bench) -> None:
    async def test(bench: Bench) -> None:
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
        successor = await bench.toys.replace(1)
        assert bench.toys.workers[1] is successor
        assert successor.name == f"toy-1.{int((victim.name + '.0').split('.')[1]) + 1}"
        assert await successor.call("note", "only") == ["only"]
        await raises(WorkerDied, victim.call("hello"))

    bench.run(test)


def test_watch_tells_of_a_death_while_idle(bench: Bench) -> None:
    async def test(bench: Bench) -> None:
        async with fresh(bench, 1) as worker:
            watch = asyncio.create_task(worker.watch())
            await asyncio.sleep(0.1)
            assert not watch.done()
            worker.kill()
            await raises(WorkerDied, watch)

    bench.run(test)


def test_a_method_that_exits_is_a_death(bench: Bench) -> None:
    async def test(bench: Bench) -> None:
        async with fresh(bench, 1) as worker:
            await raises(WorkerDied, worker.call("exit"))
            await raises(WorkerDied, worker.call("hello"))

    bench.run(test)


def test_refs_survive_the_death_of_their_producer(bench: Bench) -> None:
    async def test(bench: Bench) -> None:
        async with fresh(bench, 1) as producer:
            _, refs = await producer.call_split("split", 200_000, returns=3)
            producer.kill()
            await raises(WorkerDied, producer.watch())
            assert (await bench.toys.fetch(refs[0])).sum() == 400_000.0
            assert await bench.toys.workers[2].call("total", *refs) == 1_000_000.0

    bench.run(test)


def test_a_worker_that_cannot_be_built_says_why(bench: Bench) -> None:
    async def test(bench: Bench) -> None:
        pools = [PoolSpec("toy", TOY, 1, {"fail": "no such model"})]
        with pytest.raises(WorkerFailed, match="no such model"):
            async with cluster(pools, backend=bench.backend, start_deadline=60):
                pytest.fail("it started")
        with pytest.raises(WorkerFailed, match="nowhere"):
            async with cluster([PoolSpec("toy", "nowhere:Toy", 1)], backend=bench.backend, start_deadline=60):
                pytest.fail("it started")

    bench.run(test)


def test_an_unknown_backend_is_named_with_the_nearest() -> None:
    async def main() -> None:
        async with cluster([], backend="rey"):
            pass

    with pytest.raises(ValueError, match="did you mean 'ray'"):
        asyncio.run(main())


def test_sigkill_in_a_call_is_noticed_and_the_others_go_on(rays: Bench) -> None:
    async def test(bench: Bench) -> None:
        async with fresh(bench, 1) as victim:
            call = asyncio.create_task(victim.call("sleep", 600.0))
            elsewhere = asyncio.create_task(bench.toys.workers[2].call("sleep", 1.0))
            await asyncio.sleep(0.2)
            os.kill(victim.pid, signal.SIGKILL)
            error = await raises(WorkerDied, call)
            assert str(bench.logs) in error.reason
            assert await elsewhere == 1.0

    rays.run(test)


def test_a_stopped_process_is_killed_before_its_place_is_reused(rays: Bench) -> None:
    async def test(bench: Bench) -> None:
        hung = await bench.toys.replace(1)
        identity = Identity.of(hung.pid)
        assert identity is not None
        os.kill(hung.pid, signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded):
            async with deadline(0.5, "a call to a stopped process"):
                await hung.call("hello")
        successor = await bench.toys.replace(1)
        assert not identity.alive()
        assert successor.pid != hung.pid
        assert await successor.call("hello")

    rays.run(test)


def test_threads_environment_and_logs_are_set_in_the_worker(rays: Bench) -> None:
    async def test(bench: Bench) -> None:
        async with fresh(bench, 0) as worker:
            environment = await worker.call("environment")
            assert environment == {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOY": "yes"}
            await worker.call("say", "so it goes")
            text = (bench.logs / f"{worker.name}.log").read_text()
            assert "so it goes" in text and "SO IT GOES" in text
        gang = bench.groups["gang"]
        assert await together(*(worker.call("torch_threads") for worker in gang.workers)) == [2, 2]

    rays.run(test)


@contextmanager
def second_node(resources: str) -> Iterator[list[Identity]]:
    """Another Ray node on this machine; yields its processes."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=2", "--disable-usage-stats"]
    command += [f"--address={ray.get_runtime_context().gcs_address}", f"--resources={resources}"]
    start = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    try:
        end = time.monotonic() + 60
        while len([node for node in ray.nodes() if node["Alive"]]) < 2:
            assert time.monotonic() < end, "the second node did not come up"
            time.sleep(0.1)
        yield descendants(start.pid)
    finally:
        for process in descendants(start.pid):
            process.kill()
        start.kill()
        start.wait()


@pytest.mark.chaos
def test_a_lost_node_means_dead_workers_and_lost_refs(rays: Bench) -> None:
    async def test(bench: Bench) -> None:
        with second_node('{"away": 1}') as node:
            async with cluster([PoolSpec("away", TOY, 1, gpus_per_worker=1.0)], start_deadline=60) as groups:
                away, home = groups["away"].workers[0], bench.toys.workers[2]
                _, (small, large) = await away.call_split("split_unevenly", 200_000, returns=3)
                call = asyncio.create_task(away.call("sleep", 600.0))
                await asyncio.sleep(0.2)
                for process in node:
                    process.kill()
                await raises(WorkerDied, call)
                await raises(RefLost, groups["away"].fetch(large))
                await raises(RefLost, home.call("total", large))
                assert await home.call("total", small) == 2.0, "a small result travelled with the answer"

    rays.run(test)


def test_a_gang_meets_and_meets_again_after_a_death(rays: Bench) -> None:
    async def test(bench: Bench) -> None:
        gang = bench.groups["gang"]
        await join_gang(gang, timeout=60)
        assert await together(*(worker.call("all_reduce") for worker in gang.workers)) == [3.0, 3.0]
        gang.workers[1].kill()
        await gang.replace(1)
        await join_gang(gang, timeout=60)
        assert await together(*(worker.call("all_reduce") for worker in gang.workers)) == [3.0, 3.0]

    rays.run(test)


def test_what_never_fits_is_refused_with_a_table(rays: Bench) -> None:
    async def test(bench: Bench) -> None:
        with pytest.raises(ResourcesMissing) as caught:
            async with cluster([PoolSpec("big", TOY, 1000)], start_deadline=60):
                pytest.fail("it started")
        table = [line.split() for line in str(caught.value).splitlines()]
        assert ["CPU", "1000", "8", "992"] in table

    rays.run(test)


def test_what_does_not_get_free_is_refused_with_a_table_and_given_back(rays: Bench) -> None:
    async def test(bench: Bench) -> None:
        with pytest.raises(ResourcesMissing, match="did not free") as caught:
            async with cluster([PoolSpec("more", TOY, 6)], start_deadline=1):
                pytest.fail("it started")
        table = [line.split() for line in str(caught.value).splitlines()]
        assert ["CPU", "6", "8", "0", "0"] in table
        assert await bench.toys.workers[0].call("hello"), "the other pools of this cluster live on"

    rays.run(test)


SCRIPT = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from separation.cluster import cluster
from separation.group import PoolSpec

async def main():
    pools = [PoolSpec("rollout", "tests.unit.separation.toy:Toy", 1, gpus_per_worker=1.0),
             PoolSpec("trainer", "tests.unit.separation.toy:Toy", 1, gpus_per_worker=1.0)]
    async with cluster(pools, start_deadline=120, placement="colocated") as groups:
        job = asyncio.create_task(groups["rollout"].workers[0].call("sleep", 600.0))
        print(await groups["trainer"].workers[0].call("hello"), flush=True)
        if sys.argv[2] == "raise":
            raise ValueError("the body failed")
        await job

asyncio.run(main())
"""


def marked_processes(mark: str) -> list[str]:
    """Command lines of the processes that inherited the mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if mark.encode() in (entry / "environ").read_bytes() and Identity.of(int(entry.name)) is not None:
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


@pytest.mark.parametrize("ending", ["interrupt", "raise", "kill"])
def test_no_process_outlives_the_driver(ending: str, tmp_path: Path) -> None:
    mark = f"mark-{uuid.uuid4()}"
    script = tmp_path / "driver.py"
    script.write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"TEST_MARK": mark}
    driver = subprocess.Popen(
        [sys.executable, str(script), str(ROOT), ending],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    assert "hello from trainer-0" in driver.stdout.readline()
    assert len(marked_processes(mark)) > 3 or ending == "raise", "the mark must be inherited for this test to mean much"
    if ending != "raise":
        driver.send_signal(signal.SIGINT if ending == "interrupt" else signal.SIGKILL)
    _, errors = driver.communicate(timeout=60)
    assert driver.returncode != 0
    if ending == "kill":
        end = time.monotonic() + 60
        while holding_devices(mark) and time.monotonic() < end:
            time.sleep(0.2)
        assert holding_devices(mark) == []
    else:
        assert ("KeyboardInterrupt" if ending == "interrupt" else "the body failed") in errors
        assert marked_processes(mark) == []


def holding_devices(mark: str) -> list[str]:
    """All but Ray's two helper agents: these report their raylet's death to a server that is gone, for a minute."""
    return [line for line in marked_processes(mark) if not line.startswith(("ray::DashboardAgent", "ray::RuntimeEnv"))]
