"""GRPO-Guard (arXiv 2510.22319): a zero-mean ratio of equal spread at every step, and evened-out gradients."""

import torch

from async_flowrl.algorithms import sde
from async_flowrl.algorithms.base import MicroBatch, Prediction
from async_flowrl.algorithms.correction import divergence, ratio_of
from async_flowrl.algorithms.flow_grpo import clipped_surrogate
from async_flowrl.algorithms.policy_gradient import PolicyGradient, Surrogate


class GRPOGuard(PolicyGradient):
    """log rho = (l - l_old + b) std with b = mean_D (mu - mu_old)² / (2 std²); the clipped surrogate divided by h.

    Everything per sample. With x' = mu_old + std noise, log rho is mean_D [noise (mu - mu_old)]: zero-mean under the
    old policy. Derived for `sde` steps.
    """

    name = "grpo_guard"
    needs_proximal_mean = True

    def surrogate(self, batch: MicroBatch, current: Prediction, anchor: Prediction) -> Surrogate:
        std = current["std"].double()
        bias = divergence(current["mean"], anchor["mean"], current["std"])
        ratio = ratio_of((current["log_prob"] - anchor["log_prob"] + bias) * std)
        clip = torch.full_like(ratio, self.config.clip_range)
        if self.config.clip_unit == "nats":
            clip = clip * std / sde.latent_elements(batch.latents)
        result = clipped_surrogate(ratio, self.clipped_advantages(batch), 1.0 - clip, 1.0 + clip)
        step_size = (batch.sigma - batch.sigma_next).double()
        return Surrogate(result.loss / step_size, ratio, result.outside, result.survives)
