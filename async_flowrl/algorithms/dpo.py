"""Online diffusion DPO (arXiv 2311.12908, with the flow-matching loss) on the best and worst image of each group."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from async_flowrl.algorithms.base import MicroBatch, Prediction
from async_flowrl.algorithms.final_images import FinalImages
from async_flowrl.transfers import upload


class DPO(FinalImages):
    """DPO: the loss of a pair is -log sigmoid(-beta/2 (d_win - d_lose)).

    d = e(v) - e(v_ref), where e(u) = mean((u - (eps - x0))²) over latent elements is the flow-matching loss. Both
    images of a pair get the same noise levels and the same noise eps, and must be in one micro-batch. Each of its two
    rows has the pair's loss, so the mean over rows is the mean over pairs.
    """

    name = "dpo"
    predicts = ("error",)
    uses = ("reference",)

    def select(self, advantages: npt.NDArray[np.float64]) -> list[int]:
        """Returns [best, worst], of equal images the first; [] if all advantages are equal."""
        best, worst = int(np.argmax(advantages)), int(np.argmin(advantages))
        return [] if advantages[best] == advantages[worst] else [best, worst]

    def seeds(self, batch: MicroBatch) -> Sequence[int]:
        """Returns the winner's seed for both rows of a pair."""
        winners, losers = pairs(batch)
        shared = list(batch.seeds)
        for winner, loser in zip(winners, losers, strict=True):
            shared[loser] = batch.seeds[winner]
        return shared

    def objective(
        self, batch: MicroBatch, current: Prediction, frozen: Mapping[str, Prediction]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the pair's loss in both of its rows [B]."""
        winners, losers = pairs(batch)
        gain = current["error"] - frozen["reference"]["error"].detach()
        partner = torch.empty(len(batch.seeds), dtype=torch.int64)
        partner[winners], partner[losers] = torch.tensor(losers), torch.tensor(winners)
        sign = torch.ones(len(batch.seeds), dtype=gain.dtype)
        sign[losers] = -1.0
        sign, partner = upload(sign, gain.device), upload(partner, gain.device)
        margin = -self.config.beta / 2.0 * sign * (gain - gain[partner])
        ones = torch.ones_like(margin)
        metrics = {"kept": ones, "nonzero": ones, "preference_accuracy": (margin.detach() > 0).double()}
        return -logsigmoid(margin), metrics


def pairs(batch: MicroBatch) -> tuple[list[int], list[int]]:
    """Returns the rows of the winners (advantage above 0) and of the losers; entry i of one is the partner of i."""
    positive, steps = batch.positive, batch.steps.tolist()
    rows = sorted(range(len(steps)), key=lambda row: steps[row])
    return [row for row in rows if positive[row]], [row for row in rows if not positive[row]]
