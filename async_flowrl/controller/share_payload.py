"""The bytes of a version that lies in shares on all trainer ranks, fetched bucket by bucket, and the deadlines of that.

Two deadlines tell who is to blame: each call of the ranks has its own (SenderLate names the ranks that are late), and
the calls of one receiver have one together (Allowance), in which its waits for ranks do not count.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from async_flowrl.controller.endpoints import PUBLISHING
from async_flowrl.controller.sender_errors import SenderFailed, SenderLate, SenderLost, answers_of, failures_of_ranks
from async_flowrl.controller.stored_weights import MAX_KEPT_BUCKETS
from checkpoint_engine import Header, Layout
from checkpoint_engine.errors import error_names
from checkpoint_engine.shards import shard_layout
from separation.group import Worker, WorkerDied
from separation.supervise import DeadlineExceeded, limited

logger = logging.getLogger(__name__)

T = TypeVar("T")
F = TypeVar("F", bound="asyncio.Future[Any]")


@dataclass
class ShardedPayload:
    """The bytes of one version on all ranks, fetched bucket by bucket when receivers ask for them."""

    ranks: Sequence[Worker]
    """By shard."""
    method: str
    """Method of the ranks that returns a bucket: (version, first byte, number of bytes) → (header, bytes).

    The header is that of the rank's share and comes with its last bucket; before that it is None.
    """
    version: int
    bucket_bytes: int
    seconds: float
    """Deadline of each answer of a rank, and of all calls of one receiver together."""
    under_way: "set[asyncio.Future[Any]]" = field(default_factory=set)
    """The sender's set of what it must cancel when it is closed; buckets that are being fetched are put into it."""
    headers: dict[int, Header] = field(default_factory=dict)
    """Shard → header of that share, once its last bucket has come."""
    _buckets: "dict[tuple[int, int], asyncio.Future[Any]]" = field(default_factory=dict)
    _awaited: Counter[tuple[int, int]] = field(default_factory=Counter)
    """How many receivers wait for each bucket now."""
    _failed: set[int] = field(default_factory=set)
    """Shards whose rank has failed, which was raised or logged."""

    async def bucket(self, shard: int, start: int) -> Any:
        """Returns a reference to the bucket of a shard that begins at byte `start` of it.

        Receivers that ask for the same one share it while it is among the newest MAX_KEPT_BUCKETS. Raises SenderLost,
        SenderLate, SenderFailed (VersionGone in it), or RefLost.
        """
        fetched = self.fetch(shard, start)
        self._awaited[shard, start] += 1
        try:
            return await asyncio.shield(fetched)
        except Exception:
            self._buckets.pop((shard, start), None)
            raise
        finally:
            self._awaited[shard, start] -= 1

    def fetch(self, shard: int, start: int) -> "asyncio.Future[Any]":
        """Begins to fetch the bucket, unless it is kept or under way; returns a future of its reference."""
        key = shard, start
        if key not in self._buckets:
            for old in list(self._buckets)[: max(0, len(self._buckets) + 1 - MAX_KEPT_BUCKETS)]:
                del self._buckets[old]
            name = f"bucket-{self.version}-{shard}-{start}"
            self._buckets[key] = kept_in(self.under_way, asyncio.create_task(self._fetch(shard, start), name=name))
            self._buckets[key].add_done_callback(lambda fetched: self._log_unless_raised(key, fetched))
        return self._buckets[key]

    def buckets(self, layout: Layout) -> list[tuple[int, int]]:
        """Returns shard and first byte of all buckets in the order in which they are sent: of all ranks in turn."""
        sizes = [shard_layout(layout, len(self.ranks), shard).nbytes for shard in range(len(self.ranks))]
        starts = range(0, max(sizes), self.bucket_bytes)
        return [(shard, start) for start in starts for shard, size in enumerate(sizes) if start < size]

    def forget(self, shard: int, start: int) -> None:
        """Has the bucket fetched again when it is asked for next: its reference was lost with a node."""
        self._buckets.pop((shard, start), None)

    def let_go(self) -> None:
        """Keeps no bucket any more; one that is asked for later is fetched again."""
        self._buckets.clear()

    def _log_unless_raised(self, key: tuple[int, int], fetched: "asyncio.Future[Any]") -> None:
        """Logs a rank's failure in a bucket that no receiver waits for, once; nobody else would report it.

        Who asks for the bucket later gets the error, too: a rank that the run still needs is blamed then.
        """
        shard, _ = key
        if fetched.cancelled() or shard in self._failed:
            return
        error = fetched.exception()
        if not isinstance(error, SenderLost | SenderFailed | SenderLate):  # A lost reference is fetched again.
            return
        if "VersionGone" in error_names(error):  # newer versions have replaced it
            return
        self._failed.add(shard)
        if not self._awaited[key]:
            logger.error("version %d: a bucket that nobody waits for any more has failed: %s", self.version, error)

    async def _fetch(self, shard: int, start: int) -> Any:
        rank, arguments = self.ranks[shard], (self.version, start, self.bucket_bytes)
        try:
            with failures_of_ranks():
                async with answers_of([rank.name], self.method, self.seconds):
                    header, (ref,) = await rank.call_split(self.method, *arguments, returns=2, lane=PUBLISHING)
        except WorkerDied as error:
            raise SenderLost(error.worker, error.reason) from error
        if header is not None:
            self.headers[shard] = header
        return ref


@dataclass
class Allowance:
    """Seconds that a receiver has for its own calls of one version together; waits for trainer ranks do not count."""

    what: str
    """Names the calls in the error."""
    seconds: float
    spent: float = 0.0

    async def spend(self, call: Awaitable[T]) -> T:
        """Returns the call's result. Raises DeadlineExceeded if this and the earlier calls take too long together."""
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with limited(self.seconds - self.spent, lambda: DeadlineExceeded(self.what, self.seconds)):
                return await call
        finally:
            self.spent += clock() - began


def kept_in(under_way: "set[asyncio.Future[Any]]", started: F) -> F:
    """Keeps a future in the set until it has ended; returns it. Its error counts as seen, even if nobody waits."""
    under_way.add(started)
    started.add_done_callback(under_way.discard)
    started.add_done_callback(_asked)
    return started


def _asked(ended: "asyncio.Future[Any]") -> None:
    """Takes the error of a future that perhaps nobody waits for, so that asyncio does not report it as forgotten."""
    if not ended.cancelled():
        ended.exception()
