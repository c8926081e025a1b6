"""Tests of replays: the trainer computes the log-probabilities of a trajectory again, to the bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from async_flowrl.algorithms import sde
from async_flowrl.policies.lora import lora_parameters
from async_flowrl.policies.qwen_image import QwenImagePolicy
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.types import Sampling, Trajectory
from tests.support.tiny import adapted_policy, randomise, request, sampling, tensors
from tests.unit.rollout.trajectories import trajectory_of


def replay(
    policy: QwenImagePolicy,
    found: Trajectory,
    how: Sampling,
    negative: dict[str, Tensor] | None,
    *,
    rows: int | None = None,
) -> Tensor:
    """log-ratio [n, W] float64 of the trainer's own forward to the recorded log-prob; `rows` images per forward."""
    sigmas, positive = torch.from_numpy(found.sigmas), tensors(found.conditioning)
    latents = torch.from_numpy(found.latents)
    size, ratios = rows or len(latents), []
    for column, step in enumerate(found.train_steps):
        at = found.points.index(step)
        assert found.points[at + 1] == step + 1
        values = []
        for start in range(0, len(latents), size):
            x, following = latents[start : start + size, at], latents[start : start + size, at + 1]
            sigma, after = (sigmas[i].expand(len(x)) for i in (step, step + 1))
            velocity = policy.velocity(x, sigma, positive, negative, how)
            transition = sde.transition(
                x,
                velocity,
                sigma,
                after,
                sigma_after_first=sigmas[1],
                sde_type=how.sde_type,
                noise_level=how.noise_level,
            )
            values.append(sde.log_prob(following, transition, how.sde_type).float())
        ratios.append(torch.cat(values).double() - torch.from_numpy(found.log_probs[:, column]).double())
    return torch.stack(ratios, dim=1)


@pytest.mark.parametrize(
    ("kind", "cfg"),
    [
        ("sde", 4.0),
        ("dance_sde", 1.0),
        ("cps", 4.0),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("sde", 1.0), ("dance_sde", 4.0), ("cps", 1.0))),
    ],
)
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
