"""What a rollout recorded, for tests."""

import torch
from torch import Tensor

from async_flowrl.algorithms import sde
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.rollout.base import Rollout
from async_flowrl.types import Sampling, Trajectory
from tests.support.tiny import tensors


def trajectory_of(rollout: Rollout) -> Trajectory:
    assert rollout.trajectory is not None
    return rollout.trajectory


def replay(
    policy: PipelinePolicy,
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
