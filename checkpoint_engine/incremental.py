"""Digests taken beside a transfer: of a version that leaves, and of one that arrives."""

from collections.abc import Callable

import torch
from torch import Tensor

from checkpoint_engine.base import Ack, Draft, Header
from checkpoint_engine.digest import DIGEST_BYTES, ByteArray
from checkpoint_engine.errors import TransferCorrupted
from checkpoint_engine.layout import BLOCK_BYTES, Layout, RunningDigests, blocks
from checkpoint_engine.side_stream import HostCopy, PinnedBlocks, SideStream

TOTAL_DIGEST_BYTES = 32


class Sealing:
    """A version that one thread is digesting: beside a transfer, piece by piece, or at once.

    Whoever begins one must call `finish`, whatever happens, when nothing reads any more where it was staged: others
    that want the version wait for it. `copy` is where the bytes come from while they are on their way from a GPU,
    `proven` is called when they are there and may raise. `done` is told of the end, once.
    """

    def __init__(
        self,
        draft: Draft,
        data: ByteArray,
        done: Callable[["Sealing", Header | None], None] | None,
        *,
        copy: HostCopy | None = None,
        proven: Callable[[], None] | None = None,
    ) -> None:
        self.draft, self.data = draft, data
        self._digests, self._done, self._copy, self._proven = RunningDigests(draft.layout), done, copy, proven
        self._error: BaseException | None = None
        self.header: Header | None = None

    def on(self, device: torch.device) -> Tensor:
        """The version's bytes uint8 [nbytes] on a device: where they are staged, or a copy.

        In host memory only those that `feed` has seen have come.
        """
        if self._copy is not None and self._copy.source.device == device:
            return self._copy.source
        return torch.from_numpy(self.data).to(device)

    def feed(self, end: int) -> None:
        """Digests the bytes up to `end`; waits for those that are still on their way from a GPU."""
        if self.header is None and end > self._digests.end:
            if self._copy is not None:
                self._copy.wait(end)
            self._digests.feed(self.data[self._digests.end : end])

    def digested(self) -> Header:
        """Digests what is left. Raises what `proven` raises, every time."""
        if self._error is not None:
            raise self._error
        if self.header is None:
            try:
                self.header = self._sealed()
            except BaseException as error:
                self._error = error
                raise
        return self.header

    def finish(self) -> Header:
        """`digested`; from here on the version is retained, and what it was staged in is free."""
        try:
            return self.digested()
        finally:
            done, self._done = self._done, None
            if done is not None:
                done(self, self.header)

    def _sealed(self) -> Header:
        total = self.data.shape[0]
        while self._digests.end < total:
            self.feed(min(self._digests.end + BLOCK_BYTES, total))
        if self._proven is not None:
            self._proven()
        return self.draft.sealed(self._digests.finish())


class Intake:
    """A version on its way into a receiver's slot; what is digested is what lies there, or in pinned memory before it.

    A transport that writes into `storage` itself may do so after it was aborted: such a slot is used again only if
    the version in it was accepted. On a GPU everything that is done to the slot is done on the stream `side`.
    """

    def __init__(
        self,
        draft: Draft,
        storage: Tensor,
        slot: str,
        accept: Callable[[Header, "Intake"], Ack],
        *,
        side: SideStream | None = None,
    ) -> None:
        self.draft, self.storage, self.slot, self.retained, self.side = draft, storage, slot, False, side
        self.digests = RunningDigests(draft.layout)
        self._accept = accept
        self._blocks = None if side is None else PinnedBlocks(side)

    def take(self, data: ByteArray) -> None:
        """Copies and digests the host bytes [n] that follow those taken before."""
        for block in blocks(data):
            start = self.digests.end
            target = self.storage[start : start + block.shape[0]]
            if self._blocks is None:
                target.numpy()[:] = block
                self.digests.feed(target.numpy())
            else:
                self.digests.feed(self._blocks.upload(block, target))

    def arrived(self, end: int) -> None:
        """Digests what a transport has put into `storage`, up to byte `end`."""
        new = self.storage[self.digests.end : end]
        for block in [new.numpy()] if self._blocks is None else self._blocks.download(new):
            self.digests.feed(block)

    def accept(self, header: Header) -> Ack:
        """Retains the version if it is what the header says. Raises TransferCorrupted or WeightsMismatch."""
        if self._blocks is not None:
            self._blocks.settle()
        ack = self._accept(header, self)
        self.retained = True
        return ack

    def accept_with(self, trailer: ByteArray) -> Ack:
        """`accept` where the digests follow the bytes (see `trailer`)."""
        data, count = trailer.tobytes(), len(self.draft.layout.entries)
        header = self.draft.sealed(tuple(data[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES] for i in range(count)))
        if header.digest != data[count * DIGEST_BYTES :].hex():
            raise TransferCorrupted(
                f"version {header.version} of stream {header.stream} arrived with a damaged trailer"
            )
        return self.accept(header)


def trailer(header: Header) -> bytes:
    """The bytes behind a version that is sealed while it leaves: its digests, then the digest of the whole."""
    return b"".join(header.digests) + bytes.fromhex(header.digest)


def trailer_bytes(layout: Layout) -> int:
    """The trailer's length."""
    return len(layout.entries) * DIGEST_BYTES + TOTAL_DIGEST_BYTES
