"""The manifest of a checkpoint: SHA-256 and size of every other file, written last and checked on every read.

The shares of several ranks together are too large for one process to hash. So each rank describes its own share when
it has written it, and checks its own share when the run goes on from the checkpoint.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping
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
