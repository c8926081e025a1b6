"""Image files to edit: which are taken, and their pixels."""

import hashlib
import io
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

MAX_PIXELS = 2**26
# Side of the longer to the shorter side at most; models scale an image to a given area.
MAX_RATIO = 100
# Modes of Pillow whose pixels have one meaning as RGB.
MODES = ("RGB", "L", "P", "1")


def decoded(content: bytes) -> Any:
    """Returns the Pillow image of a file's bytes: RGB, turned as its EXIF orientation says. Raises ValueError."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            refused = _refusal(image)
            picture = None if refused else ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError as error:
        raise ValueError("is no image that Pillow reads") from error
    except Exception as error:  # Readers of damaged files raise errors of many kinds.
        raise ValueError(f"cannot be decoded: {str(error).partition(chr(10))[0]}") from error
    if refused:
        raise ValueError(refused)
    return picture


def _refusal(image: Any) -> str | None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        return f"has {width} × {height} pixels, at most {MAX_PIXELS:,} are taken"
    if max(width, height) > MAX_RATIO * min(width, height):
        return f"has {width} × {height} pixels, one side at most {MAX_RATIO} times the other is taken"
    # A phone's MPO has a second picture of the same scene.
    if getattr(image, "is_animated", False) and image.format != "MPO":
        return "is animated: give one of its frames"
    if "transparency" in image.info or "A" in image.getbands():
        return "has transparency: lay it over a colour first"
    return None if image.mode in MODES else f"has pixels of mode {image.mode}: convert it to RGB first"


def opened(image: Any) -> Any:
    """Returns the Pillow image of a `types.ConditionImage`, RGB. ValueError if its file is gone, or has other bytes."""
    try:
        content = Path(image.path).read_bytes()
    except OSError as error:
        where = "every node with rollout workers, or rewards that compare it, needs it at this path"
        raise ValueError(f"the image {image.path} cannot be read ({error.strerror}): {where}") from error
    if hashlib.sha256(content).hexdigest() != image.sha256:
        raise ValueError(f"the image {image.path} has changed since the start; restore the file, and resume the run")
    return decoded(content)
