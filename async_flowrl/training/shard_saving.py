"""The part of one rank in checkpoints of weights that lie in shares on all ranks (tune=full, trainer.shard=full)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from async_flowrl.training.checkpoint import RANKS, Checkpoint, read_share
from async_flowrl.training.checkpoint_folder import begin_checkpoint, end_checkpoint
from async_flowrl.training.checkpoint_manifest import FOLDER, Description, complete, described_share, verify_share
from async_flowrl.training.fsdp import World
from async_flowrl.training.full_shards import host_mesh
from async_flowrl.training.shard_checkpoint import Parts, Shapes, read_shards, write_shards
from checkpoint_engine import weights_digest
from checkpoint_engine.digest import joined_digest


@dataclass(frozen=True)
class Written:
    """What a rank says of its share of a checkpoint when that is on the disk."""

    digest: str
    """Of its float32 masters (`weights_digest`)."""
    files: Mapping[str, Description]
    """By name in the checkpoint's folder."""


@dataclass
class ShardSaving:
    """Calls by the controller: `begin` on the first rank, `write` on all at once, `end` on the first.

    They run beside the training, so they have a process group of their own. A run that goes on from a checkpoint calls
    `verify` on all ranks, and `read` when all of them have found their shares sound.
    """

    world: World
    shapes: Shapes
    mesh: DeviceMesh
    group: dist.ProcessGroup
    snapshot: tuple[int, Checkpoint] | None = None
    """Version and this rank's share of what a checkpoint holds; set by TrainerWorker.snapshot."""
    verified: str | None = None
    """Folder of the checkpoint whose share was last verified."""

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

    def write(self, work: str) -> Written:
        """Writes this rank's share of the snapshot into that folder, and hashes it; the training waits for neither."""
        if self.snapshot is None:
            raise RuntimeError("write was called without a snapshot")
        _, checkpoint = self.snapshot
        self._write(Path(work) / FOLDER, checkpoint.tensors)
        written = Written(weights_digest(checkpoint.tensors["weights"]), described_share(Path(work), self.world.rank))
        if self.world.rank != 0:
            self.snapshot = None
        return written

    def end(
        self, work: str, controller: Mapping[str, Any], written: Sequence[Written], keep: int, spare: Sequence[int]
    ) -> str:
        """Makes the folder the checkpoint of the snapshot's version; returns its path.

        `written` is what `write` returned on all ranks. Raises OSError if a rank's files are not here.
        """
        if self.snapshot is None:
            raise RuntimeError("end was called without a snapshot")
        version, checkpoint = self.snapshot
        self.snapshot = None
        digest = joined_digest([share.digest for share in written])
        trainer = {**checkpoint.trainer, RANKS: self.world.size, "weights_digest": digest}
        complete(Path(work), trainer, controller, {name: d for share in written for name, d in share.files.items()})
        return str(end_checkpoint(Path(work), version, keep=keep, spare=spare))

    def verify(self, path: str) -> None:
        """Checks this rank's share of the checkpoint in the folder `path`. Raises DamagedCheckpoint."""
        verify_share(Path(path), self.world.rank)
        self.verified = path

    def read(self, path: str) -> Checkpoint:
        """Returns this rank's share of the checkpoint in the folder `path`, which `verify` has checked on all ranks.

        Raises RuntimeError if it was not checked on this one, and ValueError for another number of ranks.
        """
        if self.verified != path:
            raise RuntimeError(f"checkpoint {path} is read before its shares are verified")
        self.verified = None
        return read_share(Path(path), self.world.size, self._read)

    def _write(self, folder: Path, parts: Parts) -> None:
        """Writes this rank's tensors into the folder of all ranks' files; raises as `write_shards`."""
        write_shards(folder, parts, self.shapes, self.mesh, self.group)

    def _read(self, folder: Path) -> Parts:
        """Returns this rank's tensors by part and name."""
        return read_shards(folder, self.mesh)
