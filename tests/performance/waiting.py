"""Waiting is a reward that answers after a random time; reward workers of tests.performance.order build it.

This module imports no torch, so that the processes of reward workers start as quickly as those of a simple reward.
"""

import hashlib
import random
import time

from async_flowrl.types import ByteArray, Prompt

MEAN_SECONDS = 0.4
"""Mean of the time, which is drawn from an exponential distribution: its coefficient of variation is 1."""


class Waiting:
    """A reward that answers after an exponentially distributed time, by the images alone."""

    deterministic = True

    def __call__(self, images: ByteArray, prompt: Prompt) -> list[float]:
        digest = hashlib.blake2b(images.tobytes(), digest_size=8).digest()
        time.sleep(MEAN_SECONDS * random.Random(digest).expovariate(1.0))
        return [float(image.mean()) / 255 for image in images]
