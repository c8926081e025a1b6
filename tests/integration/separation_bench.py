"""Pools of toy workers on one event loop, for the tests of separation.

The pools on Ray are the same for all tests that use them one after another, in two files: a cluster and the workers'
processes take seconds to start. `close_on_ray` is called by conftest.py when another test follows.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from separation.cluster import cluster
from separation.group import PoolSpec, Worker, WorkerGroup
from separation.supervise import deadline
from tests.support.ray_cluster import start_ray

TOY = "tests.unit.separation.toy_object:Toy"
ROOT = Path(__file__).resolve().parents[2]


class Bench:
    """One event loop and one set of pools."""

    def __init__(self, backend: str, logs: Path) -> None:
        self.backend, self.logs = backend, logs
        self.runner = asyncio.Runner()
        pools = [
            PoolSpec("toy", TOY, 3, {"greeting": "hi"}, lanes=("sync",), threads=1, environment={"TOY": "yes"}),
            PoolSpec("ranks", TOY, 2, gpus_per_worker=1.0, process_group=True, threads=2),
        ]
        if backend == "ray":
            start_ray(resources={"ranks": 2.0})
        else:
            pools = pools[:1]
        self._context = cluster(pools, backend=backend, start_deadline=240, log_dir=logs)
        self.groups: Mapping[str, WorkerGroup] = self.runner.run(self._context.__aenter__())

    def run(self, test: Awaitable[None]) -> None:
        async def limited() -> None:
            async with deadline(240, "this test"):
                await test

        self.runner.run(limited())

    @property
    def toys(self) -> WorkerGroup:
        return self.groups["toy"]

    def close(self) -> None:
        self.runner.run(self._context.__aexit__(None, None, None))
        self.runner.close()
        if self.backend == "ray":
            assert ray.is_initialized(), "a cluster that was there before is left alone"
            ray.shutdown()


_on_ray: list[Bench] = []
"""The bench on Ray while it is open."""


def on_ray(logs: Path) -> Bench:
    """Returns the bench on Ray, which is started if there is none; its workers write to `logs` then."""
    if not _on_ray:
        _on_ray.append(Bench("ray", logs))
    return _on_ray[0]


def close_on_ray() -> None:
    if _on_ray:
        _on_ray.pop().close()


async def raises(kind: type[BaseException], job: Awaitable[Any]) -> Any:
    with pytest.raises(kind) as caught:
        await job
    return caught.value


@asynccontextmanager
async def fresh(bench: Bench, index: int) -> AsyncIterator[Worker]:
    """A worker that a test may break; replaced afterwards, so that the next test has a new one."""
    yield bench.toys.workers[index]
    await bench.toys.replace(index)
