"""The two ends of a delivery of weights: the first trainer rank as sender and the rollout workers as receivers.

The classes implement SenderEndpoint and ReceiverEndpoint of checkpoint_engine/base.py by calls of the workers.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from async_flowrl.config.schema import Config
from async_flowrl.observability.events import EventLog
from async_flowrl.types import EMA, POLICY
from checkpoint_engine import PROOF_VERSION, RING, Ack, Draft, Header, VersionGone
from checkpoint_engine.process_group import Epoch
from separation.group import Worker, WorkerDied, WorkerFailed
from separation.supervise import limited, together

# Lanes (threads of a worker) for deliveries, and for aborting a collective operation that blocks another lane.
DELIVERIES, CONTROL = "sync", "control"
PUBLISHING = "publish"  # Lane of a trainer rank for publishing, which runs beside the next update.


@dataclass(eq=False)
class TrainerEndpoint:
    """The first trainer rank as the sender of one stream: POLICY or EMA.

    Its calls raise SenderLost, SenderFailed, or SenderLate after `deadlines.publish`.
    """

    ranks: Sequence[Worker]  # Those that hold the versions, the sender first.
    config: Config
    on_sealed: Callable[[Header], None]  # Gets every version's header before a receiver can acknowledge it.
    stream: str = POLICY

    def __post_init__(self) -> None:
        self._first = self.ranks[0]

    async def stage(self, version: int) -> None:
        # On the main lane, between two updates: the next one changes the EMA.
        if self.stream == EMA:
            await self._keep(version, lane="main")
        await self._all("sender.stage", version, self.stream, lane="main")

    async def seal(self, version: int) -> Header:
        header = await self._seal(version)
        self.on_sealed(header)
        return header

    async def _seal(self, version: int) -> Header:
        header: Header = await self._call(f"{self.stream}.seal", version)
        return header

    async def payload(self, version: int) -> Any:
        return await self._split(f"sender.{self.stream}.payload", version)

    async def hold(self, version: int) -> None:
        await self._keep(version, lane=PUBLISHING)
        await self._call(f"{self.stream}.hold", version)

    async def release(self, version: int) -> None:
        await self._call(f"{self.stream}.release", version)
        await self._all("versions.release", self.stream, version)

    async def proof(self) -> tuple[Header, Any, dict[str, Any]]:
        """Returns header, bytes (a reference) and probe of random weights (checkpoint_engine/binding_proof.py)."""
        probes = await self._all("sender.proof", lane="main")
        header = await self._seal(PROOF_VERSION)
        return header, await self.payload(PROOF_VERSION), probes[0]

    async def proof_again(self) -> Any:
        return await self._split("sender.proof_again", lane="main")

    async def address(self) -> tuple[str, int]:
        address: tuple[str, int] = await self._call("collective.address", self._first.node)
        return address

    async def draft(self, version: int) -> Draft:
        draft: Draft = await self._call(f"{self.stream}.draft", version)
        return draft

    # The failure of a collective is not the rank's: the version then goes by the object store.

    async def open_group(self, epoch: Epoch, rank: int) -> None:
        await self._first.call("sender.collective.open", epoch, rank, lane=PUBLISHING)

    async def ready(self, epoch: int, draft: Draft) -> None:
        await self._first.call("sender.collective.ready", epoch, draft, lane=PUBLISHING)

    async def send(self, draft: Draft) -> None:
        await self._first.call("sender.collective.send", draft, lane=PUBLISHING)

    async def abort_group(self) -> None:
        await self._first.call("sender.collective.abort", lane=CONTROL)

    async def _call(self, method: str, *arguments: Any) -> Any:
        method = f"sender.{method}"
        async with self._answers([self._first.name], method):
            return await self._first.call(method, *arguments, lane=PUBLISHING)

    async def _split(self, method: str, *arguments: Any, lane: str = PUBLISHING) -> Any:
        async with self._answers([self._first.name], method):
            _, (reference,) = await self._first.call_split(method, *arguments, returns=2, lane=lane)
        return reference

    async def _all(self, method: str, *arguments: Any, lane: str = PUBLISHING) -> list[Any]:
        return await self._together(method, lambda rank: rank.call(method, *arguments, lane=lane))

    async def _together(self, method: str, call: Callable[[Worker], Coroutine[Any, Any, Any]]) -> list[Any]:
        waiting = [rank.name for rank in self.ranks]

        async def answered(rank: Worker) -> Any:
            answer = await call(rank)  # made here, as a task that is cancelled before it begins would never await it
            waiting.remove(rank.name)
            return answer

        async with self._answers(waiting, method):
            return await together(*(answered(rank) for rank in self.ranks))

    @asynccontextmanager
    async def _answers(self, waiting: Sequence[str], method: str) -> AsyncIterator[None]:
        """Raises SenderLate if the body waits too long for the ranks in `waiting`, from which it may take names out.

        Raises SenderLost or SenderFailed in place of a WorkerDied or WorkerFailed of the body.
        """
        seconds = self.config.deadlines.publish
        try:
            async with limited(seconds, lambda: SenderLate(waiting, method, seconds)):
                yield
        except WorkerDied as error:
            raise SenderLost(error.worker, error.reason) from error
        except WorkerFailed as error:
            raise SenderFailed(error.worker, error.method, error.kind, error.message, error.remote_traceback) from error

    async def _keep(self, version: int, *, lane: str) -> None:
        if self.config.keeps_state:
            await self._all("versions.keep", self.stream, version, lane=lane)


@dataclass(eq=False)
class GatheredEndpoint(TrainerEndpoint):
    """The first trainer rank as the sender of versions of which every rank keeps some rows.

    A version is gathered right after it is staged, beside the next step. The first rank retains the newest one; an
    older one, for a receiver that is late, is gathered once more between two calls to train.
    """

    training: asyncio.Lock = field(kw_only=True)  # Held during every call to train.
    gathering: asyncio.Lock = field(kw_only=True)  # Held during every gather, of any stream.
    _sealed: tuple[int, Header] | None = field(default=None, init=False)

    async def _seal(self, version: int) -> Header:
        if self._sealed is None or self._sealed[0] != version:
            async with self.gathering:
                headers = await self._all("sender.gather", version, self.stream)
            self._sealed = version, headers[0]
        return self._sealed[1]

    async def draft(self, version: int) -> Draft:
        return await self._seal(version)

    async def payload(self, version: int) -> Any:
        try:
            return await super().payload(version)
        except SenderFailed as error:
            if error.exception != VersionGone.__name__:
                raise
        method, arguments = "sender.recall", (version, self.stream)

        def recalled(rank: Worker) -> Coroutine[Any, Any, Any]:
            if rank is self._first:
                return rank.call_split(method, *arguments, returns=2)
            return rank.call(method, *arguments)

        async with self.training, self.gathering:
            answers = await self._together(method, recalled)
        return answers[0][1][0]

    async def hold(self, version: int) -> None:
        await self._keep(version, lane=PUBLISHING)

    async def release(self, version: int) -> None:
        await self._all("versions.release", self.stream, version)

    async def _keep(self, version: int, *, lane: str) -> None:
        await self._all("versions.keep", self.stream, version, lane=lane)


class RolloutEndpoint:
    """One rollout worker as a receiver. Each receipt is recorded as a span (a timed event) by `observer`."""

    def __init__(self, worker: Worker, observer: EventLog) -> None:
        self.worker, self._observer = worker, observer
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
        await self._deliver("collective.open", epoch, rank)

    async def ready(self, epoch: int, draft: Draft) -> None:
        await self._deliver("collective.ready", epoch, draft)

    async def accept(self, draft: Draft) -> Ack:
        ack: Ack = await self._deliver("collective.accept", draft)
        return ack

    async def abort_group(self) -> None:
        await self.worker.call("collective.abort", lane=CONTROL)

    async def _deliver(self, method: str, *arguments: Any) -> Any:
        return await self.worker.call(method, *arguments, lane=DELIVERIES)


class SenderLost(WorkerDied):
    """Raised if weights cannot be had because the trainer rank that sends them has died. `worker` is the rank."""

    kind = "SenderLost"  # By this name checkpoint_engine judges it, as an error that it cannot cure.


class SenderFailed(WorkerFailed):
    """Raised if a trainer rank (`worker`) raised an `exception` when it was asked for weights.

    checkpoint_engine judges it by `kind`: not curable, except that a receiver can go on without a dropped version.
    """

    def __init__(self, worker: str, method: str, kind: str, message: str, remote_traceback: str) -> None:
        super().__init__(worker, method, kind, message, remote_traceback)
        self.exception = kind
        self.kind = kind if kind == VersionGone.__name__ else "SenderFailed"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.worker, self.method, self.exception, self.message, self.remote_traceback)


class SenderLate(RuntimeError):
    """Raised if trainer ranks (`workers`) live and do not answer in time; one of them may make the others wait."""

    def __init__(self, workers: Sequence[str], method: str, seconds: float) -> None:
        late = f"{', '.join(workers)} {'has' if len(workers) == 1 else 'have'}"
        super().__init__(f"publish: {late} not answered {method} within the deadline of {seconds:g} s")
        self.workers, self.method, self.seconds = tuple(workers), method, seconds
