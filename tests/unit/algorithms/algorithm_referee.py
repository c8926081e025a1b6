"""A flow with an exactly known policy gradient: v = a x + b, D = 4, four noisy steps and a last ODE step.

Written without the package's own maths (float64 numpy and moments). The parameters of each step are kept apart, so that
the gradient with respect to every step's (a, b) is known, at any mixture of policies over the steps.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from async_flowrl.algorithms.base import MicroBatch, Prediction, Velocity
from async_flowrl.algorithms.policy_gradient import PolicyGradient
from async_flowrl.config.schema import AlgorithmConfig

D = 4
SIGMAS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
STEPS = range(4)
COUNT = 100_000
GOAL = torch.tensor([0.6, -0.4, 0.2, 0.5], dtype=torch.float64)
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Weights:
    """v = a x + b, the same for all steps."""

    a: float
    b: tuple[float, float, float, float]

    def velocity(self, x: Tensor) -> Tensor:
        return self.a * x + torch.tensor(self.b, dtype=x.dtype)


CURRENT = Weights(0.30, (0.20, -0.10, 0.30, -0.20))
BEHAVIOUR = Weights(0.55, (-0.05, 0.15, 0.05, 0.05))
OTHER = Weights(0.42, (0.08, 0.02, 0.18, -0.08))


def coefficients(index: int, sde_type: str, noise_level: float) -> tuple[float, float, float]:
    """P, Q, std of step `index`: next = P x + Q v + std noise."""
    s, s_next = SIGMAS[index], SIGMAS[index + 1]
    h = s - s_next
    if sde_type == "cps":
        std = s_next * math.sin(math.pi * noise_level / 2)
        kept = math.sqrt(s_next**2 - std**2)
        return (1 - s_next) + kept, -(1 - s_next) * s + kept * (1 - s), std
    g = noise_level if sde_type == "dance_sde" else noise_level * math.sqrt(s / (1 - (SIGMAS[1] if index == 0 else s)))
    # Reverse time: dx = -(v - g²/2 score) h + g sqrt(h) noise, score = -eps_hat / s, eps_hat = x + (1 - s) v.
    drift_x, drift_v = 0.5 * g**2 / s, 1 + 0.5 * g**2 * (1 - s) / s
    return 1 - h * drift_x, -h * drift_v, g * math.sqrt(h)


@lru_cache(maxsize=4)
def sample(weights: Weights, sde_type: str, noise_level: float) -> tuple[Tensor, Tensor]:
    """Trajectories [5, N, D] float64 up to the last noisy step's result, and rewards [N] after the ODE step."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(5, COUNT, D, generator=generator, dtype=torch.float64)
    points = [draw[0]]
    for index in STEPS:
        p, q, std = coefficients(index, sde_type, noise_level)
        points.append(p * points[-1] + q * weights.velocity(points[-1]) + std * draw[index + 1])
    final = points[-1] - SIGMAS[4] * weights.velocity(points[-1])
    return torch.stack(points), -(final - GOAL).square().sum(dim=1)


def expected_reward(parameters: Tensor, last: Weights, sde_type: str, noise_level: float) -> Tensor:
    """[] float64: E[reward] from moments, where `parameters` [4, 5] are (a, b) of each noisy step; the ODE step has
    `last`."""
    mean, variance = torch.zeros(D, dtype=torch.float64), torch.ones(D, dtype=torch.float64)
    for index in STEPS:
        p, q, std = coefficients(index, sde_type, noise_level)
        gain = p + q * parameters[index, 0]
        mean, variance = gain * mean + q * parameters[index, 1:], gain**2 * variance + std**2
    gain = 1 - SIGMAS[4] * last.a
    mean, variance = gain * mean - SIGMAS[4] * torch.tensor(last.b, dtype=torch.float64), gain**2 * variance
    return -((mean - GOAL).square() + variance).sum()


def exact_gradient(step_weights: list[Weights], last: Weights, sde_type: str, noise_level: float) -> Tensor:
    """[4, 5] float64: d E[reward] / d (a, b) of each noisy step; the ODE step has `last`."""
    parameters = torch.tensor([[w.a, *w.b] for w in step_weights], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(expected_reward(parameters, last, sde_type, noise_level), parameters)
    return gradient


def per_step_target(current: Weights, sampler: Weights, sde_type: str, noise_level: float) -> Tensor:
    """[4, 5]: the gradient at each step's own parameters where all other steps are the sampler's.

    This is what weights of single steps can correct for; for current = sampler it is the policy gradient.
    """
    rows = []
    for index in STEPS:
        mixed = [current if other == index else sampler for other in STEPS]
        rows.append(exact_gradient(mixed, sampler, sde_type, noise_level)[index])
    return torch.stack(rows)


def micro_batch(points: Tensor, advantages: Array, index: int) -> MicroBatch:
    """The rows of this step, as the trainer would build them."""
    count, sigmas = points.shape[1], torch.tensor(SIGMAS)
    steps = torch.full((count,), index)
    return MicroBatch(
        latents=points[index].float(),
        next_latents=points[index + 1].float(),
        sigma=sigmas[steps],
        sigma_next=sigmas[steps + 1],
        steps=steps,
        sigmas=sigmas,
        advantages=torch.from_numpy(advantages).float(),
        positive=tuple((advantages > 0).tolist()),
        rollout_log_prob=torch.zeros(count),
        seeds=tuple(range(count)),
        age=1,
    )


def recorded_by(sampler: Weights, config: AlgorithmConfig, batch: MicroBatch, index: int) -> MicroBatch:
    """The rows with what a rollout engine records of the sampler: log-probs averaged over the latent, or for cps
    minus the mean square distance to the mean."""
    p, q, std = coefficients(index, config.sde_type, config.noise_level)
    x = batch.latents.double()
    square = (batch.next_latents.double() - p * x - q * sampler.velocity(x)).square().mean(dim=1)
    density = -square / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)
    return replace(batch, rollout_log_prob=-square if config.sde_type == "cps" else density)


def row_gradients(algorithm: PolicyGradient, batch: MicroBatch, current: Weights, behaviour: Weights | None) -> Tensor:
    """[N, 5]: d loss_row / d (a, b) for every row, from the algorithm's own predict and loss."""
    count = batch.latents.shape[0]
    a = torch.full((count, 1), current.a, requires_grad=True)
    b = torch.tensor(current.b).repeat(count, 1).requires_grad_(True)
    prediction = algorithm.predict(batch, lambda x, sigma: a * x + b)
    stale: Prediction | None = None
    if behaviour is not None:
        fixed = behaviour
        velocity: Velocity = lambda x, sigma: fixed.velocity(x)  # noqa: E731
        stale = algorithm.predict(batch, velocity)
    loss = algorithm.loss(batch, prediction, {} if stale is None else {"behaviour": stale}).loss
    grad_a, grad_b = torch.autograd.grad(loss.sum(), (a, b))
    return torch.cat([grad_a, grad_b], dim=1).double()


def estimate(
    algorithm: PolicyGradient,
    *,
    current: Weights,
    sampler: Weights,
    behaviour: Weights | None,
    scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """Ascent direction [5] and its standard error [5]: steps summed with weights `scale` [4], rows averaged."""
    config = algorithm.config
    points, rewards = sample(sampler, config.sde_type, config.noise_level)
    (advantages,) = algorithm.advantages({"reward": [rewards.numpy()]})
    total = torch.zeros(COUNT, 5, dtype=torch.float64)
    for index in STEPS:
        batch = recorded_by(sampler, config, micro_batch(points, advantages, index), index)
        total -= scale[index] * row_gradients(algorithm, batch, current, behaviour)
    return total.mean(dim=0), total.std(dim=0) / math.sqrt(COUNT)


def deviations(estimated: tuple[Tensor, Tensor], exact: Tensor) -> float:
    """The largest distance from `exact` [5] over the parameters, in standard errors."""
    mean, error = estimated
    return float(((mean - exact).abs() / error).max())
