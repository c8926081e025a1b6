"""Sizes of images and videos: the forms in which people write them, and the one (`Resolution`) of all other code.

A square is always stored as its side, an integer, so digests of a square do not depend on how it was written.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from async_flowrl.config.schema import Config, RolloutConfig

# Size in pixels: one integer for a square image, (height, width) only where the two differ; of a video always (frames,
# height, width).
Resolution = int | tuple[int, int] | tuple[int, int, int]
FORMS = (
    "an integer, pixels along each side of a square image, or [height, width], or [frames, height, width] of a video"
)
# `512`, `512x768` with the height first, or `17x512x768` with the frames before it.
_WRITTEN = re.compile(r"\s*(\d+)\s*(?:[x×,]\s*(\d+)\s*)?(?:[x×,]\s*(\d+)\s*)?")


def parse_resolution(value: Any) -> Resolution:
    """Returns the size of an integer, (height, width), (frames, height, width) or text as `512x768`; or ValueError."""
    if isinstance(value, str) and (match := _WRITTEN.fullmatch(value)):
        value = [int(number) for number in match.groups() if number]
    numbers = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    numbers = [_whole(number) for number in numbers]
    if len(numbers) not in (1, 2, 3) or any(type(number) is not int or number < 1 for number in numbers):
        raise ValueError(f"{FORMS}, each at least 1; got {value!r:.80}")
    return (numbers[0], numbers[1], numbers[2]) if len(numbers) == 3 else of_sides(numbers[0], numbers[-1])


def _whole(number: Any) -> Any:
    if isinstance(number, str) and number.strip().isdecimal():
        return int(number)
    return int(number) if isinstance(number, float) and number.is_integer() else number


def resolution_option(value: str, option: str = "--resolution") -> Resolution:
    try:
        return parse_resolution(value)
    except ValueError:
        forms = "512, HEIGHTxWIDTH such as 448x576, or FRAMESxHEIGHTxWIDTH"
        raise ValueError(f"{option} must be {forms}, got {value!r:.80}") from None


def of_sides(height: int, width: int) -> Resolution:
    return height if height == width else (height, width)


def height_width(resolution: Resolution) -> tuple[int, int]:
    return (resolution, resolution) if isinstance(resolution, int) else resolution[-2:]


def frames_of(resolution: Resolution) -> int | None:
    """Returns the number of frames of a video; None for an image."""
    return resolution[0] if isinstance(resolution, tuple) and len(resolution) == 3 else None


def with_frames(resolution: Resolution, frames: int | None) -> Resolution:
    """Returns the size of a video of so many frames; None, and a size that has its own, leave it as it is."""
    if frames is None or frames_of(resolution) is not None:
        return resolution
    return frames, *height_width(resolution)


def spaced_frames(frames: int, count: int) -> list[int]:
    """Returns the places of at most `count` frames, evenly spaced from the first to the last of `frames`."""
    count = min(count, frames)
    return [round(place * (frames - 1) / max(1, count - 1)) for place in range(count)]


def pixels(resolution: Resolution) -> int:
    """Returns the number of pixels, of a video in all its frames."""
    return math.prod(height_width(resolution)) * (frames_of(resolution) or 1)


def largest(resolutions: Iterable[Resolution]) -> Resolution:
    """Returns the size with the most pixels; among equals the highest, so that the order does not matter."""
    return max(resolutions, key=lambda size: (pixels(size), height_width(size)))


def in_words(resolution: Resolution) -> str:
    """Returns `512`, or `512 × 768` with the height first; of a video `17 frames of 512 × 768`."""
    frames, sides = frames_of(resolution), height_width(resolution)
    size = " × ".join(map(str, sides[: 1 if isinstance(resolution, int) else 2]))
    return size if frames is None else f"{frames} frames of {size}"


def in_pixels(resolution: Resolution) -> str:
    return f"{in_words(resolution)} px"


def written(resolution: Resolution) -> str:
    return "x".join(map(str, [resolution] if isinstance(resolution, int) else resolution))


def configured(rollout: RolloutConfig) -> tuple[Resolution, ...]:
    """Returns the sizes of images whose prompts set none: `rollout.resolutions` or, if empty, `rollout.resolution`.

    With `rollout.frames` they are sizes of videos. ValueError, which names the key, for a wrong or repeated size.
    """
    several = rollout.resolutions
    if not isinstance(several, list | tuple):
        raise ValueError(f"rollout.resolutions must be a list such as [512,[448,576]], got {several!r:.80}")
    try:
        sizes = tuple(sized(rollout, value) for value in several or [rollout.resolution])
    except ValueError as error:
        key = "each of rollout.resolutions" if several else "rollout.resolution"
        raise ValueError(f"{key} must be {error}") from None
    if len(set(sizes)) < len(sizes):
        raise ValueError(f"rollout.resolutions names a size twice: {', '.join(map(in_words, sizes))}")
    return sizes


def sized(rollout: RolloutConfig, value: Any) -> Resolution:
    """Returns the size of `value`; `rollout.frames`, where it is set, is the number of frames. Raises ValueError."""
    size = parse_resolution(value)
    return size if rollout.frames is None else (rollout.frames, *height_width(size))


def at_size(config: Config, resolution: Resolution) -> Config:
    """Returns the configuration with `resolution` for all images; plans use it to compute the largest need."""
    return replace(config, rollout=replace(config.rollout, resolution=resolution, resolutions=[], frames=None))


def normalised(config: Config) -> Config:
    """Converts the configuration's sizes to `Resolution`; wrong sizes stay as they are, for `check` to refuse."""
    rollout = config.rollout
    try:
        rollout.resolution = sized(rollout, rollout.resolution)
        rollout.resolutions = [sized(rollout, value) for value in rollout.resolutions]
    except (ValueError, TypeError):
        pass
    return config
