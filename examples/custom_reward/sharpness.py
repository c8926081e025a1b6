"""Examples of custom rewards, named on the command line as `pkg.module:attr`; see README.md in this folder."""

import asyncio
from collections.abc import Sequence

import numpy as np

from async_flowrl.types import ByteArray, Prompt


def sharpness(images: ByteArray, prompt: Prompt, scale: float = 1.0) -> Sequence[float]:
    """Mean absolute difference of neighbouring pixels of images uint8 [n, H, W, 3]: one value in 0..scale per image."""
    pixels = images.astype(np.float64) / 255.0
    across, down = np.abs(np.diff(pixels, axis=2)), np.abs(np.diff(pixels, axis=1))
    return [scale * (a.mean() + d.mean()) / 2.0 for a, d in zip(across, down, strict=True)]


class Judge:
    """Skeleton of a reward that asks a service: asynchronous, with options from the configuration.

    `parallel` is the largest number of requests at a time; `seconds` is how long each pretended request takes.
    """

    deterministic = False
    """False, because a second call may answer differently; scores are therefore saved with a checkpoint."""

    def __init__(self, parallel: int = 8, seconds: float = 0.01) -> None:
        self._turns = asyncio.Semaphore(parallel)
        self._seconds = seconds

    async def __call__(self, images: ByteArray, prompt: Prompt) -> Sequence[float]:
        return await asyncio.gather(*(self._ask(image, prompt) for image in images))

    async def _ask(self, image: ByteArray, prompt: Prompt) -> float:
        async with self._turns:
            await asyncio.sleep(self._seconds)  # here: one request to your judge
            return float(image.mean()) / 255.0
