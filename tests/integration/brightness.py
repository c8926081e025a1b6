"""A reward that a random tiny model learns within seconds, for tests."""

import numpy as np

from async_flowrl.types import ByteArray, Prompt


def brightness(images: ByteArray, prompt: Prompt) -> list[float]:
    """Mean of all channels of each image, 0..1."""
    return [float(np.mean(image)) / 255.0 for image in images]
