"""Digests of tensors: XXH3-128 of the bytes of one tensor, and SHA-256 over such digests or over small weights.

XXH3-128 does some tens of GB/s on one core, so that digesting is no part of a delivery's time; cryptographic hashes do
not. Its seed is the tensor's offset in its layout. It detects accidents, but not forgery.
"""

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

ByteArray = npt.NDArray[np.uint8]

DIGEST_BYTES = 16


def digest_span(data: ByteArray, offset: int) -> bytes:
    """Returns the digest (16 bytes) of contiguous bytes [n] that begin at byte `offset` of their layout."""
    return xxhash.xxh3_128_digest(data.data, seed=offset)


def tensor_bytes(tensor: Tensor) -> ByteArray:
    """Returns the tensor's elements as bytes [nbytes] in host memory; a view if the tensor is contiguous there."""
    flat: ByteArray = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def combine(parts: Iterable[bytes | str]) -> str:
    """Returns the SHA-256 (hex) over the parts, each preceded by its length (8 bytes, little-endian)."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 (hex) over the tensors as float32, sorted by name; names and shapes are left out."""
    state = hashlib.sha256()
    for name in sorted(tensors):
        state.update(tensor_bytes(tensors[name].detach().float()).data)
    return state.hexdigest()
