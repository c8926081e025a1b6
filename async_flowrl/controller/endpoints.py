"""The two ends of a delivery of weights: the first trainer rank as sender and the rollout workers as receivers.

The classes implement the protocols SenderEndpoint and ReceiverEndpoint of checkpoint_engine/base.py, whose docstrings
describe the methods, by calls of the workers that hold the tensors.
"""

from collections.abc import Callable
from typing import Any

from async_flowrl.config.schema import Config
from async_flowrl.controller.context import Observer
from async_flowrl.controller.kept_state import is_kept
from async_flowrl.controller.sender_errors import sender_errors
from async_flowrl.types import EMA, POLICY
from checkpoint_engine import RING, Ack, Draft, Header
from checkpoint_engine.process_group import Epoch
from separation.group import Worker

DELIVERIES, CONTROL = "sync", "control"
"""Lanes (threads of a worker) for deliveries, and for aborting a collective operation that blocks another lane."""
PUBLISHING = "publish"
"""Lane of a trainer rank for publishing, which runs beside the next update."""


class TrainerEndpoint:
    """The first trainer rank as the sender of one stream, i.e. of one sequence of versions: POLICY or EMA.

    Its calls raise SenderLost if the rank has died, SenderFailed if it raises an exception.
    """

    def __init__(
        self,
        rank: Worker,
        config: Config,
        transport: str,
        on_sealed: Callable[[Header], None],
        *,
        stream: str = POLICY,
    ) -> None:
        """`on_sealed` is called with every version's header before a receiver can acknowledge the version."""
        self._rank, self._config = rank, config
        self._transport, self._on_sealed, self._stream = transport, on_sealed, stream

    async def stage(self, version: int) -> None:
        await self._call("stage", version, self._stream, lane="main")

    async def seal(self, version: int) -> Header:
        header: Header = await self._call(f"{self._stream}.seal", version)
        self._on_sealed(header)
        return header

    async def payload(self, version: int) -> Any:
        with sender_errors():
            method = f"sender.{self._stream}.payload"
            _, (reference,) = await self._rank.call_split(method, version, returns=2, lane=PUBLISHING)
        return reference

    async def hold(self, version: int) -> None:
        """Retains the version until `release`, also in the rank's state, from which a new rank could send it."""
        await self._keep(version, lane=PUBLISHING)
        await self._call(f"{self._stream}.hold", version)

    async def release(self, version: int) -> None:
        await self._call(f"{self._stream}.release", version)
        with sender_errors():
            await self._rank.call("versions.let_go", self._stream, version, lane=PUBLISHING)

    async def address(self) -> tuple[str, int]:
        address: tuple[str, int] = await self._call("collective.address", self._transport, self._rank.node)
        return address

    async def draft(self, version: int) -> Draft:
        draft: Draft = await self._call(f"{self._stream}.draft", version)
        return draft

    # The failure of a collective is not the rank's: the version then goes by the object store.

    async def open_group(self, epoch: Epoch, rank: int) -> None:
        await self._rank.call("sender.collective.sender.open", epoch, rank, lane=PUBLISHING)

    async def ready(self, epoch: int, draft: Draft) -> None:
        await self._rank.call("sender.collective.sender.ready", epoch, draft, lane=PUBLISHING)

    async def send(self, draft: Draft) -> None:
        await self._rank.call("sender.collective.sender.send", draft, lane=PUBLISHING)

    async def abort_group(self) -> None:
        await self._rank.call("sender.collective.abort", lane=CONTROL)

    async def _call(self, method: str, *arguments: Any, lane: str = PUBLISHING) -> Any:
        with sender_errors():
            return await self._rank.call(f"sender.{method}", *arguments, lane=lane)

    async def _keep(self, version: int, *, lane: str) -> None:
        """Has the rank copy the version to host memory, as a part of its state, if that is kept (kept_state.py)."""
        if is_kept(self._config):
            with sender_errors():
                await self._rank.call("versions.keep", self._stream, version, lane=lane)


class EmaEndpoint(TrainerEndpoint):
    """The sender of the EMA. A version is staged and sealed by `retain`, before its delivery."""

    def __init__(self, rank: Worker, config: Config, on_sealed: Callable[[Header], None]) -> None:
        super().__init__(rank, config, "", on_sealed, stream=EMA)

    async def retain(self, version: int) -> None:
        """Stages and seals the EMA as it was at `version`, and retains it until `release`."""
        # On the main lane, between two updates, because the EMA changes with the next one.
        await self._keep(version, lane="main")
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
        ack = await self._received(header, payload, slot)
        ended = self._observer.now()
        self._observer.event("span", worker=self.name, name="receive", start=began, end=ended, version=header.version)
        return ack

    async def _received(self, header: Header, payload: Any, slot: str) -> Ack:
        ack: Ack = await self._deliver("receiver.receive", header, payload, slot)
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
