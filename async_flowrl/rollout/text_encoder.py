"""Residence of a rollout worker's text encoders: on the device for good, or only while they encode."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from async_flowrl.transfers import upload

SLAB_BYTES = 2**30
"""torch rounds each piece of pinned memory up to a power of two, so weights share pieces of about this size."""
ALIGNMENT_BYTES = 512
"""Of every tensor within its piece, as the allocators of host and device align whole tensors at least to 64."""


class Residence(Protocol):
    """What the engine asks before it encodes."""

    def visit(self) -> AbstractContextManager[None]:
        """Inside, the text encoders compute on the device."""
        ...


class Resident:
    """The text encoders stay where they were loaded."""

    def visit(self) -> AbstractContextManager[None]:
        return nullcontext()


class Offloaded:
    """The weights stay in host memory (pinned if `device` is CUDA) and are copied to the device for a visit.

    Nothing is copied back: the weights are frozen. On a CPU both places are one, and nothing moves.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        """Takes the modules off the device. Raises ValueError where there is none: nothing would be saved."""
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
        """The device's copies are freed when the visit ends, also by an exception."""
        self._point_to([upload(tensor, self._device) for tensor in self._hosted])
        try:
            yield
        finally:
            self._point_to(self._hosted)

    def _point_to(self, values: Sequence[Tensor]) -> None:
        for tensor, value in zip(self._tensors, values, strict=True):
            tensor.data = value


def pinned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in pinned memory, packed into slabs; each keeps its shape and dtype and becomes contiguous."""
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
