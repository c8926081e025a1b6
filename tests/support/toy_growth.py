"""ToyGrowth lets a toy pool change its size: nodes with one seat each come, are drained and end as a test says."""

import asyncio
import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from async_flowrl.config.schema import RolloutConfig
from separation.group import NoSeat, Worker
from tests.support.toy_pool import REBUILD_SECONDS, ToyPool, ToyWorker

REPLACEMENT_SECONDS = 10.0
"""Virtual seconds that the replacement of a lost worker waits for a seat."""


class ToyGrowth:
    """The `Growth` of a ToyPool (see separation/group.py). Each worker has its own node; `free` counts empty nodes."""

    def __init__(self, pool: ToyPool, rollout: RolloutConfig) -> None:
        self.pool, (least, most) = pool, rollout.worker_bounds
        pool.spec = replace(pool.spec, min_workers=least, max_workers=most)
        self.free = 0
        self._ending: dict[str, float] = {}
        """Worker → time on the loop's clock at which its drained node ends."""
        self._nodeless: set[str] = set()
        """Workers whose node has ended or is being drained; no replacement can use the node."""
        self._building: set[int] = set()
        self._open = self._seats = 0
        """Number of seats without a worker, and number of all seats ever given."""
        self._changed = asyncio.Event()

    def arrive(self) -> None:
        """Adds an empty node."""
        self.free += 1
        self._notify()

    def drain(self, worker: ToyWorker, seconds: float = math.inf) -> None:
        """Announces that the worker's node ends in `seconds`; infinity means never. It then kills the worker."""
        loop = asyncio.get_running_loop()
        self._ending[worker.name] = loop.time() + seconds
        self._nodeless.add(worker.name)
        if seconds < math.inf:
            loop.call_later(seconds, worker.kill)
        self._notify()

    def end(self, worker: ToyWorker) -> None:
        """Ends the worker's node at once, which kills the worker."""
        self._nodeless.add(worker.name)
        worker.kill()

    async def seat(self) -> int:
        """Waits for a seat and returns its number; the worker's index is chosen when the worker is built."""
        while not self.free or len(self.pool.workers) + self._open >= self.pool.spec.most:
            await self._changed.wait()
        self.free -= 1
        self._open += 1
        self._seats += 1
        return self._seats

    async def fill(self, seat: int) -> Worker:
        taken = {worker.index for worker in self.pool.workers} | self._building
        index = min(set(range(self.pool.spec.most)) - taken)
        self._building.add(index)
        try:
            await asyncio.sleep(REBUILD_SECONDS)
            fresh = self.pool.sit(index)
        finally:
            self._building.discard(index)
        self._open -= 1
        self.pool.workers.append(fresh)
        self.pool.workers.sort(key=lambda worker: worker.index)
        return fresh

    async def give_back(self, seat: int) -> None:
        self._open -= 1
        self.free += 1
        self._notify()

    async def replacement(self, old: ToyWorker) -> None:
        """Waits for a seat for the replacement of `old`: on the same node if it is there, else on an empty one.

        Raises NoSeat if there is none within REPLACEMENT_SECONDS.
        """
        if old.name not in self._nodeless:
            return
        try:
            async with asyncio.timeout(REPLACEMENT_SECONDS):
                while not self.free:
                    await self._changed.wait()
        except TimeoutError:
            raise NoSeat("no node has had a seat") from None
        self.free -= 1

    async def departures(self, known: Collection[str]) -> Mapping[str, float]:
        while True:
            now = asyncio.get_running_loop().time()
            here = [worker for worker in self.pool.workers if worker.name in self._ending.keys() - set(known)]
            if here:
                return {worker.name: max(0.0, self._ending[worker.name] - now) for worker in here}
            await self._changed.wait()

    async def release(self, index: int) -> None:
        for worker in [worker for worker in self.pool.workers if worker.index == index]:
            worker.kill()
            self.pool.workers.remove(worker)
            self.free += worker.name not in self._nodeless
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
