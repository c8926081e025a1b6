"""Calls of operations on fake tensors, and the layouts of what they make, so that no call need be run twice."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

# Types of arguments that are known by their value. The state of a generator changes no layout.
_PLAIN = {type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format}


@dataclass(frozen=True)
class Fresh:
    """Layout of an output with a storage of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def tensor(self, mode: FakeTensorMode) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return FakeTensor(mode, meta, self.device)


@dataclass(frozen=True)
class Argument:
    """An output that is one of the call's tensors, by its place among them."""

    place: int


@dataclass
class Call:
    """Call of an operator, known by the values of its arguments and by the layouts of its tensors."""

    key: Hashable
    tensors: list[Tensor]  # Each once.

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Call | None":
        """Returns the call, or None if what it makes may depend on more than that."""
        # `set_` changes which storage a tensor has.
        if func.namespace != "aten" or func._opname == "set_" or not func._schema.returns:
            return None
        tensors: list[Tensor] = []
        try:
            given = _key(args, tensors), tuple(kwargs), _key(kwargs.values(), tensors)
        except TypeError:
            return None
        return cls((func, torch.get_default_dtype(), *given), tensors)

    def layout(self, out: Any) -> Any:
        """Returns what the call made, with layouts in place of tensors; None if one of them is a view."""
        return None if any(map(self._is_view, tree_leaves(out))) else tree_map_only(Tensor, self._layout, out)

    def output(self, layout: Any, mode: FakeTensorMode) -> Any:
        """Returns what the call makes, by the layout of what one like it made."""
        if type(layout) is Fresh:
            return layout.tensor(mode)
        if type(layout) is Argument:
            return self.tensors[layout.place]
        return tree_map_only((Fresh, Argument), lambda each: self.output(each, mode), layout)

    def _is_view(self, out: Any) -> bool:
        if not isinstance(out, Tensor) or isinstance(fresh := self._layout(out), Argument):
            return False
        if type(out) is not FakeTensor:
            return True
        storage = out.untyped_storage()
        shared = any(tensor.untyped_storage()._cdata == storage._cdata for tensor in self.tensors)
        return shared or fresh.tensor(out.fake_mode).untyped_storage().nbytes() != storage.nbytes()

    def _layout(self, out: Any) -> Fresh | Argument:
        place = next((place for place, tensor in enumerate(self.tensors) if tensor is out), None)
        return Fresh(out.shape, out.stride(), out.dtype, out.device) if place is None else Argument(place)


def stored_bytes(tensor: Tensor) -> int:
    """Returns the bytes that a kernel reads of a tensor: an expanded tensor repeats a smaller storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _key(values: Iterable[Any], tensors: list[Tensor]) -> Hashable:
    # Adds the tensors to `tensors`. Raises TypeError for an argument that is neither a fake tensor nor a plain value.
    parts: list[Hashable] = []
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            place = next((place for place, tensor in enumerate(tensors) if tensor is value), len(tensors))
            if place == len(tensors):
                tensors.append(value)
            shape, stride = value.shape, value.stride()
            offset, size = value.storage_offset(), stored_bytes(value)
            parts.append((place, shape, stride, offset, value.dtype, value.fake_device, size))
        elif kind in _PLAIN:
            parts.append((kind, value))
        elif kind is list or kind is tuple:
            parts.append(_key(value, tensors))
        elif kind is torch.Generator:
            parts.append(torch.Generator)
        else:
            raise TypeError(f"an argument is of {kind}")
    return tuple(parts)
