"""Growth of an elastic pool of Ray actors: `RayGrowth` fills new seats and gives up the seats of ending nodes."""

import asyncio
from collections.abc import Collection, Sequence

from separation.group import Departure, Worker
from separation.ray_group import RayGroup
from separation.ray_seats import POLL_SECONDS, ReservedSeat, Seats


class RayGrowth:
    """Implements `Growth` (group.py), whose docstrings describe the methods, for a RayGroup."""

    def __init__(self, pool: RayGroup, seats: Seats) -> None:
        self._pool, self._seats = pool, seats

    async def seat(self) -> ReservedSeat:
        return await self._seats.next()

    async def fill(self, seat: ReservedSeat) -> Worker:
        return await self._pool.add(seat)

    async def give_back(self, seat: ReservedSeat) -> None:
        await self._seats.give_back(seat)

    async def departures(self, known: Collection[str]) -> Sequence[Departure]:
        while True:
            ending = await self._seats.departing()
            sitting = [(worker, self._pool.seat(worker.index).node) for worker in self._pool.workers]
            departures = [
                Departure(worker, ending[node])
                for worker, node in sitting
                if node in ending and worker.name not in known
            ]
            if departures:
                return departures
            await asyncio.sleep(POLL_SECONDS)

    async def release(self, index: int) -> None:
        await self._pool.remove(index)
