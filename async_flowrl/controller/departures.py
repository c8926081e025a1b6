"""Records of the rollout workers that have joined during a run (Arrivals) and that must leave (Departures).

They are parts of the Context (context.py); pool_size.py and dispatch.py use them.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Departures:
    """The rollout workers of one attempt that must leave because their nodes end, by name."""

    _by: dict[str, float] = field(default_factory=dict)
    """Worker → time on the loop's clock at which it must have left; infinity if that time is not known."""
    _working: dict[str, asyncio.Timeout] = field(default_factory=dict)
    """Worker → time-out of the body of `in_time`."""

    def __contains__(self, worker: str) -> bool:
        return worker in self._by

    @property
    def names(self) -> frozenset[str]:
        """The names of all workers that were ever announced."""
        return frozenset(self._by)

    def announce(self, worker: str, seconds: float) -> None:
        """Records that the worker gets no more tickets and must end its own within `seconds` (infinity: no limit)."""
        self._by[worker] = asyncio.get_running_loop().time() + seconds
        self._limit(worker)

    @asynccontextmanager
    async def in_time(self, worker: str) -> AsyncIterator[None]:
        """Context manager for a worker's service; ends the body, without an error, when the time of a leaver is over.

        A leaver is a worker that was announced. Errors of the body are raised unchanged.
        """
        scope = asyncio.timeout(None)
        self._working[worker] = scope
        try:
            async with scope:
                self._limit(worker)
                yield
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            del self._working[worker]

    def _limit(self, worker: str) -> None:
        by, scope = self._by.get(worker), self._working.get(worker)
        if by is not None and by < float("inf") and scope is not None:
            scope.reschedule(by)


@dataclass
class Arrivals:
    """The workers that have joined the rollout pool during the run and do not serve, by name."""

    starting: int = 0
    """Number of processes that are being started and are not in the pool yet."""
    under_way: set[str] = field(default_factory=set)
    """Workers that are loading the model and getting the weights."""
    refused: set[str] = field(default_factory=set)
    """Workers that cannot serve and still have their seats."""

    def __contains__(self, worker: str) -> bool:
        return worker in self.under_way or worker in self.refused
