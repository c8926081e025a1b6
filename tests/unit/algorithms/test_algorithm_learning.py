"""Tests that each policy-gradient algorithm trains a linear-Gaussian flow, judged by the flow's exact expected reward.

Right way, and wrong way when the reward is negated. test_algorithm_referee.py: permuted advantages have no gradient.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.algorithms.algorithm_cases import policy_gradient
from tests.unit.algorithms.algorithm_referee import STEPS, Weights, expected_reward, micro_batch, sample, stacked

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
    measured = [
        float(expected_reward(stacked([at] * 4), at, config.sde_type, config.noise_level))
        for at in (weights(a, b), START)
    ]
    return measured[0] - measured[1]


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
