"""The protocol of rewards; registry.py checks what the configuration names against it, and call.py makes the calls."""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from async_flowrl.types import ByteArray, Prompt

# The result for one image: a finite number (larger is better), or a mapping with that number under `score`. Its other
# entries ("extras") are numbers or strings, which are logged beside the score.
ImageResult = float | Mapping[str, Any]


class RewardError(RuntimeError):
    """A reward failed, or did not return one finite number per image. The message names the reward."""


class PromptRefused(RewardError, ValueError):
    """A reward does not score this prompt. It is not asked again; `serve-rewards` answers 422."""


class Reward(Protocol):
    """A callable that scores the images of one group, uint8 [n, H, W, 3], in one call; it may be async.

    It returns one result per image, in the order of the images. The class, function or object that the configuration
    names may have these optional attributes. A class is not built yet when they are read, unless stated otherwise:

    - `pointwise`, False if absent. True: the reward is called with one image, uint8 [H, W, 3], and returns its result.
      Up to `reward.concurrency` images are scored at a time, from several threads; a failed call is repeated alone.
    - `video`, False if absent. True: the reward gets videos, uint8 [n, F, H, W, 3], or [F, H, W, 3] if it is pointwise.
      Others get `reward.frames` frames of each video as images, and `reward.frame_score` makes one score of theirs.
    - `sources`, False if absent. True: the reward is called with a third argument, the images that the prompt edits, a
      list of uint8 [H, W, 3] in their order and own sizes. Prompts without such images are refused at start-up.
    - `differentiable`, False if absent. True: the instance or function has `of_tensor(images, prompt)`, the scores [n]
      with their gradient of images float32 [n, 3, H, W] in 0 .. 1, for `algorithm=direct_align`; an
      instance's `load()`, if it has one, is called before.
    - `deterministic`, True if absent: the same images and prompt always get the same score. False: scores are written
      to scores.jsonl before their group may be trained, and a resumed run reads them from there.
    - `needs_target`, False if absent. True: prompt files with a prompt that has no target are refused.
    - `check(prompt)` raises ValueError for a prompt that the reward cannot score. The controller's process builds the
      reward and calls `check` for every prompt, with every size that its images may get as its `resolution` (None
      outside of runs), at start-up, so building it must be cheap: load weights in the first call.
    - `check_group(images, frames)` raises ValueError for a group of so many images, or videos of so many frames, that
      the reward cannot score; with `sources` its third argument is the most that a prompt has. It is called at
      start-up, as `check` is.
    - `connect(urls, token)` passes the URLs of servers that the run has started for the term (`serve`). Every reward
      worker calls it when the servers are ready, and again after one came up at another address. `token` is text or
      None.
    - `memory_gib`, a number or a static method that gets the reward's options: GiB of device memory during scoring, for
      weights and activations. A method with an argument `differentiated` gets it for the trainer's plan of a
      differentiable reward: the number of images that a gradient goes through. None or absent means unknown. Memory
      plans count it where the pool has GPUs.
    - `keep_in(folder)`, of the instance: called once in every reward worker with the run directory. A resumed run finds
      the files that the reward wrote there, if the worker's node sees that directory.
    - `for_term(name)`, of the instance: called once with the name of the term, its key under `reward.terms`.
    - `features(images)`, of the instance: one vector per image. Evaluations report the mean distance between the images
      of a prompt, for held-out terms (terms that are not trained on).
    """

    def __call__(
        self, images: ByteArray, prompt: Prompt
    ) -> Sequence[ImageResult] | Awaitable[Sequence[ImageResult]]: ...
