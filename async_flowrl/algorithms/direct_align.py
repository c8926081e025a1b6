"""Direct-Align (SRPO, arXiv 2509.06942): the gradient of the reward itself, through the VAE and one network pass."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from async_flowrl.algorithms.advantage import FloatArray, Groups
from async_flowrl.algorithms.base import MicroBatch, Prediction
from async_flowrl.algorithms.final_images import FinalImages
from async_flowrl.algorithms.sde import expand


class DirectAlign(FinalImages):
    """Minus the reward of the image that one Euler step and the known noise give.

    x_s = (1 - s) x0 + s eps is moved to the schedule's next level r, x_r = x_s + (r - s) v, and the noise is taken out
    again: x0' = (x_r - r eps) / (1 - r) (section 3.1 of the paper). The gradient goes through `MicroBatch.score` and v.
    """

    name = "direct_align"
    predicts = ("velocity", "noised", "noise")
    vanishes_at_zero = False
    differentiates_reward = True

    def advantages(
        self,
        rewards: Mapping[str, Groups],
        *,
        weights: Mapping[str, float] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[FloatArray]:
        """Returns ones: every image is trained by the gradient of its own reward."""
        return [np.ones(len(group)) for group in next(iter(rewards.values()))]

    def objective(
        self, batch: MicroBatch, current: Prediction, frozen: Mapping[str, Prediction]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if batch.score is None:
            raise ValueError("direct_align needs micro-batches with `score`, the differentiable reward of their images")
        velocity, noise = current["velocity"], current["noise"].double()
        level, below = (expand(of.double(), noise) for of in (batch.sigma, batch.sigma_next))
        moved = current["noised"].double() + (below - level) * velocity
        reward = batch.score(((moved - below * noise) / (1.0 - below)).float()).double()
        return (reward if self.config.negate_reward else -reward), {"aligned_reward": reward.detach()}
