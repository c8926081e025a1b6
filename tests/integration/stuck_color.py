"""The color reward with some calls that take longer than a deadline, for workers that are threads."""

import time
from collections.abc import Sequence

from async_flowrl.rewards.image_statistics import Color
from async_flowrl.types import ByteArray, Prompt

SECONDS = 8.0
STUCK = (4, 5)
"""Numbers of the calls that are stuck, over all workers."""
calls: list[str] = []
"""Prompts of the calls until now; a test clears it."""


class StuckColor(Color):
    def __call__(self, images: ByteArray, prompt: Prompt) -> Sequence[float]:
        calls.append(prompt.text)
        if len(calls) in STUCK:
            time.sleep(SECONDS)
        return super().__call__(images, prompt)
