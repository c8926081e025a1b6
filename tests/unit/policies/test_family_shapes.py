"""Tests of every model family's schedule and shapes, which are known from its configurations, and of its tiny model."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from async_flowrl.config.resolution import Resolution, height_width
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.registry import resolve_model, shapes_of
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from tests.support.families import (
    NAMES,
    TEXT,
    N,
    conditioning,
    denoised,
    how,
    latents,
    model_config,
    passes_by_length,
    policy_of,
    stock_images,
)
from tests.support.shared_models import SharedModels
from tests.support.tiny import request

LARGEST = {"sd3": 256}
"""Side in pixels of the largest image of a tiny model with fewer positions than 512 px need."""


def test_the_schedule_falls_from_one_to_zero_and_sizes_that_do_not_fit_are_refused(
    policy: PipelinePolicy, family: str
) -> None:
    side = LARGEST.get(family, 512)
    sigmas = policy.sigmas(10, side)
    assert sigmas.dtype == torch.float32 and len(sigmas) == 11
    assert sigmas[0] == 1 and sigmas[-1] == 0 and bool((sigmas.diff() < 0).all())
    assert math.prod(policy.latent_shape(side)) == side**2 // (2 if family == "flux2_klein" else 4)
    with pytest.raises(ValueError, match=r"multiple of (16|32), got 40, nearest: 32"):
        policy.latent_shape(40)
    positive, _ = conditioning(policy)
    with pytest.raises(ValueError, match="not those of 64 px"):
        policy.velocity(latents(policy), torch.ones(N), positive, None, replace(how(family), resolution=64))
    with pytest.raises(ValueError, match="needs the negative prompt"):
        policy.velocity(latents(policy), torch.ones(N), positive, None, how(family, cfg=4.0))


def test_shapes_are_known_from_the_configurations(policy: PipelinePolicy, family: str) -> None:
    model, resolution = resolve_model(model_config(family)), LARGEST.get(family, 512)
    found = shapes_of(model, resolution)
    assert found.latents == policy.latent_shape(resolution)
    (encoded,) = policy.encode([TEXT])
    assert found.conditioning.keys() == encoded.keys()
    # A text's own length is not known before; where it is padded, the tiny model's CLIP reads less than a real one.
    assert all(math.prod(shape) >= encoded[name].size for name, shape in found.conditioning.items())
    if family == "flux":
        assert dict(found.conditioning) == {name: value.shape for name, value in encoded.items()}
    with pytest.raises(ValueError, match=r"resolution must be a multiple of (16|32), got 40, nearest: 32"):
        shapes_of(model, 40)


SIZES: list[Resolution] = [(32, 64), (96, 32), (64, 96)]
STEPS = 3


@pytest.mark.extended
@pytest.mark.parametrize("family", NAMES)
def test_schedule_latents_and_pixels_are_the_stock_pipelines_at_three_aspect_ratios(
    family: str, shared_models: SharedModels
) -> None:
    policy, pipeline = shared_models.policy(family), shared_models.pipeline(family)
    positive, _ = conditioning(policy)
    shifts = set()
    for size in SIZES:
        height, width = height_width(size)
        sampling = replace(how(family), resolution=size, num_inference_steps=STEPS)
        start = torch.randn(1, *policy.latent_shape(size), generator=torch.Generator().manual_seed(0))
        stock = stock_images(pipeline, policy, sampling, start, "latent")
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


@pytest.mark.extended
def test_a_prompt_is_encoded_alike_whoever_else_is(policy: PipelinePolicy, family: str) -> None:
    together = policy.encode([TEXT, "blue"])
    for text, found in zip([TEXT, "blue"], together, strict=True):
        (alone,) = policy.encode([text])
        assert found.keys() == alone.keys()
        assert all(found[name].dtype == np.float32 and np.array_equal(found[name], alone[name]) for name in found)
    read, shorter = together[0]["prompt_embeds"], together[1]["prompt_embeds"]
    assert not np.array_equal(read[: len(shorter)], shorter[: len(read)])


@pytest.mark.extended
@pytest.mark.parametrize("family", ["flux", "qwen_image", "sd3"], indirect=True)
def test_offloaded_text_encoders_are_those_of_the_pipeline_and_change_no_bit(
    plain: PipelinePolicy, family: str
) -> None:
    """The encoders stay on the host while the rest is loaded, and hold the same weights."""
    offloaded = policy_of(family, parts="offload")
    assert len(offloaded.text_encoders) == {"sd3": 3, "flux": 2}.get(family, 1)
    asked = request(N, how=how(family, cfg=4.0))
    one = DiffusersEngine(plain).generate([asked])[0]
    two = DiffusersEngine(offloaded, text_encoder="offload").generate([asked])[0]
    assert np.array_equal(one.images, two.images)
    assert one.trajectory is not None and two.trajectory is not None
    assert np.array_equal(one.trajectory.latents, two.trajectory.latents)


@pytest.mark.extended
def test_guidance_makes_as_many_passes_for_every_prompt(plain: PipelinePolicy) -> None:
    """Ranks that share a base by FSDP2 would wait for ever for one that makes fewer."""
    assert len(set(passes_by_length(plain))) == 1
