"""Flow-GRPO (arXiv 2505.05470): PPO's clipped surrogate on the mean log-prob of each denoising step."""

import torch
from torch import Tensor

from async_flowrl.algorithms import sde
from async_flowrl.algorithms.base import MicroBatch, Prediction
from async_flowrl.algorithms.correction import ratio_of
from async_flowrl.algorithms.policy_gradient import PolicyGradient, Surrogate


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: Tensor, high: Tensor) -> Surrogate:
    """max(-A rho, -A clip(rho, low, high)); all [B]. The gradient is gone where the ratio moved as A wants it to."""
    loss = torch.maximum(-advantages * ratio, -advantages * torch.minimum(torch.maximum(ratio, low), high))
    above, below = ratio.detach() > high, ratio.detach() < low
    return Surrogate(loss, ratio, above | below, ~((above & (advantages > 0)) | (below & (advantages < 0))))


class FlowGRPO(PolicyGradient):
    """rho = exp(l - l_proximal), clipped to 1 ± clip_range (mean) or to a true log-ratio of ± clip_range (nats)."""

    name = "flow_grpo"

    def surrogate(self, batch: MicroBatch, current: Prediction, anchor: Prediction) -> Surrogate:
        ratio = ratio_of(current["log_prob"] - anchor["log_prob"])
        low, high = self._bounds(batch, ratio)
        return clipped_surrogate(ratio, self.clipped_advantages(batch), low, high)

    def _bounds(self, batch: MicroBatch, ratio: Tensor) -> tuple[Tensor, Tensor]:
        clip = torch.full_like(ratio, self.config.clip_range)
        if self.config.clip_unit == "mean":
            return 1.0 - clip, 1.0 + clip
        clip = clip / sde.latent_elements(batch.latents)
        return torch.exp(-clip), torch.exp(clip)


class DanceGRPO(FlowGRPO):
    """DanceGRPO (arXiv 2505.07818): the same surrogate over `dance_sde` steps, a random share of which is trained."""

    name = "dance_grpo"


class MixGRPO(FlowGRPO):
    """MixGRPO (arXiv 2507.21802): the same surrogate over a window of noisy steps that moves through the schedule."""

    name = "mix_grpo"
