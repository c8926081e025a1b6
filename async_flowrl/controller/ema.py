"""The EMA of the trained weights on its way to evaluation: a stream of its own, one version at a time."""

from collections.abc import Callable, Coroutine
from typing import Any

from async_flowrl.controller.endpoints import EmaEndpoint
from checkpoint_engine import Ack, Delivery, DeliveryOptions, Header, ReceiverEndpoint
from separation.group import WorkerGroup


class EmaWeights:
    """Retains an average when it is new and delivers it when its evaluation is due."""

    def __init__(
        self,
        trainers: WorkerGroup,
        *,
        options: DeliveryOptions,
        replace: Callable[[str, BaseException], Coroutine[Any, Any, None]],
        sealed: Callable[[Header], None],
        acknowledged: Callable[[str, Ack], None],
    ) -> None:
        self._sender = EmaEndpoint(trainers, sealed)
        self.delivery = Delivery(self._sender, replace=replace, options=options)
        self.delivery.on_ack(acknowledged)
        self._current: int | None = None

    async def retain(self, version: int) -> None:
        await self._sender.retain(version)

    async def deliver(self, version: int) -> None:
        """Replaces the average that was evaluated before."""
        before, self._current = self._current, version
        await self.delivery.publish(version)
        if before is not None:
            await self._sender.release(before)

    async def join(self, receiver: ReceiverEndpoint) -> None:
        await self.delivery.join(receiver, [] if self._current is None else [self._current])
