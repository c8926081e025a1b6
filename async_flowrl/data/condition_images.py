"""Condition images, which a prompt edits: the columns `image` and `images` of a row, the checks, and the pixels.

A prompt holds references. A file is read and decoded once; its hash and size are kept in `images.sqlite` of the cache,
and count as long as the file has the same length and time. Bytes in a row become a file of the cache.
"""

import base64
import binascii
import functools
import hashlib
import io
import os
import re
import sqlite3
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from async_flowrl.config.paths import cache_dir, expanded
from async_flowrl.types import ConditionImage

COLUMNS = ("image", "images")
INDEX = "images.sqlite"
MAX_PIXELS = 2**26
# Side of the longer to the shorter side at most; models scale an image to a given area.
MAX_RATIO = 100
# Modes of Pillow whose pixels have one meaning as RGB.
MODES = ("RGB", "L", "P", "1")
# Folders in which a relative path is looked up, from that of the prompt file; the second is that of Flow-Factory.
_FOLDERS = ("", "images")
_DATA_URI = re.compile(r"data:image/[\w.+-]+;base64,")
_SECONDS = 60.0  # For which a process waits for another's entry.


def read_images(columns: Mapping[str, Any], folder: Path) -> tuple[ConditionImage, ...]:
    """Returns the images of a row of a prompt file in `folder`. Raises ValueError, which names the image, or its place.

    An entry is a path, `{"path": …}`, `{"image": …}` or `{"bytes": …}`, a data URI, or bytes; `images` has a list.
    """
    values = {name: columns[name] for name in COLUMNS if columns.get(name)}
    if len(values) > 1:
        raise ValueError("it has both image and images: give one of them")
    return tuple(examined(_file(source, folder)) for value in values.values() for source in references(value))


def references(value: Any) -> list[str]:
    """Returns the path of each image in a cell of `image` or `images`; bytes are written to the cache before."""
    entries = value if isinstance(value, list | tuple) else [value]
    return [_reference(entry, place) for place, entry in enumerate(entries, start=1) if entry is not None]


def _reference(entry: Any, place: int) -> str:
    if isinstance(entry, Mapping):
        entry = next((entry[name] for name in ("bytes", "image", "path") if entry.get(name)), None)
    if isinstance(entry, str) and (start := _DATA_URI.match(entry)):
        try:
            entry = base64.b64decode(entry[start.end() :], validate=True)
        except binascii.Error as error:
            raise ValueError(f"image {place} is no valid base64: {error}") from error
    if isinstance(entry, bytes):
        return str(written(entry))
    if not isinstance(entry, str) or "://" in entry.removeprefix("file://"):
        raise ValueError(f"image {place} must be the path of a file, or bytes, got {entry!r:.80}")
    return entry.removeprefix("file://")


def written(content: bytes) -> Path:
    """Returns the file of the cache that has these bytes."""
    name = hashlib.sha256(content).hexdigest()
    path = cache_dir() / "images" / name[:2] / name
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as work:
            work.write(content)
        os.chmod(work.name, 0o644)
        os.replace(work.name, path)
    return path


def _file(source: str, folder: Path) -> Path:
    candidates = [folder / place / expanded(source) for place in _FOLDERS]
    if found := next((path for path in candidates if path.is_file()), None):
        return found.absolute()
    looked = " or ".join(map(str, dict.fromkeys(candidates)))
    raise ValueError(f"there is no image {looked}; with data.images=false it is not looked for")


def examined(path: Path) -> ConditionImage:
    """Returns the reference of an image file. Raises ValueError for a file that is none, or one that is not taken."""
    try:
        return _examined(path)
    except OSError as error:
        raise ValueError(f"the image {path} cannot be read: {error.strerror}") from error
    except sqlite3.Error as error:
        raise ValueError(
            f"hashes of images are kept in {cache_dir() / INDEX}, which cannot be used ({error}): remove it, or set "
            "$ASYNC_FLOWRL_CACHE to another folder"
        ) from error


def _examined(path: Path) -> ConditionImage:
    state, index, name = path.stat(), _index(cache_dir(), os.getpid()), str(path)
    kept = index.execute("SELECT length, time, sha256, height, width FROM images WHERE path = ?", [name]).fetchone()
    if kept is None or kept[:2] != (state.st_size, state.st_mtime_ns):
        content = path.read_bytes()
        try:
            width, height = decoded(content).size
        except ValueError as error:
            raise ValueError(f"the image {path} {error}") from error
        kept = (state.st_size, state.st_mtime_ns, hashlib.sha256(content).hexdigest(), height, width)
        index.execute("REPLACE INTO images VALUES (?, ?, ?, ?, ?, ?)", [name, *kept])
    return ConditionImage(kept[2], (kept[3], kept[4]), name)


@functools.lru_cache(maxsize=1)
def _index(folder: Path, process: int) -> sqlite3.Connection:
    folder.mkdir(parents=True, exist_ok=True)
    index = sqlite3.connect(folder / INDEX, _SECONDS, isolation_level=None, check_same_thread=False)
    index.execute("PRAGMA synchronous = OFF")  # What a crash of the machine loses is read again.
    index.execute(
        "CREATE TABLE IF NOT EXISTS images"
        "(path TEXT PRIMARY KEY, length INTEGER, time INTEGER, sha256 TEXT, height INTEGER, width INTEGER)"
    )
    return index


def decoded(content: bytes) -> Any:
    """Returns the Pillow image of a file's bytes: RGB, turned as its EXIF orientation says. Raises ValueError."""
    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(content)) as image:
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise ValueError(f"has {width} × {height} pixels, at most {MAX_PIXELS:,} are taken")
            if max(width, height) > MAX_RATIO * min(width, height):
                raise ValueError(
                    f"has {width} × {height} pixels, one side at most {MAX_RATIO} times the other is taken"
                )
            # A phone's MPO has a second picture of the same scene.
            if getattr(image, "is_animated", False) and image.format != "MPO":
                raise ValueError("is animated: give one of its frames")
            if "transparency" in image.info or "A" in image.getbands():
                raise ValueError("has transparency: lay it over a colour first")
            if image.mode not in MODES:
                raise ValueError(f"has pixels of mode {image.mode}: convert it to RGB first")
            return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError as error:
        raise ValueError("is no image that Pillow reads") from error
    except (OSError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"cannot be decoded: {error}") from error


def opened(image: ConditionImage) -> Any:
    """Returns the Pillow image, RGB. Raises ValueError if the file is not there any more, or has other bytes."""
    try:
        content = Path(image.path).read_bytes()
    except OSError as error:
        where = "every node with rollout workers needs it at this path"
        raise ValueError(f"the image {image.path} cannot be read ({error.strerror}): {where}") from error
    if hashlib.sha256(content).hexdigest() != image.sha256:
        raise ValueError(f"the image {image.path} has changed since the start; restore the file, and resume the run")
    return decoded(content)
