"""ReplicaCalls gives the replicas of the trainer their groups, and keeps account of their sums and their deaths.

A replica is the ranks that hold one copy of the base together. TrainerGroup (trainer.py) is derived from ReplicaCalls.
The replicas work at the same time; each gets one call after another.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from async_flowrl.controller.collect import Sums
from async_flowrl.controller.context import Context
from async_flowrl.controller.handed import HandedGroup
from async_flowrl.controller.living import Living
from async_flowrl.controller.owed_kl import OwedKL
from async_flowrl.controller.owners import Owners
from async_flowrl.controller.replicas import MAX_GROUPS_PER_CALL, Replica, failing_as_one, with_trajectories
from async_flowrl.controller.shared import busy_ranks, occupy, trained_for, update_seconds
from async_flowrl.controller.step_metrics import StepStatistics
from async_flowrl.training.messages import Layout, Measured, StepPlan, TrainRequest, UpdateStats
from async_flowrl.training.parts import cut
from separation.group import Worker, WorkerDied, WorkerFailed, WorkerGroup
from separation.supervise import DeadlineExceeded, deadline


class ReplicaCalls:
    """The replicas of a pool of trainer ranks, which of them live, and the calls that each has got."""

    def __init__(self, workers: WorkerGroup) -> None:
        self.workers = workers
        self.layout: Layout | None = None
        """Layout that the ranks get when they load; None means the settings of the configuration."""
        self.sharded = False
        """True if each rank has a share of the trained weights (tune=full, shard=full). Known when they have loaded.
        The ranks then add up gradients part by part (`RankPosition.by_group`)."""
        self._idle_since = 0.0
        """Time, on the loop's clock, at which the last call of a replica that trains ended."""
        self._sums = Sums(-1, StepPlan(rows=0))
        """The sums of the present attempt at an optimizer step, or of the last one."""
        self._arrange(1)

    def _arrange(self, per_replica: int) -> None:
        """Makes the replicas anew, of `per_replica` ranks each, all of them alive."""
        ranks, by_group = len(self.workers.workers), self.sharded
        self._owners = Owners(ranks, per_replica, by_group=by_group)
        starts = range(0, ranks, per_replica)
        self._replicas = [Replica(range(start, start + per_replica), ranks, by_group=by_group) for start in starts]
        self.living = Living(self.workers, per_replica, self._died, self.layout)
        self._attempts = 0
        """Number of attempts at optimizer steps so far; it numbers them."""
        self._freed = asyncio.Event()
        """Set when a replica has answered all of its calls."""
        self._measures = True
        """True if the next optimizer step is measured. The ranks say so in the statistics of each step; until then it
        is True."""
        self._owed_kl: OwedKL | None = None
        """The optimizer step whose KL is to be measured as a part of the next one."""
        self._measurement_seconds = 0.0
        """Duration of the last measurement, without its wait for a ticket; 0.0 before the first."""

    def _owned(self, ctx: Context, groups: Sequence[HandedGroup]) -> list[HandedGroup]:
        """Returns the groups with the rank that trains each of their parts."""
        owned, samples, time = [], ctx.config.trainer.micro_batch_size, now()
        busy = busy_ranks(ctx, time)
        for group in groups:
            if group.meta is not None:
                sizes = [len(part) for part in cut(group.meta.selected, samples)]
                owners = self._owners.of(sizes, time, busy=busy)
                group = replace(group, meta=replace(group.meta, owners=owners))
            owned.append(group)
        return owned

    def _book_state(self, ctx: Context, replica: Replica, state: str) -> None:
        """Records the state of a replica's ranks if it has changed; it is called for every group."""
        if replica.state != state and not replica.dead:
            replica.state = state
            for rank in replica.ranks:
                ctx.observer.state(self.workers.workers[rank].name, state)

    def _give(
        self,
        ctx: Context,
        tasks: asyncio.TaskGroup,
        sums: Sums,
        groups: Sequence[HandedGroup],
        method: str,
        *,
        most: int = MAX_GROUPS_PER_CALL,
    ) -> None:
        """Starts tasks that call `method` on each replica for the groups of which it has parts, `most` per call."""
        for index, replica in enumerate(self._replicas):
            own = [group for group in groups if replica.owns(group)]
            for start in range(0, len(own), most):
                some = own[start : start + most]
                self._start(ctx, tasks, index, some, partial(self._call, ctx, replica, sums, some, method))

    def _start(
        self,
        ctx: Context,
        tasks: asyncio.TaskGroup,
        index: int,
        groups: Sequence[HandedGroup],
        call: Callable[[], Awaitable[None]],
        *,
        measures: bool = False,
    ) -> None:
        """Starts a task that makes `call`, one call of a replica, in which it computes its parts of `groups`.

        `measures` is True for a call that measures the last optimizer step and computes nothing for the present one.
        """
        replica = self._replicas[index]
        occupy(ctx, replica.ranks, trains=True)
        replica.waiting += 1
        replica.measuring += measures
        tasks.create_task(self._on_replica(ctx, index, groups, call, measures=measures))

    async def _on_replica(
        self,
        ctx: Context,
        index: int,
        groups: Sequence[HandedGroup],
        call: Callable[[], Awaitable[None]],
        *,
        measures: bool,
    ) -> None:
        """Makes one call of a replica after its earlier calls, and tells the Owners how many seconds it took."""
        replica, samples = self._replicas[index], ctx.config.trainer.micro_batch_size
        async with replica.lock:
            began = now()
            self._book_state(ctx, replica, "busy")
            try:
                await call()
            finally:
                ended, replica.waiting = now(), replica.waiting - 1
                replica.measuring -= measures
            if not replica.dead:
                idle_at, seconds = None if replica.waiting else ended, trained_for(ctx, index, began, ended)
                if measures:
                    self._measurement_seconds = seconds
                self._owners.took(index, replica.samples(groups, samples), seconds, idle_at=idle_at)
        if not measures and not replica.trains:
            self._idle_since = ended
        if not replica.waiting:
            self._freed.set()
            self._book_state(ctx, replica, "idle")
            occupy(ctx, replica.ranks, trains=False)

    async def _call(
        self, ctx: Context, replica: Replica, sums: Sums, groups: Sequence[HandedGroup], method: str
    ) -> None:
        """Makes one call of a replica and records what is in its sums then. A replica that dies in the call is removed.

        It does nothing if the replica is dead. Raises the error if the replica lives, even if another rank died
        meanwhile, because its sums are then unknown.
        """
        dead = replica.dead
        if dead:
            return
        metas = tuple(group.meta for group in groups if group.meta is not None)
        trains = method == "train"
        more = replica.waiting > 1 or bool(ctx.table.ready_groups(sums.step))
        request = TrainRequest(sums.step, metas, sums.plan if trains and not replica.begun else None, more=more)
        replica.begun |= trains
        try:
            # A copy of the list: a successor that replaces one of these workers meanwhile knows nothing of this step.
            answers = await with_trajectories(ctx, list(self.workers.workers), replica, groups, method, request)
        except (WorkerDied, WorkerFailed) as error:
            await self.living.bury(ctx, error)
            if not replica.dead:
                raise
            return
        if trains:
            sums.manifests |= dict(zip(replica.ranks, answers, strict=True))

    async def settle(self, ctx: Context) -> None:
        """Makes the measurement that is owed, if one is, after the last step; all lines of metrics must be written."""
        async with failing_as_one() as tasks:
            self._measure_owed(ctx, tasks, None)

    def _owe(self, statistics: StepStatistics, stats: UpdateStats) -> None:
        """Records that the KL of the optimizer step is owed, unless its ranks have measured it or need not."""
        if stats.measures_later:
            names = frozenset(worker.name for worker in self.living.workers)
            self._owed_kl = OwedKL(statistics, stats.update, names)

    def _measure_owed(self, ctx: Context, tasks: asyncio.TaskGroup, step: int | None) -> None:
        """Starts the measurement that is owed, if one is: before the groups of the next optimizer step are given.

        `step` is as in `OwedKL.measured`.
        """
        owed, self._owed_kl = self._owed_kl, None
        if owed is not None:
            self._start_measurement(ctx, tasks, owed, step)

    def _start_measurement(self, ctx: Context, tasks: asyncio.TaskGroup, owed: OwedKL, step: int | None) -> None:
        """Starts the measurement on the rank that will be free first, unless all that can make it have died."""
        workers, time = self.workers.workers, now()
        if (rank := owed.chosen(ctx, self.living.ranks, workers, time)) is not None:
            self._owners.occupied(rank, time + busy_ranks(ctx, time).get(rank, 0.0) + self._measurement_seconds)
            call = partial(self._measure, ctx, tasks, owed, workers[rank], step)
            self._start(ctx, tasks, rank, (), call, measures=True)

    async def _measure(
        self, ctx: Context, tasks: asyncio.TaskGroup, owed: OwedKL, worker: Worker, step: int | None
    ) -> None:
        """Has a rank make the owed measurement; if it dies, another one does. Raises errors of a rank that lives.

        A rank that hangs after the last step (`step` is None) is killed if others live: one of them then gives the
        final weights.
        """
        replica = self._replicas[worker.index]
        more = replica.waiting > 1 or (step is not None and bool(ctx.table.ready_groups(step)))
        try:
            async with deadline(update_seconds(ctx.config, 1), f"update: KL of step {owed.statistics.step}"):
                measured: Measured = await worker.call("measure_kl", more)
        except (WorkerDied, WorkerFailed) as error:
            await self.living.bury(ctx, error)
            if not replica.dead:
                raise
            self._start_measurement(ctx, tasks, owed, step)
        except DeadlineExceeded as error:
            if step is None and len(self.living.ranks) > 1:
                worker.kill()
                await self.living.bury(ctx, WorkerDied(worker.name, str(error)))
            raise
        else:
            tasks.create_task(owed.measured(ctx, worker.name, measured, step=step))

    def _died(self, buried: Mapping[int, str]) -> None:
        """Marks the replicas of removed ranks (rank → name) as dead: their sums are lost; they get no more groups."""
        self._sums.forget(buried)
        for index, replica in enumerate(self._replicas):
            if any(rank in buried for rank in replica.ranks):
                replica.dead = True
                self._owners.absent.add(index)

    def _came(self, ranks: Sequence[int]) -> None:
        """Marks the replicas of ranks that have joined as alive."""
        for index, replica in enumerate(self._replicas):
            if any(rank in ranks for rank in replica.ranks):
                replica.dead = False
                self._owners.absent.discard(index)

    @property
    def _alive(self) -> list[Replica]:
        return [replica for replica in self._replicas if not replica.dead]


def now() -> float:
    """Returns the time of the running loop in seconds."""
    return asyncio.get_running_loop().time()
