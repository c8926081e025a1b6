"""Reads and writes checkpoints: folders of safetensors and JSON files, whose digests are checked on every read.

A checkpoint is written to a temporary folder and then renamed, so it is never incomplete. Its files:

checkpoints/step_N/
    manifest.json            SHA-256 and size of every other file, format version
    weights.safetensors      trained weights in float32, by layout name
    optimizer.safetensors    exp_avg/<name>, exp_avg_sq/<name>
    retained.safetensors     <version>/<name>: the last max_staleness + 1 versions, from which rollouts sample
    ema.safetensors, sampling.safetensors, algorithm.safetensors    if the run has them
    shards/                  instead of all these, where each rank has a share of the weights (shard_checkpoint.py)
    trainer.json             counters, LoRA rank and alpha
    controller.json          state of the controller
checkpoints/latest           name of the last one, for people; no code reads it
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from checkpoint_engine import base_digest

logger = logging.getLogger(__name__)

FORMAT = 4
MANIFEST, TRAINER, CONTROLLER = "manifest.json", "trainer.json", "controller.json"
RANKS = "ranks"
"""Key of trainer.json, only where each of so many ranks has a share of the weights."""
_WORK = ".unfinished-"
_REPLACED = ".replaced-"
"""Prefix of an old checkpoint's name while a new one of the same step replaces it."""
_NAME = re.compile(rf"(?:{re.escape(_REPLACED)})?step_(\d+)")


class DamagedCheckpoint(ValueError):
    """Raised if a checkpoint does not agree with its manifest; the message names the file."""


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    """Part (weights, optimizer, ...) → name → CPU tensor."""
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
    for part, tensors in checkpoint.tensors.items():
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, work / f"{part}.safetensors")
    return end_checkpoint(work, step, checkpoint.trainer, checkpoint.controller, keep=keep, spare=spare)


def begin_checkpoint(directory: Path, nbytes: int) -> Path:
    """Returns a new folder for the files of a checkpoint, which nobody reads before `end_checkpoint` renames it.

    What earlier calls have left unfinished is removed. Raises OSError if there is no room for `nbytes` of tensors then:
    whole weights would take minutes to find that out. A file system that does not know its room is written to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    put_back_replaced(directory)
    _remove_unfinished(directory)
    if (free := _free_bytes(directory)) is not None and free < nbytes:
        raise OSError(errno.ENOSPC, f"a checkpoint needs {nbytes:,} bytes, and there are {free:,} left", str(directory))
    work = directory / f"{_WORK}{uuid.uuid4().hex}"
    work.mkdir()
    return work


def _free_bytes(directory: Path) -> int | None:
    """Returns the room of a file system; None where it does not say, as some that are mounted over a network."""
    try:
        usage = shutil.disk_usage(directory)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP):
            return None
        raise
    return usage.free if usage.total else None


def end_checkpoint(
    work: Path,
    step: int,
    trainer: Mapping[str, Any],
    controller: Mapping[str, Any],
    *,
    keep: int,
    spare: Collection[int] = (),
) -> Path:
    """Makes the folder of `begin_checkpoint`, which has tensors, the checkpoint of a step; as `write_checkpoint`."""
    directory = work.parent
    _describe_all(work, trainer, controller)
    target = directory / f"step_{step}"
    if target.exists():
        target.rename(directory / f"{_REPLACED}{target.name}")
    work.rename(target)
    put_back_replaced(directory)
    _sync(directory)
    _write_latest(directory, target.name)
    newest_first = written(directory)
    position = newest_first.index(target)
    older = [path for path in newest_first[position + keep :] if checkpoint_step(path) not in spare]
    for old in [*newest_first[:position], *older]:
        old.rename(directory / f"{_WORK}old-{uuid.uuid4().hex}")
    _remove_unfinished(directory)
    return target


def put_back_replaced(directory: Path) -> None:
    """Ends an interrupted replacement: renames the old checkpoint back if there is no new one, else removes it.

    Only the process that writes to the folder may call it.
    """
    for replaced in directory.glob(f"{_REPLACED}*"):
        if _original(replaced).exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(_original(replaced))


def _is_replaced(path: Path) -> bool:
    return path.name.startswith(_REPLACED)


def _original(replaced: Path) -> Path:
    return replaced.with_name(replaced.name.removeprefix(_REPLACED))


def read_checkpoint(path: Path) -> Checkpoint:
    """Returns the contents of a checkpoint after checking all digests. Raises DamagedCheckpoint."""
    files = verify_checkpoint(path)
    trainer, controller = json.loads((path / TRAINER).read_text()), json.loads((path / CONTROLLER).read_text())
    if RANKS in trainer:
        from async_flowrl.training.shard_checkpoint import FOLDER, whole_parts  # loads much of torch.distributed

        return Checkpoint(whole_parts(path / FOLDER), trainer, controller)
    tensors = {}
    for name in files:
        if name.endswith(".safetensors"):
            try:
                tensors[name.removesuffix(".safetensors")] = load_file(path / name)
            except SafetensorError as error:
                raise DamagedCheckpoint(f"checkpoint {path}: {name} cannot be read: {error}") from error
    return Checkpoint(tensors, trainer, controller)


def read_share(path: Path, mesh: DeviceMesh) -> Checkpoint:
    """Returns what a rank of `mesh` has of a sharded checkpoint, whose digests the first one checks alone.

    Raises DamagedCheckpoint, and ValueError, which names them, for another number of ranks.
    """
    from async_flowrl.training.shard_checkpoint import FOLDER, read_shards

    if mesh.get_local_rank() == 0:
        verify_checkpoint(path)
    trainer, controller = json.loads((path / TRAINER).read_text()), json.loads((path / CONTROLLER).read_text())
    check_ranks(path, trainer, mesh.size())
    return Checkpoint(read_shards(path / FOLDER, mesh), trainer, controller)


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


def digest_of(checkpoint: Checkpoint) -> str:
    """Returns a hex digest of the tensors and the trainer's state; the checkpoint need not be written."""
    parts = {name: base_digest(tensors) for name, tensors in checkpoint.tensors.items()}
    return _manifest_digest({**parts, TRAINER: checkpoint.trainer})


def read_controller(path: Path) -> dict[str, Any]:
    """Returns the controller's state after checking all digests of the checkpoint. Raises DamagedCheckpoint."""
    verify_checkpoint(path)
    controller: dict[str, Any] = json.loads((path / CONTROLLER).read_text())
    return controller


def drop_newer(directory: Path, step: int) -> None:
    """Removes the checkpoints after `step`, to which the run has returned."""
    for path in written(directory):
        if checkpoint_step(path) > step:
            path.rename(directory / f"{_WORK}newer-{uuid.uuid4().hex}")
    _remove_unfinished(directory)


def verify_checkpoint(path: Path) -> list[str]:
    """Checks every file against the manifest and returns their names. Raises DamagedCheckpoint."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"checkpoint {path} has no readable {MANIFEST}: {error}") from error
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or manifest.get("digest") != _manifest_digest(files):
        raise DamagedCheckpoint(f"checkpoint {path}: {MANIFEST} is damaged")
    if manifest.get("format") != FORMAT:
        raise DamagedCheckpoint(f"checkpoint {path} has format {manifest.get('format')}, this version reads {FORMAT}")
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise DamagedCheckpoint(f"checkpoint {path} lacks {name}")
        if _describe(file) != expected:
            raise DamagedCheckpoint(f"checkpoint {path}: {name} does not have the size and digest it was written with")
    return list(files)


def find_checkpoint(directory: Path) -> Path | None:
    """Returns the valid checkpoint with the highest step, or None. Damaged ones are skipped with a warning."""
    for path in written(directory):
        try:
            verify_checkpoint(path)
        except DamagedCheckpoint as error:
            logger.warning("%s; trying an older one", error)
        else:
            return path
    return None


def checkpoint_step(path: Path) -> int:
    """Returns N of the path .../step_N. Raises ValueError for another name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not a checkpoint: its folder must be named step_N")
    return int(match[1])


def written(directory: Path) -> list[Path]:
    """Returns the paths of all checkpoints of a folder, valid or not, the highest step first.

    After an interrupted replacement without a new checkpoint, the path of the old one is returned.
    """
    entries = directory.iterdir() if directory.is_dir() else ()
    named = [entry for entry in entries if entry.is_dir() and _NAME.fullmatch(entry.name)]
    checkpoints = [entry for entry in named if not (_is_replaced(entry) and _original(entry).exists())]
    return sorted(checkpoints, key=checkpoint_step, reverse=True)


def _describe_all(work: Path, trainer: Mapping[str, Any], controller: Mapping[str, Any]) -> None:
    (work / TRAINER).write_text(_json(trainer))
    (work / CONTROLLER).write_text(_json(controller))
    files = {}
    for file in sorted(work.rglob("*")):
        _sync(file)
        if file.is_file():
            files[file.relative_to(work).as_posix()] = _describe(file)
    (work / MANIFEST).write_text(_json({"format": FORMAT, "digest": _manifest_digest(files), "files": files}))
    _sync(work / MANIFEST)
    _sync(work)


def _describe(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def _manifest_digest(files: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_latest(directory: Path, name: str) -> None:
    work = directory / f"{_WORK}latest"
    work.write_text(name + "\n")
    _sync(work)
    work.replace(directory / "latest")
    _sync(directory)


def _remove_unfinished(directory: Path) -> None:
    for path in directory.glob(f"{_WORK}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
