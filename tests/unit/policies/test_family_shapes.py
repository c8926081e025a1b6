"""Tests of every model family's schedule and shapes, which are known from its configurations, and of its tiny model."""

import math
from dataclasses import replace

import pytest
import torch

from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.registry import resolve_model, shapes_of
from tests.support.families import TEXT, N, conditioning, how, latents, model_config
from tests.support.shared_models import SharedModels

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


def test_published_schedules(shared_models: SharedModels) -> None:
    """SD3.5 with ten steps, at any size, and FLUX.1-dev with six, at 512 px."""
    sd3 = [1, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0]
    flux = [1, 0.9037, 0.7897, 0.6525, 0.4842, 0.2730, 0]
    assert torch.allclose(shared_models.policy("sd3").sigmas(10, 256), torch.tensor(sd3), atol=1e-4)
    assert torch.allclose(shared_models.policy("flux").sigmas(6, 512), torch.tensor(flux), atol=1e-4)


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
