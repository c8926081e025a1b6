"""V-GRPO (arXiv 2604.23380): PPO's clipped loss with a bound on the likelihood, from few draws that a group shares."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from async_flowrl.algorithms.base import MicroBatch, Prediction, detached
from async_flowrl.algorithms.final_images import FinalImages, bounded_advantages, clipped
from async_flowrl.algorithms.policy_gradient import ratio_of
from async_flowrl.config.schema import AlgorithmConfig
from async_flowrl.transfers import upload


class VGRPO(FinalImages):
    """The ratio of an image is exp(L_old - L), L the mean over its levels of the x0 error divided by its own size.

    With x0_hat = x_s - s v that is mean (x0_hat - x0)² / mean |x0_hat - x0| = s mean (v - u)² / mean |v - u|, whose
    denominator gets no gradient. Old is the policy at the start of the batch; kl_coef weighs mean (x0_hat -
    x0_hat_old)². A group shares levels and noise.
    """

    name = "vgrpo"
    predicts = ("velocity", "error", "deviation")
    uses = ("proximal",)
    # The ratio joins all levels of an image, so they must be in one forward pass.
    joins_levels = True

    def __init__(self, config: AlgorithmConfig, *, correction: str = "none") -> None:
        super().__init__(config)
        self.needs = tuple(name for name in self.needs if name != "reference")
        self.penalties = {"proximal": self.penalties.pop("reference"), **self.penalties}

    def seeds(self, batch: MicroBatch) -> Sequence[int]:
        return batch.group_seeds

    def penalty_weight(self, batch: MicroBatch) -> Tensor:
        """Returns s² [B]: x0_hat - x0_hat_old is -s times the difference of the velocities."""
        return batch.sigma.double().square()

    def objective(
        self, batch: MicroBatch, current: Prediction, frozen: Mapping[str, Prediction]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns PPO's clipped loss of the image in each of its rows, A bounded as `adv_clip` says."""
        new, old = (
            over_levels(batch, batch.sigma.double() * one["error"] / one["deviation"])
            for one in (current, frozen.get("proximal", detached(current)))
        )
        return clipped(ratio_of(old - new), bounded_advantages(batch.advantages, self.config), self.config.clip_range)


def over_levels(batch: MicroBatch, values: Tensor) -> Tensor:
    """Returns, in each row [B], the mean of `values` [B] over its image's rows; all levels list images in one order."""
    order = torch.argsort(batch.steps, stable=True)
    levels = len(set(batch.steps.tolist()))
    by_level = values[upload(order, values.device)].reshape(levels, -1)
    return by_level.mean(dim=0).repeat(levels)[upload(torch.argsort(order), values.device)]
