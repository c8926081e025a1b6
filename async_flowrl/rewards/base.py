"""The reward protocol: a callable over the images of one group."""

from collections.abc import Awaitable, Sequence
from typing import Protocol

from async_flowrl.types import ByteArray, Prompt


class RewardError(RuntimeError):
    """A reward raised, or returned something that is no list of finite numbers. Names the reward and the prompt."""


class Reward(Protocol):
    """Called once per group with images uint8 [n, H, W, 3]; returns n finite numbers, larger is better. May be async.

    Optional attributes of the class, function or object that the configuration names; they are read before it is built:

    - `deterministic`, True if absent: the same images and prompt always get the same score. If it is False, scores are
      written to scores.jsonl before their group may be trained, and reused after a resume.
    - `needs_target`, False if absent: prompt files without targets are refused.
    - `check(prompt)` raises ValueError for a prompt that the reward cannot score. It is called for every prompt at
      start-up, in the controller's process: a class that has it must be cheap to build (load weights with the first
      call).
    """

    def __call__(self, images: ByteArray, prompt: Prompt) -> Sequence[float] | Awaitable[Sequence[float]]: ...
