"""Counter of the peak tensor memory of a computation, also on fake tensors and on the meta device.

Every storage that an operation makes counts until nothing refers to it any more. So tensors saved by autograd,
recomputed by checkpointing, or used only briefly are all included. A storage that is resized counts with its new size
(FSDP2 resizes the buffers that it gathers). Views do not count; of a sharded tensor the local shard counts.
"""

import weakref
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that counts the bytes of storages made by tensor operations inside it: `live` now, `peak` so far.

    A storage that was made earlier counts only with the bytes by which it is resized.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._own_resize = torch.UntypedStorage.resize_

    def __enter__(self) -> "Allocations":
        self._own_resize = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            return self._resize(storage, size)

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        return cast("Allocations", super().__enter__())  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._own_resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in [out] if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            if isinstance(tensor, Tensor) and self._matters(tensor):
                self._count(tensor.untyped_storage(), args, kwargs)
        return out

    def _matters(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is not counted yet."""
        return tensor.untyped_storage()._cdata not in self._sizes

    def _count(self, storage: Any, args: Any, kwargs: Any) -> None:
        """Counts a storage that an operation returns, unless an argument has the same one, as with views."""
        key = storage._cdata
        if any(isinstance(t, Tensor) and t.untyped_storage()._cdata == key for t in tree_leaves((args, kwargs))):
            return
        self._add(storage, storage.nbytes())

    def _resize(self, storage: Any, size: int) -> Any:
        before = storage.nbytes()
        self._own_resize(storage, size)
        self._add(storage, storage.nbytes() - before)
        return storage

    def _add(self, storage: Any, size: int) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._watched[key] = weakref.ref(storage, lambda _: self._gone(key))
        self._sizes[key] = self._sizes.get(key, 0) + size
        self.live += size
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        del self._watched[key]
