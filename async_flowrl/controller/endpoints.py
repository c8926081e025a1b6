"""The two ends of a delivery of weights: trainer rank 0 as sender and the rollout workers as receivers.

The classes implement the protocols SenderEndpoint and ReceiverEndpoint of checkpoint_engine/base.py, whose docstrings
describe the methods, by calls of the workers that hold the tensors.
"""

from collections.abc import Callable
from typing import Any

from async_flowrl.controller.context import Observer
from async_flowrl.types import EMA, POLICY
from checkpoint_engine import RING, Ack, Draft, Header
from checkpoint_engine.process_group import Epoch
from separation.group import Worker, WorkerGroup

DELIVERIES, CONTROL = "sync", "control"
"""Lanes (threads of a worker) for deliveries, and for aborting a collective operation that blocks another lane."""
PUBLISHING = "publish"
"""Lane of a trainer rank for publishing, which runs beside the next update."""


class TrainerEndpoint:
    """Trainer rank 0 as the sender of one stream, i.e. of one sequence of versions: POLICY or EMA.

    `on_sealed` is called with every version's header before a receiver can acknowledge the version.
    """

    def __init__(
        self, trainers: WorkerGroup, transport: str, on_sealed: Callable[[Header], None], stream: str = POLICY
    ) -> None:
        self._trainers, self._transport, self._on_sealed, self._stream = trainers, transport, on_sealed, stream

    async def stage(self, version: int) -> None:
        await self._rank.call("sender.stage", version, self._stream)

    async def seal(self, version: int) -> Header:
        header: Header = await self._publish(f"{self._stream}.seal", version)
        self._on_sealed(header)
        return header

    async def payload(self, version: int) -> Any:
        call = self._rank.call_split(f"sender.{self._stream}.payload", version, returns=2, lane=PUBLISHING)
        _, (reference,) = await call
        return reference

    async def hold(self, version: int) -> None:
        await self._publish(f"{self._stream}.hold", version)

    async def release(self, version: int) -> None:
        await self._publish(f"{self._stream}.release", version)

    async def address(self) -> tuple[str, int]:
        host_and_port: tuple[str, int] = await self._publish("collective.address", self._transport, self._rank.node)
        return host_and_port

    async def open_group(self, epoch: Epoch, rank: int) -> None:
        await self._publish("collective.sender.open", epoch, rank)

    async def draft(self, version: int) -> Draft:
        draft: Draft = await self._publish(f"{self._stream}.draft", version)
        return draft

    async def ready(self, epoch: int, draft: Draft) -> None:
        await self._publish("collective.sender.ready", epoch, draft)

    async def send(self, draft: Draft) -> None:
        await self._publish("collective.sender.send", draft)

    async def abort_group(self) -> None:
        await self._rank.call("sender.collective.abort", lane=CONTROL)

    async def _publish(self, method: str, *arguments: Any) -> Any:
        return await self._rank.call(f"sender.{method}", *arguments, lane=PUBLISHING)

    @property
    def _rank(self) -> Worker:
        return self._trainers.workers[0]


class EmaEndpoint(TrainerEndpoint):
    """Trainer rank 0 as the sender of the EMA. A version is staged and sealed by `retain`, before its delivery."""

    def __init__(self, trainers: WorkerGroup, on_sealed: Callable[[Header], None]) -> None:
        super().__init__(trainers, "", on_sealed, EMA)

    async def retain(self, version: int) -> None:
        """Stages and seals the EMA as it is now, and retains it until `release`."""
        await super().stage(version)
        await self.seal(version)
        await self.hold(version)

    async def stage(self, version: int) -> None:
        """Does nothing: `retain` has staged this version, and the trainer's EMA has changed since."""


class RolloutEndpoint:
    """One rollout worker as a receiver. Each receipt is recorded as a span (a timed event) by `observer`."""

    def __init__(self, worker: Worker, observer: Observer, transport: str) -> None:
        self.worker, self._observer, self._transport = worker, observer, transport
        self.name, self.node = worker.name, worker.node

    async def receive(self, header: Header, payload: Any, slot: str = RING) -> Ack:
        began = self._observer.now()
        ack: Ack = await self._deliver("receiver.receive", header, payload, slot)
        ended = self._observer.now()
        self._observer.event("span", worker=self.name, name="receive", start=began, end=ended, version=header.version)
        return ack

    async def relay(self, header: Header, slot: str = RING) -> Any:
        export = "receiver.export", header.stream, header.version, slot
        _, (reference,) = await self.worker.call_split(*export, returns=2, lane=DELIVERIES)
        return reference

    async def open_group(self, epoch: Epoch, rank: int) -> None:
        await self._deliver("collective.open", self._transport, epoch, rank)

    async def ready(self, epoch: int, draft: Draft) -> None:
        await self._deliver("collective.receiver.ready", epoch, draft)

    async def accept(self, draft: Draft) -> Ack:
        ack: Ack = await self._deliver("collective.receiver.accept", draft)
        return ack

    async def abort_group(self) -> None:
        await self.worker.call("collective.abort", lane=CONTROL)

    async def _deliver(self, method: str, *arguments: Any) -> Any:
        return await self.worker.call(method, *arguments, lane=DELIVERIES)
