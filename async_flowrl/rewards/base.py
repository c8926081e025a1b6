"""What a reward is: a callable over the images of one group."""

from collections.abc import Awaitable, Sequence
from typing import Protocol

from async_flowrl.types import ByteArray, Prompt


class RewardError(RuntimeError):
    """A reward raised, or returned something that is no list of finite numbers. Names the reward and the prompt."""


class Reward(Protocol):
    """Called once per group with images uint8 [n, H, W, 3]; returns n finite numbers, larger is better. May be async.

    Optional attributes: `deterministic` (True if absent: the same images and prompt always get the same score, so it
    need not be saved with a checkpoint), `needs_target` (False if absent: refuse prompt files without targets) and
    `check(prompt)`, which raises ValueError for a prompt it cannot score. It is called for every prompt at start-up, in
    the controller's process: a class that has it must be cheap to build (load weights with the first call).
    """

    def __call__(self, images: ByteArray, prompt: Prompt) -> Sequence[float] | Awaitable[Sequence[float]]: ...
