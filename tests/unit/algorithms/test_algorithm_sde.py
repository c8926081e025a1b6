"""Tests of denoising steps against an independent float64 implementation, and of invariants of the schedule."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from async_flowrl.algorithms import sde

SD3 = (1.0, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0.0)
QWEN = (1.0, 0.9290, 0.8515, 0.7666, 0.6733, 0.5701, 0.4555, 0.3274, 0.1833, 0.02, 0.0)
LAYOUTS = [(16, 8, 8), (64, 16), (4, 3, 8, 8), (5,)]
LEVELS = {"sde": 0.7, "dance_sde": 0.3, "cps": 0.8}


def reference_step(
    x: Tensor, v: Tensor, s: float, s_next: float, after_first: float, sde_type: str, a: float
) -> tuple[Tensor, float]:
    """Mean and full std in float64, one sample, from the score (or from x0 and eps) and not from the expanded form."""
    x, v = x.double(), v.double()
    x0, eps = x - s * v, x + (1 - s) * v
    h = s - s_next
    if sde_type == "cps":
        std = s_next * math.sin(a * math.pi / 2)
        return (1 - s_next) * x0 + math.sqrt(s_next**2 - std**2) * eps, std
    g = a if sde_type == "dance_sde" else a * math.sqrt(s / (1 - (after_first if s == 1 else s)))
    score = -(x - (1 - s) * x0) / s**2
    return x - (v - 0.5 * g**2 * score) * h, g * math.sqrt(h)


def steps_of(schedule: tuple[float, ...], indices: list[int]) -> tuple[Tensor, Tensor]:
    sigmas = torch.tensor(schedule)
    return sigmas[indices], sigmas[[i + 1 for i in indices]]


@pytest.mark.parametrize("sde_type", LEVELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", [SD3, QWEN])
def test_steps_equal_an_independent_implementation(
    sde_type: str, layout: tuple[int, ...], schedule: tuple[float, ...]
) -> None:
    """Rows at different steps in one batch, first and last but one included."""
    indices = [0, 1, 4, len(schedule) - 3]
    torch.manual_seed(0)
    x, v, noise = torch.randn(3, len(indices), *layout)
    sigma, sigma_next = steps_of(schedule, indices)
    step = sde.transition(
        x, v, sigma, sigma_next, sigma_after_first=schedule[1], sde_type=sde_type, noise_level=LEVELS[sde_type]
    )
    after = sde.sample(step, noise)
    got = sde.gaussian_log_prob(after, step)
    field = sde.log_prob(after, step, sde_type)
    assert step.mean.dtype == step.std.dtype == torch.float32 and not step.deterministic.any()
    assert step.std.shape == (len(indices), *([1] * len(layout)))
    for row in range(len(indices)):  # rows do not mix: the bits of each are those that it has alone
        one = slice(row, row + 1)
        alone = sde.transition(
            x[one], v[one], sigma[one], sigma_next[one], sigma_after_first=schedule[1], sde_type=sde_type,
            noise_level=LEVELS[sde_type],
        )  # fmt: skip
        assert torch.equal(sde.sample(alone, noise[one])[0], after[row])
    for row, index in enumerate(indices):
        s, s_next = float(sigma[row]), float(sigma_next[row])
        mean, std = reference_step(
            x[row], v[row], s, s_next, float(torch.tensor(schedule[1])), sde_type, LEVELS[sde_type]
        )
        assert torch.allclose(step.mean[row].double(), mean, atol=1e-5, rtol=1e-5), index
        assert float(step.std[row].flatten()[0]) == pytest.approx(std, rel=1e-5)
        expected = torch.distributions.Normal(mean, std).log_prob(after[row].double()).mean()
        assert float(got[row]) == pytest.approx(float(expected), abs=2e-4 if std < 0.05 else 1e-5)
        if sde_type == "cps":
            assert float(field[row]) == pytest.approx(-float((after[row].double() - mean).square().mean()), rel=1e-4)
        else:
            assert field[row] == got[row]


@pytest.mark.parametrize("sde_type", LEVELS)
@pytest.mark.parametrize("index", [0, 1, 5, 8])
def test_without_noise_every_step_is_euler(sde_type: str, index: int) -> None:
    torch.manual_seed(0)
    x, v = torch.randn(2, 4, 8, 4)
    sigma, sigma_next = (values.expand(4) for values in steps_of(SD3, [index]))
    options = {"sigma_after_first": SD3[1], "sde_type": sde_type}
    euler = sde.ode_step(x, v, sigma, sigma_next)
    small = sde.transition(x, v, sigma, sigma_next, noise_level=1e-4, **options)
    none = sde.transition(x, v, sigma, sigma_next, noise_level=0.0, **options)
    assert torch.allclose(small.mean, euler, atol=1e-5) and not small.deterministic.any()
    assert torch.allclose(none.mean, euler, atol=1e-6) and none.deterministic.all()
    assert torch.equal(sde.sample(none, torch.randn(4, 8, 4)), none.mean)


@pytest.mark.parametrize("sde_type", ["sde", "dance_sde", "cps", "ode"])
def test_deterministic_rows_have_log_prob_zero_and_finite_gradients(sde_type: str) -> None:
    x = torch.randn(2, 6)
    v = torch.randn(2, 6, requires_grad=True)
    sigma, sigma_next = steps_of(SD3, [2, 4])
    level = torch.tensor([0.0, 0.0 if sde_type == "ode" else 0.5])
    step = sde.transition(x, v, sigma, sigma_next, sigma_after_first=SD3[1], sde_type=sde_type, noise_level=level)
    value = sde.log_prob(step.mean.detach() + 0.1, step, sde_type)
    assert value[0].item() == 0.0 and bool(step.deterministic[0])
    value.sum().backward()
    assert v.grad is not None and torch.isfinite(v.grad).all() and not v.grad[0].any()
    assert v.grad[1].any() == (sde_type != "ode")


def test_relative_weights_are_those_of_the_papers() -> None:
    """Flash-GRPO writes its weight as 1 / (sqrt(h) / g + g sqrt(h) (1 - s) / (2 s)), TempFlow-GRPO's is g sqrt(h)."""
    levels, steps, a = [1.0, 0.9, 0.75, 0.55, 0.3, 0.0], [1, 2, 3], 0.7
    rectified, std = [], []
    for s, s_next in pairwise(levels[:-1]):
        g, h = a * math.sqrt(s / (1 - (levels[1] if s == 1 else s))), s - s_next
        rectified.append(1 / (math.sqrt(h) / g + g * math.sqrt(h) * (1 - s) / (2 * s)))
        std.append(g * math.sqrt(h))
    expected = {"rectified": rectified, "relative_std": std, "relative_variance": [value**2 for value in std]}
    for kind, values in expected.items():
        weights = sde.relative_weights(kind, torch.tensor(levels), steps, sde_type="sde", noise_level=a)
        assert weights.tolist() == pytest.approx([value * 3 / sum(values[1:4]) for value in values], rel=1e-5)


@pytest.mark.parametrize("sde_type", ["sde", "dance_sde", "cps"])
def test_rectified_gradients_have_the_same_length_at_every_step(sde_type: str) -> None:
    """d log-prob / d velocity = noise · (d mean / d velocity) / std: with the weight no step is steeper."""
    levels, level = torch.tensor([1.0, 0.9, 0.75, 0.55, 0.3, 0.0]), 0.6
    weights = sde.relative_weights("rectified", levels, range(4), sde_type=sde_type, noise_level=level)
    lengths = []
    for index, (s, s_next) in enumerate(pairwise(levels[:5])):
        x, noise = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(index))
        velocity = torch.zeros(1, 64, requires_grad=True)
        step = sde.transition(
            x, velocity, s[None], s_next[None], sigma_after_first=levels[1], sde_type=sde_type, noise_level=level
        )
        following = (step.mean + step.std * noise / noise.square().mean().sqrt()).detach()
        (gradient,) = torch.autograd.grad(sde.gaussian_log_prob(following, step).sum(), velocity)
        lengths.append(float(gradient.norm() * weights[index]))
    assert lengths == pytest.approx([lengths[0]] * 4, rel=1e-4)
