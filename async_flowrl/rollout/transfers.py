"""Copies from device to host that the host does not wait for, and the one wait that ends them."""

from collections.abc import Sequence

import torch
from torch import Tensor


def download(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of `device` in host memory (pinned where that is CUDA), with one wait for all of them."""
    if device.type != "cuda":
        return list(tensors)
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    wait(device)
    return copies


def wait(device: torch.device) -> None:
    """Returns when all that this thread has queued on its stream of a CUDA device is done."""
    torch.cuda.current_stream(device).synchronize()
