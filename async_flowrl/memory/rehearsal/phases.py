"""Ledger of a rehearsed process: memory, kernels, FLOPs and collectives, by phase (such as `forward`).

Of memory, every storage that an operation makes counts until nothing refers to it any more. So tensors saved by
autograd, recomputed by checkpointing, or used only briefly are all included. A storage that is resized counts with its
new size (FSDP2 resizes the buffers that it gathers). Views do not count; of a sharded tensor the local shard counts.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from async_flowrl.observability.flops import FORMULAS

# Prefixes of the names of operations that run no kernel. Views run none either.
_ALLOCATING = ("empty", "detach", "lift_fresh", "alias", "_to_copy_meta", "is_pinned", "set_", "record_stream")
# Collective → bytes that a rank sends, from the bytes of its largest tensor and the number of ranks.
_SENT = {
    # Bytes that a ring algorithm sends, for n ranks.
    "_allgather_base_": lambda size, n: size * (n - 1) / n,
    "allgather_": lambda size, n: size * (n - 1),
    "_reduce_scatter_base_": lambda size, n: size * (n - 1) / n,
    "allreduce_": lambda size, n: 2 * size * (n - 1) / n,
    "broadcast_": lambda size, n: size,
}

# FLOPs, bytes read and written, and dtype of matrix products (None for kernels without).
Kernel = tuple[float, int, torch.dtype | None]


@dataclass
class Phase:
    """Totals of all phases with one name. All sizes are in bytes."""

    name: str
    resident: int = 0  # Live bytes when a phase was entered; the maximum over all entries.
    peak: int = 0  # Most live bytes at the same time, without those of phases inside this one.
    entered: int = 0  # Number of entries.
    kernels: Counter[Kernel] = field(default_factory=Counter)  # Kernel → number of launches.
    # Operation → bytes of the largest tensor of each call, added up.
    collectives: Counter[str] = field(default_factory=Counter)
    sent: float = 0.0  # Bytes that this rank sends in collectives.

    @property
    def flops(self) -> float:
        return sum(flops * times for (flops, _, _), times in self.kernels.items())


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that counts one rank of `world` ranks, by phase; bytes of storages are `live` now, `peak` so far.

    A storage that was made earlier counts only with the bytes by which it is resized. Code that reads a number from a
    fake tensor gets 1, or True.
    """

    def __init__(self, world: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.world = world
        self.phases: dict[str, Phase] = {}
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}  # Key of a storage → its bytes.
        self._open: list[Phase] = []
        self._aside = False

    def __enter__(self) -> "Ledger":
        own = self._own_resize = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            before = storage.nbytes()
            own(storage, size)
            self._add(storage, storage.nbytes() - before)
            return storage

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        return cast("Ledger", super().__enter__())  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._own_resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Context whose operations are counted in the phase `name`, except those of phases inside it."""
        phase = self.phases.setdefault(name, Phase(name))
        phase.entered += 1
        phase.resident = max(phase.resident, self.live)
        outer, self.peak = self.peak, self.live
        self._open.append(phase)
        try:
            yield phase
        finally:
            self._open.pop()
            phase.peak = max(phase.peak, self.peak)
            self.peak = max(outer, self.live)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context whose tensors count as host memory and whose operations are not counted."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    def moved(self, size: int) -> None:
        """Adds `size` bytes to the live device memory; a negative size removes them."""
        self.live += size
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        kwargs = kwargs or {}
        # The two most frequent kinds of calls make no storage, and the ways of FakeTensorMode take long for them.
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func.is_view and type(args[0]) is FakeTensor and args[0].constant is None:
            return _view(func, args, kwargs)
        out = func(*args, **kwargs)
        for tensor in [out] if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            if isinstance(tensor, Tensor) and self.counts(tensor):
                self._count(tensor.untyped_storage(), args, kwargs)
        if self._open and not self._aside:
            self._book(func, args, kwargs, out)
        return out

    def counts(self, tensor: Tensor) -> bool:
        """Whether the storage is to be counted: not on the meta device, and not made inside `aside`."""
        return not self._aside and not _on_meta(tensor)

    def _count(self, storage: Any, args: Any, kwargs: Any) -> None:
        if (key := storage._cdata) in self._sizes:
            return
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if all(tensor.untyped_storage()._cdata != key for tensor in tensors):
            self._add(storage, storage.nbytes())

    def _add(self, storage: Any, size: int) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._gone, key).atexit = False
        self._sizes[key] += size
        self.moved(size)

    def _gone(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def _book(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        phase, name = self._open[-1], func._schema.name.partition("::")[2]
        given = _tensors((args, kwargs))
        if func.namespace == "c10d":
            size = max((_bytes(tensor) for tensor in given), default=0)
            phase.collectives[name] += size
            phase.sent += _SENT[name](size, self.world) if name in _SENT else size
            return
        made = _tensors(out)
        tensors, works = [*given, *made], made or func._schema.is_mutable
        if not works or func.is_view or name.startswith(_ALLOCATING) or func.namespace == "prim":
            return
        moved = sum({id(tensor): _bytes(tensor) for tensor in tensors}.values())
        formula = FORMULAS.get(func._overloadpacket)
        flops, dtype = 0.0, None
        if formula is not None:
            flops = float(formula(*args, **kwargs, out_val=out))
            dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
        phase.kernels[flops, moved, dtype] += 1


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    # Makes the view of a fake tensor without FakeTensorMode, whose cache takes longer than a view.
    mode, device = args[0].fake_mode, args[0].fake_device
    with in_kernel_invocation_manager(mode):
        out = func(*args, **kwargs)
    return (
        FakeTensor(mode, out, device) if isinstance(out, Tensor) else [FakeTensor(mode, each, device) for each in out]
    )


def _on_meta(tensor: Tensor) -> bool:
    # A fake tensor knows its own device, and asking torch for it takes long.
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device.type == "meta"


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and not _on_meta(leaf)]


def _bytes(tensor: Tensor) -> int:
    # Returns the bytes that a kernel reads of a tensor: an expanded tensor repeats a smaller storage.
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
