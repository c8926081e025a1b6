"""Replica, one replica of the trainer for the controller, and the calls that pass trajectories to its ranks.

A replica is the trainer ranks that hold one copy of the base together. trainer.py uses this file.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from async_flowrl.controller.context import Context
from async_flowrl.controller.training_groups import TrainingGroup, make_group_again, until_whole
from async_flowrl.tickets.table import describe
from async_flowrl.training.messages import TrainRequest
from async_flowrl.training.parts import World, tickets_for, tickets_of
from separation.group import RefLost, Worker
from separation.supervise import deadline, leaves, together

# Function with which a worker confirms that the arguments of the call have arrived.
ARRIVED = "async_flowrl.training.messages:arrived"
# Maximum number of groups in one call of a replica. Between two calls the replica waits for some milliseconds.
MAX_GROUPS_PER_CALL = 8


@dataclass
class Replica:
    """The ranks that hold one copy of the base together. They run collectives together, so they get the same calls."""

    ranks: range  # The numbers of its ranks.
    size: int  # Number of all trainer ranks.
    # Context of every call in which its ranks train.
    training: AbstractAsyncContextManager[Any] = field(default_factory=nullcontext)
    by_group: bool = False  # As `World.by_group`.
    begun: bool = False  # True once its ranks know the plan of the present optimizer step.
    waiting: int = 0  # Number of calls that are not answered yet, those that wait for `lock` included.
    state: str = ""  # The state of its ranks that was recorded last in this step.
    # Held during a call: a replica gets its calls one after another.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def positions(self) -> list[World]:
        return [World(rank, self.size, len(self.ranks), self.by_group) for rank in self.ranks]

    def owns(self, group: TrainingGroup) -> bool:
        return group.meta is not None and any(owner in self.ranks for owner in group.meta.owners)

    def samples(self, groups: Iterable[TrainingGroup]) -> int:
        return sum(
            len(part)
            for group in groups
            if group.meta is not None
            for part, owner in zip(group.meta.parts, group.meta.owners, strict=True)
            if owner in self.ranks
        )


async def with_trajectories(
    ctx: Context,
    workers: Sequence[Worker],
    replica: Replica,
    groups: Sequence[TrainingGroup],
    method: str,
    request: TrainRequest,
) -> list[Any]:
    """Calls `method` on a replica's ranks with the trajectories that each needs; returns answers in rank order.

    `groups` have `meta` and the order of `request.metas`. Lost trajectories are made again, then groups are sent one by
    one and the last answers returned. Raises DeadlineExceeded, WorkerDied or WorkerFailed.
    """

    def needed() -> list[tuple[TrainRequest, list[Any]]]:
        calls = []
        for position in replica.positions():
            tickets = tickets_for(request.metas, position)
            refs = [group.refs[which] for group, places in zip(groups, tickets, strict=True) for which in places]
            calls.append((replace(request, tickets=tickets), refs))
        return calls

    seconds = ctx.placement.update_seconds(len(groups))
    while True:
        await until_whole(groups)
        tried = [group.refs for group in groups]
        try:
            async with deadline(seconds, f"update: {method} {describe(groups[0].tickets[0])}"):
                return await _called([workers[rank] for rank in replica.ranks], method, needed(), replica.training)
        except RefLost as lost:
            if len(groups) == 1:
                await make_group_again(ctx, groups[0], lost, tried[0])
                continue
        # One call per group shows which group has lost its payload. A call without an argument has not run, so nothing
        # is done twice.
        single = zip(groups, request.split(), strict=True)
        return [
            await with_trajectories(ctx, workers, replica, [group], method, its_part) for group, its_part in single
        ][-1]


async def with_probe(
    ctx: Context,
    workers: Sequence[Worker],
    probe: TrainingGroup | None,
    requests: Sequence[TrainRequest],
    training: AbstractAsyncContextManager[Any],
) -> list[Any]:
    """Calls `add_up` on the ranks with the trajectories of the probe's first part, on which they measure the step's KL.

    Lost trajectories are made again. Raises DeadlineExceeded, WorkerDied or WorkerFailed.
    """
    which: tuple[int, ...] = ()
    if probe is not None and probe.meta is not None:
        which = tickets_of(probe.meta, [0])
        requests = [replace(request, probe=probe.meta, probe_tickets=which) for request in requests]
    while True:
        tried = [] if probe is None else probe.refs
        refs = [tried[index] for index in which]
        try:
            async with deadline(ctx.placement.update_seconds(1), f"update: end of step {requests[0].step}"):
                return await _called(workers, "add_up", [(request, refs) for request in requests], training)
        except RefLost as lost:
            if probe is None:
                raise
            await make_group_again(ctx, probe, lost, tried)


async def _called(
    workers: Sequence[Worker],
    method: str,
    calls: Sequence[tuple[TrainRequest, Sequence[Any]]],
    training: AbstractAsyncContextManager[Any],
) -> list[Any]:
    """Calls the method on all workers at once, after several have confirmed that their trajectories have arrived.

    In the method they wait for each other in collectives, so a lost trajectory must show before any of them begins.
    """
    if len(workers) > 1 and any(refs for _, refs in calls):
        await together(*(w.call(ARRIVED, *refs) for w, (_, refs) in zip(workers, calls, strict=True)))
    async with training:
        return await together(
            *(worker.call(method, request, *refs) for worker, (request, refs) in zip(workers, calls, strict=True))
        )


@asynccontextmanager
async def failing_as_one() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup whose first failure is raised as itself, not in an exception group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        raise leaves(group)[0] from None


def idle_ranks(ranks: int, groups: int, parts: int) -> str | None:
    """Returns a sentence if `groups` groups of `parts` parts are fewer parts than there are ranks, else None."""
    if groups * parts >= ranks:
        return None
    return (
        f"{ranks - groups * parts} of {ranks} trainer ranks have nothing to train: an optimizer step has {groups} "
        f"groups of {parts} parts; a smaller trainer.micro_batch_size makes more"
    )


def repeating_ranks(per_replica: int, groups: int, parts: int, *, by_group: bool = False) -> str | None:
    """Returns a sentence if a call has fewer parts than a replica has ranks, which then repeat parts, else None."""
    if by_group and parts % per_replica:
        return (
            f"the {per_replica} trainer ranks that share the trained weights compute each group side by side, and its "
            f"{parts} parts leave {-parts % per_replica} of them without one of their own: a trainer.micro_batch_size "
            f"that cuts a group into a multiple of {per_replica} parts wastes nothing"
        )
    if by_group or groups * parts >= per_replica:
        return None
    return (
        f"{per_replica - groups * parts} of the {per_replica} trainer ranks that share one copy of the base compute "
        f"parts again that another has, because all gather its blocks together: as few as {groups} groups of {parts} "
        "parts come at a time; a smaller trainer.micro_batch_size, hand_over=batch, trainer.shard=none, or hybrid with "
        "a smaller trainer.shard_size wastes less"
    )


class Assignment:
    """Assigns the groups of one optimizer step, as they come, to the replica with the fewest images left to compute."""

    def __init__(self, ranks: int, per_replica: int = 1, *, by_group: bool = False) -> None:
        """Raises ValueError if `per_replica` does not divide `ranks`; `by_group`: ranks take parts in turn."""
        if ranks % per_replica:
            raise ValueError(f"{ranks} trainer ranks cannot form replicas of {per_replica}")
        self._per_replica, self._replicas, self._by_group = per_replica, ranks // per_replica, by_group
        self._load = [0] * ranks  # Rank → number of images that it has got in this optimizer step.
        self._left = [0] * self._replicas  # Replica → number of images that it has got and not computed yet.
        self._whole = True  # True: groups are not split over replicas.

    def begin(self, groups: int) -> None:
        """Begins an optimizer step; groups are split over replicas only if there are fewer than two for each."""
        self._load, self._left = [0] * len(self._load), [0] * self._replicas
        self._whole = groups >= 2 * self._replicas

    def assign(self, samples: Sequence[int]) -> tuple[int, ...]:
        """Returns the rank for each part of the next group, whose numbers of images are `samples`.

        Of equally good replicas the one with the fewest images in this optimizer step is taken, then the lowest.
        """
        whole = self._next(sum(samples)) if self._whole else None
        owners = []
        for part, size in enumerate(samples):
            ranks = self._ranks(self._next(size) if whole is None else whole)
            owner = ranks[part % len(ranks)] if self._by_group else min(ranks, key=lambda rank: self._load[rank])
            self._load[owner] += size
            owners.append(owner)
        return tuple(owners)

    def computed(self, replica: int, samples: int) -> None:
        self._left[replica] = max(0, self._left[replica] - samples)

    def _next(self, samples: int) -> int:
        done = [sum(self._load[rank] for rank in self._ranks(replica)) for replica in range(self._replicas)]
        chosen = min(range(self._replicas), key=lambda replica: (self._left[replica], done[replica]))
        self._left[chosen] += samples
        return chosen

    def _ranks(self, replica: int) -> range:
        return range(replica * self._per_replica, (replica + 1) * self._per_replica)
