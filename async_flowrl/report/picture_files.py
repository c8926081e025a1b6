"""Safe reading of a run's pictures: the path may come from a browser, so only files below images/ are read.

Symbolic links, hidden files, paths with "..", other file types and too large files are refused.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

TYPES = {".png": "image/png", ".webp": "image/webp"}
MAX_BYTES = 64 * 2**20
"""Largest file that is read."""
MAX_DEPTH = 4
"""Largest number of parts of a path."""


@dataclass(frozen=True)
class Picture:
    """The bytes of a picture file; `kind` is its MIME type."""

    content: bytes
    kind: str


def open_picture(folder: Path, below: str) -> Picture | None:
    """The picture at the path `below` inside `folder`; None if it does not exist or is refused."""
    parts = below.split("/")
    wrong = any(not part or part.startswith(".") or "\\" in part or "\0" in part for part in parts)
    kind = TYPES.get(Path(parts[-1]).suffix)
    if wrong or kind is None or len(parts) > MAX_DEPTH:
        return None
    try:
        content = _read(folder, parts)
    except (OSError, ValueError):
        return None
    return None if content is None else Picture(content, kind)


def _read(folder: Path, parts: list[str]) -> bytes | None:
    """Opens folder by folder with O_NOFOLLOW, so no part can be a link, even if files change during the call."""
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = inner
        file = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    finally:
        os.close(at)
    with open(file, "rb") as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            return None
        return opened.read(MAX_BYTES)
