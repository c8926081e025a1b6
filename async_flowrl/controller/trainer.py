"""The trainer ranks as the controller sees them: which groups go to which of them, and when.

The trainer takes whichever group of the step is ready. Advantages are computed once (float64, on the controller), and
which rank trains which part of a group is said here; a batch is cut into optimizer steps by the groups' numbers. Batch
and stream hand-over train the same parts; only the waiting differs.
"""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np

from async_flowrl.algorithms.base import Algorithm
from async_flowrl.config.schema import FULL, Config
from async_flowrl.controller.collect import Stepped, Sums, add_up, complete, lacking, take_step
from async_flowrl.controller.context import Context, book_span
from async_flowrl.controller.handed import HandedGroup, hand_over
from async_flowrl.controller.owners import idle_ranks, repeating_ranks
from async_flowrl.controller.replica_calls import ReplicaCalls, now
from async_flowrl.controller.replicas import (
    MAX_GROUPS_PER_CALL,
    failing_as_one,
    with_trajectories,
)
from async_flowrl.controller.shared import update_seconds
from async_flowrl.controller.step_metrics import StepStatistics
from async_flowrl.training.merged_stats import merged
from async_flowrl.training.messages import StepPlan, Summed, TrainRequest, UpdateStats
from async_flowrl.training.parts import NOBODY, cut
from separation.group import WorkerDied, WorkerFailed, WorkerGroup
from separation.supervise import deadline, together

logger = logging.getLogger(__name__)


class TrainerGroup(ReplicaCalls):
    """All trainer ranks of one run."""

    def __init__(self, workers: WorkerGroup, algorithm: Algorithm) -> None:
        super().__init__(workers)
        self.algorithm = algorithm
        self._waited = 0.0

    def laid_out(self, config: Config, ranks_per_replica: int) -> None:
        """How many ranks hold one copy of the base between them, as they said when they loaded it."""
        self.sharded = config.tune == FULL and ranks_per_replica > 1
        self._arrange(ranks_per_replica)
        groups = config.prompts_per_step // config.trainer.updates_per_batch
        parts = len(cut(self._most_selected(config), config.trainer.micro_batch_size))
        at_once = min(groups, MAX_GROUPS_PER_CALL) if config.hand_over == "batch" else 1
        said = idle_ranks(len(self.workers.workers), groups, parts)
        if said := said or repeating_ranks(ranks_per_replica, at_once, parts, by_group=self.sharded):
            logger.warning("%s", said)

    def _most_selected(self, config: Config) -> list[int]:
        """What the algorithm trains of a group whose images all differ."""
        return list(self.algorithm.select(np.arange(config.group_size, dtype=np.float64)))

    async def all(self, method: str, *args: Any, lane: str = "main") -> list[Any]:
        """The method's results on every rank that lives, in rank order; the first failure is raised."""
        return await together(*(worker.call(method, *args, lane=lane) for worker in self.living.workers))

    async def update(self, ctx: Context, step: int) -> dict[str, float]:
        """Trains on step `step`'s batch and returns its line of metrics (without timing)."""
        statistics = StepStatistics(step, windowed=ctx.config.algorithm.window != "none")
        began = self._idle_since = now()
        self._waited = 0.0
        self._came(await self.living.welcome(ctx, step))
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
        timing = {"timing/wait_rollout": self._waited, "timing/update": now() - began - self._waited}
        return statistics.metrics() | ctx.requests.trained(step, spread) | ctx.reward_calls.pop(step) | timing

    # -- which groups, and when

    async def _batch(self, ctx: Context, step: int, size: int) -> list[HandedGroup]:
        """All groups of the step, once all are ready; the ranks know what those of later optimizer steps need."""
        groups = range(ctx.config.prompts_per_step)
        # Asked after every group: the last ones are the ones that are missing.
        await self._until(ctx, lambda: all(ctx.table.ready(step, group) for group in reversed(groups)))
        handed, batch = hand_over(ctx, self.algorithm, step, groups), list[HandedGroup]()
        for start in range(0, len(handed), size):
            self._owners.begin(size, now())
            batch += self._owned(ctx, handed[start : start + size])
        async with failing_as_one() as tasks:
            # Predictions of the weights at the start of the batch, on the ranks that will train on them.
            self._give(ctx, tasks, Sums(step, StepPlan(rows=0)), batch[size:], "update.proximal", most=1)
        return batch

    async def _taken(self, groups: Sequence[HandedGroup]) -> AsyncIterator[Sequence[HandedGroup]]:
        """Groups that are here: as many as one call takes for one replica, everything where several share it."""
        most = MAX_GROUPS_PER_CALL if len(self._replicas) == 1 else len(groups)
        for start in range(0, len(groups), most):
            yield groups[start : start + most]

    async def _ready(self, ctx: Context, step: int, size: int) -> AsyncIterator[Sequence[HandedGroup]]:
        """A step's groups in whatever order they get ready, as soon as a replica is free; of several the lowest."""
        left = set(range(size))
        self._owners.begin(size, now())

        def ready() -> list[int]:
            # A handed group that is made again gets ready a second time.
            return [group for group in ctx.table.ready_groups(step) if group in left]

        while left:
            await self._until(ctx, lambda: bool(ready()))
            while not (free := sum(not replica.waiting for replica in self._alive)):
                self._freed.clear()
                await self._freed.wait()
            found, shares = ready(), 1 if len(self._alive) == 1 else 2 * len(self._alive)
            # Smaller and smaller shares, so that all replicas end at about the same time.
            chosen = found[: min(max(1, len(found) // shares), MAX_GROUPS_PER_CALL) * free]
            left -= set(chosen)
            if chosen:
                yield self._owned(ctx, hand_over(ctx, self.algorithm, step, chosen))

    async def _until(self, ctx: Context, condition: Callable[[], bool]) -> None:
        """Waits for groups; it counts as waiting only as long as no rank computes."""
        if not condition():
            began = now()
            for replica in self._alive:
                if not replica.waiting:
                    self._book_state(ctx, replica, "wait_data")
            await ctx.ready.until(condition)
            if not any(replica.waiting for replica in self._alive):
                self._waited += now() - max(began, self._idle_since)
        if len(self.workers.workers) == 1:
            self._book_state(ctx, self._replicas[0], "busy")

    # -- optimizer steps

    async def _optimizer_step(
        self, ctx: Context, step: int, update: int, size: int, coming: AsyncIterator[Sequence[HandedGroup]]
    ) -> tuple[list[HandedGroup], list[UpdateStats]]:
        """One optimizer step on the groups that come: all of them by rising number, and what it did, by rank."""
        while True:
            groups, found = await self._attempt(ctx, step, update, size, coming)
            if not isinstance(found, int):
                self._book(ctx, found)
                return groups, [stats for _, stats in found]
            exponent = found
            logger.warning(
                "step %d: the sum of its gradients could exceed the range of multiples of 2^%s; the optimizer step is "
                "computed again with larger ones, which later steps keep",
                step,
                exponent,
            )
            coming = self._taken(groups)

    async def _attempt(
        self, ctx: Context, step: int, update: int, size: int, coming: AsyncIterator[Sequence[HandedGroup]]
    ) -> tuple[list[HandedGroup], Stepped | int]:
        """The groups by rising number, and what was done, or the exponent with which it must be done again."""
        groups: list[HandedGroup] = []
        found: Stepped | int = []
        sums = self._sums = Sums(step, StepPlan(rows=0))
        self._attempts += 1
        for replica in self._replicas:
            replica.begun = False
        async with failing_as_one() as tasks:
            async for some in coming:
                if not groups:
                    sums.plan = self._plan(ctx, some[0], update, size)
                groups += some
                if len(self.workers.workers) > 1:
                    self._give(ctx, tasks, sums, some, "train")
                else:
                    found = await self._train_alone(ctx, sums, groups, some, finishes=len(groups) == size)
        groups.sort(key=lambda group: group.number)
        return groups, found or await self._finish(ctx, sums, groups)

    async def _train_alone(
        self,
        ctx: Context,
        sums: Sums,
        until_now: Sequence[HandedGroup],
        groups: Sequence[HandedGroup],
        *,
        finishes: bool,
    ) -> Stepped | int:
        """On the only rank: the last call ends the optimizer step, too."""
        step, begins = sums.step, sums.plan if len(until_now) == len(groups) else None
        trained = [group for group in groups if group.meta is not None]
        metas = tuple(group.meta for group in trained if group.meta)
        more = not finishes and (ctx.config.hand_over == "batch" or bool(ctx.table.ready_groups(step)))
        request = TrainRequest(step, metas, begins, finishes, attempt=sums.plan.attempt, more=more)
        if trained:
            workers, (replica,) = self.workers.workers, self._replicas
            results = await with_trajectories(ctx, workers, replica, trained, "train", request)
        else:
            async with deadline(update_seconds(ctx.config, 1), f"update: step {step}"):
                results = await self.all("train", request)
        if not finishes:
            return []
        summed = results[0]
        if isinstance(summed, Summed):
            assert summed.overflow is not None, "a rank alone steps at once"
            return summed.overflow
        return [(self.living.first, summed)]

    async def _finish(self, ctx: Context, sums: Sums, groups: Sequence[HandedGroup]) -> Stepped | int:
        """Has the living add up what they have, which is the whole step then, and step."""
        while True:
            await self._complete(ctx, sums, groups)
            for replica in self._alive:
                self._book_state(ctx, replica, "busy")
            try:
                await self.living.meet(ctx)
                if not complete(groups, sums):
                    continue  # one has died in the meantime
                summed = await add_up(ctx, self.living, sums, groups, measures=self._measures)
            except (WorkerDied, WorkerFailed) as error:
                await self.living.bury(ctx, error)
                await self.living.abort()
                continue
            if (overflow := summed[0][1].overflow) is not None:
                return overflow
            return await take_step(ctx, self.living, sums.step, summed)

    async def _complete(self, ctx: Context, sums: Sums, groups: Sequence[HandedGroup]) -> None:
        """Has the living compute again what is in nobody's sum, because the rank that had it died."""
        for _ in self._replicas:
            if not (again := lacking(groups, sums, lambda group: self._owned(ctx, [group])[0])):
                return
            parts = sum(owner != NOBODY for group in again if group.meta for owner in group.meta.owners)
            ctx.observer.event("recomputed", step=sums.step, update=sums.plan.update, parts=parts, lost=dict(sums.lost))
            logger.warning(
                "step %d: parts of its groups (%d) are computed again by trainer ranks that live (%d); nothing goes "
                "back to a checkpoint",
                sums.step,
                parts,
                len(self.living.ranks),
            )
            async with failing_as_one() as tasks:
                if sums.plan.update:
                    self._give(ctx, tasks, sums, again, "update.proximal", most=1)
                self._give(ctx, tasks, sums, again, "train")

    def _plan(self, ctx: Context, group: HandedGroup, update: int, groups: int) -> StepPlan:
        request = ctx.requests.request(group.tickets[0])
        per_group = len(self._most_selected(ctx.config))
        rows = groups * per_group * len(request.train_steps)
        return StepPlan(rows, update, self._attempts, probe=update == 0)

    def _book(self, ctx: Context, results: Stepped) -> None:
        self._measures = results[0][1].measures_next
        for worker, stats in results:
            for span in stats.spans:
                book_span(ctx.observer, worker.name, span)
            got, step = stats.fetched, stats.step
            ctx.observer.event(
                "fetched", worker=worker.name, step=step, update=stats.update, tickets=got.tickets, bytes=got.bytes
            )
