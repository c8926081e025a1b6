"""The end of an optimizer step over several trainer ranks: their sums are added up, then every rank steps alike.

Each rank has the sum of the gradients of its parts; a part is a micro-batch of a group (training/parts.py). trainer.py
calls two phases. In the first (`add_up`) the ranks wait for each other, and no weights change. In the second
(`take_step`) each rank steps by itself with the total that it has got.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from async_flowrl.controller.context import Context
from async_flowrl.controller.handed import HandedGroup
from async_flowrl.controller.replicas import with_probe
from async_flowrl.controller.shared import update_seconds
from async_flowrl.training.messages import Manifest, StepPlan, Summed, TrainRequest, UpdateStats
from async_flowrl.training.parts import check_plan
from separation.group import Worker
from separation.supervise import deadline, together

Stepped = list[tuple[Worker, UpdateStats]]
"""Each rank's statistics of the optimizer step."""


@dataclass
class Sums:
    """The parts in the gradient sums of all ranks, for one attempt at an optimizer step."""

    step: int
    plan: StepPlan
    manifests: dict[int, Manifest] = field(default_factory=dict)
    """Rank → the parts in its sum, as its last call reported them."""


def planned_parts(groups: Sequence[HandedGroup]) -> dict[int, int]:
    """Returns group number → number of its parts, for the groups that are trained."""
    return {group.meta.group: len(group.meta.owners) for group in groups if group.meta is not None}


async def add_up(
    ctx: Context,
    workers: Sequence[Worker],
    sums: Sums,
    groups: Sequence[HandedGroup],
    *,
    measures: bool,
    training: AbstractAsyncContextManager[Any],
) -> list[Summed]:
    """Has the ranks add up their sums and returns each rank's answer.

    `measures` is True if it is measured, on the first part of a group, how far the step moves the policy. `training` is
    the context of the call. Raises NotThePlan if a part is missing or is in two sums, and the errors of the ranks.
    """
    trained = [group for group in groups if group.meta is not None]
    planned, step, plan = planned_parts(trained), sums.step, sums.plan
    by_name: Mapping[str, Manifest] = {workers[rank].name: manifest for rank, manifest in sums.manifests.items()}
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
        for rank in range(len(workers))
    ]
    probe = next((group for group in trained if group.meta and group.meta.selected), None) if measures else None
    return await with_probe(ctx, workers, probe, requests, training)


async def take_step(ctx: Context, workers: Sequence[Worker], step: int) -> Stepped:
    """Has every rank step by the total, compares the ranks' weights, and returns the statistics by rank.

    Raises errors of the ranks, and RuntimeError if their weights differ afterwards.
    """
    async with deadline(update_seconds(ctx.config, 1), f"update: optimizer step of step {step}"):
        stepped: list[UpdateStats] = await together(*(worker.call("take_step") for worker in workers))
    did = list(zip(workers, stepped, strict=True))
    if len({stats.digest for stats in stepped}) > 1:
        digests = ", ".join(f"{worker.name} {stats.digest}" for worker, stats in did)
        raise RuntimeError(f"step {step}: the trainer ranks have different weights after the same sum: {digests}")
    return did
