"""Digests taken beside a transfer: of a version that leaves, and of one that arrives."""

from collections.abc import Callable

import torch
from torch import Tensor

from checkpoint_engine.base import Ack, Draft, Header
from checkpoint_engine.digest import DIGEST_BYTES, ByteArray
from checkpoint_engine.errors import TransferCorrupted
from checkpoint_engine.layout import Layout, RunningDigests, blocks

TOTAL_DIGEST_BYTES = 32


class Sealing:
    """A version that one thread is digesting: beside a transfer, piece by piece, or at once.

    Whoever begins one must call `finish`, whatever happens: others that want the version wait for it.
    """

    def __init__(self, draft: Draft, data: ByteArray, done: Callable[["Sealing", Header | None], None]) -> None:
        self.draft, self.data = draft, data
        self._digests, self._done = RunningDigests(draft.layout), done
        self.header: Header | None = None

    def feed(self, end: int) -> None:
        """Digests the bytes up to `end`."""
        if self.header is None and end > self._digests.end:
            self._digests.feed(self.data[self._digests.end : end])

    def finish(self) -> Header:
        """Digests what is left; from here on the version is retained."""
        if self.header is None:
            try:
                for block in blocks(self.data[self._digests.end :]):
                    self._digests.feed(block)
                self.header = self.draft.sealed(self._digests.finish())
            finally:
                self._done(self, self.header)
        return self.header


class Intake:
    """A version on its way into a receiver's slot; what is digested is what lies there.

    A transport that writes into `storage` itself may do so after it was aborted: such a slot is used again only if
    the version in it was accepted.
    """

    def __init__(self, draft: Draft, storage: Tensor, slot: str, accept: Callable[[Header, "Intake"], Ack]) -> None:
        self.draft, self.storage, self.slot, self.retained = draft, storage, slot, False
        self.digests = RunningDigests(draft.layout)
        self._accept = accept

    def take(self, data: ByteArray) -> None:
        """Copies and digests the host bytes [n] that follow those taken before."""
        for block in blocks(data):
            start = self.digests.end
            target = self.storage[start : start + block.shape[0]]
            if target.device.type == "cpu":
                target.numpy()[:] = block
                self.digests.feed(target.numpy())
            else:
                self.digests.feed(block)
                target.copy_(torch.from_numpy(block if block.flags.writeable else block.copy()))

    def arrived(self, end: int) -> None:
        """Digests what a transport has put into `storage`, up to byte `end`."""
        self.digests.feed(self.storage[self.digests.end : end].cpu().numpy())

    def accept(self, header: Header) -> Ack:
        """Retains the version if it is what the header says. Raises TransferCorrupted or WeightsMismatch."""
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
