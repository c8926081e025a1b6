"""Held-out rewards for tests: one falls when a run trains on brightness, and one never answers."""

from collections.abc import Sequence

from async_flowrl.types import ByteArray, Prompt


def darkness(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    """Minus the mean grey, 0 .. -1."""
    return [-float(image.mean()) / 255 for image in images]


def silent(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    raise ConnectionError("the judge is out")
