"""Correction for stale images: how far the policy that made an image is from the trained one, and weights and masks.

The losses of the policy-gradient algorithms call it. Divergences are the exact KL of two Gaussians with equal standard
deviation. "Nats" means a sum over all latent elements; other log-ratios and divergences are means over them.
"""

import torch
from torch import Tensor

from async_flowrl.algorithms.sde import mean_over_latent

# Log-ratios are clamped to ± this value before exp, because an overflow would give gradients of infinity × 0.
MAX_LOG_RATIO = 20.0


def divergence(mean: Tensor, other: Tensor, std: Tensor) -> Tensor:
    """Returns KL(N(mean, std²) || N(other, std²)) per latent element, [B] float64; both means are [B, ...], std [B]."""
    return mean_over_latent((mean.double() - other.double()).square()) / (2.0 * std.double().square())


def ratio_of(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def divergence_mask(distance: Tensor, log_ratio: Tensor, advantages: Tensor, threshold: float) -> Tensor:
    """Returns [B] bool: False (dropped) for rows with distance >= threshold whose gradient makes |log_ratio| larger.

    All inputs are [B]; the mask is that of Flow-DPPO (arXiv 2606.11025).
    """
    moves_away = ((log_ratio > 0) & (advantages > 0)) | ((log_ratio < 0) & (advantages < 0))
    return ~((distance >= threshold) & moves_away)


def importance_weight(log_ratio_nats: Tensor, cap: float) -> Tensor:
    """Returns the truncated importance weight min(exp(log-ratio), cap) [B], without gradient; log-ratio [B] in nats."""
    return ratio_of(log_ratio_nats.detach()).clamp(max=cap)


def gap_metrics(log_ratio: Tensor) -> dict[str, Tensor]:
    """Returns metrics [B] of x = `log_ratio`: the proximal policy's log-prob minus the one that the rollout recorded.

    k2 = x² / 2 and k3 = exp(x) - 1 - x are the usual estimates of a KL divergence. All are per latent element.
    """
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "log_prob_gap": log_ratio.abs(),
        "rollout_log_ratio": log_ratio,
        "rollout_k2": log_ratio.square() / 2.0,
        "rollout_k3": torch.expm1(bounded) - bounded,
    }


def weight_metrics(log_ratio_nats: Tensor) -> dict[str, Tensor]:
    """Returns the importance weights [B] before truncation, and their squares, for `effective_sample_size`."""
    weight = ratio_of(log_ratio_nats)
    return {"importance_weight": weight, "importance_weight_squared": weight.square()}


def effective_sample_size(mean_weight: float, mean_squared_weight: float) -> float:
    """Returns (mean w)² / mean(w²) of the importance weights w before truncation, a share in (0, 1]."""
    return mean_weight * mean_weight / mean_squared_weight
