"""Receiver verifies versions, retains the newest ones, and copies one at a time into the live tensors of a network."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from checkpoint_engine.base import EVALUATION, RING, Ack, Activation, Draft, Header
from checkpoint_engine.digest import ByteArray
from checkpoint_engine.errors import TransferCorrupted, VersionGone, WeightsMismatch
from checkpoint_engine.incremental import Intake
from checkpoint_engine.layout import Layout, RunningDigests
from checkpoint_engine.side_stream import SideStream, on, recorded

SLOTS = (RING, EVALUATION)


def in_host_memory(tensor: Tensor) -> Tensor:
    """Returns a copy in host memory, or the tensor itself if it is there."""
    return tensor.to("cpu")


class Receiver:
    """Retains the newest `capacity` verified versions of each stream, and one evaluation version.

    `tensors` become views of one flat buffer, the live buffer, so compiled graphs and captured CUDA graphs stay valid.
    `receive` may run while other threads read them; `activate` must be called between two uses, on their stream. With
    `on_host` versions are retained in (pinned) host memory.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        streams: Sequence[str] = ("policy",),
        *,
        capacity: int = 2,
        alpha: float | None = None,
        rank: int | None = None,
        on_host: bool = False,
    ) -> None:
        """`alpha` and `rank` as in Draft. ValueError for tensors on several devices."""
        devices = {tensor.device for tensor in tensors.values()}
        if len(devices) != 1:
            raise ValueError(f"the tensors must lie on one device, got {sorted(map(str, devices))}")
        self.layout = Layout.of(tensors)
        self.streams, self.capacity, self.alpha, self.rank = tuple(streams), capacity, alpha, rank
        self.device = devices.pop()
        self._on_host = on_host
        self.slot_device = torch.device("cpu") if on_host else self.device
        """Where versions are retained."""
        self.side = SideStream.of(self.slot_device)
        """Stream of all copies to and from slots on a GPU; None for slots in host memory."""
        self.tensors = dict(tensors)
        if on_host:  # A GPU has no room for the live buffer beside the tensors either.
            for tensor in tensors.values():
                tensor.data = in_host_memory(tensor.detach())
        self.live = self.layout.empty(self.device)
        for name, view in self.layout.views(self.live).items():
            view.copy_(tensors[name].detach())
            tensors[name].data = view
        self.retained: dict[tuple[str, str, int], tuple[Header, Tensor]] = {}
        self._spare: list[Tensor] = []
        self._read: dict[int, Any] = {}
        """Address of a slot → CUDA event after its last activation, on a GPU."""
        self._active: Activation | None = None
        self._lock = threading.Lock()

    @property
    def active(self) -> Activation | None:
        """The version in the live tensors; None before the first activation, when they must not be used yet."""
        with self._lock:
            return self._active

    def held(self) -> tuple[tuple[str, int, str], ...]:
        """Returns all retained versions as sorted (stream, version, slot); each can be activated."""
        with self._lock:
            return tuple(sorted((stream, version, slot) for slot, stream, version in self.retained))

    def receive(self, header: Header, data: ByteArray, slot: str = RING) -> Ack:
        """Verifies a payload uint8 [nbytes] and retains a copy of it, or acknowledges again what it has.

        The ring keeps the newest `capacity` versions of a stream, the evaluation slot the last version put there.
        Raises TransferCorrupted (a resend may help) or WeightsMismatch (the run must stop), which name the tensor; the
        retained versions are then unchanged.
        """
        self.check(header, slot)
        if not header.is_consistent():
            raise TransferCorrupted(f"{header.title} arrived with a damaged header")
        self._check_length(header, data)
        intake = self.expect(header, slot)
        try:
            intake.take(data)
            return intake.accept(header)
        finally:
            if not intake.retained:
                with self._lock:
                    self._spare.append(intake.storage)

    def expect(self, draft: Draft, slot: str = RING) -> Intake:
        """Returns the Intake of a version that arrives piece by piece. Raises WeightsMismatch if it does not fit."""
        self.check(draft, slot)
        with self._lock:
            storage = self._spare.pop() if self._spare else None
        if storage is None:  # Without the lock: it takes long to pin a whole model, and tickets need `activate` then.
            pinned = self.slot_device.type == "cpu" and self.device.type == "cuda"  # for copies to a GPU from there
            with on(self.side):
                storage = self.layout.empty(self.slot_device, pinned=pinned)
        with self._lock:
            read = self._read.pop(storage.data_ptr(), None)
        if self.side is not None:
            self.side.wait(read)
        return Intake(draft, storage, slot, self._accept, side=self.side)

    def check(self, draft: Draft, slot: str = RING) -> None:
        """Raises WeightsMismatch, which names the tensor, if a version does not fit; ValueError for an unknown slot."""
        if slot not in SLOTS:
            raise ValueError(f"slot is one of {list(SLOTS)}, got {slot!r}")
        if draft.stream not in self.streams:
            raise WeightsMismatch(f"stream {draft.stream!r} is not expected here, only {list(self.streams)} are")
        self._check_scaling(draft)
        difference = self.layout.difference(draft.layout)
        if difference:
            raise WeightsMismatch(f"{draft.title} doesn't fit the receiver: {difference}")

    def _accept(self, header: Header, intake: Intake) -> Ack:
        self._check_digests(header, intake.digests)
        self.retain(header, intake.storage, intake.slot)
        return Ack(header.stream, header.version, header.digest, intake.slot)

    def export(self, stream: str, version: int, slot: str = RING) -> tuple[Header, ByteArray]:
        """Returns header and host copy uint8 [nbytes] of a version, to pass it on. Raises VersionGone."""
        with self._lock, on(self.side):
            if (slot, stream, version) not in self.retained:
                raise VersionGone(f"{stream} {version} ({slot}) is not held any more and can't be passed on")
            header, storage = self._find(stream, version, slot)
            return header, storage.to("cpu", copy=True).numpy()

    def activate(self, stream: str, version: int, *, slot: str = RING) -> str:
        """Copies a retained version into the live tensors, by one copy, and returns its digest.

        A copy within a GPU is only queued when this returns; one from host memory is done. With `on_host` the version
        that is active already is not copied again. Raises WeightsMismatch if the version is not retained, or if a
        tensor is no longer a view of the live buffer; the version that was active stays active then.
        """
        self.check_bound()
        with self._lock:
            header, storage = self._find(stream, version, slot)
            activation = Activation(stream, version, header.digest)
            if not self._on_host or self._active != activation:
                self._active = None  # until all bytes are there
                self.live.copy_(storage)
                if self.side is not None:
                    self._read[storage.data_ptr()] = recorded(self.device)
                self._active = activation
            return header.digest

    def check_bound(self) -> None:
        """Raises WeightsMismatch, which names the tensor, if one is no longer a view of the live buffer."""
        start = self.live.data_ptr()
        for entry in self.layout.entries:
            if entry.nbytes and self.tensors[entry.name].data_ptr() != start + entry.offset:
                raise WeightsMismatch(f"{entry.name} is not bound to the live buffer any more: its data was replaced")

    def clear(self) -> None:
        """Forgets all versions. The live tensors keep their bytes, but no version is active."""
        with self._lock:
            self._spare += [storage for _, storage in self.retained.values()]
            self.retained.clear()
            self._active = None

    def _check_scaling(self, header: Draft) -> None:
        for name, sent, expected in (("alpha", header.alpha, self.alpha), ("rank", header.rank, self.rank)):
            if sent != expected:
                raise WeightsMismatch(
                    f"{header.title} has LoRA {name} {sent}, expected {expected}: "
                    f"{self.layout.entries[0].name} and all others would be scaled wrongly"
                )

    def _check_length(self, header: Header, data: ByteArray) -> None:
        size = data.shape[0]
        if size != header.nbytes:
            cut = next((entry.name for entry in self.layout.entries if entry.end > size), "nothing")
            raise TransferCorrupted(
                f"{header.title} arrived with {size} of {header.nbytes} bytes: the first tensor cut off is {cut}"
            )

    def _check_digests(self, header: Header, digests: RunningDigests) -> None:
        for entry, arrived, expected in zip(self.layout.entries, digests.finish(), header.digests, strict=True):
            if arrived != expected:
                raise TransferCorrupted(f"{header.title} arrived with wrong bytes in {entry.name}")

    def retain(self, header: Header, storage: Tensor, slot: str) -> None:
        """Retains verified bytes uint8 [nbytes]. WeightsMismatch if they differ from retained ones or are too old."""
        key = (slot, header.stream, header.version)
        with self._lock:
            same = self.retained.get(key)
            if same is not None and same[0].digest != header.digest:
                raise WeightsMismatch(f"{header.title} came twice with different contents")
            ring = sorted(v for s, stream, v in self.retained if s == slot and stream == header.stream)
            if slot == RING and same is None and len(ring) >= self.capacity and header.version < ring[0]:
                newer = f"{self.layout.entries[0].name} and all others are newer there"
                raise WeightsMismatch(f"{header.title} is stale: the receiver holds {ring} already, {newer}")
            evicted = [key] if same is not None else []
            if slot == EVALUATION:
                evicted = [other for other in self.retained if other[0] == EVALUATION]
            elif same is None and len(ring) >= self.capacity:
                evicted = [(slot, header.stream, v) for v in ring[: len(ring) - self.capacity + 1]]
            self._spare += [self.retained.pop(other)[1] for other in evicted]
            self.retained[key] = (header, storage)

    def _find(self, stream: str, version: int, slot: str) -> tuple[Header, Tensor]:
        retained = self.retained.get((slot, stream, version))
        if retained is None:
            names = sorted(f"{s} {v} ({kind})" for kind, s, v in self.retained) or ["nothing"]
            raise WeightsMismatch(f"{stream} {version} ({slot}) is not held, only {', '.join(names)}")
        return retained
