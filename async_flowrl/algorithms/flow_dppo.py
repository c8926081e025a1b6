"""Flow-DPPO (arXiv 2606.11025): instead of clipping the ratio, it drops rows by their KL from the proximal policy."""

import torch

from async_flowrl.algorithms import sde
from async_flowrl.algorithms.base import MicroBatch, Prediction
from async_flowrl.algorithms.correction import divergence, divergence_mask, ratio_of
from async_flowrl.algorithms.policy_gradient import PolicyGradient, Surrogate


class FlowDPPO(PolicyGradient):
    """Flow-DPPO: the loss is -A · ratio, or 0 for a row with KL >= clip_range that would move further away.

    The KL is mean((mu - mu_proximal)²) / (2 std²) over latent elements, with clip_unit=nats the sum instead of the
    mean. The advantages A are not clamped.
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
