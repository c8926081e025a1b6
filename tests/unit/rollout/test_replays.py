"""Tests of replays: the trainer computes the log-probabilities of a trajectory again, to the bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from async_flowrl.policies.lora import lora_parameters
from async_flowrl.policies.qwen_image import QwenImagePolicy
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.types import Sampling, Trajectory
from tests.support.tiny import adapted_policy, randomise, request, sampling, tensors
from tests.unit.rollout.trajectories import replay, trajectory_of


@pytest.mark.parametrize(("kind", "cfg"), [("sde", 4.0), ("dance_sde", 1.0), ("cps", 4.0)])
def test_the_trainer_replays_a_trajectory_exactly(policy: QwenImagePolicy, kind: str, cfg: float) -> None:
    """With gradients on, in the sampler's shapes: ratio exactly 1. In other shapes: to float tolerance."""
    how = sampling(cfg=cfg, sde_type=kind, noise_level=0.7)
    found = trajectory_of(DiffusersEngine(policy).generate([request(4, how=how)])[0])
    negative = tensors(policy.encode([how.negative_prompt])[0])
    exact = replay(policy, found, how, negative)
    assert exact.shape == (4, 5) and exact.requires_grad
    assert torch.equal(exact.detach(), torch.zeros(4, 5, dtype=torch.float64))
    for rows in (1, 3):
        assert replay(policy, found, how, negative, rows=rows).abs().max() < 1e-6


@pytest.mark.parametrize("cfg", [1.0, 4.0])
def test_a_bfloat16_trajectory_replays_exactly_and_is_stored_in_float32(cfg: float) -> None:
    """Only the network computes in bfloat16: rounding the stored latents as well would move the ratio."""
    policy = adapted_policy(dtype="bfloat16")
    how = sampling(cfg=cfg)
    found = trajectory_of(DiffusersEngine(policy).generate([request(4, how=how)])[0])
    negative = tensors(policy.encode([how.negative_prompt])[0])
    assert found.latents.dtype == found.log_probs.dtype == found.sigmas.dtype == np.float32
    assert wrong_values(policy, found, how, negative) == 0
    rounded = torch.from_numpy(found.latents).bfloat16().float().numpy()
    assert wrong_values(policy, replace(found, latents=rounded), how, negative) > 1e-4


def wrong_values(policy: QwenImagePolicy, found: Trajectory, how: Sampling, negative: dict[str, Tensor]) -> float:
    with torch.no_grad():
        return float(replay(policy, found, how, negative).abs().max())


def test_a_trajectory_of_an_older_version_does_not_replay() -> None:
    policy = adapted_policy()
    found = trajectory_of(DiffusersEngine(policy).generate([request(4)])[0])
    randomise(lora_parameters(policy.transformer), 0.29)
    assert wrong_values(policy, found, sampling(), {}) > 1e-4
