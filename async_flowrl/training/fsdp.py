"""The frozen base on the trainer ranks, whole or spread by FSDP2; sharded.py has trained weights in shares."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.training.parts import World
from separation.rendezvous import neighbours


def free_gathered(network: nn.Module) -> None:
    """Frees gathered parameters, which FSDP2 keeps after a forward pass that has no backward pass."""
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def replica_mesh(world: World, device: torch.device) -> DeviceMesh:
    """Returns the mesh of this rank's replica, whose collectives have the time limit of the default group."""
    # The base is frozen wherever there are several replicas, so they need no collectives between them. The groups of a
    # mesh of two dimensions would also have torch's own limit, which is 10 minutes for NCCL.
    group: Any = dist.group.WORLD if world.per_replica == world.size else neighbours(world.per_replica)
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=("shard",))


def shard(
    policy: PipelinePolicy,
    adapter: set[nn.Parameter],
    world: World,
    *,
    device: torch.device,
    sharded: bool,
    offload: bool,
) -> str:
    """Shards the base over the ranks block by block with FSDP2, or leaves it whole; returns in words what it did.

    With a process group the base is still on the meta device (`stream_base` fills it). The trained tensors (`adapter`)
    stay out: one all-reduce of their flat gradient replaces a collective per tensor.
    """
    transformer = policy.transformer
    if not world.joined:
        if offload:
            raise ValueError("trainer.cpu_offload needs FSDP2, so the rank must join a process group first")
        transformer.to(device)
        return "one process"
    if not sharded:
        for buffer in transformer.buffers():
            buffer.data = buffer.data.to(device)
        return f"whole on each of {world.size}"
    # A block's output is a view, but the networks never write to it in place.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    replicas, mesh = world.size // world.per_replica, replica_mesh(world, device)
    policy_offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    for module in [*policy.blocks, transformer]:
        fully_shard(module, mesh=mesh, ignored_params=adapter, offload_policy=policy_offload)
    copies = f", {replicas} times" if replicas > 1 else ""
    return f"fsdp2 over {world.per_replica}{copies}" + (", base offloaded" if offload else "")


def prefetch(policy: PipelinePolicy, ahead: int) -> None:
    """Makes FSDP gather the next `ahead` blocks while one computes, forward and backward; without FSDP does nothing."""
    blocks = [block for block in policy.blocks if isinstance(block, FSDPModule)]
    if ahead < 1 or not blocks:
        return
    # An expert's last block must not gather the next expert's first one, which is perhaps not used.
    of_expert = len(blocks) // max(1, len(policy.experts))
    for start in range(0, len(blocks), of_expert):
        own = blocks[start : start + of_expert]
        for order, name in ((own, "forward"), (own[::-1], "backward")):
            for index, block in enumerate(order):
                getattr(block, f"set_modules_to_{name}_prefetch")(order[index + 1 : index + 1 + ahead])


def checkpoint_blocks(policy: PipelinePolicy, how: str) -> None:
    """Makes blocks recompute activations in the backward pass, as `how` says; call it before `shard`."""
    if how == "none":
        return
    for block in policy.blocks[:: 1 if how == "full" else int(how.removeprefix("every_"))]:
        block.forward = _checkpointed(block.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    # torch.compile needs a Python frame of its own: it would step over a functools.partial and compile nothing.
    def called(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return called
