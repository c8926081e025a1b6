"""Paths and files: the configurations shipped with the package, paths as they are typed, and files written whole."""

import hashlib
import os
import platform
import threading
from pathlib import Path

from async_flowrl.config.error_text import did_you_mean

_PACKAGE = Path(__file__).resolve().parents[1]


def config_dir() -> Path:
    """Returns the folder of shipped configurations and prompt lists. Raises FileNotFoundError if it is missing."""
    checkout, wheel = _PACKAGE.parent / "configs", _PACKAGE / "configs"
    # The wheel's folder comes first: a folder `configs` beside an installed package may be another project's.
    for folder in (wheel, checkout):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"the configuration folder is missing: neither {checkout} nor {wheel} exists")


def cache_dir() -> Path:
    """Returns this package's cache folder: `$ASYNC_FLOWRL_CACHE`, or ~/.cache/async_flowrl."""
    return Path(os.environ.get("ASYNC_FLOWRL_CACHE", "~/.cache/async_flowrl")).expanduser()


def expanded(path: str) -> Path:
    """Returns the path with the home folder in place of `~`; unlike Path's own, it leaves a `~x` that is no user's."""
    return Path(os.path.expanduser(path))


def sha256_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def find_data(path: str, *, key: str = "", folder: bool = False) -> Path:
    """Returns the path of an existing file, or also of a folder with `folder=True`.

    A relative path is looked up in the working directory, then among the shipped files. Raises FileNotFoundError, which
    names `key` and a similar file name in the folders searched.
    """
    place = expanded(path)
    roots = [Path()] if place.is_absolute() else [Path.cwd(), config_dir()]
    candidates = [root / place for root in roots]
    for candidate in candidates:
        if candidate.is_file() or (folder and candidate.is_dir()):
            return candidate
    problem = "is a folder, not a file" if any(candidate.is_dir() for candidate in candidates) else "does not exist"
    setting, searched = f"{key}={path}" if key else path, " and ".join(map(str, candidates))
    raise FileNotFoundError(f"{setting} {problem} (looked for {searched}){_hint(candidates)}")


def _hint(candidates: list[Path]) -> str:
    for folder in [candidate.parent for candidate in candidates if candidate.parent.is_dir()]:
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
        if hint := did_you_mean(candidates[0].name, names, folder.joinpath):
            return hint
    return ""


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes a file that is always complete: under another name, synced, and then renamed."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def share_file(path: Path, content: bytes) -> None:
    """Writes a file of the cache, which other processes may read and write meanwhile; what they read is complete."""
    work = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work.write_bytes(content)
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)
