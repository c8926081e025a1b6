"""The trainer ranks as the controller sees them: one call goes to all of them, in the same order.

Hands groups over in ticket order, says which rank trains which part of them, computes advantages once (float64, on the
controller) and cuts a batch into optimizer steps. Batch and stream hand-over make the same calls with the same
arguments; only the waiting differs.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np

from async_flowrl.algorithms.base import Algorithm
from async_flowrl.config.schema import Config
from async_flowrl.controller.context import Context, book_span
from async_flowrl.controller.dispatch import make_again
from async_flowrl.controller.group_advantages import group_advantages
from async_flowrl.controller.owners import Owners, idle_ranks
from async_flowrl.controller.step_metrics import StepStatistics
from async_flowrl.seeds import derive
from async_flowrl.tickets.table import Ticket, describe
from async_flowrl.training.merged_stats import merged
from async_flowrl.training.messages import GroupMeta, StepPlan, TrainRequest, UpdateStats
from async_flowrl.training.parts import cut
from async_flowrl.types import Scores
from separation.group import RefLost, Worker, WorkerGroup
from separation.supervise import deadline, together

logger = logging.getLogger(__name__)

MAX_GROUPS_PER_CALL = 8
"""Groups that go to the ranks in one call where so many are ready: between two calls they wait for milliseconds."""


@dataclass(frozen=True)
class HandedGroup:
    """A group at the trainer's door. `meta` is None if it is left out: no scores, or all advantages zero."""

    tickets: list[Ticket]
    scores: Scores | None
    advantages: tuple[float, ...]
    meta: GroupMeta | None


class TrainerGroup:
    """All trainer ranks of one run."""

    def __init__(self, workers: WorkerGroup, algorithm: Algorithm) -> None:
        self.workers, self.algorithm = workers, algorithm
        self._batch: list[HandedGroup] = []
        self._waited = 0.0
        self._owners = Owners(len(workers.workers))

    def laid_out(self, config: Config, ranks_per_replica: int) -> None:
        """How many ranks hold one copy of the base between them, as they said when they loaded it."""
        ranks, groups = len(self.workers.workers), config.prompts_per_step // config.trainer.updates_per_batch
        self._owners = Owners(ranks, ranks_per_replica)
        if said := idle_ranks(ranks, groups, len(cut(self._most_selected(config), config.trainer.micro_batch_size))):
            logger.warning("%s", said)

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
        clock = asyncio.get_running_loop().time
        began, self._waited = clock(), 0.0
        per_update = ctx.config.prompts_per_step // ctx.config.trainer.updates_per_batch
        index, spread, calls = 0, list[bool | None](), list[list[HandedGroup]]()
        async for groups in self._handed(ctx, step, per_update):
            if index == 0 and ctx.config.trainer.updates_per_batch > 1:
                await self._proximal(ctx, step, per_update)
            if index % per_update == 0:
                plan, calls = self._plan(ctx, groups[0], index // per_update, per_update), []
            calls.append(groups)
            index += len(groups)
            begins, finishes = plan if len(calls) == 1 else None, index % per_update == 0
            results = await self._train(ctx, step, groups, begins=begins, finishes=finishes)
            while results and results[0].overflow is not None:
                results = await self._again(ctx, step, calls, plan, results)
            for group in groups:
                statistics.add_group(group.tickets, group.scores, group.advantages)
                spread.append(None if group.scores is None else any(group.advantages))
            if results:
                self._book(ctx, results)
                statistics.add_update(merged(results))
        timing = {"timing/wait_rollout": self._waited, "timing/update": clock() - began - self._waited}
        return statistics.metrics() | ctx.requests.trained(step, spread) | ctx.reward_calls.pop(step) | timing

    async def _handed(self, ctx: Context, step: int, per_update: int) -> AsyncIterator[list[HandedGroup]]:
        """The step's groups in order: each as soon as it is ready (stream), or once all of them are (batch).

        What is ready at the same time comes together, a few groups of the same optimizer step at most.
        """
        groups = range(ctx.config.prompts_per_step)
        batch = ctx.config.hand_over == "batch"
        if batch:
            await self._until_ready(ctx, step, groups)
            self._batch = self._hand_over(ctx, step, groups)
        start = 0
        while start < len(groups):
            most = groups[start : min(start + MAX_GROUPS_PER_CALL, start - start % per_update + per_update)]
            if batch:
                yield self._batch[start : start + len(most)]
                start += len(most)
                continue
            await self._until_ready(ctx, step, most[:1])
            ready = list(takewhile(partial(ctx.table.ready, step), most))
            yield [handed for group in ready for handed in self._hand_over(ctx, step, [group])]
            start += len(ready)

    async def _until_ready(self, ctx: Context, step: int, groups: Sequence[int]) -> None:
        def ready() -> bool:
            # Asked after every group: the last ones are the ones that are missing.
            return all(ctx.table.ready(step, group) for group in reversed(groups))

        if not ready():
            clock = asyncio.get_running_loop().time
            began = clock()
            self._book_state(ctx, "wait_data")
            await ctx.ready.until(ready)
            self._waited += clock() - began
        self._book_state(ctx, "busy")

    def _book_state(self, ctx: Context, state: str) -> None:
        for worker in self.workers.workers:
            ctx.observer.state(worker.name, state)

    def _hand_over(self, ctx: Context, step: int, groups: Sequence[int]) -> list[HandedGroup]:
        """Takes the groups through the table's door and gives them their advantages."""
        tickets = [ctx.table.hand_over(step, group) for group in groups]
        scores: list[Scores | None] = [group[0].scores for group in tickets]
        scored = [index for index, value in enumerate(scores) if value is not None]
        values = self._advantages(ctx, step, [tickets[i][0].group for i in scored], [scores[i] for i in scored])
        advantages = dict(zip(scored, values, strict=True))
        return [
            self._handed_group(ctx, tickets[i], scores[i], tuple(float(x) for x in advantages.get(i, ())))
            for i in range(len(tickets))
        ]

    def _advantages(self, ctx: Context, step: int, groups: Sequence[int], scores: Sequence[Scores | None]) -> list[Any]:
        seeds = [derive(ctx.config.seed, "permute", step, group) for group in groups]
        there = [each for each in scores if each is not None]
        return group_advantages(self.algorithm, ctx.config, there, seeds)

    def _handed_group(
        self, ctx: Context, tickets: list[Ticket], scores: Scores | None, advantages: tuple[float, ...]
    ) -> HandedGroup:
        per_update = ctx.config.prompts_per_step // ctx.config.trainer.updates_per_batch
        if tickets[0].group % per_update == 0:
            self._owners.begin(per_update)
        if scores is None or (self.algorithm.vanishes_at_zero and not any(advantages)):
            return HandedGroup(tickets, scores, advantages, None)
        first, config = tickets[0], ctx.config
        prompt = ctx.requests.prompt(first)
        selected = tuple(self.algorithm.select(np.asarray(advantages)))
        meta = GroupMeta(
            group=first.group,
            tickets=len(tickets),
            version=first.version,
            age=first.step - first.version,
            advantages=advantages,
            selected=selected,
            seeds=tuple(ctx.requests.image_seed("row", first.step, first.group, i) for i in range(config.group_size)),
            negative=prompt.negative_wording(config.rollout.negative_prompt),
            sampling=ctx.requests.sampling(first),
            owners=self._owners.of(len(cut(selected, config.trainer.micro_batch_size))),
        )
        return HandedGroup(tickets, scores, advantages, meta)

    async def _proximal(self, ctx: Context, step: int, per_update: int) -> None:
        """Predictions of the weights at the start of the batch, for the groups of the later optimizer steps."""
        for group in self._batch[per_update:]:
            if group.meta is not None:
                await self._with_trajectories(ctx, [group], "update.proximal", TrainRequest(step, (group.meta,)))

    async def _train(
        self, ctx: Context, step: int, groups: Sequence[HandedGroup], *, begins: StepPlan | None, finishes: bool
    ) -> list[UpdateStats]:
        """One part of an optimizer step on every rank; what the step did, by rank, once it is finished."""
        trained = [group for group in groups if group.meta is not None]
        request = TrainRequest(step, tuple(group.meta for group in trained if group.meta is not None), begins, finishes)
        if request.metas:
            results = await self._with_trajectories(ctx, trained, "train", request)
        else:
            async with deadline(ctx.config.deadlines.update, f"update: step {step}"):
                results = await self.all("train", request)
        return results if finishes else []

    async def _again(
        self, ctx: Context, step: int, calls: list[list[HandedGroup]], plan: StepPlan, overflowed: list[UpdateStats]
    ) -> list[UpdateStats]:
        """The whole optimizer step once more: the sum of its gradients could have left its range."""
        self._book(ctx, overflowed)
        logger.warning(
            "step %d: the sum of its gradients could exceed the range of multiples of 2^%s; the optimizer step is "
            "computed again with larger ones, which later steps keep",
            step,
            overflowed[0].overflow,
        )
        results: list[UpdateStats] = []
        for index, groups in enumerate(calls):
            begins, finishes = plan if index == 0 else None, index == len(calls) - 1
            results = await self._train(ctx, step, groups, begins=begins, finishes=finishes)
        return results

    async def _with_trajectories(
        self, ctx: Context, groups: Sequence[HandedGroup], method: str, request: TrainRequest
    ) -> list[Any]:
        """Calls `method` on every rank with the groups' trajectories; those that are lost are made again first.

        Several ranks confirm that they have them before any of them begins: afterwards they wait for each other.
        """
        seconds = ctx.config.deadlines.update * (len(groups) + request.finishes)
        while True:
            try:
                async with deadline(seconds, f"update: {method} {describe(groups[0].tickets[0])}"):
                    refs = [ref for group in groups for ref in trajectories(group)]
                    if len(self.workers.workers) > 1:
                        await self.all("async_flowrl.training.messages:arrived", *refs)
                    return await self.all(method, request, *refs)
            except RefLost as lost:
                if len(groups) == 1:
                    await self._make_again(ctx, groups[0], lost)
                    continue
            # Whose payload was lost shows when they go one by one; a call that lacks an argument has done nothing.
            single = zip(groups, request.split(), strict=True)
            return [await self._with_trajectories(ctx, [group], method, its_part) for group, its_part in single][-1]

    async def _make_again(self, ctx: Context, group: HandedGroup, lost: RefLost) -> None:
        """Waits for new payloads of a handed group. Its scores stay: its advantages came from them."""
        first = group.tickets[0]
        make_again(ctx, group.tickets, lost)
        await self._until_ready(ctx, first.step, [first.group])
        ctx.table.hand_over(first.step, first.group)
        for ticket in group.tickets:
            ticket.scores = group.scores

    def _plan(self, ctx: Context, first: HandedGroup, update: int, groups: int) -> StepPlan:
        request = ctx.requests.request(first.tickets[0])
        per_group = len(self._most_selected(ctx.config))
        return StepPlan(rows=groups * per_group * len(request.train_steps), update=update, probe=update == 0)

    def _book(self, ctx: Context, results: list[UpdateStats]) -> None:
        for worker, stats in zip(self.workers.workers, results, strict=True):
            for span in stats.spans:
                book_span(ctx.observer, worker.name, span)


def trajectories(group: HandedGroup) -> list[Any]:
    """Refs of the group's trajectories, in ticket order."""
    return [ticket.payload[1] for ticket in group.tickets]
