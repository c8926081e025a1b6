"""Test on one GPU, real or pretended: with guidance and no mask, the trainer replays what the rollout computed."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from async_flowrl.algorithms import sde
from async_flowrl.policies.registry import load_policy, resolve_model
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.types import Prompt, Sampling, Trajectory
from tests.support.families import NAMES, how, model_config
from tests.support.tiny import request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
IMAGES = 2


def on_device(arrays: Any) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.array(value)).cuda() for name, value in arrays.items()}


def replayed(policy: Any, found: Trajectory, negative: dict[str, Tensor], sampling: Sampling) -> Tensor:
    """Log-probs [n, W] by the trainer's calls, with gradients on, in the sampler's shapes."""
    sigmas, latents = torch.from_numpy(found.sigmas).cuda(), torch.from_numpy(found.latents).cuda()
    columns = []
    for step in found.train_steps:
        x, following = (latents[:, found.points.index(at)] for at in (step, step + 1))
        sigma, after = (sigmas[at].expand(len(x)) for at in (step, step + 1))
        velocity = policy.velocity(x, sigma, on_device(found.conditioning), negative, sampling)
        transition = sde.transition(
            x,
            velocity,
            sigma,
            after,
            sigma_after_first=sigmas[1],
            sde_type=sampling.sde_type,
            noise_level=sampling.noise_level,
        )
        columns.append(sde.log_prob(following, transition, sampling.sde_type).float())
    return torch.stack(columns, dim=1).detach().cpu()


@pytest.mark.parametrize("family", NAMES)
def test_texts_of_other_lengths_go_through_the_network_apart_and_replay_exactly(family: str) -> None:
    """Families that pad every text to one length keep the single batch."""
    policy = load_policy(resolve_model(model_config(family)), dtype="float32", device="cuda", parts="all")
    sampling = how(family, cfg=3.0)
    asked = request(IMAGES, how=sampling, prompt=Prompt(0, "red red red red above blue"))
    rows: list[int] = []
    network: Any = policy._network  # type: ignore[attr-defined]

    def counted(latents: Tensor, *others: Any) -> Tensor:
        rows.append(len(latents))
        return network(latents, *others)  # type: ignore[no-any-return]

    with patch.object(policy, "_network", counted):
        found = DiffusersEngine(policy, device="cuda").generate(asked).trajectory
    steps = sampling.num_inference_steps
    apart = family in ("qwen_image", "z_image")
    assert rows == ([IMAGES] * 2 * steps if apart else [2 * IMAGES] * steps)
    assert found is not None
    (negative,) = policy.encode([sampling.negative_prompt], negative=True)
    again = replayed(policy, found, on_device(negative), sampling)
    assert np.array_equal(again.numpy(), found.log_probs)
