"""Ledger of a rehearsed process: memory, kernels, FLOPs and collectives, by phase (such as `forward`).

Of memory, every storage that an operation makes counts until nothing refers to it any more. So tensors saved by
autograd, recomputed by checkpointing, or used only briefly are all included. A storage that is resized counts with its
new size (FSDP2 resizes the buffers that it gathers). Views do not count; of a sharded tensor the local shard counts.
"""

import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from async_flowrl.memory.rehearsal.operations import Call, stored_bytes
from async_flowrl.observability.flops import FORMULAS

# Prefixes of the names of operations that run no kernel. Views run none either.
_ALLOCATING = (
    "empty",
    "detach",
    "lift_fresh",
    "alias",
    "_unsafe_view",
    "_to_copy_meta",
    "is_pinned",
    "set_",
    "record_stream",
)
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
# Key of a call → the layout of what it makes, and its kernel.
known_calls: dict[Hashable, tuple[Any, Kernel | None]] = {}
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Nothing is compiled in a rehearsal, and what torch wraps around each operation takes time.

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
        if (func.is_view or func is _UNSAFE_VIEW) and type(args[0]) is FakeTensor and args[0].constant is None:
            return _view(func, args, kwargs)
        # FakeTensorMode remembers calls, too, but computing its keys takes most of the time of a rehearsal.
        mode = torch._C._get_dispatch_mode(_FAKE)
        call = None if mode is None else Call.of(func, args, kwargs)
        books = bool(self._open) and not self._aside
        if call is not None and call.key in known_calls:
            layout, kernel = known_calls[call.key]
            out, given = call.output(layout, mode), call.tensors
        else:
            out, given = func(*args, **kwargs), tree_leaves((args, kwargs))
            kernel = _kernel(func, args, kwargs, out) if books or call is not None else None
            # Operations such as `squeeze_` change the layout of an argument; these are run every time.
            if call is not None and call == Call.of(func, args, kwargs) and (layout := call.layout(out)) is not None:
                known_calls[call.key] = layout, kernel
        self._count(out, given)
        if books and func.namespace == "c10d":
            self._send(_name(func), _on_devices(given))
        elif books and kernel is not None:
            self._open[-1].kernels[kernel] += 1
        return out

    def counts(self, tensor: Tensor) -> bool:
        """Whether the storage is to be counted: not on the meta device, and not made inside `aside`."""
        return not self._aside and not _on_meta(tensor)

    def _count(self, out: Any, given: Sequence[Any]) -> None:
        for tensor in [out] if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            if isinstance(tensor, Tensor) and self.counts(tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                others = (other for other in given if isinstance(other, Tensor))
                if key not in self._sizes and all(other.untyped_storage()._cdata != key for other in others):
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

    def _send(self, name: str, tensors: Sequence[Tensor]) -> None:
        phase, size = self._open[-1], max((stored_bytes(tensor) for tensor in tensors), default=0)
        phase.collectives[name] += size
        phase.sent += _SENT[name](size, self.world) if name in _SENT else size


def _kernel(func: Any, args: Any, kwargs: Any, out: Any) -> Kernel | None:
    # Returns the kernel that an operation runs, or None for one that runs none.
    name, made = _name(func), _on_devices(tree_leaves(out))
    works = made or func._schema.is_mutable
    if not works or func.is_view or name.startswith(_ALLOCATING) or func.namespace in ("prim", "c10d"):
        return None
    tensors = [*_on_devices(tree_leaves((args, kwargs))), *made]
    moved = sum({id(tensor): stored_bytes(tensor) for tensor in tensors}.values())
    formula = FORMULAS.get(func._overloadpacket)
    if formula is None:
        return 0.0, moved, None
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
    return float(formula(*args, **kwargs, out_val=out)), moved, dtype


def _name(func: Any) -> str:
    return str(func._schema.name).partition("::")[2]


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


def _on_devices(leaves: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and not _on_meta(leaf)]
