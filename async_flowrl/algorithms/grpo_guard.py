"""GRPO-Guard (arXiv 2510.22319): ratios with zero mean and equal spread at all steps, and gradients of equal size."""

import torch

from async_flowrl.algorithms import sde
from async_flowrl.algorithms.base import MicroBatch, Prediction
from async_flowrl.algorithms.correction import divergence, ratio_of
from async_flowrl.algorithms.flow_grpo import clipped_surrogate
from async_flowrl.algorithms.policy_gradient import PolicyGradient, Surrogate


class GRPOGuard(PolicyGradient):
    """GRPO-Guard: log ratio = (l - l_old + b) std with b = mean((mu - mu_old)²) / (2 std²) over latent elements.

    l is the log-prob, mu and std describe the denoising step, old is the proximal policy. The log-ratio then is
    mean(noise · (mu - mu_old)), which has mean 0 under the old policy. The loss is PPO's clipped loss divided by the
    step size sigma - sigma_next. It is derived for `sde` steps.
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
