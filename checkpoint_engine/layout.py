"""Layout of many named tensors in one flat byte buffer, the form in which a version is sent and stored."""

import math
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import xxhash
from torch import Tensor

from checkpoint_engine.digest import ByteArray, combine
from checkpoint_engine.errors import WeightsMismatch
from checkpoint_engine.side_stream import pinned as pinned_buffer

ALIGNMENT_BYTES = 256
# Bytes that are copied and digested at a time: they fit the cache of one CPU core, so that the digest does not read
# them from memory again, and they are enough to release Python's global lock for.
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Entry:
    """Place of one tensor in the buffer: `offset` and `nbytes` in bytes; `dtype` is a short name such as float32."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Layout:
    """Tensors sorted by name, each at an offset that is a multiple of 256 bytes, in one buffer."""

    entries: tuple[Entry, ...]
    nbytes: int  # Size of the buffer in bytes, with padding.

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype] | None = None) -> "Layout":
        """Returns the layout of named tensors, in their own dtypes or in `dtypes`. Raises ValueError for no tensors."""
        if not tensors:
            raise ValueError("a layout needs at least one tensor, got none")
        entries, offset = [], 0
        for name in sorted(tensors):
            tensor = tensors[name]
            dtype = tensor.dtype if dtypes is None else dtypes[name]
            nbytes = tensor.numel() * dtype.itemsize
            entries.append(Entry(name, tuple(tensor.shape), str(dtype).removeprefix("torch."), offset, nbytes))
            offset = padded(offset + nbytes)
        return cls(tuple(entries), offset)

    def __hash__(self) -> int:
        # Two numbers are enough: a layout is looked up in caches for every version, and a model has 2,000 entries.
        return hash((self.nbytes, len(self.entries)))

    def __reduce__(self) -> tuple[Any, ...]:
        # It goes to every receiver with every version: it is pickled once, and unpickled once in a process.
        return _unpickled, (self._pickled,)

    @cached_property
    def _pickled(self) -> bytes:
        return zlib.compress(pickle.dumps((self.entries, self.nbytes)))

    @cached_property
    def hash(self) -> str:
        return combine(f"{e.name}|{e.shape}|{e.dtype}|{e.offset}" for e in self.entries)

    def empty(self, device: torch.device | str = "cpu", *, pinned: bool = False) -> Tensor:
        """Returns an uninitialised buffer uint8 [nbytes]; `pinned` is page-locked host memory."""
        if pinned:
            return pinned_buffer(self.nbytes)
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        return {
            entry.name: buffer[entry.offset : entry.end].view(dtype_of(entry)).view(entry.shape)
            for entry in self.entries
        }

    def packed(self, tensors: Mapping[str, Tensor]) -> ByteArray:
        """Copies tensors of this layout into a host buffer uint8 [nbytes], with zeros as padding."""
        buffer = self.empty().zero_()
        for name, view in self.views(buffer).items():
            view.copy_(tensors[name])
        data: ByteArray = buffer.numpy()
        return data

    def digests(self, data: ByteArray) -> tuple[bytes, ...]:
        """Returns one digest (16 bytes, see digest.py) per tensor of a host buffer uint8 [nbytes], in layout order."""
        running = RunningDigests(self)
        for block in blocks(data):
            running.feed(block)
        return running.finish()

    def difference(self, other: "Layout") -> str | None:
        """Returns the first difference of `other`, as a clause that names the tensor; None if the layouts are equal."""
        if self.hash == other.hash:
            return None
        mine = {entry.name: entry for entry in self.entries}
        theirs = {entry.name: entry for entry in other.entries}
        for name, entry in mine.items():
            match = theirs.get(name)
            if match is None:
                return f"{name} is missing"
            if match.shape != entry.shape:
                return f"{name} has shape {list(match.shape)}, expected {list(entry.shape)}"
            if match.dtype != entry.dtype:
                return f"{name} has dtype {match.dtype}, expected {entry.dtype}"
        extra = sorted(theirs.keys() - mine.keys())
        return f"{extra[0]} is not expected" if extra else "the tensors are equal but lie at other offsets"


@lru_cache(maxsize=8)
def _unpickled(pickled: bytes) -> Layout:
    return Layout(*pickle.loads(zlib.decompress(pickled)))


class RunningDigests:
    """Digests of a buffer's tensors, computed while the buffer is filled from its beginning."""

    def __init__(self, layout: Layout) -> None:
        self._entries, self.end = layout.entries, 0  # `end` is the number of bytes that have been fed.
        self._state: xxhash.xxh3_128 | None = None
        self._finished: list[bytes] = []

    def feed(self, data: ByteArray) -> None:
        """Digests the bytes [n] that follow those fed before."""
        start, self.end = self.end, self.end + data.shape[0]
        while len(self._finished) < len(self._entries):
            entry = self._entries[len(self._finished)]
            if entry.offset > self.end:
                return
            state = self._state or xxhash.xxh3_128(seed=entry.offset)
            state.update(data[max(entry.offset, start) - start : entry.end - start].data)
            if entry.end > self.end:
                self._state = state
                return
            self._finished.append(state.digest())
            self._state = None

    def finish(self) -> tuple[bytes, ...]:
        """Returns the digests of all tensors. Raises ValueError if not all bytes have been fed."""
        if len(self._finished) < len(self._entries):
            raise ValueError(f"{self._entries[len(self._finished)].name} is not complete after {self.end} bytes")
        return tuple(self._finished)


def blocks(data: ByteArray, size: int = BLOCK_BYTES) -> Iterator[ByteArray]:
    for start in range(0, data.shape[0], size):
        yield data[start : start + size]


def dtype_of(entry: Entry) -> torch.dtype:
    """Returns the torch dtype of an entry. Raises WeightsMismatch if torch does not know it."""
    kind = getattr(torch, entry.dtype, None)
    if not isinstance(kind, torch.dtype):
        raise WeightsMismatch(f"{entry.name} has dtype {entry.dtype!r}, which torch does not know")
    return kind


def padded(size: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """Returns the offset at which a tensor after `size` bytes begins."""
    return -(-size // alignment) * alignment


MAX_SAMPLES_PER_TENSOR = 16  # Largest number of elements per tensor that are compared.


def sample(layout: Layout, sources: Sequence[Tensor]) -> Tensor:
    """Returns a few elements of every tensor, in layout order and the dtype that is sent, on the tensors' device."""
    picked = []
    for (count, step, dtype), source in zip(_samplings(layout), sources, strict=True):
        flat = source if source.is_contiguous() else source.contiguous()
        few = flat.as_strided((count,), (step,))
        picked.append(few if few.dtype is dtype else few.to(dtype))
    return torch.cat(picked)


def check_sample(layout: Layout, title: str, expected: Tensor, views: Sequence[Tensor]) -> None:
    """Raises WeightsMismatch if the sample of staged `views` is not `expected`; names `title` and the tensor."""
    # It finds bytes of an older version and bytes that changed while they were copied, which no digest shows.
    staged = sample(layout, views).cpu()
    if torch.equal(staged.view(torch.uint8), expected.view(torch.uint8)):
        return
    start = 0
    for entry, (count, _, _) in zip(layout.entries, _samplings(layout), strict=True):
        end = start + count
        if not torch.equal(staged[start:end].view(torch.uint8), expected[start:end].view(torch.uint8)):
            raise WeightsMismatch(
                f"the staged bytes of {title} are not the trainer's: "
                f"{entry.name} begins {staged[start].item():.6g}, was {expected[start].item():.6g}"
            )
        start = end


@lru_cache(16)
def _samplings(layout: Layout) -> tuple[tuple[int, int, torch.dtype], ...]:
    # By tensor: the number of elements that are compared, their distance in elements, and the dtype sent.
    samplings = []
    for entry in layout.entries:
        numel = math.prod(entry.shape)
        count = min(MAX_SAMPLES_PER_TENSOR, numel)
        samplings.append((count, max(1, numel // max(1, count)), dtype_of(entry)))
    return tuple(samplings)
