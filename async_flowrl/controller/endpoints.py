"""The two ends of a delivery as `checkpoint_engine.Delivery` wants them: calls to the workers that hold them."""

from collections.abc import Callable
from typing import Any

from async_flowrl.controller.context import Context
from async_flowrl.types import POLICY
from checkpoint_engine import RING, Ack, Draft, Header
from checkpoint_engine.process_group import Epoch
from separation.group import Worker, WorkerGroup

LANE, CONTROL = "sync", "control"
"""Lanes of a rollout worker: deliveries, and what must get through while one is under way."""


class TrainerEnd:
    """The first trainer rank as a delivery's sender. `sealed` hears every header before anybody can acknowledge it."""

    def __init__(self, trainers: WorkerGroup, transport: str, sealed: Callable[[Header], None]) -> None:
        self._trainers, self._transport, self._sealed = trainers, transport, sealed

    async def stage(self, version: int) -> None:
        await self._first.call("stage", version, POLICY)

    async def seal(self, version: int) -> Header:
        header: Header = await self._first.call("seal", version, POLICY, lane="publish")
        self._sealed(header)
        return header

    async def payload(self, version: int) -> Any:
        _, (reference,) = await self._first.call_split("payload", version, POLICY, returns=2, lane="publish")
        return reference

    async def hold(self, version: int) -> None:
        await self._first.call("hold", version, POLICY, lane="publish")

    async def release(self, version: int) -> None:
        await self._first.call("release", version, POLICY, lane="publish")

    async def address(self) -> tuple[str, int]:
        found: tuple[str, int] = await self._first.call(
            "group_address", self._transport, self._first.node, lane="publish"
        )
        return found

    async def open_group(self, epoch: Epoch, rank: int) -> None:
        await self._first.call("open_group", epoch, rank, lane="publish")

    async def draft(self, version: int) -> Draft:
        draft: Draft = await self._first.call("draft", version, POLICY, lane="publish")
        return draft

    async def ready(self, epoch: int, draft: Draft) -> None:
        await self._first.call("group_ready", epoch, draft, lane="publish")

    async def send(self, draft: Draft) -> None:
        await self._first.call("group_send", draft, lane="publish")

    async def abort_group(self) -> None:
        await self._first.call("abort_group", lane=CONTROL)

    @property
    def _first(self) -> Worker:
        return self._trainers.workers[0]


class RolloutEnd:
    """One rollout worker as a delivery's receiver."""

    def __init__(self, worker: Worker, ctx: Context, transport: str) -> None:
        self.worker, self._ctx, self._transport = worker, ctx, transport
        self.name, self.node = worker.name, worker.node

    async def receive(self, header: Header, payload: Any, slot: str = RING) -> Ack:
        began = self._ctx.observer.now()
        ack: Ack = await self.worker.call("receive", header, payload, slot, lane=LANE)
        self._ctx.observer.event(
            "span", worker=self.name, name="receive", start=began, end=self._ctx.observer.now(), version=header.version
        )
        return ack

    async def relay(self, header: Header, slot: str = RING) -> Any:
        _, (reference,) = await self.worker.call_split("relay", header, slot, returns=2, lane=LANE)
        return reference

    async def open_group(self, epoch: Epoch, rank: int) -> None:
        await self.worker.call("open_group", self._transport, epoch, rank, lane=LANE)

    async def ready(self, epoch: int, draft: Draft) -> None:
        await self.worker.call("group_ready", epoch, draft, lane=LANE)

    async def accept(self, draft: Draft) -> Ack:
        ack: Ack = await self.worker.call("group_accept", draft, lane=LANE)
        return ack

    async def abort_group(self) -> None:
        await self.worker.call("abort_group", lane=CONTROL)
