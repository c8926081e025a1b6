"""Checkpoints: what they contain, how one is written, and how it is read.

Folders of safetensors (or torch's) and JSON files, whose digests are checked on every read:

checkpoints/step_N/
    manifest.json            SHA-256 and size of every other file, format version
    weights.safetensors      trained weights in float32, by layout name
    optimizer.safetensors    exp_avg/<name>, exp_avg_sq/<name>
    retained.safetensors     <version>/<name>: the last max_staleness + 1 versions, from which rollouts sample
    held.safetensors         <stream>/<version>: versions of a LoRA that evaluations may still ask for, if there are any
    ema.safetensors, sampling.safetensors, algorithm.safetensors    if the run has them
    shards/rank_R.pt         instead of all these, where each rank has a share: its rows of the tensors, by torch.save
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
import socket
import uuid
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from async_flowrl.config.paths import sha256_of
from async_flowrl.policies.stored import Weights
from async_flowrl.types import ByteArray
from checkpoint_engine import Layout
from checkpoint_engine.digest import combine
from checkpoint_engine.layout import dtype_of

RANKS = "ranks"  # Key of trainer.json, only where each of so many ranks has a share of the weights.


# Part (weights, optimizer, ...), the name of its file without the suffix → name → CPU tensor.
Parts = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Checkpoint:
    tensors: Parts
    trainer: Mapping[str, Any]  # State of the trainer, as JSON values.
    controller: Mapping[str, Any]  # State of the controller, as JSON values.

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensors in self.tensors.values() for tensor in tensors.values())


def write_checkpoint(
    directory: Path, step: int, checkpoint: Checkpoint, *, keep: int, spare: Collection[int] = ()
) -> Path:
    """Writes the checkpoint `directory`/step_<step>, synced before it is renamed, and returns its path.

    The newest `keep` - 1 older ones and the steps in `spare` are kept; newer ones go, as the run has returned to this
    step.
    """
    work = begin_checkpoint(directory, checkpoint.nbytes)
    # safetensors refuses views that share memory, and the trainer's tensors are views of one vector.
    for file, tensors in checkpoint.tensors.items():
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, work / f"{file}.safetensors")
    complete(work, checkpoint.trainer, checkpoint.controller)
    return end_checkpoint(work, step, keep=keep, spare=spare)


HELD = "held"  # The part of a checkpoint with the versions that evaluations may still ask for.
Held = Mapping[tuple[str, int], Tensor]  # Stream and version → flat weights of such a version.


def with_held(checkpoint: Checkpoint, held: Held) -> Checkpoint:
    """Returns the checkpoint with one more part for `held`, if there are any."""
    if not held:
        return checkpoint
    part = {f"{stream}/{version}": flat for (stream, version), flat in held.items()}
    return replace(checkpoint, tensors={**checkpoint.tensors, HELD: part})


def held_in(checkpoint: Checkpoint) -> dict[tuple[str, int], Tensor]:
    return {_held_key(name): flat for name, flat in checkpoint.tensors.get(HELD, {}).items()}


@dataclass(frozen=True)
class PackedState:
    """A checkpoint without the controller's part, all tensors in one buffer.

    It is made, pickled and compared without holding Python's global lock, which the thread that trains needs.
    """

    layout: Layout  # Of the tensors by <part>/<name>.
    data: ByteArray
    trainer: Mapping[str, Any]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "PackedState":
        parts = checkpoint.tensors.items()
        tensors = {f"{part}/{name}": tensor for part, named in parts for name, tensor in named.items()}
        layout = Layout.of(tensors)
        return cls(layout, layout.packed(tensors), checkpoint.trainer)

    def checkpoint(self) -> Checkpoint:
        parts: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)  # A part may have no tensors.
        for entry in self.layout.entries:
            part, _, name = entry.name.partition("/")
            tensor = torch.from_numpy(self.data[entry.offset : entry.end].copy())
            parts[part][name] = tensor.view(dtype_of(entry)).view(entry.shape)
        return Checkpoint(parts, self.trainer, {})

    def copied(self) -> "PackedState":
        return replace(self, data=self.data.copy())

    def digest(self) -> str:
        return combine([_json(self.trainer), self.layout.hash, *self.layout.digests(self.data)])

    def passed_on(self) -> "tuple[None, PackedState]":
        """Returns the state as a result of a call, of which other processes can be given a reference."""
        return None, self

    def held_versions(self) -> frozenset[tuple[str, int]]:
        names = (entry.name.partition("/") for entry in self.layout.entries)
        return frozenset(_held_key(name) for part, _, name in names if part == HELD)


def held_versions_of(path: Path) -> frozenset[tuple[str, int]]:
    file = path / f"{HELD}.safetensors"
    return frozenset(map(_held_key, load_file(file))) if file.exists() else frozenset()


def _held_key(name: str) -> tuple[str, int]:
    stream, _, version = name.partition("/")
    return stream, int(version)


def read_checkpoint(path: Path) -> Checkpoint:
    """Returns the contents of a checkpoint after checking all digests. Raises DamagedCheckpoint."""
    files = verify_checkpoint(path)
    trainer, controller = json.loads((path / TRAINER).read_text()), json.loads((path / CONTROLLER).read_text())
    if RANKS in trainer:
        return Checkpoint(whole_parts(path, trainer[RANKS]), trainer, controller)
    parts = [name.removesuffix(".safetensors") for name in files if name.endswith(".safetensors")]
    try:
        return Checkpoint({part: load_file(path / f"{part}.safetensors") for part in parts}, trainer, controller)
    except SafetensorError as error:
        raise DamagedCheckpoint(f"checkpoint {path} cannot be read: {error}") from error


def write_share(folder: Path, rank: int, parts: Parts) -> "dict[str, Description]":
    """Writes and syncs a rank's share in a checkpoint's folder; returns its name and description. Raises OSError."""
    if not folder.is_dir():
        where = f"{socket.gethostname()} does not see this folder; output_dir must be one that all trainer ranks share"
        raise FileNotFoundError(errno.ENOENT, where, str(folder))
    name = _share_name(rank)
    (folder / FOLDER).mkdir(exist_ok=True)
    try:
        with (folder / name).open("wb") as file:
            torch.save({part: dict(tensors) for part, tensors in parts.items()}, file)
        sync(folder / name)
    except (OSError, RuntimeError) as error:  # On a full disk torch finds its place in the file wrong, and says that.
        why = error if isinstance(error, OSError) else error.__context__
        if not isinstance(why, OSError):
            raise
        raise OSError(f"a trainer rank cannot write its share of a checkpoint: {why}") from error
    return {name: _describe(folder / name)}


def read_share(path: Path, rank: int, ranks: int) -> Checkpoint:
    """Returns one rank's share of a checkpoint that all have verified. ValueError for another number of ranks."""
    trainer, controller = json.loads((path / TRAINER).read_text()), json.loads((path / CONTROLLER).read_text())
    check_ranks(path, trainer, ranks)
    return Checkpoint(torch.load(path / _share_name(rank), weights_only=True), trainer, controller)


class ShardedTensors(Weights):
    """The whole tensors of one part by name; each access reads the tensor from the files of all ranks."""

    def __init__(self, by_rank: Sequence[Mapping[str, Tensor]]) -> None:
        self.sources = {name: [tensors[name] for tensors in by_rank] for name in sorted(by_rank[0])}

    def __getitem__(self, name: str) -> Tensor:
        return torch.cat(self.sources[name])


def whole_parts(path: Path, ranks: int) -> Parts:
    """Returns all parts of a sharded checkpoint, whose tensors are read when they are asked for."""
    shares = [torch.load(path / _share_name(rank), weights_only=True, mmap=True) for rank in range(ranks)]
    parts: dict[str, Mapping[str, Tensor]] = {part: ShardedTensors([s[part] for s in shares]) for part in shares[0]}
    return parts | {part: shares[0][part] for part in (REPLICATED,) if part in parts}


def check_ranks(path: Path, trainer: Mapping[str, Any], ranks: int | None) -> None:
    """Raises ValueError if another number of `ranks` (None: each has all weights) wrote the checkpoint."""
    if (wrote := trainer.get(RANKS)) != ranks:
        before, now = (
            "ranks with all of the weights each" if count is None else f"{count} ranks with a share each"
            for count in (wrote, ranks)
        )
        raise ValueError(
            f"checkpoint {path} was written by {before}, and this run has {now}, which leads to other weights: "
            f"set trainer.shard={'none' if wrote is None else f'full and trainer.num_workers={wrote}'}"
        )


def read_controller(path: Path) -> dict[str, Any]:
    controller: dict[str, Any] = json.loads((path / CONTROLLER).read_text())
    return controller


FORMAT = 6
MANIFEST, TRAINER, CONTROLLER = "manifest.json", "trainer.json", "controller.json"
FOLDER = "shards"  # Folder of a checkpoint with the files of all ranks, where each has a share of the weights.
REPLICATED = "algorithm"  # Part of a checkpoint of which every rank has all: the state of an algorithm.
Description = Mapping[str, Any]  # Size of a file in bytes (`bytes`) and its digest (`sha256`, hex).


class DamagedCheckpoint(ValueError):
    """Raised if a checkpoint does not agree with its manifest; the message names the file."""


def complete(
    folder: Path,
    trainer: Mapping[str, Any],
    controller: Mapping[str, Any],
    described: Mapping[str, Description] = MappingProxyType({}),
) -> None:
    """Adds trainer's and controller's state and the manifest to a folder of tensors; syncs everything to disk.

    `described` (name → description) are files hashed by their writers. Raises OSError if one is missing or has another
    size.
    """
    (folder / TRAINER).write_text(_json(trainer))
    (folder / CONTROLLER).write_text(_json(controller))
    _check_sizes(folder, described)
    files = dict(described)
    for file in sorted(folder.rglob("*")):
        sync(file)
        name = file.relative_to(folder).as_posix()
        if file.is_file() and name not in described:
            files[name] = _describe(file)
    (folder / MANIFEST).write_text(_json({"format": FORMAT, "digest": manifest_digest(files), "files": files}))
    sync(folder / MANIFEST)
    sync(folder)


def _check_sizes(folder: Path, described: Mapping[str, Description]) -> None:
    for name, expected in described.items():
        size, wrote = (folder / name).stat().st_size, expected["bytes"]
        if size != wrote:
            raise OSError(errno.EIO, f"it has {size:,} bytes, its writer wrote {wrote:,}", str(folder / name))


def verify_checkpoint(path: Path, *, shares: bool = True) -> list[str]:
    """Checks every file (shares only by size without `shares`) and returns the names. Raises DamagedCheckpoint."""
    files = _read_manifest(path)
    for name, expected in files.items():
        _check(path, name, expected, hashed=shares or not _is_share(name))
    return list(files)


def verify_share(path: Path, rank: int) -> None:
    """Checks every file against the manifest, without other ranks' shares. Raises DamagedCheckpoint."""
    for name, expected in _read_manifest(path).items():
        _check(path, name, expected, hashed=name == _share_name(rank) or not _is_share(name))


def _read_manifest(path: Path) -> dict[str, Description]:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"checkpoint {path} has no readable {MANIFEST}: {error}") from error
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or manifest.get("digest") != manifest_digest(files):
        raise DamagedCheckpoint(f"checkpoint {path}: {MANIFEST} is damaged")
    if manifest.get("format") != FORMAT:
        raise DamagedCheckpoint(f"checkpoint {path} has format {manifest.get('format')}, this version reads {FORMAT}")
    return files


def _check(path: Path, name: str, expected: Description, *, hashed: bool) -> None:
    file = path / name
    if not file.is_file():
        raise DamagedCheckpoint(f"checkpoint {path} lacks {name}")
    if file.stat().st_size != expected["bytes"] or (hashed and _describe(file) != expected):
        raise DamagedCheckpoint(f"checkpoint {path}: {name} does not have the size and digest it was written with")


def _share_name(rank: int) -> str:
    return f"{FOLDER}/rank_{rank}.pt"


def _is_share(name: str) -> bool:
    return name.startswith(f"{FOLDER}/")


def manifest_digest(files: Mapping[str, Any]) -> str:
    """Returns the hex SHA-256 of the descriptions of files, file → its size and digest, say."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _describe(file: Path) -> Description:
    return {"bytes": file.stat().st_size, "sha256": sha256_of(file)}


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def sync(path: Path) -> None:
    """Has the disk write a file or the names in a folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


logger = logging.getLogger(__name__)

_WORK = ".unfinished-"
_REPLACED = ".replaced-"  # Prefix of an old checkpoint's name while a new one of the same step replaces it.
_NAME = re.compile(rf"(?:{re.escape(_REPLACED)})?step_(\d+)")


def begin_checkpoint(directory: Path, nbytes: int) -> Path:
    """Returns a new folder for a checkpoint's files, which nobody reads before `end_checkpoint` renames it.

    What earlier calls left unfinished is removed. Raises OSError if the disk has no room for `nbytes` of tensors.
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


def end_checkpoint(work: Path, step: int, *, keep: int, spare: Collection[int] = ()) -> Path:
    """Makes the complete folder of `begin_checkpoint` the checkpoint of a step; returns its path."""
    directory = work.parent
    target = directory / f"step_{step}"
    if target.exists():
        target.rename(directory / f"{_REPLACED}{target.name}")
    work.rename(target)
    put_back_replaced(directory)
    sync(directory)
    _write_latest(directory, target.name)
    newest_first = written(directory)
    position = newest_first.index(target)
    older = [path for path in newest_first[position + keep :] if checkpoint_step(path) not in spare]
    for old in [*newest_first[:position], *older]:
        old.rename(directory / f"{_WORK}old-{uuid.uuid4().hex}")
    _remove_unfinished(directory)
    return target


def put_back_replaced(directory: Path) -> None:
    """Ends an interrupted replacement: renames the old checkpoint back, or removes it if there is a new one."""
    for replaced in directory.glob(f"{_REPLACED}*"):
        if _original(replaced).exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(_original(replaced))


def _original(replaced: Path) -> Path:
    return replaced.with_name(replaced.name.removeprefix(_REPLACED))


def drop_newer(directory: Path, step: int) -> None:
    """Removes the checkpoints after `step`, to which the run has returned."""
    for path in written(directory):
        if checkpoint_step(path) > step:
            path.rename(directory / f"{_WORK}newer-{uuid.uuid4().hex}")
    _remove_unfinished(directory)


def find_checkpoint(directory: Path, *, shares: bool = True) -> Path | None:
    """Returns the valid checkpoint with the highest step, or None; damaged ones are skipped with a warning."""
    for path in written(directory):
        try:
            verify_checkpoint(path, shares=shares)
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
    """Returns the paths of all checkpoints, valid or not, the highest step first (also one under replacement)."""
    entries = directory.iterdir() if directory.is_dir() else ()
    named = [entry for entry in entries if entry.is_dir() and _NAME.fullmatch(entry.name)]
    checkpoints = [entry for entry in named if not (entry.name.startswith(_REPLACED) and _original(entry).exists())]
    return sorted(checkpoints, key=checkpoint_step, reverse=True)


def _write_latest(directory: Path, name: str) -> None:
    work = directory / f"{_WORK}latest"
    work.write_text(name + "\n")
    sync(work)
    work.replace(directory / "latest")
    sync(directory)


def _remove_unfinished(directory: Path) -> None:
    for path in directory.glob(f"{_WORK}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
