"""The two ends of a delivery of weights that lie in shares on all trainer ranks (tune=full with trainer.shard=full).

Every rank stages, digests and sends its own share, in buckets of `checkpoint_engine.bucket_bytes`; no rank ever has the
whole model. A bucket goes by the object store from the rank to the rollout workers, which put it in its place and
digest it there, while the ranks digest the next ones; the senders' digests come last. The classes stand beside those of
endpoints.py, and implement the same protocols of checkpoint_engine/base.py.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from async_flowrl.config.schema import Config
from async_flowrl.controller.context import Observer
from async_flowrl.controller.endpoints import PUBLISHING, RolloutEndpoint
from async_flowrl.controller.living import Living
from async_flowrl.types import EMA, POLICY
from checkpoint_engine import CANARY_VERSION, RING, Ack, Draft, Header, Layout, ReceiverEndpoint, ShardedHeader
from checkpoint_engine.shards import shard_layout
from separation.group import RefLost, Worker, WorkerDied
from separation.supervise import together

MAX_BUCKETS_AHEAD = 4
"""Buckets that are fetched for a receiver while it puts another one in its place; at least one, else one per rank."""
MAX_KEPT_BUCKETS = 2 * MAX_BUCKETS_AHEAD
"""Buckets of one version that stay in the object store for receivers that ask for them a little later."""


class SenderLost(WorkerDied):
    """Raised where a bucket is asked for and its trainer rank has died: the receiver is not to blame."""

    kind = "SenderLost"
    """By this name checkpoint_engine judges it, as an error that it cannot cure."""


@dataclass
class ShardedPayload:
    """The bytes of one version on all ranks, fetched bucket by bucket when receivers ask for them."""

    ranks: Sequence[Worker]
    """By shard."""
    method: str
    """Method of the ranks that returns a bucket: (version, first byte, number of bytes) → (size, bytes)."""
    version: int
    bucket_bytes: int
    _buckets: "dict[tuple[int, int], asyncio.Future[Any]]" = field(default_factory=dict)

    async def bucket(self, shard: int, start: int) -> Any:
        """Returns a reference to the bucket of a shard that begins at byte `start` of it.

        Receivers that ask for the same one share it while it is among the newest MAX_KEPT_BUCKETS. Raises SenderLost,
        WorkerFailed (VersionGone in it), or RefLost.
        """
        fetched = self.fetch(shard, start)
        try:
            return await asyncio.shield(fetched)
        except Exception:
            self._buckets.pop((shard, start), None)
            raise

    def fetch(self, shard: int, start: int) -> "asyncio.Future[Any]":
        """Begins to fetch the bucket, unless it is kept or under way; returns a future of its reference."""
        key = shard, start
        if key not in self._buckets:
            for old in list(self._buckets)[: max(0, len(self._buckets) + 1 - MAX_KEPT_BUCKETS)]:
                del self._buckets[old]
            self._buckets[key] = asyncio.ensure_future(self._fetch(shard, start))
            self._buckets[key].add_done_callback(_asked)
        return self._buckets[key]

    def buckets(self, layout: Layout) -> list[tuple[int, int]]:
        """Returns shard and first byte of all buckets in the order in which they are sent: of all ranks in turn."""
        sizes = [shard_layout(layout, len(self.ranks), shard).nbytes for shard in range(len(self.ranks))]
        starts = range(0, max(sizes), self.bucket_bytes)
        return [(shard, start) for start in starts for shard, size in enumerate(sizes) if start < size]

    def forget(self, shard: int, start: int) -> None:
        """Has the bucket fetched again when it is asked for next: its reference was lost with a node."""
        self._buckets.pop((shard, start), None)

    async def _fetch(self, shard: int, start: int) -> Any:
        arguments = self.version, start, self.bucket_bytes
        try:
            _, (ref,) = await self.ranks[shard].call_split(self.method, *arguments, returns=2, lane=PUBLISHING)
        except WorkerDied as error:
            raise SenderLost(error.worker, error.reason) from error
        return ref


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
    ) -> None:
        """`layout` is that of whole tensors; `on_sealed` as in TrainerEndpoint."""
        self._ranks, self._layout, self._bucket_bytes = ranks, layout, bucket_bytes
        self._on_sealed = on_sealed

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
        that fails is sent the version again when its `receive` is called. Raises SenderLost.
        """
        ends = [end for end in receivers if isinstance(end, ShardedRolloutEndpoint)]
        if not ends:
            return
        await self._publish("open", version)
        draft = Draft(self._stream, version, self._layout, None, None)
        payload = await self.payload(version)
        tasks = waiting = {end.take_ahead(draft, payload) for end in ends}
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                errors = [task.exception() for task in done]
                if lost := [error for error in errors if isinstance(error, SenderLost)]:
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
        return ShardedPayload(self._ranks, f"sender.{self._stream}.piece", version, self._bucket_bytes)

    async def hold(self, version: int) -> None:
        await self._publish("hold", version)

    async def release(self, version: int) -> None:
        await self._publish("release", version)

    async def _publish(self, method: str, version: int) -> list[Any]:
        return await self._all(f"sender.{self._stream}.{method}", version, lane=PUBLISHING)

    async def _all(self, method: str, *arguments: Any, lane: str) -> list[Any]:
        return await together(*(rank.call(method, *arguments, lane=lane) for rank in self._ranks))


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
    """Returns all ranks as the sender of a stream."""
    layout: Layout = await living.first.call("sender.whole_layout")
    return kind(living.workers, layout, config.checkpoint_engine.bucket_bytes, on_sealed)


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
        task.add_done_callback(_asked)
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
            ack: Ack = await self._deliver("shards.finish", header)
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
        """Has the worker put all buckets in their place. The next ones are fetched meanwhile."""
        shards = len(payload.ranks)
        await self._deliver("shards.begin", draft, shards, slot)
        coming = payload.buckets(draft.layout)
        ahead = max(1, min(shards, MAX_BUCKETS_AHEAD))
        for place, (shard, start) in enumerate(coming):
            ref = await payload.bucket(shard, start)
            for following in coming[place + 1 : place + 1 + ahead]:
                payload.fetch(*following)
            try:
                await self._deliver("shards.take", draft.version, shard, start, ref)
            except RefLost:
                payload.forget(shard, start)
                raise


def _asked(ended: "asyncio.Future[Any]") -> None:
    """Takes the error of a future that perhaps nobody waits for, so that asyncio does not report it as forgotten."""
    if not ended.cancelled():
        ended.exception()


def _name(draft: Draft) -> tuple[str, int]:
    return draft.stream, draft.version
