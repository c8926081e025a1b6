"""PublishedWeights publishes the trainer's versions and delivers them to the rollout workers (`checkpoint_engine`).

The loop (async_flowrl/loop.py) uses it. It tells the ticket table the digest of every published version, and which
workers have acknowledged it. Before a new worker gets a version, delivered test weights (the canary) must have the same
effect in its network as in the trainer's.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from async_flowrl.config.schema import Config
from async_flowrl.controller.canary import Canary
from async_flowrl.controller.context import Observer, Signal
from async_flowrl.controller.corruption import CorruptionWatch
from async_flowrl.controller.deaths import SenderLost
from async_flowrl.controller.ema import EmaWeights
from async_flowrl.controller.endpoints import EmaEndpoint, RolloutEndpoint, TrainerEndpoint, bury_sender
from async_flowrl.controller.own_versions import endpoint_of
from async_flowrl.controller.shard_endpoints import (
    ShardedEmaEndpoint,
    ShardedRolloutEndpoint,
    ShardedTrainerEndpoint,
    sharded_sender,
)
from async_flowrl.controller.shared import delivery_options
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.tickets.table import TicketTable
from async_flowrl.types import EMA, POLICY
from checkpoint_engine import (
    CANARY_VERSION,
    EVALUATION,
    Ack,
    Delivery,
    Header,
    check_binding,
)
from checkpoint_engine.collective_delivery import CollectiveBroadcast
from checkpoint_engine.errors import Verdict, verdict
from checkpoint_engine.transports import OBJECT_STORE
from separation.group import RefLost, Worker, WorkerDied, WorkerGroup
from separation.supervise import DeadlineExceeded, deadline

T = TypeVar("T")


@dataclass
class PublishedWeights:
    """Implements the protocol `Weights` (context.py) for one attempt; `publish_first` must be called first.

    A worker that cannot be given its weights is killed, so that the pool replaces it. Errors that must end the run
    (WeightsMismatch, CorruptedVersion and unknown ones) are raised by `watch`.
    """

    config: Config
    table: TicketTable
    rollout: WorkerGroup
    trainers: TrainerGroup
    observer: Observer
    work: Signal
    """Notified when a version is published or acknowledged, and when a worker is given up."""
    transport: str = OBJECT_STORE
    base_digest: str = ""
    """Digest of the base weights, which all workers hold."""
    delivery: Delivery = field(init=False)
    canary: Canary = field(init=False)
    ema: EmaWeights | None = None
    """Deliveries of the EMA for evaluations; None if `trainer.ema_decay` is null."""
    stall_seconds: float = 0.0
    """Seconds that the trainer has waited in `publish`."""
    _corruption: CorruptionWatch = field(default_factory=CorruptionWatch)
    _started: asyncio.Event = field(default_factory=asyncio.Event)
    _sealed: dict[int, asyncio.Event] = field(default_factory=dict)
    _unsent: set[int] = field(default_factory=set)
    """Versions that no living trainer rank can send; only tickets that are already trained have named them."""

    @property
    def sharded(self) -> bool:
        """True if every trainer rank sends its own share of the weights."""
        return self.trainers.sharded

    async def publish_first(self) -> None:
        """Checks all present workers with the canary, then publishes the versions that the first tickets name.

        For a worker that joins later, the caller that brings it in must call `welcome`.
        """
        present = list(self.rollout.workers)
        await self._start()
        async with asyncio.TaskGroup() as tasks:
            for worker in present:
                tasks.create_task(self._admit(worker))
        for version in range(self._oldest_named(), self.table.step + 1):
            await self.publish(version)

    async def publish(self, version: int) -> None:
        """Waits until `version` - 2 is sealed, because there are two staging slots, and then until `version` is staged.

        To stage a version is to copy it aside; to seal it is to fix its digest.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        self._book("sync")
        if (older := self._sealed.get(version - 2)) is not None:
            await older.wait()
        self._sealed[version] = asyncio.Event()
        for old in [v for v in self._sealed if v < version - 2 * self.config.live_versions]:
            del self._sealed[old]
        await self.delivery.publish(version)
        self.stall_seconds += clock() - began
        self._book("idle")
        self.observer.event("version", stream="policy", version=version, state="staged", digest=None, worker=None)

    def _book(self, state: str) -> None:
        """Records the state of all trainer ranks: `sync` during `publish`, `idle` from then until the next update."""
        for rank in self.trainers.living.workers:
            self.observer.state(rank.name, state)

    async def welcome(self, worker: Worker) -> None:
        await self._started.wait()
        await self._prove(worker)
        oldest = self._oldest_named()
        await self._join(worker, [v for v in self.table.published if v >= oldest and v not in self._unsent])

    def _oldest_named(self) -> int:
        """Returns the oldest version that a ticket of the current step or a later one can name."""
        return self.table.shape.version_for(self.table.step)

    async def leave(self, worker: str) -> None:
        await self._started.wait()
        for delivery in self._deliveries:
            await delivery.leave(worker)

    async def retain_for_evaluation(self, version: int) -> None:
        """Retains the EMA as it is now, under the number `version`; without an EMA, the version itself."""
        if self.ema is not None:
            await self._from_sender(f"the average at version {version}", self.ema.retain(version))
            return
        await self._sealed[version].wait()
        await self.delivery.keep(version)

    async def deliver_for_evaluation(self, version: int) -> None:
        if self.ema is not None:
            await self.ema.deliver(version)
        else:
            await self.delivery.place(version)

    async def watch(self) -> None:
        await self._started.wait()
        async with asyncio.TaskGroup() as tasks:
            for delivery in self._deliveries:
                tasks.create_task(delivery.failed())

    async def drain(self) -> None:
        for delivery in self._deliveries:
            await delivery.drain()

    async def close(self) -> None:
        if self._started.is_set():
            for delivery in self._deliveries:
                await delivery.close()

    @property
    def _deliveries(self) -> list[Delivery]:
        return [self.delivery] if self.ema is None else [self.delivery, self.ema.delivery]

    def sealed(self, header: Header) -> None:
        """Publishes a sealed version in the ticket table, which then issues the tickets that name it."""
        self.table.publish(header.version, header.digest)
        self._sealed[header.version].set()
        self._sent(header)
        self.work.notify()

    def _sent(self, header: Header) -> None:
        self.observer.event(
            "version", stream=header.stream, version=header.version, state="sent", digest=header.digest, worker=None
        )

    def report(self) -> dict[str, Any]:
        stats = self.delivery.stats
        return {
            "publishes": stats.publishes,
            "bytes": stats.bytes,
            "seconds": stats.seconds,
            "trainer_stall_seconds": self.stall_seconds,
            "transport": self.transport,
            "retries": stats.retries,
            "corrupt": stats.corrupt,
            "fallbacks": stats.fallbacks,
        }

    async def _start(self) -> None:
        """Makes the canary, the sender and the deliveries of the policy and of its EMA."""
        config, living = self.config, self.trainers.living
        sender: TrainerEndpoint | ShardedTrainerEndpoint
        if self.sharded:
            sender = await sharded_sender(living, config, self.sealed)
            self.canary = Canary(*await sender.canary())
        else:
            self.canary = await self._in_time("the trainer's canary", self._by_first(Canary.of))
            sender = TrainerEndpoint(living, self, self.transport, self.sealed, on_moved=self._moved)
        broadcast = None
        if isinstance(sender, TrainerEndpoint) and self.transport != OBJECT_STORE:
            broadcast = CollectiveBroadcast(
                sender,
                name=self.transport,
                setup_seconds=config.checkpoint_engine.setup_seconds,
                ready_seconds=config.checkpoint_engine.ready_seconds,
                sender_seconds=config.deadlines.publish,
                max_members=config.checkpoint_engine.max_members,
            )
        options = delivery_options(config, POLICY, sharded=self.sharded)
        ahead, on_close = (
            (sender.send_ahead, sender.close) if isinstance(sender, ShardedTrainerEndpoint) else (None, None)
        )
        self.delivery = Delivery(
            sender,
            replace=self._give_up,
            options=options,
            broadcast=broadcast,
            ahead=ahead,
            on_close=on_close,
        )
        self.delivery.on_ack(self._acknowledged)
        if config.trainer.ema_decay is not None:
            self.ema = EmaWeights(
                await sharded_sender(living, config, self._sent, ShardedEmaEndpoint)
                if self.sharded
                else EmaEndpoint(living, self, self._sent),
                options=delivery_options(config, EMA, sharded=self.sharded),
                replace=self._give_up,
                acknowledged=self._acknowledged,
            )
        self._started.set()

    def _moved(self, lost: Sequence[int]) -> None:
        """Records that another trainer rank sends from now on, and that it lacks the versions `lost`.

        No ticket waits for these versions.
        """
        self._unsent |= set(lost)
        self.delivery.moved(lost)

    async def _admit(self, worker: Worker) -> None:
        """Checks a worker and adds it to the deliveries; kills one that dies or hangs, so that the pool replaces it."""
        try:
            await self._prove(worker)
        except SenderLost:
            raise
        except (WorkerDied, DeadlineExceeded) as lost:
            await self._give_up(worker.name, lost)
        else:
            await self._join(worker, [])

    async def _join(self, worker: Worker, versions: list[int]) -> None:
        kind = ShardedRolloutEndpoint if self.sharded else endpoint_of(self.config)
        end = kind(worker, self.observer, self.transport)
        await self.delivery.join(end, versions)
        if self.ema is not None:
            await self.ema.join(end)

    async def _prove(self, worker: Worker) -> None:
        """Delivers the canary to the worker and compares the results of its network with the trainer's.

        Raises WeightsMismatch, which names the module that differs, WorkerDied, DeadlineExceeded, SenderLost or
        SenderLate.
        """
        kind = ShardedRolloutEndpoint if self.sharded else RolloutEndpoint
        end = kind(worker, self.observer, self.transport)
        for attempt in range(self.config.checkpoint_engine.retries + 1):
            try:
                received = end.receive(self.canary.header, self.canary.payload)
                await self._from_sender(f"canary to {worker.name}", received)
                break
            except Exception as error:
                if verdict(error) is not Verdict.RESEND or isinstance(error, DeadlineExceeded):
                    raise
                if attempt == self.config.checkpoint_engine.retries:
                    raise WorkerDied(worker.name, f"given up, the canary does not arrive: {error}") from error
                if isinstance(error, RefLost):
                    self.canary = await self._in_time("the trainer's canary, again", self._canary_again())
        proof = await self._in_time(f"proof of {worker.name}", worker.call("prove", CANARY_VERSION))
        check_binding(self.canary.probe, proof, who=worker.name)

    async def _canary_again(self) -> Canary:
        """Returns the canary with a new payload; if ranks have shares, the same object, because they still hold it."""
        return self.canary if self.sharded else await self._by_first(self.canary.again)

    async def _by_first(self, make: Callable[[Worker], Awaitable[Canary]]) -> Canary:
        """Returns the canary that the first rank makes, or the next rank if the first dies meanwhile.

        Raises SenderLost if no rank is left.
        """
        living = self.trainers.living
        while True:
            try:
                return await make(living.first)
            except WorkerDied as error:
                await bury_sender(living, self, error)

    async def _in_time(self, what: str, call: Awaitable[T]) -> T:
        async with deadline(self.config.deadlines.publish, f"publish: {what}"):
            return await call

    async def _from_sender(self, what: str, call: Awaitable[T]) -> T:
        """As `_in_time`; if ranks have shares, without a deadline here, because each of their answers has its own."""
        return await (call if self.sharded else self._in_time(what, call))

    def _acknowledged(self, worker: str, ack: Ack) -> None:
        if worker not in self.table.held:
            return  # The worker was declared dead while its acknowledgement was under way.
        self._corruption.acknowledged(ack.version)
        for_evaluation = ack.slot == EVALUATION or ack.stream == EMA
        self.table.acknowledge(worker, ack.version, ack.digest, evaluation=for_evaluation)
        self.observer.event(
            "version", stream=ack.stream, version=ack.version, state="acknowledged", digest=ack.digest, worker=worker
        )
        self.work.notify(worker)

    async def _give_up(self, name: str, error: BaseException) -> None:
        """Kills a worker to which weights cannot be delivered; `dispatch` notices its death and replaces it.

        Raises CorruptedVersion if too many workers in a row received damaged weights.
        """
        self.observer.event("fault", worker=name, kind=type(error).__name__, message=str(error))
        for worker in self.rollout.workers:
            if worker.name == name:
                worker.kill()
        self.table.lost_worker(name)
        self.work.notify()
        self._corruption.gave_up(error)
