"""The folder of a run's checkpoints: begins and ends one, verifies it, keeps the newest, and finds them again.

A checkpoint is written to a temporary folder and then renamed, so it is never incomplete. Its manifest has the digest
of every file. The shares of several ranks together are too large for one process to hash, so each rank describes its
own share when it has written it, and checks its own share when the run goes on from the checkpoint.
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
from pathlib import Path
from types import MappingProxyType
from typing import Any

FORMAT = 4
MANIFEST, TRAINER, CONTROLLER = "manifest.json", "trainer.json", "controller.json"
FOLDER = "shards"
"""Folder of a checkpoint with the files of all ranks, where each has a share of the weights."""
_SHARE = re.compile(rf"{FOLDER}/__(\d+)_\d+\.distcp")
"""Name of a file with the share of a rank, as torch.distributed.checkpoint names it; the group is the rank."""
Description = Mapping[str, Any]
"""Size of a file in bytes (`bytes`) and its digest (`sha256`, hex)."""


class DamagedCheckpoint(ValueError):
    """Raised if a checkpoint does not agree with its manifest; the message names the file."""


def complete(
    folder: Path,
    trainer: Mapping[str, Any],
    controller: Mapping[str, Any],
    described: Mapping[str, Description] = MappingProxyType({}),
) -> None:
    """Adds the states of trainer and controller and the manifest to a folder of tensors; syncs everything to disk.

    `described` (name in the folder → description) are files that their writers have hashed already; they are not read
    again. Raises OSError if one of them is missing here or has another size.
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
    """Raises OSError for a file that is missing, or that has another size than its writer says."""
    for name, expected in described.items():
        size, wrote = (folder / name).stat().st_size, expected["bytes"]
        if size != wrote:
            raise OSError(errno.EIO, f"it has {size:,} bytes, its writer wrote {wrote:,}", str(folder / name))


def described_share(folder: Path, rank: int) -> dict[str, Description]:
    """Returns the descriptions of the files that `rank` has written into the folder of a checkpoint, by their names."""
    names = [file.relative_to(folder).as_posix() for file in sorted((folder / FOLDER).iterdir())]
    return {name: _describe(folder / name) for name in names if _rank_of(name) == rank}


def verify_checkpoint(path: Path, *, shares: bool = True) -> list[str]:
    """Checks every file against the manifest and returns their names. Raises DamagedCheckpoint.

    Without `shares`, the shares of several ranks must only be there and have the right size, and are not read: the
    ranks check them (`verify_share`).
    """
    files = _read_manifest(path)
    for name, expected in files.items():
        _check(path, name, expected, hashed=shares or _rank_of(name) is None)
    return list(files)


def verify_share(path: Path, rank: int) -> None:
    """Checks every file against the manifest, except that the shares of other ranks are not read.

    Raises DamagedCheckpoint.
    """
    for name, expected in _read_manifest(path).items():
        _check(path, name, expected, hashed=_rank_of(name) in (None, rank))


def _read_manifest(path: Path) -> dict[str, Description]:
    """Returns the descriptions of all files by name. Raises DamagedCheckpoint."""
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
    """Raises DamagedCheckpoint unless the file is there with the right size and, if `hashed`, the right digest."""
    file = path / name
    if not file.is_file():
        raise DamagedCheckpoint(f"checkpoint {path} lacks {name}")
    if file.stat().st_size != expected["bytes"] or (hashed and _describe(file) != expected):
        raise DamagedCheckpoint(f"checkpoint {path}: {name} does not have the size and digest it was written with")


def _rank_of(name: str) -> int | None:
    """Returns the rank whose share a file of a checkpoint has; None for any other file."""
    match = _SHARE.fullmatch(name)
    return None if match is None else int(match[1])


def manifest_digest(files: Mapping[str, Any]) -> str:
    """Returns the hex SHA-256 of the descriptions of files, file → its size and digest, say."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _describe(file: Path) -> Description:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


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
_REPLACED = ".replaced-"
"""Prefix of an old checkpoint's name while a new one of the same step replaces it."""
_NAME = re.compile(rf"(?:{re.escape(_REPLACED)})?step_(\d+)")


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


def end_checkpoint(work: Path, step: int, *, keep: int, spare: Collection[int] = ()) -> Path:
    """Makes the folder of `begin_checkpoint`, in which `complete` has written the manifest, the checkpoint of a step.

    Returns its path. Which older and newer checkpoints are removed: `write_checkpoint` (checkpoint.py).
    """
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
    """Ends an interrupted replacement: renames the old checkpoint back if there is no new one, else removes it.

    Only the process that writes to the folder may call it.
    """
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
    """Returns the valid checkpoint with the highest step, or None. Damaged ones are skipped with a warning.

    Without `shares`, the shares of several ranks are not read (`verify_checkpoint`).
    """
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
    """Returns the paths of all checkpoints of a folder, valid or not, the highest step first.

    After an interrupted replacement without a new checkpoint, the path of the old one is returned.
    """
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
