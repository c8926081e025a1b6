"""Digests computed while bytes are copied: Sealing for a version that is sent, Intake for one that is received.

`base_digest` is that of weights that stay where they are.
"""

from collections.abc import Callable, Container, Iterable, Mapping

import torch
import xxhash
from torch import Tensor

from checkpoint_engine.base import Ack, Draft, Header
from checkpoint_engine.digest import DIGEST_BYTES, ByteArray, combine, tensor_bytes
from checkpoint_engine.errors import TransferCorrupted
from checkpoint_engine.layout import BLOCK_BYTES, Layout, RunningDigests, blocks
from checkpoint_engine.side_stream import PINNED_BLOCK_BYTES, HostCopy, PinnedBlocks, SideStream, recorded

TOTAL_DIGEST_BYTES = 32


class Sealing:
    """The sealing of one version by one thread: it digests the bytes piece by piece during a broadcast, or at once."""

    # The caller must call `finish` in every case, once nothing reads the staging slot any more, because other threads
    # that want the version wait for it. `copy` brings the bytes from a GPU to `data`, if they are not there yet.
    # `proven` is called when all bytes are there, and may raise. `done` is called once, at the end; the header is None
    # on failure.

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
        """Returns the bytes uint8 [nbytes] on a device; in host memory only what was fed is valid."""
        if self._copy is not None and self._copy.source.device == device:
            return self._copy.source
        return torch.from_numpy(self.data).to(device)

    def feed(self, end: int) -> None:
        """Digests the bytes up to `end`; waits for bytes that are still being copied from a GPU."""
        if self.header is None and end > self._digests.end:
            if self._copy is not None:
                self._copy.wait(end)
            self._digests.feed(self.data[self._digests.end : end])

    def digested(self) -> Header:
        """Digests the remaining bytes and returns the header. Raises the error of `proven`, in every call."""
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
        """Returns `digested`, and calls `done`, which retains the version and frees its staging slot."""
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
    """The receipt of one version into a slot of a receiver; a GPU's work on it is done on the CUDA stream `side`."""

    # A transport that writes into `storage` itself may still write after it was aborted, so such a slot is reused only
    # if its version was accepted. The digested bytes are those in the slot or, to or from a GPU, those in pinned
    # memory.

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
        for block in blocks(data, BLOCK_BYTES if self._blocks is None else PINNED_BLOCK_BYTES):
            start = self.digests.end
            target = self.storage[start : start + block.shape[0]]
            if self._blocks is None:
                target.numpy()[:] = block
                self.digests.feed(target.numpy())
            else:
                self.digests.feed(self._blocks.upload(block, target))

    def arrived(self, end: int) -> None:
        """Digests the bytes up to `end` that a transport has written into `storage`."""
        new = self.storage[self.digests.end : end]
        for block in [new.numpy()] if self._blocks is None else self._blocks.download(new):
            self.digests.feed(block)

    def accept(self, header: Header) -> Ack:
        """Retains the version if it matches the header. Raises TransferCorrupted or WeightsMismatch."""
        if self._blocks is not None:
            self._blocks.settle()
        ack = self._accept(header, self)
        self.retained = True
        return ack

    def accept_with(self, trailer: ByteArray) -> Ack:
        data, count = trailer.tobytes(), len(self.draft.layout.entries)
        header = self.draft.sealed(tuple(data[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES] for i in range(count)))
        if header.digest != data[count * DIGEST_BYTES :].hex():
            raise TransferCorrupted(f"{header.title} arrived with a damaged trailer")
        return self.accept(header)


def trailer(header: Header) -> bytes:
    """Returns the bytes that follow a broadcast version: the digests of its tensors, then the total digest."""
    return b"".join(header.digests) + bytes.fromhex(header.digest)


def trailer_bytes(layout: Layout) -> int:
    return len(layout.entries) * DIGEST_BYTES + TOTAL_DIGEST_BYTES


def base_digest(tensors: Mapping[str, Tensor], names: Container[str] | None = None) -> str:
    """Returns a digest (hex) over names, dtypes, shapes and bytes of tensors (those of `names`), on any device."""
    # It is many times faster than SHA-256 over all bytes. One tensor at a time is read, and one on a GPU in blocks.
    parts: list[bytes | str] = []
    downloads: dict[torch.device, tuple[SideStream, PinnedBlocks]] = {}
    for name in sorted(tensors):
        if names is not None and name not in names:
            continue
        tensor, state = tensors[name], xxhash.xxh3_128()
        for block in _host_blocks(tensor, downloads):
            state.update(block.data)
        parts += [name, str(tensor.dtype), str(tuple(tensor.shape)), state.digest()]
    return combine(parts)


def _host_blocks(tensor: Tensor, downloads: dict[torch.device, tuple[SideStream, PinnedBlocks]]) -> Iterable[ByteArray]:
    if tensor.device.type != "cuda":
        return [tensor_bytes(tensor)]
    if tensor.device not in downloads:
        stream = SideStream(tensor.device)
        downloads[tensor.device] = stream, PinnedBlocks(stream)
    side, blocks = downloads[tensor.device]
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    side.wait(recorded(tensor.device))
    return blocks.download(flat)
