"""One denoising step x → x' and the density of the noisy ones. Pure, layout-free, float32; reductions in float64.

Conventions: x_s = (1 - s) x0 + s eps, the network predicts v = eps - x0, s > s' >= 0 and h = s - s'.
A step is described by its mean and its *full* standard deviation, nothing else: x' ~ N(mean, std² I).
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from async_flowrl.config.algorithm_schema import SDE_TYPES
from async_flowrl.config.messages import unknown_name

START = 1.0 - 1e-6
"""At and above this noise level `sde` takes the second level of the schedule in its denominator."""
LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True)
class Transition:
    """mean [B, ...] and full transition std [B, 1, ...], float32; deterministic [B] bool: where std is 0."""

    mean: Tensor
    std: Tensor
    deterministic: Tensor


def expand(values: Tensor, like: Tensor) -> Tensor:
    """[B] → [B, 1, ...] with as many dimensions as `like`."""
    return values.reshape(-1, *([1] * (like.dim() - 1)))


def mean_over_latent(values: Tensor) -> Tensor:
    """[B, ...] → [B] float64, the mean over all dimensions but the first."""
    return values.double().flatten(1).mean(dim=1)


def latent_elements(latents: Tensor) -> int:
    """D, the number of latent elements of one sample of [B, ...]."""
    return latents[0].numel()


def validate_schedule(sigmas: Tensor, sde_type: str = "sde") -> None:
    """ValueError unless sigmas [T+1] falls strictly from exactly 1 to exactly 0.

    For `sde` the levels between must stay below 0.999: its diffusion coefficient grows without bound towards 1.
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
    """The distribution of x' given x; rows may sit at different steps.

    x, velocity [B, ...]; sigma, sigma_next [B]; noise_level a number or [B]; sigma_after_first = sigmas[1]. Tensors
    belong on the device of x: another one's are copied, and the host waits for that.
    sde: Flow-GRPO (arXiv 2505.05470, eq. 9 and sigma_t = a sqrt(t / (1 - t))); dance_sde: DanceGRPO (2505.07818), the
    same drift with a constant coefficient; cps: coefficients-preserving sampling (2509.05952); ode: Euler.
    ValueError for an unknown sde_type, and for cps where noise_level is a number outside 0 to 1, at which its angle
    turns back. A tensor's values are not looked at: the host would wait for them.
    """
    x, velocity = x.float(), velocity.float()
    s, s_next = sigma.float(), sigma_next.float()
    level = _filled(noise_level, s)
    if sde_type == "cps":
        if not isinstance(noise_level, Tensor) and not 0 <= noise_level <= 1:
            raise ValueError(f"noise_level of cps steps must be 0 to 1, got {noise_level}")
        mean, std = _cps(x, velocity, s, s_next, level)
    elif sde_type == "ode":
        mean, std = ode_step(x, velocity, s, s_next), torch.zeros_like(s)
    elif sde_type in ("sde", "dance_sde"):
        coefficient = level
        if sde_type == "sde":
            coefficient = level * torch.sqrt(s / (1.0 - torch.where(s >= START, _filled(sigma_after_first, s), s)))
        mean, std = _diffusion(x, velocity, s, s_next, coefficient)
    else:
        raise ValueError(unknown_name("sde_type", sde_type, SDE_TYPES))
    return Transition(mean, expand(std, x), std == 0.0)


def step_stds(sigmas: Tensor, *, sde_type: str, noise_level: float) -> Tensor:
    """[T - 1], what the noise of every step of a schedule [T+1] but the last would have as its std."""
    nothing = torch.zeros(len(sigmas) - 2, 1)
    step = transition(
        nothing,
        nothing,
        sigmas[:-2],
        sigmas[1:-1],
        sigma_after_first=sigmas[1],
        sde_type=sde_type,
        noise_level=noise_level,
    )
    return step.std.flatten()


def _filled(value: float | Tensor, like: Tensor) -> Tensor:
    """Float32 in the shape and on the device of `like`. A number is written there by the device itself: as a tensor
    of the host it would be copied, and the host would wait."""
    if isinstance(value, Tensor):
        return value.to(like.device, torch.float32).expand_as(like)
    return torch.full_like(like, value)


def _diffusion(x: Tensor, velocity: Tensor, s: Tensor, s_next: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Euler-Maruyama step of dx = (v - g²/2 score) ds + g dw with score = -(x + (1 - s) v) / s; std = g sqrt(h)."""
    dt = s_next - s
    half = g * g / (2.0 * s)
    mean = x * expand(1.0 + half * dt, x) + velocity * expand((1.0 + half * (1.0 - s)) * dt, x)
    return mean, g * torch.sqrt(-dt)


def _cps(x: Tensor, velocity: Tensor, s: Tensor, s_next: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """Swaps part of the predicted noise for fresh noise, so that the total stays s'."""
    x0_hat = x - expand(s, x) * velocity
    eps_hat = x + expand(1.0 - s, x) * velocity
    angle = level * (math.pi / 2.0)
    mean = expand(1.0 - s_next, x) * x0_hat + expand(s_next * torch.cos(angle), x) * eps_hat
    return mean, s_next * torch.sin(angle)


def cps_std(sigma_next: float, noise_level: float) -> float:
    """Transition std of a cps step: s' sin(a pi / 2)."""
    return sigma_next * math.sin(noise_level * math.pi / 2.0)


def ode_step(x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """Euler: x + v (s' - s), float32 [B, ...]."""
    return x.float() + velocity.float() * expand((sigma_next - sigma).float(), x)


def sample(step: Transition, noise: Tensor) -> Tensor:
    """x' [B, ...] float32 from standard normal noise [B, ...]."""
    return step.mean + step.std * noise.float()


def gaussian_log_prob(next_latents: Tensor, step: Transition) -> Tensor:
    """log N(x'; mean, std² I) [B] float64, mean over latent elements; 0 in deterministic rows; x' gets no gradient."""
    std = _row_std(step)
    square = mean_over_latent((next_latents.detach().double() - step.mean.double()).square())
    return torch.where(step.deterministic, 0.0, -square / (2.0 * std * std) - torch.log(std) - LOG_SQRT_2PI)


def log_prob(next_latents: Tensor, step: Transition, sde_type: str) -> Tensor:
    """[B] float64, mean over latent elements; 0 in deterministic rows; x' gets no gradient.

    The Gaussian density, but for cps the field's -mean (x' - mean)², no log-density: it weighs steps by 2 std².
    """
    if sde_type != "cps":
        return gaussian_log_prob(next_latents, step)
    square = mean_over_latent((next_latents.detach().double() - step.mean.double()).square())
    return torch.where(step.deterministic, 0.0, -square)


def cps_to_gaussian(value: Tensor, std: Tensor) -> Tensor:
    """Gaussian log-prob [B] float64 of noisy transitions with std [B] whose cps log-prob is `value` [B]."""
    std = std.double()
    return value.double() / (2.0 * std * std) - torch.log(std) - LOG_SQRT_2PI


def _row_std(step: Transition) -> Tensor:
    """[B] float64; 1 in deterministic rows, whose value is selected away (and whose gradient must stay finite)."""
    return torch.where(step.deterministic, 1.0, step.std.flatten().double())
