"""Stand-ins for workers, trainer and weight delivery in a simulation: they wait for the planned time.

They compute nothing. plan/simulate.py builds the controller's context of them. The durations come from the laws of a
`Work` (plan/work.py).
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from async_flowrl.config.reward_pools import SHARED
from async_flowrl.config.schema import Config
from async_flowrl.controller.context import Context
from async_flowrl.controller.replicas import MAX_GROUPS_PER_CALL
from async_flowrl.plan.laws import Law
from async_flowrl.plan.units import Unit
from async_flowrl.plan.work import Layout, Work, images_of
from async_flowrl.tickets.table import EVALUATION, Ticket
from async_flowrl.types import RolloutReport, Scores
from separation.virtual import VirtualPool, VirtualWorker


class TicketsAsRequests:
    """Request builder that returns the ticket itself, because the stand-ins need no request."""

    def __init__(self, config: Config) -> None:
        self._groups = tuple(range(config.prompts_per_step))

    def request(self, ticket: Ticket) -> Ticket:
        return ticket

    def batch_order(self, step: int) -> tuple[int, ...]:
        """Returns the groups by number: the lengths of prompts are not planned."""
        return self._groups

    def prompt(self, ticket: Ticket) -> Ticket:
        return ticket


class EmptyAnswers:
    """Target of the stand-in workers: returns rollout reports without images, and scores that differ within a group."""

    def __init__(self, pool: str, images: int) -> None:
        values = tuple(float(index % 2) for index in range(images))
        self._scores = Scores(values, {pool.removeprefix(f"{SHARED}/"): values})

    def generate(self, ticket: Ticket) -> tuple[RolloutReport, None, None]:
        return RolloutReport(ticket.ordinal, ticket.version, str(ticket.version), 0, ()), None, None

    def generate_together(self, tickets: Sequence[Ticket]) -> tuple[Any, ...]:
        return [self.generate(ticket)[0] for ticket in tickets], *[None] * (2 * len(tickets))

    def score(self, ticket: Ticket, *images: Any) -> Scores:
        return self._scores


class PlannedWorker(VirtualWorker):
    """Rollout or reward worker whose calls take a duration that is drawn from the law of the called method."""

    def __init__(self, pool: str, index: int, work: Work, layout: Layout, seed: int, units: list[Unit]) -> None:
        super().__init__(pool, index, EmptyAnswers(pool, images_of(work)))
        self._work, self._slowness, self._seed = work, layout.slowness(index) if pool == "rollout" else 1.0, seed
        self._scored, self._units = pool.replace(SHARED, "score", 1), units

    async def serve(self, method: str, args: tuple[Any, ...]) -> Any:
        began = asyncio.get_running_loop().time()
        result = await super().serve(method, args)
        ended, first = asyncio.get_running_loop().time(), first_of(args)
        self._units.append(Unit(self.name, first.step, began, ended, evaluation=first.kind == EVALUATION))
        return result

    def duration(self, method: str, args: tuple[Any, ...]) -> float:
        work, ticket = self._work, first_of(args)
        if method == "score":
            return work.score_in(self.pool).draw(f"{self._seed}/{self._scored}/{ticket.step}/{ticket.group}")
        if work.evaluation is not None and ticket.kind == EVALUATION:
            return work.evaluation.generate.draw(f"{self._seed}/evaluate/{ticket.ordinal}") * self._slowness
        tickets = args[0] if method == "generate_together" else args[:1]
        costs = sum(work.cost(self._seed, each.step, each.group) for each in tickets)
        return work.generate.draw(f"{self._seed}/generate/{ticket.ordinal}") * costs * self._slowness


def first_of(args: tuple[Any, ...]) -> Ticket:
    """Returns the ticket of a call, or the first of its batch."""
    ticket: Ticket = args[0][0] if isinstance(args[0], list) else args[0]
    return ticket


def planned_pool(name: str, size: int, work: Work, layout: Layout, seed: int, units: list[Unit]) -> VirtualPool:
    """Returns a pool of `size` stand-in workers, which add what they do to `units`.

    `name` is `rollout` or the name of a reward pool.
    """
    return VirtualPool(name, [PlannedWorker(name, index, work, layout, seed, units) for index in range(size)])


def trainer_places(config: Config) -> list[str]:
    """Returns the names of the trainer ranks that are simulated one by one.

    These are all ranks if each of them takes whole groups as the groups become ready (`stream`, and at least two groups
    per rank, as in the real trainer). Otherwise the ranks do the same, and the first stands for all.
    """
    ranks = config.trainer.num_workers
    apart = config.hand_over == "stream" and config.prompts_per_step >= 2 * ranks
    return [f"trainer-{index}" for index in range(ranks if apart else 1)]


class PlannedTrainer:
    """Stand-in for the trainer ranks, which waits for ready groups as the real ranks do.

    The ranks act as one if they share all groups: in a batch, or if there are few groups. Otherwise each rank takes
    whole groups as they get ready, so the last group of a step is one rank's work while the others wait.
    """

    def __init__(self, work: Work, layout: Layout, seed: int, units: list[Unit]) -> None:
        self._work, self._seed, self._units = work, seed, units
        self._ranks, self._update = layout.trainer, work.update_on(layout.trainer)
        self._whole = work.update.scaled(1.0 + work.serial * (layout.trainer - 1))
        """Duration of a whole group on one of several ranks. If all ranks are busy, together they train as fast as with
        `_update`."""

    async def watch(self) -> None:
        """Waits for ever, because nothing dies here."""
        await asyncio.Event().wait()

    async def update(self, ctx: Context, step: int) -> dict[str, float]:
        """Takes the step's groups from the ticket table and sleeps for their training and for the end of the update."""
        left = size = ctx.config.prompts_per_step
        places = trainer_places(ctx.config)
        if len(places) > 1:
            await self._side_by_side(ctx, step, places)
            left = 0
        least, most = (size, size) if ctx.config.hand_over == "batch" else (1, MAX_GROUPS_PER_CALL)
        while left:
            await self._until(ctx, lambda: len(ctx.table.ready_groups(step)) >= least)
            groups = ctx.table.ready_groups(step)[:most]
            left -= len(groups)
            for tickets in [ctx.table.hand_over(step, group) for group in groups]:
                await self._compute(step, self._seconds(self._update, step, tickets[0].group))
        await self._compute(step, self._work.finish.draw(f"{self._seed}/finish/{step}"))
        return {}

    def _seconds(self, update: Law, step: int, group: int) -> float:
        return update.draw(f"{self._seed}/update/{step}/{group}") * self._work.cost(self._seed, step, group)

    async def _compute(self, step: int, seconds: float, rank: int | None = None) -> None:
        """Lets the seconds pass, on one rank or on all of them."""
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
        ended = asyncio.get_running_loop().time()
        for index in range(self._ranks) if rank is None else (rank,):
            self._units.append(Unit(f"trainer-{index}", step, began, ended))

    async def _side_by_side(self, ctx: Context, step: int, places: Sequence[str]) -> None:
        """Trains the step's groups with ranks that take whole groups independently; returns when all ranks are done."""
        left = ctx.config.prompts_per_step

        def due() -> bool:
            return not left or bool(ctx.table.ready_groups(step))

        async def rank(index: int, name: str) -> None:
            nonlocal left
            while left:
                await self._until(ctx, due, name)
                ready = ctx.table.ready_groups(step)
                share = min(max(1, len(ready) // (2 * self._ranks)), MAX_GROUPS_PER_CALL)
                taken = [ctx.table.hand_over(step, group) for group in ready[:share]] if left else []
                left -= len(taken)
                if not left:
                    ctx.ready.notify()  # Wakes the ranks that wait for a further group.
                for tickets in taken:
                    await self._compute(step, self._seconds(self._whole, step, tickets[0].group), index)
                ctx.observer.state(name, "idle")

        async with asyncio.TaskGroup() as tasks:
            for index, name in enumerate(places):
                tasks.create_task(rank(index, name))
        for name in places:
            ctx.observer.state(name, "busy")

    async def _until(self, ctx: Context, condition: Callable[[], bool], name: str = "trainer-0") -> None:
        if not condition():
            ctx.observer.state(name, "wait_data")
            await ctx.ready.until(condition)
        ctx.observer.state(name, "busy")


class PlannedWeights:
    """Stand-in for the publishing of versions.

    Staging (the copy that is sent) takes the trainer's time; the delivery to the rollout workers goes on during the
    next update. Before a version is delivered, the delivery of the version two before it must have ended.
    """

    ctx: Context
    """Context of the simulated run; `simulate` sets it."""

    def __init__(self, work: Work, seed: int) -> None:
        self._work, self._seed = work, seed
        self._deliveries: dict[int, asyncio.Task[None]] = {}

    async def publish_first(self) -> None:
        await self._deliver(0)

    async def publish(self, version: int) -> None:
        for name in trainer_places(self.ctx.config):
            self.ctx.observer.state(name, "sync")
        await asyncio.sleep(self._work.stage.draw(f"{self._seed}/stage/{version}"))
        if older := self._deliveries.pop(version - 2, None):
            await older
        self._deliveries[version] = asyncio.create_task(self._deliver(version))

    async def drain(self) -> None:
        for task in self._deliveries.values():
            await task

    def report(self) -> dict[str, Any]:
        return {}

    async def _nothing(self, *args: Any, **options: Any) -> None:
        """Does nothing: a simulated run has no lost workers or failed deliveries, and keeps no weights."""

    welcome = leave = watch = retain_for_evaluation = close = _nothing

    async def deliver_for_evaluation(self, version: int) -> None:
        """Delivers `version` to every worker's slot for evaluations; returns when all have it."""
        await self._send(version, self._work.deliver, evaluation=True)

    async def _deliver(self, version: int) -> None:
        self.ctx.table.publish(version, str(version))
        self.ctx.work.notify()
        await self._send(version, self._work.deliver if version else self._work.deliver.scaled(0.0))

    async def _send(self, version: int, law: Law, *, evaluation: bool = False) -> None:
        async with asyncio.TaskGroup() as tasks:
            for worker in self.ctx.rollout.workers:
                seconds = law.draw(f"{self._seed}/deliver/{version}/{worker.name}")
                tasks.create_task(self._acknowledge(worker.name, version, seconds, evaluation=evaluation))

    async def _acknowledge(self, worker: str, version: int, seconds: float, *, evaluation: bool) -> None:
        await asyncio.sleep(seconds)
        self.ctx.table.acknowledge(worker, version, str(version), evaluation=evaluation)
        self.ctx.work.notify(worker)
