"""Host addresses of the bytes of pretended tensors, for the code that stands in for NCCL."""

import ctypes

import torch
from torch import Tensor


def host_view(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes as a CPU tensor uint8 [n], without a copy."""
    if not tensor.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    if tensor.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr()), dtype=torch.uint8)


def typed_view(tensor: Tensor) -> Tensor:
    """The same in the tensor's dtype and shape; a host tensor itself."""
    if tensor.device.type == "cpu":
        return tensor
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return host_view(tensor).view(tensor.dtype).view(tensor.shape)
