"""Toy trainer ranks that have a share of the weights each (tune=full with trainer.shard=full), for toy runs (toy.py).

A share is the rows that FSDP2 gives a rank. In place of collectives, ranks that have met see each other's objects.
Their checkpoints are real: each rank writes a file of its own, in the format of torch.distributed.checkpoint, hashes it
and verifies it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from async_flowrl.config.schema import Config
from async_flowrl.training.checkpoint import FOLDER, RANKS, TRAINER, Checkpoint
from async_flowrl.training.fsdp import World
from async_flowrl.training.shard_checkpoint import Parts, SafeReader, _load, whole_parts
from async_flowrl.training.sharded import ShardSaving, Written
from async_flowrl.types import POLICY
from checkpoint_engine import (
    CANARY_VERSION,
    Header,
    Publisher,
    VersionGone,
    binding_probe,
    canary_tensors,
    weights_digest,
)
from checkpoint_engine.digest import tensor_bytes
from checkpoint_engine.gather import shard_rows
from tests.support.failing_disk import failing_disk
from tests.support.toy_trainer import ToyTrainer
from tests.support.toy_weights import SIZE, ToySender, copied, toy_lora, toy_tensors

SHAPES: Mapping[str, tuple[int, ...]] = {
    **{name: tuple(tensor.shape) for name, tensor in toy_tensors().items()},
    "momentum": (SIZE, 2),
}
"""Last part of a tensor's name in a checkpoint → shape of the whole tensor."""
SPOILT = "layer.lora_B.weight"
"""Name of the tensor that `spoil_share` damages."""
CALLS_OF_A_CHECKPOINT, CALLS_OF_AN_END = 11, 16
"""Syncs and renames of `saving.end` until the checkpoint counts, and until older ones are gone."""


class _OwnRows(DefaultSavePlanner):
    """Finds what a rank writes by its name; its tensors are rows of others, of which DefaultSavePlanner knows none."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn]


@dataclass
class ToySaving(ShardSaving):
    """As ShardSaving; a rank needs no other one to write its file, and the first one describes those of all."""

    trainer: "ToyShareTrainer" = field(kw_only=True)
    came: tuple[SavePlan, list[WriteResult]] = (SavePlan([]), [])
    """What this rank has written last."""

    def write(self, work: str) -> Written:
        with failing_disk(self.trainer.take_spoil(), at=1):
            return super().write(work)

    def end(
        self, work: str, controller: Mapping[str, Any], written: Sequence[Written], keep: int, spare: Sequence[int]
    ) -> str:
        spoil, version = self.trainer.take_spoil(), int(controller["version"])
        at = 1 + 5 * version % (CALLS_OF_A_CHECKPOINT if spoil == "full" else CALLS_OF_AN_END)
        with failing_disk(spoil, at=at):
            plans, results = zip(*(rank.saving.came for rank in self.trainer.peers()), strict=True)
            _, metadata = create_default_global_save_plan(list(plans))
            FileSystemWriter(str(Path(work) / FOLDER)).finish(metadata, list(results))
            return super().end(work, controller, written, keep, spare)

    def _write(self, folder: Path, parts: Parts) -> None:
        rows = {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}
        items = [item for name, own in rows.items() for item in self._items(name, own)]
        writer, planner = FileSystemWriter(str(folder)), _OwnRows()
        writer.prepare_local_plan(SavePlan(items))
        plan = writer.prepare_global_plan([SavePlan(items)] * self.world.size)[self.world.rank]
        planner.set_up_planner(cast("Any", rows))
        self.came = plan, writer.write_data(plan, planner).wait()

    def _items(self, name: str, own: Tensor) -> Iterable[WriteItem]:
        """Yields what says where a rank's rows belong in a tensor; nothing for a rank without any."""
        whole = torch.Size(SHAPES[name.rpartition("/")[2]])
        start = shard_rows(whole[0], self.world.size, self.world.rank).start
        offsets = torch.Size([start] + [0] * (len(whole) - 1))
        if len(own):
            data = TensorWriteData(
                ChunkStorageMetadata(offsets, own.shape), TensorProperties.create_from_tensor(own), whole
            )
            yield WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)

    def _read(self, folder: Path) -> Parts:
        reader = SafeReader(str(folder))
        stored: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
        state: dict[str, Tensor] = {
            key: torch.empty(each.size, dtype=each.properties.dtype) for key, each in stored.items()
        }
        _load(state, reader)
        parts: dict[str, dict[str, Tensor]] = {}
        for key, whole in state.items():
            part, name = key.split("/", 1)
            parts.setdefault(part, {})[name] = self.trainer.own(whole).clone()
        return parts


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

    def canary(self) -> dict[str, Tensor]:
        whole = canary_tensors(self.policy.layout, 1)
        self.staged[POLICY, CANARY_VERSION] = {name: self.trainer.own(tensor) for name, tensor in whole.items()}
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
        nothing: Any = None  # toy ranks have no process group
        self.saving = ToySaving(self.world, SHAPES, nothing, nothing, trainer=self)

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
    file = checkpoint / FOLDER / f"__{rank}_0.distcp"
    if how == "remove":
        file.unlink()
        return
    data = bytearray(file.read_bytes())
    if how == "truncate":
        file.write_bytes(data[:-4])
        return
    reader = SafeReader(str(checkpoint / FOLDER))
    stored = reader.read_metadata().storage_data.items()
    (place,) = (at for key, at in stored if (key.fqn, at.relative_path) == ("weights/" + SPOILT, file.name))
    weights = whole_parts(checkpoint / FOLDER)["weights"][SPOILT]
    rows = shard_rows(len(weights), json.loads((checkpoint / TRAINER).read_text())[RANKS], rank)
    # A retained version can have the same bytes in another place of the file.
    end = place.offset + place.length
    data[data.index(tensor_bytes(weights[rows.start : rows.stop]).tobytes(), place.offset, end)] ^= 1
    file.write_bytes(data)
