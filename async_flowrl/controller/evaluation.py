"""Evaluations: images of the evaluation prompts, made and scored between training tickets while training goes on.

An evaluation has tickets of its own kind. Each rollout worker holds the evaluated version in a separate slot.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from async_flowrl.controller.context import Context
from async_flowrl.controller.dispatch import make_again
from async_flowrl.rewards.held_out import HeldOutScores
from async_flowrl.tickets.table import State, Ticket, describe
from async_flowrl.types import ByteArray, Prompt, RolloutRequest, Sampling, Scores
from separation.group import RefLost
from separation.supervise import deadline


@dataclass(frozen=True)
class EvaluationResult:
    """The result of one evaluation; `prompts`, `images` (uint8 [n, H, W, 3]) and `scores` are per scored prompt."""

    version: int  # The evaluated policy version; for the baseline, the version at which it was evaluated.
    prompts: tuple[Prompt, ...]
    images: tuple[ByteArray, ...]
    scores: tuple[Scores, ...]
    # Number of prompts without scores, which are left out of `prompts`, `images`, `scores` and `indices`.
    unscored: int = 0
    indices: tuple[int, ...] = ()  # Index of each scored prompt among all evaluation prompts.
    # Index of a prompt → its scores by held-out terms, also for prompts that the trained reward has not scored.
    held_out: Mapping[int, HeldOutScores] = field(default_factory=dict)
    sampling: Sampling | None = None  # Sampling of the first prompt's images.
    setting: str = ""  # Digest of prompts, initial noises and sampling (`setting_of`).
    baseline: bool = False  # True: the base model was evaluated, with its family's usual sampling instead of the run's.

    @property
    def title(self) -> str:
        return "the baseline" if self.baseline else f"version {self.version}"


@dataclass
class Evaluations:
    """Runs evaluations one after another in background tasks; training does not wait for them."""

    report: Callable[[EvaluationResult], None]  # Called in a thread with the result of each complete evaluation.
    # Called with the name of an evaluation that failed after training, and its error.
    failed: Callable[[str, object], None]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self, ctx: Context, version: int, *, baselines: Sequence[bool] = (False,)) -> None:
        """Retains `version` (or the EMA) and starts an evaluation per item of `baselines` (True: the base model)."""
        await ctx.weights.retain_for_evaluation(version)
        evaluating = self._run(ctx, version, baselines)
        self.tasks.append(asyncio.create_task(evaluating, name=f"evaluation of version {version}"))

    async def drain(self) -> None:
        """Waits for all evaluations after training. One that fails is reported to `failed` and raises nothing."""
        for task in self.tasks:
            try:
                await task
            except Exception as error:  # no error here may cost the trained weights
                self.failed(task.get_name(), f"{type(error).__name__}: {error}")
        self.tasks.clear()

    def check(self) -> None:
        """Raises the error of an evaluation that failed during training, because its tickets block the next one."""
        for task in self.tasks:
            if task.done():
                task.result()
        self.tasks = [task for task in self.tasks if not task.done()]

    def cancel(self) -> None:
        """Cancels the evaluations that are not complete."""
        for task in self.tasks:
            task.cancel()

    async def _run(self, ctx: Context, version: int, baselines: Sequence[bool]) -> None:
        """Waits for earlier evaluations, then makes one evaluation per item of `baselines` and reports each result."""
        async with self.turn:
            await ctx.weights.deliver_for_evaluation(version)
            count = len(ctx.requests.evaluation)
            for baseline in baselines:
                tickets = ctx.table.issue_evaluation(version=version, step=version, groups=count, baseline=baseline)
                ctx.work.notify()
                result = await collect(ctx, tickets, version)
                ctx.table.close_evaluation()
                # Within the lock: an evaluation is compared with those reported before it.
                await asyncio.to_thread(self.report, result)


async def collect(ctx: Context, tickets: list[Ticket], version: int) -> EvaluationResult:
    """Waits until all tickets are scored, fetches their images and returns the result; lost images are made again."""
    images: dict[int, ByteArray] = {}
    while len(images) < len(tickets):
        await ctx.ready.until(lambda: all(ticket.state is State.READY for ticket in tickets))
        for ticket in tickets:
            if ticket.ordinal not in images:
                try:
                    async with deadline(ctx.config.deadlines.generate, f"generate: images of {describe(ticket)}"):
                        images[ticket.ordinal] = await ctx.rollout.fetch(ticket.payload.images)
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
        indices=tuple(ticket.group for ticket in scored),
        held_out={ticket.group: ticket.held_out for ticket in tickets if ticket.held_out is not None},
        sampling=requests[0].sampling,
        setting=setting_of(requests),
        baseline=tickets[0].baseline,
    )


def setting_of(requests: Sequence[RolloutRequest]) -> str:
    """Returns a digest (16 hex digits of SHA-256) of all that the images depend on besides the weights."""
    values = [
        (asdict(r.sampling), r.initial_seeds, r.prompt.wording, r.prompt.system, r.prompt.negative, r.prompt.target)
        for r in requests
    ]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
