"""The trainer ranks that live: who has died, how the others meet without it, and how a successor takes its place.

Where every rank holds all of the base, a rank is a replica of its own, and its death costs the others what it had not
handed in yet. The first rank sends the weights and writes the checkpoints: with it, with the last one, or with one of
those that hold the base between them, a death goes back to the checkpoint (run/recovery.py).
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from async_flowrl.config.schema import Config
from async_flowrl.controller.admission import check_base
from async_flowrl.controller.context import Context
from async_flowrl.controller.download import download_model, model_of
from async_flowrl.controller.replicas import MAX_GROUPS_PER_CALL
from async_flowrl.controller.shared import update_seconds
from separation.group import Worker, WorkerDied, WorkerFailed, WorkerGroup
from separation.rendezvous import join_process_group
from separation.supervise import deadline, together

logger = logging.getLogger(__name__)

DEATH_DETECTION_SECONDS = 2.0
"""Time in which the death of one rank shows after another rank has failed because of it."""


async def dead_among(workers: Sequence[Worker]) -> list[Worker]:
    """Those that are gone, as far as it shows by now."""
    watches = {asyncio.create_task(worker.watch()): worker for worker in workers}
    done, pending = await asyncio.wait(watches, timeout=DEATH_DETECTION_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    return [watches[task] for task in done if isinstance(task.exception(), WorkerDied)]


def group_timeout(config: Config) -> float:
    """Seconds that a collective of the ranks may take.

    A rank that has trained its parts waits for the others, at most as long as a call may take. The call's deadline
    comes first, and names what was late.
    """
    return update_seconds(config, MAX_GROUPS_PER_CALL + 2)


class Living:
    """Which trainer ranks live, among those of a pool."""

    def __init__(self, group: WorkerGroup, per_replica: int = 1) -> None:
        self._group, self._per_replica = group, per_replica
        self.dead: set[int] = set()
        self._parted = False
        """The process group holds one that died, or lacks one that came."""
        self._successors: dict[int, asyncio.Task[Worker]] = {}
        self._buried: set[str] = set()
        """Names of all workers that died."""

    @property
    def ranks(self) -> list[int]:
        return [rank for rank in range(len(self._group.workers)) if rank not in self.dead]

    @property
    def workers(self) -> list[Worker]:
        return [self._group.workers[rank] for rank in self.ranks]

    async def bury(self, ctx: Context, error: WorkerDied | WorkerFailed) -> dict[int, str]:
        """The ranks whose death shows in `error`, with their names; none where another call has buried them meanwhile.

        Raises it where nobody has died, or one that the others cannot do without.
        """
        gone = await dead_among(self.workers)
        ranks = [rank for rank in self.ranks if self._group.workers[rank] in gone]
        if not ranks and error.worker in self._buried:
            return {}
        if not ranks or 0 in ranks or self._per_replica > 1:
            raise error
        names = {rank: self._group.workers[rank].name for rank in ranks}
        for rank, name in names.items():
            logger.warning("%s died; the other trainer ranks compute its share of this step", name)
            ctx.observer.event("fault", worker=name, kind=type(error).__name__, message=str(error))
            self.dead.add(rank)
            self._buried.add(name)
            self._successors[rank] = asyncio.create_task(self._succeed(ctx, rank), name=f"the successor of {name}")
        self._parted = True
        return names

    async def abort(self) -> None:
        """Ends a collective, or a meeting, in which the living wait for one that died."""

        async def end(worker: Worker) -> None:
            with suppress(WorkerDied):  # the next call to it shows that
                await worker.call("separation.rendezvous:abort", lane="control")

        await together(*(end(worker) for worker in self.workers))

    async def meet(self, ctx: Context) -> None:
        """Has the living form a process group of their own, where one has died or come since they last did."""
        if self._parted:
            await join_process_group(self._group, timeout=group_timeout(ctx.config), members=self.workers)
            self._parted = False

    async def welcome(self, ctx: Context, step: int) -> list[int]:
        """Between two steps: ranks that were replaced and have loaded take over what their peers are. Returns them.

        Raises what kept one from coming. Where that was its death, the run goes back to the checkpoint; else it ends.
        """
        arrived = [rank for rank, task in self._successors.items() if task.done()]
        for rank in arrived:
            worker, peer = self._successors.pop(rank).result(), self.workers[0]
            async with deadline(ctx.config.deadlines.load, f"load: the state of {peer.name} for {worker.name}"):
                digest, (state,) = await peer.call_split("state", returns=2)
                await worker.call("take_over", digest, state)
            logger.info("%s takes part from step %d on, with the state of %s", worker.name, step, peer.name)
            ctx.observer.event("rejoined", worker=worker.name, step=step, peer=peer.name, digest=digest)
            self.dead.discard(rank)
            self._parted = True
        return arrived

    async def settle(self) -> None:
        """Waits no longer for successors; who is replaced afterwards is nobody's business here."""
        tasks = list(self._successors.values())
        self._successors.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _succeed(self, ctx: Context, rank: int) -> Worker:
        """A worker in the place of one that died, with the base loaded from the files."""
        worker, config = await self._group.replace(rank), ctx.config
        ctx.observer.event("worker", worker=worker.name, pid=worker.pid, node=worker.node)
        await download_model(model_of(self._group), [(worker, "transformer")], seconds=config.deadlines.download)
        async with deadline(config.deadlines.load, f"load: model of {worker.name}"):
            info = await worker.call("load", len(self._group.workers))
        check_base(worker, info["base_digest"], ctx.base_digest)
        return worker
