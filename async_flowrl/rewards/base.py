"""The reward protocol: a callable over the images of one group, or over one image."""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from async_flowrl.types import ByteArray, Prompt

ImageResult = float | Mapping[str, Any]
"""A finite number, larger is better; or a mapping with `score` and any further numbers and short strings."""


class RewardError(RuntimeError):
    """A reward raised, or returned something that is no finite number per image. Names the reward and the prompt."""


class Reward(Protocol):
    """Called once per group with images uint8 [n, H, W, 3]; returns one result per image, in order. May be async.

    Optional attributes of the class, function or object that the configuration names; they are read before it is built:

    - `pointwise`, False if absent. True: it is called once per image, with uint8 [H, W, 3] (see PointwiseReward).
    - `deterministic`, True if absent: the same images and prompt always get the same score. If it is False, scores are
      written to scores.jsonl before their group may be trained, and reused after a resume.
    - `needs_target`, False if absent: prompt files without targets are refused.
    - `check(prompt)` raises ValueError for a prompt that the reward cannot score. It is called for every prompt at
      start-up, in the controller's process: a class that has it must be cheap to build (load weights with the first
      call).
    - `connect(urls, token)`: it asks a server. A term with `serve` names such a class; the run calls this in every
      worker when its servers are up, and again when one has come up elsewhere. `token` is text or None.
    - `seen`, of an instance that has `connect`: a `Seen` (seen.py), which it tells what servers answer, or do not. The
      run starts a server again that lets calls time out in a row.
    - `memory_gib`, a number or a static method that gets the reward's options: GiB of device memory that it takes while
      it scores, weights and what passes; None, or no such attribute, is unknown. Plans count it where the pool has
      GPUs.
    - `waves(images, **options)`, a static method: the calls of a server that it makes for so many images of a group, as
      `async_flowrl.rewards.waves.Waves`. A run warns at its start where these may outlast `deadlines.score`.
    - `keep_in(folder)` is called once in every reward worker, with the run directory: what the reward keeps there is
      there after a resume, where the worker's node sees it.
    """

    def __call__(
        self, images: ByteArray, prompt: Prompt
    ) -> Sequence[ImageResult] | Awaitable[Sequence[ImageResult]]: ...


class PointwiseReward(Protocol):
    """Says `pointwise = True`; called with one image uint8 [H, W, 3], for several images at a time.

    A plain function is then called from several threads. An image whose call fails is tried again alone.
    """

    pointwise: bool

    def __call__(self, image: ByteArray, prompt: Prompt) -> ImageResult | Awaitable[ImageResult]: ...
