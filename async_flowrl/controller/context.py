"""The state that the controller's coroutines share: one dataclass, made by controller/build.py and passed in."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from async_flowrl.config.schema import Config
from async_flowrl.controller.departures import Arrivals, Departures
from async_flowrl.controller.reward_calls import RewardCalls
from async_flowrl.controller.score_log import ScoreLog
from async_flowrl.tickets.request import RequestBuilder
from async_flowrl.tickets.table import TicketTable
from async_flowrl.types import Span
from separation.group import Worker, WorkerGroup


class Signal:
    """A condition variable: wakes all coroutines that wait for it, or only those of one worker."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._own: dict[str, asyncio.Event] = {}

    def notify(self, who: str | None = None) -> None:
        """Wakes `who`, or everybody: what a thousand workers wait for must not wake all of them for each."""
        if who is not None:
            if own := self._own.pop(who, None):
                own.set()
            return
        self._event.set()
        self._event = asyncio.Event()
        waiting, self._own = self._own, {}
        for own in waiting.values():
            own.set()

    async def wait(self, who: str | None = None) -> None:
        """Until the next notification of everybody or of `who`."""
        await (self._event if who is None else self._own.setdefault(who, asyncio.Event())).wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._event.wait()


class Observer(Protocol):
    """Where the controller reports what happened. Nothing in a run is decided by it."""

    def now(self) -> float:
        """Seconds on the clock that events are stamped with."""
        ...

    def event(self, event: str, **fields: Any) -> None: ...

    def state(self, worker: str, state: str) -> None:
        """`worker` is now busy, wait_data, wait_weights, sync or idle."""
        ...


def book_span(observer: Observer, worker: str, span: Span, **fields: Any) -> None:
    """Records what a worker says it did."""
    known = {name: value for name in ("flops", "bytes") if (value := getattr(span, name)) is not None}
    observer.event("span", worker=worker, name=span.name, start=span.start, end=span.end, **fields, **known)


class Trainer(Protocol):
    """The trainer ranks as the controller sees them (controller/trainer.py)."""

    async def update(self, ctx: "Context", step: int) -> dict[str, float]: ...


class Weights(Protocol):
    """Publishing and delivery of versions (weights.py)."""

    async def publish_first(self) -> None:
        """The versions that the tickets of the first step and of the next ones name."""
        ...

    async def publish(self, version: int) -> None:
        """Returns when the version is staged; delivery goes on beside the next update."""
        ...

    async def welcome(self, worker: Worker) -> None:
        """Proves a new worker's binding and brings it every version that live tickets name."""
        ...

    async def leave(self, worker: str) -> None: ...

    async def retain_for_evaluation(self, version: int) -> None:
        """Retains a published version until `deliver_for_evaluation` has brought it to the workers."""
        ...

    async def deliver_for_evaluation(self, version: int) -> None: ...

    async def watch(self) -> None:
        """Runs beside the loop and raises what goes wrong in a delivery."""
        ...

    async def drain(self) -> None: ...

    async def close(self) -> None:
        """Ends what is under way; the workers keep what they hold."""
        ...

    def report(self) -> dict[str, Any]:
        """The `sync` section of summary.json."""
        ...


class Steps(Protocol):
    """What is done around training (after_step.py)."""

    trained: bool
    """Every step is done and a checkpoint of the last is written: no later failure may cost the run its results."""

    async def before_training(self, ctx: "Context") -> None: ...

    async def after_step(self, ctx: "Context", step: int, stats: dict[str, float]) -> None:
        """Metrics, images, evaluation tickets, checkpoint."""
        ...

    async def drain(self, ctx: "Context") -> None: ...

    def abandon(self) -> None:
        """Ends what is still outstanding after the loop, by success or failure."""
        ...


class Servers(Protocol):
    """The reward servers that the run has started (reward_servers.py)."""

    async def up(self, terms: Collection[str]) -> None:
        """Waits while one of the terms has no server that could be asked, and may have one again."""
        ...

    def lost(self) -> Mapping[str, str]:
        """Terms that will have no server any more, and why."""
        ...

    def heard(self, served: Mapping[str, Mapping[str, bool]]) -> None:
        """Takes note of which servers answered a call, by term and URL."""
        ...


class NoServers:
    """Of a run that has started none."""

    async def up(self, terms: Collection[str]) -> None:
        """Nothing to wait for."""

    def lost(self) -> Mapping[str, str]:
        return {}

    def heard(self, served: Mapping[str, Mapping[str, bool]]) -> None:
        """Nothing to take note of."""


@dataclass
class Context:
    config: Config
    requests: RequestBuilder
    table: TicketTable
    rollout: WorkerGroup
    rewards: Mapping[str, WorkerGroup]
    """By the pools' names; each scores every group, or those of `held_out/X` evaluations, by terms of its own."""
    trainer: Trainer
    weights: Weights
    observer: Observer
    steps: Steps
    base_digest: str
    """Digest of the trainer's base weights; every rollout worker must hold the same."""
    score_log: ScoreLog | None = None
    """Scores that are written down; None if the reward is deterministic."""
    reward_calls: RewardCalls = field(default_factory=RewardCalls)
    """Retries and failures by term, until their step's line of metrics is written."""
    stop_requested: Callable[[], bool] = lambda: False
    """Whether the run should end after this step, with a checkpoint (SIGTERM, time_limit)."""
    servers: Servers = field(default_factory=NoServers)
    departures: Departures = field(default_factory=Departures)
    """Which rollout workers are to leave."""
    arrivals: Arrivals = field(default_factory=Arrivals)
    """Which rollout workers have come and do not serve yet."""
    work: Signal = field(default_factory=Signal)
    """Something a rollout worker may wait for has changed: tickets issued or returned, versions acknowledged."""
    ready: Signal = field(default_factory=Signal)
    """Something the trainer or an evaluation may wait for has changed."""
