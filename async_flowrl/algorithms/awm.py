"""Advantage-weighted matching (AWM, arXiv 2509.25050): PPO's clipped loss with a matching error as log-prob."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from async_flowrl.algorithms.base import MicroBatch, Prediction, detached
from async_flowrl.algorithms.final_images import FinalImages, bounded_advantages, clipped
from async_flowrl.algorithms.policy_gradient import ratio_of

HUBER_EPS = 1e-10
GHUBER_POWER = 0.25
# `algorithm.error_weight` → function of error e [B] and noise level s [B], the negative log-prob; `weighting` in the
# published code.
ERROR_WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "uniform": lambda e, s: e,
    "sigma": lambda e, s: e * s,
    "sigma_squared": lambda e, s: e * s.square(),
    "huber": lambda e, s: (torch.sqrt(e + HUBER_EPS) - HUBER_EPS**0.5) * s,
    "ghuber": lambda e, s: ((e + HUBER_EPS) ** GHUBER_POWER - HUBER_EPS**GHUBER_POWER) * s / GHUBER_POWER,
}


class AWM(FinalImages):
    """The log-prob of a row is -w(e), where e = mean (v - u)² and w is ERROR_WEIGHTS[error_weight].

    The ratio is that of the trained weights to the weights at the start of the batch. `average_coef` keeps v near the
    prediction of a moving average (`average_decay`).
    """

    name = "awm"
    predicts = ("velocity", "error")
    uses = ("proximal",)

    def objective(
        self, batch: MicroBatch, current: Prediction, frozen: Mapping[str, Prediction]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns max(-A ratio, -A clip(ratio, 1 ± clip_range)) per row, with A clamped to ± adv_clip_max."""
        weigh, sigma = ERROR_WEIGHTS[self.config.error_weight], batch.sigma.double()
        old = frozen.get("proximal", detached(current))
        ratio = ratio_of(weigh(old["error"], sigma) - weigh(current["error"], sigma))
        return clipped(ratio, bounded_advantages(batch.advantages, self.config), self.config.clip_range)
