"""Digests of tensor bytes: XXH3-128, some tens of GB/s on one core, the same on every machine.

Digesting is the only work a delivery adds per byte at both ends, so it has to be cheap beside a broadcast over
loopback (a few GB/s): cryptographic hashes are not. XXH3-128 takes in positions and the length, and the seed is the
tensor's offset in its layout. This detects accidents, not forgery: whoever can write the header can forge it.
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
    """Digest [16 bytes] of contiguous bytes [n] that sit at byte `offset` of their layout."""
    return xxhash.xxh3_128_digest(data.data, seed=offset)


def tensor_bytes(tensor: Tensor) -> ByteArray:
    """The tensor's elements as host bytes [nbytes]; a view where the tensor is contiguous in host memory."""
    flat: ByteArray = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def combine(parts: Iterable[bytes | str]) -> str:
    """SHA-256 (hex) over parts, each framed by its length."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (hex) over the tensors as float32, in layout order (sorted by name), names and shapes left out."""
    state = hashlib.sha256()
    for name in sorted(tensors):
        state.update(tensor_bytes(tensors[name].detach().float()).data)
    return state.hexdigest()


def base_digest(tensors: Mapping[str, Tensor]) -> str:
    """Digest (hex) of named tensors as they are: name, dtype, shape and bytes, one tensor on the host at a time.

    For comparing the frozen base weights of two processes once; many times faster than SHA-256 over all bytes.
    """
    parts: list[bytes | str] = []
    for name in sorted(tensors):
        tensor = tensors[name]
        parts += [name, str(tensor.dtype), str(tuple(tensor.shape)), digest_span(tensor_bytes(tensor), 0)]
    return combine(parts)
