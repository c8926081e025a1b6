"""Limits of a plan, the simulation of one layout within them, and the choice among several values of max_staleness."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from async_flowrl.config.shared import SHARED
from async_flowrl.observability.summary import WARM_UP_STEPS
from async_flowrl.plan.frame_cost import with_frame
from async_flowrl.plan.simulate import Prediction, simulate
from async_flowrl.plan.work import Layout, Work

ENOUGH_EFFICIENCY = 0.98
"""Efficiency (share of the bound) that is enough: a layout that reaches it gains too little from more staleness."""
MAX_ADVISED_STALENESS = 2
"""Largest `max_staleness` that is recommended; larger ones only appear in the table."""
TICKETS_PER_SIMULATION = 1000
"""Approximate number of tickets per simulation; they take a few tenths of a second."""
TICKETS_OF_ONE_POOL = 300
"""The same with `placement=shared`, where the real trainer takes part and a ticket costs some three times as much."""
MAX_TICKETS_OF_A_PERIOD = 2000
"""Most training tickets from one evaluation to the next for which whole periods are simulated."""


@dataclass(frozen=True)
class Limits:
    """Resources that a plan may use, and choices that are fixed."""

    devices: int
    """Devices for trainer and rollout; reward workers are not counted among them."""
    memory: float = math.inf
    """Bytes of object store for images and trajectories."""
    reward: int = 1
    """Workers of the shared reward pool; 0 if there is none."""
    own_rewards: Mapping[str, int] = field(default_factory=dict)
    """Pool name (`reward/X`) → workers, for pools that score a single reward term X."""
    reward_gpus: Mapping[str, float] = field(default_factory=dict)
    """Reward pool → GPUs per worker, in addition to `devices`."""
    split: tuple[int, int] | None = None
    """(rollout devices, trainer devices); None = search for the best split."""
    steps: int | None = None
    """Steps to simulate; None = enough for about TICKETS_PER_SIMULATION tickets."""
    slow: tuple[float, ...] = ()
    """Factors on the ticket durations of the first rollout workers."""
    share: bool = True
    """Whether one base with both adapters, the optimizer and the activations of either kind fits one device, so that
    `placement=shared` is possible."""
    backend: str = "ray"
    """`runtime.backend`: ray (processes) or local (threads of one process)."""
    cores: int | None = None
    """Cores of the one machine on which the workers compute, one thread each; None = they compute on GPUs."""


def simulated(work: Work, layout: Layout, limits: Limits) -> Prediction:
    """Simulates as many steps as the limits say; where workers are processes on cores, the frame takes its share."""
    prediction = simulate(work, layout, steps=limits.steps or steps_of(work, layout))
    if limits.cores is None or limits.backend != "ray":
        return prediction
    return with_frame(prediction, work, limits.cores)


def steps_of(work: Work, layout: Layout) -> int:
    """Returns the steps that are simulated if no number is given: enough tickets, and whole periods of evaluations.

    With whole periods the mean step has its share of the evaluations. If a single period has more than
    MAX_TICKETS_OF_A_PERIOD tickets, evaluations have no part in the number.
    """
    min_steps = 16 + 2 * layout.max_staleness
    tickets = TICKETS_OF_ONE_POOL if layout.placement == SHARED else TICKETS_PER_SIMULATION
    steps = max(min_steps, min(200, tickets // work.tickets_per_step))
    every = work.evaluation.every if work.evaluation else 1
    if every * work.tickets_per_step > MAX_TICKETS_OF_A_PERIOD:
        return steps
    around = WARM_UP_STEPS + layout.max_staleness
    return around + every * max(1, -(-(steps - around) // every))


def choose(depths: Sequence[Prediction], limits: Limits) -> Prediction | None:
    """Returns the prediction with the least staleness among those efficient enough; None if none fits the store.

    If none is efficient enough, it is the one with the least staleness among those within 2 % of the fastest. The
    staleness is at most MAX_ADVISED_STALENESS: beyond that, smaller tickets help as much, with fresher images.
    """
    advised = [p for p in depths if p.layout.max_staleness <= MAX_ADVISED_STALENESS]
    fitting = [p for p in advised if p.payload_bytes <= limits.memory]
    if not fitting:
        return None
    fastest = min(p.step_seconds for p in fitting)
    good = [p for p in fitting if p.efficiency >= ENOUGH_EFFICIENCY] or [
        p for p in fitting if p.step_seconds <= fastest / ENOUGH_EFFICIENCY
    ]
    return min(good, key=lambda p: (p.layout.max_staleness, p.step_seconds))
