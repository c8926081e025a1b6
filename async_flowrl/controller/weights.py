"""PublishedWeights publishes the trainer's versions and delivers them to the rollout workers (`checkpoint_engine`).

It tells the ticket table the digest of every published version, and which workers have acknowledged it.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from async_flowrl.config.schema import Config
from async_flowrl.controller.deadlines import SeparatePools
from async_flowrl.controller.endpoints import RolloutEndpoint, SenderLost, TrainerEndpoint
from async_flowrl.controller.rank_weights import ReplicatedWeights
from async_flowrl.observability.events import EventLog
from async_flowrl.tickets.table import TicketTable
from async_flowrl.types import EMA, POLICY
from checkpoint_engine import EVALUATION, PROOF_VERSION, Ack, Delivery, Header, check_binding
from checkpoint_engine.base import parents
from checkpoint_engine.collective_delivery import CollectiveBroadcast
from checkpoint_engine.errors import Verdict, error_names, verdict
from checkpoint_engine.transports import OBJECT_STORE
from separation.group import RefLost, Worker, WorkerDied, WorkerGroup
from separation.supervise import DeadlineExceeded, Signal, deadline

# Workers given up over corrupted weights without a new version anywhere; with so many the sender is at fault.
MAX_CORRUPTED_WORKERS_IN_A_ROW = 3


class CorruptedVersion(RuntimeError):
    """Raised if too many workers receive damaged weights, so that the sender is at fault and no replacement helps."""


@dataclass
class PublishedWeights:
    """The published weights of one attempt; `publish_first` must be called first.

    A worker that cannot be given its weights is killed, so that the pool replaces it. Errors that must end the run
    (WeightsMismatch, CorruptedVersion and unknown ones) are raised by `watch`.
    """

    config: Config
    table: TicketTable
    rollout: WorkerGroup
    trained: ReplicatedWeights  # The trained weights on the trainer ranks.
    observer: EventLog
    work: Signal  # Notified when a version is published or acknowledged, and when a worker is given up.
    placement: SeparatePools
    transport: str  # Way by which versions are sent to the rollout workers.
    held: Collection[int] = ()  # Versions that an earlier attempt has published, and whose evaluation is not made yet.
    sender: TrainerEndpoint = field(init=False)
    delivery: Delivery = field(init=False)
    # Random weights by which a worker is proven: header, bytes (a reference), what the trainer's network makes of them.
    _proof: tuple[Header, Any, dict[str, Any]] = field(init=False)
    stall_seconds: float = 0.0  # Seconds that the trainer has waited in `publish`.
    _first: int = 0  # First version that this attempt publishes for training.
    _newest: int = -1  # Highest version that any worker has acknowledged; -1 for none.
    _lost: set[str] = field(default_factory=set)  # Rollout workers whose loss is recorded.
    _corrupted: int = 0  # Workers given up over damaged weights since `_newest` was acknowledged for the first time.
    # The delivery of the policy and, if `trainer.ema_decay` is set, that of its EMA, which is only evaluated.
    _deliveries: list[Delivery] = field(default_factory=list)
    _started: asyncio.Event = field(default_factory=asyncio.Event)
    _sealed: dict[int, asyncio.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sender = self.trained.sender(self.config, self.sealed)

    async def publish_first(self) -> None:
        """Proves all present workers, then publishes the versions that the first tickets name."""
        present = list(self.rollout.workers)
        await self._start()
        # As a version does, the proof goes from node to node: Ray fetches a value from any node that has it.
        above = parents({worker.name: worker.node for worker in present})
        arrived = {worker.name: asyncio.Event() for worker in present}
        async with asyncio.TaskGroup() as tasks:
            for worker in present:
                parent = above[worker.name]
                before = None if parent is None else arrived[parent]
                tasks.create_task(self._admit(worker, before, arrived[worker.name]))
        self._first = self._oldest_named()
        if self.config.trainer.ema_decay is None:
            for version in sorted(version for version in self.held if version < self._first):
                await self.delivery.restore(version)
        for version in range(self._first, self.table.step + 1):
            await self.publish(version)

    async def publish(self, version: int) -> None:
        """Waits until `version` - 2 is sealed, as there are two staging slots, and `version` is staged."""
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
        self._record("staged", POLICY, version)

    def _book(self, state: str) -> None:
        for rank in self.trained.ranks:
            self.observer.state(rank.name, state)

    async def add_worker(self, worker: Worker) -> None:
        """Checks that weights reach the new worker's modules, then sends it all versions that tickets name.

        Raises WeightsMismatch, WorkerDied or DeadlineExceeded of the worker, and SenderLost, SenderFailed or
        SenderLate.
        """
        await self._started.wait()
        await self.prove(worker)
        oldest = self._oldest_named()
        await self._join(worker, [v for v in self.table.published if v >= oldest])

    async def prove(self, worker: Worker, arrived: asyncio.Event | None = None) -> None:
        """Delivers random weights to a new worker and checks that it computes the same with them as the trainer.

        `arrived` is set when the worker has them, or will not get them. Raises WeightsMismatch, which names the module,
        WorkerDied, DeadlineExceeded, and the errors of the sender.
        """
        try:
            await self._deliver_proof(worker)
        finally:
            if arrived is not None:
                arrived.set()
        async with deadline(self.config.deadlines.publish, f"publish: proof of {worker.name}"):
            answer = await worker.call("prove", PROOF_VERSION)
        check_binding(self._proof[2], answer, who=worker.name)

    async def _deliver_proof(self, worker: Worker) -> None:
        retries, end = self.config.checkpoint_engine.retries, RolloutEndpoint(worker, self.observer)
        for attempt in range(retries + 1):
            header, payload, probe = self._proof
            try:
                async with deadline(self.config.deadlines.publish, f"publish: proof to {worker.name}"):
                    await end.receive(header, payload)
                return
            except Exception as error:
                if verdict(error) is not Verdict.RESEND or isinstance(error, DeadlineExceeded):
                    raise
                if attempt == retries:
                    raise WorkerDied(worker.name, f"given up, the proof does not arrive: {error}") from error
                if isinstance(error, RefLost):
                    self._proof = header, await self.sender.proof_again(), probe

    def _oldest_named(self) -> int:
        return self.table.shape.version_for(self.table.step)

    async def leave(self, worker: str) -> None:
        await self._started.wait()
        for delivery in self._deliveries:
            await delivery.leave(worker)

    async def retain_for_evaluation(self, version: int) -> None:
        """Retains the EMA as it is now, under the number `version`; without an EMA, the version itself."""
        if self.config.trainer.ema_decay is not None:
            await self._deliveries[-1].restore(version)
        elif version >= self._first:  # else `publish_first` has retained it
            await self._sealed[version].wait()
            await self.delivery.keep(version)

    async def deliver_for_evaluation(self, version: int) -> None:
        """Starts the delivery of a retained version to every rollout worker, for an evaluation."""
        await self._deliveries[-1].place(version)

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

    def sealed(self, header: Header) -> None:
        """Publishes a sealed version in the ticket table, which then issues the tickets that name it."""
        self._sent(header)
        if header.version < self._first:
            return  # for an evaluation
        self.table.publish(header.version, header.digest)
        self._sealed[header.version].set()
        self.work.notify()

    def _sent(self, header: Header) -> None:
        self._record("sent", header.stream, header.version, header.digest)

    def _record(
        self, state: str, stream: str, version: int, digest: str | None = None, worker: str | None = None
    ) -> None:
        self.observer.event("version", stream=stream, version=version, state=state, digest=digest, worker=worker)

    def report(self) -> dict[str, Any]:
        """Returns the `sync` section of summary.json."""
        stats = self.delivery.stats
        names = ("publishes", "bytes", "seconds", "retries", "corrupt", "fallbacks", "member_busy")
        counts = {name: getattr(stats, name) for name in names}
        return counts | {"trainer_stall_seconds": self.stall_seconds, "transport": self.transport}

    async def _start(self) -> None:
        config = self.config
        self._proof = await self.sender.proof()
        broadcast = None
        if self.transport != OBJECT_STORE:
            broadcast = CollectiveBroadcast(
                self.sender,
                name=self.transport,
                setup_seconds=config.checkpoint_engine.setup_seconds,
                ready_seconds=config.checkpoint_engine.ready_seconds,
                sender_seconds=config.deadlines.publish,
                max_members=config.checkpoint_engine.max_members,
            )
        made = partial(Delivery, replace=self._give_up, on_ack=self._acknowledged)
        options = self.placement.delivery_options(POLICY)
        self.delivery = made(self.sender, options=options, broadcast=broadcast)
        self._deliveries.append(self.delivery)
        if config.trainer.ema_decay is not None:
            average = self.trained.sender(config, self._sent, EMA)
            self._deliveries.append(made(average, options=self.placement.delivery_options(EMA)))
        self._started.set()

    async def _admit(self, worker: Worker, before: asyncio.Event | None, arrived: asyncio.Event) -> None:
        if before is not None:
            await before.wait()
        try:
            await self.prove(worker, arrived)
        except SenderLost:
            raise
        except (WorkerDied, DeadlineExceeded) as lost:
            await self._give_up(worker.name, lost)
        else:
            await self._join(worker, [])

    async def _join(self, worker: Worker, versions: list[int]) -> None:
        end = self.placement.endpoint(worker, self.observer)
        await self.delivery.join(end, versions)
        for average in self._deliveries[1:]:
            await average.join(end)

    def _acknowledged(self, worker: str, ack: Ack) -> None:
        if worker not in self.table.held:
            return  # The worker was declared dead while its acknowledgement was under way.
        if ack.version > self._newest:
            self._newest, self._corrupted = ack.version, 0
        self.table.acknowledge(worker, ack.version, ack.digest, evaluation=ack.slot == EVALUATION)
        self._record("acknowledged", ack.stream, ack.version, ack.digest, worker)
        self.work.notify(worker)

    def record_loss(self, name: str, error: BaseException) -> None:
        """Records that a rollout worker is lost, once: deliveries find it as well as the loop that gives it tickets."""
        if name not in self._lost:
            self._lost.add(name)
            self.observer.event("fault", worker=name, kind=type(error).__name__, message=str(error))

    async def _give_up(self, name: str, error: BaseException) -> None:
        self.record_loss(name, error)
        for worker in self.rollout.workers:
            if worker.name == name:
                worker.kill()
        self.table.lost_worker(name)
        self.work.notify()
        self._corrupted += "TransferCorrupted" in error_names(error)
        if self._corrupted >= MAX_CORRUPTED_WORKERS_IN_A_ROW:
            raise CorruptedVersion(
                f"{self._corrupted} workers in a row received damaged weights, however often they were sent; nothing "
                f"newer than version {self._newest} has arrived anywhere: {error}"
            ) from error
