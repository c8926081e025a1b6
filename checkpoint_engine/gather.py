"""Gather brings a version, of which each of several ranks has some rows, to the first rank, in one order on all ranks.

The bytes go through host memory, by gloo on a process group that nothing else uses: no device needs room for them, and
beside the collectives of a training step there is no second communicator of NCCL, which could wait for the first in a
circle.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint_engine.base import Header
from checkpoint_engine.digest import ByteArray
from checkpoint_engine.errors import TransferFailed
from checkpoint_engine.incremental import Sealing
from checkpoint_engine.layout import ALIGNMENT_BYTES, Entry, Layout, blocks, check_sample, padded, sample
from checkpoint_engine.publisher import SealedVersions
from checkpoint_engine.side_stream import SideStream, on, recorded

UNDER_WAY = 2  # Number of buckets under way: one is put into its place while the next one comes.


def shard_rows(rows: int, shards: int, index: int) -> range:
    """Returns the rows (perhaps none) of a tensor that rank `index` has, cut like torch.chunk and FSDP2."""
    size = -(-rows // shards)
    return range(min(index * size, rows), min((index + 1) * size, rows))


def shard_layout(layout: Layout, shards: int, index: int, alignment: int = ALIGNMENT_BYTES) -> Layout:
    """Returns the layout of one rank's share: the same names, and of each tensor this rank's rows."""
    entries, offset = [], 0
    for entry in layout.entries:
        rows = len(shard_rows(entry.shape[0], shards, index))
        nbytes = rows * entry.nbytes // max(1, entry.shape[0])
        entries.append(Entry(entry.name, (rows, *entry.shape[1:]), entry.dtype, offset, nbytes))
        offset = padded(offset + nbytes, alignment)
    return Layout(tuple(entries), offset)


@dataclass(frozen=True)
class Share:
    """One rank's rows of a version. They must not change until the version is gathered."""

    flat: Tensor  # The rows uint8 [nbytes] on any device, in the layout of the share.
    sample: Tensor  # Some elements of them, copied when the version was made (`sample`).
    ready: Any = None  # CUDA event after which both are complete; None in host memory.


class Gather:
    """The gathers of one rank. Every rank must make the same ones in the same order, one at a time."""

    def __init__(
        self, layout: Layout, group: dist.ProcessGroup, *, bucket_bytes: int, alignment: int = ALIGNMENT_BYTES
    ) -> None:
        """`layout` is that of whole tensors; those of a share begin at multiples of `alignment` bytes, in buckets."""
        self.layout, self.rank, self._group = layout, group.rank(), group
        self._shares = [shard_layout(layout, group.size(), rank, alignment) for rank in range(group.size())]
        self._buckets = _buckets(layout, bucket_bytes)
        ends = [(bucket[0], bucket[-1]) for bucket in self._buckets]
        # By bucket and rank: first byte of the bucket in the rank's share, and the one behind it.
        self._spans = [[(share.entries[a].offset, share.entries[z].end) for share in self._shares] for a, z in ends]
        self.count = 0

    def share(self, flat: Tensor) -> Share:
        """Returns this rank's share of a version, the vector [n] in the dtype that is sent; it takes the sample."""
        layout, rows = self._shares[self.rank], flat.view(torch.uint8)
        return Share(rows, sample(layout, list(layout.views(rows).values())), recorded(flat.device))

    def send(self, share: Share) -> None:
        """Sends this rank's rows to the first rank. Raises TransferFailed."""
        pieces, under_way = self._local_rows(share), deque[Any]()
        for number in range(len(self._buckets) + 1):
            if len(under_way) == UNDER_WAY:
                _settle(under_way.popleft())
            under_way.append(self.start("send", next(pieces), 0, number))
        while under_way:
            _settle(under_way.popleft())
        self.count += 1

    def take(self, share: Share, work: Sealing, whole: Sequence[Tensor]) -> None:
        """Puts the rows of all ranks into the bytes of `work` and digests them there; for the first rank.

        `whole` are the tensors in these bytes, in layout order. Raises TransferFailed, and WeightsMismatch if the rows
        of a rank are not those of which it has taken its sample.
        """
        local, rooms = self._local_rows(share), self._rooms
        coming = self._coming(0, rooms[0])
        for number, bucket in enumerate(self._buckets):
            came, coming = coming, self._coming(number + 1, rooms[(number + 1) % UNDER_WAY])
            pieces = [next(local)]
            for receipt, piece in came:
                _settle(receipt)
                pieces.append(piece)
            self.place(bucket, number, [piece.numpy() for piece in pieces], work)
        own = next(local).view(share.sample.dtype)
        for rank, layout in enumerate(self._shares):
            rows = [shard_rows(len(tensor), len(self._shares), rank) for tensor in whole]
            views = [tensor[part.start : part.stop] for tensor, part in zip(whole, rows, strict=True)]
            expected = torch.empty_like(sample(layout, views)) if rank else own
            if rank:
                _settle(self.start("recv", expected.view(torch.uint8), rank, len(self._buckets)))
            check_sample(layout, f"{work.draft.title}, of rank {rank}", expected, views)
        self.count += 1

    def _coming(self, number: int, room: Tensor) -> list[tuple[Any, Tensor]]:
        """Begins to receive a bucket from the other ranks, if there is one; returns receipt and memory of each rank."""
        coming, start = [], 0
        spans = self._spans[number][1:] if number < len(self._buckets) else []
        for rank, (begin, end) in enumerate(spans, start=1):
            piece = room[start : start + end - begin]
            coming.append((self.start("recv", piece, rank, number), piece))
            start += end - begin
        return coming

    @cached_property
    def _rooms(self) -> list[Tensor]:
        most = max(sum(end - begin for begin, end in spans[1:]) for spans in self._spans)
        return [torch.empty(most, dtype=torch.uint8) for _ in range(UNDER_WAY)]

    def place(self, bucket: range, number: int, pieces: Sequence[ByteArray], work: Sealing) -> None:
        for index in bucket:
            end = self.layout.entries[index].offset
            for share, (begin, _), piece in zip(self._shares, self._spans[number], pieces, strict=True):
                entry = share.entries[index]
                for block in blocks(piece[entry.offset - begin : entry.end - begin]):
                    start, end = end, end + block.shape[0]
                    work.data[start:end] = block
                    work.feed(end)

    def _local_rows(self, share: Share) -> Iterator[Tensor]:
        """Yields this rank's rows of each bucket in host memory, then the bytes of its sample.

        From a GPU, rows are valid until the next but one.
        """
        spans, side = [spans[self.rank] for spans in self._spans], SideStream.of(share.flat.device)
        if side is None:
            yield from (share.flat[begin:end] for begin, end in spans)
            yield share.sample.view(torch.uint8)
            return
        side.wait(share.ready)
        most = max(end - begin for begin, end in spans)
        pinned = [torch.empty(most, dtype=torch.uint8, pin_memory=True) for _ in range(UNDER_WAY)]
        for number, (begin, end) in enumerate(spans):
            piece = pinned[number % UNDER_WAY][: end - begin]
            with on(side):
                piece.copy_(share.flat[begin:end], non_blocking=True)
                side.synchronize()
            yield piece
        with on(side):
            picked = share.sample.cpu()
        yield picked.view(torch.uint8)

    def start(self, what: str, piece: Tensor, peer: int, number: int) -> Any:
        # Starts to send to a rank, or to receive from it; returns what `_settle` waits for, None for no bytes. What is
        # left over of a gather that failed has another tag, so that it is never taken for a later one.
        tag = self.count * (len(self._buckets) + 1) + number
        return getattr(self._group, what)([piece], peer, tag) if len(piece) else None


class GatheredVersions(SealedVersions):
    """The versions of a stream of which each rank has some rows; the first rank retains the newest one whole."""

    def __init__(self, gather: Gather, stream: str) -> None:
        super().__init__(gather.layout, stream, retain=1)
        self._gather = gather

    def gather(self, version: int, share: Share) -> Header | None:
        """Gathers, digests and retains a version; returns its header on the first rank. Raises as `Gather.take`."""
        return self._gathered(version, share, self._end)[0]

    def recall(self, version: int, share: Share) -> tuple[Header | None, ByteArray | None]:
        """Gathers a version once more; returns header and bytes uint8 [nbytes] on the first rank, else (None, None)."""
        return self._gathered(version, share, None)

    def _gathered(
        self, version: int, share: Share, done: Callable[[Sealing, Header | None], None] | None
    ) -> tuple[Header | None, ByteArray | None]:
        if self._gather.rank:
            self._gather.send(share)
            return None, None
        buffer = self._buffers.take()
        work = Sealing(self.draft(version), buffer.data, done)
        self._gather.take(share, work, buffer.views)
        return work.finish(), work.data


def _buckets(layout: Layout, nbytes: int) -> list[range]:
    buckets, first = list[range](), 0
    for index, entry in enumerate(layout.entries):
        if index > first and entry.end - layout.entries[first].offset > nbytes:
            buckets.append(range(first, index))
            first = index
    return [*buckets, range(first, len(layout.entries))]


def _settle(receipt: Any) -> None:
    try:
        if receipt is not None:
            receipt.wait()
    except RuntimeError as error:
        raise TransferFailed(f"a gather failed: {str(error).splitlines()[0][:300]}") from error
