"""Asynchronous copies of tensors from host to device.

The caller may drop a pinned (page-locked) buffer while its copy is still queued: torch's allocator for pinned memory
reuses a buffer only after that copy is done.
"""

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to `device`.

    For a CUDA device the copy goes through pinned memory and is only queued on the current stream; the host does not
    wait. For the CPU the same tensor is returned.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)
