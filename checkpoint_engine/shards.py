"""Versions whose tensors lie in shares (shards) on several senders, none of which has a whole tensor.

Shard i of n has the rows i of each tensor, cut like torch.chunk(n) along the first dimension (as FSDP2 does). Each
sender is a `Publisher` of its own share, with a digest of its rows of every tensor. The digest of a whole tensor is
that of its shares' digests, so nobody needs all of its bytes. A receiver puts the shares' bytes, which come in pieces,
where they belong in the whole layout, and digests them there, or on their way to a GPU; it retains the version only if
every row of every tensor has its digest.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import xxhash
from torch import Tensor

from checkpoint_engine.base import RING, Ack, Draft, Header
from checkpoint_engine.digest import ByteArray, digest_span
from checkpoint_engine.errors import TransferCorrupted
from checkpoint_engine.layout import BLOCK_BYTES, Entry, Layout, RunningDigests, padded, row_bytes
from checkpoint_engine.receiver import Receiver
from checkpoint_engine.side_stream import PINNED_BLOCK_BYTES, on

MAX_CACHED_SHARES = 256
"""Largest number of shares of which the layout is remembered: it is the same for every version."""
MAX_CACHED_BUCKETS = 1024
"""Largest number of buckets of which it is remembered what lies in them and where it belongs."""


def shard_rows(rows: int, shards: int, index: int) -> range:
    """Returns the rows of a tensor's first dimension that shard `index` has; some shards may have none."""
    size = -(-rows // shards)
    return range(min(index * size, rows), min((index + 1) * size, rows))


@lru_cache(MAX_CACHED_SHARES)
def shard_layout(layout: Layout, shards: int, index: int) -> Layout:
    """Returns the layout of one share of a layout: the same names, and of each tensor this shard's rows."""
    entries, offset = [], 0
    for entry in layout.entries:
        rows = len(shard_rows(entry.shape[0], shards, index))
        nbytes = rows * row_bytes(entry)
        entries.append(Entry(entry.name, (rows, *entry.shape[1:]), entry.dtype, offset, nbytes))
        offset = padded(offset + nbytes)
    return Layout(tuple(entries), offset)


@dataclass(frozen=True)
class ShardedHeader(Header):
    """Header of a version in shares; `layout` is the whole one, `digests` are those of whole tensors."""

    shares: tuple[tuple[bytes, ...], ...]
    """By shard: 16 bytes per tensor, in layout order, over its rows of it."""

    @classmethod
    def of(cls, layout: Layout, headers: Sequence[Header]) -> "ShardedHeader":
        """Returns the header of a version from those of its shares, in shard order.

        Raises ValueError if they are of several versions, or of shares of another layout.
        """
        first, shards = headers[0], len(headers)
        for index, header in enumerate(headers):
            if (header.stream, header.version) != (first.stream, first.version):
                raise ValueError(f"{header.stream} {header.version} is no share of {first.stream} {first.version}")
            if difference := shard_layout(layout, shards, index).difference(header.layout):
                raise ValueError(f"shard {index} of {shards} of {header.stream} {header.version}: {difference}")
        return cls.sealed_from(
            Draft(first.stream, first.version, layout, first.alpha, first.rank), tuple(h.digests for h in headers)
        )

    @classmethod
    def sealed_from(cls, draft: Draft, shares: tuple[tuple[bytes, ...], ...]) -> "ShardedHeader":
        """Returns the header of a version whose shares have these digests."""
        sealed = draft.sealed(tuple(_joined(of_tensor) for of_tensor in zip(*shares, strict=True)))
        parts = (sealed.stream, sealed.version, sealed.layout, sealed.alpha, sealed.rank, sealed.digests, sealed.digest)
        return cls(*parts, shares)

    def digest_of(self, buffer: Tensor) -> str:
        draft = Draft(self.stream, self.version, self.layout, self.alpha, self.rank)
        return self.sealed_from(draft, share_digests(self.layout, len(self.shares), buffer)).digest

    def is_consistent(self) -> bool:
        """Returns True if `digest` and `digests` match the other fields."""
        joined = tuple(_joined(of_tensor) for of_tensor in zip(*self.shares, strict=True))
        return super().is_consistent() and self.digests == joined


def share_digests(layout: Layout, shards: int, buffer: Tensor) -> tuple[tuple[bytes, ...], ...]:
    """Returns `ShardedHeader.shares` of a buffer uint8 [nbytes] with the whole layout, on any device."""
    by_shard = []
    for index in range(shards):
        own = shard_layout(layout, shards, index)
        pairs = zip(own.entries, _places(layout, shards, index), strict=True)
        spans = ((buffer[start : start + entry.nbytes], entry.offset) for entry, start in pairs)
        by_shard.append(tuple(digest_span(span.cpu().numpy(), offset) for span, offset in spans))
    return tuple(by_shard)


@dataclass(frozen=True)
class Beginning:
    """Arguments of `ShardReceiver.begin`."""

    draft: Draft
    shards: int
    slot: str = RING


@dataclass(frozen=True)
class Piece:
    """Place of some bytes of a version; the first piece that is sent begins the version, the last one finishes it."""

    version: int
    shard: int
    start: int
    """First byte, in the shard."""
    begins: Beginning | None = None
    ends: ShardedHeader | None = None


class ShardReceiver:
    """Takes versions in shares for a `Receiver`: `begin`, `take` for every piece of every shard, `finish`.

    The digests may come last, so that the bytes can be sent while their senders still digest them. All calls come from
    one thread. A version that was begun and not finished is forgotten when the next one begins, and was never visible
    to the receiver. `receive` does all of it by one call for each piece.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._under_way: _UnderWay | None = None

    def receive(self, piece: Piece, data: ByteArray) -> Ack | None:
        """Begins the version with its first piece, takes the bytes uint8 [n], and finishes it with its last piece.

        Returns the acknowledgement for the last one, else None. Raises as `begin`, `take` and `finish`.
        """
        if piece.begins is not None:
            self.begin(piece.begins.draft, piece.begins.shards, piece.begins.slot)
        self.take(piece.version, piece.shard, piece.start, data)
        return None if piece.ends is None else self.finish(piece.ends)

    def begin(self, draft: Draft, shards: int, slot: str = RING) -> None:
        """Begins a version of `shards` shares, in place of one that was not finished. Raises as `Receiver.expect`.

        Of a header, only what is known before its digests is used.
        """
        self._abandon()
        storage = self._receiver.expect(draft, slot).storage
        # The receiver's own layout, which is equal: what is remembered by layout is then found without comparing them.
        draft = Draft(draft.stream, draft.version, self._receiver.layout, draft.alpha, draft.rank)
        self._under_way = _UnderWay(draft, shards, slot, storage)

    def take(self, version: int, shard: int, start: int, data: ByteArray) -> None:
        """Puts bytes uint8 [n] of a shard, from its byte `start` on, in their place, and digests them there.

        Raises TransferCorrupted for a version that was not begun, and for bytes that do not follow those before.
        """
        work = self._of(version)
        with on(self._receiver.side):
            work.take(shard, start, data)

    def finish(self, header: ShardedHeader) -> Ack:
        """Retains the version if all its bytes have come and have the digests of its header.

        Raises TransferCorrupted, which names the tensor, or WeightsMismatch; the retained versions are then unchanged.
        """
        work = self._of(header.version)
        self._receiver.check(header, work.slot)
        if self._receiver.side is not None:
            self._receiver.side.synchronize()
        work.check(header)
        self._receiver.retain(header, work.storage, work.slot)
        self._under_way = None
        return Ack(header.stream, header.version, header.digest, work.slot)

    def _of(self, version: int) -> "_UnderWay":
        if self._under_way is None or self._under_way.draft.version != version:
            raise TransferCorrupted(f"a piece of version {version} arrived, which was not begun here")
        return self._under_way

    def _abandon(self) -> None:
        if self._under_way is not None:
            self._receiver.give_back(self._under_way.storage)
            self._under_way = None


class _UnderWay:
    """A version of which some bytes have come."""

    def __init__(self, draft: Draft, shards: int, slot: str, storage: Tensor) -> None:
        self.draft, self.slot, self.storage = draft, slot, storage
        self._on_host: ByteArray | None = storage.numpy() if storage.device.type == "cpu" else None
        """The storage as an array; None on a GPU."""
        self._block_bytes = PINNED_BLOCK_BYTES if self._on_host is None else BLOCK_BYTES
        self._title = f"version {draft.version} of stream {draft.stream}"
        self._layouts = [shard_layout(draft.layout, shards, index) for index in range(shards)]
        self._places = [_places(draft.layout, shards, index) for index in range(shards)]
        self._digests = [RunningDigests(layout) for layout in self._layouts]

    def take(self, shard: int, start: int, data: ByteArray) -> None:
        end = start + data.shape[0]
        follows = 0 <= shard < len(self._layouts) and start == self._digests[shard].end
        if not follows or end > self._layouts[shard].nbytes:
            raise TransferCorrupted(
                f"{self._title}: bytes {start} to {end} of shard {shard} do not follow what came before"
            )
        self._put(shard, start, data)

    def _put(self, shard: int, start: int, data: ByteArray) -> None:
        """Puts the bytes that follow, from byte `start` of the shard on, in their places and digests them.

        On a host, what is digested is what lies there then. Padding is neither copied nor digested.
        """
        digests, end = self._digests[shard], start + data.shape[0]
        for source, place, size in _spans(self._layouts[shard], self._places[shard], start, end, self._block_bytes):
            digests.skip_to(start + source)
            digests.feed(self._copied(data[source : source + size], place))
        digests.skip_to(end)

    def _copied(self, block: ByteArray, place: int) -> ByteArray:
        """Copies bytes to `place` in the whole layout; returns what is to be digested of them.

        numpy's copy is that of the C library, which takes half the time of torch's for blocks of this size.
        """
        end = place + block.shape[0]
        if self._on_host is None:
            self.storage[place:end].copy_(torch.from_numpy(block))
            return block
        copied = self._on_host[place:end]
        copied[:] = block
        return copied

    def check(self, header: ShardedHeader) -> None:
        """Raises TransferCorrupted unless all bytes have come, and each row has its digest."""
        if self.draft.stream != header.stream:
            raise TransferCorrupted(f"{self._title} ends as one of stream {header.stream}")
        if not header.is_consistent() or len(header.shares) != len(self._layouts):
            raise TransferCorrupted(f"{self._title} arrived with a damaged header")
        for shard, (digests, layout) in enumerate(zip(self._digests, self._layouts, strict=True)):
            digests.feed(np.empty(0, np.uint8))  # of a share without rows, into which nothing was put
            if digests.end != layout.nbytes:
                raise TransferCorrupted(
                    f"{self._title} ended at byte {digests.end} of {layout.nbytes} of shard {shard}"
                )
        for shard, (digests, expected) in enumerate(zip(self._digests, header.shares, strict=True)):
            for entry, ours, theirs in zip(self.draft.layout.entries, digests.finish(), expected, strict=True):
                if ours != theirs:
                    raise TransferCorrupted(
                        f"{self._title} arrived with wrong bytes in {entry.name}, in shard {shard} of it"
                    )


def _end(entry: Entry) -> int:
    return entry.end


@lru_cache(MAX_CACHED_SHARES)
def _places(layout: Layout, shards: int, index: int) -> tuple[int, ...]:
    """Returns for each tensor the byte of the whole layout at which this shard's rows begin."""
    return tuple(
        entry.offset + shard_rows(entry.shape[0], shards, index).start * row_bytes(entry) for entry in layout.entries
    )


@lru_cache(MAX_CACHED_BUCKETS)
def _spans(
    share: Layout, places: tuple[int, ...], start: int, end: int, block_bytes: int
) -> tuple[tuple[int, int, int], ...]:
    """Returns what lies in the bytes `start` to `end` of a share, in blocks of at most `block_bytes` of one tensor.

    By block: its first byte, counted from `start`; its place in the whole layout; and its size. Padding is left out.
    """
    spans: list[tuple[int, int, int]] = []
    first = bisect_right(share.entries, start, key=_end)
    for entry, place in zip(share.entries[first:], places[first:], strict=True):
        if entry.offset >= end:
            break
        last = min(end, entry.end)
        lows = range(max(start, entry.offset), last, block_bytes)
        spans += [(low - start, place + low - entry.offset, min(block_bytes, last - low)) for low in lows]
    return tuple(spans)


def _joined(of_tensor: tuple[bytes, ...]) -> bytes:
    return xxhash.xxh3_128_digest(b"".join(of_tensor))
