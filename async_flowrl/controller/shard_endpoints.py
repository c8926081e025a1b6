"""The two ends of a delivery of weights that lie in shares on all trainer ranks (tune=full with trainer.shard=full).

Every rank stages, digests and sends its own share, in buckets of `checkpoint_engine.bucket_bytes`; no rank ever has the
whole model. A bucket goes by the object store from the rank to the rollout workers, which put it in its place and
digest it there, while the ranks digest the next ones; the senders' digests come last. The classes stand beside those of
endpoints.py, and implement the same protocols of checkpoint_engine/base.py.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from async_flowrl.config.schema import Config
from async_flowrl.controller.context import Observer
from async_flowrl.controller.endpoints import PUBLISHING, RolloutEndpoint
from async_flowrl.controller.sender_errors import SenderFailed, SenderLate, SenderLost, answers_of, failures_of_ranks
from async_flowrl.controller.share_payload import Allowance, ShardedPayload, kept_in
from async_flowrl.controller.stored_weights import MAX_BUCKETS_AHEAD
from async_flowrl.types import EMA, POLICY
from checkpoint_engine import CANARY_VERSION, RING, Ack, Draft, Header, Layout, ReceiverEndpoint, ShardedHeader
from checkpoint_engine.errors import error_names
from checkpoint_engine.shards import Beginning, Piece
from separation.group import RefLost, Worker, WorkerDied
from separation.supervise import together

logger = logging.getLogger(__name__)


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
        self._ahead: tuple[int | None, dict[int, Header]] = None, {}
        """The last version that was sent ahead, and the headers that came with it, by shard."""

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

        Returns when the first receiver has all but the last bucket, and that has come for it, so that the version can
        be sealed; the others go on. The last bucket is put into its place together with the digests. A receiver
        that fails is sent the version again when its `receive` is called. Raises an error of sender_errors.py if a rank
        dies, fails or is late.
        """
        ends = [end for end in receivers if isinstance(end, ShardedRolloutEndpoint)]
        if not ends:
            return
        draft = Draft(self._stream, version, self._layout, None, None)
        payload = await self.payload(version)
        self._ahead = version, payload.headers
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
        """Returns the version's header. A rank whose last bucket was sent ahead has sealed it; others are asked to."""
        ahead, came = self._ahead
        if ahead == version and len(came) == len(self._ranks):
            return ShardedHeader.of(self._layout, [came[shard] for shard in range(len(self._ranks))])
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
    ranks: Sequence[Worker],
    config: Config,
    on_sealed: Callable[[Header], None],
    kind: type[E] = ShardedTrainerEndpoint,  # type: ignore[assignment]
) -> E:
    """Returns all ranks as the sender of a stream. Raises SenderLate or SenderFailed."""
    rank, method, seconds = ranks[0], "sender.whole_layout", config.deadlines.publish
    with failures_of_ranks():
        async with answers_of([rank.name], method, seconds):
            layout: Layout = await rank.call(method)
    return kind(ranks, layout, config.checkpoint_engine.bucket_bytes, on_sealed, seconds=seconds)


@dataclass(frozen=True)
class _Last:
    """The last bucket of a version, whose other buckets the worker has put in their place."""

    ref: Any
    payload: ShardedPayload
    """Where it came from."""
    allowed: Allowance
    """What is left of the worker's time for this version."""


@dataclass(frozen=True)
class _Ahead:
    """A version whose bytes came, or are coming, before its header."""

    draft: Draft
    task: "asyncio.Task[_Last]"

    def is_of(self, header: Header) -> bool:
        return (self.draft.stream, self.draft.version) == (header.stream, header.version)


class ShardedRolloutEndpoint(RolloutEndpoint):
    """One rollout worker as a receiver of shares: it asks for the buckets of all shards in turn.

    It takes one version at a time, also of two streams, whose deliveries know nothing of each other. One call of the
    worker brings one bucket; the first one also begins the version, and the last one has its digests and finishes it.
    """

    def __init__(self, worker: Worker, observer: Observer, transport: str) -> None:
        super().__init__(worker, observer, transport)
        self._receiving = asyncio.Lock()
        self._ahead: _Ahead | None = None

    def take_ahead(self, draft: Draft, payload: ShardedPayload) -> "asyncio.Task[_Last]":
        """Begins to take a version before it is sealed; `receive` goes on from there. The task raises as `receive`."""
        task = asyncio.create_task(self._take_ahead(draft, payload), name=f"ahead-{self.name}-{draft.version}")
        self._ahead = _Ahead(draft, task)
        return task

    async def _take_ahead(self, draft: Draft, payload: ShardedPayload) -> _Last:
        async with self._receiving:
            return await self._take(draft, payload, RING)

    async def _received(self, header: Header, payload: Any, slot: str) -> Ack:
        assert isinstance(header, ShardedHeader)
        assert isinstance(payload, ShardedPayload)
        ahead = await self._came_ahead(header, slot)
        async with self._receiving:
            if ahead is not None and self._ahead is ahead:  # another version may have taken its place meanwhile
                last = ahead.task.result()
            else:
                if self._ahead is not None and self._ahead.task.done():
                    self._ahead = None  # its bytes are given up; one that waits for its turn comes afterwards
                last = await self._take(header, payload, slot)
            if self._ahead is not None and self._ahead.is_of(header):
                self._ahead = None
            return await self._finish(header, slot, last)

    async def _came_ahead(self, header: Header, slot: str) -> _Ahead | None:
        """Waits for the version's bytes where they come ahead; returns None where they do not, or not all."""
        ahead = self._ahead
        if ahead is None or slot != RING or not ahead.is_of(header):
            return None
        try:
            await asyncio.wait([ahead.task])
        except asyncio.CancelledError:
            ahead.task.cancel()
            raise
        error = None if ahead.task.cancelled() else ahead.task.exception()
        if isinstance(error, SenderFailed | SenderLate) and "VersionGone" not in error_names(error):
            logger.error("%s asks for version %d again, which did not come ahead: %s", self.name, header.version, error)
        return None if ahead.task.cancelled() or error is not None else ahead

    async def _take(self, draft: Draft, payload: ShardedPayload, slot: str) -> _Last:
        """Has the worker put all buckets but the last in their place; returns the last.

        While a bucket is put in its place, the next ones are fetched. Raises DeadlineExceeded if the worker's own calls
        take longer than `payload.seconds` together, and the errors of `ShardedPayload.bucket`.
        """
        allowed = Allowance(f"publish: version {draft.version} to {self.name}", payload.seconds)
        coming = payload.buckets(draft.layout)
        ahead = max(1, min(len(payload.ranks), MAX_BUCKETS_AHEAD))
        ref = None
        for place, (shard, start) in enumerate(coming):
            ref = await payload.bucket(shard, start)
            for following in coming[place + 1 : place + 1 + ahead]:
                payload.fetch(*following)
            if place < len(coming) - 1:
                begins = Beginning(draft, len(payload.ranks), slot) if place == 0 else None
                await self._put(Piece(draft.version, shard, start, begins), ref, payload, allowed)
        return _Last(ref, payload, allowed)

    async def _finish(self, header: ShardedHeader, slot: str, last: _Last) -> Ack:
        """Has the worker put the last bucket in its place, and verify and retain the version. Raises as `_take`."""
        coming = last.payload.buckets(header.layout)
        begins = Beginning(header, len(last.payload.ranks), slot) if len(coming) == 1 else None
        piece = Piece(header.version, *coming[-1], begins, header)
        ack: Ack = await self._put(piece, last.ref, last.payload, last.allowed)
        return ack

    async def _put(self, piece: Piece, ref: Any, payload: ShardedPayload, allowed: Allowance) -> Any:
        try:
            return await allowed.spend(self._deliver("shards.receive", piece, ref))
        except RefLost:
            payload.forget(piece.shard, piece.start)
            raise
