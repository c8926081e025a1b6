"""Floating-point operations (FLOPs) of rollout and training, and the peak FLOP/s and memory of devices.

FLOPs are counted from tensor shapes with the formulas of torch.utils.flop_counter, for matrix products, convolutions
and attention; norms, activations and the sampler are not counted. Only operations that really run are counted: there
are no weight gradients for frozen weights, and forward passes that gradient checkpointing repeats count each time.
"""

import re
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

# Words of a device's name → peak FLOP/s of its tensor cores, dense bfloat16 with float32 accumulation, by NVIDIA's data
# sheets (half of the value with sparsity). The SXM module is meant if the name says nothing else.
TENSOR_PEAK_FLOPS_PER_SECOND = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}
_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# Operation → torch's FLOP formula; torch's registry lacks attention on the CPU.
FORMULAS = {**flop_registry, _CPU_ATTENTION: sdpa_flop, _CPU_ATTENTION_BACKWARD: sdpa_backward_flop}


class FlopCounter(TorchDispatchMode):
    """Context manager that counts the FLOPs of the current thread, backward passes included, in `total`.

    It replaces torch's FlopCounterMode, which costs twice as much and also hooks the modules of other threads. The
    operations themselves run unchanged, so results stay equal bit for bit.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch.compile compile as if nobody counted; what compiled code calls of the formulas is counted."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (formula := FORMULAS.get(getattr(func, "_overloadpacket", func))) is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        return result


class Meter:
    """FLOPs of repeated work: counted the first time for each shape, then looked up."""

    def __init__(self) -> None:
        self._counted: dict[Hashable, int] = {}

    @contextmanager
    def measure(self, shape: Hashable) -> Iterator[None]:
        """Context manager around one piece of work, its backward pass included; `shape` is its key."""
        if shape in self._counted:
            yield
            return
        with FlopCounter() as counter:
            yield
        self._counted[shape] = counter.total

    def flops(self, shape: Hashable) -> int | None:
        return self._counted.get(shape)


def device_kind(device: torch.device) -> str:
    """Returns the name of a GPU, or the instructions that torch uses on this CPU; other kinds round differently."""
    cuda = device.type == "cuda"
    return torch.cuda.get_device_name(device) if cuda else torch.backends.cpu.get_cpu_capability()


def device_peak() -> float | None:
    """Peak FLOP/s of this process's current GPU (see tensor_peak); None without a GPU or for an unknown one."""
    return tensor_peak(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def tensor_peak(name: str) -> float | None:
    """Peak FLOP/s of the device with this name; None if no entry of the table matches. The longest match wins."""
    words = set(re.split(r"[^A-Za-z0-9]+", name))
    matches = [card for card in TENSOR_PEAK_FLOPS_PER_SECOND if words.issuperset(card.split())]
    return TENSOR_PEAK_FLOPS_PER_SECOND[max(matches, key=len)] if matches else None


def reserved_memory() -> int | None:
    """Most bytes that PyTorch has reserved on this process's current GPU so far; None without a GPU."""
    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None


def total_memory() -> int | None:
    """Total memory in bytes of the first GPU that is visible to this process; None without a GPU."""
    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None
