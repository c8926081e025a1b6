"""Messages between the controller, the rollout workers, the reward workers and the trainer.

The controller sends a RolloutRequest (one ticket) to a rollout worker. The worker returns a small RolloutReport to the
controller and puts two payloads into Ray's object store: the images, uint8 [n, H, W, 3] (read by reward workers), and
for training tickets a Trajectory (read by the trainer). Reward workers send the controller the Scores of each group.
All messages are frozen and picklable; their arrays are numpy, never torch. Words such as ticket: docs/glossary.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]
Conditioning = dict[str, npt.NDArray[Any]]
"""Encoded prompt, the network's text input: name → array without batch dimension, e.g. {"prompt_embeds": [L, D]}."""

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class ConditionImage:
    """An image that a prompt edits, by reference: workers read the file, and refuse other bytes."""

    sha256: str
    """Of the file's bytes, in hex: what the image is, wherever it lies."""
    size: tuple[int, int]
    """(height, width) in pixels, as the image is seen."""
    path: str = field(compare=False)


@dataclass(frozen=True)
class TextWithImages:
    """A text and the images that it is about."""

    text: str
    images: tuple[ConditionImage, ...]
    size: int | tuple[int, int] | tuple[int, int, int] | None = None
    """Of the images or videos that are made (`Resolution`), for which some families encode the images."""


EncoderInput = str | TokenIds | TextWithImages
"""Input of the encoders: a text, the token ids of that text inside the model's prompt template, or text and images."""


def identity(wording: EncoderInput) -> Any:
    """Returns what JSON can hold of an input, to hash: of images their hashes, not their places."""
    if isinstance(wording, TextWithImages):
        size = [] if wording.size is None else [wording.size]
        return [wording.text, [image.sha256 for image in wording.images], *size]
    return wording


EmbeddingKey = tuple[EncoderInput, str | None, bool]
"""What an embedding is made of: a prompt's words or token ids, its system prompt, and whether guidance leads away."""

TRAIN, EVALUATION = "train", "evaluation"
"""Values of RolloutRequest.kind: images to train on, and images that are only scored."""
POLICY, EMA = "policy", "ema"
"""The two sets of weights that the trainer publishes: the trained weights, and their exponential moving average."""


@dataclass(frozen=True)
class Prompt:
    """One row of a prompt file. None means that the row does not set the field."""

    index: int
    """Place in the sequence of training prompts, or of evaluated prompts, from 0."""
    text: str
    """The prompt for people, rewards and pictures; text encoders read it only if `token_ids` is None."""
    negative: str | None = None
    """Negative prompt of classifier-free guidance."""
    system: str | None = None
    """System prompt, for text encoders with a chat template."""
    target: str | None = None
    """The result that a reward checks for, e.g. the words that should be readable in the image."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the row, passed on to rewards."""
    token_ids: TokenIds | None = None
    negative_token_ids: TokenIds | None = None
    resolution: int | tuple[int, int] | tuple[int, int, int] | None = None
    """Size of this prompt's images in pixels (`Resolution`); None means a size from the configuration."""
    images: tuple[ConditionImage, ...] = ()
    """The images to edit, in order; none for a model that makes images from text alone."""

    @property
    def wording(self) -> EncoderInput:
        return self._with_images(self.text) if self.token_ids is None else self.token_ids

    def negative_wording(self, default: str) -> EncoderInput:
        """The negative prompt: this prompt's token ids, else its text, else `default` (rollout.negative_prompt)."""
        if self.negative_token_ids is not None:
            return self.negative_token_ids
        return self._with_images(default if self.negative is None else self.negative)

    def _with_images(self, text: str) -> EncoderInput:
        return TextWithImages(text, self.images) if self.images else text


@dataclass(frozen=True)
class Sampling:
    """Settings of the sampler, the same for all images of a ticket."""

    resolution: int | tuple[int, int] | tuple[int, int, int]
    """The size that is used: the prompt's own, otherwise one from the configuration."""
    num_inference_steps: int
    """T, the number of denoising steps."""
    true_cfg_scale: float
    """Scale of classifier-free guidance with a second network pass for the negative prompt; 1 or less means off."""
    guidance_scale: float
    """Network input of guidance-distilled models (FLUX); 0 for models without this input."""
    negative_prompt: str
    """Negative prompt of all prompts that have none of their own."""
    sde_type: str
    """How noise enters a denoising step: `sde`, `dance_sde`, `cps`, or `ode` for no noise (see algorithms/sde.py)."""
    noise_level: float
    """Factor on the noise of a denoising step."""
    true_cfg_scale_2: float | None = None
    """`true_cfg_scale` of a model's second expert, at low noise levels; None: the same."""


@dataclass(frozen=True)
class RolloutRequest:
    """One ticket as the controller sends it to a rollout worker: n images of one prompt, made by one policy version."""

    kind: str
    """TRAIN or EVALUATION."""
    ordinal: int
    """Number of the ticket among all tickets of its kind."""
    step: int
    """Training step that the images belong to."""
    group: int
    """Number of the group in its step, or of the prompt in its evaluation, from 0."""
    version: int
    """Version of the weights that must make the images."""
    prompt: Prompt
    images: tuple[int, ...]
    """Numbers of these n images inside their group, from 0: one ticket may hold only a part of a group."""
    initial_seeds: tuple[int, ...]
    """One seed per image, for its initial latents."""
    noise_seeds: tuple[int, ...]
    """One seed per image, for the noise that denoising steps add."""
    noise_steps: tuple[int, ...]
    """Denoising steps (0 to T - 1) that add noise, ascending and the same for the whole group; may be empty."""
    train_steps: tuple[int, ...]
    """Denoising steps to train on. They are among `noise_steps`, except for algorithms that train on final images:
    these add no noise, and the trainer later noises the final latents to the levels sigmas[i] of these steps i."""
    sampling: Sampling


@dataclass(frozen=True)
class Trajectory:
    """The recorded part of a training ticket's denoising: n images, T denoising steps, W = len(train_steps)."""

    latents: FloatArray
    """[n, P, *latent shape] float32: the latents at the P = len(points) noise levels sigmas[p] for p in `points`."""
    points: tuple[int, ...]
    """Sorted union of i and i + 1 for every trained step i; only T if the algorithm trains on final images."""
    train_steps: tuple[int, ...]
    """As in the request."""
    log_probs: FloatArray
    """[n, W] float32 under the weights that made the images: the log-density of each trained transition divided by the
    number of latent elements (for cps see sde.log_prob). [n, 0] if the algorithm trains on final images."""
    sigmas: FloatArray
    """[T + 1] float32: the noise levels of the schedule, strictly falling from 1 to 0."""
    conditioning: Conditioning
    """The encoded prompt, shared by the n images; the negative prompt is not in it."""
    negative: Conditioning | None = None
    """The encoded negative prompt, if it was encoded with the prompt's images; all others the trainer has."""

    @property
    def nbytes(self) -> int:
        encoded = (*self.conditioning.values(), *(self.negative or {}).values())
        return sum(array.nbytes for array in (self.latents, self.log_probs, self.sigmas, *encoded))


ACTIVATE = "activate"
"""Name of the span in which a rollout worker puts a version into its network."""


@dataclass(frozen=True)
class Span:
    """A named part of a worker's time, for reports only; `start` and `end` are unix seconds (`time.time()`)."""

    name: str
    start: float
    end: float
    flops: float | None = None
    """Floating-point operations of the network in this span; None if they were not counted."""
    bytes: int | None = None
    """Size of a training ticket's payloads (images and trajectory), on the span that completes them; None elsewhere."""
    memory: int | None = None
    """Most bytes of its GPU that PyTorch had reserved in the worker's process so far; None if they were not read."""


@dataclass(frozen=True)
class RolloutReport:
    """A rollout worker's answer to the controller about one finished ticket; the images travel separately."""

    ordinal: int
    version: int
    """The version that the request names."""
    digest: str
    """Digest of the weights that made the images; the controller compares it with the published digest."""
    images: int
    """Number of images."""
    spans: tuple[Span, ...]
    swaps: int = 0
    """1 if the worker had other weights before, and these are not simply a newer version of them; else 0."""


@dataclass(frozen=True)
class Failure:
    """The reason why one term of the reward could not score a group."""

    reason: str
    final: bool = False
    """True: the controller must not try again (all retries are used, or the term's server is lost). False: it may."""
    traceback: str = ""
    """Traceback of the exception in the reward worker; empty if it was not raised there."""
    refused: bool = False
    """True: the reward does not score such a prompt (PromptRefused)."""


@dataclass(frozen=True)
class Requests:
    """Requests that a term sent to servers."""

    sent: int = 0
    failed: int = 0
    last: str = ""
    """The last failure, which names the server."""

    def __add__(self, later: "Requests") -> "Requests":
        return Requests(self.sent + later.sent, self.failed + later.failed, later.last or self.last)


@dataclass(frozen=True)
class Scores:
    """Rewards of one group; every tuple has one value per image, in image order."""

    total: tuple[float, ...]
    """Sum of weight × score over the terms in `by_term`, with the weights of the configuration."""
    by_term: Mapping[str, tuple[float, ...]]
    """Term → scores as the reward gave them, unweighted. A term that failed is in `failed` instead."""
    spans: tuple[Span, ...] = ()
    extras: Mapping[str, Mapping[str, tuple[float | str, ...]]] = field(default_factory=dict)
    """Term → name → a further text or number about each image, which the reward returned beside its score."""
    failed: Mapping[str, Failure] = field(default_factory=dict)
    """Term → why it has no score. The controller trains on the other terms, unless the term is required."""
    retries: Mapping[str, int] = field(default_factory=dict)
    """Term → number of repeated calls."""
    requests: Mapping[str, Requests] = field(default_factory=dict)
    """Term → its requests to servers since it was asked before, for this group or another one."""
    distances: Mapping[str, float] = field(default_factory=dict)
    """Held-out term with `features` → mean cosine distance between two images of the group."""
