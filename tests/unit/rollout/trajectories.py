"""What a rollout recorded, for tests, and how a trainer computes it again."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from async_flowrl.algorithms import sde
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.rollout.base import Rollout
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.types import Prompt, Sampling, Trajectory
from tests.support import families
from tests.support.tiny import RED, request, tensors


def trajectory_of(rollout: Rollout) -> Trajectory:
    assert rollout.trajectory is not None
    return rollout.trajectory


def replay(
    policy: PipelinePolicy,
    found: Trajectory,
    how: Sampling,
    negative: Mapping[str, Tensor] | None,
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


def replayed(
    policy: PipelinePolicy,
    how: Sampling,
    *,
    prompt: Prompt = RED,
    negative: Mapping[str, Tensor] | None = None,
    noisy: int = 5,
) -> Rollout:
    """Three images: the log-ratio of their replay is exactly 0 in the sampler's shapes, and below 1e-6 row by row.

    `negative`: arrays of a negative prompt that is not in the ticket.
    """
    wanted = request(3, how=how, prompt=prompt, noise_steps=tuple(range(noisy)))
    made = DiffusersEngine(policy).generate([wanted])[0]
    found = trajectory_of(made)
    negative = negative if found.negative is None else tensors(found.negative)
    exact = replay(policy, found, how, negative, rows=3)
    assert torch.equal(exact, torch.zeros_like(exact))
    assert replay(policy, found, how, negative, rows=1).abs().max() < 1e-6
    return made


def check_batch(policy: PipelinePolicy, pairs: Sequence[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> None:
    """Two images of each prompt have the same guided velocity in one batch as alone; `pairs` are both branches."""
    sampling, n = families.how(policy.family, cfg=3.0), len(pairs)
    x = torch.randn(2 * n, *policy.latent_shape(32), generator=torch.Generator().manual_seed(1))
    sigma = torch.linspace(0.9, 0.2, n).repeat_interleave(2)
    positives, negatives = zip(*pairs, strict=True)
    with torch.no_grad():
        together = policy.velocity_of(x, sigma, list(positives), list(negatives), sampling)
        parts = zip(x.chunk(n), sigma.chunk(n), pairs, strict=True)
        alone = [policy.velocity(rows, level, *pair, sampling) for rows, level, pair in parts]
    assert (together - torch.cat(alone)).abs().max() < 1e-5
