"""TrainerGroup, the trainer as the controller sees it: decides which ranks train which groups of a step, and when.

The loop (async_flowrl/loop.py) calls `update` once per step. A step has `trainer.updates_per_batch` optimizer steps,
and a group's number decides to which of them it belongs. With `hand_over=batch` the step waits until all of its groups
are ready; with `hand_over=stream` groups are trained in the order in which they become ready. Both train the same
parts: a part is a micro-batch of a group (training/parts.py), and the controller says which rank trains which part. A
replica is the ranks that hold one copy of the base together. Advantages are computed once, in float64, on the
controller.
"""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np

from async_flowrl.algorithms.base import Algorithm
from async_flowrl.config.schema import Config
from async_flowrl.config.sections.tune import FULL
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
from async_flowrl.training.messages import StepPlan, Summed, TrainRequest, UpdateStats, is_replayed
from async_flowrl.training.parts import NOBODY, cut
from separation.group import WorkerDied, WorkerFailed, WorkerGroup
from separation.supervise import deadline, together

logger = logging.getLogger(__name__)


class TrainerGroup(ReplicaCalls):
    """All trainer ranks of one run; it implements the protocol `Trainer` (context.py)."""

    def __init__(self, workers: WorkerGroup, algorithm: Algorithm) -> None:
        super().__init__(workers)
        self.algorithm = algorithm
        self._waited = 0.0

    def laid_out(self, config: Config, ranks_per_replica: int) -> None:
        """Sets the number of ranks per replica, which the ranks reported when they loaded the base.

        Logs a warning if some ranks have nothing to train, or must compute parts that another rank has.
        """
        self.sharded = config.tune == FULL and ranks_per_replica > 1
        self._arrange(ranks_per_replica)
        groups = config.prompts_per_step // config.trainer.updates_per_batch
        parts = len(cut(self._most_selected(config), config.trainer.micro_batch_size))
        at_once = min(groups, MAX_GROUPS_PER_CALL) if config.hand_over == "batch" else 1
        said = idle_ranks(len(self.workers.workers), groups, parts)
        if said := said or repeating_ranks(ranks_per_replica, at_once, parts, by_group=self.sharded):
            logger.warning("%s", said)

    def _most_selected(self, config: Config) -> list[int]:
        """Returns the images that the algorithm selects for training from a group in which all rewards differ."""
        return list(self.algorithm.select(np.arange(config.group_size, dtype=np.float64)))

    async def all(self, method: str, *args: Any, lane: str = "main") -> list[Any]:
        """Returns the method's results on all living ranks, in rank order. Raises the first error."""
        return await together(*(worker.call(method, *args, lane=lane) for worker in self.living.workers))

    async def update(self, ctx: Context, step: int) -> dict[str, float]:
        """Trains on the groups of `step` and returns the step's metrics, with the seconds of waiting and of training.

        Raises WorkerDied if the last replica died, other errors of the ranks, and DeadlineExceeded.
        """
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
            self._owe(statistics, results[0])
        timing = {"timing/wait_rollout": self._waited, "timing/update": now() - began - self._waited}
        return statistics.metrics() | ctx.requests.trained(step, spread) | ctx.reward_calls.pop(step) | timing

    # -- the groups of a step, in the order in which they are trained

    async def _batch(self, ctx: Context, step: int, size: int) -> list[HandedGroup]:
        """Waits until all groups of the step are ready and returns them, with an owner for each part.

        The owners of the groups of later optimizer steps also compute the proximal predictions for them now, because
        the weights change with the first optimizer step.
        """
        groups = range(ctx.config.prompts_per_step)
        # The condition is checked after every group; the last groups are usually those that are missing.
        await self._until(ctx, lambda: all(ctx.table.ready(step, group) for group in reversed(groups)))
        handed, batch = hand_over(ctx, self.algorithm, step, groups), list[HandedGroup]()
        for start in range(0, len(handed), size):
            self._owners.begin(size, now())
            batch += self._owned(ctx, handed[start : start + size])
        async with failing_as_one() as tasks:
            # Predicts with the weights at the start of the batch, on the ranks that train these groups later.
            self._give(ctx, tasks, Sums(step, StepPlan(rows=0)), batch[size:], "update.proximal", most=1)
        return batch

    async def _taken(self, groups: Sequence[HandedGroup]) -> AsyncIterator[Sequence[HandedGroup]]:
        """Yields groups that are handed over already: for a single replica one call's worth at a time, else all."""
        most = MAX_GROUPS_PER_CALL if len(self._replicas) == 1 else len(groups)
        for start in range(0, len(groups), most):
            yield groups[start : start + most]

    async def _ready(self, ctx: Context, step: int, size: int) -> AsyncIterator[Sequence[HandedGroup]]:
        """Yields the groups of an optimizer step as they become ready and a replica is idle, low numbers first."""
        left = set(range(size))
        self._owners.begin(size, now())

        def ready() -> list[int]:
            # A group that was handed over and is made again becomes ready a second time; it is not in `left` any more.
            return [group for group in ctx.table.ready_groups(step) if group in left]

        while left:
            await self._until(ctx, lambda: bool(ready()))
            while not (free := sum(not replica.waiting for replica in self._alive)):
                self._freed.clear()
                await self._freed.wait()
            groups, shares = ready(), 1 if len(self._alive) == 1 else 2 * len(self._alive)
            # A call gets only a share of the ready groups: shares shrink, so all replicas end at about the same time.
            chosen = groups[: min(max(1, len(groups) // shares), MAX_GROUPS_PER_CALL) * free]
            left -= set(chosen)
            if chosen:
                yield self._owned(ctx, hand_over(ctx, self.algorithm, step, chosen))

    async def _until(self, ctx: Context, condition: Callable[[], bool]) -> None:
        """Waits until `condition()` holds; only time in which no rank trains counts as waiting for the rollout."""
        if not condition():
            began = now()
            for replica in self._alive:
                if not replica.waiting:
                    self._book_state(ctx, replica, "wait_data")
            await ctx.ready.until(condition)
            if not any(replica.trains for replica in self._alive):
                self._waited += now() - max(began, self._idle_since)
        if len(self.workers.workers) == 1:
            self._book_state(ctx, self._replicas[0], "busy")

    # -- optimizer steps

    async def _optimizer_step(
        self, ctx: Context, step: int, update: int, size: int, coming: AsyncIterator[Sequence[HandedGroup]]
    ) -> tuple[list[HandedGroup], list[UpdateStats]]:
        """Makes one optimizer step on the groups that `coming` yields; returns the groups and each rank's statistics.

        The groups are sorted by number. If the sum of the gradients overflows, the optimizer step is computed again
        with a larger exponent (training/exact.py).
        """
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
        self, ctx: Context, step: int, update: int, size: int, coming: AsyncIterator[Sequence[HandedGroup]]
    ) -> tuple[list[HandedGroup], Stepped | int]:
        """Tries one optimizer step; returns its groups by number, and each rank's statistics or a larger exponent.

        The exponent means that the sum overflowed, and that the step must be tried again with it.
        """
        groups: list[HandedGroup] = []
        outcome: Stepped | int | None = None
        sums = self._sums = Sums(step, StepPlan(rows=0))
        self._attempts += 1
        for replica in self._replicas:
            replica.begun = False
        async with failing_as_one() as tasks:
            self._measure_owed(ctx, tasks, step)
            async for some in coming:
                if not groups:
                    sums.plan = self._plan(ctx, some[0], update, size)
                groups += some
                if len(self.workers.workers) > 1:
                    self._give(ctx, tasks, sums, some, "train")
                else:
                    outcome = await self._train_alone(ctx, sums, groups, some, finishes=len(groups) == size)
        groups.sort(key=lambda group: group.number)
        return groups, await self._finish(ctx, sums, groups) if outcome is None else outcome

    async def _train_alone(
        self,
        ctx: Context,
        sums: Sums,
        until_now: Sequence[HandedGroup],
        groups: Sequence[HandedGroup],
        *,
        finishes: bool,
    ) -> Stepped | int | None:
        """Trains groups on the only rank; the call for the last groups also finishes the optimizer step.

        Returns None before the last call, then the rank's statistics, or a larger exponent if the sum overflowed.
        """
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
            return None
        summed = results[0]
        if isinstance(summed, Summed):
            assert summed.overflow is not None, "a rank alone steps at once"
            return summed.overflow
        return [(self.living.first, summed)]

    async def _finish(self, ctx: Context, sums: Sums, groups: Sequence[HandedGroup]) -> Stepped | int:
        """Adds up the living ranks' sums and has each rank step; returns statistics by rank, or a larger exponent.

        If a rank dies before the sums are added up, the others compute its parts again first.
        """
        while True:
            await self._complete(ctx, sums, groups)
            for replica in self._alive:
                self._book_state(ctx, replica, "busy")
            try:
                await self.living.meet(ctx)
                if not complete(groups, sums):
                    continue  # A rank has died in the meantime.
                summed = await add_up(ctx, self.living, sums, groups, measures=self._measures)
            except (WorkerDied, WorkerFailed) as error:
                await self.living.bury(ctx, error)
                await self.living.abort()
                continue
            if (overflow := summed[0][1].overflow) is not None:
                return overflow
            return await take_step(ctx, self.living, sums.step, summed)

    async def _complete(self, ctx: Context, sums: Sums, groups: Sequence[HandedGroup]) -> None:
        """Has the living ranks compute the parts that are in no rank's sum, because the rank that had them died."""
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
        """Returns the plan of an optimizer step of `groups` groups; its rows count skipped groups, too."""
        step = group.tickets[0].step
        request = ctx.requests.request(group.tickets[0])
        per_group = len(self._most_selected(ctx.config))
        rows = groups * per_group * len(request.train_steps)
        return StepPlan(rows, update, self._attempts, probe=update == 0, replay=is_replayed(step))

    def _book(self, ctx: Context, results: Stepped) -> None:
        """Records the spans of an optimizer step, and the trajectories that each rank fetched, as events."""
        self._measures = results[0][1].measures_next
        for worker, stats in results:
            for span in stats.spans:
                book_span(ctx.observer, worker.name, span)
            got, step = stats.fetched, stats.step
            ctx.observer.event(
                "fetched", worker=worker.name, step=step, update=stats.update, tickets=got.tickets, bytes=got.bytes
            )
