"""Image sizes: the forms in which people write them, and the one form (`Resolution`) that all other code uses.

A square is always stored as its side, an integer, so digests of a square do not depend on how it was written.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from async_flowrl.config.schema import Config, RolloutConfig

# Image size in pixels: one integer for a square image, (height, width) only where the two differ.
Resolution = int | tuple[int, int]
FORMS = "an integer, pixels along each side of a square image, or [height, width]"
# `512` or `512x768`, height first.
_WRITTEN = re.compile(r"\s*(\d+)\s*(?:[x×,]\s*(\d+)\s*)?")


def parse_resolution(value: Any) -> Resolution:
    """Returns the size of an integer, of (height, width), or of text such as `512x768`. Raises ValueError."""
    if isinstance(value, str) and (match := _WRITTEN.fullmatch(value)):
        value = [int(number) for number in match.groups() if number]
    numbers = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    numbers = [_whole(number) for number in numbers]
    if len(numbers) not in (1, 2) or any(type(number) is not int or number < 1 for number in numbers):
        raise ValueError(f"{FORMS}, each at least 1; got {value!r:.80}")
    return of_sides(numbers[0], numbers[-1])


def _whole(number: Any) -> Any:
    if isinstance(number, str) and number.strip().isdecimal():
        return int(number)
    return int(number) if isinstance(number, float) and number.is_integer() else number


def resolution_option(value: str, option: str = "--resolution") -> Resolution:
    try:
        return parse_resolution(value)
    except ValueError:
        raise ValueError(f"{option} must be 512, or HEIGHTxWIDTH such as 448x576, got {value!r:.80}") from None


def of_sides(height: int, width: int) -> Resolution:
    return height if height == width else (height, width)


def height_width(resolution: Resolution) -> tuple[int, int]:
    return (resolution, resolution) if isinstance(resolution, int) else resolution


def pixels(resolution: Resolution) -> int:
    height, width = height_width(resolution)
    return height * width


def largest(resolutions: Iterable[Resolution]) -> Resolution:
    """Returns the size with the most pixels; among equals the highest, so that the order does not matter."""
    return max(resolutions, key=lambda size: (pixels(size), height_width(size)))


def in_words(resolution: Resolution) -> str:
    """Returns `512`, or `512 × 768` with the height first."""
    return str(resolution) if isinstance(resolution, int) else f"{resolution[0]} × {resolution[1]}"


def in_pixels(resolution: Resolution) -> str:
    return f"{in_words(resolution)} px"


def written(resolution: Resolution) -> str:
    return str(resolution) if isinstance(resolution, int) else f"{resolution[0]}x{resolution[1]}"


def configured(rollout: RolloutConfig) -> tuple[Resolution, ...]:
    """Returns the sizes of images whose prompts set none: `rollout.resolutions` or, if empty, `rollout.resolution`.

    Raises ValueError, which names the key, for a wrong or repeated size.
    """
    several = rollout.resolutions
    if not isinstance(several, list | tuple):
        raise ValueError(f"rollout.resolutions must be a list such as [512,[448,576]], got {several!r:.80}")
    try:
        sizes = tuple(parse_resolution(value) for value in several or [rollout.resolution])
    except ValueError as error:
        key = "each of rollout.resolutions" if several else "rollout.resolution"
        raise ValueError(f"{key} must be {error}") from None
    if len(set(sizes)) < len(sizes):
        raise ValueError(f"rollout.resolutions names a size twice: {', '.join(map(in_words, sizes))}")
    return sizes


def at_size(config: Config, resolution: Resolution) -> Config:
    """Returns the configuration with `resolution` for all images; plans use it to compute the largest need."""
    return replace(config, rollout=replace(config.rollout, resolution=resolution, resolutions=[]))


def normalised(config: Config) -> Config:
    """Converts the configuration's sizes to `Resolution`; wrong sizes stay as they are, for `check` to refuse."""
    rollout = config.rollout
    try:
        rollout.resolution = parse_resolution(rollout.resolution)
        rollout.resolutions = [parse_resolution(value) for value in rollout.resolutions]
    except (ValueError, TypeError):
        pass
    return config
