"""Local workers under a loop whose clock jumps, and the host's own small parts."""

import asyncio
import os
from pathlib import Path

import pytest

from separation.cluster import cluster
from separation.group import PoolSpec, WorkerDied
from separation.host import resolve, thread_environment
from separation.processes import Identity, descendants, kill_remaining
from separation.rendezvous import free_port, rank_environment
from tests.support.virtual import run_virtual

TOY = "tests.unit.separation.toy:Toy"


def test_local_workers_run_in_virtual_time() -> None:
    async def main() -> list[int]:
        async with cluster([PoolSpec("toy", TOY, 2)], backend="local", start_deadline=10) as groups:
            one, other = groups["toy"].workers
            first, refs = await one.call_split("split", 10, returns=3)
            assert first == {"count": 10}
            assert await other.call("total", *refs) == 50.0
            heard: list[int] = await one.call("note", 7)
        with pytest.raises(WorkerDied, match="toy-0 died: killed"):
            await one.call("hello")
        return heard

    assert run_virtual(main()) == [7]


def test_a_hung_local_worker_does_not_hold_the_end() -> None:
    async def main() -> None:
        async with cluster([PoolSpec("toy", TOY, 1)], backend="local", start_deadline=120) as groups:
            call = asyncio.create_task(groups["toy"].workers[0].call("wait"))
            await asyncio.sleep(0.05)
        with pytest.raises(WorkerDied):
            await call

    asyncio.run(main())


@pytest.mark.parametrize("path", ["no_colon", ":attr", "module:"])
def test_a_path_without_both_halves_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"pkg\.module:attr"):
        resolve(path)


def test_resolve_follows_dots() -> None:
    assert resolve("pathlib:Path.cwd")() == Path.cwd()


def test_threads_of_every_numeric_library_are_set() -> None:
    assert set(thread_environment(3).values()) == {"3"}
    assert "OMP_NUM_THREADS" in thread_environment(3)


def test_identity_tells_processes_apart_and_kill_remaining_ends_them() -> None:
    async def main() -> None:
        child = await asyncio.create_subprocess_exec("sleep", "600")
        identity = Identity.of(child.pid)
        assert identity is not None and identity.alive()
        assert identity in descendants(os.getpid())
        reused = Identity(identity.pid, identity.started + 1, identity.machine)
        reused.kill()
        assert identity.alive(), "a process that reuses the number must not be touched"
        assert kill_remaining([identity, reused], grace=0.0) == [identity]
        await child.wait()
        assert not identity.alive()

    asyncio.run(main())


def test_gang_environment_has_torchruns_names() -> None:
    environment = rank_environment(rank=1, world=2, address="10.0.0.1", port=free_port(), timeout=30)
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["MASTER_ADDR"]) == ("1", "2", "10.0.0.1")
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.1, got 2"):
        rank_environment(rank=2, world=2, address="10.0.0.1", port=1, timeout=30)
