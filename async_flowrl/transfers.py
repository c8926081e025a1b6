"""Copies of tensors between host and device, for which the host waits as little as possible; networks onto a device.

The caller may drop a pinned (page-locked) buffer while its copy is still queued: torch's allocator for pinned memory
reuses a buffer only after that copy is done.
"""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn

# Lock for building models: diffusers, transformers and peft change process-wide defaults meanwhile. A thread that
# computes at the same time must give the dtype of each tensor that it creates from numbers. It is also held while a
# network's weights wait in host memory (`Parked`), so that nothing is loaded beside the models that have its place.
ONE_AT_A_TIME = threading.RLock()

HOST = torch.device("cpu")


def memory_of(where: str, device: torch.device) -> torch.device:
    """Returns the device in whose memory something of `device` is kept; `where` is host or device."""
    return HOST if where == "host" else device


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to `device`; to CUDA through pinned memory, only queued on the current stream."""
    if device.type != "cuda":
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


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


def settle(module: nn.Module, device: torch.device) -> None:
    """Freezes a network, sets eval mode, moves it to `device`, and copies its tensors into memory that torch allocates.

    Memory-mapped safetensors weights are not aligned to 64 bytes, and matrix products on them round differently. After
    the copy, results are equal bit for bit in all processes.
    """
    module.eval().requires_grad_(False).to(device)
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
