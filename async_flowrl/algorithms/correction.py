"""Correction for stale samples: the measured distance between the policy that generated a sample and the trained one.

Divergences are the closed form for two Gaussians of equal std (no sampling noise). "nats": sums over latent elements.
"""

import torch
from torch import Tensor

from async_flowrl.algorithms.sde import mean_over_latent

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before exp, which changes nothing in any sane range and avoids inf · 0 gradients."""


def divergence(mean: Tensor, other: Tensor, std: Tensor) -> Tensor:
    """[B] float64: KL(N(mean, std²) || N(other, std²)) per latent element; means [B, ...], std [B]."""
    return mean_over_latent((mean.double() - other.double()).square()) / (2.0 * std.double().square())


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp of the clamped log-ratio."""
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def moves_away(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """[B] bool: the gradient would push the policy further from the one `log_ratio` [B] is taken against."""
    return ((log_ratio > 0) & (advantages > 0)) | ((log_ratio < 0) & (advantages < 0))


def divergence_mask(distance: Tensor, log_ratio: Tensor, advantages: Tensor, threshold: float) -> Tensor:
    """[B] bool, True = kept. Drops rows at a distance >= threshold that would move further away (arXiv 2606.11025)."""
    return ~((distance >= threshold) & moves_away(log_ratio, advantages))


def importance_weight(log_ratio_nats: Tensor, cap: float) -> Tensor:
    """min(exp(log-ratio), cap), without gradient; the log-ratio is that of the true densities (of whole latents)."""
    return ratio_of(log_ratio_nats.detach()).clamp(max=cap)


def gap_metrics(log_ratio: Tensor) -> dict[str, Tensor]:
    """How far the proximal policy is from the sampler's own numbers, from `log_ratio` [B] = l_prox - l_rollout.

    On the scale of means over latent elements. k2 and k3 are estimates of a KL: half the square, and exp(x) - 1 - x.
    """
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "log_prob_gap": log_ratio.abs(),
        "rollout_log_ratio": log_ratio,
        "rollout_k2": log_ratio.square() / 2.0,
        "rollout_k3": torch.expm1(bounded) - bounded,
    }


def weight_metrics(log_ratio_nats: Tensor) -> dict[str, Tensor]:
    """The untruncated importance weights and their squares, whose means give the effective sample size; [B]."""
    weight = ratio_of(log_ratio_nats)
    return {"importance_weight": weight, "importance_weight_squared": weight.square()}


def effective_sample_size(mean_weight: float, mean_squared_weight: float) -> float:
    """Share in (0, 1]: (mean w)² / mean w², of untruncated weights. Below 0.5 they do more harm than good."""
    return mean_weight * mean_weight / mean_squared_weight


def gradient_kept(kept: float, nonzero: float) -> float:
    """Share of the rows with nonzero advantage whose gradient survived clip and mask; 1 where there are none."""
    return kept / nonzero if nonzero > 0 else 1.0
