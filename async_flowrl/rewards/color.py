"""The reward `color`: how red, green or blue an image is."""

from collections.abc import Sequence

import numpy as np

from async_flowrl.config.messages import unknown_name
from async_flowrl.types import ByteArray, Prompt

CHANNELS = {"red": 0, "green": 1, "blue": 2}


class Color:
    """Scores an image by the mean of one colour channel minus the mean of the other two, from -1 to 1.

    `channel` is red, green or blue for all prompts; with None, the first word of each prompt names the channel.
    """

    def __init__(self, channel: str | None = None) -> None:
        if channel is not None and channel not in CHANNELS:
            raise ValueError(unknown_name("channel", channel, CHANNELS))
        self.channel = channel

    def check(self, prompt: Prompt) -> None:
        """Raises ValueError if the prompt's first word is needed and names no channel."""
        self._channel(prompt)

    def __call__(self, images: ByteArray, prompt: Prompt) -> Sequence[float]:
        means = images.reshape(len(images), -1, 3).mean(axis=1, dtype=np.float64) / 255.0
        named = means[:, self._channel(prompt)]
        others = (means.sum(axis=1) - named) / 2.0
        return [float(value) for value in named - others]

    def _channel(self, prompt: Prompt) -> int:
        word = self.channel or next(iter(prompt.text.lower().split()), "")
        if word not in CHANNELS:
            raise ValueError(unknown_name(f"the first word of prompt {prompt.text!r}", word, CHANNELS))
        return CHANNELS[word]
