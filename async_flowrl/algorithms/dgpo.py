"""Direct group preference optimization (DGPO, arXiv 2510.08425): DPO's loss on the good and bad of whole groups."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from async_flowrl.algorithms.base import MicroBatch, Prediction
from async_flowrl.algorithms.final_images import FinalImages, bounded_advantages
from async_flowrl.config.schema import AlgorithmConfig


class DGPO(FinalImages):
    """The loss is g A e(v) with g = sigmoid(beta mean A (e(v) - e(v_r))), mean over the group, without gradient.

    e(u) = mean (u - (eps - x0))²; v_r is the velocity of the reference or, with anchor=average, of the moving average.
    Its gradient is that of -log sigmoid(-beta mean A (e(v) - e(v_r))) / beta. With a moving average, e(v) gets none
    where exp(e(v_avg) - e(v)) has left 1 ± clip_range in the direction of A. A group shares levels and noise.
    """

    name = "dgpo"
    predicts = ("velocity", "error")

    def __init__(self, config: AlgorithmConfig, *, correction: str = "none") -> None:
        self.uses = (config.anchor, *(("average",) if config.average_decay is not None else ()))
        super().__init__(config)

    def seeds(self, batch: MicroBatch) -> Sequence[int]:
        return batch.group_seeds

    def group_terms(self, batch: MicroBatch, current: Prediction, frozen: Mapping[str, Prediction]) -> Tensor:
        """Returns A (e(v) - e(v_r)) per row [B, 1]."""
        gain = current["error"].detach() - frozen[self.config.anchor]["error"]
        return (bounded_advantages(batch.advantages, self.config) * gain)[:, None]

    def objective(
        self, batch: MicroBatch, current: Prediction, frozen: Mapping[str, Prediction]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns g A e(v) per row, and the share g."""
        assert batch.group_means is not None, "group_terms"
        advantages, error = bounded_advantages(batch.advantages, self.config), current["error"]
        share = torch.sigmoid(self.config.beta * batch.group_means[:, 0])
        metrics = {"preference_weight": share}
        if "average" in frozen:
            ratio = torch.exp(frozen["average"]["error"] - error.detach())
            above, below = ratio > 1.0 + self.config.clip_range, ratio < 1.0 - self.config.clip_range
            outside = torch.where(advantages > 0, above, below)
            error = torch.where(outside, error.detach(), error)
            kept = ~outside & (advantages != 0)
            metrics |= {"ratio": ratio, "clip_fraction": outside.double(), "kept": kept.double()}
        return share * advantages * error, metrics
