"""TrainerGroup, the trainer as the controller sees it: decides which ranks train which groups of a step, and when.

A step has `trainer.updates_per_batch` optimizer steps; a group's number decides to which it belongs. With
`hand_over=batch` the step waits for all of its groups, with `hand_over=stream` they are trained as they become ready.
Both train the same parts (micro-batches of a group, training/parts.py). Replicas, the ranks that hold one copy of the
base together, work side by side. A rank that dies ends the attempt: run/recovery.py starts all ranks again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from async_flowrl.algorithms.base import Algorithm, keeps_proximal
from async_flowrl.config.schema import Config, TrainerConfig
from async_flowrl.controller.context import Context
from async_flowrl.controller.rank_weights import ReplicatedWeights, ShardedWeights
from async_flowrl.controller.replicas import (
    MAX_GROUPS_PER_CALL,
    Assignment,
    Replica,
    failing_as_one,
    idle_ranks,
    repeating_ranks,
    with_probe,
    with_trajectories,
)
from async_flowrl.controller.step_metrics import StepStatistics
from async_flowrl.controller.training_groups import TrainingGroup, hand_over
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.training.messages import (
    GroupSums,
    Manifest,
    StepPlan,
    TrainRequest,
    UpdateStats,
    is_replayed,
    merged,
    with_means,
)
from async_flowrl.training.parts import check_plan, cut
from separation.group import Worker, WorkerGroup, seated
from separation.supervise import deadline, together

logger = logging.getLogger(__name__)

GROUP_SUMS = "update.group_sums"  # Method of a rank.
Stepped = list[tuple[Worker, UpdateStats]]  # Each rank's statistics of the optimizer step.


def divisor(ctx: Context, groups: Sequence[TrainingGroup]) -> int | None:
    """Returns the rows of the trained groups if the other groups do not count, else None (`TrainRequest.rows`)."""
    if ctx.config.algorithm.zero_std_groups == "count":
        return None
    steps = len(ctx.requests.request(groups[0].tickets[0]).train_steps)
    return sum(len(group.meta.selected) * steps for group in groups if group.meta is not None)


class TrainerGroup:
    """All trainer ranks of one run."""

    def __init__(self, workers: WorkerGroup, algorithm: Algorithm) -> None:
        self.workers, self.algorithm = workers, algorithm
        # Settings that the ranks get when they load, without `auto`; None means those of the configuration.
        self.settings: TrainerConfig | None = None
        # How the ranks have the trained weights. Known when they have loaded.
        self.weights = ReplicatedWeights(workers)
        # Seconds of this step in which no rank trained, as groups were not ready, and when the last call ended.
        self._waited = self._idle_since = 0.0
        self._arrange(1)

    @property
    def first(self) -> Worker:
        return self.workers.workers[0]

    def laid_out(self, config: Config, ranks_per_replica: int) -> None:
        """Sets the ranks per replica, as reported when they loaded the base; warns of idle or repeating ranks."""
        sharded = tuning_of(config).whole and ranks_per_replica > 1
        self.weights = (ShardedWeights if sharded else ReplicatedWeights)(self.workers)
        self._arrange(ranks_per_replica)
        groups = config.prompts_per_step // config.trainer.updates_per_batch
        parts = len(cut(self._most_selected(config), config.trainer.micro_batch_size))
        at_once = min(groups, MAX_GROUPS_PER_CALL) if config.hand_over == "batch" else 1
        doubt = idle_ranks(len(self.workers.workers), groups, parts)
        if doubt := doubt or repeating_ranks(ranks_per_replica, at_once, parts, by_group=self.weights.by_group):
            logger.warning("%s", doubt)

    def _arrange(self, per_replica: int) -> None:
        ranks, by_group = len(self.workers.workers), self.weights.by_group
        self._owners = Assignment(ranks, per_replica, by_group=by_group)
        starts = range(0, ranks, per_replica)
        self._replicas = [
            Replica(range(start, start + per_replica), ranks, self.weights.training, by_group) for start in starts
        ]
        self._attempts = 0  # Number of attempts at optimizer steps so far; it numbers them.
        self._plan = StepPlan(rows=0)
        # Rank → the parts in its sum of this attempt, as its last call reported them.
        self._manifests: dict[int, Manifest] = {}
        self._freed = asyncio.Event()  # Set when a replica has answered all of its calls.
        # True if the KL of the next optimizer step is measured. The ranks say so in the statistics of each step; until
        # then it is True.
        self._measures = True

    def _most_selected(self, config: Config) -> list[int]:
        return list(self.algorithm.select(np.arange(config.group_size, dtype=np.float64)))

    async def all(self, method: str, *args: Any) -> list[Any]:
        return await together(*(worker.call(method, *args) for worker in self.workers.workers))

    async def watch(self) -> None:
        await together(*(worker.watch() for worker in self.workers.workers))

    async def update(self, ctx: Context, step: int) -> dict[str, float]:
        """Trains on the groups of `step` and returns metrics. Raises errors of the ranks and DeadlineExceeded."""
        statistics = StepStatistics(step, windowed=ctx.config.algorithm.window != "none")
        began = self._idle_since = now()
        self._waited = 0.0
        for replica in self._replicas:
            replica.state = ""
        updates = ctx.config.trainer.updates_per_batch
        size = ctx.config.prompts_per_step // updates
        batch = await self._batch(ctx, step, size) if ctx.config.hand_over == "batch" else []
        spread: list[bool | None] = []
        for update in range(updates):
            of_update = batch[update * size : (update + 1) * size]
            coming = self._taken(of_update) if of_update else self._ready(ctx, step, size)
            groups, results = await self._optimizer_step(ctx, step, update, size, coming)
            for group in groups:
                statistics.add_group(group.tickets, group.scores, group.advantages)
                spread.append(None if group.scores is None else any(group.advantages))
            statistics.updates.append(merged(results))
        timing = {"timing/wait_rollout": self._waited, "timing/update": now() - began - self._waited}
        return statistics.metrics() | ctx.requests.trained(step, spread) | ctx.reward_calls.pop(step) | timing

    # -- the groups of a step, in the order in which they are trained

    async def _batch(self, ctx: Context, step: int, size: int) -> list[TrainingGroup]:
        """Waits until all groups of the step are ready and returns them, with an owner for each part.

        Owners of groups of later optimizer steps compute their proximal predictions now, before the weights change.
        """
        groups = range(ctx.config.prompts_per_step)
        # The condition is checked after every group; the last groups are usually those that are missing.
        await self._until(ctx, lambda: all(ctx.table.ready(step, group) for group in reversed(groups)))
        all_groups, batch = hand_over(ctx, self.algorithm, step, groups), list[TrainingGroup]()
        for start in range(0, len(all_groups), size):
            self._owners.begin(size)
            batch += self._owned(ctx, all_groups[start : start + size])
        async with failing_as_one() as tasks:
            later = batch[size:] if keeps_proximal(self.algorithm) else []
            # Predicts with the weights at the start of the batch, on the ranks that train these groups later.
            self._give(ctx, tasks, step, later, "update.proximal", most=1)
        return batch

    async def _taken(self, groups: Sequence[TrainingGroup]) -> AsyncIterator[Sequence[TrainingGroup]]:
        yield groups

    async def _ready(self, ctx: Context, step: int, size: int) -> AsyncIterator[Sequence[TrainingGroup]]:
        """Yields the groups of an optimizer step as they become ready and a replica is idle, low numbers first."""
        left = set(range(size))
        self._owners.begin(size)

        def ready() -> list[int]:
            # A group that was handed over and is made again becomes ready a second time; it is not in `left` any more.
            return [group for group in ctx.table.ready_groups(step) if group in left]

        while left:
            await self._until(ctx, lambda: bool(ready()))
            while not (free := sum(not replica.waiting for replica in self._replicas)):
                self._freed.clear()
                await self._freed.wait()
            groups, shares = ready(), 1 if len(self._replicas) == 1 else 2 * len(self._replicas)
            # A call gets only a share of the ready groups: shares shrink, so all replicas end at about the same time.
            chosen = groups[: min(max(1, len(groups) // shares), MAX_GROUPS_PER_CALL) * free]
            left -= set(chosen)
            if chosen:
                yield self._owned(ctx, hand_over(ctx, self.algorithm, step, chosen))

    async def _until(self, ctx: Context, condition: Callable[[], bool]) -> None:
        if not condition():
            began = now()
            for replica in self._replicas:
                if not replica.waiting:
                    self._book_state(ctx, replica, "wait_data")
            await ctx.ready.until(condition)
            if not any(replica.waiting for replica in self._replicas):
                self._waited += now() - max(began, self._idle_since)

    def _owned(self, ctx: Context, groups: Sequence[TrainingGroup]) -> list[TrainingGroup]:
        owned = []
        for group in groups:
            if group.meta is not None:
                owners = self._owners.assign([len(part) for part in group.meta.parts])
                group = replace(group, meta=replace(group.meta, owners=owners))
            owned.append(group)
        return owned

    # -- optimizer steps

    async def _optimizer_step(
        self, ctx: Context, step: int, update: int, size: int, coming: AsyncIterator[Sequence[TrainingGroup]]
    ) -> tuple[list[TrainingGroup], list[UpdateStats]]:
        """Makes an optimizer step on the groups that `coming` yields; again with a larger exponent on overflow."""
        while True:
            groups, outcome = await self._attempt(ctx, step, update, size, coming)
            if not isinstance(outcome, int):
                self._book(ctx, outcome)
                return groups, [stats for _, stats in outcome]
            logger.warning(
                "step %d: the sum of its gradients could exceed the range of multiples of 2^%s; the optimizer step is "
                "computed again with larger ones, which later steps keep",
                step,
                outcome,
            )
            coming = self._taken(groups)

    async def _attempt(
        self, ctx: Context, step: int, update: int, size: int, coming: AsyncIterator[Sequence[TrainingGroup]]
    ) -> tuple[list[TrainingGroup], Stepped | int]:
        """Tries one optimizer step; returns its groups by number, and each rank's statistics or a larger exponent."""
        groups: list[TrainingGroup] = []
        self._attempts += 1
        self._plan, self._manifests = StepPlan(rows=0), {}
        for replica in self._replicas:
            replica.begun = False
        async with failing_as_one() as tasks:
            async for some in coming:
                if not groups:
                    self._plan = self._planned(ctx, some[0], update, size)
                some = await self._measured(ctx, step, some)
                groups += some
                self._give(ctx, tasks, step, some, "train")
        groups.sort(key=lambda group: group.number)
        return groups, await self._finish(ctx, step, groups)

    async def _measured(self, ctx: Context, step: int, groups: Sequence[TrainingGroup]) -> Sequence[TrainingGroup]:
        """Returns the groups, those of several parts with the means of `Algorithm.group_terms`, if the loss has any."""
        metas = [group.meta for group in groups if group.meta is not None and len(group.meta.parts) > 1]
        if not metas or any(meta.means for meta in metas) or not hasattr(self.algorithm, "group_terms"):
            return groups
        cut = [group for group in groups if group.meta in metas]
        async with failing_as_one() as tasks:
            calls = self._give(ctx, tasks, step, cut, GROUP_SUMS)
        sums: GroupSums = {part: of for call in calls for rank in call.result() for part, of in rank.items()}
        return [
            replace(group, meta=with_means(group.meta, sums)) if group.meta in metas and group.meta else group
            for group in groups
        ]

    async def _finish(self, ctx: Context, step: int, groups: Sequence[TrainingGroup]) -> Stepped | int:
        """Adds up the ranks' sums and has each rank step; returns statistics by rank, or a larger exponent.

        Raises NotThePlan if a part is missing or is in two sums, and RuntimeError if the ranks' weights differ
        afterwards.
        """
        for replica in self._replicas:
            self._book_state(ctx, replica, "busy")
        workers, training, plan = self.workers.workers, self.weights.training, self._plan
        planned = {group.meta.group: len(group.meta.owners) for group in groups if group.meta is not None}
        by_name = {workers[rank].name: manifest for rank, manifest in self._manifests.items()}
        check_plan(step, plan.update, plan.attempt, planned, by_name)
        rows, parts = divisor(ctx, groups), tuple(planned.items())
        base_request = TrainRequest(step, (), planned=parts, rows=rows, attempt=plan.attempt)
        requests = [
            base_request if rank in self._manifests else replace(base_request, begins=plan)
            for rank in range(len(workers))
        ]
        # A rank that trains alone has the probe already.
        measured = [group for group in groups if group.meta and group.meta.parts and len(workers) > 1]
        probe = measured[0] if measured and self._measures else None
        overflows: list[int | None] = await with_probe(ctx, workers, probe, requests, training)
        if overflows[0] is not None:
            return overflows[0]
        async with training, deadline(ctx.placement.update_seconds(1), f"update: optimizer step of step {step}"):
            stepped: list[UpdateStats] = await together(*(worker.call("take_step") for worker in workers))
        did = list(zip(workers, stepped, strict=True))
        if len({stats.digest for stats in stepped}) > 1:
            digests = ", ".join(f"{worker.name} {stats.digest}" for worker, stats in did)
            raise RuntimeError(f"step {step}: the trainer ranks have different weights after the same sum: {digests}")
        return did

    def _planned(self, ctx: Context, group: TrainingGroup, update: int, groups: int) -> StepPlan:
        step = group.tickets[0].step
        request = ctx.requests.request(group.tickets[0])
        per_group = len(self._most_selected(ctx.config))
        rows = groups * per_group * len(request.train_steps)
        return StepPlan(rows, update, self._attempts, replay=is_replayed(step))

    def _book(self, ctx: Context, results: Stepped) -> None:
        self._measures = results[0][1].measures_next
        for worker, stats in results:
            for span in stats.spans:
                ctx.observer.span(worker.name, span)
            got = {"tickets": len(stats.fetched), "bytes": sum(stats.fetched)}
            ctx.observer.event("fetched", worker=worker.name, step=stats.step, update=stats.update, **got)

    # -- calls of the replicas

    def _book_state(self, ctx: Context, replica: Replica, state: str) -> None:
        if replica.state != state:
            replica.state = state
            for rank in replica.ranks:
                ctx.observer.state(self.workers.workers[rank].name, state)

    def _give(
        self,
        ctx: Context,
        tasks: asyncio.TaskGroup,
        step: int,
        groups: Sequence[TrainingGroup],
        method: str,
        *,
        most: int = MAX_GROUPS_PER_CALL,
    ) -> list[asyncio.Task[list[Any]]]:
        calls = []
        for index, replica in enumerate(self._replicas):
            share = [group for group in groups if replica.owns(group)]
            for start in range(0, len(share), most):
                ctx.placement.begin_training(replica.ranks)
                replica.waiting += 1
                calls.append(tasks.create_task(self._call(ctx, index, step, share[start : start + most], method)))
        return calls

    async def _call(
        self, ctx: Context, index: int, step: int, groups: Sequence[TrainingGroup], method: str
    ) -> list[Any]:
        replica = self._replicas[index]
        metas = tuple(group.meta for group in groups if group.meta is not None)
        trains = method == "train"
        async with replica.lock:
            self._book_state(ctx, replica, "busy")
            more = replica.waiting > 1 or bool(ctx.table.ready_groups(step))
            begins = self._plan if trains and not replica.begun else None
            replica.begun |= trains
            request = TrainRequest(step, metas, begins, more=more)
            try:
                answers = await with_trajectories(ctx, self.workers.workers, replica, groups, method, request)
            finally:
                replica.waiting -= 1
            if method != GROUP_SUMS:
                self._owners.computed(index, replica.samples(groups))
        if trains:
            self._manifests |= dict(zip(replica.ranks, answers, strict=True))
        self._idle_since = now()
        if not replica.waiting:
            self._freed.set()
            self._book_state(ctx, replica, "idle")
            for rank in ctx.placement.end_training(replica.ranks):
                ctx.work.notify(seated(ctx.rollout, rank).name)
        return answers


def now() -> float:
    return asyncio.get_running_loop().time()
