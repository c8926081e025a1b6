"""Checkpoints: what they contain, how one is written, and how it is read.

Folders of safetensors and JSON files, whose digests are checked on every read:

checkpoints/step_N/
    manifest.json            SHA-256 and size of every other file, format version (checkpoint_folder.py)
    weights.safetensors      trained weights in float32, by layout name
    optimizer.safetensors    exp_avg/<name>, exp_avg_sq/<name>
    retained.safetensors     <version>/<name>: the last max_staleness + 1 versions, from which rollouts sample
    held.safetensors         <stream>/<version>: versions of a LoRA that evaluations may still ask for, if there are any
    ema.safetensors, sampling.safetensors, algorithm.safetensors    if the run has them
    shards/                  instead of all these, where each rank has a share of the weights (shard_checkpoint.py)
    trainer.json             counters, LoRA rank and alpha
    controller.json          state of the controller
checkpoints/latest           name of the last one, for people; no code reads it
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from async_flowrl.training.checkpoint_folder import (
    CONTROLLER,
    FOLDER,
    TRAINER,
    DamagedCheckpoint,
    begin_checkpoint,
    complete,
    end_checkpoint,
    manifest_digest,
    verify_checkpoint,
)

RANKS = "ranks"
"""Key of trainer.json, only where each of so many ranks has a share of the weights."""


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    """File without its suffix (weights, optimizer, ...) → name → CPU tensor."""
    trainer: Mapping[str, Any]
    """State of the trainer, as JSON values."""
    controller: Mapping[str, Any]
    """State of the controller, as JSON values."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensors in self.tensors.values() for tensor in tensors.values())


def write_checkpoint(
    directory: Path, step: int, checkpoint: Checkpoint, *, keep: int, spare: Collection[int] = ()
) -> Path:
    """Writes the checkpoint `directory`/step_<step> and returns its path; an old one of the same step is replaced.

    The newest `keep` - 1 older checkpoints and those with a step in `spare` are kept, the other older ones removed.
    Newer ones are removed, too, because the run has returned to this step. Files are synced to disk before the rename.
    """
    work = begin_checkpoint(directory, checkpoint.nbytes)
    # safetensors refuses views that share memory, and the trainer's tensors are views of one vector.
    for file, tensors in checkpoint.tensors.items():
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, work / f"{file}.safetensors")
    complete(work, checkpoint.trainer, checkpoint.controller)
    return end_checkpoint(work, step, keep=keep, spare=spare)


Files = Mapping[str, bytes]
"""The files of a checkpoint without the controller's part: name → contents."""
HELD = "held"
"""The part of a checkpoint with the versions that evaluations may still ask for."""
Held = Mapping[tuple[str, int], Tensor]
"""Stream and version → flat weights of such a version."""


def with_held(checkpoint: Checkpoint, held: Held) -> Checkpoint:
    """Returns the checkpoint with one more part for `held`, if there are any."""
    if not held:
        return checkpoint
    part = {f"{stream}/{version}": flat for (stream, version), flat in held.items()}
    return replace(checkpoint, tensors={**checkpoint.tensors, HELD: part})


def held_in(checkpoint: Checkpoint) -> dict[tuple[str, int], Tensor]:
    """Returns what `with_held` has added."""
    return {_held_key(name): flat for name, flat in checkpoint.tensors.get(HELD, {}).items()}


def to_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Returns the files of a checkpoint without the controller's part."""
    files = {
        f"{part}.safetensors": save({name: tensor.contiguous().clone() for name, tensor in tensors.items()})
        for part, tensors in checkpoint.tensors.items()
    }
    return {**files, TRAINER: json.dumps(checkpoint.trainer).encode()}


def from_files(files: Files) -> Checkpoint:
    """Returns what `to_files` was given."""
    parts = {name.removesuffix(".safetensors"): load(data) for name, data in files.items() if name != TRAINER}
    return Checkpoint(parts, json.loads(files[TRAINER]), {})


def held_versions(files: Files) -> frozenset[tuple[str, int]]:
    """Returns streams and versions of the part HELD of a checkpoint's files."""
    data = files.get(f"{HELD}.safetensors")
    return frozenset() if data is None else frozenset(_held_key(name) for name in load(data))


def held_versions_of(path: Path) -> frozenset[tuple[str, int]]:
    """Returns streams and versions of the part HELD of the checkpoint in the folder `path`."""
    file = path / f"{HELD}.safetensors"
    if not file.exists():
        return frozenset()
    with safe_open(file, "pt") as stored:
        return frozenset(_held_key(name) for name in stored.keys())  # noqa: SIM118


def _held_key(name: str) -> tuple[str, int]:
    stream, _, version = name.partition("/")
    return stream, int(version)


def files_digest(files: Files) -> str:
    """Returns the hex digest of the files' names, sizes and contents."""
    described = {n: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for n, data in files.items()}
    return manifest_digest(described)


def read_checkpoint(path: Path) -> Checkpoint:
    """Returns the contents of a checkpoint after checking all digests. Raises DamagedCheckpoint."""
    files = verify_checkpoint(path)
    trainer, controller = json.loads((path / TRAINER).read_text()), json.loads((path / CONTROLLER).read_text())
    if RANKS in trainer:
        from async_flowrl.training.shard_checkpoint import whole_parts  # loads much of torch.distributed

        return Checkpoint(whole_parts(path / FOLDER), trainer, controller)
    parts = [name.removesuffix(".safetensors") for name in files if name.endswith(".safetensors")]
    try:
        return Checkpoint({part: load_file(path / f"{part}.safetensors") for part in parts}, trainer, controller)
    except SafetensorError as error:
        raise DamagedCheckpoint(f"checkpoint {path} cannot be read: {error}") from error


def read_share(path: Path, ranks: int, read: Callable[[Path], Mapping[str, Mapping[str, Tensor]]]) -> Checkpoint:
    """Returns what one of `ranks` ranks has of a sharded checkpoint, of which every rank must have checked its share.

    `read` returns this rank's tensors, by part and name, from the folder with the files of all ranks. Raises
    ValueError, which names them, for another number of ranks.
    """
    trainer, controller = json.loads((path / TRAINER).read_text()), json.loads((path / CONTROLLER).read_text())
    check_ranks(path, trainer, ranks)
    return Checkpoint(read(path / FOLDER), trainer, controller)


def check_ranks(path: Path, trainer: Mapping[str, Any], ranks: int | None) -> None:
    """Raises ValueError if a checkpoint was written by another number of ranks that have a share each.

    `ranks`: None where each has all of the weights.
    """
    if (wrote := trainer.get(RANKS)) != ranks:
        how = "ranks with all of the weights each" if wrote is None else f"{wrote} ranks with a share each"
        now = "trainer.shard=none" if ranks is None else f"trainer.shard=full and {ranks} ranks"
        raise ValueError(
            f"checkpoint {path} was written by {how}, and this run has {now}, which leads to other weights: "
            f"set trainer.shard={'none' if wrote is None else f'full and trainer.num_workers={wrote}'}"
        )


def read_controller(path: Path) -> dict[str, Any]:
    """Returns the controller's state of a checkpoint that was verified."""
    controller: dict[str, Any] = json.loads((path / CONTROLLER).read_text())
    return controller
