"""Tests of decoding by parts: one image at a time changes only roundings, tiles change pixels; both save memory."""

import numpy as np
import pytest
import torch

from async_flowrl.config.compose import compose_config
from async_flowrl.policies.registry import load_policy, resolve_model
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.rollout.registry import decode_by_parts
from tests.support.families import model_config
from tests.support.shared_models import SharedModels
from tests.support.tiny import request, tiny_policy

FAMILIES = ("qwen_image", "sd3", "sana")
"""One for each kind of VAE."""


@pytest.mark.parametrize("family", FAMILIES)
def test_images_one_by_one_have_the_same_pixels_but_for_roundings(family: str) -> None:
    """Convolutions of one image round differently from those of three: 0 to 2 of 9,216 numbers, by one of 255."""
    policy = load_policy(resolve_model(model_config(family)), dtype="float32", device="cpu", parts="all")
    latents = torch.randn(3, *policy.latent_shape(32), generator=torch.Generator().manual_seed(0))
    together = policy.decode(latents, 32)
    decode_by_parts(policy, compose_config("one_step_off", ["rollout.vae_slicing=true"]))
    apart = (policy.decode(latents, 32).int() - together.int()).abs()
    assert int(apart.max()) <= 1 and int((apart > 0).sum()) <= 10


def test_tiles_change_only_images_larger_than_a_tile(shared_models: SharedModels) -> None:
    plain, tiled = shared_models.tiny, tiny_policy()
    decode_by_parts(tiled, compose_config("one_step_off", ["rollout.vae_tiling=true"]))
    generator = torch.Generator().manual_seed(0)
    for side, same in ((32, True), (288, False)):
        latents = torch.randn(1, *plain.latent_shape(side), generator=generator)
        assert torch.equal(plain.decode(latents, side), tiled.decode(latents, side)) == same


def test_an_encoder_in_the_place_of_the_policys_own_is_asked_alone(shared_models: SharedModels) -> None:
    policy = shared_models.tiny
    wanted = DiffusersEngine(policy).generate(request(2))

    class Told:
        def encode(self, asked: object) -> list[dict[str, np.ndarray]]:
            return policy.encode(["red red red red"])

    cached = tiny_policy(parts="cached")
    assert np.array_equal(DiffusersEngine(cached, encoder=Told()).generate(request(2)).images, wanted.images)
