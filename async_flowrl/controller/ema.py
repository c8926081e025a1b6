"""Delivery of the EMA (exponential moving average of the trained weights) to the rollout workers, for evaluations."""

from collections.abc import Callable, Coroutine
from typing import Any

from async_flowrl.controller.endpoints import EmaEndpoint
from checkpoint_engine import Ack, Delivery, DeliveryOptions, ReceiverEndpoint


class EmaWeights:
    """Retains the EMA of a version when it is due for evaluation, and delivers it when its evaluation begins.

    `replace` is awaited with the name of a worker to which the EMA cannot be delivered, and the error; `acknowledged`
    is called with a worker's name and its acknowledgement.
    PublishedWeights (weights.py) uses this class.
    """

    def __init__(
        self,
        sender: EmaEndpoint,
        *,
        options: DeliveryOptions,
        replace: Callable[[str, BaseException], Coroutine[Any, Any, None]],
        acknowledged: Callable[[str, Ack], None],
    ) -> None:
        self._sender = sender
        self.delivery = Delivery(self._sender, replace=replace, options=options)
        self.delivery.on_ack(acknowledged)
        self._current: int | None = None

    async def retain(self, version: int) -> None:
        """Keeps a copy of the EMA as it is now, as `version`, on the trainer ranks."""
        await self._sender.retain(version)

    async def deliver(self, version: int) -> None:
        """Starts the delivery of the retained `version` to all workers and releases the version before it."""
        before, self._current = self._current, version
        await self.delivery.publish(version)
        if before is not None:
            await self._sender.release(before)

    async def join(self, receiver: ReceiverEndpoint) -> None:
        """Adds a worker and delivers the current version to it, if there is one."""
        await self.delivery.join(receiver, [] if self._current is None else [self._current])
