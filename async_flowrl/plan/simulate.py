"""Predicts a run by running it: the real loop, dispatch, tickets and gate in virtual time; the workers only wait."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

from async_flowrl.controller.context import Context
from async_flowrl.loop import run
from async_flowrl.observability.ledger import PoolLedger
from async_flowrl.plan.virtual_time import run_virtual
from async_flowrl.plan.work import Bounds, Layout, Work, bounds, config_of
from async_flowrl.tickets.arithmetic import shape
from async_flowrl.tickets.request import RequestBuilder
from async_flowrl.tickets.table import State, Ticket, TicketTable
from async_flowrl.types import RolloutReport, Scores
from separation.group import PoolSpec, Worker, WorkerGroup

WARM_UP_STEPS = 2
PAYLOAD = (State.SCORING, State.READY, State.HANDED)
"""States of a ticket whose images and trajectory are in the object store."""
SCORES = Scores((), {})


@dataclass(frozen=True)
class Prediction:
    """The steady state of one layout."""

    layout: Layout
    bounds: Bounds
    step_seconds: float
    pools: Mapping[str, Mapping[str, float]]
    """Share of its time that a pool spends in each state."""
    staleness: float
    """Mean age at the trainer's door, in versions."""
    staleness_max: int
    payload_bytes: int
    """Most that lay in the object store at once."""
    adapter_bytes: int
    """Versions of the weights held by all rollout workers together."""
    ends: tuple[float, ...]
    """When each step ended, seconds from the start."""

    @property
    def efficiency(self) -> float:
        """Of the bound max(G, T, R): the share of its time that the busiest pool works, on the luck that was drawn."""
        return max((states.get("busy", 0.0) + states.get("sync", 0.0) for states in self.pools.values()), default=1.0)

    def busy(self, pool: str) -> float:
        return self.pools.get(pool, {}).get("busy", 0.0)


def simulate(work: Work, layout: Layout, *, steps: int = 40, seed: int = 0) -> Prediction:
    """`steps` training steps. Raises ValueError for too few of them, or for ranks that cannot share a group."""
    least = WARM_UP_STEPS + layout.max_staleness + 2
    if steps < least:
        raise ValueError(f"max_staleness={layout.max_staleness} needs at least {least} steps to simulate, got {steps}")
    if not work.allows(layout.trainer):
        raise ValueError(f"{layout.trainer} trainer ranks cannot share groups of {work.group_size} images")
    return run_virtual(_simulate(work, layout, steps, seed), horizon=math.inf)


async def _simulate(work: Work, layout: Layout, steps: int, seed: int) -> Prediction:
    config = config_of(work, layout, steps)
    book = Book(layout)
    table = TicketTable(shape(config), on_change=book.moved)
    rollout, reward = (
        SleepingGroup([SleepingWorker(pool, index, work, layout, seed) for index in range(count)])
        for pool, count in (("rollout", layout.rollout), ("reward", layout.reward))
    )
    ctx = Context(
        config=config,
        requests=cast("RequestBuilder", TicketRecipe()),
        table=table,
        rollout=cast("WorkerGroup", rollout),
        reward=cast("WorkerGroup", reward),
        trainer=SleepingTrainer(work, layout, seed),
        weights=SleepingWeights(work, seed),
        observer=book,
        steps=book,
        base_digest="",
    )
    cast("SleepingWeights", ctx.weights).ctx = ctx
    for worker in rollout.workers:
        table.join(worker.name)
        book.state(worker.name, "wait_data")
    await run(ctx)
    return book.prediction(work)


class TicketRecipe:
    """What a sleeping worker needs to know of a ticket is the ticket."""

    def request(self, ticket: Ticket) -> Ticket:
        return ticket

    def prompt(self, ticket: Ticket) -> Ticket:
        return ticket


class SleepingWorker:
    """Takes as long as the law of its method says and returns nothing of value."""

    node, pid = "virtual", 0

    def __init__(self, pool: str, index: int, work: Work, layout: Layout, seed: int) -> None:
        self.pool, self.index, self.name = pool, index, f"{pool}-{index}"
        self._work, self._seed, self._slowness = work, seed, layout.slowness(index) if pool == "rollout" else 1.0
        self._main = asyncio.Lock()

    async def call(self, method: str, ticket: Ticket, *args: Any, lane: str = "main") -> Any:
        """`score` of the group that `ticket` belongs to."""
        await asyncio.sleep(self._work.score.draw(f"{self._seed}/score/{ticket.step}/{ticket.group}"))
        return SCORES

    async def call_split(self, method: str, ticket: Ticket, *, returns: int, lane: str = "main") -> tuple[Any, Any]:
        """`generate`."""
        async with self._main:
            await asyncio.sleep(self._work.generate.draw(f"{self._seed}/generate/{ticket.ordinal}") * self._slowness)
        return RolloutReport(ticket.ordinal, ticket.version, str(ticket.version), 0, ()), (None, None)

    async def watch(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets that event")

    def kill(self) -> None:
        """Nothing runs."""


@dataclass
class SleepingGroup:
    workers: list[SleepingWorker]
    spec: PoolSpec = field(default_factory=lambda: PoolSpec("rollout", "", 0))


class SleepingTrainer:
    """All ranks as one; waits for groups as the real gang does."""

    def __init__(self, work: Work, layout: Layout, seed: int) -> None:
        self._work, self._seed = work, seed
        self._update = work.update_on(layout.trainer)

    async def update(self, ctx: Context, step: int) -> dict[str, float]:
        groups = range(ctx.config.prompts_per_step)
        for handed in [groups] if ctx.config.hand_over == "batch" else [range(i, i + 1) for i in groups]:
            await self._until_ready(ctx, step, handed)
            tickets = [ctx.table.hand_over(step, group) for group in handed]
            for group in tickets:
                await asyncio.sleep(self._update.draw(f"{self._seed}/update/{step}/{group[0].group}"))
        await asyncio.sleep(self._work.finish.draw(f"{self._seed}/finish/{step}"))
        return {}

    async def _until_ready(self, ctx: Context, step: int, groups: range) -> None:
        def ready() -> bool:
            return all(ctx.table.ready(step, group) for group in reversed(groups))

        if not ready():
            ctx.observer.state("trainer-0", "wait_data")
            await ctx.ready.until(ready)
        ctx.observer.state("trainer-0", "busy")


class SleepingWeights:
    """Stages, then delivers beside the next update; a version waits for the delivery of the one before the last."""

    ctx: Context

    def __init__(self, work: Work, seed: int) -> None:
        self._work, self._seed = work, seed
        self._deliveries: dict[int, asyncio.Task[None]] = {}

    async def publish_first(self) -> None:
        await self._deliver(0)

    async def publish(self, version: int) -> None:
        self.ctx.observer.state("trainer-0", "sync")
        await asyncio.sleep(self._work.stage.draw(f"{self._seed}/stage/{version}"))
        if older := self._deliveries.pop(version - 2, None):
            await older
        self._deliveries[version] = asyncio.create_task(self._deliver(version))

    async def drain(self) -> None:
        for task in self._deliveries.values():
            await task

    async def watch(self) -> None:
        """Nothing can go wrong here."""

    async def welcome(self, worker: Worker) -> None:
        raise AssertionError(f"{worker.name} was never lost")

    async def leave(self, worker: str) -> None:
        raise AssertionError(f"{worker} was never lost")

    async def keep_for_evaluation(self, version: int) -> None:
        """A plan has no evaluations."""

    async def deliver_for_evaluation(self, version: int) -> None:
        """A plan has no evaluations."""

    async def close(self) -> None:
        """Nothing is under way after the loop."""

    def report(self) -> dict[str, Any]:
        return {}

    async def _deliver(self, version: int) -> None:
        table, workers = self.ctx.table, self.ctx.rollout.workers
        law = self._work.deliver if version else self._work.deliver.scaled(0.0)
        table.publish(version, str(version))
        self.ctx.work.notify()
        async with asyncio.TaskGroup() as tasks:
            for worker in workers:
                seconds = law.draw(f"{self._seed}/deliver/{version}/{worker.name}")
                tasks.create_task(self._acknowledge(worker.name, version, seconds))

    async def _acknowledge(self, worker: str, version: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.ctx.table.acknowledge(worker, version, str(version))
        self.ctx.work.notify(worker)


class Book:
    """Observer and bookkeeping of a simulated run: the real ledger on the virtual clock, ends of steps, ages, bytes."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._clock = asyncio.get_running_loop().time
        self._ledger = PoolLedger(self._clock)
        self._ends: list[float] = []
        self._ages: list[int] = []
        self._held: set[tuple[str, int]] = set()
        self._most_held = 0
        self._pools: Mapping[str, Mapping[str, float]] = {}

    def now(self) -> float:
        return self._clock()

    def event(self, event: str, **fields: Any) -> None:
        """The ledger and the table's changes say enough."""

    def state(self, worker: str, state: str) -> None:
        self._ledger.enter(worker, state)

    def moved(self, ticket: Ticket) -> None:
        """Called by the table after every transition."""
        key = ticket.kind, ticket.ordinal
        if ticket.state in PAYLOAD:
            self._held.add(key)
            self._most_held = max(self._most_held, len(self._held))
        else:
            self._held.discard(key)
        if ticket.state is State.HANDED:
            self._ages.append(ticket.step - ticket.version)

    async def before_training(self, ctx: Context) -> None:
        """Nothing is evaluated or saved."""

    async def after_step(self, ctx: Context, step: int, stats: dict[str, float]) -> None:
        self._ends.append(self._clock())
        if step == WARM_UP_STEPS - 1:
            self._ledger.lap()
        if step == ctx.config.total_steps - 1 - self._layout.max_staleness:
            self._pools = self._ledger.lap()

    async def drain(self, ctx: Context) -> None:
        """Nothing is left."""

    def abandon(self) -> None:
        """Nothing is outstanding."""

    def prediction(self, work: Work) -> Prediction:
        first, last = WARM_UP_STEPS - 1, len(self._ends) - 1 - self._layout.max_staleness
        steady = self._ends[last] - self._ends[first]
        return Prediction(
            layout=self._layout,
            bounds=bounds(work, self._layout),
            step_seconds=steady / (last - first),
            pools={
                pool: {state: seconds / steady for state, seconds in states.items()} if steady > 0 else {}
                for pool, states in self._pools.items()
            },
            staleness=sum(self._ages) / len(self._ages),
            staleness_max=max(self._ages),
            payload_bytes=self._most_held * work.ticket_bytes,
            adapter_bytes=(self._layout.max_staleness + 1) * self._layout.rollout * work.adapter_bytes,
            ends=tuple(self._ends),
        )
