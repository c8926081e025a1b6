"""The folder of a run's checkpoints: begins and ends one, keeps the newest, and finds them again.

A checkpoint is written to a temporary folder and then renamed, so it is never incomplete.
"""

import errno
import logging
import re
import shutil
import uuid
from collections.abc import Collection
from pathlib import Path

from async_flowrl.training.checkpoint_manifest import DamagedCheckpoint, sync, verify_checkpoint

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


def _is_replaced(path: Path) -> bool:
    return path.name.startswith(_REPLACED)


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
    checkpoints = [entry for entry in named if not (_is_replaced(entry) and _original(entry).exists())]
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
