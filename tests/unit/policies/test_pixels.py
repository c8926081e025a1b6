"""Tests of images with their gradient: they are those that `decode` rounds, by a policy that has the VAE alone."""

import pytest
import torch

from tests.support.families import latents, policy_of, runs_here

FAMILIES = [*filter(runs_here, ("qwen_image", "qwen_image_21", "flux", "sd3", "sana"))]
"""RGB and RGBA, packed and unpacked latents, a VAE of videos and of images."""


@pytest.mark.extended
@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_are_the_decoded_images_before_rounding(family: str) -> None:
    whole, alone = policy_of(family), policy_of(family, parts="vae")
    final = latents(whole)
    images = whole.decode(final, 32)
    pixels = alone.pixels(final.requires_grad_(True), 32)
    bytes_of = (pixels.detach() * 255).permute(0, 2, 3, 1)
    assert (bytes_of - images).abs().max() <= (
        1.501 if family == "qwen_image_21" else 0.501
    )  # RGBA is rounded three times.
    (gradient,) = torch.autograd.grad(pixels.mean(), final)
    assert torch.isfinite(gradient).all() and gradient.abs().sum() > 0
    assert all(parameter.is_meta for parameter in alone.transformer.parameters())
