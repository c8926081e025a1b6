"""Evaluation beside training: tickets of another class, with their own version in their own slot. Never a barrier."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from async_flowrl.controller.context import Context
from async_flowrl.controller.dispatch import make_again
from async_flowrl.rewards.held_out import HeldOutScores
from async_flowrl.tickets.table import State, Ticket, describe
from async_flowrl.types import ByteArray, Prompt, RolloutRequest, Sampling, Scores
from separation.group import RefLost
from separation.supervise import deadline


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation saw: per scored prompt its images uint8 [n, H, W, 3] and scores. `version` is the policy's."""

    version: int
    prompts: tuple[Prompt, ...]
    images: tuple[ByteArray, ...]
    scores: tuple[Scores, ...]
    unscored: int = 0
    """Prompts whose scores could not be had; they are in none of the lists."""
    places: tuple[int, ...] = ()
    """Of the scored prompts among all that are evaluated."""
    held_out: Mapping[int, HeldOutScores] = field(default_factory=dict)
    """By the place of the prompt, scored by the training's reward or not."""
    sampling: Sampling | None = None
    setting: str = ""
    """Digest of prompts, noises and sampling."""
    baseline: bool = False
    """The base model as it is usually sampled, instead of the policy version as the run samples it."""

    @property
    def title(self) -> str:
        return "the baseline" if self.baseline else f"version {self.version}"

    def means(self) -> dict[str, float]:
        """Mean over all images that have a score, per reward; in total, over the prompts that no term failed for."""
        names = sorted({name for scores in self.scores for name in scores.by_term})
        values = {name: [x for s in self.scores for x in s.by_term.get(name, ())] for name in names}
        values["reward"] = [x for s in self.scores if not s.failed for x in s.total]
        return {name: float(np.mean(each)) for name, each in values.items() if each}


@dataclass
class Evaluations:
    """At most one evaluation is outstanding; the next one waits for it, training does not."""

    report: Callable[[EvaluationResult], None]
    failed: Callable[[str, object], None]
    """Told of an evaluation that could not be completed, and why."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self, ctx: Context, version: int, *, baselines: Sequence[bool] = (False,)) -> None:
        """Keeps the version just published and returns; its images are made between training tickets.

        `baselines`: one evaluation for each, True for that of the base model as it is usually sampled.
        """
        await ctx.weights.retain_for_evaluation(version)
        evaluating = self._run(ctx, version, baselines)
        self.tasks.append(asyncio.create_task(evaluating, name=f"evaluation of version {version}"))

    async def drain(self) -> None:
        """Waits for all evaluations. Training is over, so one that fails now is told of, and ends nothing."""
        for task in self.tasks:
            try:
                await task
            except Exception as error:  # whatever it was: the trained weights are not to be lost for it
                self.failed(task.get_name(), f"{type(error).__name__}: {error}")
        self.tasks.clear()

    def check(self) -> None:
        """Raises the error of an evaluation that failed while training goes on: its tickets are still in the table."""
        for task in self.tasks:
            if task.done():
                task.result()
        self.tasks = [task for task in self.tasks if not task.done()]

    def cancel(self) -> None:
        """Gives up what is outstanding."""
        for task in self.tasks:
            task.cancel()

    async def _run(self, ctx: Context, version: int, baselines: Sequence[bool]) -> None:
        async with self.turn:
            await ctx.weights.deliver_for_evaluation(version)
            count = len(ctx.requests.evaluation)
            for baseline in baselines:
                tickets = ctx.table.issue_evaluation(version=version, step=version, groups=count, baseline=baseline)
                ctx.work.notify()
                result = await collect(ctx, tickets, version)
                ctx.table.close_evaluation()
                # In turn: what is concluded from an evaluation rests on those before it.
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
    requests = [ctx.requests.request(ticket) for ticket in tickets]
    return EvaluationResult(
        version,
        prompts=tuple(ctx.requests.prompt(ticket) for ticket in scored),
        images=tuple(images[ticket.ordinal] for ticket in scored),
        scores=tuple(ticket.scores for ticket in scored),
        unscored=len(tickets) - len(scored),
        places=tuple(ticket.group for ticket in scored),
        held_out={ticket.group: ticket.held_out for ticket in tickets if ticket.held_out is not None},
        sampling=requests[0].sampling,
        setting=setting_of(requests),
        baseline=tickets[0].baseline,
    )


def setting_of(requests: Sequence[RolloutRequest]) -> str:
    """Digest of all that images depend on besides the weights."""
    values = [
        (asdict(r.sampling), r.initial_seeds, r.prompt.wording, r.prompt.system, r.prompt.negative, r.prompt.target)
        for r in requests
    ]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
