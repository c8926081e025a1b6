"""Tests of images that are not square against diffusers' pipelines, for each family: schedule, latents and pixels."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from async_flowrl.algorithms import sde
from async_flowrl.config.resolution import Resolution, height_width
from async_flowrl.policies.registry import family_of
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from tests.support.families import NAMES, TEXT, conditioning, how, model_config
from tests.support.shared_models import SharedModels
from tests.support.tiny import request, tensors

SIZES: list[Resolution] = [(32, 64), (96, 32), (64, 96)]
STEPS = 3


@pytest.mark.parametrize("family", NAMES)
def test_schedule_latents_and_pixels_are_the_stock_pipelines_at_three_aspect_ratios(
    family: str, shared_models: SharedModels
) -> None:
    policy, pipeline = shared_models.policy(family), shared_models.pipeline(family)
    positive, _ = conditioning(policy)
    length = model_config(family).max_sequence_length
    shifts = set()
    for size in SIZES:
        height, width = height_width(size)
        sampling = replace(how(family), resolution=size, num_inference_steps=STEPS)
        start = torch.randn(1, *policy.latent_shape(size), generator=torch.Generator().manual_seed(0))
        options = {} if length is None else {"max_sequence_length": length}
        stock = pipeline(
            TEXT,
            height=height,
            width=width,
            num_inference_steps=STEPS,
            latents=start,
            output_type="latent",
            **family_of(pipeline).guidance_arguments(sampling),
            **options,
        ).images
        sigmas = policy.sigmas(STEPS, size)
        assert torch.equal(pipeline.scheduler.sigmas.cpu().float(), sigmas)
        shifts.add(float(sigmas[1]))
        x = start
        with torch.no_grad():
            for sigma, after in itertools.pairwise(sigmas):
                velocity = policy.velocity(x, sigma.expand(1), positive, None, sampling)
                x = sde.ode_step(x, velocity, sigma.expand(1), after.expand(1))
        assert (x - stock).abs().max() < 2e-5
        assert policy.decode(stock, size).shape == (1, height, width, 3)
        # Only a swap of rows and columns would still fit the shape.
        turned = replace(sampling, resolution=(width, height))
        if policy.latent_shape(size) == policy.latent_shape((width, height)):
            wrong = policy.velocity(start, sigmas[:1], positive, None, turned)
            assert (wrong - policy.velocity(start, sigmas[:1], positive, None, sampling)).abs().max() > 1e-3
    assert len(shifts) == (len(SIZES) if family in ("qwen_image", "flux") else 1)


@pytest.mark.parametrize("family", NAMES)
def test_pixels_and_a_replayed_rollout_of_a_rectangle(family: str, shared_models: SharedModels) -> None:
    """The engine's images are the stock VAE's, row for row, and the trainer finds the recorded log-probs again."""
    policy, size = shared_models.policy(family), (32, 64)
    sampling = replace(how(family), resolution=size)
    made = DiffusersEngine(policy).generate([request(2, how=sampling, noise_steps=(0, 1))])[0]
    found = made.trajectory
    assert found is not None and made.images.shape == (2, 32, 64, 3) and made.images.std() > 5
    sigmas = torch.from_numpy(found.sigmas)
    now, following = (torch.from_numpy(found.latents[:, place]) for place in (0, 1))
    sigma, after = (sigmas[place].expand(2) for place in (0, 1))
    with torch.no_grad():
        velocity = policy.velocity(now, sigma, tensors(found.conditioning), None, sampling)
    transition = sde.transition(
        now,
        velocity,
        sigma,
        after,
        sigma_after_first=sigmas[1],
        sde_type=sampling.sde_type,
        noise_level=sampling.noise_level,
    )
    again = sde.log_prob(following, transition, sampling.sde_type).float()
    assert np.array_equal(again.numpy(), found.log_probs[:, 0])
