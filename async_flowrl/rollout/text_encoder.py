"""Places of a rollout worker's text encoders: always on the device, or only while they encode."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from async_flowrl.transfers import upload

SLAB_BYTES = 2**30
"""Size of a slab of pinned memory. Many tensors share a slab, because torch rounds each up to a power of two."""
ALIGNMENT_BYTES = 512
"""Alignment of each tensor in a slab; torch's allocators align tensors to at least 64 bytes."""


class Residence(Protocol):
    """A place of the text encoders."""

    def visit(self) -> AbstractContextManager[None]:
        """Returns a context manager; inside, the text encoders are on the device."""
        ...


class Resident:
    """The text encoders stay on the device."""

    def visit(self) -> AbstractContextManager[None]:
        return nullcontext()


class Offloaded:
    """The text encoders are in host memory (pinned if `device` is CUDA) and are copied to the device for each visit.

    Nothing is copied back, because the weights do not change. If `device` is a CPU, nothing is copied.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        """Moves the modules' weights to host memory. Raises ValueError if there are no modules."""
        if not modules:
            raise ValueError("rollout.text_encoder=offload: this model's policy names no text encoder to offload")
        self._device = device
        tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self._hosted = [tensor.data.cpu() for tensor in self._tensors]
        if device.type == "cuda":
            self._hosted = pinned(self._hosted)
        self._point_to(self._hosted)

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Context manager: copies the weights to the device and frees these copies at the end."""
        self._point_to([upload(tensor, self._device) for tensor in self._hosted])
        try:
            yield
        finally:
            self._point_to(self._hosted)

    def _point_to(self, values: Sequence[Tensor]) -> None:
        for tensor, value in zip(self._tensors, values, strict=True):
            tensor.data = value


def pinned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns contiguous copies in pinned memory, packed into slabs; shapes and dtypes stay."""
    places: list[tuple[int, int]] = []
    sizes: list[int] = []
    for tensor in tensors:
        length = -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if not sizes or sizes[-1] + length > SLAB_BYTES:
            sizes.append(0)
        places.append((len(sizes) - 1, sizes[-1]))
        sizes[-1] += length
    slabs = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
    return [_placed(tensor, slabs[slab], start) for tensor, (slab, start) in zip(tensors, places, strict=True)]


def _placed(tensor: Tensor, slab: Tensor, start: int) -> Tensor:
    return slab[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
