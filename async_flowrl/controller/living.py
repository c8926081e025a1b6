"""Living keeps account of which trainer ranks live: it removes dead ranks, rebuilds the process group, adds successors.

A replica is the ranks that hold one copy of the base together. The trainer (trainer.py, replica_calls.py) and the
endpoints (endpoints.py) report the errors that they see to `bury`. If a rank dies, only the parts in its replica's
gradient sum must be computed again. If every rank holds the whole base, a rank is a replica of its own, and a successor
joins for it (successors.py). Otherwise the other ranks of the dead rank's replica are ended, too, and the other
replicas go on without them. The first rank also sends the weights and writes the checkpoints; if it dies, the next rank
does so (endpoints.py, checkpoints.py). If the last replica dies, the attempt ends and recovery starts at the checkpoint
(run/recovery.py).
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from async_flowrl.config.schema import Config
from async_flowrl.controller.admission import StartError
from async_flowrl.controller.context import Attempt
from async_flowrl.controller.deaths import dead_among
from async_flowrl.controller.replicas import MAX_GROUPS_PER_CALL
from async_flowrl.controller.shared import update_seconds
from async_flowrl.controller.successors import Successors
from async_flowrl.training.messages import Layout
from separation.group import NoSeat, RefLost, Worker, WorkerDied, WorkerFailed, WorkerGroup
from separation.rendezvous import join_process_group
from separation.supervise import DeadlineExceeded, deadline, together

logger = logging.getLogger(__name__)

Told = tuple[str, str, int]
"""Method of `Versions` by which ranks keep a version or let go of it, stream and version."""
_NOT_COME = (WorkerDied, WorkerFailed, DeadlineExceeded, StartError, NoSeat, RefLost)
"""Errors that keep a successor from joining: of its process, its loading, its base weights, its seat or its peer's
state."""


def group_timeout(config: Config) -> float:
    """Returns the time-out of the ranks' collectives in seconds.

    A rank that has trained its parts waits for the others in a collective, at most as long as their calls may take. The
    deadline of a call is shorter, so it passes first, and its error names the call.
    """
    return update_seconds(config, MAX_GROUPS_PER_CALL + 2)


def nobody_asks(buried: Mapping[int, str]) -> None:
    """Does nothing; default for `died` of Living, if no other object keeps a record of the ranks."""


class Living:
    """The trainer ranks of a pool that live, and the first of them. A rank is the index of its worker."""

    def __init__(
        self,
        group: WorkerGroup,
        per_replica: int = 1,
        died: Callable[[Mapping[int, str]], None] = nobody_asks,
        layout: Layout | None = None,
    ) -> None:
        """`per_replica` is the number of ranks per replica; `layout` is given to successors when they load.

        `died` is called with the ranks that `bury` removes and their workers' names (rank → name). `bury` has not
        started a successor by then.
        """
        self._group, self._per_replica, self._died = group, per_replica, died
        self.successors = Successors(group, layout)
        self.dead: set[int] = set()
        self._first = 0
        self._parted = False
        """True: the process group contains a rank that died, or lacks a rank that joined."""
        self._buried: set[str] = set()
        """Names of all workers that have died or were ended."""
        self._telling: list[Told] = []
        """Calls that the ranks have been sent and have not all answered."""
        self._missed: list[Told] | None = None
        """Calls that a newcomer has missed while it takes over a peer's state; None at other times."""

    @property
    def ranks(self) -> list[int]:
        return [rank for rank in range(len(self._group.workers)) if rank not in self.dead]

    @property
    def workers(self) -> list[Worker]:
        return [self._group.workers[rank] for rank in self.ranks]

    @property
    def first(self) -> Worker:
        """The rank that sends the weights and writes the checkpoints.

        It is rank 0 until that dies, then the lowest rank that lives at that moment, and so on. A successor does not
        take the role back.
        """
        return self._group.workers[self._first]

    @property
    def heirs(self) -> list[Worker]:
        """The living ranks outside the first rank's replica, in rank order; one of them follows when that rank dies."""
        own = self._first // self._per_replica
        return [self._group.workers[rank] for rank in self.ranks if rank // self._per_replica != own]

    @contextmanager
    def telling(self, method: str, stream: str, version: int) -> Iterator[list[Worker]]:
        """Yields the living ranks; inside, the caller tells them to keep a version, or to let go of it.

        `method` is the method of `Versions` that it calls. A newcomer that is taking over a peer's state is told after
        that, because the state may be from before the peer has heard of it.
        """
        told = method, stream, version
        self._telling.append(told)
        if self._missed is not None:
            self._missed.append(told)
        try:
            yield self.workers
        finally:
            self._telling.remove(told)

    async def on_first(self, attempt: Attempt, method: str, *args: Any, lane: str = "main") -> Any:
        """Returns the method's result on the first rank; if that dies before it answers, the next first rank is asked.

        It is used for methods whose result is the same on every rank. Raises WorkerDied if no rank is left.
        """
        while True:
            try:
                return await self.first.call(method, *args, lane=lane)
            except WorkerDied as error:
                await self.bury(attempt, error)

    async def bury(self, attempt: Attempt, error: WorkerDied | WorkerFailed) -> dict[int, str]:
        """Removes the ranks whose death `error` shows, and returns rank → name of each of them.

        The other ranks of a dead rank's replica are killed and removed, too. If every rank is a replica of its own,
        successors are started. The result is empty if another call has removed the rank already. Raises `error` if no
        rank has died, or if no rank would be left.
        """
        gone = {worker.name for worker in await dead_among(self.workers)}
        if isinstance(error, WorkerDied):
            gone.add(error.worker)
        names = {rank: worker.name for rank, worker in zip(self.ranks, self.workers, strict=True)}
        lost = {rank // self._per_replica for rank, name in names.items() if name in gone}
        names = {rank: name for rank, name in names.items() if rank // self._per_replica in lost}
        if not names and error.worker in self._buried:
            return {}
        if not names or len(names) == len(self.ranks):
            raise error
        for rank, name in names.items():
            if name in gone:
                logger.warning("%s died; the other trainer ranks compute its share of this step", name)
            else:
                logger.warning("%s is ended: it shared the base with a rank that died", name)
            self._group.workers[rank].kill()
            attempt.observer.event("fault", worker=name, kind=type(error).__name__, message=str(error))
            self.dead.add(rank)
            self._buried.add(name)
        self._parted, counts = True, (len(self.ranks), len(self._group.workers))
        if self._first in self.dead:
            self._first = self.ranks[0]
            logger.warning("%s sends the weights and writes the checkpoints from now on", self.first.name)
        self._died(names)
        if self._per_replica > 1:
            logger.warning(
                "%d of %d trainer ranks go on; successors come with the next start from a checkpoint", *counts
            )
        else:
            for rank in names:
                self.successors.start(attempt, rank)
        return names

    async def abort(self) -> None:
        """Aborts the collectives, and the forming of a process group, in which living ranks wait for a dead one."""

        async def end(worker: Worker) -> None:
            with suppress(WorkerDied):  # The next call of this rank reports its death.
                await worker.call("separation.rendezvous:abort", lane="control")

        await together(*(end(worker) for worker in self.workers))

    async def meet(self, attempt: Attempt) -> None:
        """Forms a process group of the living ranks, if a rank has died or joined since the last one was formed.

        Raises WorkerDied, WorkerFailed or DeadlineExceeded if that fails; the next call then tries again.
        """
        while self._parted:
            # Set before the group is formed: a death meanwhile sets it to True, and the loop forms another group.
            self._parted = False
            try:
                seconds = group_timeout(attempt.config)
                # Ranks that share the base use process groups made within the default one, so they must not leave it.
                apart = self._per_replica > 1
                await join_process_group(self._group, timeout=seconds, members=self.workers, apart=apart)
            except BaseException:
                self._parted = True
                raise

    async def welcome(self, attempt: Attempt, step: int) -> list[int]:
        """Lets successors that have loaded join, between two steps, with the first rank's state; returns their ranks.

        The other ranks do the work of one that fails (`Successors.failed`). Raises WorkerDied if no rank is left that
        has the state.
        """
        came = []
        for rank in self.successors.done:
            try:
                await self._join(attempt, rank, self.successors.take(rank), step)
            except _NOT_COME as error:
                if isinstance(error, WorkerDied) and error.worker in {worker.name for worker in self.workers}:
                    raise  # The last living rank died; `bury` did not remove it, because none would be left.
                self.successors.failed(attempt, rank, error, len(self.ranks))
            else:
                came.append(rank)
        return came

    async def _join(self, attempt: Attempt, rank: int, worker: Worker, step: int) -> None:
        """Makes the worker a living rank with the first rank's state. Raises an error of _NOT_COME if that fails."""
        self._missed = list(self._telling)
        try:
            peer, digest = await self._inform(attempt, worker)
        finally:
            self._missed = None
        logger.info("%s takes part from step %d on, with the state of %s", worker.name, step, peer)
        attempt.observer.event("rejoined", worker=worker.name, step=step, peer=peer, digest=digest)
        self.dead.discard(rank)
        self.successors.joined(rank)
        self._parted = True

    async def _inform(self, attempt: Attempt, worker: Worker) -> tuple[str, str]:
        """Copies the first rank's state to the worker; returns that rank's name and the state's digest."""
        while True:
            peer = self.first
            async with deadline(attempt.config.deadlines.load, f"load: the state of {peer.name} for {worker.name}"):
                try:
                    digest, (state,) = await peer.call_split("state", returns=2)
                except WorkerDied as error:
                    await self.bury(attempt, error)
                    continue
                await worker.call("take_over", digest, state)
                while self._missed:
                    method, stream, version = self._missed.pop(0)
                    await worker.call(f"versions.{method}", stream, version)
                return peer.name, digest
