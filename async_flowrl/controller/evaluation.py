"""Evaluation beside training: tickets of another class, with their own version in their own slot. Never a barrier."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from async_flowrl.controller.context import Context
from async_flowrl.controller.dispatch import make_again
from async_flowrl.tickets.table import State, Ticket, describe
from async_flowrl.types import ByteArray, Prompt, Scores
from separation.group import RefLost
from separation.supervise import deadline


@dataclass(frozen=True)
class EvaluationResult:
    """What one evaluation saw: per prompt its images uint8 [n, H, W, 3] and scores. `version` is the policy's."""

    version: int
    prompts: tuple[Prompt, ...]
    images: tuple[ByteArray, ...]
    scores: tuple[Scores, ...]

    def means(self) -> dict[str, float]:
        """Mean over all images, per reward and in total."""
        names = sorted({name for scores in self.scores for name in scores.by_term})
        means = {name: float(np.mean([x for s in self.scores for x in s.by_term[name]])) for name in names}
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
        await ctx.weights.retain_for_evaluation(version)
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

    def cancel(self) -> None:
        """Gives up what is outstanding."""
        for task in self.tasks:
            task.cancel()

    async def _run(self, ctx: Context, version: int) -> None:
        async with self.turn:
            await ctx.weights.deliver_for_evaluation(version)
            count = len(ctx.requests.evaluation)
            tickets = ctx.table.issue_evaluation(version=version, step=version, groups=count)
            ctx.work.notify()
            result = await collect(ctx, tickets, version)
            ctx.table.close_evaluation()
        await asyncio.to_thread(self.report, result)


async def collect(ctx: Context, tickets: list[Ticket], version: int) -> EvaluationResult:
    """Fetches the images once all are scored; prompts whose reward was skipped are left out."""
    images: dict[int, ByteArray] = {}
    while len(images) < len(tickets):
        await ctx.ready.until(lambda: all(ticket.state is State.READY for ticket in tickets))
        for ticket in tickets:
            if ticket.ordinal not in images:
                try:
                    async with deadline(ctx.config.deadlines.generate, f"generate: images of {describe(ticket)}"):
                        images[ticket.ordinal] = await ctx.rollout.fetch(ticket.payload[0])
                except RefLost as lost:
                    make_again(ctx, [ticket], lost)
    scored = [ticket for ticket in tickets if ticket.scores is not None]
    return EvaluationResult(
        version,
        prompts=tuple(ctx.requests.prompt(ticket) for ticket in scored),
        images=tuple(images[ticket.ordinal] for ticket in scored),
        scores=tuple(ticket.scores for ticket in scored),
    )
