"""Calls to the replicas of the trainer: the groups of each go to its ranks in order, replicas work side by side."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from async_flowrl.controller.context import Context
from async_flowrl.controller.handed import HandedGroup, make_group_again, until_whole
from async_flowrl.controller.shared import update_seconds
from async_flowrl.tickets.table import describe
from async_flowrl.training.messages import TrainRequest
from async_flowrl.training.parts import Place, cut, tickets_for, tickets_of
from separation.group import RefLost, Worker
from separation.supervise import deadline, together

ARRIVED = "async_flowrl.training.messages:arrived"
MAX_GROUPS_PER_CALL = 8
"""Groups that go to a replica in one call where so many are ready: between two calls it waits for milliseconds."""


@dataclass
class Replica:
    """The ranks that hold one copy of the base between them. They compute side by side, so they get the same calls."""

    ranks: range
    size: int
    """All trainer ranks."""
    by_group: bool = False
    """As `Place.by_group`."""
    begun: bool = False
    """It has been told of the optimizer step under way."""
    waiting: int = 0
    """Calls that were not answered yet."""
    dead: bool = False
    """Its ranks are gone, and nobody has taken their place yet."""
    state: str = ""
    """What was last recorded of its ranks in this step."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def places(self) -> list[Place]:
        return [Place(rank, self.size, len(self.ranks), self.by_group) for rank in self.ranks]

    def owns(self, group: HandedGroup) -> bool:
        return group.meta is not None and any(owner in self.ranks for owner in group.meta.owners)

    def samples(self, groups: Iterable[HandedGroup], samples: int) -> int:
        """Samples of the groups that its ranks train, in parts of so many."""
        return sum(
            len(part)
            for group in groups
            if group.meta is not None
            for part, owner in zip(cut(group.meta.selected, samples), group.meta.owners, strict=True)
            if owner in self.ranks
        )


async def with_trajectories(
    ctx: Context,
    workers: Sequence[Worker],
    replica: Replica,
    groups: Sequence[HandedGroup],
    method: str,
    request: TrainRequest,
) -> list[Any]:
    """Calls `method` on the replica's ranks, each with the trajectories that it needs of the groups, all trained.

    Those that are lost are made again first. Several ranks confirm that they have theirs before any of them begins:
    afterwards they wait for each other.
    """
    samples = ctx.config.trainer.micro_batch_size

    def needed() -> list[tuple[TrainRequest, list[Any]]]:
        calls = []
        for place in replica.places():
            tickets = tickets_for(request.metas, place, samples)
            refs = [group.refs[which] for group, own in zip(groups, tickets, strict=True) for which in own]
            calls.append((replace(request, tickets=tickets), refs))
        return calls

    seconds = update_seconds(ctx.config, len(groups) + request.finishes)
    while True:
        await until_whole(groups)
        tried = [group.refs for group in groups]
        try:
            async with deadline(seconds, f"update: {method} {describe(groups[0].tickets[0])}"):
                return await _called([workers[rank] for rank in replica.ranks], method, needed())
        except RefLost as lost:
            if len(groups) == 1:
                await make_group_again(ctx, groups[0], lost, tried[0])
                continue
        # Whose payload was lost shows when they go one by one; a call that lacks an argument has done nothing.
        single = zip(groups, request.split(), strict=True)
        return [
            await with_trajectories(ctx, workers, replica, [group], method, its_part) for group, its_part in single
        ][-1]


async def with_probe(
    ctx: Context,
    workers: Sequence[Worker],
    probe: HandedGroup | None,
    requests: Sequence[TrainRequest],
) -> list[Any]:
    """Calls `add_up` on the ranks with what ends an optimizer step, and the trajectories of the probe's first part."""
    which: tuple[int, ...] = ()
    if probe is not None and probe.meta is not None:
        which = tickets_of(probe.meta, [0], ctx.config.trainer.micro_batch_size)
        requests = [replace(request, probe=probe.meta, probe_tickets=which) for request in requests]
    while True:
        tried = [] if probe is None else probe.refs
        refs = [tried[place] for place in which]
        try:
            async with deadline(update_seconds(ctx.config, 1), f"update: end of step {requests[0].step}"):
                return await _called(workers, "add_up", [(request, refs) for request in requests])
        except RefLost as lost:
            if probe is None:
                raise
            await make_group_again(ctx, probe, lost, tried)


async def _called(
    workers: Sequence[Worker], method: str, calls: Sequence[tuple[TrainRequest, Sequence[Any]]]
) -> list[Any]:
    if len(workers) > 1 and any(refs for _, refs in calls):
        await together(*(w.call(ARRIVED, *refs) for w, (_, refs) in zip(workers, calls, strict=True)))
    return await together(*(w.call(method, request, *refs) for w, (request, refs) in zip(workers, calls, strict=True)))


@asynccontextmanager
async def failing_as_one() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup whose first failure is raised as itself."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
