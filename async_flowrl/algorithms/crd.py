"""Centred reward distillation (CRD, arXiv 2603.14128): the policy's implicit reward follows the reward of the group."""

from collections.abc import Mapping

import torch
from torch import Tensor

from async_flowrl.algorithms.base import MicroBatch, Prediction
from async_flowrl.algorithms.diffusion_nft import optimality_probability
from async_flowrl.algorithms.final_images import FinalImages
from async_flowrl.config.schema import AlgorithmConfig

# KL coefficient of an image with a = 0, the worst reward; with a = 1 it is `kl_coef` (the published code).
LEAST_KL_COEF = 1e-4


class CRD(FinalImages):
    """The loss is (beta (r - mean r) - (a - mean a))² adv_clip_max / beta, means over the group without gradient.

    r = e(v_r) / w_r - e(v) / w is the implicit reward, e(u) = mean (u - (eps - x0))², w = mean |u - (eps - x0)| without
    gradient; v_r is the velocity of the reference or, with anchor=average, of the moving average; a in [0, 1] is
    `optimality_probability`. The KL to the reference, with guidance `reference_cfg_scale`, grows with a.
    """

    name = "crd"
    predicts = ("velocity", "error", "deviation")
    vanishes_at_zero = False

    def __init__(self, config: AlgorithmConfig, *, correction: str = "none") -> None:
        self.uses = (config.anchor,)
        super().__init__(config)

    def reward(self, current: Prediction, frozen: Mapping[str, Prediction]) -> Tensor:
        """Returns the implicit reward r [B] float64."""
        anchor = frozen[self.config.anchor]
        return anchor["error"] / anchor["deviation"] - current["error"] / current["deviation"]

    def quality(self, batch: MicroBatch) -> Tensor:
        """Returns a [B] float64."""
        return optimality_probability(batch.advantages, bound=self.config.adv_clip_max)

    def penalty_weight(self, batch: MicroBatch) -> Tensor:
        least = LEAST_KL_COEF / self.config.kl_coef
        return least + self.quality(batch) * (1.0 - least)

    def group_terms(self, batch: MicroBatch, current: Prediction, frozen: Mapping[str, Prediction]) -> Tensor:
        """Returns r and a per row [B, 2]."""
        return torch.stack([self.reward(current, frozen).detach(), self.quality(batch)], dim=1)

    def objective(
        self, batch: MicroBatch, current: Prediction, frozen: Mapping[str, Prediction]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss per row, and the implicit reward."""
        assert batch.group_means is not None, "group_terms"
        reward, beta = self.reward(current, frozen), self.config.beta
        gap = beta * (reward - batch.group_means[:, 0]) - (self.quality(batch) - batch.group_means[:, 1])
        return gap.square() * self.config.adv_clip_max / beta, {"implicit_reward": reward.detach()}
