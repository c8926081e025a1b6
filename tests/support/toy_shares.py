"""Toy trainer ranks that have a share of the weights each (tune=full with trainer.shard=full), for toy runs (toy.py).

A share is the rows that FSDP2 gives a rank. In place of collectives, ranks that have met see each other's objects.
Their checkpoints are real: each rank writes a file of its own, hashes it and verifies it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from async_flowrl.config.schema import Config
from async_flowrl.training.checkpoint import FOLDER, Checkpoint
from async_flowrl.training.parts import World
from async_flowrl.training.sharded import ShardSaving
from async_flowrl.types import POLICY
from checkpoint_engine import (
    PROOF_VERSION,
    Header,
    Publisher,
    VersionGone,
    binding_probe,
    proof_tensors,
    weights_digest,
)
from checkpoint_engine.digest import tensor_bytes
from checkpoint_engine.gather import shard_rows
from tests.support.failing_disk import failing_disk
from tests.support.toy_trainer import ToyTrainer
from tests.support.toy_weights import SIZE, ToySender, copied, toy_lora, toy_tensors

SPOILT = "layer.lora_B.weight"
"""Name of the tensor that `spoil_share` damages."""
CALLS_OF_A_CHECKPOINT, CALLS_OF_AN_END = 10, 15
"""Syncs and renames of `saving.end` until the checkpoint counts, and until older ones are gone."""


@dataclass
class ToySaving(ShardSaving):
    """As ShardSaving, on a disk that fails where the trainer's fault says so."""

    trainer: "ToyShareTrainer" = field(kw_only=True)

    def write(self, work: str) -> Any:
        with failing_disk(self.trainer.take_spoil(), at=1):
            return super().write(work)

    def end(self, work: str, controller: Mapping[str, Any], *arguments: Any) -> str:
        spoil, version = self.trainer.take_spoil(), int(controller["version"])
        at = 1 + 5 * version % (CALLS_OF_A_CHECKPOINT if spoil == "full" else CALLS_OF_AN_END)
        with failing_disk(spoil, at=at):
            return super().end(work, controller, *arguments)


class ToyShareSender(ToySender):
    """Gathers the ranks' rows and publishes them, in place of `training.versions.GatheredStreams`."""

    trainer: "ToyShareTrainer"

    def __init__(self, retained: Mapping[int, Any], averages: Mapping[str, Any]) -> None:
        super().__init__(toy_tensors(), retained, averages, 1, {})
        self.staged: dict[tuple[str, int], Mapping[str, Tensor]] = {}

    def stage(self, version: int, stream: str) -> None:
        self.staged = {key: rows for key, rows in self.staged.items() if key[1] >= version - 2}
        self.staged[stream, version] = copied(self.weights(stream, version))

    def gather(self, version: int, stream: str) -> Header | None:
        if self.trainer.world.rank:
            return None
        publisher: Publisher = getattr(self, stream)
        publisher.stage(version, self._whole([rank.sender.staged[stream, version] for rank in self.trainer.peers()]))
        return publisher.seal(version)

    def recall(self, version: int, stream: str) -> Any:
        rows = [rank.sender.weights(stream, version) for rank in self.trainer.peers()]
        if None in rows:
            raise VersionGone(f"version {version} of stream {stream} is not kept any more")
        if self.trainer.world.rank:
            return None, None
        layout = self.policy.layout
        data = layout.packed(self._whole(rows))
        return getattr(self, stream).draft(version).sealed(layout.digests(data)), data

    def proof(self) -> dict[str, Tensor]:
        whole = proof_tensors(self.policy.layout, 1)
        self.staged[POLICY, PROOF_VERSION] = {name: self.trainer.own(tensor) for name, tensor in whole.items()}
        return binding_probe(toy_lora(whole))

    def _whole(self, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.cat([of_rank[name] for of_rank in rows]) for name in rows[0]}


class ToyShareTrainer(ToyTrainer):
    """A ToyTrainer whose tensors are the rows that this rank has: its weights, momentum, averages and versions."""

    def __init__(self, config: Config, index: int, name: str) -> None:
        ranks = config.trainer.num_workers
        self.world = World(index, ranks, per_replica=ranks, by_group=True)
        super().__init__(config, index, name)
        sender = ToyShareSender(self.retained, self.averages)
        sender.trainer = self
        self.sender = self.versions = sender
        self.saving = ToySaving(self.world, trainer=self)

    @property
    def position(self) -> World:
        return self.world

    def peers(self) -> "Sequence[ToyShareTrainer]":
        """Returns all ranks that it has met, in their order."""
        return cast("Sequence[ToyShareTrainer]", self.ranks())

    def own(self, whole: Tensor) -> Tensor:
        rows = shard_rows(len(whole), self.world.size, self.world.rank)
        return whole[rows.start : rows.stop]

    def whole(self, name: str) -> Tensor:
        return torch.cat([rank.tensors[name] for rank in self.peers()])

    def agreed(self) -> str:
        """Returns a digest of the sum that all ranks step by, each its own rows."""
        mean = torch.empty(2 * SIZE)
        self.sum.mean(mean, self.plan.rows)
        return weights_digest({"mean": mean})

    def take_spoil(self) -> str | None:
        """Returns the fault of the next write, which then has none any more."""
        spoil, self.spoil = self.spoil, None
        return spoil

    def snapshot(self) -> int:
        version = super().snapshot()
        self.saving.snapshot = version, self._snapshots.pop(version)
        return version

    def forget_snapshot(self) -> None:
        self.saving.snapshot = None

    def restore(self, path: str, held: object = ()) -> int:
        checkpoint: Checkpoint = self.saving.read(path)
        self._restore(checkpoint)
        return int(checkpoint.trainer["version"])


def spoil_share(checkpoint: Path, rank: int, how: str = "flip") -> None:
    """Damages the share of a rank: "flip" turns one bit of its weights, "truncate" cuts its end off, "remove" removes
    its file."""
    file = checkpoint / FOLDER / f"rank_{rank}.pt"
    if how == "remove":
        file.unlink()
        return
    data = bytearray(file.read_bytes())
    if how == "truncate":
        file.write_bytes(data[:-4])
        return
    spoilt = torch.load(file)["weights"][SPOILT]
    data[data.index(tensor_bytes(spoilt).tobytes())] ^= 1  # The weights are in front of retained versions of them.
    file.write_bytes(data)
