"""A reward that a random tiny model learns within seconds, for tests."""

import random
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from async_flowrl.types import ByteArray, Prompt


class Dice:
    """A random number for every image, another one every time."""

    deterministic = False

    def __call__(self, images: ByteArray, prompt: Prompt) -> list[float]:
        source = random.SystemRandom()
        return [source.random() for _ in images]


def darkness(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    """Minus the mean grey, 0 .. -1."""
    return [-float(image.mean()) / 255 for image in images]


def silent(images: ByteArray, prompt: Prompt) -> Sequence[float]:
    raise ConnectionError("the judge is out")


class DifferentiableBrightness:
    """The same with its gradient."""

    differentiable = True

    def __call__(self, images: ByteArray, prompt: Prompt) -> list[float]:
        return brightness(images, prompt)

    def of_tensor(self, images: Tensor, prompt: Prompt) -> Tensor:
        return images.flatten(1).mean(dim=1)


def brightness(images: ByteArray, prompt: Prompt) -> list[float]:
    """Mean of all channels of each image, 0..1."""
    return [float(np.mean(image)) / 255.0 for image in images]
