"""Flow-GRPO (arXiv 2505.05470): PPO's clipped loss on the log-prob of each denoising step; and two variants of it."""

import torch
from torch import Tensor

from async_flowrl.algorithms import sde
from async_flowrl.algorithms.base import MicroBatch, Prediction
from async_flowrl.algorithms.correction import ratio_of
from async_flowrl.algorithms.policy_gradient import PolicyGradient, Surrogate


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: Tensor, high: Tensor) -> Surrogate:
    """Returns PPO's loss max(-A · ratio, -A · clip(ratio, low, high)); all [B].

    A row has no gradient if its ratio is out of bounds in the direction that its advantage A asks for.
    """
    loss = torch.maximum(-advantages * ratio, -advantages * torch.minimum(torch.maximum(ratio, low), high))
    above, below = ratio.detach() > high, ratio.detach() < low
    return Surrogate(loss, ratio, above | below, ~((above & (advantages > 0)) | (below & (advantages < 0))))


class FlowGRPO(PolicyGradient):
    """Flow-GRPO: ratio = exp(log_prob - proximal log_prob), where log-probs are means over latent elements.

    clip_unit=mean clips the ratio to 1 ± clip_range; nats clips the log-ratio of whole latents to ± clip_range.
    """

    name = "flow_grpo"

    def surrogate(self, batch: MicroBatch, current: Prediction, proximal: Prediction) -> Surrogate:
        ratio = ratio_of(current["log_prob"] - proximal["log_prob"])
        low, high = self._bounds(batch, ratio)
        return clipped_surrogate(ratio, self.clipped_advantages(batch), low, high)

    def _bounds(self, batch: MicroBatch, ratio: Tensor) -> tuple[Tensor, Tensor]:
        clip = torch.full_like(ratio, self.config.clip_range)
        if self.config.clip_unit == "mean":
            return 1.0 - clip, 1.0 + clip
        clip = clip / sde.latent_elements(batch.latents)
        return torch.exp(-clip), torch.exp(clip)


class DanceGRPO(FlowGRPO):
    """DanceGRPO (arXiv 2505.07818): Flow-GRPO's loss on `dance_sde` steps, of which a random share can be trained."""

    name = "dance_grpo"


class MixGRPO(FlowGRPO):
    """MixGRPO (arXiv 2507.21802): Flow-GRPO's loss on a window of noisy steps, which is moved during training."""

    name = "mix_grpo"
