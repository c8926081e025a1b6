"""Tests of images that are not square against diffusers' pipelines, for each family: schedule, latents and pixels."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from async_flowrl.algorithms import sde
from async_flowrl.config.resolution import Resolution, height_width
from async_flowrl.policies.registry import family_of, resolve_model, shapes_of
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
    made = DiffusersEngine(policy).generate(request(2, how=sampling, noise_steps=(0, 1)))
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


@pytest.mark.parametrize("family", NAMES)
def test_sizes_are_known_without_a_model_and_bad_ones_refused_with_the_nearest(family: str) -> None:
    model = resolve_model(model_config(family))
    step, near = (32, "32 × 64") if family == "sana" else (16, "32 × 48")
    assert math.prod(shapes_of(model, (32, 64)).latents) == 2 * math.prod(shapes_of(model, 32).latents)
    with pytest.raises(ValueError, match=rf"must be multiples of {step}, got 40 × 50, nearest: {near}$"):
        shapes_of(model, (40, 50))
    with pytest.raises(ValueError, match=rf"must be multiples of {step}, got 30 × 34, nearest: 32$"):
        shapes_of(model, (30, 34))


LARGEST = {"sd3": (16, 16), "z_image": (64, 64)}
"""Family → most rows and columns of image tokens of its tiny model; those of Qwen-Image are in the thousands."""


@pytest.mark.parametrize("family", LARGEST)
def test_the_largest_images_are_those_that_the_network_has_positions_for(
    family: str, shared_models: SharedModels
) -> None:
    """One more row or column is refused by the family; diffusers itself fails only inside the network."""
    policy, (rows, columns) = shared_models.policy(family), LARGEST[family]
    positive, _ = conditioning(policy)
    for size in ((16 * rows, 16), (16, 16 * columns)):
        latents = torch.randn(1, *policy.latent_shape(size), generator=torch.Generator().manual_seed(0))
        sampling = replace(how(family), resolution=size)
        with torch.no_grad():
            assert policy.velocity(latents, torch.tensor([0.5]), positive, None, sampling).isfinite().all()
    model = resolve_model(model_config(family))
    for size in ((16 * (rows + 1), 16), (16, 16 * (columns + 1))):
        asked = f"{size[0]} × {size[1]}"
        with pytest.raises(
            ValueError, match=rf"^resolution must be at most {16 * rows} px .*no positions .*got {asked}$"
        ):
            shapes_of(model, size)
        channels, height, width = policy.latent_shape(16)
        beyond = torch.randn(1, channels, height * size[0] // 16, width * size[1] // 16)
        with pytest.raises((ValueError, IndexError)), torch.no_grad():
            policy._network(beyond, torch.tensor([0.5]), [positive], how(family))


def test_the_largest_images_of_qwen_image_leave_positions_for_the_text(shared_models: SharedModels) -> None:
    """diffusers' table of positions is sliced, so what lies beyond its end would be missing without an error."""
    policy, text = shared_models.policy("qwen_image"), 512
    rows, columns = policy.largest_grid
    for grid, whole in (((rows, 1), True), ((1, columns), True), ((rows + 2, 1), False), ((1, columns + 2), False)):
        _, positions = policy.transformer.pos_embed([(1, *grid)], max_txt_seq_len=text, device=torch.device("cpu"))
        assert (len(positions) == text) == whole
    with pytest.raises(ValueError, match=rf"^resolution must be at most {16 * rows} px for Qwen-Image"):
        policy.latent_shape((16 * (rows + 1), 16))


@pytest.mark.parametrize("family", ["flux", "sana"])
def test_families_that_compute_positions_have_no_largest_size(family: str, shared_models: SharedModels) -> None:
    policy = shared_models.policy(family)
    assert policy.largest_grid is None
    positive, _ = conditioning(policy)
    sampling = replace(how(family), resolution=(32, 4096))
    latents = torch.randn(1, *policy.latent_shape((32, 4096)), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert policy.velocity(latents, torch.tensor([0.5]), positive, None, sampling).isfinite().all()
