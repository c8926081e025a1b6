"""Simulation of a run: the real loop, dispatch, tickets and gate, on a simulated clock and with workers that only wait.

`simulate` is the entry point; `Prediction` is its result.
"""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from async_flowrl.controller.context import Context
from async_flowrl.loop import run
from async_flowrl.observability.ledger import PoolLedger
from async_flowrl.observability.summary import WARM_UP_STEPS
from async_flowrl.plan.stand_ins import PlannedTrainer, PlannedWeights, TicketsAsRequests, planned_pool
from async_flowrl.plan.virtual_time import run_virtual
from async_flowrl.plan.work import Bounds, Layout, Work, bounds, config_of
from async_flowrl.tickets.arithmetic import shape
from async_flowrl.tickets.request import RequestBuilder
from async_flowrl.tickets.table import State, Ticket, TicketTable

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

    @property
    def efficiency(self) -> float:
        """Share of its time that the busiest pool works or publishes, from 0 to 1.

        It is 1 if the schedule reaches the bound max(G, T, R), where R is the seconds of the rewards per step.
        """
        return max((states.get("busy", 0.0) + states.get("sync", 0.0) for states in self.pools.values()), default=1.0)

    def busy(self, pool: str) -> float:
        return self.pools.get(pool, {}).get("busy", 0.0)


def simulate(work: Work, layout: Layout, *, steps: int = 40, seed: int = 0) -> Prediction:
    """Simulates `steps` training steps; the same `seed` draws the same durations.

    The result is a function of the arguments, so that a plan which asks for a layout again gets what it got before.
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
    return run_virtual(_simulate(work, layout, steps, seed), horizon=math.inf)


async def _simulate(work: Work, layout: Layout, steps: int, seed: int) -> Prediction:
    config, recorder = config_of(work, layout, steps), Recorder(layout)
    weights = PlannedWeights(work, seed)
    ctx = weights.ctx = Context(
        config=config,
        requests=cast("RequestBuilder", TicketsAsRequests()),
        table=TicketTable(shape(config), on_change=recorder.moved),
        rollout=planned_pool("rollout", layout.rollout, work, layout, seed),
        rewards={name: planned_pool(name, size, work, layout, seed) for name, size in layout.reward_workers.items()},
        trainer=PlannedTrainer(work, layout, seed),
        weights=weights,
        observer=recorder,
        steps=recorder,
        base_digest="",
    )
    for worker in ctx.rollout.workers:
        ctx.table.join(worker.name)
        recorder.state(worker.name, "wait_data")
    await run(ctx)
    return recorder.prediction(work)


class Recorder:
    """Observer of a simulated run: records pool states on the virtual clock, ends of steps, and ages of tickets.

    It stands in for the controller's `observer` and `steps`.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._clock = asyncio.get_running_loop().time
        self._ledger = PoolLedger(self._clock)
        self._ends: list[float] = []
        self._ages: list[int] = []
        self._stored: set[tuple[str, int]] = set()
        self._max_stored = 0
        self._pools: Mapping[str, Mapping[str, float]] = {}
        self.trained = False

    def now(self) -> float:
        return self._clock()

    def state(self, worker: str, state: str) -> None:
        self._ledger.enter(worker, state)

    def event(self, event: str, **fields: Any) -> None:
        """Ignores the event: pool states and ticket transitions suffice for a prediction."""

    def moved(self, ticket: Ticket) -> None:
        """Records the ticket's new state. The ticket table calls this after every transition."""
        key = ticket.kind, ticket.ordinal
        if ticket.state in STORED_STATES:
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

    async def _nothing(self, *args: Any, **options: Any) -> None:
        """Does nothing: a simulated run evaluates and saves nothing."""

    before_training = drain = _nothing

    def abandon(self) -> None:
        """Does nothing: a simulated run has no outstanding work."""

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
        )
