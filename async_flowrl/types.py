"""Messages between the controller, the rollout pool, the reward pool and the trainer. All frozen, all picklable.

Arrays that pass through the object store are numpy, never torch; images are uint8 [n, H, W, 3].
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]
Conditioning = dict[str, npt.NDArray[Any]]
"""What a model family needs of one prompt, without a batch dimension, e.g. {"prompt_embeds": [L, D] float32}."""

TokenIds = tuple[int, ...]
Resolution = int | tuple[int, int]
"""Pixels of an image: the side of a square one, otherwise height and width, which then differ."""

Wording = str | TokenIds
"""What a text encoder reads: text, or the ids that its tokenizer makes of it inside the model's prompt template."""

Asked = tuple[Wording, str | None, bool]
"""What an embedding is made of: a prompt's words or token ids, its system prompt, and whether guidance leads away."""

TRAIN, EVALUATION = "train", "evaluation"
POLICY, EMA = "policy", "ema"
"""The named streams of the checkpoint engine: the trained weights and their moving average."""


@dataclass(frozen=True)
class Prompt:
    """One line of the prompt file; `target` is what the reward wants (an OCR target, say).

    Where there are token ids, text encoders read those, and everything else (rewards, pictures) the text.
    """

    index: int
    text: str
    negative: str | None = None
    system: str | None = None
    target: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    token_ids: TokenIds | None = None
    negative_token_ids: TokenIds | None = None
    resolution: Resolution | None = None
    """Of its images, where it brings a size of its own."""

    @property
    def wording(self) -> Wording:
        return self.text if self.token_ids is None else self.token_ids

    def negative_wording(self, default: str) -> Wording:
        """What guidance leads away from; `default` where the prompt has nothing of its own."""
        if self.negative_token_ids is not None:
            return self.negative_token_ids
        return default if self.negative is None else self.negative


@dataclass(frozen=True)
class Sampling:
    """How an image is sampled. `sde_type` is `sde`, `dance_sde`, `cps` or `ode`."""

    resolution: Resolution
    num_inference_steps: int
    true_cfg_scale: float
    guidance_scale: float
    negative_prompt: str
    sde_type: str
    noise_level: float


@dataclass(frozen=True)
class RolloutRequest:
    """One ticket as a rollout worker sees it: `n = len(images)` images of one prompt with one policy version.

    `noise_steps` are the denoising steps that get noise, `train_steps` those whose transitions are recorded
    (a subset); both are indices into the schedule and the same for all images of a group.
    """

    kind: str
    ordinal: int
    step: int
    group: int
    version: int
    prompt: Prompt
    images: tuple[int, ...]
    initial_seeds: tuple[int, ...]
    noise_seeds: tuple[int, ...]
    noise_steps: tuple[int, ...]
    train_steps: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True)
class Trajectory:
    """The recorded part of a ticket's denoising.

    latents [n, P, *latent] float32 at schedule positions `points` (P of them: the sorted union of i and i+1 for every
    trained step i); log_probs [n, W] float32, mean over latent elements, for the W steps in `train_steps`;
    sigmas [T+1] float32; `conditioning` of the (one) prompt.
    """

    latents: FloatArray
    points: tuple[int, ...]
    train_steps: tuple[int, ...]
    log_probs: FloatArray
    sigmas: FloatArray
    conditioning: Conditioning

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.latents, self.log_probs, self.sigmas, *self.conditioning.values()))


@dataclass(frozen=True)
class Span:
    """A named stretch of a worker's time; start and end are `time.time()` seconds. For reports, never for decisions."""

    name: str
    start: float
    end: float
    flops: float | None = None
    """Floating-point operations of the network inside it, where they are known."""
    bytes: int | None = None
    """Of a training ticket's images and trajectory, said by the span that ends with them."""


@dataclass(frozen=True)
class RolloutReport:
    """What of a finished ticket passes through the controller. Version and digest are those at its start."""

    ordinal: int
    version: int
    digest: str
    images: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Failure:
    """Why a term of the reward gave a group no score."""

    reason: str
    final: bool = False
    """Whether it was tried as often as `reward.retries` allows; otherwise it may be tried again."""
    traceback: str = ""
    """The text of the exception's, in the worker."""


@dataclass(frozen=True)
class Scores:
    """Rewards of one group in image order: the weighted sum and each part, float64.

    Terms that could not be scored are in `failed` and not in `by_term`; `total` is the sum of the others.
    """

    total: tuple[float, ...]
    by_term: Mapping[str, tuple[float, ...]]
    spans: tuple[Span, ...] = ()
    extras: Mapping[str, Mapping[str, tuple[float | str, ...]]] = field(default_factory=dict)
    """By term, what it said of every image beside its score, by name and in image order."""
    failed: Mapping[str, Failure] = field(default_factory=dict)
    retries: Mapping[str, int] = field(default_factory=dict)
    """By term, calls that were made again."""
    served: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    """By term whose servers the run has started: URL → whether it answered anything, or let attempts time out only."""
