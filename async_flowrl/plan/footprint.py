"""Peak tensor memory of a computation, counted while it runs; on the meta device too.

Every storage that an operation makes counts from then until nothing refers to it any more, so that what autograd keeps,
what checkpointing recomputes and what is only there in passing are all seen. Views count nothing; of a sharded tensor
the shard counts.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, bytes of storages made by tensor operations: `live` now, `peak` so far."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in [out] if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._known:
                self._count(tensor.untyped_storage(), args, kwargs)
        return out

    def _count(self, storage: Any, args: Any, kwargs: Any) -> None:
        """What an operation returns but was given, a view of a weight say, is not new."""
        key, size = storage._cdata, storage.nbytes()
        if any(isinstance(t, Tensor) and t.untyped_storage()._cdata == key for t in tree_leaves((args, kwargs))):
            return
        self._known[key] = weakref.ref(storage, lambda _: self._gone(key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int, size: int) -> None:
        self.live -= size
        del self._known[key]


@contextmanager
def fused_attention() -> Iterator[None]:
    """Inside, attention needs what fused kernels need, O(tokens), on devices that have no such kernel of their own."""
    own = nn.functional.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        return cast("Tensor", _FusedShapes.apply(query, key, value))  # type: ignore[no-untyped-call]

    nn.functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = own


class _FusedShapes(torch.autograd.Function):
    """Shapes of a fused attention: the inputs, the output and a float32 number per row are kept for backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, rows)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
