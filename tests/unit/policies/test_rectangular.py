"""Tests of images that are not square against diffusers' pipelines, for each family: schedule, latents and pixels."""

from dataclasses import replace

import pytest
import torch

from async_flowrl.config.resolution import Resolution, height_width
from async_flowrl.policies.registry import family_of
from tests.support.families import NAMES, called, conditioning, denoised, how, model_config
from tests.support.shared_models import SharedModels

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
        stock = called(
            pipeline,
            height=height,
            width=width,
            num_inference_steps=STEPS,
            latents=policy.stock_latents(start, size),
            output_type="latent",
            **family_of(pipeline).guidance_arguments(sampling),
            **options,
        )
        sigmas = policy.sigmas(STEPS, size)
        assert torch.equal(pipeline.scheduler.sigmas.cpu().float(), sigmas)
        shifts.add(float(sigmas[1]))
        assert (denoised(policy, start, sampling, positive, None, steps=STEPS) - stock).abs().max() < 2e-5
        assert policy.decode(stock, size).shape == (1, height, width, 3)
        # Only a swap of rows and columns would still fit the shape.
        turned = replace(sampling, resolution=(width, height))
        if policy.latent_shape(size) == policy.latent_shape((width, height)):
            wrong = policy.velocity(start, sigmas[:1], positive, None, turned)
            assert (wrong - policy.velocity(start, sigmas[:1], positive, None, sampling)).abs().max() > 1e-3
    assert len(shifts) == (len(SIZES) if family in ("qwen_image", "qwen_image_21", "flux", "flux2_klein") else 1)
