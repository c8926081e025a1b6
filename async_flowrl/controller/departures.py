"""Rollout workers that come, and that are to leave because their nodes end: each finishes what it has time for."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Departures:
    """Of one attempt of a run, by the names of the workers."""

    _by: dict[str, float] = field(default_factory=dict)
    """When each must have left, on the loop's clock; infinity where nobody said."""
    _working: dict[str, asyncio.Timeout] = field(default_factory=dict)

    def __contains__(self, worker: str) -> bool:
        return worker in self._by

    @property
    def names(self) -> frozenset[str]:
        """Everybody who was ever announced."""
        return frozenset(self._by)

    def announce(self, worker: str, seconds: float) -> None:
        """The worker gets no more tickets, and what it has not finished within `seconds` is handed back."""
        self._by[worker] = asyncio.get_running_loop().time() + seconds
        self._limit(worker)

    @asynccontextmanager
    async def in_time(self, worker: str) -> AsyncIterator[None]:
        """Ends the body, without an error, when the time of a worker that leaves is up."""
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
    """Rollout workers in the pool that do not serve, by their names: they have come while the run goes on."""

    starting: int = 0
    """How many processes are being started, which are not in the pool yet."""
    under_way: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    """Those that cannot serve and have not left their seats yet."""

    def __contains__(self, worker: str) -> bool:
        return worker in self.under_way or worker in self.refused
