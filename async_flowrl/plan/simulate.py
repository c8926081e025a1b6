"""Simulation of a run: the real loop, dispatch, tickets and gate, on a simulated clock and with workers that only wait.

`simulate` is the entry point; `Prediction` is its result.
"""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from async_flowrl.config.schema import Config
from async_flowrl.config.shared import SHARED
from async_flowrl.controller.context import Context, Trainer
from async_flowrl.loop import run
from async_flowrl.observability.ledger import PoolLedger, pool_of
from async_flowrl.observability.summary import WARM_UP_STEPS
from async_flowrl.plan.evaluations import PlannedEvaluations
from async_flowrl.plan.one_pool import TrainedRequests, one_pool
from async_flowrl.plan.stand_ins import PlannedTrainer, PlannedWeights, TicketsAsRequests, planned_pool
from async_flowrl.plan.units import Unit
from async_flowrl.plan.work import Bounds, Layout, Work, bounds, config_of
from async_flowrl.tickets.arithmetic import shape
from async_flowrl.tickets.request import RequestBuilder
from async_flowrl.tickets.table import TRAIN, State, Ticket, TicketTable
from separation.virtual import VirtualPool, run_virtual

STORED_STATES = (State.SCORING, State.READY, State.HANDED)
"""States of a ticket whose images and trajectory (the recorded denoising steps) are in Ray's object store."""
REMEMBERED = 256
"""Number of simulations whose results are kept; a plan needs about twenty."""


@dataclass(frozen=True)
class Prediction:
    """Steady state of one layout: the simulated steps after the warm-up and before generation runs out of work."""

    layout: Layout
    bounds: Bounds
    step_seconds: float
    pools: Mapping[str, Mapping[str, float]]
    """Pool → state → share of the pool's time in that state, from 0 to 1."""
    staleness: float
    """Mean age of a ticket when the trainer takes it, in versions."""
    staleness_max: int
    payload_bytes: int
    """Maximum of bytes that lie in the object store at the same time."""
    adapter_bytes: int
    """Bytes of the versions that all rollout workers together hold."""
    ends: tuple[float, ...]
    """End of each step in virtual seconds from the start."""
    evaluations: tuple[float, ...] = ()
    """Seconds of each evaluation, from the delivery of its version to its last score."""
    frame_seconds: float = 0.0
    """CPU seconds per step that driver, reward worker and Ray take of the pools' cores (plan/frame_cost.py)."""

    @property
    def efficiency(self) -> float:
        """Share of its time that the busiest pool works or publishes, from 0 to 1.

        With `placement=shared`, rollout and trainer count as one pool. The efficiency is 1 if the schedule reaches the
        bound (`Bounds.overlapped`).
        """
        works = {pool: states.get("busy", 0.0) + states.get("sync", 0.0) for pool, states in self.pools.items()}
        if self.bounds.together:
            works["shared"] = works.pop("rollout", 0.0) + works.pop("trainer", 0.0)
        return max(works.values(), default=1.0)

    def busy(self, pool: str) -> float:
        return self.pools.get(pool, {}).get("busy", 0.0)


def simulate(work: Work, layout: Layout, *, steps: int = 40, seed: int = 0) -> Prediction:
    """Simulates `steps` training steps; the same `seed` draws the same durations.

    The result depends on the arguments alone, and results are cached, because a plan asks for some layouts repeatedly.
    Raises ValueError if there are too few steps for a warm-up and a steady state.
    """
    min_steps = WARM_UP_STEPS + layout.max_staleness + 2
    if steps < min_steps:
        raise ValueError(
            f"max_staleness={layout.max_staleness} needs at least {min_steps} steps to simulate, got {steps}"
        )
    return _remembered(work, layout, steps, seed)


@lru_cache(maxsize=REMEMBERED)
def _remembered(work: Work, layout: Layout, steps: int, seed: int) -> Prediction:
    return traced(work, layout, steps, seed)[0]


def traced(work: Work, layout: Layout, steps: int, seed: int = 0) -> tuple[Prediction, list[Unit]]:
    """Simulates like `simulate` and also returns every unit of work of the run, sorted by its end."""
    return run_virtual(_simulate(work, layout, steps, seed), horizon=math.inf)


async def _simulate(work: Work, layout: Layout, steps: int, seed: int) -> tuple[Prediction, list[Unit]]:
    config, recorder = config_of(work, layout, steps), Recorder(layout, PlannedEvaluations(work.evaluation))
    weights, parts = PlannedWeights(work, seed), _parts(work, layout, config, seed, recorder)
    rewards = layout.reward_workers.items()
    ctx = weights.ctx = Context(
        config=config,
        requests=cast("RequestBuilder", parts.requests),
        table=TicketTable(shape(config), on_change=recorder.moved),
        rollout=parts.rollout,
        rewards={name: planned_pool(name, size, work, layout, seed, recorder.units) for name, size in rewards},
        trainer=parts.trainer,
        weights=weights,
        observer=recorder,
        steps=recorder,
        base_digest="",
    )
    for worker in ctx.rollout.workers:
        ctx.table.join(worker.name)
        recorder.state(worker.name, "wait_data")
    await run(ctx)
    return recorder.prediction(work), recorder.units


@dataclass(frozen=True)
class _Parts:
    """Objects of a simulation that depend on the placement."""

    requests: TicketsAsRequests
    rollout: VirtualPool
    trainer: Trainer


def _parts(work: Work, layout: Layout, config: Config, seed: int, recorder: "Recorder") -> _Parts:
    if layout.placement != SHARED:
        rollout = planned_pool("rollout", layout.rollout, work, layout, seed, recorder.units)
        return _Parts(TicketsAsRequests(config), rollout, PlannedTrainer(work, layout, seed, recorder.units))
    pools = one_pool(work, layout, config, seed, recorder.computes, recorder.units)
    return _Parts(TrainedRequests(config), *pools)


class Recorder:
    """Observer of a simulated run: records pool states on the virtual clock, ends of steps, and ages of tickets.

    It stands in for the controller's `observer` and `steps`.
    """

    def __init__(self, layout: Layout, evaluations: PlannedEvaluations) -> None:
        self._layout, self._evaluations = layout, evaluations
        self._clock = asyncio.get_running_loop().time
        self._ledger = PoolLedger(self._clock)
        self._ends: list[float] = []
        self._ages: list[int] = []
        self._stored: set[tuple[str, int]] = set()
        self._max_stored = 0
        self._pools: Mapping[str, Mapping[str, float]] = {}
        self._own = ("rollout", "trainer") if layout.placement == SHARED else ()
        """Pools whose states the devices report; the controller would count a ticket's wait for its turn as work."""
        self.units: list[Unit] = []
        self.trained = False
        for index in range(layout.trainer if self._own else 0):
            for pool in self._own:
                self.computes(f"{pool}-{index}", "idle")

    def now(self) -> float:
        return self._clock()

    def state(self, worker: str, state: str) -> None:
        if pool_of(worker) not in self._own:
            self._ledger.enter(worker, state)

    def computes(self, worker: str, state: str) -> None:
        """Records the state of a worker of a shared process, as its device reports it."""
        self._ledger.enter(worker, state)

    def event(self, event: str, **fields: Any) -> None:
        """Ignores the event: pool states and ticket transitions suffice for a prediction."""

    def moved(self, ticket: Ticket) -> None:
        """Records the ticket's new state. The ticket table calls this after every transition."""
        key = ticket.kind, ticket.ordinal
        if ticket.kind == TRAIN and ticket.state in STORED_STATES:
            self._stored.add(key)
            self._max_stored = max(self._max_stored, len(self._stored))
        else:
            self._stored.discard(key)
        if ticket.state is State.HANDED:
            self._ages.append(ticket.step - ticket.version)

    async def after_step(self, ctx: Context, step: int, stats: dict[str, float]) -> None:
        self._ends.append(self._clock())
        if step == WARM_UP_STEPS - 1:
            self._ledger.lap()
        if step == ctx.config.total_steps - 1 - self._layout.max_staleness:
            self._pools = self._ledger.lap()
        if step + 1 < ctx.config.total_steps:
            self._evaluations.after(ctx, step + 1)

    async def before_training(self, ctx: Context) -> None:
        """Does nothing: a simulated run saves nothing, and its evaluations begin after its first steps."""

    async def amend(self, ctx: Context, step: int, metrics: Mapping[str, float]) -> None:
        """Does nothing: nothing is measured."""

    async def drain(self, ctx: Context) -> None:
        await self._evaluations.drain()

    def abandon(self) -> None:
        self._evaluations.cancel()

    def prediction(self, work: Work) -> Prediction:
        """Returns the averages over the steady state, once the run has ended."""
        first, last = WARM_UP_STEPS - 1, len(self._ends) - 1 - self._layout.max_staleness
        steady_seconds = self._ends[last] - self._ends[first]
        return Prediction(
            layout=self._layout,
            bounds=bounds(work, self._layout),
            step_seconds=steady_seconds / (last - first),
            pools={
                pool: {state: seconds / steady_seconds for state, seconds in states.items()}
                if steady_seconds > 0
                else {}
                for pool, states in self._pools.items()
            },
            staleness=sum(self._ages) / len(self._ages),
            staleness_max=max(self._ages),
            payload_bytes=self._max_stored * work.ticket_bytes,
            adapter_bytes=(self._layout.max_staleness + 1) * self._layout.rollout * work.adapter_bytes,
            ends=tuple(self._ends),
            evaluations=tuple(self._evaluations.seconds),
        )
