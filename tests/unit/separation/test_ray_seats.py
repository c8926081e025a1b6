"""Tests of the seats of a pool that changes its size, without Ray: each test says which nodes have room."""

import asyncio
import math
import threading
from collections.abc import Coroutine
from typing import Any
from unittest import mock

import pytest

from separation import ray_internals, ray_pool
from separation.group import NoSeat
from separation.ray_pool import ReservedSeat, Seats


class Cluster:
    """Placement groups are numbers; the first that waits is placed on the first node with room."""

    def __init__(self) -> None:
        self.room: list[str] = []
        self.ending: dict[str, float] = {}
        self.waiting: list[int] = []
        self.placed: dict[int, str] = {}
        self.asked = 0

    def ask(self, bundles: Any, strategy: str) -> int:
        assert bundles == [{"CPU": 1.0}]
        self.asked += 1
        self.waiting.append(self.asked)
        return self.asked

    def table(self, group: int) -> dict[str, Any]:
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
    monkeypatch.setattr(ray_pool, "SUCCESSOR_SECONDS", 0.3)
    return made


def within(seconds: float, body: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(seconds):
            return await body

    return asyncio.run(limited())


def test_all_that_is_missing_is_asked_for_and_what_there_is_is_taken(cluster: Cluster) -> None:
    async def main() -> None:
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

    within(20.0, main())


def test_a_seat_that_is_given_back_is_free_and_asked_for_again(cluster: Cluster) -> None:
    async def main() -> None:
        reserved: list[Any] = []
        seats = Seats({"CPU": 1.0}, 1, reserved)
        cluster.room.append("a")
        place = await seats.next()
        await seats.give_back(place)
        await seats.give_back(place)
        assert reserved == [] and cluster.room == ["a"]
        assert (await seats.next()).node == "a" and cluster.asked == 2

    within(20.0, main())


def test_no_seat_on_a_node_that_is_to_end(cluster: Cluster) -> None:
    async def main() -> None:
        seats = Seats({"CPU": 1.0}, 1, [])
        cluster.ending["a"] = math.inf
        cluster.room += ["a", "b"]
        assert (await seats.next()).node == "b" and await seats.departing() == {"a": math.inf}

    within(20.0, main())


def test_a_successor_comes_before_a_newcomer_and_goes_without_after_a_while(cluster: Cluster) -> None:
    async def main() -> None:
        seats = Seats({"CPU": 1.0}, 2, [])
        cluster.room.append("a")
        old = await seats.next()
        newcomer = asyncio.create_task(seats.next())
        cluster.ending["a"] = 0.0
        successor = asyncio.create_task(seats.successor(old))
        await asyncio.sleep(0.1)
        cluster.room.append("b")
        assert (await successor).node == "b" and not newcomer.done()
        cluster.ending["b"] = 0.0
        with pytest.raises(NoSeat, match=r"no node has had a seat for 0\.3 s"):
            await seats.successor(await lost(seats, cluster))
        newcomer.cancel()

    async def lost(seats: Seats, cluster: Cluster) -> ReservedSeat:
        group = next(iter(cluster.placed))
        return ReservedSeat(group, 0, {"CPU": 1.0}, cluster.placed[group])  # type: ignore[arg-type]

    within(20.0, main())


def test_whoever_is_cancelled_while_ray_answers_leaves_the_seats_in_order(cluster: Cluster) -> None:
    """An attempt of the run ends: nobody asks any more, but no seat is lost, and the next attempt is answered."""

    async def main() -> None:
        reserved: list[Any] = []
        seats = Seats({"CPU": 1.0}, 2, reserved)
        cluster.room.append("a")
        place = await seats.next()
        await cancelled_while_it_asks(seats, seats.departing(), "draining")
        await cancelled_while_it_asks(seats, seats.give_back(place), "remove_placement_group")
        assert reserved == [2] and cluster.room == ["a"], "the seat that was to be given back is given back"
        await cancelled_while_it_asks(seats, seats.next(), "placement_group")
        assert reserved == [2, 3], "the group that was asked for is known"
        cluster.room.append("b")
        assert [(await seats.next()).node, (await seats.next()).node] == ["a", "b"] and cluster.asked == 3

    async def cancelled_while_it_asks(seats: Seats, question: Coroutine[Any, Any, Any], name: str) -> None:
        asked, answer = threading.Event(), threading.Event()
        real = getattr(ray_pool, name)

        def held_up(*args: Any, **more: Any) -> Any:
            asked.set()
            answer.wait(10.0)
            return real(*args, **more)

        with mock.patch.object(ray_pool, name, held_up):
            asking = asyncio.create_task(question)
            while not asked.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            asking.cancel()
            await asyncio.wait([asking])
            answer.set()
        await seats.departing()  # comes after it on the thread

    within(20.0, main())


def test_the_time_that_a_drained_node_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's deadline is a time of day in milliseconds, and 0 where there is none."""
    monkeypatch.setattr(ray_internals.time, "time", lambda: 1000.0)
    monkeypatch.setattr(ray_internals.state, "get_draining_nodes", lambda: {"a": 0, "b": 1_030_000, "c": 900_000})
    assert ray_internals.draining() == {"a": math.inf, "b": 30.0, "c": 0.0}
