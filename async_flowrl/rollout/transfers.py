"""Copies of tensors from device to host, queued together and followed by a single wait."""

from collections.abc import Sequence

import torch
from torch import Tensor


def download(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Returns copies of tensors of `device` in host memory, after one wait for all of them; for a CPU, the tensors."""
    if device.type != "cuda":
        return list(tensors)
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    wait(device)
    return copies


def wait(device: torch.device) -> None:
    """Waits until all work is done that this thread has queued on its current stream of a CUDA device."""
    torch.cuda.current_stream(device).synchronize()
