"""All trained tensors as one flat float32 vector: reduction, norm, optimizer step and copies are single operations."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Tensors start at multiples of this many elements (256 bytes), as in rollout workers, because matrix products round
# differently on memory that is not aligned.
ALIGN_ELEMENTS = 64
_CHUNK_ELEMENTS = 1 << 20
# 2^64 divided by the golden ratio, as an odd int64: a hash factor that gives neighbouring numbers different bits.
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)


class FlatParameters:
    """Master weights and gradients of named parameters in two flat float32 vectors, `values` and `gradients`.

    Between tensors is padding, always zero. A float32 parameter becomes a view of `values`. A bfloat16 parameter keeps
    its memory: `changed` casts its master to it, and backward passes add to `gradients`. Raises ValueError for other
    dtypes.
    """

    # Called before `values` hold other weights for a while: waits for who still reads them (training/snapshots.py).
    before_change: Callable[[], object] = staticmethod(lambda: None)

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], device: torch.device, experts: Sequence[str] = ()
    ) -> None:
        """`experts` are `Policy.experts`."""
        self._experts = experts
        self._allocate({name: parameter.shape for name, parameter in sorted(parameters.items())}, device)
        self.wholes: Mapping[str, tuple[int, ...]] = self._shapes  # Tensor name → its shape, of shares the whole one's.
        self._copies: dict[str, nn.Parameter] = {}  # The bfloat16 parameters, by name.
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
                parameter.register_post_accumulate_grad_hook(moved_to(gradients[name]))  # type: ignore[no-untyped-call]
                self._copies[name] = parameter
        # True if no parameter of the network is a view of `values`.
        self._all_copied = len(self._copies) == len(self._shapes)

    def _allocate(self, shapes: Mapping[str, torch.Size], device: torch.device) -> None:
        self._shapes = shapes
        self._offsets, end = padded(shapes)
        self.values = nn.Parameter(torch.zeros(end, device=device))
        self.gradients = torch.zeros(end, device=device)
        self.values.grad = self.gradients

    def sections(self) -> dict[str, nn.Parameter]:
        """Returns the parts of `values` that the optimizer steps on their own: by expert; else "" → all of it."""
        starts = {
            expert: min((at for name, at in self._offsets.items() if name.startswith(f"{expert}.")), default=None)
            for expert in self._experts
        }
        if len(trained := {expert: at for expert, at in starts.items() if at is not None}) < 2:
            return {"": self.values}
        ends = [*list(trained.values())[1:], len(self.values)]
        sections = {}
        for (expert, start), end in zip(trained.items(), ends, strict=True):
            sections[expert] = nn.Parameter(self.values.data[start:end])
            sections[expert].grad = self.gradients[start:end]
        return sections

    @property
    def numel(self) -> int:
        return self.numel_of("")

    def numel_of(self, section: str) -> int:
        """Returns the number of elements of whole tensors without padding, in one of `sections`."""
        beginning = section and f"{section}."
        return sum(math.prod(shape) for name, shape in self.wholes.items() if name.startswith(beginning))

    sharded = False  # True for ShardedParameters: `values` is this rank's share.

    def norm(self, flat: Tensor) -> float:
        """Returns the L2 norm of a flat vector, computed in float64; of shares, of those of all ranks together."""
        return float(torch.linalg.vector_norm(flat, dtype=torch.float64))

    def total(self, count: int) -> int:
        """Returns a number of elements that was counted in flat vectors; of shares, in those of all ranks together."""
        return count

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        return {
            name: flat[self._offsets[name] : self._offsets[name] + shape.numel()].view(shape)
            for name, shape in self._shapes.items()
        }

    def pack(self, tensors: Mapping[str, Tensor], *, where: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns a new flat vector of the tensors. Raises ValueError for other names or shapes (`where`)."""
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
        return self.values.data.clone()

    def fingerprint(self) -> str:
        """Returns a hash of `values` (64 bits in hex), an integer sum in any order, by which ranks compare weights."""
        bits, sums = self.values.data.view(torch.int32), []
        for start in range(0, len(bits), _CHUNK_ELEMENTS):
            part = bits[start : start + _CHUNK_ELEMENTS].to(torch.int64)
            places = torch.arange(start, start + len(part), dtype=torch.int64, device=part.device)
            sums.append(part.mul_(places.mul_(_SPREAD).bitwise_or_(1)).sum())
        return f"{int(torch.stack(sums).sum()) % (1 << 64):016x}"

    def load(self, flat: Tensor) -> None:
        self.values.data.copy_(flat)
        self.changed()

    def changed(self) -> None:
        """Updates the bfloat16 parameters from `values`. Call it after each change of `values`."""
        self._compute_with(self.values.data)

    def _compute_with(self, flat: Tensor) -> None:
        if self._copies:
            views = self.named(flat)
            torch._foreach_copy_([copy.data for copy in self._copies.values()], [views[name] for name in self._copies])

    @contextmanager
    def swapped(self, flat: Tensor) -> Iterator[None]:
        """Context: inside, the network uses the weights `flat`. No backward pass may cross its start or end."""
        flat = flat.to(self.values.device)
        if self._all_copied:  # `values` need not change
            self._compute_with(flat)
            try:
                yield
            finally:
                self.changed()
            return
        self.before_change()
        live = self.snapshot()
        self.load(flat)
        try:
            yield
        finally:
            self.load(live)


def padded(shapes: Mapping[str, torch.Size]) -> tuple[dict[str, int], int]:
    """Returns tensor name → its first element in a flat vector, and the length of the vector."""
    offsets, end = dict[str, int](), 0
    for name, shape in shapes.items():
        offsets[name] = end
        end += -(-shape.numel() // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
    return offsets, end


def moved_to(gradient: Tensor, share_of: Callable[[Tensor], Tensor] = lambda whole: whole) -> Callable[[Tensor], None]:
    """Returns a hook that adds `share_of` a parameter's new gradient to `gradient` and frees it."""

    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            gradient.add_(share_of(parameter.grad))
            parameter.grad = None

    return hook
