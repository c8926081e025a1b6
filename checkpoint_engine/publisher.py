"""Publisher is the sending end of one stream: it stages versions, seals them (digests), and keeps them for sending."""

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from checkpoint_engine.base import Draft, Header
from checkpoint_engine.digest import ByteArray
from checkpoint_engine.errors import TransferFailed, VersionGone, WeightsMismatch
from checkpoint_engine.incremental import Sealing
from checkpoint_engine.layout import Layout, check_sample, sample
from checkpoint_engine.side_stream import HostCopy, SideStream, recorded

MAX_SPARE_BUFFERS = 2  # Largest number of unused buffers that stay allocated.
MAX_STAGED_VERSIONS = 2
"""Largest number of versions that are staged and not sealed yet."""


@dataclass(frozen=True)
class HostBuffer:
    """One buffer. It is in use as long as something refers to `data` or to an array or tensor made of `data`."""

    data: ByteArray  # uint8 [nbytes]
    views: list[Tensor]  # The layout's tensors in the buffer; references to them do not keep it in use.


class HostBuffers:
    """Buffers of one layout, for any thread. A buffer becomes spare when the last reference to it is dropped."""

    # They are reused because a page's first use costs several times as much as the copy into it.

    def __init__(self, layout: Layout, *, pinned: bool = False) -> None:
        self._layout, self._pinned = layout, pinned
        self._spare: deque[HostBuffer] = deque()

    def reserve(self, count: int) -> None:
        while len(self._spare) < count:
            self._spare.append(self._allocate())

    def take(self) -> HostBuffer:
        """Returns a spare buffer with its old contents, or a new one."""
        try:
            buffer = self._spare.pop()
        except IndexError:
            buffer = self._allocate()
        while len(self._spare) > MAX_SPARE_BUFFERS:
            with contextlib.suppress(IndexError):
                self._spare.popleft()
        # Made from a memoryview, so that arrays and tensors made of `data` refer to it, not to the buffer's own array.
        data: ByteArray = np.frombuffer(buffer.data.data, np.uint8)
        weakref.finalize(data, self._spare.append, buffer).atexit = False  # deque.append takes no lock
        return HostBuffer(data, buffer.views)

    def _allocate(self) -> HostBuffer:
        memory = self._layout.empty(pinned=self._pinned).zero_()
        return HostBuffer(memory.numpy(), list(self._layout.views(memory).values()))


@dataclass
class Staged:
    slot: int
    host: HostBuffer | None
    """Buffer with the bytes of tensors in host memory; None for tensors on a GPU, whose bytes are in the slot."""
    sample: Tensor
    """Some elements of the live tensors, copied when the version was staged."""
    ready: Any
    """CUDA event after the copy into the slot; None for tensors in host memory."""


class SealedVersions:
    """Retains the newest `retain` sealed versions, for resends and new receivers, and those that `hold` names."""

    def __init__(
        self,
        layout: Layout,
        stream: str,
        *,
        alpha: float | None = None,
        rank: int | None = None,
        retain: int = 2,
        pinned: bool = False,
    ) -> None:
        """`alpha` and `rank` as in Draft; `pinned` host memory is for copies from a GPU."""
        self.layout, self.stream, self.alpha, self.rank, self.retain = layout, stream, alpha, rank, retain
        self._buffers = HostBuffers(layout, pinned=pinned)
        self._sealed: dict[int, tuple[Header, ByteArray]] = {}
        self._retained_longer: set[int] = set()
        self._changed = threading.Condition()

    def draft(self, version: int) -> Draft:
        return Draft(self.stream, version, self.layout, self.alpha, self.rank)

    def begin(self, version: int) -> Sealing:
        """Returns a Sealing that has the header of a sealed version. Raises VersionGone if it is not retained."""
        header, data = self.payload(version)
        work = Sealing(header, data, None)
        work.header = header
        return work

    def payload(self, version: int) -> tuple[Header, ByteArray]:
        """Returns header and bytes uint8 [nbytes], not to be changed. VersionGone if it is not retained."""
        with self._changed:
            if version not in self._sealed:
                raise VersionGone(
                    f"version {version} of stream {self.stream} is not retained, only {sorted(self._sealed)} are"
                )
            return self._sealed[version]

    def retained(self) -> tuple[int, ...]:
        with self._changed:
            return tuple(sorted(self._sealed))

    def hold(self, version: int) -> None:
        """Retains a sealed version until `release`, regardless of newer ones. Raises VersionGone if it is dropped."""
        with self._changed:
            if version not in self._sealed:
                raise VersionGone(f"version {version} of stream {self.stream} is not retained and can't be held")
            self._retained_longer.add(version)

    def release(self, version: int) -> None:
        """Ends a `hold`; the version is dropped unless it is among the newest `retain`."""
        with self._changed:
            self._retained_longer.discard(version)
            self._evict()

    def clear(self) -> None:
        """Drops every version, so that a run can publish again from an earlier version."""
        with self._changed:
            self._sealed.clear()
            self._retained_longer.clear()
            self._changed.notify_all()

    def _end(self, work: Sealing, header: Header | None) -> None:
        if header is not None:
            with self._changed:
                self._sealed[header.version] = (header, work.data)
                self._evict()

    def _evict(self) -> None:
        newest = sorted(self._sealed)[-self.retain :]
        for version in self._sealed.keys() - set(newest) - self._retained_longer:
            del self._sealed[version]


class Publisher(SealedVersions):
    """Publishes one stream of versions of the same named tensors.

    Two threads may use it at the same time: one calls `stage`, the other one everything else, on a CUDA stream of its
    own. Tensors in host memory are staged in the buffer that is sent later, tensors on a GPU in one of two slots there.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        stream: str = "policy",
        *,
        dtypes: Mapping[str, torch.dtype] | None = None,
        alpha: float | None = None,
        rank: int | None = None,
        retain: int = 2,
        memory: torch.device | None = None,
    ) -> None:
        """`tensors` are the live tensors, `dtypes` (name → dtype) those that are sent (None: their own).

        Versions are staged in the memory of the device `memory`, where what `stage` is given must be (None: `tensors`).
        """
        layout = Layout.of(tensors, dtypes)
        self.tensors = dict(tensors)
        self._device = memory or next(iter(tensors.values())).device
        on_host = self._device.type == "cpu"
        super().__init__(layout, stream, alpha=alpha, rank=rank, retain=retain, pinned=not on_host)
        self._side = SideStream.of(self._device)
        self._slots = [] if on_host else [self.layout.empty(self._device).zero_() for _ in range(MAX_STAGED_VERSIONS)]
        self._views = [list(self.layout.views(slot).values()) for slot in self._slots]
        self._buffers.reserve(MAX_STAGED_VERSIONS if on_host else 1)
        self._free = list(range(MAX_STAGED_VERSIONS))
        self.staged: dict[int, Staged] = {}
        self._sealing: set[int] = set()

    def stage(self, version: int, tensors: Mapping[str, Tensor] | None = None, *, deadline: float = 120.0) -> None:
        """Copies the live tensors, or `tensors` of the same layout, aside as `version`; on return they may change.

        Waits up to `deadline` seconds while two other versions are staged and not sealed, then raises TransferFailed.
        Raises ValueError if the version is staged or retained, WeightsMismatch if names or shapes differ from the
        layout.
        """
        sources = self._sources(self.tensors if tensors is None else tensors)
        with self._changed:
            if version in self.staged or version in self._sealed:
                raise ValueError(f"version {version} of stream {self.stream} is published already")
            if not self._changed.wait_for(lambda: bool(self._free), timeout=deadline):
                waiting = sorted(self.staged)
                raise TransferFailed(f"staging version {version} waited {deadline:g} s for {waiting} to be sealed")
            slot = self._free.pop(0)
        try:
            staged = self.copied(slot, sources)
        except BaseException:
            self._give_back(slot)
            raise
        with self._changed:
            self.staged[version] = staged
            self._changed.notify_all()

    def seal(self, version: int) -> Header:
        """Digests a staged version, retains it in host memory and returns its header; a second call returns it again.

        Two threads may seal the same version. Raises VersionGone if the version is neither staged nor retained, and
        WeightsMismatch, which names the tensor, if the staged bytes differ from the sample of the live tensors.
        """
        return self.begin(version).finish()

    def begin(self, version: int) -> Sealing:
        """Returns a Sealing, for a transfer that digests meanwhile and must `finish` it; raises as `seal`."""
        with self._changed:
            self._changed.wait_for(lambda: version not in self._sealing)
            if version in self._sealed:
                return super().begin(version)
            staged = self.staged.pop(version, None)
            if staged is None:
                raise VersionGone(f"version {version} of stream {self.stream} is neither staged nor retained")
            self._sealing.add(version)
        try:
            return self._sealing_of(version, staged)
        except BaseException:
            self._sealing_ends(version)
            self._give_back(staged.slot)
            raise

    def _sealing_of(self, version: int, staged: Staged) -> Sealing:
        """Returns the Sealing of a staged version. A GPU slot stays in use until its end, as the bytes come from it."""
        buffer, expected, copy, title = staged.host, staged.sample, None, self.draft(version).title
        if buffer is not None:
            self._give_back(staged.slot)
        else:
            assert self._side is not None
            self._side.wait(staged.ready)
            with self._side.current():
                expected = staged.sample.cpu()
                check_sample(self.layout, title, expected, self._views[staged.slot])
            buffer = self._buffers.take()
            copy = HostCopy(self._slots[staged.slot], torch.from_numpy(buffer.data), self._side)

        def end(work: Sealing, header: Header | None) -> None:
            self._end(work, header)
            if copy is not None:
                self._give_back(staged.slot)

        proven = partial(check_sample, self.layout, title, expected, buffer.views)
        return Sealing(self.draft(version), buffer.data, end, copy=copy, proven=proven)

    def _end(self, work: Sealing, header: Header | None) -> None:
        super()._end(work, header)
        self._sealing_ends(work.draft.version)
        self._buffers.reserve(1)

    def _sealing_ends(self, version: int) -> None:
        with self._changed:
            self._sealing.discard(version)
            self._changed.notify_all()

    def clear(self) -> None:
        with self._changed:
            self._free += [staged.slot for staged in self.staged.values()]
            self.staged.clear()
        super().clear()

    def _sources(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        shapes = {entry.name: entry.shape for entry in self.layout.entries}
        for name in sorted(shapes.keys() | tensors.keys()):
            if name not in shapes or name not in tensors or tensors[name].shape != shapes[name]:
                raise WeightsMismatch(f"can't publish on stream {self.stream}: {name} is not as in its layout")
        return [tensors[name] for name in shapes]

    def copied(self, slot: int, sources: list[Tensor]) -> Staged:
        host = self._buffers.take() if self._device.type == "cpu" else None
        with torch.no_grad():
            torch._foreach_copy_(self._views[slot] if host is None else host.views, sources)
            picked = sample(self.layout, sources)
        return Staged(slot, host, picked, recorded(self._device))

    def _give_back(self, slot: int) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()
