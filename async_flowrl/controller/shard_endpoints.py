"""The two ends of a delivery of weights that lie in shares on all trainer ranks (tune=full with trainer.shard=full).

Every rank stages, digests and sends its own share, in buckets of `checkpoint_engine.bucket_bytes`; no rank ever has the
whole model. A bucket goes by the object store from the rank to the rollout workers, which put it in its place and
digest it there, while the ranks digest the next ones; the senders' digests come last. The classes stand beside those of
endpoints.py, and implement the same protocols of checkpoint_engine/base.py.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from async_flowrl.config.schema import Config
from async_flowrl.controller.context import Observer
from async_flowrl.controller.endpoints import PUBLISHING, RolloutEndpoint
from async_flowrl.controller.living import Living
from async_flowrl.controller.sender_errors import SenderFailed, SenderLate, SenderLost, answers_of, failures_of_ranks
from async_flowrl.controller.share_payload import (
    MAX_BUCKETS_AHEAD,
    Allowance,
    ShardedPayload,
    kept_in,
)
from async_flowrl.types import EMA, POLICY
from checkpoint_engine import CANARY_VERSION, RING, Ack, Draft, Header, Layout, ReceiverEndpoint, ShardedHeader
from separation.group import RefLost, Worker, WorkerDied
from separation.supervise import together


class ShardedTrainerEndpoint:
    """All trainer ranks as the sender of one stream. If one of them dies, all are rebuilt (run/recovery.py), so nothing
    is published again here."""

    _stream = POLICY

    def __init__(
        self,
        ranks: Sequence[Worker],
        layout: Layout,
        bucket_bytes: int,
        on_sealed: Callable[[Header], None],
        *,
        seconds: float = 120.0,
    ) -> None:
        """`layout` is that of whole tensors; `on_sealed` as in TrainerEndpoint.

        `seconds` is the deadline of each answer of a rank; its error, SenderLate, names the ranks that are late. A
        receiver has as long for all its calls of one version, and what it waits for ranks does not count. The callers
        need no deadline.
        """
        self._ranks, self._layout, self._bucket_bytes = ranks, layout, bucket_bytes
        self._on_sealed, self._seconds = on_sealed, seconds
        self._under_way: set[asyncio.Future[Any]] = set()
        """Buckets that are being fetched, and versions that receivers take before they are sealed."""

    async def stage(self, version: int) -> None:
        await self._all("sender.stage", version, self._stream, lane="main")

    async def canary(self) -> tuple[Header, ShardedPayload, dict[str, Any]]:
        """Header, bytes and probe of the canary (checkpoint_engine/binding_proof.py), whose bytes the ranks retain."""
        probes = await self._all("sender.canary", lane="main")
        header = await self._sealed(CANARY_VERSION)
        await self.hold(CANARY_VERSION)
        return header, await self.payload(CANARY_VERSION), probes[0]

    async def send_ahead(self, version: int, receivers: Sequence[ReceiverEndpoint]) -> None:
        """Sends the bytes of a staged version to the receivers while the ranks digest them.

        Returns when the first receiver has all of them, so that the version can be sealed; the others go on. A receiver
        that fails is sent the version again when its `receive` is called. Raises an error of sender_errors.py if a rank
        dies, fails or is late.
        """
        ends = [end for end in receivers if isinstance(end, ShardedRolloutEndpoint)]
        if not ends:
            return
        await self._publish("open", version)
        draft = Draft(self._stream, version, self._layout, None, None)
        payload = await self.payload(version)
        tasks = waiting = {kept_in(self._under_way, end.take_ahead(draft, payload)) for end in ends}
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                errors = [task.exception() for task in done]
                if lost := [error for error in errors if isinstance(error, SenderLost | SenderFailed | SenderLate)]:
                    raise lost[0]
                if None in errors:
                    return
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            raise

    async def seal(self, version: int) -> Header:
        header = await self._sealed(version)
        self._on_sealed(header)
        return header

    async def _sealed(self, version: int) -> Header:
        return ShardedHeader.of(self._layout, await self._publish("seal", version))

    async def payload(self, version: int) -> ShardedPayload:
        method = f"sender.{self._stream}.piece"
        return ShardedPayload(self._ranks, method, version, self._bucket_bytes, self._seconds, self._under_way)

    async def hold(self, version: int) -> None:
        await self._publish("hold", version)

    async def release(self, version: int) -> None:
        await self._publish("release", version)

    async def close(self) -> None:
        """Cancels all that is fetched and taken ahead, and waits until it has ended."""
        under_way = list(self._under_way)
        for each in under_way:
            each.cancel()
        if under_way:
            await asyncio.wait(under_way)

    async def _publish(self, method: str, version: int) -> list[Any]:
        return await self._all(f"sender.{self._stream}.{method}", version, lane=PUBLISHING)

    async def _all(self, method: str, *arguments: Any, lane: str) -> list[Any]:
        waiting = [rank.name for rank in self._ranks]

        async def asked(rank: Worker) -> Any:
            try:
                with failures_of_ranks():
                    answer = await rank.call(method, *arguments, lane=lane)
            except WorkerDied as error:
                raise SenderLost(error.worker, error.reason) from error
            waiting.remove(rank.name)
            return answer

        async with answers_of(waiting, method, self._seconds):
            return await together(*(asked(rank) for rank in self._ranks))


class ShardedEmaEndpoint(ShardedTrainerEndpoint):
    """The sender of the EMA. A version is staged and sealed by `retain`, before its delivery."""

    _stream = EMA

    async def retain(self, version: int) -> None:
        """Stages and seals the EMA as it is now, and retains it until `release`."""
        await super().stage(version)
        await self.seal(version)
        await self.hold(version)

    async def stage(self, version: int) -> None:
        """Does nothing: `retain` has staged this version, and the trainer's EMA has changed since."""


E = TypeVar("E", bound=ShardedTrainerEndpoint)


async def sharded_sender(
    living: Living,
    config: Config,
    on_sealed: Callable[[Header], None],
    kind: type[E] = ShardedTrainerEndpoint,  # type: ignore[assignment]
) -> E:
    """Returns all ranks as the sender of a stream. Raises SenderLate or SenderFailed."""
    rank, method, seconds = living.first, "sender.whole_layout", config.deadlines.publish
    with failures_of_ranks():
        async with answers_of([rank.name], method, seconds):
            layout: Layout = await rank.call(method)
    return kind(living.workers, layout, config.checkpoint_engine.bucket_bytes, on_sealed, seconds=seconds)


class ShardedRolloutEndpoint(RolloutEndpoint):
    """One rollout worker as a receiver of shares: it asks for the buckets of all shards in turn.

    It takes one version at a time, also of two streams, whose deliveries know nothing of each other.
    """

    def __init__(self, worker: Worker, observer: Observer, transport: str) -> None:
        super().__init__(worker, observer, transport)
        self._receiving = asyncio.Lock()
        self._ahead: tuple[Draft, asyncio.Task[None]] | None = None
        """The last version whose bytes came, or are coming, before its header."""

    def take_ahead(self, draft: Draft, payload: ShardedPayload) -> "asyncio.Task[None]":
        """Begins to take a version before it is sealed; `receive` goes on from there. The task raises as `receive`."""
        task = asyncio.create_task(self._take_ahead(draft, payload), name=f"ahead-{self.name}-{draft.version}")
        self._ahead = draft, task
        return task

    async def _take_ahead(self, draft: Draft, payload: ShardedPayload) -> None:
        async with self._receiving:
            await self._take(draft, payload, RING)

    async def _received(self, header: Header, payload: Any, slot: str) -> Ack:
        assert isinstance(header, ShardedHeader)
        assert isinstance(payload, ShardedPayload)
        came = await self._came_ahead(header, slot)
        async with self._receiving:
            if not came or not self._is_ahead(header):  # another version may have taken its place meanwhile
                if self._ahead is not None and self._ahead[1].done():
                    self._ahead = None  # its bytes are given up; one that waits for its turn comes afterwards
                await self._take(header, payload, slot)
            if self._is_ahead(header):
                self._ahead = None
            allowed = Allowance(f"publish: version {header.version} to {self.name}", payload.seconds)
            ack: Ack = await allowed.spend(self._deliver("shards.finish", header))
            return ack

    async def _came_ahead(self, header: Header, slot: str) -> bool:
        """Waits for the version's bytes where they come ahead; returns False where they do not, or not all."""
        if self._ahead is None or slot != RING or not self._is_ahead(header):
            return False
        _, task = self._ahead
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            raise
        return not task.cancelled() and task.exception() is None

    def _is_ahead(self, draft: Draft) -> bool:
        return self._ahead is not None and _name(self._ahead[0]) == _name(draft)

    async def _take(self, draft: Draft, payload: ShardedPayload, slot: str) -> None:
        """Has the worker put all buckets in their place. The next ones are fetched meanwhile.

        Raises DeadlineExceeded if the worker's own calls take longer than `payload.seconds` together, and the errors of
        `ShardedPayload.bucket`.
        """
        shards = len(payload.ranks)
        allowed = Allowance(f"publish: version {draft.version} to {self.name}", payload.seconds)
        await allowed.spend(self._deliver("shards.begin", draft, shards, slot))
        coming = payload.buckets(draft.layout)
        ahead = max(1, min(shards, MAX_BUCKETS_AHEAD))
        for place, (shard, start) in enumerate(coming):
            ref = await payload.bucket(shard, start)
            for following in coming[place + 1 : place + 1 + ahead]:
                payload.fetch(*following)
            try:
                await allowed.spend(self._deliver("shards.take", draft.version, shard, start, ref))
            except RefLost:
                payload.forget(shard, start)
                raise


def _name(draft: Draft) -> tuple[str, int]:
    return draft.stream, draft.version
