"""Context is the state that the controller's coroutines share during one attempt, i.e. one start or recovery of a run.

run/recovery.py makes it.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from async_flowrl.config.schema import Config
from async_flowrl.config.scoring_pools import held_out_by_pool, reward_pools
from async_flowrl.controller.deadlines import SeparatePools
from async_flowrl.controller.reward_servers import RewardServers
from async_flowrl.controller.score_log import ScoreLog
from async_flowrl.controller.weights import PublishedWeights
from async_flowrl.observability.events import EventLog
from async_flowrl.tickets.request import RequestBuilder
from async_flowrl.tickets.table import TicketTable
from async_flowrl.types import Requests, Scores
from separation.group import WorkerGroup
from separation.supervise import Signal


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


# Share of the requests of a reward to its servers that may fail without a warning; a single one always may.
FAILED_SHARE = 0.05


@dataclass
class RewardCalls:
    """Counts retries and failures of groups scored since the last start, without scores from scores.jsonl."""

    # Step → counts by metric name.
    _counts: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    _requests: dict[str, Requests] = field(default_factory=dict)  # Term → its requests to servers.

    def add(self, step: int, scores: Scores) -> None:
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


@dataclass
class Context:
    """The shared state of one attempt."""

    config: Config
    requests: RequestBuilder
    table: TicketTable
    rollout: WorkerGroup
    # Name of a pool of reward workers → pool. Every pool scores every group, each with its own reward terms; a pool
    # `held_out/X` scores only those of evaluations.
    rewards: Mapping[str, WorkerGroup]
    weights: PublishedWeights
    observer: EventLog
    # What depends on whether processes sample and train: deadlines, deliveries, who trains now.
    placement: SeparatePools
    base_digest: str  # Digest of the trainer's base weights; every rollout worker must hold the same.
    # Scores on disk, which a resume reuses; None if the run needs none (`keeps_scores` in rewards/registry.py).
    score_log: ScoreLog | None = None
    # Retries and failures of reward calls by step and term. The trainer removes those of a step for its metrics.
    reward_calls: RewardCalls = field(default_factory=RewardCalls)
    # Returns True if the run must end after the current step, with a checkpoint (e.g. SIGTERM or time_limit).
    stop_requested: Callable[[], bool] = lambda: False
    servers: RewardServers = field(default_factory=RewardServers)
    # Pool of a held-out term, a worker of which had no replacement → the reason. Its term has no more scores.
    lost_pools: dict[str, str] = field(default_factory=dict)
    # The rollout workers that must leave the pool, e.g. because their node ends.
    draining: DrainingWorkers = field(default_factory=DrainingWorkers)
    # Number of rollout workers that are being started for an elastic pool, or load the model and receive weights.
    arriving: int = 0
    # Names of the workers of the pool that get no tickets: not yet, or not at all, as loading failed for example.
    not_serving: set[str] = field(default_factory=set)
    # How often rollout workers exchanged their weights for an average, for an older version, or back (types.py).
    swaps: int = 0
    # Seconds in which rollout workers put versions into their networks. Both are counted since the last step's metrics.
    activation: float = 0.0
    # Kind of a warning about the updates → its first sentence, if the summary does not have it from elsewhere; else "".
    warned: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Pool → names of the terms that it scores: of the trained ones, and of those of evaluations alone.
        self.reward_terms = {pool.name: pool.terms for pool in reward_pools(self.config.reward)}
        self.held_out_terms = held_out_by_pool(self.config)

    # Notified when a rollout worker may get a ticket: tickets were issued or returned, or versions acknowledged.
    work: Signal = field(default_factory=Signal)
    # Notified when a group has been scored; the trainer and evaluations wait for it.
    ready: Signal = field(default_factory=Signal)
