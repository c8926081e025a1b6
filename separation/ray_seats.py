"""Seats of Ray workers: a ReservedSeat is a share of a placement group; Seats reserves those of an elastic pool.

ray_session.py makes both. In an elastic pool (a pool whose size may change), every seat is a placement group of its
own, so that it can be reserved and given back alone.
"""

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
"""Interval of the checks for new seats and for nodes that will end."""
START_SECONDS = 2.0
"""Time in which a starting pool looks for more seats than its smallest size needs. Later seats are used later."""
SUCCESSOR_SECONDS = 10.0
"""Time that the successor of a lost worker waits for a seat; then the pool goes on without it."""


@dataclass(frozen=True)
class ReservedSeat:
    """A worker's share of a bundle of a placement group."""

    group: PlacementGroup
    bundle: int
    """Index of the bundle in the placement group."""
    share: Resources
    node: str = ""
    """Ray's id of the node, for seats of an elastic pool; else empty."""


class Seats:
    """The seats of an elastic pool: as many as the cluster has room for, up to `most`.

    For every seat that is still missing, a placement group stays requested; Ray's autoscaler may start nodes for these.
    Calls of Ray run in a thread of their own, because they block while the cluster's head node does not answer.
    """

    def __init__(self, needs: Resources, most: int, reserved: list[PlacementGroup]) -> None:
        """`needs` holds the resources of one worker, `reserved` all placement groups of the session.

        The session removes the groups in `reserved` at its end. This object adds its own groups to the list, and takes
        them out when they are given back.
        """
        self._needs, self._most, self._reserved = dict(needs), most, reserved
        self._taken: list[PlacementGroup] = []
        self._waiting: list[PlacementGroup] = []
        self._successors = 0
        """Number of lost workers whose successors wait for a seat; they get one before new workers do."""
        self._lane, self._one_asks = Lane("seats"), asyncio.Lock()

    def adopt(self, group: PlacementGroup) -> ReservedSeat:
        """Returns the seat in a placement group that the session has created, and counts it as taken."""
        self._taken.append(group)
        return ReservedSeat(group, 0, self._needs, _node_of(group) or "")

    async def available(self, seconds: float) -> list[ReservedSeat]:
        """Takes and returns all seats that are free now or become free within `seconds`."""
        end = asyncio.get_running_loop().time() + seconds
        seats: list[ReservedSeat] = []
        while len(self._taken) < self._most:
            if (seat := await self._look()) is not None:
                seats.append(seat)
            elif asyncio.get_running_loop().time() > end:
                break
            else:
                await asyncio.sleep(POLL_SECONDS / 4)
        return seats

    async def next(self) -> ReservedSeat:
        """Waits for a seat for one more worker, takes it and returns it. Successors of lost workers come first."""
        while True:
            if not self._successors and (seat := await self._look()) is not None:
                return seat
            await asyncio.sleep(POLL_SECONDS)

    async def successor(self, old: ReservedSeat) -> ReservedSeat:
        """Gives a lost worker's seat back, then takes and returns a free one, which may be the same.

        Raises NoSeat if there is none within SUCCESSOR_SECONDS.
        """
        self._successors += 1
        end = asyncio.get_running_loop().time() + SUCCESSOR_SECONDS
        try:
            await self.give_back(old)
            while asyncio.get_running_loop().time() <= end:
                if (seat := await self._look()) is not None:
                    return seat
                await asyncio.sleep(POLL_SECONDS / 4)
            raise NoSeat(f"no node has had a seat for {SUCCESSOR_SECONDS:g} s")
        finally:
            self._successors -= 1

    async def give_back(self, seat: ReservedSeat) -> None:
        """Removes the seat's placement group; does nothing if that was done before."""
        if seat.group in self._taken:
            self._taken.remove(seat.group)
            await self._remove(seat.group)

    async def departing(self) -> Mapping[str, float]:
        """Returns node id → seconds until the node ends (infinity: unknown), for nodes that are being drained."""
        return await self._ask(draining, {})

    async def _look(self) -> ReservedSeat | None:
        """Takes and returns a seat if one is free, else None; before that, requests the seats that are missing."""
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
            return ReservedSeat(group, 0, self._needs, node)
        return None

    def _reserve_one(self) -> bool:
        """Requests one seat. It runs in the thread, so a cancelled caller cannot lose a placement group."""
        if len(self._taken) + len(self._waiting) < self._most:
            asked = placement_group([dict(self._needs)], strategy="PACK")
            self._reserved.append(asked)
            self._waiting.append(asked)
        return True

    async def _remove(self, group: PlacementGroup) -> None:
        self._reserved.remove(group)
        await self._ask(lambda: remove_placement_group(group), None)

    async def _ask(self, question: Callable[[], T], unanswered: T) -> T:
        """Runs `question` in the thread and returns its result, or `unanswered` if Ray's head does not answer.

        A dead head is noticed elsewhere (ray_watch.py). The question runs to its end even if the caller is cancelled.
        """
        try:
            return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._lane, question))
        except exceptions.RayError as error:
            log.info("Ray's head did not answer: %s", error)
            return unanswered


def _node_of(group: PlacementGroup) -> str | None:
    """Returns the id of the node of a placement group with one bundle; None while it is only requested."""
    known: dict[str, Any] = placement_group_table(group)
    return str(known["bundles_to_node_id"][0]) if known["state"] == "CREATED" else None
