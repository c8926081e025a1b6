"""Condition images, which a prompt edits: the columns `image` and `images` of a row, and the index of the files.

A prompt holds references. A file is read and decoded once; its hash and size are kept in `images.sqlite` of the cache,
and count as long as the file has the same length and times. Bytes in a row become a file of the cache.
"""

import base64
import binascii
import functools
import hashlib
import os
import re
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_flowrl.config.error_text import first_line
from async_flowrl.config.paths import cache_dir, expanded, share_file
from async_flowrl.image_file import decoded
from async_flowrl.types import ConditionImage

COLUMNS = ("image", "images")
INDEX = "images.sqlite"
# Folders in which a relative path is looked up, from that of the prompt file; the second is that of Flow-Factory.
_FOLDERS = ("", "images")
_DATA_URI = re.compile(r"data:image/[\w.+-]+(;[\w.+-]+=[^;,]*)*;base64,")
_SECONDS = 60.0  # For which a process waits for another's entry.


def read_images(columns: Mapping[str, Any], folder: Path) -> tuple[ConditionImage, ...]:
    """Returns the images of a row of a prompt file in `folder`. Raises ValueError, which names the image, or its place.

    An entry is a path, `{"path": …}`, `{"image": …}` or `{"bytes": …}`, a data URI, or bytes; `images` has a list.
    """
    values = {name: columns[name] for name in COLUMNS if columns.get(name)}
    if len(values) > 1:
        raise ValueError("it has both image and images: give one of them")
    sources = [source for value in values.values() for source in references(value)]
    return tuple(examined(_file(source, folder, place)) for place, source in enumerate(sources, start=1))


def references(value: Any) -> list[str]:
    """Returns the path of each image in a cell of `image` or `images`; bytes are written to the cache before."""
    return [_reference(entry, place) for place, entry in enumerate(_entries(value), start=1)]


def stored(value: Any) -> list[str]:
    """Returns a cell of the same images without bytes; what `references` refuses, it refuses in this cell, too."""
    return [str(written(entry)) if isinstance(entry, bytes) else str(entry or "") for entry in _entries(value)]


def _entries(value: Any) -> list[Any]:
    entries = value if isinstance(value, list | tuple) else [value]
    return [_unwrapped(entry) for entry in entries if entry is not None]


def _unwrapped(entry: Any) -> Any:
    if isinstance(entry, Mapping):
        return next((entry[name] for name in ("bytes", "image", "path") if entry.get(name)), None)
    return entry


def _reference(entry: Any, place: int) -> str:
    if isinstance(entry, str) and (start := _DATA_URI.match(entry)):
        try:
            entry = base64.b64decode(entry[start.end() :], validate=True)
        except binascii.Error as error:
            raise ValueError(f"image {place} is no valid base64: {error}") from error
    if isinstance(entry, bytes):
        return str(written(entry))
    if not entry or not isinstance(entry, str) or "://" in entry.removeprefix("file://"):
        raise ValueError(
            f"image {place} must be the path of a file, or bytes, got {entry!r:.80}; with data.images=false it is not "
            "looked for"
        )
    return entry.removeprefix("file://")


def written(content: bytes) -> Path:
    """Returns the file of the cache that has these bytes. Raises ValueError if the cache cannot be written."""
    name = hashlib.sha256(content).hexdigest()
    path = cache_dir() / "images" / name[:2] / name
    try:
        if not path.is_file():
            share_file(path, content)
    except OSError as error:
        raise ValueError(
            f"images are written to {cache_dir() / 'images'}, which cannot be done ({error.strerror}); the variable "
            "ASYNC_FLOWRL_CACHE names another folder"
        ) from error
    return path


def _file(source: str, folder: Path, number: int) -> Path:
    try:
        candidates = [folder / place / expanded(source) for place in _FOLDERS]
        found = next((path for path in candidates if path.is_file()), None)
    except OSError as error:  # for example a name that is too long, as base64 is
        raise ValueError(f"image {number} is no path of a file ({error.strerror}): {source!r:.80}") from error
    if found is not None:
        return found
    looked = " or ".join(map(str, dict.fromkeys(candidates)))
    raise ValueError(f"there is no image {looked}; with data.images=false it is not looked for")


def examined(path: Path) -> ConditionImage:
    """Returns the reference of an image file. Raises ValueError for a file that is none, or one that is not taken."""
    try:
        return _examined(path.absolute(), _index(cache_dir(), os.getpid()))
    except sqlite3.Error as error:
        raise ValueError(
            f"hashes of images are kept in {cache_dir() / INDEX}, which cannot be used ({error}): remove it, or set "
            "$ASYNC_FLOWRL_CACHE to another folder"
        ) from error


def _examined(path: Path, index: sqlite3.Connection) -> ConditionImage:
    name = str(path)
    try:
        state = path.stat()
        # The time of a change of a file's state is not kept by copies, and nobody can set it.
        times = f"{state.st_mtime_ns} {state.st_ctime_ns}"
        kept = index.execute("SELECT length, times, sha256, height, width FROM files WHERE path = ?", [name]).fetchone()
        if kept is None or kept[:2] != (state.st_size, times):
            content = path.read_bytes()
            width, height = decoded(content).size
            kept = (state.st_size, times, hashlib.sha256(content).hexdigest(), height, width)
            index.execute("REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", [name, *kept])
    except OSError as error:
        raise ValueError(f"the image {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"the image {path} {error}") from error
    return ConditionImage(kept[2], (kept[3], kept[4]), name)


@functools.lru_cache(maxsize=1)
def _index(folder: Path, process: int) -> sqlite3.Connection:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise sqlite3.OperationalError(first_line(error)) from error
    index = sqlite3.connect(folder / INDEX, _SECONDS, isolation_level=None, check_same_thread=False)
    index.execute("PRAGMA synchronous = OFF")  # What a crash of the machine loses is read again.
    index.execute(
        "CREATE TABLE IF NOT EXISTS files"
        "(path TEXT PRIMARY KEY, length INTEGER, times TEXT, sha256 TEXT, height INTEGER, width INTEGER)"
    )
    return index
