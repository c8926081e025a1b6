"""Flow-DPPO (arXiv 2606.11025): no ratio clip; a mask on the closed-form divergence from the proximal policy."""

import torch

from async_flowrl.algorithms import sde
from async_flowrl.algorithms.base import MicroBatch, Prediction
from async_flowrl.algorithms.correction import divergence, divergence_mask, ratio_of
from async_flowrl.algorithms.policy_gradient import PolicyGradient, Surrogate


class FlowDPPO(PolicyGradient):
    """-A rho keep, keep = not(k >= clip_range and the step would move further away); advantages are not clamped.

    k = mean_D (mu - mu_old)² / (2 std²) per latent element (clip_unit=mean), or its sum over them (nats).
    """

    name = "flow_dppo"
    needs_proximal_mean = True

    def surrogate(self, batch: MicroBatch, current: Prediction, anchor: Prediction) -> Surrogate:
        log_ratio = current["log_prob"] - anchor["log_prob"]
        ratio = ratio_of(log_ratio)
        distance = divergence(current["mean"].detach(), anchor["mean"], current["std"])
        if self.config.clip_unit == "nats":
            distance = distance * sde.latent_elements(batch.latents)
        advantages = batch.advantages.double()
        keep = divergence_mask(distance, log_ratio.detach(), advantages, self.config.clip_range)
        loss = torch.where(keep, -advantages * ratio, 0.0)
        return Surrogate(loss, ratio, distance >= self.config.clip_range, keep)
