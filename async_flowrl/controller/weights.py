"""Publishing and delivery of versions between the trainer and the rollout workers, through `checkpoint_engine`.

Here are the two ends as Delivery wants them, the canary that proves every new worker's binding, and what the ticket
table must hear: a version's digest when it is sealed, and every acknowledgement.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from async_flowrl.controller.context import Context
from async_flowrl.controller.corruption import CorruptionWatch
from async_flowrl.controller.ema import EmaWeights
from async_flowrl.controller.endpoints import RolloutEnd, TrainerEnd
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.types import EMA
from checkpoint_engine import (
    CANARY_VERSION,
    EVALUATION,
    Ack,
    Delivery,
    DeliveryOptions,
    Header,
    check_binding,
)
from checkpoint_engine.collective_delivery import CollectiveBroadcast
from checkpoint_engine.outcome import Verdict, verdict
from checkpoint_engine.transports import OBJECT_STORE
from separation.group import Worker, WorkerDied
from separation.supervise import DeadlineExceeded, deadline

T = TypeVar("T")


@dataclass
class Canary:
    """Random weights that every new worker must compute with exactly as the trainer does, before it serves."""

    header: Header
    payload: Any
    probe: dict[str, Any]


@dataclass
class PublishedWeights:
    """The `Weights` of context.py. `start` makes it usable; it belongs to one running loop."""

    trainers: TrainerGroup
    transport: str = OBJECT_STORE
    ctx: Context = field(init=False)
    delivery: Delivery = field(init=False)
    canary: Canary = field(init=False)
    averaged: EmaWeights | None = None
    staged_seconds: float = 0.0
    _damage: CorruptionWatch = field(default_factory=CorruptionWatch)
    _started: asyncio.Event = field(default_factory=asyncio.Event)
    _sealed: dict[int, asyncio.Event] = field(default_factory=dict)

    async def publish_first(self) -> None:
        """Proves every worker's binding, then publishes the versions that the first tickets name."""
        await self._start()
        async with asyncio.TaskGroup() as tasks:
            for worker in self.ctx.rollout.workers:
                tasks.create_task(self._admit(worker))
        table = self.ctx.table
        for version in range(table.shape.version_for(table.step), table.step + 1):
            await self.publish(version)

    async def publish(self, version: int) -> None:
        """Waits for `version` - 2 to be sealed (there are two staging slots), then until `version` is staged."""
        clock = asyncio.get_running_loop().time
        began = clock()
        self._book("sync")
        if (older := self._sealed.get(version - 2)) is not None:
            await older.wait()
        self._sealed[version] = asyncio.Event()
        for old in [v for v in self._sealed if v < version - 2 * self.delivery_retain]:
            del self._sealed[old]
        await self.delivery.publish(version)
        self.staged_seconds += clock() - began
        self._book("idle")
        self.ctx.observer.event("version", stream="policy", version=version, state="staged", digest=None, worker=None)

    def _book(self, state: str) -> None:
        """What the trainer ranks do while they stand still for a version, and after it until the next update."""
        for rank in self.trainers.workers.workers:
            self.ctx.observer.state(rank.name, state)

    async def welcome(self, worker: Worker) -> None:
        table = self.ctx.table
        await self._started.wait()
        await self._prove(worker)
        oldest = table.shape.version_for(table.step)
        await self._join(worker, [v for v in table.published if v >= oldest])

    async def leave(self, worker: str) -> None:
        await self._started.wait()
        for delivery in self._deliveries:
            await delivery.leave(worker)

    async def keep_for_evaluation(self, version: int) -> None:
        """The version itself, or the EMA as it is now where the run has one."""
        if self.averaged is not None:
            await self._in_time(f"the average at version {version}", self.averaged.keep(version))
            return
        await self._sealed[version].wait()
        await self.delivery.keep(version)

    async def deliver_for_evaluation(self, version: int) -> None:
        if self.averaged is not None:
            await self.averaged.deliver(version)
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
        return [self.delivery] if self.averaged is None else [self.delivery, self.averaged.delivery]

    def sealed(self, header: Header) -> None:
        """A version has its digest: tickets that name it exist from now on."""
        if header.version == CANARY_VERSION:
            return
        self.ctx.table.publish(header.version, header.digest)
        self._sealed[header.version].set()
        self.ctx.observer.event(
            "version", stream=header.stream, version=header.version, state="sent", digest=header.digest, worker=None
        )
        self.ctx.work.notify()

    def report(self) -> dict[str, Any]:
        stats = self.delivery.stats
        return {
            "publishes": stats.publishes,
            "bytes": stats.bytes,
            "seconds": stats.seconds,
            "trainer_stall_seconds": self.staged_seconds,
            "transport": self.transport,
            "retries": stats.retries,
            "corrupt": stats.corrupt,
            "fallbacks": stats.fallbacks,
        }

    @property
    def delivery_retain(self) -> int:
        return self.ctx.config.live_versions

    async def _start(self) -> None:
        config = self.ctx.config
        sender = TrainerEnd(self.trainers.workers, self.transport, self.sealed)
        options = DeliveryOptions(
            retries=config.checkpoint_engine.retries, deadline=config.deadlines.publish, retain=self.delivery_retain
        )
        async with deadline(config.deadlines.publish, "publish: the trainer's canary"):
            probe = await self.trainers.workers.workers[0].call("canary")
            header = await sender.seal(CANARY_VERSION)
            self.canary = Canary(header, await sender.payload(CANARY_VERSION), probe)
        broadcast = None if self.transport == OBJECT_STORE else CollectiveBroadcast(sender, name=self.transport)
        self.delivery = Delivery(sender, replace=self._give_up, options=options, broadcast=broadcast)
        self.delivery.on_ack(self._acknowledged)
        if config.trainer.ema_decay is not None:
            self.averaged = EmaWeights(
                self.trainers.workers, options=options, replace=self._give_up, acknowledged=self._acknowledged
            )
        self._started.set()

    async def _admit(self, worker: Worker) -> None:
        """One that dies meanwhile is killed for good: its place in the pool notices and replaces it."""
        try:
            await self._prove(worker)
        except (WorkerDied, DeadlineExceeded) as lost:
            await self._give_up(worker.name, lost)
        else:
            await self._join(worker, [])

    async def _join(self, worker: Worker, versions: list[int]) -> None:
        end = RolloutEnd(worker, self.ctx, self.transport)
        await self.delivery.join(end, versions)
        if self.averaged is not None:
            await self.averaged.join(end)

    async def _prove(self, worker: Worker) -> None:
        """Delivers the canary and compares what the live modules compute.

        Raises WeightsMismatch naming the module, WorkerDied, or DeadlineExceeded.
        """
        end = RolloutEnd(worker, self.ctx, self.transport)
        for attempt in range(self.ctx.config.checkpoint_engine.retries + 1):
            try:
                await self._in_time(f"canary to {worker.name}", end.receive(self.canary.header, self.canary.payload))
                break
            except Exception as error:
                if verdict(error) is not Verdict.RESEND or isinstance(error, DeadlineExceeded):
                    raise
                if attempt == self.ctx.config.checkpoint_engine.retries:
                    raise WorkerDied(worker.name, f"given up, the canary does not arrive: {error}") from error
        proof = await self._in_time(f"proof of {worker.name}", worker.call("prove", CANARY_VERSION))
        check_binding(self.canary.probe, proof, who=worker.name)

    async def _in_time(self, what: str, call: Awaitable[T]) -> T:
        async with deadline(self.ctx.config.deadlines.publish, f"publish: {what}"):
            return await call

    def _acknowledged(self, worker: str, ack: Ack) -> None:
        if worker not in self.ctx.table.held:
            return  # it was declared dead while its acknowledgement was under way
        self._damage.acknowledged(ack.version)
        for_evaluation = ack.slot == EVALUATION or ack.stream == EMA
        self.ctx.table.acknowledge(worker, ack.version, ack.digest, evaluation=for_evaluation)
        self.ctx.observer.event(
            "version", stream=ack.stream, version=ack.version, state="acknowledged", digest=ack.digest, worker=worker
        )
        self.ctx.work.notify(worker)

    async def _give_up(self, name: str, error: BaseException) -> None:
        """A worker that cannot be brought its weights is killed; its place in the pool notices and replaces it."""
        self.ctx.observer.event("fault", worker=name, kind=type(error).__name__, message=str(error))
        for worker in self.ctx.rollout.workers:
            if worker.name == name:
                worker.kill()
        self.ctx.table.lost_worker(name)
        self.ctx.work.notify()
        self._damage.gave_up(error)
