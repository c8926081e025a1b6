"""Image tokens: how a network divides an image into a grid of them, and which image sizes it therefore takes."""

import math
from dataclasses import dataclass

from async_flowrl.config.resolution import height_width, in_words, of_sides
from async_flowrl.types import Resolution


@dataclass(frozen=True)
class ImageTokens:
    """The image tokens of a model."""

    title: str
    """Name of the model in messages."""
    side: int
    """Side of a token in pixels."""
    size_step: int
    """Image sides must be a multiple of this many pixels, too."""
    largest: tuple[int, int] | None
    """Most rows and columns for which the network has positions; None: any number of them."""


def grid_of(resolution: Resolution, tokens: ImageTokens) -> tuple[int, int]:
    """Returns rows and columns of the tokens of an image.

    Raises ValueError, with the nearest size, if they are not whole, and for more than `tokens.largest`.
    """
    (height, width), step = height_width(resolution), math.lcm(tokens.side, tokens.size_step)
    if height % step or width % step:
        wanted = "a multiple" if isinstance(resolution, int) else "multiples"
        nearest = of_sides(*(step * max(1, round(each / step)) for each in (height, width)))
        raise ValueError(
            f"resolution must be {wanted} of {step}, got {in_words(resolution)}, nearest: {in_words(nearest)}"
        )
    grid = height // tokens.side, width // tokens.side
    if tokens.largest is not None and any(a > b for a, b in zip(grid, tokens.largest, strict=True)):
        most = of_sides(*(tokens.side * each for each in tokens.largest))
        raise ValueError(
            f"resolution must be at most {in_words(most)} px for {tokens.title}, whose network has no positions beyond "
            f"that, got {in_words(resolution)}"
        )
    return grid
