"""The manifest of a checkpoint: SHA-256 and size of every other file, written last and checked on every read."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = 4
MANIFEST, TRAINER, CONTROLLER = "manifest.json", "trainer.json", "controller.json"


class DamagedCheckpoint(ValueError):
    """Raised if a checkpoint does not agree with its manifest; the message names the file."""


def complete(folder: Path, trainer: Mapping[str, Any], controller: Mapping[str, Any]) -> None:
    """Adds the states of trainer and controller and the manifest to a folder of tensors; syncs everything to disk."""
    (folder / TRAINER).write_text(_json(trainer))
    (folder / CONTROLLER).write_text(_json(controller))
    files = {}
    for file in sorted(folder.rglob("*")):
        sync(file)
        if file.is_file():
            files[file.relative_to(folder).as_posix()] = _describe(file)
    (folder / MANIFEST).write_text(_json({"format": FORMAT, "digest": manifest_digest(files), "files": files}))
    sync(folder / MANIFEST)
    sync(folder)


def verify_checkpoint(path: Path) -> list[str]:
    """Checks every file against the manifest and returns their names. Raises DamagedCheckpoint."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"checkpoint {path} has no readable {MANIFEST}: {error}") from error
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or manifest.get("digest") != manifest_digest(files):
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


def manifest_digest(files: Mapping[str, Any]) -> str:
    """Returns the hex SHA-256 of the descriptions of files, file → its size and digest, say."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _describe(file: Path) -> dict[str, Any]:
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
