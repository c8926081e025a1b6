"""The trainable tensors as one flat float32 vector: one all-reduce, one norm, one optimizer, one copy per version."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_ALIGN = 64
"""Elements between the starts of tensors: 256 bytes, because matrix products round differently on unaligned memory and
the rollouts' copies are aligned so too."""
_CHUNK = 1 << 20
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd number of 64 bits, 2^64 over the golden ratio, as an int64: multiples of neighbours have little in common."""


class FlatParameters:
    """Named parameters' masters as views of `values`, their gradients as views of `gradients`; both [numel] float32.

    The parameter objects stay the same, their storage moves to `device`. A float32 one becomes the view itself. One of
    another dtype is what the network computes with: it stays beside its master, follows it at `changed`, and its
    gradient is added to the float32 ones as soon as a backward pass has it. Padding between tensors is always zero.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        self._shapes = {name: parameter.shape for name, parameter in sorted(parameters.items())}
        self._offsets: dict[str, int] = {}
        end = 0
        for name, shape in self._shapes.items():
            self._offsets[name] = end
            end += -(-shape.numel() // _ALIGN) * _ALIGN
        self.values = nn.Parameter(torch.zeros(end, device=device))
        self.gradients = torch.zeros(end, device=device)
        self.values.grad = self.gradients
        self.numel = sum(shape.numel() for shape in self._shapes.values())
        self._copies: dict[str, nn.Parameter] = {}
        """Those that the network computes with in another dtype than float32."""
        views, gradients = self.named(self.values.data), self.named(self.gradients)
        for name, view in views.items():
            parameter = parameters[name]
            if parameter.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(f"trainable tensor {name} is {parameter.dtype}, expected torch.float32 or bfloat16")
            view.copy_(parameter.data)
            if parameter.dtype == torch.float32:
                parameter.data = view
                parameter.grad = gradients[name]
            else:
                parameter.data = parameter.data.to(device)
                parameter.register_post_accumulate_grad_hook(_moved_to(gradients[name]))  # type: ignore[no-untyped-call]
                self._copies[name] = parameter

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a vector in this layout, by name."""
        return {
            name: flat[self._offsets[name] : self._offsets[name] + shape.numel()].view(shape)
            for name, shape in self._shapes.items()
        }

    def pack(self, tensors: Mapping[str, Tensor], *, where: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A new vector from named tensors. Raises ValueError, naming the tensor, where names or shapes differ."""
        flat = torch.zeros_like(self.values.data, dtype=dtype)
        if odd := sorted(tensors.keys() ^ self._shapes.keys()):
            verb = "lacks" if odd[0] in self._shapes else "has unknown"
            raise ValueError(f"{where} {verb} tensor {odd[0]} ({len(odd)} names differ)")
        for name, view in self.named(flat).items():
            if tensors[name].shape != view.shape:
                shapes = f"{list(tensors[name].shape)}, expected {list(view.shape)}"
                raise ValueError(f"{where}: tensor {name} is {shapes}")
            view.copy_(tensors[name])
        return flat

    def snapshot(self) -> Tensor:
        """A copy of the live values."""
        return self.values.data.clone()

    def fingerprint(self) -> str:
        """64 bits (hex) in which every value and its place count; what ranks that must be equal compare.

        Exact integer sums where the values are, so the order of no kernel shows; the host waits once.
        """
        bits, sums = self.values.data.view(torch.int32), []
        for start in range(0, len(bits), _CHUNK):
            part = bits[start : start + _CHUNK].to(torch.int64)
            places = torch.arange(start, start + len(part), dtype=torch.int64, device=part.device)
            sums.append(part.mul_(places.mul_(_SPREAD).bitwise_or_(1)).sum())
        return f"{int(torch.stack(sums).sum()) % (1 << 64):016x}"

    def load(self, flat: Tensor) -> None:
        """Overwrites the live values in place."""
        self.values.data.copy_(flat)
        self.changed()

    def changed(self) -> None:
        """To be called after `values` changed: casts the masters to what the network computes with beside them."""
        self._compute_with(self.values.data)

    def _compute_with(self, flat: Tensor) -> None:
        if self._copies:
            views = self.named(flat)
            torch._foreach_copy_([copy.data for copy in self._copies.values()], [views[name] for name in self._copies])

    @contextmanager
    def swapped(self, flat: Tensor) -> Iterator[None]:
        """Inside, the network computes with `flat`; afterwards with what it was. No graph may be open across it."""
        if len(self._copies) == len(self._shapes):  # the masters need not move
            self._compute_with(flat)
            try:
                yield
            finally:
                self.changed()
            return
        live = self.snapshot()
        self.load(flat)
        try:
            yield
        finally:
            self.load(live)


def _moved_to(gradient: Tensor) -> Callable[[Tensor], None]:
    """For a parameter: adds the gradient that a backward pass has just given it to `gradient`, and frees it."""

    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            gradient.add_(parameter.grad)
            parameter.grad = None

    return hook
