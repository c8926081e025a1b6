"""RaySession is the part of a Ray cluster that one run uses: it reserves seats, builds the workers and cleans up.

cluster.py uses it.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import psutil
import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from separation.group import PoolSpec, WorkerGroup
from separation.placement import (
    PACK,
    STRICT_PACK,
    STRICT_SPREAD,
    Reservation,
    Resources,
    ResourcesMissing,
    check_fits,
    check_store,
    describe_spread,
    needs_of,
    packing,
    reserve,
    shortage,
    totals,
)
from separation.processes import alive, descendants, kill
from separation.ray_connection import RayConnection, end_remaining
from separation.ray_group import RayGroup
from separation.ray_growth import RayGrowth
from separation.ray_nodes import free_by_node, living_resources, nodes_of
from separation.ray_seats import START_SECONDS, ReservedSeat, Seats
from separation.ray_watch import HeadLost, watch_head
from separation.supervise import together

log = logging.getLogger(__name__)

ONE_NODE_SECONDS = 20.0
"""Time for which a process group waits for the one node that had room for it; then it takes several nodes."""
_POLL_SECONDS = 0.02


class RaySession:
    """The placement groups and workers of one run on one cluster."""

    def __init__(self, pools: Sequence[PoolSpec], connection: RayConnection) -> None:
        """The workers of `pools` will be on the cluster of `connection`, which `close` ends."""
        self._pools = pools
        self._connection = connection
        self._placement_groups: list[PlacementGroup] = []
        self._groups: dict[str, RayGroup] = {}
        self._headless = False

    async def start(
        self,
        *,
        start_deadline: float,
        log_dir: Path | None,
        store_bytes: int,
    ) -> dict[str, WorkerGroup]:
        """Reserves the seats of all pools, builds their workers, and returns pool name → pool.

        The arguments are those of `cluster` (cluster.py). Raises ResourcesMissing, OtherCode, WorkerFailed, WorkerDied
        or DeadlineExceeded.
        """
        nodes = living_resources()
        exists = totals(nodes)
        check_store(store_bytes, nodes)
        reservations = reserve(self._pools, exists)
        check_fits(reservations, nodes)
        reserved = await self._take(reservations, nodes, start_deadline)
        for spec in self._pools:
            seated = [reserved[spec.name, index] for index in range(spec.least)]
            seats = Seats(needs_of(spec, exists), spec.most, self._placement_groups) if spec.elastic else None
            if seats is not None:
                seated = [seats.adopt(seat.group) for seat in seated] + await seats.available(START_SECONDS)
            group = RayGroup(spec, seated, start_deadline=start_deadline, log_dir=log_dir, seats=seats)
            group.growth = RayGrowth(group, seats) if seats is not None else None
            self._groups[spec.name] = group
        await together(*(group.start() for group in self._groups.values()))
        return {**self._groups}

    async def watch(self) -> NoReturn:
        """Raises HeadLost when the cluster's head is lost; never returns. `close` then asks nothing of Ray any more."""
        try:
            await watch_head()
        except HeadLost:
            self._headless = True
            raise

    def close(self) -> None:
        """Kills the workers, gives back the reservations, ends a cluster started here; blocks for some seconds.

        It awaits nothing, so no cancellation can interrupt it. If the head is lost, Ray would block for long; then only
        the processes on this machine are killed, and workers on other nodes end themselves (ray_fence.py).
        """
        ours = self._processes()
        if self._headless:
            for process in ours:
                kill(process)
        elif ray.is_initialized():
            for group in self._groups.values():
                group.kill()
            for reserved in self._placement_groups:
                remove_placement_group(reserved)
            if self._connection.ours:
                self._connection.disconnect()
        end_remaining(ours)

    def _processes(self) -> list[psutil.Process]:
        """Returns this machine's processes that must be gone at the end: own daemons, workers, and their children."""
        workers = [worker for group in self._groups.values() for worker in group.processes()]
        roots = [process for process in [*self._connection.daemons, *workers] if alive(process)]
        return roots + [process for root in roots for process in descendants(root.pid)]

    async def _take(
        self, reservations: Sequence[Reservation], nodes: Sequence[Resources], seconds: float
    ) -> dict[tuple[str, int], ReservedSeat]:
        """Reserves a placement group for each reservation, in order, so that earlier reservations are served first.

        Returns (pool, index) → seat. Raises ResourcesMissing after `seconds`.
        """
        reserved: dict[tuple[str, int], ReservedSeat] = {}
        pending: list[PlacementGroup] = []
        try:
            async with asyncio.timeout(seconds):
                for reservation in reservations:
                    taken = await self._reserve(reservation)
                    pending.append(taken)
                    if len(reservation.bundles) > 1:
                        await _created(taken)
                        _log_spread(reservation, nodes_of(taken), nodes)
                    for seat in reservation.seats:
                        reserved[seat.pool, seat.index] = ReservedSeat(taken, seat.bundle, seat.share)
                for taken in pending:
                    await _created(taken)
        except TimeoutError as error:
            free = ray.available_resources()
            headline = f"the cluster did not free what was asked within {seconds:g} s"
            text = shortage(reservations, nodes, headline, free=lambda name: free.get(name, 0.0))
            raise ResourcesMissing(text) from error
        return reserved

    async def _reserve(self, reservation: Reservation) -> PlacementGroup:
        """Requests a placement group: on one node if one has room now, otherwise on few nodes.

        If another user takes the room meanwhile, the request for one node is replaced after ONE_NODE_SECONDS. A
        reservation whose bundles must be on different nodes is requested once.
        """
        one_or_few = (packing(reservation, free_by_node()), PACK)
        for strategy in (STRICT_SPREAD,) if reservation.apart else dict.fromkeys(one_or_few):
            taken = placement_group([dict(bundle) for bundle in reservation.bundles], strategy=strategy)
            self._placement_groups.append(taken)
            if strategy != STRICT_PACK or len(reservation.bundles) == 1:
                break
            with suppress(TimeoutError):
                await asyncio.wait_for(_created(taken), ONE_NODE_SECONDS)
                break
            remove_placement_group(taken)
            self._placement_groups.remove(taken)
        return taken


def _log_spread(reservation: Reservation, of_bundles: Sequence[str], nodes: Sequence[Resources]) -> None:
    spread = describe_spread(reservation, of_bundles)
    if not reservation.apart and len(set(of_bundles)) > 1 and packing(reservation, nodes) == STRICT_PACK:
        log.warning("%s, as others hold what one node would need: whatever its workers exchange is slower", spread)
    else:
        log.info("%s", spread)


async def _created(group: PlacementGroup) -> None:
    while placement_group_table(group)["state"] != "CREATED":  # noqa: ASYNC110
        await asyncio.sleep(_POLL_SECONDS)
