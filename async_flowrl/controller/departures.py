"""Two records of rollout workers: those that must leave (Departures), and those that have come during a run and do
not serve, or not yet (Arrivals).

They are parts of the Context (context.py); pool_size.py and dispatch.py use them.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Departures:
    """The rollout workers of one attempt that must leave because their nodes are taken away: a set of names."""

    _deadlines: dict[str, float] = field(default_factory=dict)
    """Worker → time on the loop's clock at which it must have left; infinity if nobody said when its node ends."""
    _time_outs: dict[str, asyncio.Timeout] = field(default_factory=dict)
    """Worker that serves now → time-out of its service (the body of `in_time`)."""

    def __contains__(self, worker: str) -> bool:
        return worker in self._deadlines

    @property
    def names(self) -> frozenset[str]:
        """The names of all workers that were announced during this attempt, also of those that have left."""
        return frozenset(self._deadlines)

    def announce(self, worker: str, seconds: float) -> None:
        """Records that the worker gets no more tickets, and has `seconds` (infinity: no limit) for its own."""
        self._deadlines[worker] = asyncio.get_running_loop().time() + seconds
        self._apply_deadline(worker)

    @asynccontextmanager
    async def in_time(self, worker: str) -> AsyncIterator[None]:
        """Context manager for the time in which a worker serves tickets, one at a time for each worker.

        If the worker has been announced, or is announced meanwhile, the body is cancelled at its deadline, and the
        context manager ends without an error. Errors of the body are raised unchanged.
        """
        scope = asyncio.timeout(None)
        self._time_outs[worker] = scope
        try:
            async with scope:
                self._apply_deadline(worker)
                yield
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            del self._time_outs[worker]

    def _apply_deadline(self, worker: str) -> None:
        deadline, scope = self._deadlines.get(worker), self._time_outs.get(worker)
        if deadline is not None and deadline < float("inf") and scope is not None:
            scope.reschedule(deadline)


@dataclass
class Arrivals:
    """The workers that have come during the run and do not serve, or not yet. Those that serve are not in it."""

    starting: int = 0
    """Number of processes that are being started; they have no names yet."""
    under_way: set[str] = field(default_factory=set)
    """Names of the workers that are loading the model and then receive the published weights."""
    refused: set[str] = field(default_factory=set)
    """Names of the workers that cannot serve, as loading failed for example, and still occupy a place in the pool."""

    def __contains__(self, worker: str) -> bool:
        return worker in self.under_way or worker in self.refused
