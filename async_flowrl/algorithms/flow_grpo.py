"""Flow-GRPO (arXiv 2505.05470): PPO's clipped loss on the log-prob of each denoising step; and four variants of it."""

import torch
from torch import Tensor

from async_flowrl.algorithms import sde
from async_flowrl.algorithms.base import MicroBatch, Prediction
from async_flowrl.algorithms.policy_gradient import PolicyGradient, Surrogate, divergence, divergence_mask, ratio_of


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: Tensor, high: Tensor) -> Surrogate:
    """Returns PPO's loss max(-A · ratio, -A · clip(ratio, low, high)); all [B]."""
    # A row has no gradient if its ratio is out of bounds in the direction that its advantage A asks for.
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
        clip = torch.full_like(ratio, self.config.clip_range)
        low, high = 1.0 - clip, 1.0 + clip
        if self.config.clip_unit == "nats":
            clip = clip / sde.latent_elements(batch.latents)
            low, high = torch.exp(-clip), torch.exp(clip)
        return clipped_surrogate(ratio, self.clipped_advantages(batch), low, high)


class DanceGRPO(FlowGRPO):
    """DanceGRPO (arXiv 2505.07818): Flow-GRPO's loss on `dance_sde` steps, of which a random share can be trained."""

    name = "dance_grpo"


class MixGRPO(FlowGRPO):
    """MixGRPO (arXiv 2507.21802): Flow-GRPO's loss on a window of noisy steps, which is moved during training."""

    name = "mix_grpo"


class GRPOGuard(PolicyGradient):
    """GRPO-Guard (arXiv 2510.22319): ratios with zero mean and equal spread at all steps, gradients of equal size.

    The log-ratio is (l - l_old + b) std with b = mean((mu - mu_old)²) / (2 std²) over latent elements: l is the
    log-prob, mu and std describe the denoising step, old is the proximal policy. This is mean(noise · (mu - mu_old)),
    which has mean 0 under the old policy. The loss is PPO's clipped loss divided by the step size sigma - sigma_next.
    It is derived for `sde` steps.
    """

    name = "grpo_guard"
    needs_proximal_mean = True

    def surrogate(self, batch: MicroBatch, current: Prediction, proximal: Prediction) -> Surrogate:
        std = current["std"].double()
        bias = divergence(current["mean"], proximal["mean"], current["std"])
        ratio = ratio_of((current["log_prob"] - proximal["log_prob"] + bias) * std)
        clip = torch.full_like(ratio, self.config.clip_range)
        if self.config.clip_unit == "nats":
            clip = clip * std / sde.latent_elements(batch.latents)
        result = clipped_surrogate(ratio, self.clipped_advantages(batch), 1.0 - clip, 1.0 + clip)
        step_size = (batch.sigma - batch.sigma_next).double()
        return Surrogate(result.loss / step_size, ratio, result.outside, result.survives)


class FlowDPPO(PolicyGradient):
    """Flow-DPPO (arXiv 2606.11025): instead of clipping the ratio, it drops rows by their KL from the proximal policy.

    The loss is -A · ratio, or 0 for a row with KL >= clip_range that would move further away. The KL is
    mean((mu - mu_proximal)²) / (2 std²) over latent elements, with clip_unit=nats the sum instead of the mean. The
    advantages A are not clamped.
    """

    name = "flow_dppo"
    needs_proximal_mean = True

    def surrogate(self, batch: MicroBatch, current: Prediction, proximal: Prediction) -> Surrogate:
        log_ratio = current["log_prob"] - proximal["log_prob"]
        ratio = ratio_of(log_ratio)
        distance = divergence(current["mean"].detach(), proximal["mean"], current["std"])
        if self.config.clip_unit == "nats":
            distance = distance * sde.latent_elements(batch.latents)
        advantages = batch.advantages.double()
        keep = divergence_mask(distance, log_ratio.detach(), advantages, self.config.clip_range)
        loss = torch.where(keep, -advantages * ratio, 0.0)
        return Surrogate(loss, ratio, distance >= self.config.clip_range, keep)
