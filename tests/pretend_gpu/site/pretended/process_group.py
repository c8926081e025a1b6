"""The process group "cuda:nccl,cpu:gloo" on pretended devices; device tensors go by gloo on a stream of their own.

Collectives are done when they return; they are ordered, and their memory is touched, on the group's stream.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from pretended.cuda import Stream, current_stream
from pretended.host_view import typed_view
from pretended.library import call
from pretended.nccl import refuse_shared_devices
from pretended.report import COLLECTIVE, tell

BACKEND = "pretended"


class Done(dist._Work):
    """Work that is over; who waits for it is held back on its stream behind it."""

    def __init__(self, outputs: Sequence[Tensor], on: Stream | None) -> None:
        super().__init__()
        self._outputs, self._on = list(outputs), on

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._on is not None:
            current_stream(self._on.device).wait_stream(self._on)
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class PretendedProcessGroup(dist.ProcessGroup):
    """Ranks that each have a device of their own."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = store
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._stream: Stream | None = None

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def pg_name(self) -> str:
        return str(c10d._world.pg_names[self])

    @property
    def group_name(self) -> str:
        return self.pg_name

    def _do(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], work: Callable[[], object]) -> Done:
        devices = {tensor.device for tensor in (*reads, *writes)}
        if len(devices) > 1:
            raise ValueError(f"Expected all tensors of a collective on one device, got {sorted(map(str, devices))}")
        device = devices.pop() if devices else torch.device("cpu")
        if device.type == "cpu":
            work()
            return Done(writes, None)
        tell(COLLECTIVE, name)
        on = self._stream = self._stream or self._connect(device)
        on.wait_stream(current_stream(device))
        for tensors, written in ((reads, 0), (writes, 1)):
            for tensor in tensors:
                place = (device.index, on.stream_id, tensor.data_ptr(), tensor.nbytes)
                call("touch", f"nccl {name}".encode(), *place, written)
        work()
        for tensor in (*reads, *writes):
            tensor.record_stream(on)
        return Done(writes, on)

    def _connect(self, device: torch.device) -> Stream:
        """Unit tests whose processes share a device say so by PRETEND_SHARED_DEVICE; NCCL would refuse them."""
        if not os.environ.get("PRETEND_SHARED_DEVICE"):
            refuse_shared_devices(self._store, self.rank(), self.size(), device)
        return Stream(device)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Done:
        views, options = [typed_view(tensor) for tensor in tensors], opts or dist.AllreduceOptions()
        return self._do("allreduce", tensors, tensors, lambda: self._gloo.allreduce(views, options).wait())

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Done:
        views, options = [typed_view(tensor) for tensor in tensors], opts or dist.BroadcastOptions()
        return self._do("broadcast", tensors, tensors, lambda: self._gloo.broadcast(views, options).wait())

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Done:
        gathered = [[typed_view(tensor) for tensor in group] for group in outputs]
        own = [typed_view(tensor) for tensor in inputs]
        written = [tensor for group in outputs for tensor in group]
        return self._do("allgather", inputs, written, lambda: self._gloo.allgather(gathered, own).wait())

    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Done:
        parts, own = list(typed_view(output).view(-1).chunk(self.size())), typed_view(source).view(-1)
        return self._do("allgather", [source], [output], lambda: self._gloo.allgather([parts], [own]).wait())

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Done:
        return self._allgather_base(output, source, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], sources: Sequence[Tensor], opts: Any = None
    ) -> Done:
        """By which a functional collective of C++ gathers one tensor, for example `DTensor.full_tensor`."""
        for output, source in zip(outputs, sources, strict=True):
            self._allgather_base(output, source)
        return Done(outputs, self._stream)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Done:
        options = dist.AllreduceOptions()
        if opts is not None:
            options.reduceOp = opts.reduceOp

        def work() -> None:
            whole = typed_view(source).clone().view(-1)
            self._gloo.allreduce([whole], options).wait()
            typed_view(output).view(-1).copy_(whole.chunk(self.size())[self.rank()])

        return self._do("reduce_scatter", [source], [output], work)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Done:
        return self._reduce_scatter_base(output, source, opts)

    def barrier(self, opts: Any = None) -> Done:
        return self._do("barrier", [], [], lambda: self._gloo.barrier().wait())


_init = dist.init_process_group


def init_process_group(backend: str | None = None, *arguments: Any, **options: Any) -> None:
    """torch's, with the pretended group for what has NCCL in it."""
    if backend is not None and "nccl" in backend:
        backend = BACKEND
        device = options.pop("device_id", None)
        if device is not None and torch.device(device).index is None:
            raise ValueError(f"init_process_group's device_id needs an index, got {device}")
    _init(backend, *arguments, **options)


def install() -> None:
    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> PretendedProcessGroup:
        return PretendedProcessGroup(store, rank, size, timeout)

    dist.Backend.register_backend(BACKEND, make, devices=["cpu", "cuda"])
    dist.init_process_group = c10d.init_process_group = init_process_group
