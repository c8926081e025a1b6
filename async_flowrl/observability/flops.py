"""Floating-point operations of rollout and training, counted from shapes, and the share of the device's peak they use.

Matrix products, convolutions and attention count, by torch's own formulas; norms, activations and the sampler do not.
What runs counts: frozen weights have no gradient, and passes that gradient checkpointing repeats count every time.
"""

import re
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

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
"""Dense bfloat16 peak of tensor cores with float32 sums, by words of the device's name: NVIDIA's data sheets of these
cards, half of what they give with sparsity. Where nothing else is said, of the SXM module."""
_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
FORMULAS = {**flop_registry, _CPU_ATTENTION: sdpa_flop, _CPU_ATTENTION_BACKWARD: sdpa_backward_flop}
"""Operation → torch's formula. The registry lacks the attention kernel of CPUs."""


class FlopCounter(TorchDispatchMode):
    """Counts, in `total`, what the thread that enters it computes, its backward passes included.

    torch's FlopCounterMode does the same at twice the cost, and hooks every module of the process, those of other
    threads too. Every operation runs as it would without the counter, so that no bit of a result changes.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = FORMULAS.get(getattr(func, "_overloadpacket", func))
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        return result


class Meter:
    """FLOPs of work that comes again and again: counted when its shape is new, known from then on.

    A compiled network is left alone: to look inside would make it compile, and round, differently.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: dict[Hashable, int] = {}

    @contextmanager
    def measure(self, shape: Hashable) -> Iterator[None]:
        """Around work of this shape, its backward pass included."""
        if shape in self._known or any(part._compiled_call_impl is not None for part in self._module.modules()):
            yield
            return
        with FlopCounter() as counter:
            yield
        self._known[shape] = counter.total

    def flops(self, shape: Hashable) -> int | None:
        """Of one piece of work that was measured; None for a compiled network."""
        return self._known.get(shape)


def device_peak() -> float | None:
    """FLOP/s of the device this process computes on, where its name is known."""
    if not torch.cuda.is_available():
        return None
    return tensor_peak(torch.cuda.get_device_name())


def tensor_peak(name: str) -> float | None:
    """Dense bfloat16 FLOP/s of the device of this name; None for one that is not in the table."""
    words = set(re.split(r"[^A-Za-z0-9]+", name))
    known = [card for card in TENSOR_PEAK_FLOPS_PER_SECOND if words.issuperset(card.split())]
    return TENSOR_PEAK_FLOPS_PER_SECOND[max(known, key=len)] if known else None
