"""Successors of dead trainer ranks: new workers that load the model beside the run, until they can join the others.

Each rank that dies has one successor at a time. One that fails is followed by another, a limited number of times in a
row. What a successor needs besides the base weights, it gets from a living rank when it joins (living.py).
"""

import asyncio
import logging

from async_flowrl.controller.admission import check_base
from async_flowrl.controller.context import Attempt
from async_flowrl.controller.download import download_model, model_of
from async_flowrl.training.messages import Layout
from separation.group import Worker, WorkerGroup
from separation.supervise import deadline

logger = logging.getLogger(__name__)


class Successors:
    """The successors that are being started in a pool of trainer ranks. A rank is the index of its worker."""

    def __init__(self, group: WorkerGroup, layout: Layout | None) -> None:
        """`layout` is given to the successors when they load."""
        self._group, self._layout = group, layout
        self._loading: dict[int, asyncio.Task[Worker]] = {}
        self._failures: dict[int, int] = {}
        """Rank → number of its successors that have failed in a row."""
        self._settled = False
        """True once `settle` was called: no more successors are started."""

    def start(self, attempt: Attempt, rank: int) -> None:
        """Starts a successor of a rank; nothing happens after `settle`."""
        if self._settled:
            return
        name = f"a successor of trainer rank {rank}"
        self._loading[rank] = asyncio.create_task(self._load(attempt, rank), name=name)

    async def _load(self, attempt: Attempt, rank: int) -> Worker:
        """Returns a new worker in the seat of a dead rank, after its base weights were loaded and compared."""
        worker, config = await self._group.replace(rank), attempt.config
        attempt.observer.event("worker", worker=worker.name, pid=worker.pid, node=worker.node)
        await download_model(model_of(self._group), [(worker, "transformer")], seconds=config.deadlines.download)
        async with deadline(config.deadlines.load, f"load: model of {worker.name}"):
            info = await worker.call("load", len(self._group.workers), self._layout)
        check_base(worker, info["base_digest"], attempt.base_digest)
        return worker

    @property
    def done(self) -> list[int]:
        """Ranks whose successor has loaded or failed and was not taken."""
        return [rank for rank, task in self._loading.items() if task.done()]

    def take(self, rank: int) -> Worker:
        """Returns the loaded successor of a rank of `done`, once. Raises the error by which it failed."""
        return self._loading.pop(rank).result()

    def joined(self, rank: int) -> None:
        """Records that the successor of a rank has joined, so that its failures are counted from 0 again."""
        self._failures.pop(rank, None)

    def failed(self, attempt: Attempt, rank: int, error: Exception, living: int) -> None:
        """Logs why a successor failed, and starts another one unless `limits.successors` have failed in a row.

        `living` is the number of ranks that live.
        """
        worker = self._group.workers[rank]
        worker.kill()
        failures = self._failures[rank] = self._failures.get(rank, 0) + 1
        again = failures < attempt.config.limits.successors
        attempt.observer.event("fault", worker=worker.name, kind=type(error).__name__, message=str(error))
        logger.warning(
            "%s could not take the place of a trainer rank that died, %d in a row (%s: %s); %d of %d ranks go on, %s",
            worker.name,
            failures,
            type(error).__name__,
            error,
            living,
            len(self._group.workers),
            "and another successor is started" if again else "and no further successor is started",
        )
        if again:
            self.start(attempt, rank)

    async def settle(self) -> None:
        """Cancels the successors that are being started; from now on none is started."""
        self._settled, tasks = True, list(self._loading.values())
        self._loading.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
