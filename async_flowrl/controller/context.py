"""Context is the state that the controller's coroutines share during one attempt, i.e. one start or recovery of a run.

run/recovery.py makes it. The protocols in this file describe its parts.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from async_flowrl.config.schema import Config
from async_flowrl.controller.placement import SeparatePools
from async_flowrl.controller.score_log import ScoreLog
from async_flowrl.observability.events import EventLog
from async_flowrl.tickets.request import RequestBuilder
from async_flowrl.tickets.table import TicketTable
from async_flowrl.types import Requests, Scores
from separation.group import Worker, WorkerGroup


@dataclass
class DrainingWorkers:
    """The rollout workers of one attempt that must leave because their nodes are taken away: a set of names."""

    # Worker → time on the loop's clock at which it must have left; infinity if nobody said when its node ends.
    _deadlines: dict[str, float] = field(default_factory=dict)
    # Worker that serves now → time-out of its service (the body of `in_time`).
    _time_outs: dict[str, asyncio.Timeout] = field(default_factory=dict)

    def __contains__(self, worker: str) -> bool:
        return worker in self._deadlines

    @property
    def names(self) -> frozenset[str]:
        """The names of all workers that were announced during this attempt, also of those that have left."""
        return frozenset(self._deadlines)

    def announce(self, worker: str, seconds: float) -> None:
        """Records that the worker gets no more tickets, and has `seconds` (infinity: no limit) for its own."""
        self._deadlines[worker] = asyncio.get_running_loop().time() + seconds
        self._apply_deadline(worker)

    @asynccontextmanager
    async def in_time(self, worker: str) -> AsyncIterator[None]:
        """Context manager for the time in which a worker serves tickets, one at a time for each worker.

        If the worker is announced, before or meanwhile, the body is cancelled at its deadline without an error.
        """
        scope = asyncio.timeout(None)
        self._time_outs[worker] = scope
        try:
            async with scope:
                self._apply_deadline(worker)
                yield
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            del self._time_outs[worker]

    def _apply_deadline(self, worker: str) -> None:
        deadline, scope = self._deadlines.get(worker), self._time_outs.get(worker)
        if deadline is not None and deadline < float("inf") and scope is not None:
            scope.reschedule(deadline)


@dataclass
class StartingWorkers:
    """The workers that have come during the run and do not serve, or not yet. Those that serve are not in it."""

    unnamed: int = 0  # Number of processes that are being started; they have no names yet.
    # Names of the workers that are loading the model and then receive the published weights.
    under_way: set[str] = field(default_factory=set)
    # Names of the workers that cannot serve, as loading failed for example, and still occupy a place in the pool.
    refused: set[str] = field(default_factory=set)

    def __contains__(self, worker: str) -> bool:
        return worker in self.under_way or worker in self.refused


# Share of the requests of a reward to its servers that may fail without a warning; a single one always may.
FAILED_SHARE = 0.05


@dataclass
class RewardCalls:
    """Counts retries and failures of groups scored since the last start, without scores from scores.jsonl."""

    # Step → counts by metric name.
    _counts: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    _requests: dict[str, Requests] = field(default_factory=dict)  # Term → its requests to servers.

    def add(self, step: int, scores: Scores) -> None:
        """Adds the retries and failures of one group of `step`."""
        self._counts[step].update({f"reward/{term}/retries": count for term, count in scores.retries.items()})
        self._counts[step].update(f"reward/{term}/failures" for term in scores.failed)
        for term, requests in scores.requests.items():
            self._requests[term] = self._requests.get(term, Requests()) + requests

    def warnings(self) -> dict[str, str]:
        """Returns term → a sentence, for terms of whose requests to servers more than FAILED_SHARE failed."""
        return {
            term: f"{requests.failed} of {requests.sent} requests for the term {term} failed; the last: {requests.last}"
            for term, requests in sorted(self._requests.items())
            if requests.failed > max(1, FAILED_SHARE * requests.sent)
        }

    def pop(self, step: int) -> dict[str, float]:
        """Removes and returns the step's counts above zero: `reward/<term>/retries` and `reward/<term>/failures`."""
        return dict(sorted(self._counts.pop(step, Counter()).items()))


class Signal:
    """A condition variable for coroutines; a notification is for all waiting coroutines or only for one worker's."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._own: dict[str, asyncio.Event] = {}

    def notify(self, who: str | None = None) -> None:
        """Wakes the coroutines that wait in `wait(who)`, at a cost that does not grow with the pool; None wakes all."""
        if who is not None:
            if event := self._own.pop(who, None):
                event.set()
            return
        self._event.set()
        self._event = asyncio.Event()
        waiting, self._own = self._own, {}
        for event in waiting.values():
            event.set()

    async def wait(self, who: str | None = None) -> None:
        """Waits for the next notification of all; with `who`, also for the next notification of `who`."""
        await (self._event if who is None else self._own.setdefault(who, asyncio.Event())).wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when `condition()` is True; it is checked at once and after every notification of all."""
        while not condition():
            await self._event.wait()


class Accumulator:
    """A sum of numbers since it was last taken."""

    def __init__(self) -> None:
        self._sum = 0.0

    def add(self, number: float) -> None:
        self._sum += number

    def take(self) -> float:
        """Returns the sum, which then begins at 0 again."""
        total, self._sum = self._sum, 0.0
        return total


class Trainer(Protocol):
    """The trainer ranks as the controller sees them (controller/trainer.py)."""

    async def update(self, ctx: "Context", step: int) -> dict[str, float]:
        """Waits for the groups of `step`, trains on them, and returns the step's metrics (name → value)."""

    async def watch(self) -> None:
        """Runs beside the loop and raises the death of a rank."""


class Weights(Protocol):
    """Publishing and delivery of versions (weights.py)."""

    async def publish_first(self) -> None:
        """Publishes the versions that the first tickets of the attempt name; called once, before `publish`."""

    async def publish(self, version: int) -> None:
        """Returns when the version is staged (copied aside); its delivery goes on during the next update."""

    async def add_worker(self, worker: Worker) -> None:
        """Checks that weights reach the new worker's modules, then sends it all versions that tickets name.

        Raises WeightsMismatch, WorkerDied or DeadlineExceeded of the worker, and SenderLost, SenderFailed or
        SenderLate.
        """

    async def leave(self, worker: str) -> None:
        """Ends the deliveries to the worker of this name."""

    async def retain_for_evaluation(self, version: int) -> None:
        """Retains a published version until `deliver_for_evaluation` has sent it to the workers."""

    async def deliver_for_evaluation(self, version: int) -> None:
        """Starts the delivery of a retained version to every rollout worker, for an evaluation."""

    async def watch(self) -> None:
        """Runs beside the loop and raises an error of a delivery that must end the run."""

    async def drain(self) -> None:
        """Waits until all deliveries are done."""

    async def close(self) -> None:
        """Cancels the deliveries; the rollout workers keep the versions that they hold."""

    def report(self) -> dict[str, Any]:
        """Returns the `sync` section of summary.json."""


class Steps(Protocol):
    """The work between training steps: metrics, checkpoints and evaluations (after_step.py)."""

    # True once the loop has done its last step and that step's checkpoint is written. A later failure, e.g. of an
    # evaluation, is then only recorded and does not fail the run.
    trained: bool

    @property
    def warnings(self) -> list[str]:
        """Sentences on updates that were not as they should be."""

    async def before_training(self, ctx: "Context") -> None:
        """Writes the attempt's first checkpoint and starts evaluations that are due."""

    async def after_step(self, ctx: "Context", step: int, stats: dict[str, float]) -> None:
        """Writes the metrics of `step` with the trainer's `stats`, starts what is due, and raises earlier errors."""

    async def drain(self, ctx: "Context") -> None:
        """Writes the last checkpoint and waits for all evaluations."""

    def abandon(self) -> None:
        """Cancels what is still under way after the loop, which has ended or failed."""


class Servers(Protocol):
    """The reward servers that the run has started (reward_servers.py)."""

    async def up(self, terms: Collection[str]) -> None:
        """Waits until each of the reward terms has a running server, or has lost all of its servers for good."""

    def lost(self) -> Mapping[str, str]:
        """Returns term → reason for the terms that have lost all of their servers for good."""


class NoServers:
    """Stands in for Servers in a run that has started no reward server."""

    async def up(self, terms: Collection[str]) -> None:
        """Returns at once."""

    def lost(self) -> Mapping[str, str]:
        return {}


@dataclass
class Context:
    """The shared state of one attempt. Its fields stay the same objects; the objects themselves change."""

    config: Config
    requests: RequestBuilder
    table: TicketTable
    rollout: WorkerGroup
    # Name of a pool of reward workers → pool. Every pool scores every group, each with its own reward terms; a pool
    # `held_out/X` scores only those of evaluations.
    rewards: Mapping[str, WorkerGroup]
    trainer: Trainer
    weights: Weights
    observer: EventLog
    steps: Steps
    # What depends on whether processes sample and train: deadlines, deliveries, who trains now.
    placement: SeparatePools
    base_digest: str  # Digest of the trainer's base weights; every rollout worker must hold the same.
    # Scores on disk, which a resume reuses; None if the run needs none (`keeps_scores` in rewards/registry.py).
    score_log: ScoreLog | None = None
    # Retries and failures of reward calls by step and term. The trainer removes those of a step for its metrics.
    reward_calls: RewardCalls = field(default_factory=RewardCalls)
    # Returns True if the run must end after the current step, with a checkpoint (e.g. SIGTERM or time_limit).
    stop_requested: Callable[[], bool] = lambda: False
    servers: Servers = field(default_factory=NoServers)
    # Pool of a held-out term, a worker of which had no successor → the reason. Its term has no more scores.
    lost_pools: dict[str, str] = field(default_factory=dict)
    # The rollout workers that must leave the pool, e.g. because their node ends.
    draining: DrainingWorkers = field(default_factory=DrainingWorkers)
    # The rollout workers that have joined the pool during the run and get no tickets: not yet, or not at all.
    starting: StartingWorkers = field(default_factory=StartingWorkers)
    # How often rollout workers exchanged their weights for an average, for an older version, or back (types.py).
    swaps: Accumulator = field(default_factory=Accumulator)
    # Seconds in which rollout workers put versions into their networks.
    activation: Accumulator = field(default_factory=Accumulator)
    # Notified when a rollout worker may get a ticket: tickets were issued or returned, or versions acknowledged.
    work: Signal = field(default_factory=Signal)
    # Notified when a group has been scored; the trainer and evaluations wait for it.
    ready: Signal = field(default_factory=Signal)
