"""Environment in which a worker's real code runs on fake tensors, without weights, devices or other ranks.

A FakeTensorMode computes shapes instead of values, torch's fake process group answers for the other ranks at once, and
functions that read files, ask CUDA or need values are replaced by stand-ins. The device of the fake tensors is `cpu`,
because a torch without CUDA cannot run a backward pass on fake `cuda` tensors.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, partialmethod
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore

from async_flowrl import transfers
from async_flowrl.algorithms import dpo
from async_flowrl.algorithms.base import MicroBatch
from async_flowrl.memory.rehearsal.model import FakeModel
from async_flowrl.memory.rehearsal.phases import Ledger
from async_flowrl.observability.flops import Meter
from async_flowrl.policies import one_base
from async_flowrl.training import differentiable_reward, exact, fsdp, rank_model, sharded
from async_flowrl.training.snapshots import Snapshots
from async_flowrl.types import Prompt
from checkpoint_engine import publisher, receiver


@contextmanager
def rehearsed_process(model: FakeModel, ledger: Ledger, *, joined: bool) -> Iterator[None]:
    """Context in which this process acts as rank 0 of the ledger's ranks (`joined`: in a process group) and it counts.

    Raises RuntimeError if this process is in a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("a rehearsal needs a process that has joined no process group")
    with ExitStack() as stack:
        stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        stack.enter_context(mock.patch.dict(os.environ))  # restores it
        if joined:
            dist.init_process_group("fake", rank=0, world_size=ledger.world, store=FakeStore())
            stack.callback(dist.destroy_process_group)
        for owner, name, stand_in in _stand_ins(model, ledger):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(ledger)
        yield


def _stand_ins(model: FakeModel, ledger: Ledger) -> list[tuple[Any, str, Any]]:
    # Returns (owner, attribute, stand-in); mock raises AttributeError for an attribute that no longer exists.
    load_policy = partial(model.load_policy, ledger.aside)
    return [
        (torch.cuda, "is_available", lambda: False),
        (transfers, "HOST", torch.device("meta")),
        (torch.Tensor, "numpy", _numpy),
        (torch.Tensor, "data_ptr", _data_ptr),
        (nn.Module, "_apply", _apply),
        (fsdp, "replica_mesh", _outside(fsdp.replica_mesh)),
        (sharded, "replica_mesh", _outside(fsdp.replica_mesh)),
        (dist, "new_group", partial(_new_group, dist.new_group)),
        (rank_model, "load_policy", load_policy),
        (rank_model, "base_digest", lambda _: ""),
        (rank_model, "digest_of_stored", lambda *_: ""),
        (rank_model, "check_schedule", lambda *_, **__: None),
        (rank_model, "weights_of", lambda _: _Files()),
        (rank_model, "_same_names", lambda *_: None),
        (one_base, "load_policy", load_policy),
        (differentiable_reward, "load_policy", load_policy),
        (differentiable_reward, "differentiable_terms", lambda _: [(1.0, _mean)]),
        (one_base, "base_digest", lambda _: ""),
        (receiver, "in_host_memory", partial(_in_host_memory, ledger)),
        (publisher.HostBuffers, "_allocate", partialmethod(_allocate, ledger)),
        (exact, "_CHUNK", dict.fromkeys(exact._CHUNK, exact._CHUNK["cuda"])),
        (exact, "from_digits", lambda _: exact.Account()),
        (exact.Account, "holds", lambda *_: True),
        (dpo, "pairs", _pairs),
        (Meter, "measure", lambda *_: nullcontext()),
        (Meter, "flops", lambda *_: None),
        (Snapshots, "begin", lambda _: 0),  # It copies to host memory, in a thread that knows no fake tensors.
    ]


def _mean(images: Tensor, prompt: Prompt) -> Tensor:
    # Replaces a reward, whose memory is planned as it states it.
    return images.flatten(1).mean(dim=1)


def _pairs(batch: MicroBatch) -> tuple[list[int], list[int]]:
    # Returns (winners, losers) of the pairs by place, because fake rewards have no values to compare.
    rows = len(batch.steps)
    return list(range(0, rows, 2)), list(range(1, rows, 2))


class _Files(dict[str, float]):
    def __missing__(self, name: str) -> Tensor:
        return torch.zeros(())


def _new_group(own: Any, backend: str, **_: Any) -> Any:
    with unset_fake_temporarily():
        return own(backend="fake")


def _in_host_memory(ledger: Ledger, tensor: Tensor) -> Tensor:
    with ledger.aside():
        return tensor.clone()


_own_allocate = publisher.HostBuffers._allocate


def _allocate(buffers: Any, ledger: Ledger) -> Any:
    # Pinned buffers are in host memory. Others stand for memory of the fake tensors' device, which is called `cpu`.
    with ledger.aside() if buffers._pinned else nullcontext():
        return _own_allocate(buffers)


def _outside(call: Any) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return call(*args, **kwargs)

    return called


_own_numpy, _own_data_ptr = Tensor.numpy, Tensor.data_ptr


def _numpy(tensor: Tensor, **options: Any) -> Any:
    # Returns zeros for a fake tensor; untouched pages of zeros take no physical memory.
    if not isinstance(tensor, FakeTensor):
        with unset_fake_temporarily():
            return _own_numpy(tensor, **options)
    return np.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _data_ptr(tensor: Tensor) -> int:
    # Returns for a fake tensor an address that no other storage has.
    if not isinstance(tensor, FakeTensor):
        return _own_data_ptr(tensor)
    storage: int = tensor.untyped_storage()._cdata
    return int((storage << 40) + tensor.storage_offset() * tensor.element_size())


def _apply(module: Any, fn: Any, recurse: bool = True) -> Any:
    # As `nn.Module._apply`, but replaces a parameter that changes its device, because fake ones cannot be swapped.
    if recurse:
        for child in module.children():
            child._apply(fn)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        applied = fn(parameter.detach())
        if applied.device == parameter.device:
            parameter.data = applied
        else:
            module._parameters[name] = nn.Parameter(applied, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module
