"""The EMA of the trained weights on its way to evaluation: a stream of its own, one version at a time."""

from collections.abc import Awaitable, Callable
from typing import Any

from async_flowrl.types import EMA
from checkpoint_engine import Ack, Delivery, DeliveryOptions, Header, ReceiverEndpoint
from separation.group import Worker, WorkerGroup


class AverageEnd:
    """The first trainer rank as a sender whose versions were staged and sealed when they were new."""

    def __init__(self, trainers: WorkerGroup) -> None:
        self._trainers = trainers

    async def stage(self, version: int) -> None:
        """Done by `keep`: by now the trainer's average has moved on."""

    async def keep(self, version: int) -> None:
        await self._first.call("stage", version, EMA)
        await self._first.call("seal", version, EMA, lane="publish")
        await self.hold(version)

    async def seal(self, version: int) -> Header:
        header: Header = await self._first.call("seal", version, EMA, lane="publish")
        return header

    async def payload(self, version: int) -> Any:
        _, (reference,) = await self._first.call_split("payload", version, EMA, returns=2, lane="publish")
        return reference

    async def hold(self, version: int) -> None:
        await self._first.call("hold", version, EMA, lane="publish")

    async def release(self, version: int) -> None:
        await self._first.call("release", version, EMA, lane="publish")

    @property
    def _first(self) -> Worker:
        return self._trainers.workers[0]


class EmaWeights:
    """Keeps an average when it is new and delivers it when its evaluation's turn has come."""

    def __init__(
        self,
        trainers: WorkerGroup,
        *,
        options: DeliveryOptions,
        replace: Callable[[str, BaseException], Awaitable[None]],
        acknowledged: Callable[[str, Ack], None],
    ) -> None:
        self._sender = AverageEnd(trainers)
        self.delivery = Delivery(self._sender, replace=replace, options=options)
        self.delivery.on_ack(acknowledged)
        self._current: int | None = None

    async def keep(self, version: int) -> None:
        await self._sender.keep(version)

    async def deliver(self, version: int) -> None:
        """Replaces the average that was evaluated before."""
        before, self._current = self._current, version
        await self.delivery.publish(version)
        if before is not None:
            await self._sender.release(before)

    async def join(self, receiver: ReceiverEndpoint) -> None:
        await self.delivery.join(receiver, [] if self._current is None else [self._current])
