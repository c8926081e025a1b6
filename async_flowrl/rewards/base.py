"""What a reward is: a callable over the images of one group."""

from collections.abc import Awaitable, Sequence
from typing import Protocol

from async_flowrl.types import ByteArray, Prompt


class Reward(Protocol):
    """Called once per group with images uint8 [n, H, W, 3]; returns n finite numbers, larger is better. May be async."""

    def __call__(self, images: ByteArray, prompt: Prompt) -> Sequence[float] | Awaitable[Sequence[float]]: ...
