"""Digests of tensor bytes: position-dependent, a few GB/s on one core, the same on every machine.

Each block of 32 Ki words is hashed to 128 bits by two multilinear forms over the integers modulo 2^64 with fixed odd
coefficients (Carter & Wegman, 1979); the second form reads the block shifted by half a word, so that every 32-bit
half meets one form as the low half, where a flipped sign bit keeps 33 random bits. Block values, offset and length
are then hashed with SHA-256. This detects accidents, not forgery: whoever can write the header can forge it.
"""

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ByteArray = npt.NDArray[np.uint8]

BLOCK_WORDS = 1 << 15
BLOCK_BYTES = BLOCK_WORDS * 8
DIGEST_BYTES = 16


def _coefficients(seed: int) -> npt.NDArray[np.uint64]:
    """Odd pseudo-random words [BLOCK_WORDS]; the bit generator's raw stream is stable across numpy versions."""
    raw = np.random.PCG64(seed).random_raw(BLOCK_WORDS)
    return np.asarray(raw, dtype=np.uint64) | np.uint64(1)


_ALIGNED = _coefficients(0x636B7074)
_SHIFTED = _coefficients(0x656E6769)


def digest_span(data: ByteArray, offset: int) -> bytes:
    """Digest [16 bytes] of contiguous bytes [n] that sit at byte `offset` of their layout."""
    size = data.shape[0]
    whole = size - size % 8
    state = hashlib.sha256(f"{offset}:{size}:".encode())
    for start in range(0, whole, BLOCK_BYTES):
        state.update(_block(data[start : min(start + BLOCK_BYTES, whole)]))
    state.update(data[whole:].tobytes())
    return state.digest()[:DIGEST_BYTES]


def _block(block: ByteArray) -> bytes:
    words = block.view(np.uint64)
    shifted = block[4:-4].view(np.uint64)
    first = np.dot(words, _ALIGNED[: words.shape[0]])
    second = np.dot(shifted, _SHIFTED[: shifted.shape[0]]) if shifted.shape[0] else np.uint64(0)
    return int(first).to_bytes(8, "little") + int(second).to_bytes(8, "little")


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

    For comparing the frozen base weights of two processes once; several times faster than SHA-256 over all bytes.
    """
    parts: list[bytes | str] = []
    for name in sorted(tensors):
        tensor = tensors[name]
        parts += [name, str(tensor.dtype), str(tuple(tensor.shape)), digest_span(tensor_bytes(tensor), 0)]
    return combine(parts)
