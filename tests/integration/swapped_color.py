"""The color reward with the colours of the two prompts exchanged, for a test that must see the effect exchanged."""

from collections.abc import Sequence
from dataclasses import replace

from async_flowrl.rewards.image_statistics import Color
from async_flowrl.types import ByteArray, Prompt

OTHER = {"red": "blue", "blue": "red"}


class SwappedColor(Color):
    """Pays "red ..." for blue and "blue ..." for red."""

    def check(self, prompt: Prompt) -> None:
        super().check(swapped(prompt))

    def __call__(self, images: ByteArray, prompt: Prompt) -> Sequence[float]:
        return super().__call__(images, swapped(prompt))


def swapped(prompt: Prompt) -> Prompt:
    return replace(prompt, text=" ".join(OTHER[word] for word in prompt.text.split()))
