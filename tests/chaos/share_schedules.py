"""Fault schedules of whole weights in shares, each drawn from a seed: ranks and receivers die, hang or send damage.

The real delivery and both its ends run in virtual time; `python -m tests.chaos.share_schedules FIRST LAST` prints how
often each fault was hit.
"""

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from async_flowrl.controller.sender_errors import SenderLate
from async_flowrl.controller.shard_endpoints import ShardedRolloutEndpoint, ShardedTrainerEndpoint
from checkpoint_engine import Delivery, DeliveryOptions, Header, Layout
from separation.group import RefLost, WorkerDied, WorkerFailed
from separation.virtual import VirtualWorker, run_virtual
from tests.support.share_ends import ShareReceiver, ShareSender, weights
from tests.support.toy_pool import ListObserver

RANKS, VERSIONS, RETAIN = 2, 5, 2
DEADLINE = 20.0
HORIZON_SECONDS = 5000.0
CELLS: dict[str, tuple[str, ...]] = {
    "receiver:first": ("kill", "hang", "slow", "corrupt", "truncate", "lose"),
    "receiver:take": ("kill", "hang", "slow", "corrupt", "truncate", "lose"),
    "receiver:last": ("kill", "hang", "slow", "corrupt", "truncate", "lose"),
    "rank:stage": ("kill", "hang", "raise", "slow"),
    "rank:piece": ("kill", "hang", "raise", "slow"),
}
"""Place → what goes wrong there: `lose` is a bucket whose node is gone.

The first bucket of a version begins it, and the last one has its digests; there are others between if they are small.
"""
PAIRS = [(place, fault) for place, faults in CELLS.items() for fault in faults]
SMALL_BUCKETS = (256, 700)
"""Bytes per bucket of which a share is several."""
FATAL_TO_RANKS = ("kill", "hang", "raise")
CALLS = {"first": 5, "take": 30, "last": 5, "stage": 5, "piece": 30}
"""How many calls of each kind every worker gets at least."""


@dataclass
class Schedule:
    """The faults of one run, and what of them was hit."""

    seed: int
    faults: dict[tuple[str, str, int], tuple[str, str]] = field(default_factory=dict)
    """(worker, method, n-th call) → (place, fault)."""
    buckets: int = 256
    workers: int = 2
    exception: str = "RuntimeError"
    """Class of the exceptions that ranks raise."""
    hit: Counter[tuple[str, str]] = field(default_factory=Counter)
    lost: set[str] = field(default_factory=set)
    """Names of the workers that died, hung or raised an exception."""

    @property
    def may_end(self) -> bool:
        """Whether a trainer rank dies, hangs or raises an exception, so that the delivery may end, by its name."""
        return any(place.startswith("rank") and fault in FATAL_TO_RANKS for place, fault in self.hit)

    @property
    def fatal(self) -> bool:
        """Whether it must end.

        An exception need not end it if a receiver dies, hangs or lacks bytes too: the bucket was perhaps fetched ahead
        for that receiver, so that nobody waited for it, and the rank raises only once.
        """
        receiver_fails = any(place.startswith("receiver") and fault != "slow" for place, fault in self.hit)
        hit = {fault for place, fault in self.hit if place.startswith("rank")}
        return self.may_end and not (receiver_fails and not hit & {"kill", "hang"})


def make_schedule(seed: int) -> Schedule:
    """Returns a schedule of up to three faults, the first of which is the cell of the seed's turn."""
    generator = random.Random(seed)
    made = Schedule(seed, buckets=generator.choice((*SMALL_BUCKETS, 1 << 20)), workers=generator.choice((1, 2, 3)))
    others = [generator.choice(PAIRS) for _ in range(generator.choice((0, 1, 2)))]
    for place, fault in [PAIRS[seed % len(PAIRS)], *others]:
        pool, method = place.split(":")
        if method == "take" and made.buckets > SMALL_BUCKETS[-1]:
            made.buckets = generator.choice(SMALL_BUCKETS)
        count = 5 if method == "piece" and made.buckets > SMALL_BUCKETS[-1] else CALLS[method]
        if pool == "rank":
            worker = f"trainer-{generator.randrange(RANKS)}"
        else:
            worker = f"rollout-{generator.randrange(made.workers)}"
        made.faults[worker, method, generator.randrange(1, count + 1)] = place, fault
    return made


class FaultyWorker(VirtualWorker):
    """A process that does what the schedule says."""

    def __init__(self, pool: str, index: int, target: Any, schedule: Schedule, *, incarnation: int = 0) -> None:
        super().__init__(pool, index, target, incarnation=incarnation)
        self._schedule, self._calls = schedule, Counter[str]()
        self.dead = self.hung = False

    async def serve(self, method: str, args: tuple[Any, ...]) -> Any:
        name = place_of(method.rpartition(".")[2], args)
        self._calls[name] += 1
        cell = self._schedule.faults.get((self.name, name, self._calls[name]))
        if cell is not None and not self.dead:
            self._schedule.hit[cell] += 1
            if cell[1] in FATAL_TO_RANKS:
                self._schedule.lost.add(self.name)
            args = await self._suffer(cell[1], args)
        if self.hung:
            await asyncio.Event().wait()
        await asyncio.sleep(0.01)
        if self.dead:
            raise WorkerDied(self.name, "killed")
        return self.run(method, args)

    async def _suffer(self, fault: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if fault == "kill":
            self.dead = True
        elif fault == "hang":
            self.hung = True
        elif fault == "slow":
            await asyncio.sleep(DEADLINE / 3)
        elif fault == "raise":
            raise WorkerFailed(self.name, "a method", self._schedule.exception, "injected", "")
        elif fault == "lose":
            raise RefLost("a bucket is gone with its node")
        elif fault in ("corrupt", "truncate"):
            *others, data = args
            data = data[: len(data) // 2] if fault == "truncate" else data.copy()
            if fault == "corrupt" and len(data):
                data[0] ^= 1
            return (*others, data)
        return args


def place_of(method: str, args: tuple[Any, ...]) -> str:
    """Returns the name of a call in CELLS."""
    if method != "receive":
        return method
    (piece, _) = args
    return "last" if piece.ends is not None else "first" if piece.begins is not None else "take"


class Site:
    """Ranks, receivers and their delivery."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.headers = schedule, dict[int, Header]()
        senders = [ShareSender(index, f"trainer-{index}", RANKS, {}) for index in range(RANKS)]
        self.ranks = [FaultyWorker("trainer", index, sender, schedule) for index, sender in enumerate(senders)]
        self.workers = [self._receiver(index) for index in range(schedule.workers)]
        self.replaced = 0
        self.sender = sender = ShardedTrainerEndpoint(
            self.ranks, Layout.of(weights(0)), schedule.buckets, self._sealed, seconds=DEADLINE
        )
        self.delivery = Delivery(
            sender,  # type: ignore[arg-type]
            replace=self._replace,
            options=DeliveryOptions(retries=2, deadline=None, retain=RETAIN, max_fan_out=99, node_fan_out=99),
            ahead=sender.send_ahead,
            on_close=sender.close,
        )

    def _receiver(self, index: int, incarnation: int = 0) -> FaultyWorker:
        target = ShareReceiver(index, f"rollout-{index}", {})
        return FaultyWorker("rollout", index, target, self.schedule, incarnation=incarnation)

    def end(self, worker: FaultyWorker) -> ShardedRolloutEndpoint:
        return ShardedRolloutEndpoint(worker, ListObserver(), "object_store")

    def _sealed(self, header: Header) -> None:
        self.headers[header.version] = header

    async def _replace(self, name: str, error: BaseException) -> None:
        self.replaced += 1
        index = next(worker.index for worker in self.workers if worker.name == name)
        self.workers[index].dead = True
        fresh = self.workers[index] = self._receiver(index, self.replaced)
        await self.delivery.join(self.end(fresh), sorted(self.headers)[-RETAIN:])

    async def publish(self) -> None:
        for worker in self.workers:
            await self.delivery.join(self.end(worker))
        for version in range(VERSIONS):
            await self.delivery.publish(version)
            await self.delivery.drain()

    def wrong(self, *, finished: bool) -> str | None:
        """Returns what is wrong with what the receivers that live have; every version that one has must be whole."""
        for worker in self.workers:
            held = [version for _, version, _ in worker.target.held()]
            if finished and held[-1:] != [VERSIONS - 1]:
                return f"{worker.name} ends with versions {held}"
            for version in held:
                digest, live_digest, live = worker.target.serve(version)
                if not digest == live_digest == self.headers[version].digest:
                    return f"{worker.name} serves version {version} under another digest"
                if not all(torch.equal(live[name], tensor) for name, tensor in weights(version).items()):
                    return f"{worker.name} serves torn weights as version {version}"
        return None


@dataclass(frozen=True)
class Ended:
    """How a schedule ended; `wrong` is None where that is as it must be."""

    schedule: Schedule
    wrong: str | None


def outcome(seed: int, *, calm: bool = False) -> Ended:
    """Runs the schedule of a seed, with `calm` without its faults."""
    schedule = make_schedule(seed)
    if calm:
        schedule.faults.clear()

    async def job() -> str | None:
        site = Site(schedule)
        error: WorkerDied | WorkerFailed | SenderLate | None = None
        try:
            await site.publish()
        except (WorkerDied, WorkerFailed, SenderLate) as lost:
            error = lost
        finally:
            await site.delivery.close()
        named = set(error.workers) if isinstance(error, SenderLate) else {error.worker} if error else set()
        by_name = named and named <= {rank.name for rank in site.ranks} & schedule.lost
        if schedule.fatal and not by_name:
            return f"{sorted(schedule.lost)} died, hung or failed, and the delivery ended with {error!r}"
        if error is not None and not (schedule.may_end and by_name):
            return f"ended with {error!r}"
        return site.wrong(finished=error is None)

    return Ended(schedule, run_virtual(job(), horizon=HORIZON_SECONDS))


def hits(ended: Sequence[Ended]) -> Counter[tuple[str, str]]:
    return sum((each.schedule.hit for each in ended), Counter[tuple[str, str]]())


if __name__ == "__main__":
    found = [outcome(seed) for seed in range(*map(int, sys.argv[1:3]))]
    for each in found:
        if each.wrong is not None:
            sys.stdout.write(f"seed {each.schedule.seed}: {each.wrong}\n")
    for cell, count in sorted(hits(found).items()):
        sys.stdout.write(f"{' '.join(cell)}: {count}\n")
