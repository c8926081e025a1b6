"""Versions whose tensors lie in shares (shards) on several senders, none of which has a whole tensor.

Shard i of n has the rows i of each tensor, cut like torch.chunk(n) along the first dimension (as FSDP2 does). Each
sender is a `Publisher` of its own share, with a digest of its rows of every tensor. The digest of a whole tensor is
that of its shares' digests, so nobody needs all of its bytes. A receiver puts the shares' bytes, which come in pieces,
where they belong in the whole layout; it retains the version only if every row of every tensor has its digest there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from checkpoint_engine.base import RING, Ack, Draft, Header
from checkpoint_engine.digest import ByteArray, digest_span
from checkpoint_engine.errors import TransferCorrupted
from checkpoint_engine.layout import Entry, Layout, padded, row_bytes
from checkpoint_engine.receiver import Receiver


def shard_rows(rows: int, shards: int, index: int) -> range:
    """Returns the rows of a tensor's first dimension that shard `index` has; some shards may have none."""
    size = -(-rows // shards)
    return range(min(index * size, rows), min((index + 1) * size, rows))


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
    found = []
    for index in range(shards):
        own = shard_layout(layout, shards, index)
        pairs = zip(own.entries, _places(layout, shards, index), strict=True)
        found.append(tuple(digest_span(buffer[start : start + e.nbytes].cpu().numpy(), e.offset) for e, start in pairs))
    return tuple(found)


class ShardReceiver:
    """Takes versions in shares for a `Receiver`: `begin`, `take` for every piece of every shard, `finish`.

    All calls come from one thread. A version that was begun and not finished is forgotten when the next one begins, and
    was never visible to the receiver.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._under_way: _UnderWay | None = None

    def begin(self, header: ShardedHeader, slot: str = RING) -> None:
        """Begins a version, in place of one that was not finished. Raises as `Receiver.receive`."""
        self._abandon()
        self._receiver.check(header, slot)
        if not header.is_consistent():
            raise TransferCorrupted(f"version {header.version} of stream {header.stream} arrived with a damaged header")
        self._under_way = _UnderWay(header, slot, self._receiver.expect(header, slot).storage)

    def take(self, version: int, shard: int, start: int, data: ByteArray) -> None:
        """Puts bytes uint8 [n] of a shard, from its byte `start` on, in their place.

        Raises TransferCorrupted for a version that was not begun, and for bytes that do not follow those before.
        """
        self._of(version).take(shard, start, data)

    def finish(self, version: int) -> Ack:
        """Retains the version if all its bytes have come and have the digests of its header.

        Raises TransferCorrupted, which names the tensor, or WeightsMismatch; the retained versions are then unchanged.
        """
        work = self._of(version)
        work.check()
        self._receiver.retain(work.header, work.storage, work.slot)
        self._under_way = None
        return Ack(work.header.stream, version, work.header.digest, work.slot)

    def _of(self, version: int) -> "_UnderWay":
        if self._under_way is None or self._under_way.header.version != version:
            raise TransferCorrupted(f"a piece of version {version} arrived, which was not begun here")
        return self._under_way

    def _abandon(self) -> None:
        if self._under_way is not None:
            self._receiver.give_back(self._under_way.storage)
            self._under_way = None


class _UnderWay:
    """A version of which some bytes have come."""

    def __init__(self, header: ShardedHeader, slot: str, storage: Tensor) -> None:
        self.header, self.slot, self.storage = header, slot, storage
        self._shards = len(header.shares)
        self._layouts = [shard_layout(header.layout, self._shards, index) for index in range(self._shards)]
        self._starts = [list(_places(header.layout, self._shards, index)) for index in range(self._shards)]
        self._ends = [0] * self._shards

    def take(self, shard: int, start: int, data: ByteArray) -> None:
        title = f"version {self.header.version} of stream {self.header.stream}"
        end = start + data.shape[0]
        if not 0 <= shard < self._shards or start != self._ends[shard] or end > self._layouts[shard].nbytes:
            raise TransferCorrupted(f"{title}: bytes {start} to {end} of shard {shard} do not follow what came before")
        for entry, place in zip(self._layouts[shard].entries, self._starts[shard], strict=True):
            low, high = max(start, entry.offset), min(end, entry.end)
            if low < high:
                piece = torch.from_numpy(data[low - start : high - start])
                self.storage[place + low - entry.offset : place + high - entry.offset].copy_(piece)
        self._ends[shard] = end

    def check(self) -> None:
        """Raises TransferCorrupted unless all bytes have come, and each row has its digest where it now lies."""
        header, title = self.header, f"version {self.header.version} of stream {self.header.stream}"
        for shard, (end, layout) in enumerate(zip(self._ends, self._layouts, strict=True)):
            if end != layout.nbytes:
                raise TransferCorrupted(f"{title} ended at byte {end} of {layout.nbytes} of shard {shard}")
        found = share_digests(header.layout, self._shards, self.storage)
        for shard, (arrived, expected) in enumerate(zip(found, header.shares, strict=True)):
            for entry, ours, theirs in zip(header.layout.entries, arrived, expected, strict=True):
                if ours != theirs:
                    raise TransferCorrupted(f"{title} arrived with wrong bytes in {entry.name}, in shard {shard} of it")


def _places(layout: Layout, shards: int, index: int) -> Iterator[int]:
    """Yields for each tensor the byte of the whole layout at which this shard's rows begin."""
    for entry in layout.entries:
        yield entry.offset + shard_rows(entry.shape[0], shards, index).start * row_bytes(entry)


def _joined(of_tensor: tuple[bytes, ...]) -> bytes:
    return xxhash.xxh3_128_digest(b"".join(of_tensor))
