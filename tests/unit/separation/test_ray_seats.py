"""Tests of the seats of a pool that changes its size, without Ray: each test says which nodes have room."""

import asyncio
from typing import Any

import pytest

from separation import ray_pool
from separation.group import NoSeat
from separation.ray_pool import Seats


class Cluster:
    """Placement groups are numbers; the first that waits is placed on the first node with room."""

    def __init__(self) -> None:
        self.room: list[str] = []
        self.ending: dict[str, float] = {}
        self.waiting: list[int] = []
        self.placed: dict[int, str] = {}
        self.asked = self.looked_at = 0

    def ask(self, bundles: Any, strategy: str) -> int:
        assert bundles == [{"CPU": 1.0}]
        self.asked += 1
        self.waiting.append(self.asked)
        return self.asked

    def table(self, group: int) -> dict[str, Any]:
        self.looked_at += 1
        while self.waiting and self.room:
            self.placed[self.waiting.pop(0)] = self.room.pop(0)
        if group in self.placed:
            return {"state": "CREATED", "bundles_to_node_id": {0: self.placed[group]}}
        return {"state": "PENDING", "bundles_to_node_id": {}}

    def remove(self, group: int) -> None:
        if group in self.waiting:
            self.waiting.remove(group)
        elif (node := self.placed.pop(group)) not in self.ending:
            self.room.append(node)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(ray_pool, "placement_group", made.ask)
    monkeypatch.setattr(ray_pool, "placement_group_table", made.table)
    monkeypatch.setattr(ray_pool, "remove_placement_group", made.remove)
    monkeypatch.setattr(ray_pool, "draining", lambda: made.ending)
    monkeypatch.setattr(ray_pool, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(ray_pool, "REPLACEMENT_SECONDS", 0.3)
    return made


async def test_all_that_is_missing_is_asked_for_and_what_there_is_is_taken(cluster: Cluster) -> None:
    reserved: list[Any] = []
    seats = Seats({"CPU": 1.0}, 4, reserved)
    cluster.room += ["a", "b"]
    assert [place.node for place in await seats.available(0.05)] == ["a", "b"]
    assert len(cluster.waiting) == 2 and len(reserved) == 4, "an autoscaler sees what is missing"
    coming = asyncio.create_task(seats.next())
    await asyncio.sleep(0.05)
    assert not coming.done()
    cluster.room.append("c")
    assert (await coming).node == "c" and cluster.asked == 4


async def test_a_large_pool_looks_at_each_group_once(cluster: Cluster) -> None:
    cluster.room += ["a"] * 100
    assert len(await Seats({"CPU": 1.0}, 100, []).available(15.0)) == cluster.looked_at == 100


async def test_a_seat_that_is_given_back_is_free_and_asked_for_again(cluster: Cluster) -> None:
    reserved: list[Any] = []
    seats = Seats({"CPU": 1.0}, 1, reserved)
    cluster.room.append("a")
    place = await seats.next()
    await seats.give_back(place)
    await seats.give_back(place)
    assert reserved == [] and cluster.room == ["a"]
    assert (await seats.next()).node == "a" and cluster.asked == 2


async def test_a_replacement_comes_before_a_newcomer_and_goes_without_after_a_while(cluster: Cluster) -> None:
    seats = Seats({"CPU": 1.0}, 2, [])
    cluster.room.append("a")
    old = await seats.next()
    newcomer = asyncio.create_task(seats.next())
    cluster.ending["a"] = 0.0
    replacement = asyncio.create_task(seats.replacement(old))
    await asyncio.sleep(0.1)
    cluster.room.append("b")
    there = await replacement
    assert there.node == "b" and not newcomer.done()
    cluster.ending["b"] = 0.0
    with pytest.raises(NoSeat, match=r"no node has had a seat for 0\.3 s"):
        await seats.replacement(there)
    newcomer.cancel()
