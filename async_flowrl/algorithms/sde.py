"""Denoising steps: the distribution of the next latents x' given x, and log-probs. Rollout and training both call it.

Conventions: x_s = (1 - s) x0 + s eps at noise level s, the network predicts v = eps - x0, the step goes from s to
s' < s, and h = s - s'. A noisy step draws x' from N(mean, std² I); std is that of the whole step (for sde and dance_sde
it includes the factor sqrt(h)). Latents [B, ...] may have any shape. Arithmetic is float32, means over latent elements
are float64.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from async_flowrl.config.error_text import unknown_name
from async_flowrl.config.schema import SDE_TYPES
from async_flowrl.transfers import upload

# Noise level from which on `sde` divides by 1 - sigmas[1] instead of 1 - s, which is 0 in a schedule's first step.
FIRST_STEP_MIN_SIGMA = 1.0 - 1e-6
LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


class Transition(NamedTuple):
    """The Gaussian distribution of x' in a denoising step.

    `mean` is [B, ...] and `std` [B, 1, ...], both float32; `deterministic` [B] bool is True if std is 0.
    """

    mean: Tensor
    std: Tensor
    deterministic: Tensor


def expand(values: Tensor, like: Tensor) -> Tensor:
    """Returns `values` [B] as [B, 1, ...] with as many dimensions as `like`."""
    return values.reshape(-1, *([1] * (like.dim() - 1)))


def mean_over_latent(values: Tensor) -> Tensor:
    """Returns the mean of [B, ...] over all dimensions but the first, [B] float64."""
    return values.double().flatten(1).mean(dim=1)


def latent_elements(latents: Tensor) -> int:
    return latents[0].numel()


def validate_schedule(sigmas: Tensor, sde_type: str = "sde") -> None:
    """Raises ValueError unless `sigmas` [T+1] falls strictly from exactly 1 to exactly 0.

    For `sde`, sigmas[1] must be at most 0.999, because its noise grows without bound towards 1.
    """
    values = [float(sigma) for sigma in sigmas]
    if len(values) < 2 or values[0] != 1.0 or values[-1] != 0.0:
        raise ValueError(f"sigmas must run from exactly 1 to exactly 0, got {values}")
    # A comparison with NaN is false, so NaN is refused here too.
    if not all(after < before for before, after in pairwise(values)):
        raise ValueError(f"sigmas must fall strictly, got {values}")
    if sde_type == "sde" and len(values) > 2 and values[1] > 0.999:
        raise ValueError(f"sigmas[1] must be at most 0.999 for sde steps, got {values[1]}")


def transition(
    x: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    sigma_after_first: float | Tensor,
    sde_type: str,
    noise_level: float | Tensor,
) -> Transition:
    """Returns the distribution of x' given x; each row may be at another noise level.

    x and velocity are [B, ...]; sigma (= s) and sigma_next (= s') are [B]; noise_level is a number or [B];
    sigma_after_first is sigmas[1] of the schedule. All tensors should be on the device of x; otherwise they are copied.
    sde: Flow-GRPO (arXiv 2505.05470, eq. 9, sigma_t = a sqrt(t / (1 - t))); dance_sde: DanceGRPO (2505.07818), the same
    drift with a constant coefficient; cps: coefficients-preserving sampling (2509.05952), for a noise_level from 0 to
    1; ode: an Euler step. Raises ValueError for an unknown sde_type.
    """
    x, velocity = x.float(), velocity.float()
    s, s_next = sigma.float(), sigma_next.float()
    level = _filled(noise_level, s)
    if sde_type == "cps":
        mean, std = _cps(x, velocity, s, s_next, level)
    elif sde_type == "ode":
        mean, std = ode_step(x, velocity, s, s_next), torch.zeros_like(s)
    elif sde_type in ("sde", "dance_sde"):
        coefficient = level
        if sde_type == "sde":
            bounded = torch.where(s >= FIRST_STEP_MIN_SIGMA, _filled(sigma_after_first, s), s)
            coefficient = level * torch.sqrt(s / (1.0 - bounded))
        mean, std = diffusion(x, velocity, s, s_next, coefficient)
    else:
        raise ValueError(unknown_name("sde_type", sde_type, SDE_TYPES))
    return Transition(mean, expand(std, x), std == 0.0)


def step_stds(sigmas: Tensor, *, sde_type: str, noise_level: float) -> Tensor:
    """Returns the std [T - 1] that the steps of a schedule [T+1] would have with noise; the last step is left out."""
    return _with_noise(sigmas, sde_type, noise_level).std.flatten()


# `algorithm.step_weight` → function of std [T-1] and |d mean / d velocity| [T-1] of the steps.
STEP_WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relative_variance": lambda std, slope: std.square(),
    "relative_std": lambda std, slope: std,
    "rectified": lambda std, slope: std / slope,
}


def relative_weights(kind: str, sigmas: Tensor, steps: Sequence[int], *, sde_type: str, noise_level: float) -> Tensor:
    """Returns STEP_WEIGHTS[kind] of each step but the last, divided by its mean over `steps`, [T - 1] float64.

    relative_std: TempFlow-GRPO (arXiv 2508.04324); rectified: Flash-GRPO (2605.15980), which makes the gradients of all
    steps with respect to the velocity equally long. `sigmas` [T+1] is the schedule.
    """
    step = _with_noise(sigmas, sde_type, noise_level)
    weights = STEP_WEIGHTS[kind](step.std.flatten().double(), step.mean.flatten().double().abs())
    return weights / weights[upload(torch.tensor(steps), weights.device)].mean()


def _with_noise(sigmas: Tensor, sde_type: str, noise_level: float) -> Transition:
    """Returns all steps but the last for latents 0 and velocity 1, so that the means are d mean / d velocity."""
    x, before, after = sigmas.new_zeros(len(sigmas) - 2, 1), sigmas[:-2], sigmas[1:-1]
    return transition(
        x, x + 1.0, before, after, sigma_after_first=sigmas[1], sde_type=sde_type, noise_level=noise_level
    )


def _filled(value: float | Tensor, like: Tensor) -> Tensor:
    """Returns `value` as float32 in the shape and on the device of `like`, without making the host wait."""
    if isinstance(value, Tensor):
        return value.to(like.device, torch.float32).expand_as(like)
    return torch.full_like(like, value)


def diffusion(x: Tensor, velocity: Tensor, s: Tensor, s_next: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    dt = s_next - s
    half = g * g / (2.0 * s)
    mean = x * expand(1.0 + half * dt, x) + velocity * expand((1.0 + half * (1.0 - s)) * dt, x)
    return mean, g * torch.sqrt(-dt)


def _cps(x: Tensor, velocity: Tensor, s: Tensor, s_next: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    x0_hat = x - expand(s, x) * velocity
    eps_hat = x + expand(1.0 - s, x) * velocity
    angle = level * (math.pi / 2.0)
    mean = expand(1.0 - s_next, x) * x0_hat + expand(s_next * torch.cos(angle), x) * eps_hat
    return mean, s_next * torch.sin(angle)


def ode_step(x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """Returns x' = x + v (s' - s) of an Euler step, float32 [B, ...]."""
    return x.float() + velocity.float() * expand((sigma_next - sigma).float(), x)


def sample(step: Transition, noise: Tensor) -> Tensor:
    """Returns x' = mean + std · noise, [B, ...] float32, for standard normal `noise` [B, ...]."""
    return step.mean + step.std * noise.float()


def gaussian_log_prob(next_latents: Tensor, step: Transition) -> Tensor:
    """Returns log N(x'; mean, std² I) per latent element, [B] float64; 0 for deterministic rows.

    The gradient goes to mean and std, not to x' = `next_latents`.
    """
    # 1 for deterministic rows: their value is unused, but its gradient must be finite.
    std = torch.where(step.deterministic, 1.0, step.std.flatten().double())
    square = mean_over_latent((next_latents.detach().double() - step.mean.double()).square())
    return torch.where(step.deterministic, 0.0, -square / (2.0 * std * std) - torch.log(std) - LOG_SQRT_2PI)


def log_prob(next_latents: Tensor, step: Transition, sde_type: str) -> Tensor:
    """Returns the log-prob [B] float64 per latent element that rollouts record; 0 for deterministic rows.

    It is `gaussian_log_prob`, but for cps -mean((x' - mean)²), as in published cps code. That is no log-density: up to
    a constant it is the Gaussian one times 2 std². x' = `next_latents` gets no gradient.
    """
    if sde_type != "cps":
        return gaussian_log_prob(next_latents, step)
    square = mean_over_latent((next_latents.detach().double() - step.mean.double()).square())
    return torch.where(step.deterministic, 0.0, -square)


def cps_to_gaussian(value: Tensor, std: Tensor) -> Tensor:
    """Returns the Gaussian log-prob [B] float64 for cps log-probs `value` [B] of noisy steps with std [B]."""
    std = std.double()
    return value.double() / (2.0 * std * std) - torch.log(std) - LOG_SQRT_2PI
