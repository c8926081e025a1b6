"""The trainer ranks: FSDP2 shards the frozen base, or each holds all of it; the adapter is summed once per step."""

import functools
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from async_flowrl.config.schema import FULL, Config
from async_flowrl.policies.base import Policy
from async_flowrl.training.parts import Place
from separation.rendezvous import sum_ranks

WHOLE_SHARE = 0.6
"""trainer.shard=auto: largest share of a GPU's memory that base, adapter and optimizer may take where every rank holds
all of the base; activations have the rest."""


@dataclass(frozen=True)
class World(Place):
    """This rank's place among the trainer ranks; alone where no process group was joined."""

    joined: bool = False

    @classmethod
    def current(cls) -> "World":
        """As the default process group of torch.distributed says."""
        if not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(), dist.get_world_size(), joined=True)

    def sum(self, values: Tensor) -> None:
        """Sums `values` over the ranks that live, in place; all end up with the same bits.

        A rank that has left the group, because no other lives, has the sum already.
        """
        if self.size > 1:
            sum_ranks(values)

    def gather(self, values: Tensor) -> list[Tensor]:
        """`values` of every rank, in rank order."""
        if self.size == 1:
            return [values]
        by_rank = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(by_rank, values)
        return by_rank


def let_go(network: nn.Module) -> None:
    """Frees what was gathered for a forward pass that no backward pass followed; nothing where nothing is sharded.

    FSDP2 keeps the outermost group of parameters from a forward pass to its backward pass.
    """
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_sharded(config: Config, base_bytes: int, memory: int | None, adapter_bytes: int = 0) -> bool:
    """Whether ranks that joined a process group hold a share of the base each, by `trainer.shard`.

    `memory`: bytes of the smallest GPU among theirs, None where they train on the CPU: there it does not decide.
    `adapter_bytes`: of what every rank holds whole anyway, the adapter with its optimizer, sums and versions.
    """
    trainer = config.trainer
    if config.tune == FULL:
        return False  # each rank steps all of the weights
    if trainer.cpu_offload or trainer.shard in ("full", "hybrid"):
        return True
    if trainer.shard == "none":
        return False
    # A rollout worker on the same device holds the base, too.
    copies = 2 if config.placement == "colocated" else 1
    return memory is not None and copies * base_bytes + adapter_bytes > WHOLE_SHARE * memory


def resident_bytes(config: Config, trained: int) -> int:
    """Bytes that a rank of several holds all the time for so many trained parameters, versions as if in float32.

    Values, gradient and two moments in float32; the sum in int64 and its whole over the ranks; versions that are kept
    or sent; averages and the weights at the start of the batch, where the run has them.
    """
    trainer = config.trainer
    whole = (config.max_staleness + 1) + 2 + (trainer.ema_decay is not None) + (trainer.updates_per_batch > 1) + 1
    return trained * (4 * 4 + 2 * 8 + 4 * whole)


def ranks_per_replica(config: Config, ranks: int, *, sharded: bool) -> int:
    """How many of the ranks hold one copy of the base between them.

    With `trainer.shard=auto` those of a node, where `trainer.workers_per_node` says that there are several: gathering
    a block then stays inside it.
    """
    trainer = config.trainer
    if not sharded:
        return 1
    if trainer.shard == "auto" and trainer.workers_per_node and trainer.workers_per_node > 1:
        return trainer.workers_per_node
    return (trainer.shard_size or ranks) if trainer.shard == "hybrid" else ranks


def smallest_memory(world: World, device: torch.device) -> int | None:
    """Bytes of the smallest GPU among those of all ranks, the same number on each; None on the CPU."""
    if device.type != "cuda":
        return None
    mine = torch.tensor([torch.cuda.get_device_properties(device).total_memory], device=device)
    return min(int(memory) for memory in world.gather(mine))


def shard(
    policy: Policy, adapter: set[nn.Parameter], world: World, *, device: torch.device, sharded: bool, offload: bool
) -> str:
    """Shards the base over the ranks block by block, or leaves it whole and on `device`. Says which it did.

    Of ranks that joined a process group the base is still on the meta device, and `stream_base` fills it. The adapter
    stays out of FSDP as plain float32 tensors: it is small, every rank steps it the same way, and one all-reduce of its
    flat gradient replaces a collective per tensor.
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
    # True of a block's output, but nothing in the networks writes to it in place.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    replicas = world.size // world.per_replica
    if replicas == 1:
        mesh = init_device_mesh(device.type, (world.size,), mesh_dim_names=("shard",))
    else:
        # The base is frozen, so replicas have nothing to say to each other: each rank needs its own replica's ranks.
        shape, names = (replicas, world.per_replica), ("replica", "shard")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)["shard"]
    policy_offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    for module in [*policy.blocks, transformer]:
        fully_shard(module, mesh=mesh, ignored_params=adapter, offload_policy=policy_offload)
    copies = f", {replicas} times" if replicas > 1 else ""
    return f"fsdp2 over {world.per_replica}{copies}" + (", base offloaded" if offload else "")


def prefetch(policy: Policy, ahead: int) -> None:
    """Gathers `ahead` blocks while one computes, forward and backward; nothing to do where the base is not sharded."""
    blocks = [block for block in policy.blocks if isinstance(block, FSDPModule)]
    if ahead < 1:
        return
    for order, name in ((blocks, "forward"), (blocks[::-1], "backward")):
        for place, block in enumerate(order):
            getattr(block, f"set_modules_to_{name}_prefetch")(order[place + 1 : place + 1 + ahead])


def unplanned(how: str, device: torch.device) -> str:
    """`trainer.gradient_checkpointing` where nobody has decided what `auto` is: what is sure to need least on a GPU."""
    if how != "auto":
        return how
    return "full" if device.type == "cuda" else "none"


def checkpoint_blocks(policy: Policy, how: str) -> None:
    """Blocks recompute their activations in the backward pass, by `trainer.gradient_checkpointing`: every n-th, or all.

    Same weights, less memory, about a third more time for those blocks. Wraps `forward` itself, not the module, so that
    names stay and FSDP's hooks run once. Call before `shard`.
    """
    if how == "none":
        return
    for block in policy.blocks[:: 1 if how == "full" else int(how.removeprefix("every_"))]:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
