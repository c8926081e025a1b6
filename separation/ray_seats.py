"""Seats of workers: a share of a placement group; of a pool that grows and shrinks, each a group of its own."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ray import exceptions
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from separation.group import NoSeat
from separation.local import Lane
from separation.placement import Resources
from separation.ray_drain import draining

T = TypeVar("T")

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Between looks at what nodes have come, and which are to go."""
START_SECONDS = 2.0
"""How long a starting pool looks for seats beyond its fewest workers; those that come later join the run."""
SUCCESSOR_SECONDS = 10.0
"""How long a lost worker's successor waits for a seat before the pool goes on without it."""


@dataclass(frozen=True)
class Place:
    """A worker's share of a placement group. Of a pool whose size is fixed it is kept when the worker is replaced."""

    group: PlacementGroup
    bundle: int
    share: Resources
    node: str = ""
    """The node's id where the pool may leave it."""


class Seats:
    """As many seats as the cluster has for a pool, up to `most`.

    Those that are still missing are asked for all the time, as placement groups that wait: Ray's autoscaler sees in
    them what to start nodes for. Ray itself is asked on a thread of its own: it may wait for a head that is silent.
    """

    def __init__(self, needs: Resources, most: int, reserved: list[PlacementGroup]) -> None:
        """`reserved`: every placement group of the session, which it gives back at its end."""
        self._needs, self._most, self._reserved = dict(needs), most, reserved
        self._taken: list[PlacementGroup] = []
        self._waiting: list[PlacementGroup] = []
        self._successors = 0
        """Lost workers that are waiting for a seat: they come before new ones."""
        self._lane, self._one_asks = Lane("seats"), asyncio.Lock()

    def adopt(self, group: PlacementGroup) -> Place:
        """The seat of a placement group that was created at the start."""
        self._taken.append(group)
        return Place(group, 0, self._needs, _node_of(group) or "")

    async def available(self, seconds: float) -> list[Place]:
        """All seats that there are, or come to be within the time."""
        end = asyncio.get_running_loop().time() + seconds
        found: list[Place] = []
        while len(self._taken) < self._most:
            if (place := await self._look()) is not None:
                found.append(place)
            elif asyncio.get_running_loop().time() > end:
                break
            else:
                await asyncio.sleep(POLL_SECONDS / 4)
        return found

    async def next(self) -> Place:
        """Waits for a seat for one more worker."""
        while True:
            if not self._successors and (place := await self._look()) is not None:
                return place
            await asyncio.sleep(POLL_SECONDS)

    async def successor(self, old: Place) -> Place:
        """Gives a lost worker's seat back and returns another one, or the same. Raises NoSeat where there is none."""
        self._successors += 1
        end = asyncio.get_running_loop().time() + SUCCESSOR_SECONDS
        try:
            await self.give_back(old)
            while asyncio.get_running_loop().time() <= end:
                if (place := await self._look()) is not None:
                    return place
                await asyncio.sleep(POLL_SECONDS / 4)
            raise NoSeat(f"no node has had a seat for {SUCCESSOR_SECONDS:g} s")
        finally:
            self._successors -= 1

    async def give_back(self, place: Place) -> None:
        if place.group in self._taken:
            self._taken.remove(place.group)
            await self._remove(place.group)

    async def departing(self) -> Mapping[str, float]:
        """Id of each node that is to end → in how many seconds."""
        return await self._ask(draining, {})

    async def _look(self) -> Place | None:
        """Takes a seat if one of those asked for is there; asks for those that are missing."""
        async with self._one_asks:
            while len(self._taken) + len(self._waiting) < self._most:
                if not await self._ask(self._reserve_one, False):
                    return None
        waiting = list(self._waiting)
        nodes: list[str | None] = await self._ask(lambda: [_node_of(group) for group in waiting], [])
        ending = await self.departing() if any(nodes) else {}
        for group, node in zip(waiting, nodes, strict=False):
            if node is None or group not in self._waiting:
                continue
            if node in ending:
                self._waiting.remove(group)
                await self._remove(group)
                continue
            self._taken.append(group)
            self._waiting.remove(group)
            return Place(group, 0, self._needs, node)
        return None

    def _reserve_one(self) -> bool:
        """Runs on the thread, to its end, so that no group is forgotten when whoever asked is cancelled."""
        if len(self._taken) + len(self._waiting) < self._most:
            asked = placement_group([dict(self._needs)], strategy="PACK")
            self._reserved.append(asked)
            self._waiting.append(asked)
        return True

    async def _remove(self, group: PlacementGroup) -> None:
        self._reserved.remove(group)
        await self._ask(lambda: remove_placement_group(group), None)

    async def _ask(self, question: Callable[[], T], unanswered: T) -> T:
        """What Ray says. A head that fails to answer is watched by others; until they give it up it is asked again.

        What was asked is done also when whoever asked is cancelled.
        """
        try:
            return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._lane, question))
        except exceptions.RayError as error:
            log.info("Ray's head did not answer: %s", error)
            return unanswered


def _node_of(group: PlacementGroup) -> str | None:
    """Id of the node that holds a placement group of one bundle; None where none does."""
    known: dict[str, Any] = placement_group_table(group)
    return str(known["bundles_to_node_id"][0]) if known["state"] == "CREATED" else None
