"""The layout of tune=full with trainer.shard=full: FSDP2 shards the trained weights, in float32, over all ranks."""

import warnings
from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from async_flowrl.policies.base import Policy
from async_flowrl.training.fsdp import World
from checkpoint_engine.gather import shard_rows


def shard_trained(policy: Policy, trained: set[nn.Parameter], world: World, device: torch.device) -> str:
    """Shards the transformer block by block; returns in words what it did. Its parameters are on the meta device yet.

    `trained` become float32. Blocks are gathered in the dtype that the network computes in; gradients are cast to
    float32 before a reduce-scatter adds them up over the ranks, without dividing the sum. Frozen parameters are
    sharded, too, in their own dtype. Raises ValueError for parameters of several dtypes, because a gathered block has
    one, and where a rank would have nothing to train.
    """
    transformer = policy.transformer
    check_rows([tuple(parameter.shape) for parameter in trained], world.size)
    dtype = one_dtype(transformer)
    for parameter in trained:
        parameter.data = parameter.data.float()
    # A block's output is a view, but the networks never write to it in place.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    mesh = init_device_mesh(device.type, (world.size,), mesh_dim_names=("shard",))
    # The network gets its inputs as an unsharded one does: a timestep in float32 must not be rounded.
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in [*policy.blocks, transformer]:
        fully_shard(module, mesh=mesh, mp_policy=precision)
    for module in transformer.modules():
        if isinstance(module, FSDPModule):
            # By default it is the mean over the ranks, by an operation that gloo does not have.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return f"fsdp2 over {world.size}, trained weights and optimizer with it"


def check_rows(shapes: Collection[tuple[int, ...]], ranks: int) -> None:
    """Raises ValueError, equal on all ranks, if the last one would have no row of any trained tensor."""
    # Earlier ranks have no fewer rows of a tensor than later ones. Of a number without rows FSDP2 says so itself.
    if not any(not shape or shard_rows(shape[0], ranks, ranks - 1) for shape in shapes):
        most = max(shape[0] for shape in shapes)
        raise ValueError(
            f"tune=full with trainer.shard=full gives each rank rows of what is trained, and {ranks} ranks are too "
            f"many for tensors of at most {most} rows: set trainer.shard=none, or freeze less by full.freeze"
        )


def one_dtype(transformer: nn.Module) -> torch.dtype:
    """Returns the dtype of all parameters. Raises ValueError, which names one that differs from most."""
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, parameter in transformer.named_parameters():
        by_dtype.setdefault(parameter.dtype, []).append(name)
    most = max(by_dtype, key=lambda dtype: len(by_dtype[dtype]))
    if other := [(dtype, names) for dtype, names in by_dtype.items() if dtype != most]:
        dtype, names = other[0]
        raise ValueError(
            f"tune=full with trainer.shard=full gathers a block in one dtype, but {names[0]} is {dtype} and most are "
            f"{most} ({len(names)} differ): set trainer.shard=none, or model.dtype=float32"
        )
    return most


def host_mesh(world: World) -> DeviceMesh:
    """Returns the ranks as a mesh of hosts, for shares in host memory."""
    return init_device_mesh("cpu", (world.size,), mesh_dim_names=("shard",))
