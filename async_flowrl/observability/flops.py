"""Floating-point operations of rollout and LoRA training, counted from shapes: what MFU is a share of.

A matrix product of [m, k] and [k, n] is 2 m k n. Its backward pass costs the same again for the input's gradient and
again for the weight's, each only where that gradient is wanted: frozen weights get none, so LoRA training costs little
more than twice the forward pass, not three times. Norms, activations and the sampler are left out.
"""

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

TENSOR_PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
"""Dense bfloat16 FLOP/s of tensor cores by a part of the device's name, from the vendors' data sheets (SXM)."""
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass
class Flops:
    """What has run so far. Passes that gradient checkpointing repeats count every time they run."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def add(self, out: Tensor, forward: float, backward: float) -> None:
        """One operation with output `out`; its backward part counts once a gradient really comes back through it."""
        self.forward += forward
        if out.requires_grad and backward > 0:
            out.register_hook(lambda _: self._came_back(backward))  # type: ignore[no-untyped-call]

    def _came_back(self, flops: float) -> None:
        self.backward += flops


class _Attention:
    """Stands in for torch's scaled_dot_product_attention while anybody counts, and counts for the thread that calls it:
    workers that share a process are threads, and leave in any order."""

    def __init__(self) -> None:
        self._attend = nn.functional.scaled_dot_product_attention
        self._lock = threading.Lock()
        self._counting: dict[int, Flops] = {}

    @contextmanager
    def counting(self, found: Flops) -> Iterator[None]:
        thread = threading.get_ident()
        with self._lock:
            before = self._counting.get(thread)
            self._counting[thread] = found
            nn.functional.scaled_dot_product_attention = self
        try:
            yield
        finally:
            with self._lock:
                if before is None:
                    del self._counting[thread]
                else:
                    self._counting[thread] = before
                if not self._counting:
                    nn.functional.scaled_dot_product_attention = self._attend

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = self._attend(query, key, value, *args, **kwargs)
        found = self._counting.get(threading.get_ident())
        if found is not None:
            pairs = 2.0 * query.shape[:-1].numel() * key.shape[-2]
            scores, mixing = pairs * query.shape[-1], pairs * value.shape[-1]
            inner = _gradients(query, key)
            found.add(out, scores + mixing, scores * inner + mixing * (min(1, inner) + _gradients(value)))
        return out


_ATTENTION = _Attention()


@contextmanager
def counted(module: nn.Module) -> Iterator[Flops]:
    """Inside, what `module` computes is counted; a backward pass may come later than the block's end.

    Linear layers and convolutions are seen by hooks, attention where this thread calls torch's
    scaled_dot_product_attention (on a GPU, not where gradient checkpointing repeats it in autograd's own thread). It
    works on the meta device too, where nothing is computed.
    """
    found = Flops()

    def layer(which: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        weight = cast("Tensor", which.weight)
        products = 2.0 * out.numel() * (weight.numel() // weight.shape[0])
        found.add(out, products, products * _gradients(args[0], weight))

    hooks = [part.register_forward_hook(layer) for part in module.modules() if isinstance(part, _LAYERS)]
    try:
        with _ATTENTION.counting(found):
            yield found
    finally:
        for hook in hooks:
            hook.remove()


class Meter:
    """FLOPs of work that comes again and again: counted when its shape is new, known from then on.

    A compiled network is left alone: to look inside would make it compile, and round, differently.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: dict[Hashable, Flops] = {}

    @contextmanager
    def measure(self, shape: Hashable) -> Iterator[None]:
        """Around work of this shape, its backward pass included."""
        if shape in self._known or any(part._compiled_call_impl is not None for part in self._module.modules()):
            yield
            return
        with counted(self._module) as found:
            yield
        self._known[shape] = found

    def flops(self, shape: Hashable) -> float | None:
        """Of one piece of work that was measured; None for a compiled network."""
        return self._known[shape].total if shape in self._known else None


def device_peak() -> float | None:
    """FLOP/s of the device this process computes on, where its name is known."""
    return peak(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def peak(device: torch.device) -> float | None:
    """The device's FLOP/s, where its name is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for known, flops in TENSOR_PEAK.items() if known in name), None)


def utilisation(flops: float, seconds: float, best: float | None) -> float | None:
    """Model FLOPs utilisation: the share of `best` FLOP/s; None where that is not known."""
    return flops / seconds / best if best is not None and seconds > 0 else None


def _gradients(*tensors: Tensor) -> int:
    """How many of them backward computes a gradient for."""
    return sum(tensor.requires_grad for tensor in tensors) if torch.is_grad_enabled() else 0
