"""Evaluation beside training: tickets of another class, with their own version in their own slot. Never a barrier."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from async_flowrl.context import Context
from async_flowrl.tickets import EVALUATION, State, Ticket
from async_flowrl.types import ByteArray, Prompt, Scores


@dataclass(frozen=True)
class EvaluationResult:
    """What one evaluation saw: per prompt its images uint8 [n, H, W, 3] and scores. `version` is the policy's."""

    version: int
    prompts: tuple[Prompt, ...]
    images: tuple[ByteArray, ...]
    scores: tuple[Scores, ...]

    def means(self) -> dict[str, float]:
        """Mean over all images, per reward and in total."""
        names = sorted({name for scores in self.scores for name in scores.parts})
        means = {name: float(np.mean([x for s in self.scores for x in s.parts[name]])) for name in names}
        means["reward"] = float(np.mean([x for s in self.scores for x in s.total]))
        return means


@dataclass
class Evaluations:
    """At most one evaluation is outstanding; the next one waits for it, training does not."""

    report: Callable[[EvaluationResult], None]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self, ctx: Context, version: int) -> None:
        """Keeps the version just published and returns; its images are made between training tickets."""
        await ctx.weights.keep_for_evaluation(version)
        self.tasks.append(asyncio.create_task(self._run(ctx, version), name=f"evaluation of version {version}"))

    async def drain(self) -> None:
        """Waits for all evaluations; the first error of one is raised here, if not before."""
        for task in self.tasks:
            await task
        self.tasks.clear()

    def check(self) -> None:
        """Raises the error of an evaluation that failed."""
        for task in self.tasks:
            if task.done():
                task.result()
        self.tasks = [task for task in self.tasks if not task.done()]

    async def _run(self, ctx: Context, version: int) -> None:
        async with self.turn:
            await ctx.weights.deliver_for_evaluation(version)
            count = len(ctx.recipe.evaluation)
            tickets = ctx.table.issue_evaluation(version=version, step=version, groups=count)
            ctx.work.notify()
            await ctx.ready.until(lambda: all(ticket.state is State.READY for ticket in tickets))
            result = await collect(ctx, tickets, version)
            ctx.table.close_evaluation()
        await asyncio.to_thread(self.report, result)


async def collect(ctx: Context, tickets: list[Ticket], version: int) -> EvaluationResult:
    """Fetches the images of a finished evaluation; prompts whose reward was skipped are left out."""
    scored = [ticket for ticket in tickets if ticket.scores is not None]
    images = [await ctx.rollout.fetch(ticket.payload[0]) for ticket in scored]
    prompts = tuple(ctx.recipe.prompt(ticket) for ticket in scored)
    assert all(ticket.kind == EVALUATION for ticket in scored)
    return EvaluationResult(version, prompts, tuple(images), tuple(ticket.scores for ticket in scored))
