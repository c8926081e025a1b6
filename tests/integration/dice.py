"""A reward that is not deterministic, for tests."""

import random

from async_flowrl.types import ByteArray, Prompt


class Dice:
    """A random number for every image, another one every time."""

    deterministic = False

    def __call__(self, images: ByteArray, prompt: Prompt) -> list[float]:
        source = random.SystemRandom()
        return [source.random() for _ in images]
