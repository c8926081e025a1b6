"""A rollout worker's text encoders: where they are, and the embeddings of the latest prompts, which it keeps.

They are on the device always, or only while they encode.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from async_flowrl.policies.base import Policy
from async_flowrl.transfers import upload
from async_flowrl.types import Asked, Conditioning, Wording

SLAB_BYTES = 2**30
"""Size of a slab of pinned memory. Many tensors share a slab, because torch rounds each up to a power of two."""
ALIGNMENT_BYTES = 512
"""Alignment of each tensor in a slab; torch's allocators align tensors to at least 64 bytes."""


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


CACHED_PROMPTS = 1024
"""Largest number of embeddings in the cache; the least recently used one is removed first."""


class Encoder(Protocol):
    """Returns embeddings: it computes them, or reads them from files."""

    def encode(self, asked: Sequence[Asked]) -> list[Conditioning]:
        """Returns the conditioning of each, with the same bits as if the policy had encoded it alone."""


class PolicyEncoder:
    """Computes embeddings with the policy's text encoders.

    `visit` makes a context manager for each call, inside which they are on the device; by default they always are.
    """

    def __init__(self, policy: Policy, visit: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._policy, self._visit = policy, visit

    def encode(self, asked: Sequence[Asked]) -> list[Conditioning]:
        with self._visit():
            return [encode_one(self._policy, each) for each in asked]


def encode_one(policy: Policy, asked: Asked) -> Conditioning:
    """Returns the conditioning of one prompt, encoded alone because others in its batch would change the last bits."""
    text, system, negative = asked
    (encoded,) = policy.encode([text], system=system, negative=negative)
    return encoded


class Prompts:
    """The cache. It asks its encoder for all missing embeddings of a ticket in one call."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._known: OrderedDict[Asked, Conditioning] = OrderedDict()

    def embeddings(self, asked: Sequence[Asked]) -> list[Conditioning]:
        """Returns the conditioning of each; the arrays belong to the cache and must not be changed."""
        missing = [key for key in dict.fromkeys(asked) if key not in self._known]
        if missing:
            self._known |= zip(missing, self._encoder.encode(missing), strict=True)
        for key in asked:
            self._known.move_to_end(key)
        known = [self._known[key] for key in asked]
        while len(self._known) > CACHED_PROMPTS:
            self._known.popitem(last=False)
        return known

    def encode_negatives(self, texts: Sequence[Wording]) -> list[Conditioning]:
        """Returns the conditioning of negative prompts for the trainer, without keeping them in the cache."""
        return self._encoder.encode([(text, None, True) for text in texts])
