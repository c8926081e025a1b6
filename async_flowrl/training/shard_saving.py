"""The part of one rank in checkpoints of weights that lie in shares on all ranks (tune=full, trainer.shard=full)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from async_flowrl.training.checkpoint import RANKS, Checkpoint
from async_flowrl.training.checkpoint_folder import begin_checkpoint, end_checkpoint
from async_flowrl.training.fsdp import World
from async_flowrl.training.full_shards import host_mesh
from async_flowrl.training.shard_checkpoint import FOLDER, Shapes, write_shards
from checkpoint_engine.digest import joined_digest


@dataclass
class ShardSaving:
    """Calls by the controller: `begin` on the first rank, `write` on all at once, `end` on the first.

    They run beside the training, so they have a process group of their own.
    """

    world: World
    shapes: Shapes
    mesh: DeviceMesh
    group: dist.ProcessGroup
    snapshot: tuple[int, Checkpoint] | None = None
    """Version and this rank's share of what a checkpoint holds; set by TrainerWorker.snapshot."""

    @classmethod
    def of(cls, world: World, shapes: Shapes) -> "ShardSaving":
        """All ranks must call it together. `shapes` are those of whole tensors."""
        group: dist.ProcessGroup = dist.new_group(backend="gloo")
        return cls(world, shapes, host_mesh(world), group)

    def begin(self, directory: str) -> str:
        """Returns a new folder for the checkpoint's files. Raises OSError if there is no room for them."""
        if self.snapshot is None:
            raise RuntimeError("begin was called without a snapshot")
        return str(begin_checkpoint(Path(directory), self.world.size * self.snapshot[1].nbytes))

    def write(self, work: str) -> str:
        """Writes this rank's share of the snapshot into that folder; returns the digest of its float32 masters."""
        if self.snapshot is None:
            raise RuntimeError("write was called without a snapshot")
        _, checkpoint = self.snapshot
        write_shards(Path(work) / FOLDER, checkpoint.tensors, self.shapes, self.mesh, self.group)
        digest: str = checkpoint.trainer["weights_digest"]
        if self.world.rank != 0:
            self.snapshot = None
        return digest

    def end(
        self, work: str, controller: Mapping[str, Any], digests: Sequence[str], keep: int, spare: Sequence[int]
    ) -> str:
        """Makes the folder the checkpoint of the snapshot's version; returns its path.

        `digests` are those of all ranks' masters, as `write` returned them.
        """
        if self.snapshot is None:
            raise RuntimeError("end was called without a snapshot")
        version, checkpoint = self.snapshot
        self.snapshot = None
        trainer = {**checkpoint.trainer, RANKS: self.world.size, "weights_digest": joined_digest(digests)}
        return str(end_checkpoint(Path(work), version, trainer, controller, keep=keep, spare=spare))
