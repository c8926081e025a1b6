"""The end of an optimizer step over several ranks: exactly what was planned is added up, and every rank steps alike.

Ranks wait for each other only while their sums are added up, and nobody changes anything before all of them have the
whole. So a death before that leaves sums that can be added up again, with the dead one's share computed by the living;
after it, each of the living steps by itself.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from async_flowrl.controller.context import Context
from async_flowrl.controller.handed import HandedGroup
from async_flowrl.controller.living import Living
from async_flowrl.controller.replicas import with_probe
from async_flowrl.controller.shared import update_seconds
from async_flowrl.training.manifests import check_plan, missing
from async_flowrl.training.messages import Fetched, Manifest, StepPlan, Summed, TrainRequest, UpdateStats
from async_flowrl.training.parts import NOBODY
from separation.group import Worker, WorkerDied, WorkerFailed
from separation.supervise import deadline

Whole = list[tuple[Worker, Summed]]
"""What each rank said when the sums of all were added up."""
Stepped = list[tuple[Worker, UpdateStats]]
"""What an optimizer step did, by rank."""


@dataclass
class Sums:
    """What is in the ranks' sums of one attempt at an optimizer step."""

    step: int
    plan: StepPlan
    manifests: dict[int, Manifest] = field(default_factory=dict)
    """By rank, as its last call said."""
    lost: dict[str, int] = field(default_factory=dict)
    """Parts that were in the sums of ranks that died, by their names."""

    def forget(self, buried: Mapping[int, str]) -> None:
        """These ranks died, and with them what they had added."""
        for rank, name in buried.items():
            manifest = self.manifests.pop(rank, None)
            self.lost[name] = 0 if manifest is None else len(manifest.parts)


def planned_parts(groups: Sequence[HandedGroup]) -> dict[int, int]:
    return {group.meta.group: len(group.meta.owners) for group in groups if group.meta is not None}


def complete(groups: Sequence[HandedGroup], sums: Sums) -> bool:
    """Whether every part of the groups is in somebody's sum."""
    return not missing(planned_parts(groups), sums.manifests.values())


def lacking(
    groups: Sequence[HandedGroup], sums: Sums, owned: Callable[[HandedGroup], HandedGroup]
) -> list[HandedGroup]:
    """The groups with parts in nobody's sum, with new owners for those; nobody owns the others."""
    left = missing(planned_parts(groups), sums.manifests.values())
    found = []
    for group in groups:
        if group.meta is None or group.meta.group not in left:
            continue
        again = owned(group).meta
        assert again is not None
        parts = left[group.meta.group]
        owners = tuple(owner if part in parts else NOBODY for part, owner in enumerate(again.owners))
        found.append(replace(group, meta=replace(again, owners=owners), remaking=group.remaking))
    return found


async def add_up(ctx: Context, living: Living, sums: Sums, groups: Sequence[HandedGroup], *, measures: bool) -> Whole:
    """Has the living, who have met, add up their sums. Raises NotThePlan where these are not the plan, and what one of
    them raised."""
    trained = [group for group in groups if group.meta is not None]
    planned, step, plan = planned_parts(trained), sums.step, sums.plan
    ranks, workers = living.ranks, living.workers
    by_name = {w.name: sums.manifests[rank] for rank, w in zip(ranks, workers, strict=True) if rank in sums.manifests}
    check_plan(step, plan.update, plan.attempt, planned, by_name)
    requests = [
        TrainRequest(
            step,
            (),
            None if rank in sums.manifests else plan,
            finishes=True,
            planned=tuple(planned.items()),
            attempt=plan.attempt,
        )
        for rank in ranks
    ]
    probe = next((group for group in trained if group.meta and group.meta.selected), None) if measures else None
    found: list[Summed] = await with_probe(ctx, workers, probe, requests)
    return list(zip(workers, found, strict=True))


async def take_step(ctx: Context, living: Living, step: int, whole: Whole) -> Stepped:
    """Has each of the living step by what was added up, and compares their weights.

    A rank that has died since then took nothing along: its share is in the sum that all others have. Raises what one of
    the living raised, and RuntimeError where they end up with different weights.
    """
    calls = {worker.name: asyncio.create_task(worker.call("take_step")) for worker in living.workers}
    try:
        async with deadline(update_seconds(ctx.config, 1), f"update: optimizer step of step {step}"):
            while left := [call for call in _living(calls, living).values() if not _answered(call)]:
                await asyncio.wait(left, return_when=asyncio.FIRST_EXCEPTION)
                for call in _living(calls, living).values():
                    if call.done() and (error := call.exception()) is not None:
                        if not isinstance(error, WorkerDied | WorkerFailed):
                            raise error
                        await living.bury(ctx, error)
                        break  # which of the others died is known again
    finally:
        for call in calls.values():
            call.cancel()
    did = {name: call.result() for name, call in _living(calls, living).items()}
    if len({stats.digest for stats in did.values()}) > 1:
        digests = ", ".join(f"{name} {stats.digest}" for name, stats in did.items())
        raise RuntimeError(f"step {step}: the trainer ranks have different weights after the same sum: {digests}")
    alike = replace(next(iter(did.values())), spans=(), fetched=Fetched())
    survivors = [(worker, did[worker.name]) for worker, _ in whole if worker.name in did]
    return survivors + [
        (worker, replace(alike, parts=summed.parts)) for worker, summed in whole if worker.name not in did
    ]


def _living(calls: Mapping[str, "asyncio.Task[UpdateStats]"], living: Living) -> dict[str, "asyncio.Task[UpdateStats]"]:
    """The calls, by the names of their workers, to those that live now."""
    return {worker.name: calls[worker.name] for worker in living.workers if worker.name in calls}


def _answered(call: "asyncio.Task[UpdateStats]") -> bool:
    return call.done() and call.exception() is None
