"""The trainer ranks that live: who has died, how the others meet without it, and how a successor takes its place.

A death costs the other replicas what its replica had not handed in yet. Where every rank holds all of the base, a
rank is a replica of its own, and a successor takes its place; ranks that shared the base with the dead one are ended,
and the others go on without them. One rank, the first, also sends the weights and writes the checkpoints; when it dies,
the next one does (controller/endpoints.py, controller/checkpoints.py). With the last replica a death goes back to the
checkpoint (run/recovery.py).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from async_flowrl.config.schema import Config
from async_flowrl.controller.admission import StartError, check_base
from async_flowrl.controller.context import Observer
from async_flowrl.controller.download import download_model, model_of
from async_flowrl.controller.replicas import MAX_GROUPS_PER_CALL
from async_flowrl.controller.shared import update_seconds
from async_flowrl.training.messages import Layout
from separation.group import NoSeat, RefLost, Worker, WorkerDied, WorkerFailed, WorkerGroup
from separation.rendezvous import join_process_group
from separation.supervise import DeadlineExceeded, deadline, together

logger = logging.getLogger(__name__)

DEATH_DETECTION_SECONDS = 2.0
"""Time in which the death of one rank shows after another rank has failed because of it."""
MAX_SUCCESSORS = 3
"""Successors of one rank that may fail to come; after that its run goes on without it until its next start."""
_NOT_COME = (WorkerDied, WorkerFailed, DeadlineExceeded, StartError, NoSeat, RefLost)
"""What keeps a successor from taking part: its process, its load, its base weights, its seat, its peer's state."""


class Attempt(Protocol):
    """What is asked of the attempt at training that ranks live in; the controller's `Context` is one."""

    @property
    def config(self) -> Config: ...

    @property
    def observer(self) -> Observer: ...

    @property
    def base_digest(self) -> str:
        """Of the base weights that every rank must hold."""
        ...


async def dead_among(workers: Sequence[Worker]) -> list[Worker]:
    """Those that are gone, as far as it shows by now."""
    watches = {asyncio.create_task(worker.watch()): worker for worker in workers}
    try:
        done, _ = await asyncio.wait(watches, timeout=DEATH_DETECTION_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        return [watches[task] for task in done if isinstance(task.exception(), WorkerDied)]
    finally:
        for task in watches:
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody else asks for it
            task.cancel()


def group_timeout(config: Config) -> float:
    """Seconds that a collective of the ranks may take.

    A rank that has trained its parts waits for the others, at most as long as a call may take. The call's deadline
    comes first, and names what was late.
    """
    return update_seconds(config, MAX_GROUPS_PER_CALL + 2)


def nobody_asks(buried: Mapping[int, str]) -> None:
    """For `Living` where nobody else keeps a record of the ranks."""


class Living:
    """Which trainer ranks live, among those of a pool, and which of them is the first."""

    def __init__(
        self,
        group: WorkerGroup,
        per_replica: int = 1,
        died: Callable[[Mapping[int, str]], None] = nobody_asks,
        layout: Layout | None = None,
    ) -> None:
        """`died` is called at once with the ranks that are buried, and their names. `layout`: of successors."""
        self._group, self._per_replica, self._died, self._layout = group, per_replica, died, layout
        self.dead: set[int] = set()
        self._first = 0
        self._parted = False
        """The process group holds one that died, or lacks one that came."""
        self._successors: dict[int, asyncio.Task[Worker]] = {}
        self._failures: dict[int, int] = {}
        """Of each rank's successors, those that failed to come, one after the other."""
        self._buried: set[str] = set()
        """Names of all workers that died."""
        self._settled = False

    @property
    def ranks(self) -> list[int]:
        return [rank for rank in range(len(self._group.workers)) if rank not in self.dead]

    @property
    def workers(self) -> list[Worker]:
        return [self._group.workers[rank] for rank in self.ranks]

    @property
    def first(self) -> Worker:
        """The rank that sends the weights and writes the checkpoints: rank 0 until it dies, then the lowest that lives
        at that moment, and so on. A successor does not take the role back."""
        return self._group.workers[self._first]

    @property
    def heirs(self) -> list[Worker]:
        """Those that live and would go on if the first died, the lowest rank first."""
        own = self._first // self._per_replica
        return [self._group.workers[rank] for rank in self.ranks if rank // self._per_replica != own]

    async def on_first(self, attempt: Attempt, method: str, *args: Any, lane: str = "main") -> Any:
        """The method's result on the first rank; where that dies before it answers, on the next one that is the first.

        For what every rank would answer alike. Raises WorkerDied where no rank is left that could.
        """
        while True:
            try:
                return await self.first.call(method, *args, lane=lane)
            except WorkerDied as error:
                await self.bury(attempt, error)

    async def bury(self, attempt: Attempt, error: WorkerDied | WorkerFailed) -> dict[int, str]:
        """The ranks whose death shows in `error`, with their names; none where another call has buried them meanwhile.

        With a rank go those that shared the base with it, which are killed. Raises it where nobody has died, or nobody
        would be left.
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
                self._call_successor(attempt, rank)
        return names

    def _call_successor(self, attempt: Attempt, rank: int) -> None:
        if self._settled:
            return
        name = f"a successor of trainer rank {rank}"
        self._successors[rank] = asyncio.create_task(self._succeed(attempt, rank), name=name)

    async def abort(self) -> None:
        """Ends a collective, or a meeting, in which the living wait for one that died."""

        async def end(worker: Worker) -> None:
            with suppress(WorkerDied):  # the next call to it shows that
                await worker.call("separation.rendezvous:abort", lane="control")

        await together(*(end(worker) for worker in self.workers))

    async def meet(self, attempt: Attempt) -> None:
        """Has the living form a process group of their own, where one has died or come since they last did."""
        while self._parted:
            # Before they meet, so that a death meanwhile has them meet again.
            self._parted = False
            try:
                seconds = group_timeout(attempt.config)
                # Ranks that share the base do so in groups within the default one, which must not be left.
                apart = self._per_replica > 1
                await join_process_group(self._group, timeout=seconds, members=self.workers, apart=apart)
            except BaseException:
                self._parted = True
                raise

    async def welcome(self, attempt: Attempt, step: int) -> list[int]:
        """Between two steps: ranks that were replaced and have loaded take over what their peers are. Returns them.

        One that could not come is named, and called again MAX_SUCCESSORS times; until then, and after that, the others
        do its work. Raises WorkerDied where no peer is left that could say what it is.
        """
        came = []
        for rank in [rank for rank, task in self._successors.items() if task.done()]:
            task = self._successors.pop(rank)
            try:
                worker = task.result()
                peer, digest = await self._inform(attempt, worker)
            except _NOT_COME as error:
                self._failed_to_come(attempt, rank, error)
                continue
            logger.info("%s takes part from step %d on, with the state of %s", worker.name, step, peer)
            attempt.observer.event("rejoined", worker=worker.name, step=step, peer=peer, digest=digest)
            self.dead.discard(rank)
            self._failures.pop(rank, None)
            self._parted = True
            came.append(rank)
        return came

    async def _inform(self, attempt: Attempt, worker: Worker) -> tuple[str, str]:
        """Brings the worker what the first rank is; returns that rank's name and the state's digest."""
        while True:
            peer = self.first
            async with deadline(attempt.config.deadlines.load, f"load: the state of {peer.name} for {worker.name}"):
                try:
                    digest, (state,) = await peer.call_split("state", returns=2)
                except WorkerDied as error:
                    await self.bury(attempt, error)
                    continue
                await worker.call("take_over", digest, state)
                return peer.name, digest

    def _failed_to_come(self, attempt: Attempt, rank: int, error: Exception) -> None:
        """Names the failure, and calls another successor unless too many have failed."""
        if isinstance(error, WorkerDied) and error.worker in {worker.name for worker in self.workers}:
            raise error  # its last peer died: nobody is left
        worker = self._group.workers[rank]
        worker.kill()
        failures = self._failures[rank] = self._failures.get(rank, 0) + 1
        again = failures < MAX_SUCCESSORS
        attempt.observer.event("fault", worker=worker.name, kind=type(error).__name__, message=str(error))
        logger.warning(
            "%s could not take the place of a trainer rank that died, %d in a row (%s: %s); %d of %d ranks go on, %s",
            worker.name,
            failures,
            type(error).__name__,
            error,
            len(self.ranks),
            len(self._group.workers),
            "and another successor is started" if again else "and no further successor is started",
        )
        if again:
            self._call_successor(attempt, rank)

    async def settle(self) -> None:
        """Waits no longer for successors; who is replaced afterwards is nobody's business here."""
        self._settled, tasks = True, list(self._successors.values())
        self._successors.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _succeed(self, attempt: Attempt, rank: int) -> Worker:
        """A worker in the place of one that died, with the base loaded from the files."""
        worker, config = await self._group.replace(rank), attempt.config
        attempt.observer.event("worker", worker=worker.name, pid=worker.pid, node=worker.node)
        await download_model(model_of(self._group), [(worker, "transformer")], seconds=config.deadlines.download)
        async with deadline(config.deadlines.load, f"load: model of {worker.name}"):
            info = await worker.call("load", len(self._group.workers), self._layout)
        check_base(worker, info["base_digest"], attempt.base_digest)
        return worker
