"""The end of an optimizer step over several trainer ranks: their sums are added up, then every rank steps alike.

Each rank has the sum of the gradients of its parts; a part is a micro-batch of a group (training/parts.py). trainer.py
calls two phases. In the first (`add_up`) the ranks wait for each other, and no weights change. If a rank dies before it
is complete, the living ranks compute the dead rank's parts again and the phase is repeated. In the second (`take_step`)
each rank steps by itself with the total that it has got.
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
"""Each rank's answer to `add_up`."""
Stepped = list[tuple[Worker, UpdateStats]]
"""Each rank's statistics of the optimizer step."""


@dataclass
class Sums:
    """The parts in the gradient sums of all ranks, for one attempt at an optimizer step."""

    step: int
    plan: StepPlan
    manifests: dict[int, Manifest] = field(default_factory=dict)
    """Rank → the parts in its sum, as its last call reported them."""
    lost: dict[str, int] = field(default_factory=dict)
    """Name of a rank that died → number of parts in its sum."""

    def forget(self, buried: Mapping[int, str]) -> None:
        """Removes the ranks that died (rank → name) with the parts in their sums."""
        for rank, name in buried.items():
            manifest = self.manifests.pop(rank, None)
            self.lost[name] = 0 if manifest is None else len(manifest.parts)


def planned_parts(groups: Sequence[HandedGroup]) -> dict[int, int]:
    """Returns group number → number of its parts, for the groups that are trained."""
    return {group.meta.group: len(group.meta.owners) for group in groups if group.meta is not None}


def complete(groups: Sequence[HandedGroup], sums: Sums) -> bool:
    """Returns True if every part of the groups is in the sum of a rank."""
    return not missing(planned_parts(groups), sums.manifests.values())


def lacking(
    groups: Sequence[HandedGroup], sums: Sums, owned: Callable[[HandedGroup], HandedGroup]
) -> list[HandedGroup]:
    """Returns the groups with parts in no rank's sum; only these parts get an owner, the others get NOBODY.

    `owned(group)` returns the group with a living owner for each part.
    """
    left = missing(planned_parts(groups), sums.manifests.values())
    remade = []
    for group in groups:
        if group.meta is None or group.meta.group not in left:
            continue
        again = owned(group).meta
        assert again is not None
        parts = left[group.meta.group]
        owners = tuple(owner if part in parts else NOBODY for part, owner in enumerate(again.owners))
        remade.append(replace(group, meta=replace(again, owners=owners), remaking=group.remaking))
    return remade


async def add_up(ctx: Context, living: Living, sums: Sums, groups: Sequence[HandedGroup], *, measures: bool) -> Whole:
    """Has the living ranks add up their sums and returns each rank's answer.

    The ranks must have formed a process group before. `measures` is True if it is measured, on the first part of a
    group, how far the step moves the policy. Raises NotThePlan if a part is missing or is in two sums, and the errors
    of the ranks.
    """
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
    answers: list[Summed] = await with_probe(ctx, workers, probe, requests)
    return list(zip(workers, answers, strict=True))


async def take_step(ctx: Context, living: Living, step: int, whole: Whole) -> Stepped:
    """Has every living rank step by the total, compares the ranks' weights, and returns the statistics by rank.

    A rank that dies in this phase is removed. Its parts are in the total of all others, and its statistics are returned
    with the others' metrics. Raises errors of living ranks, and RuntimeError if their weights differ afterwards.
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
                        break  # `bury` may have removed several ranks, so the calls are read anew.
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
    """Returns name → call, for the calls to workers that live now."""
    return {worker.name: calls[worker.name] for worker in living.workers if worker.name in calls}


def _answered(call: "asyncio.Task[UpdateStats]") -> bool:
    return call.done() and call.exception() is None
