"""Trained weights in shares, for tune=full with trainer.shard=full: their layout, parameters, and checkpoints.

FSDP2 gives each rank some rows of each tensor. What is elementwise (optimizer, averages, versions) needs no other rank;
norms and counts are added up over the ranks in the order of their numbers, so all get the same bits.
"""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.training.checkpoint import (
    RANKS,
    Checkpoint,
    Description,
    begin_checkpoint,
    complete,
    end_checkpoint,
    read_share,
    verify_share,
    write_share,
)
from async_flowrl.training.flat import FlatParameters, moved_to
from async_flowrl.training.fsdp import free_gathered, replica_mesh
from async_flowrl.training.parts import World
from checkpoint_engine import weights_digest
from checkpoint_engine.digest import combine
from checkpoint_engine.gather import shard_rows


class ShardedParameters(FlatParameters):
    """As FlatParameters, but vectors and named tensors are this rank's share: shapes [rows of this rank, ...].

    The network's parameters are float32 copies of `values`, from which FSDP2 gathers blocks. `numel` counts whole
    tensors. All ranks must call `norm`, `total` and `fingerprint` together.
    """

    sharded = True

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], policy: PipelinePolicy, world: World, device: torch.device
    ) -> None:
        """`parameters` are FSDP2's, with their weights, by layout name; the network of `policy` has them."""
        self._network, self.world, self._all_copied = policy.transformer, world, True
        self._experts = policy.experts
        self._locals = {name: local_of(parameter) for name, parameter in sorted(parameters.items())}
        # Tensor name → shape of the whole tensor.
        self.wholes = {name: tuple(parameter.shape) for name, parameter in sorted(parameters.items())}
        self._allocate({name: local.shape for name, local in self._locals.items()}, device)
        gradients = self.named(self.gradients)
        for name, view in self.named(self.values.data).items():
            view.copy_(self._locals[name])
            hook = moved_to(gradients[name], local_of)
            parameters[name].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @staticmethod
    def gathered(parameter: Tensor) -> Tensor:
        """Returns a whole parameter of the network, float32 or as it is frozen; all ranks must call it together."""
        return cast("DTensor", parameter.detach()).full_tensor()

    def norm(self, flat: Tensor) -> float:
        local = torch.linalg.vector_norm(flat, dtype=torch.float64).reshape(1)
        return math.hypot(*(float(norm) for norm in self.world.gather(local)))

    def total(self, count: int) -> int:
        local = torch.tensor([count], dtype=torch.int64, device=self.values.device)
        return sum(int(of_rank) for of_rank in self.world.gather(local))

    def fingerprint(self) -> str:
        """Returns a hash over those of all ranks' shares, 64 bits in hex; equal on all ranks."""
        local = int(super().fingerprint(), 16)
        signed = torch.tensor(
            [local - (1 << 64) if local >> 63 else local], dtype=torch.int64, device=self.values.device
        )
        by_rank = b"".join(int(of_rank).to_bytes(8, "little", signed=True) for of_rank in self.world.gather(signed))
        return blake2b(by_rank, digest_size=8).hexdigest()

    def _compute_with(self, flat: Tensor) -> None:
        # FSDP2 keeps what it gathered for the outermost parameters until a backward pass.
        free_gathered(self._network)
        views = self.named(flat)
        torch._foreach_copy_(list(self._locals.values()), [views[name] for name in self._locals])


def local_of(parameter: Tensor) -> Tensor:
    return cast("DTensor", parameter.detach()).to_local()


def shard_trained(policy: PipelinePolicy, trained: set[nn.Parameter], world: World, device: torch.device) -> str:
    """Shards the transformer, still on the meta device, block by block; returns in words what it did.

    `trained` become float32. Blocks are gathered in the network's dtype; gradients are cast to float32 before a
    reduce-scatter adds them up. Frozen parameters keep their dtype. Raises ValueError for parameters of several dtypes,
    as a gathered block has one, and where a rank would have nothing to train.
    """
    transformer = policy.transformer
    dtype = check_shares(policy, trained, world.size)
    for parameter in trained:
        parameter.data = parameter.data.float()
    # A block's output is a view, but the networks never write to it in place.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    mesh = replica_mesh(world, device)
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


def check_shares(policy: PipelinePolicy, trained: Iterable[nn.Parameter], ranks: int) -> torch.dtype:
    """Returns the dtype of all parameters. Raises ValueError, equal on all ranks, for several, or no rows of a rank."""
    shapes = [tuple(parameter.shape) for parameter in trained]
    # Earlier ranks have no fewer rows of a tensor than later ones. Of a number without rows FSDP2 says so itself.
    if not any(not shape or shard_rows(shape[0], ranks, ranks - 1) for shape in shapes):
        rows = max(shape[0] for shape in shapes)
        raise ValueError(
            f"tune=full with trainer.shard=full gives each rank rows of what is trained, and {ranks} ranks are too "
            f"many for tensors of at most {rows} rows: set trainer.shard=none, or freeze less by full.freeze"
        )
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, parameter in policy.transformer.named_parameters():
        by_dtype.setdefault(parameter.dtype, []).append(name)
    most = max(by_dtype, key=lambda dtype: len(by_dtype[dtype]))
    if other := [(dtype, names) for dtype, names in by_dtype.items() if dtype != most]:
        dtype, names = other[0]
        raise ValueError(
            f"tune=full with trainer.shard=full gathers a block in one dtype, but {names[0]} is {dtype} and most are "
            f"{most} ({len(names)} differ): set trainer.shard=none, or model.dtype=float32"
        )
    return most


@dataclass
class ShardSaving:
    """Writing of shares beside the training: `begin` on the first rank, `write` on all, `end` on the first."""

    world: World
    # Version and this rank's share of what a checkpoint holds; set by TrainerWorker.snapshot.
    snapshot: tuple[int, Checkpoint] | None = None
    verified: str | None = None  # Folder of the checkpoint whose share was last verified.

    def begin(self, directory: str) -> str:
        """Returns a new folder for the checkpoint's files. Raises OSError if there is no room for them."""
        _, checkpoint = self._taken("begin")
        return str(begin_checkpoint(Path(directory), self.world.size * checkpoint.nbytes))

    def write(self, work: str) -> tuple[str, Mapping[str, Description]]:
        """Writes this rank's share of the snapshot into that folder; the training waits for nothing of it.

        Returns the digest of its float32 masters (`weights_digest`), and its files' descriptions by name.
        """
        _, checkpoint = self._taken("write")
        files = write_share(Path(work), self.world.rank, checkpoint.tensors)
        digest = weights_digest(checkpoint.tensors["weights"])
        if self.world.rank != 0:
            self.snapshot = None
        return digest, files

    def end(
        self,
        work: str,
        controller: Mapping[str, Any],
        written: Sequence[tuple[str, Mapping[str, Description]]],
        keep: int,
        spare: Sequence[int],
    ) -> str:
        """Makes the folder, `written` by all ranks, the checkpoint; returns its path. Raises OSError."""
        version, checkpoint = self._taken("end")
        self.snapshot = None
        digest = combine([of_share for of_share, _ in written])
        trainer = {**checkpoint.trainer, RANKS: self.world.size, "weights_digest": digest}
        complete(Path(work), trainer, controller, {name: d for _, files in written for name, d in files.items()})
        return str(end_checkpoint(Path(work), version, keep=keep, spare=spare))

    def _taken(self, call: str) -> tuple[int, Checkpoint]:
        if self.snapshot is None:
            raise RuntimeError(f"{call} was called without a snapshot")
        return self.snapshot

    def verify(self, path: str) -> None:
        """Checks this rank's share of the checkpoint in the folder `path`. Raises DamagedCheckpoint."""
        verify_share(Path(path), self.world.rank)
        self.verified = path

    def read(self, path: str) -> Checkpoint:
        """Returns this rank's share of a checkpoint that was verified. ValueError for another number of ranks."""
        if self.verified != path:
            raise RuntimeError(f"checkpoint {path} is read before its shares are verified")
        self.verified = None
        return read_share(Path(path), self.world.rank, self.world.size)
