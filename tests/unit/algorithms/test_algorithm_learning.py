"""Tests that each policy-gradient algorithm trains a linear-Gaussian flow, judged by the flow's exact expected reward.

Right way, wrong way when the reward is negated, nowhere when the advantages are permuted.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.algorithms.algorithm_cases import policy_gradient
from tests.unit.algorithms.algorithm_referee import GOAL, SIGMAS, STEPS, Weights, coefficients, micro_batch, sample

START = Weights(0.3, (0.2, -0.1, 0.3, -0.2))
GROUPS, SIZE, UPDATES = 4, 16, 60
ALGORITHMS: dict[str, dict[str, Any]] = {
    "flow_grpo": {"noise_level": 0.7, "clip_range": 0.005},
    "flow_grpo-cps": {"sde_type": "cps", "noise_level": 0.8, "clip_range": 0.005},
    "flow_grpo-mask": {"noise_level": 0.7, "clip_range": 0.005, "correction": "mask", "correction_threshold": 2e-3},
    "dance_grpo": {"sde_type": "dance_sde", "noise_level": 0.5, "clip_range": 0.005},
    "mix_grpo": {"noise_level": 0.7, "clip_range": 0.005, "window": "sliding", "sde_window_size": 2},
    "grpo_guard": {"noise_level": 0.7, "clip_range": 0.002},
    "flow_dppo": {"noise_level": 0.7, "clip_range": 1e-4},
}


def expected_reward(weights: Weights, sde_type: str, noise_level: float) -> float:
    mean, variance = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    b = torch.tensor(weights.b, dtype=torch.float64)
    for index in STEPS:
        p, q, std = coefficients(index, sde_type, noise_level)
        mean, variance = (p + q * weights.a) * mean + q * b, (p + q * weights.a) ** 2 * variance + std**2
    gain = 1 - SIGMAS[4] * weights.a
    return -float(((gain * mean - SIGMAS[4] * b - GOAL).square() + gain**2 * variance).sum())


@cache
def train(name: str, **falsifier: bool) -> float:
    """Rise of the exact expected reward over 60 updates, each in two optimizer steps, on samples one version old."""
    fields = ALGORITHMS[name] | falsifier
    algorithm = policy_gradient(name=name.split("-")[0], updates_per_batch=2, **fields)
    config = algorithm.config
    a = torch.tensor(START.a, requires_grad=True)
    b = torch.tensor(START.b, requires_grad=True)
    optimizer = torch.optim.Adam([a, b], lr=0.01)
    sampler = START
    for update in range(UPDATES):
        fresh = weights(a, b)
        points, rewards = sample(sampler, config.sde_type, config.noise_level, count=GROUPS * SIZE, seed=update)
        groups = [group.numpy() for group in rewards.reshape(GROUPS, SIZE)]
        seeds = [update * GROUPS + group for group in range(GROUPS)]
        batch = micro_batch(points, np.concatenate(algorithm.advantages({"r": groups}, seeds=seeds)), STEPS)
        for half in range(2):
            optimizer.zero_grad()
            by_name = {"behaviour": sampler} | ({"proximal": fresh} if half else {})
            frozen = {n: algorithm.predict(batch, fixed(at)) for n, at in by_name.items() if n in algorithm.needs}
            current = algorithm.predict(batch, lambda x, sigma: a * x + b)
            algorithm.loss(batch, current, frozen).loss.mean().backward()
            optimizer.step()
        sampler = fresh
    measure = config.sde_type, config.noise_level
    return expected_reward(weights(a, b), *measure) - expected_reward(START, *measure)


def weights(a: Tensor, b: Tensor) -> Weights:
    return Weights(a.item(), tuple(b.tolist()))


def fixed(at: Weights) -> Any:
    return lambda x, sigma: at.velocity(x)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_reward_rises(name: str) -> None:
    assert train(name) > 0.2


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name.startswith("flow_grpo-") else ()) for name in ALGORITHMS]
)
def test_reward_falls_when_negated(name: str) -> None:
    assert train(name, negate_reward=True) < -0.2


@pytest.mark.extended
def test_permuted_advantages_teach_nothing() -> None:
    assert abs(train("flow_grpo", permute_advantages=True)) < 0.5 * train("flow_grpo")
