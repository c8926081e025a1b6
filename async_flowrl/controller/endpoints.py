"""The two ends of a delivery of weights: the first trainer rank as sender and the rollout workers as receivers.

The classes implement the protocols SenderEndpoint and ReceiverEndpoint of checkpoint_engine/base.py, whose docstrings
describe the methods, by calls of the workers that hold the tensors.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from async_flowrl.controller.context import Attempt, Observer
from async_flowrl.controller.living import Living
from async_flowrl.controller.published import Published
from async_flowrl.controller.sender_errors import SenderLost, failures_of_ranks
from async_flowrl.types import EMA, POLICY
from checkpoint_engine import RING, Ack, Draft, Header
from checkpoint_engine.process_group import Epoch
from separation.group import Worker, WorkerDied
from separation.supervise import together

T = TypeVar("T")

DELIVERIES, CONTROL = "sync", "control"
"""Lanes (threads of a worker) for deliveries, and for aborting a collective operation that blocks another lane."""
PUBLISHING = "publish"
"""Lane of a trainer rank for publishing, which runs beside the next update."""


async def bury_sender(living: Living, attempt: Attempt, error: WorkerDied) -> None:
    """As `Living.bury`, for a rank that was asked for weights. Raises SenderLost if no rank is left to send them."""
    try:
        await living.bury(attempt, error)
    except WorkerDied as last:
        raise SenderLost(last.worker, last.reason) from last


class TrainerEndpoint:
    """The first trainer rank as the sender of one stream, i.e. of one sequence of versions: POLICY or EMA.

    If that rank dies, the next first rank publishes the same versions with the same digests, and the call that noticed
    the death is made again there.
    """

    def __init__(
        self,
        living: Living,
        attempt: Attempt,
        transport: str,
        on_sealed: Callable[[Header], None],
        *,
        stream: str = POLICY,
        on_moved: Callable[[Sequence[int]], None] = lambda lost: None,
    ) -> None:
        """`on_sealed` is called with every version's header before a receiver can acknowledge the version.

        `on_moved` is called when another rank has become the sender, with the sealed versions that the rank lacks. No
        ticket needs these versions.
        """
        self._living, self._attempt = living, attempt
        self._transport, self._on_sealed, self._stream, self._on_moved = transport, on_sealed, stream, on_moved
        self._published = Published(attempt.config.live_versions)
        self._sender = living.first.name
        """Name of the rank that has published what is in `_published`."""
        self._moving = asyncio.Lock()

    async def stage(self, version: int) -> None:
        await self._on_first(lambda rank: rank.call("sender.stage", version, self._stream))
        self._published.staged.add(version)

    async def seal(self, version: int) -> Header:
        header: Header = await self._publish(f"{self._stream}.seal", version)
        self._published.sealed_one(header)
        self._on_sealed(header)
        return header

    async def payload(self, version: int) -> Any:
        method = f"sender.{self._stream}.payload"
        _, (reference,) = await self._on_first(
            lambda rank: rank.call_split(method, version, returns=2, lane=PUBLISHING)
        )
        return reference

    async def hold(self, version: int) -> None:
        """Retains the version until `release`. All ranks keep its weights, because any of them may send it later."""
        await self._keep(version, lane=PUBLISHING)
        self._published.held.add(version)
        await self._publish(f"{self._stream}.hold", version)

    async def release(self, version: int) -> None:
        self._published.release(version)
        await self._publish(f"{self._stream}.release", version)
        await self._on_ranks("let_go", version, lane=PUBLISHING)

    async def address(self) -> tuple[str, int]:
        def asked(rank: Worker) -> Awaitable[tuple[str, int]]:
            return rank.call("sender.collective.address", self._transport, rank.node, lane=PUBLISHING)

        return await self._on_first(asked)

    async def draft(self, version: int) -> Draft:
        draft: Draft = await self._publish(f"{self._stream}.draft", version)
        return draft

    # These calls are not made again on another rank, because a group contains the rank that opened it. If that rank
    # dies during a broadcast, the version is sent by the object store, and the next group contains the next first rank.

    async def open_group(self, epoch: Epoch, rank: int) -> None:
        await self._first.call("sender.collective.sender.open", epoch, rank, lane=PUBLISHING)

    async def ready(self, epoch: int, draft: Draft) -> None:
        await self._first.call("sender.collective.sender.ready", epoch, draft, lane=PUBLISHING)

    async def send(self, draft: Draft) -> None:
        await self._first.call("sender.collective.sender.send", draft, lane=PUBLISHING)

    async def abort_group(self) -> None:
        await self._first.call("sender.collective.abort", lane=CONTROL)

    @property
    def _first(self) -> Worker:
        return self._living.first

    async def _publish(self, method: str, *arguments: Any) -> Any:
        return await self._on_first(lambda rank: rank.call(f"sender.{method}", *arguments, lane=PUBLISHING))

    async def _on_first(self, call: Callable[[Worker], Awaitable[T]]) -> T:
        """Returns the call's result on the first rank, which first publishes the versions of a sender that has died.

        Raises SenderLost if no rank is left, SenderFailed if a rank raises an exception.
        """
        while True:
            try:
                with failures_of_ranks():
                    async with self._moving:
                        rank = self._first
                        if rank.name != self._sender:
                            await self._move_to(rank)
                    return await call(rank)
            except WorkerDied as error:
                await bury_sender(self._living, self._attempt, error)

    async def _move_to(self, rank: Worker) -> None:
        """Has the rank publish the versions that the sender before it had. Raises RuntimeError if a digest differs."""
        published, before = self._published, self._sender
        arguments = self._stream, published.versions, sorted(published.held)
        headers: dict[int, Header] = await rank.call("sender.take_over", *arguments, lane=PUBLISHING)
        lost = published.moved(headers, before, rank.name)
        self._sender = rank.name
        self._attempt.observer.event(
            "sender", worker=rank.name, before=before, stream=self._stream, versions=sorted(headers)
        )
        self._on_moved(lost)

    async def _keep(self, version: int, *, lane: str) -> None:
        """Has all ranks keep the version's weights; does nothing for a single rank, which has no successor."""
        if self._attempt.config.trainer.num_workers > 1:
            await self._on_ranks("keep", version, lane=lane)

    async def _on_ranks(self, method: str, version: int, *, lane: str) -> None:
        """Calls a method of `Versions` on all living ranks."""

        async def on(rank: Worker) -> None:
            try:
                with failures_of_ranks():
                    await rank.call(f"versions.{method}", self._stream, version, lane=lane)
            except WorkerDied as error:
                await bury_sender(self._living, self._attempt, error)

        with self._living.telling(method, self._stream, version) as ranks:
            await together(*(on(rank) for rank in ranks))


class EmaEndpoint(TrainerEndpoint):
    """The sender of the EMA. A version is staged and sealed by `retain`, before its delivery."""

    def __init__(self, living: Living, attempt: Attempt, on_sealed: Callable[[Header], None]) -> None:
        super().__init__(living, attempt, "", on_sealed, stream=EMA)

    async def retain(self, version: int) -> None:
        """Stages and seals the EMA as it is now, and retains it until `release`."""
        # On the main lane, between two updates, because the EMA changes with the next one.
        await self._keep(version, lane="main")
        await super().stage(version)
        self._published.held.add(version)
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
