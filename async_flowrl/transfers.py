"""Copies from host to device that the host does not wait for.

A pinned buffer may be let go as soon as its copy is queued: torch's allocator hands it out again only after that copy.
"""

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`, through pinned memory where that is CUDA; on the host the tensor itself."""
    if device.type != "cuda":
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)
