"""The trainer ranks as the controller sees them: which groups go to which of them, and when.

The trainer takes whichever group of the step is ready. Advantages are computed once (float64, on the controller), and
which rank trains which part of a group is said here; a batch is cut into optimizer steps by the groups' numbers. Batch
and stream hand-over train the same parts; only the waiting differs.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from async_flowrl.algorithms.base import Algorithm
from async_flowrl.config.schema import Config
from async_flowrl.controller.context import Context, book_span
from async_flowrl.controller.handed import HandedGroup, hand_over
from async_flowrl.controller.owners import Owners, idle_ranks, repeating_ranks
from async_flowrl.controller.replicas import (
    MAX_GROUPS_PER_CALL,
    Replica,
    failing_as_one,
    with_probe,
    with_trajectories,
)
from async_flowrl.controller.step_metrics import StepStatistics
from async_flowrl.training.merged_stats import merged
from async_flowrl.training.messages import StepPlan, TrainRequest, UpdateStats
from async_flowrl.training.parts import cut
from separation.group import Worker, WorkerGroup
from separation.supervise import deadline, together

logger = logging.getLogger(__name__)


class TrainerGroup:
    """All trainer ranks of one run."""

    def __init__(self, workers: WorkerGroup, algorithm: Algorithm) -> None:
        self.workers, self.algorithm = workers, algorithm
        self._waited, self._idle_since = 0.0, 0.0
        self._arrange(1)

    def laid_out(self, config: Config, ranks_per_replica: int) -> None:
        """How many ranks hold one copy of the base between them, as they said when they loaded it."""
        self._arrange(ranks_per_replica)
        groups = config.prompts_per_step // config.trainer.updates_per_batch
        parts = len(cut(self._most_selected(config), config.trainer.micro_batch_size))
        at_once = min(groups, MAX_GROUPS_PER_CALL) if config.hand_over == "batch" else 1
        said = idle_ranks(len(self.workers.workers), groups, parts)
        if said := said or repeating_ranks(ranks_per_replica, at_once, parts):
            logger.warning("%s", said)

    def _arrange(self, per_replica: int) -> None:
        ranks = len(self.workers.workers)
        self._owners = Owners(ranks, per_replica)
        starts = range(0, ranks, per_replica)
        self._replicas = [Replica(range(start, start + per_replica), ranks) for start in starts]
        self._freed = asyncio.Event()
        self._measures = True
        """Whether the next optimizer step is measured, as the ranks said last; new ones have not said anything yet."""

    def _most_selected(self, config: Config) -> list[int]:
        """What the algorithm trains of a group whose images all differ."""
        return list(self.algorithm.select(np.arange(config.group_size, dtype=np.float64)))

    @property
    def first(self) -> Worker:
        """Rank 0, which sends the weights and writes the checkpoints."""
        return self.workers.workers[0]

    async def all(self, method: str, *args: Any, lane: str = "main") -> list[Any]:
        """The method's results on every rank, in rank order; the first failure is raised."""
        return await together(*(worker.call(method, *args, lane=lane) for worker in self.workers.workers))

    async def update(self, ctx: Context, step: int) -> dict[str, float]:
        """Trains on step `step`'s batch and returns its line of metrics (without timing)."""
        statistics = StepStatistics(step, windowed=ctx.config.algorithm.window != "none")
        began = self._idle_since = _now()
        self._waited = 0.0
        for replica in self._replicas:
            replica.state = ""
        updates = ctx.config.trainer.updates_per_batch
        size = ctx.config.prompts_per_step // updates
        batch = await self._batch(ctx, step, size) if ctx.config.hand_over == "batch" else []
        spread: list[bool | None] = []
        for update in range(updates):
            own = batch[update * size : (update + 1) * size]
            coming = self._taken(own) if own else self._ready(ctx, step, size)
            groups, results = await self._optimizer_step(ctx, step, update, size, coming)
            for group in groups:
                statistics.add_group(group.tickets, group.scores, group.advantages)
                spread.append(None if group.scores is None else any(group.advantages))
            statistics.add_update(merged(results))
        timing = {"timing/wait_rollout": self._waited, "timing/update": _now() - began - self._waited}
        return statistics.metrics() | ctx.requests.trained(step, spread) | ctx.reward_calls.pop(step) | timing

    # -- which groups, and when

    async def _batch(self, ctx: Context, step: int, size: int) -> list[HandedGroup]:
        """All groups of the step, once all are ready; the ranks know what those of later optimizer steps need."""
        groups = range(ctx.config.prompts_per_step)
        # Asked after every group: the last ones are the ones that are missing.
        await self._until(ctx, lambda: all(ctx.table.ready(step, group) for group in reversed(groups)))
        handed, batch = hand_over(ctx, self.algorithm, step, groups), list[HandedGroup]()
        for start in range(0, len(handed), size):
            self._owners.begin(size, _now())
            batch += self._owned(ctx, handed[start : start + size])
        async with failing_as_one() as tasks:
            # Predictions of the weights at the start of the batch, on the ranks that will train on them.
            self._give(ctx, tasks, step, batch[size:], "update.proximal", None, most=1)
        return batch

    async def _taken(self, groups: Sequence[HandedGroup]) -> AsyncIterator[Sequence[HandedGroup]]:
        """Groups that are here: as many as one call takes for one replica, everything where several share it."""
        most = MAX_GROUPS_PER_CALL if len(self._replicas) == 1 else len(groups)
        for start in range(0, len(groups), most):
            yield groups[start : start + most]

    async def _ready(self, ctx: Context, step: int, size: int) -> AsyncIterator[Sequence[HandedGroup]]:
        """A step's groups in whatever order they get ready, as soon as a replica is free; of several the lowest."""
        left = set(range(size))
        self._owners.begin(size, _now())

        def ready() -> list[int]:
            # A handed group that is made again gets ready a second time.
            return [group for group in ctx.table.ready_groups(step) if group in left]

        while left:
            await self._until(ctx, lambda: bool(ready()))
            while not (free := sum(not replica.waiting for replica in self._replicas)):
                self._freed.clear()
                await self._freed.wait()
            found, shares = ready(), 1 if len(self._replicas) == 1 else 2 * len(self._replicas)
            # Smaller and smaller shares, so that all replicas end at about the same time.
            chosen = found[: min(max(1, len(found) // shares), MAX_GROUPS_PER_CALL) * free]
            left -= set(chosen)
            if chosen:
                yield self._owned(ctx, hand_over(ctx, self.algorithm, step, chosen))

    def _owned(self, ctx: Context, groups: Sequence[HandedGroup]) -> list[HandedGroup]:
        """The groups with the ranks that train their parts."""
        owned, samples = [], ctx.config.trainer.micro_batch_size
        for group in groups:
            if group.meta is not None:
                owners = self._owners.of([len(part) for part in cut(group.meta.selected, samples)], _now())
                group = replace(group, meta=replace(group.meta, owners=owners))
            owned.append(group)
        return owned

    async def _until(self, ctx: Context, condition: Callable[[], bool]) -> None:
        """Waits for groups; it counts as waiting only as long as no rank computes."""
        if not condition():
            began = _now()
            for replica in self._replicas:
                if not replica.waiting:
                    self._book_state(ctx, replica, "wait_data")
            await ctx.ready.until(condition)
            if not any(replica.waiting for replica in self._replicas):
                self._waited += _now() - max(began, self._idle_since)
        if len(self.workers.workers) == 1:
            self._book_state(ctx, self._replicas[0], "busy")

    def _book_state(self, ctx: Context, replica: Replica, state: str) -> None:
        """Only where it changes: with many ranks this is asked for each group."""
        if replica.state != state:
            replica.state = state
            for rank in replica.ranks:
                ctx.observer.state(self.workers.workers[rank].name, state)

    # -- optimizer steps

    async def _optimizer_step(
        self, ctx: Context, step: int, update: int, size: int, coming: AsyncIterator[Sequence[HandedGroup]]
    ) -> tuple[list[HandedGroup], list[UpdateStats]]:
        """One optimizer step on the groups that come: all of them by rising number, and what it did, by rank."""
        while True:
            groups, results = await self._attempt(ctx, step, update, size, coming)
            self._book(ctx, results)
            if (exponent := results[0].overflow) is None:
                return groups, results
            logger.warning(
                "step %d: the sum of its gradients could exceed the range of multiples of 2^%s; the optimizer step is "
                "computed again with larger ones, which later steps keep",
                step,
                exponent,
            )
            coming = self._taken(groups)

    async def _attempt(
        self, ctx: Context, step: int, update: int, size: int, coming: AsyncIterator[Sequence[HandedGroup]]
    ) -> tuple[list[HandedGroup], list[UpdateStats]]:
        groups: list[HandedGroup] = []
        results: list[UpdateStats] = []
        plan = StepPlan(rows=0)
        for replica in self._replicas:
            replica.begun = False
        async with failing_as_one() as tasks:
            async for some in coming:
                if not groups:
                    plan = self._plan(ctx, some[0], update, size)
                groups += some
                if len(self.workers.workers) > 1:
                    self._give(ctx, tasks, step, some, "train", plan)
                else:
                    begins = plan if len(groups) == len(some) else None
                    results = await self._train_alone(ctx, step, some, begins, finishes=len(groups) == size)
        groups.sort(key=lambda group: group.number)
        return groups, results or await self._finish(ctx, step, groups, plan)

    async def _train_alone(
        self, ctx: Context, step: int, groups: Sequence[HandedGroup], begins: StepPlan | None, *, finishes: bool
    ) -> list[UpdateStats]:
        """On the only rank: the last call ends the optimizer step, too."""
        trained = [group for group in groups if group.meta is not None]
        request = TrainRequest(step, tuple(group.meta for group in trained if group.meta), begins, finishes)
        if trained:
            workers, (replica,) = self.workers.workers, self._replicas
            results = await with_trajectories(ctx, workers, replica, trained, "train", request)
        else:
            async with deadline(ctx.config.deadlines.update, f"update: step {step}"):
                results = await self.all("train", request)
        return results if finishes else []

    def _give(
        self,
        ctx: Context,
        tasks: asyncio.TaskGroup,
        step: int,
        groups: Sequence[HandedGroup],
        method: str,
        plan: StepPlan | None,
        *,
        most: int = MAX_GROUPS_PER_CALL,
    ) -> None:
        """Has every replica do its groups, one call after the other, beside the other replicas."""
        for index, replica in enumerate(self._replicas):
            own = [group for group in groups if replica.owns(group)]
            for start in range(0, len(own), most):
                replica.waiting += 1
                tasks.create_task(self._on_replica(ctx, index, step, own[start : start + most], method, plan))

    async def _on_replica(
        self, ctx: Context, index: int, step: int, groups: Sequence[HandedGroup], method: str, plan: StepPlan | None
    ) -> None:
        replica, samples = self._replicas[index], ctx.config.trainer.micro_batch_size
        async with replica.lock:
            self._book_state(ctx, replica, "busy")
            metas = tuple(group.meta for group in groups if group.meta is not None)
            request = TrainRequest(step, metas, None if replica.begun else plan)
            replica.begun, began = plan is not None, _now()
            await with_trajectories(ctx, self.workers.workers, replica, groups, method, request)
            now, replica.waiting = _now(), replica.waiting - 1
            idle_at = None if replica.waiting else now
            self._owners.took(index, replica.samples(groups, samples), now - began, idle_at=idle_at)
        if not replica.waiting:
            self._idle_since = now
            self._freed.set()
            self._book_state(ctx, replica, "idle")

    async def _finish(
        self, ctx: Context, step: int, groups: Sequence[HandedGroup], plan: StepPlan
    ) -> list[UpdateStats]:
        """Has all ranks add up what they have and step; each is told what all of them together must have."""
        for replica in self._replicas:
            self._book_state(ctx, replica, "busy")
        trained = [group for group in groups if group.meta is not None]
        planned = tuple((group.meta.group, len(group.meta.owners)) for group in trained if group.meta is not None)
        begun = [replica.begun for replica in self._replicas for _ in replica.ranks]
        requests = [TrainRequest(step, (), None if told else plan, True, planned=planned) for told in begun]
        probe = next((group for group in trained if group.meta and group.meta.selected), None)
        return await with_probe(ctx, self.workers.workers, probe if self._measures else None, requests)

    def _plan(self, ctx: Context, group: HandedGroup, update: int, groups: int) -> StepPlan:
        request = ctx.requests.request(group.tickets[0])
        per_group = len(self._most_selected(ctx.config))
        return StepPlan(rows=groups * per_group * len(request.train_steps), update=update, probe=update == 0)

    def _book(self, ctx: Context, results: list[UpdateStats]) -> None:
        self._measures = results[0].measures_next
        for worker, stats in zip(self.workers.workers, results, strict=True):
            for span in stats.spans:
                book_span(ctx.observer, worker.name, span)
            got, step = stats.fetched, stats.step
            ctx.observer.event(
                "fetched", worker=worker.name, step=step, update=stats.update, tickets=got.tickets, bytes=got.bytes
            )


def _now() -> float:
    return asyncio.get_running_loop().time()
