"""Tests of two pools that share their workers: names, lanes, errors, and one replacement for all who ask."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from separation.cluster import cluster
from separation.cohosted import SubGroup, sub_groups
from separation.group import PoolSpec, WorkerDied, WorkerFailed

SUB_POOLS = {"one": {"main": "main", "side": "side"}, "two": {"main": "two"}}
built: list[str] = []


class Both:
    def __init__(self, index: int, name: str) -> None:
        built.append(name)
        self.one, self.two = SimpleNamespace(hello=lambda: f"one of {name}", split=lambda: (1, "kept")), Two(name)


class Two:
    def __init__(self, name: str) -> None:
        self.name = name

    def hello(self) -> str:
        return f"two of {self.name}"

    def fail(self) -> None:
        raise ValueError("not this")


@contextlib.asynccontextmanager
async def pools() -> AsyncIterator[tuple[SubGroup, SubGroup]]:
    built.clear()
    spec = PoolSpec("both", f"{__name__}:Both", 2, lanes=("side", "two"))
    async with (
        cluster([spec], backend="local", start_deadline=60) as groups,
        sub_groups(groups["both"], SUB_POOLS) as made,
    ):
        yield made["one"], made["two"]


async def test_each_sub_pool_has_workers_of_its_own() -> None:
    async with pools() as (one, two):
        assert [w.name for w in (*one.workers, *two.workers)] == ["one-0", "one-1", "two-0", "two-1"]
        assert (one.spec.name, one.spec.lanes, two.spec.lanes) == ("one", ("side",), ())
        assert [await pool.workers[1].call("hello") for pool in (one, two)] == ["one of both-1", "two of both-1"]
        assert await one.workers[0].call("os:getpid", lane="side") == one.workers[0].pid
        first, (kept,) = await one.workers[0].call_split("split", returns=2)
        assert first == 1 and await two.fetch(kept) == "kept"
        with pytest.raises(ValueError, match="two-0 has no lane 'side'; it has main"):
            await two.workers[0].call("hello", lane="side")
        with pytest.raises(WorkerFailed, match=r"^two-0\.fail raised ValueError: not this") as failed:
            await two.workers[0].call("fail")
        assert (failed.value.worker, failed.value.method, failed.value.kind) == ("two-0", "fail", "ValueError")


async def test_a_death_is_that_of_both_and_is_replaced_once() -> None:
    async with pools() as (one, two):
        watch = asyncio.create_task(two.workers[1].watch())
        await asyncio.sleep(0)
        one.workers[1].kill()
        with pytest.raises(WorkerDied, match="two-1 died: killed"):
            await watch
        fresh, other = await asyncio.gather(one.replace(1), two.replace(1))
        assert (fresh.name, other.name) == ("one-1.1", "two-1.1")
        assert await two.workers[1].call("hello") == "two of both-1.1" and one.workers[0].name == "one-0"
        assert sorted(built) == ["both-0", "both-1", "both-1.1"]
        assert (await one.replace(1)).name == "one-1.2", "who asks again has it replaced again"
        assert two.follow(1).name == "two-1.2" and two.follow(1) is two.workers[1]
        one.workers[1].kill()
        await asyncio.sleep(0)
        assert (await two.replace(1)).name == "two-1.3", "a replacement that died meanwhile is no replacement"
