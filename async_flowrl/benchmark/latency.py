"""Reward that only takes time, in place of a remote model that scores images."""

import math
import random
import time
from collections.abc import Sequence

from async_flowrl.types import ByteArray, Prompt


class Latency:
    """Scores every image 0 after `seconds` per call on average.

    `cv` is the coefficient of variation: 0 makes all calls equally long, above 0 they are log-normal (1: heavy tail).
    Raises ValueError if `seconds` or `cv` is negative.
    """

    def __init__(self, seconds: float, cv: float = 0.0, seed: int = 0) -> None:
        if seconds < 0 or cv < 0:
            raise ValueError(f"seconds and cv must not be negative, got {seconds} and {cv}")
        self._seconds, self._variance = seconds, math.log1p(cv * cv)
        self._random = random.Random(seed)

    def __call__(self, images: ByteArray, prompt: Prompt) -> Sequence[float]:
        spread = math.exp(self._random.gauss(0.0, math.sqrt(self._variance)) - self._variance / 2)
        time.sleep(self._seconds * spread)
        return [0.0] * len(images)
