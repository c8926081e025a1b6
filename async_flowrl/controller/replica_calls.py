"""Calls to the replicas of the trainer, side by side: what each has in its sums then, and which of them died."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from async_flowrl.controller.collect import Sums
from async_flowrl.controller.context import Context
from async_flowrl.controller.handed import HandedGroup
from async_flowrl.controller.living import Living
from async_flowrl.controller.owners import Owners
from async_flowrl.controller.replicas import MAX_GROUPS_PER_CALL, Replica, with_trajectories
from async_flowrl.controller.shared import occupy
from async_flowrl.training.messages import Layout, StepPlan, TrainRequest
from async_flowrl.training.parts import cut
from separation.group import WorkerDied, WorkerFailed, WorkerGroup


class ReplicaCalls:
    """The replicas of a pool of trainer ranks, who of them lives, and what was given to which."""

    def __init__(self, workers: WorkerGroup) -> None:
        self.workers = workers
        self.layout: Layout | None = None
        """What the ranks are told of their layout when they load; None: what the configuration says."""
        self.sharded = False
        """Each rank has a share of the trained weights (tune=full, shard=full), and the ranks add up gradients part by
        part (`Place.by_group`). Known when they have loaded."""
        self._idle_since = 0.0
        self._sums = Sums(-1, StepPlan(rows=0))
        """Of the attempt at an optimizer step under way, or of the last one."""
        self._arrange(1)

    def _arrange(self, per_replica: int) -> None:
        ranks, by_group = len(self.workers.workers), self.sharded
        self._owners = Owners(ranks, per_replica, by_group=by_group)
        starts = range(0, ranks, per_replica)
        self._replicas = [Replica(range(start, start + per_replica), ranks, by_group=by_group) for start in starts]
        self.living = Living(self.workers, per_replica, self._died, self.layout)
        self._attempts = 0
        """Beginnings of optimizer steps until now."""
        self._freed = asyncio.Event()
        self._measures = True
        """Whether the next optimizer step is measured, as the ranks said last; new ones have not said anything yet."""

    def _owned(self, ctx: Context, groups: Sequence[HandedGroup]) -> list[HandedGroup]:
        """The groups with the ranks that train their parts."""
        owned, samples = [], ctx.config.trainer.micro_batch_size
        for group in groups:
            if group.meta is not None:
                owners = self._owners.of([len(part) for part in cut(group.meta.selected, samples)], now())
                group = replace(group, meta=replace(group.meta, owners=owners))
            owned.append(group)
        return owned

    def _book_state(self, ctx: Context, replica: Replica, state: str) -> None:
        """Only where it changes: with many ranks this is asked for each group."""
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
        """Has every replica do its groups, one call after the other, beside the other replicas."""
        for index, replica in enumerate(self._replicas):
            own = [group for group in groups if replica.owns(group)]
            if own:
                occupy(ctx, replica.ranks, trains=True)
            for start in range(0, len(own), most):
                replica.waiting += 1
                tasks.create_task(self._on_replica(ctx, index, sums, own[start : start + most], method))

    async def _on_replica(
        self, ctx: Context, index: int, sums: Sums, groups: Sequence[HandedGroup], method: str
    ) -> None:
        replica, samples = self._replicas[index], ctx.config.trainer.micro_batch_size
        async with replica.lock:
            began = now()
            if not replica.dead:
                self._book_state(ctx, replica, "busy")
                await self._call(ctx, replica, sums, groups, method)
            ended, replica.waiting = now(), replica.waiting - 1
            if not replica.dead:
                idle_at = None if replica.waiting else ended
                self._owners.took(index, replica.samples(groups, samples), ended - began, idle_at=idle_at)
        if not replica.waiting:
            self._idle_since = ended
            self._freed.set()
            self._book_state(ctx, replica, "idle")
            occupy(ctx, replica.ranks, trains=False)

    async def _call(
        self, ctx: Context, replica: Replica, sums: Sums, groups: Sequence[HandedGroup], method: str
    ) -> None:
        """One call to a replica, and what is in its sums then. One that dies is buried, and what it had with it.

        Raises what one that lives raised, whoever died meanwhile: nobody knows what is in its sums then.
        """
        metas = tuple(group.meta for group in groups if group.meta is not None)
        trains = method == "train"
        more = replica.waiting > 1 or bool(ctx.table.ready_groups(sums.step))
        request = TrainRequest(sums.step, metas, sums.plan if trains and not replica.begun else None, more=more)
        replica.begun |= trains
        try:
            # As they are now: a successor that takes the place of one of them meanwhile knows nothing of this step.
            answers = await with_trajectories(ctx, list(self.workers.workers), replica, groups, method, request)
        except (WorkerDied, WorkerFailed) as error:
            await self.living.bury(ctx, error)
            if not replica.dead:
                raise
            return
        if trains:
            sums.manifests |= dict(zip(replica.ranks, answers, strict=True))

    def _died(self, buried: Mapping[int, str]) -> None:
        """What these ranks had in their sums is lost, and they are given nothing any more; whoever has noticed."""
        self._sums.forget(buried)
        for index, replica in enumerate(self._replicas):
            if any(rank in buried for rank in replica.ranks):
                replica.dead = True
                self._owners.absent.add(index)

    def _came(self, ranks: Sequence[int]) -> None:
        for index, replica in enumerate(self._replicas):
            if any(rank in ranks for rank in replica.ranks):
                replica.dead = False
                self._owners.absent.discard(index)

    @property
    def _alive(self) -> list[Replica]:
        return [replica for replica in self._replicas if not replica.dead]


def now() -> float:
    return asyncio.get_running_loop().time()
