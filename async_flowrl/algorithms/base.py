"""The interface of an algorithm, for the built-in ones and for your own (`algorithm.name=pkg.module:attr`).

The controller calls `advantages` and `select`; a trainer rank calls `predict` and `loss`. All are pure functions.
The trainer calls `predict` under the trained weights, with gradients (`current`), and under those weights that the
algorithm asks for by name in `needs`; it passes the results on as a mapping from these names:

    proximal   the weights at the start of the batch; not there at the first optimizer step of a batch: as `current`
    behaviour  the weights that made the images
    reference  the model before training, or as `algorithm.reference_every` renews it
    average    a moving average of the trained weights (`algorithm.average_decay`)
    teacher    the LoRA of `algorithm.teachers` for the group's prompt

All calls use the same shapes, grad mode and code, so equal weights give bit-equal predictions.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypedDict, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from async_flowrl.algorithms.sde import expand
from async_flowrl.seeds import derive, generator
from async_flowrl.transfers import upload

# (latents [B, ...], sigma [B]) → the network's velocity [B, ...] under the active weights, with guidance; float32.
Velocity = Callable[[Tensor, Tensor], Tensor]


class Prediction(TypedDict, total=False):
    """The tensors that `predict` returns: those that the algorithm names in `predicts`, batch dimension first.

    - `log_prob` [B] float64: log-density of the recorded denoising step under the active weights, divided by the number
      of latent elements (for cps see sde.log_prob)
    - `mean` [B, ...] and `std` [B] float32 of the Gaussian distribution of the next latents
    - `velocity` [B, ...] float32 of the network at `noised`, with guidance
    - `noised` [B, ...] float32: final latents, mixed with new noise to the noise level of the row
    - `noise` [B, ...] float32: that noise
    - `error` [B] float64: flow-matching loss of the row; `deviation` [B] the same with absolute values, no gradient

    An algorithm of your own that needs other tensors returns a subclass.
    """

    log_prob: Tensor
    mean: Tensor
    std: Tensor
    velocity: Tensor
    noised: Tensor
    noise: Tensor
    error: Tensor
    deviation: Tensor


def detached(prediction: Prediction) -> Prediction:
    named: dict[str, Tensor] = dict(cast("Any", prediction))
    return cast("Prediction", {name: value.detach() for name, value in named.items()})


@dataclass(frozen=True)
class MicroBatch:
    """B = images × denoising steps rows, all of one group. Tensors are on the trainer's device if nothing else is said.

    A row of a policy-gradient algorithm is one recorded denoising step from `latents` to `next_latents`. For algorithms
    that train on final images (`records = "final"`), both are the final latents, and `steps` is a noise level's index.

    - `latents`, `next_latents` [B, ...] float32: latents x before and x' after the step
    - `sigma`, `sigma_next` [B] float32: noise levels before and after the step
    - `steps` [B] int64 in host memory: index of the denoising step, 0 to T - 1
    - `sigmas` [T+1] float32: all noise levels, falling from 1 to 0
    - `advantages` [B] float32 of the row's image; `positive` [B] True if it is above 0
    - `rollout_log_prob` [B] float32 of the step as the rollout worker computed it; zeros for records = "final"
    - `seeds` [B]: one per row, for algorithms that draw random numbers in the trainer
    - `group_seeds` [B]: one per row, the same for all images of the group at a level
    - `age`: staleness of the images, training step minus the version that made them
    - `group_means` [B, K] float64: means of `group_terms` over the group at the row's level; None if there are none
    - `score`: final latents [B, ...] float32 → their reward [B], with its gradient, for algorithms with
      `differentiates_reward`; None for others
    """

    latents: Tensor
    next_latents: Tensor
    sigma: Tensor
    sigma_next: Tensor
    steps: Tensor
    sigmas: Tensor
    advantages: Tensor
    positive: tuple[bool, ...]
    rollout_log_prob: Tensor
    seeds: tuple[int, ...]
    age: int
    group_seeds: tuple[int, ...] = ()
    group_means: Tensor | None = None
    score: Callable[[Tensor], Tensor] | None = None


class LossOutput(NamedTuple):
    """The result of `loss`, per row [B]; the trainer averages over the rows of the whole batch.

    `loss` is float32 with gradients. `metrics` are averaged in float64 for the log. The share of kept gradients is made
    of two of them: `nonzero`, 1 for rows whose advantage is not 0, and `kept`, 1 for those whose gradient is not cut.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


class Algorithm(Protocol):
    """An RL algorithm: advantages from rewards, and a loss per row of a micro-batch.

    - `name`, for messages; the built-in algorithms are registered under it.
    - `records`: what rollout workers record, "transitions" (noisy denoising steps) or "final" (final latents only).
    - `needs`: names of the predictions, besides `current`, that `loss` uses (see the module's docstring).
    - `vanishes_at_zero`: True if an image with advantage 0 has gradient zero; groups of such images are not trained.
    - `predicts`: keys of what `predict` returns; `reads`: keys of predictions that `loss` and `moved` use.
    - `group_local`: True if a group's advantages depend on no other group, which `hand_over=stream` requires.
    - `group_terms(batch, current, frozen)`, optional: [B, K] float64 per row, without gradients, whose means over the
      whole group at each level `loss` gets as `batch.group_means`, on any number of ranks. `frozen` has `reference` and
      `average`. A group that is cut into parts costs one more forward pass of each prediction.
    - `differentiates_reward`, optional: True if `loss` takes the gradient of `MicroBatch.score`; all rewards must then
      be differentiable. Such an algorithm is the only one that trains groups of one image.
    - `moved(batch, before, after)`, optional: the KL divergence [B] float64, in nats over all latent elements, from the
      denoising step predicted `before` to that predicted `after`. `algorithm.max_kl_per_update` needs it.
    """

    name: str
    records: str
    needs: Collection[str]
    vanishes_at_zero: bool
    predicts: Collection[str]
    reads: Collection[str]
    group_local: bool

    def advantages(
        self,
        rewards: Mapping[str, Sequence[npt.NDArray[np.float64]]],
        *,
        weights: Mapping[str, float] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[npt.NDArray[np.float64]]:
        """Returns one advantage array [n] per group of n images.

        `rewards` maps the name of a reward to the groups' raw rewards [n], `weights` to its weight (None: all 1).
        `seeds`, one per group, are used only by `algorithm.permute_advantages`.
        """

    def select(self, advantages: npt.NDArray[np.float64]) -> list[int]:
        """Returns the indices of the images of a group [n] that are trained; a pairwise loss may select two."""

    def predict(self, batch: MicroBatch, velocity: Velocity) -> Prediction:
        """Returns the tensors named in `predicts` for the active weights; `velocity` calls the network."""

    def loss(self, batch: MicroBatch, current: Prediction, frozen: Mapping[str, Prediction]) -> LossOutput:
        """Returns loss and metrics per row; `frozen` has the predictions without gradients that `needs` names.

        With records = "transitions" the trainer also calls it with `current` alone on a few rows per
        batch, and reads only the metric `log_prob_gap`.
        """


def keeps_proximal(algorithm: Algorithm) -> bool:
    """Returns True if the loss needs predictions of the weights at the start of the batch, or behaviour ones.

    Those are the behaviour predictions of images that these weights made.
    """
    return not {"proximal", "behaviour"}.isdisjoint(algorithm.needs)


def differentiates_reward(algorithm: Algorithm) -> bool:
    return bool(getattr(algorithm, "differentiates_reward", False))


def check_tuples(algorithm: object, members: Iterable[str], name: str = "an algorithm") -> None:
    """Raises ValueError for a member that is a text, of which each letter would be a name."""
    for member in members:
        if isinstance(text := getattr(algorithm, member), str):
            raise ValueError(f"`{member}` of {name} must be a tuple of names, such as ({text!r},), got {text!r}")


def draw(batch: MicroBatch, seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns noise eps [B, ...] and x_t [B, ...] at the noise levels t = `batch.sigma` of the rows; both float32."""
    # They depend only on `seeds` (one per row) and the batch, so predictions under different weights use the same x_t.
    device, shape = batch.latents.device, batch.latents.shape[1:]
    # The CPU draws, because generators of other devices would give other numbers.
    sources = [generator(derive(seed, "noise")) for seed in seeds]
    noise = torch.stack([torch.randn(shape, generator=source, dtype=torch.float32) for source in sources])
    noise = upload(noise, device)
    weight = expand(batch.sigma.float(), noise)
    return noise, (1.0 - weight) * batch.latents.float() + weight * noise
