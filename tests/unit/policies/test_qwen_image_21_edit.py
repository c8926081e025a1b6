"""Tests of edits of Qwen-Image 2.1 against diffusers' own pipeline, on the tiny model, and of their replay."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from async_flowrl.config.schema import LoraConfig
from async_flowrl.image_file import opened
from async_flowrl.policies import pipeline, qwen_image_21
from async_flowrl.policies.lora import add_lora, lora_parameters
from async_flowrl.policies.registry import PromptCheck, load_policy, resolve_model, shapes_of
from async_flowrl.types import Prompt
from tests.support.families import NAMES, denoised, how, model_config, on_white, pipeline_of, policy_of, to_edit
from tests.support.tiny import randomise, tensors
from tests.unit.rollout.trajectories import check_batch, replayed, trajectory_of

FAMILY, TEXT, NEGATIVE, STEPS = "qwen_image_21", "make the house blue", "grey", 3
pytestmark = pytest.mark.skipif(FAMILY not in NAMES, reason="diffusers is older than the family")
CASES = [((32, 64), 1, 1.0), ((32, 64), 2, 4.0), ((96, 32), 1, 4.0), ((96, 32), 2, 1.0)]
"""Every pair."""


@pytest.fixture(scope="module", autouse=True)
def small_images() -> Iterator[None]:
    """A 16th of the tokens of an image."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (pipeline, qwen_image_21):
            patch.setattr(module, "IMAGE_AREA", 256**2)
        yield


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Prompt]:
    """Number of images → a prompt with so many, of different aspect ratios."""
    images = to_edit(tmp_path_factory.mktemp("images"), (200, 300), (256, 128))
    return {count: Prompt(0, TEXT, negative=NEGATIVE, images=tuple(images[:count])) for count in (0, 1, 2)}


@pytest.fixture(scope="module")
def policy() -> Any:
    return policy_of(FAMILY)


@pytest.fixture(scope="module")
def stock() -> Any:
    return pipeline_of(FAMILY)


@pytest.fixture(scope="module")
def encoded(policy: Any, prompts: dict[int, Prompt]) -> dict[int, list[dict[str, Tensor]]]:
    """Number of images → the arrays of the prompt and of its negative prompt."""
    return {
        count: [tensors(found) for found in policy.encode([prompt.wording, prompt.negative_wording("")])]
        for count, prompt in prompts.items()
    }


@pytest.mark.extended
@pytest.mark.parametrize(("size", "count", "cfg"), CASES)
def test_edits_are_the_stock_pipelines(
    size: tuple[int, int], count: int, cfg: float, policy: Any, stock: Any, prompts: Any, encoded: Any
) -> None:
    """Latents and pixels; also with another image, which changes them."""
    start = torch.randn(2, *policy.latent_shape(size), generator=torch.Generator().manual_seed(0))
    sampling = replace(how(FAMILY, cfg=cfg), resolution=size)
    guidance = {"negative_prompt": NEGATIVE if cfg > 1 else None, "true_cfg_scale": cfg}
    asked = {"height": size[0], "width": size[1], "num_inference_steps": STEPS, "output_resolution": 256, **guidance}
    images = [opened(image) for image in prompts[count].images]
    theirs = stock(TEXT, image=images, latents=start, num_images_per_prompt=2, output_type="latent", **asked).images
    positive, negative = encoded[count]
    negative = negative if cfg > 1 else None
    ours = denoised(policy, start, sampling, positive, negative, steps=STEPS)
    assert (ours - theirs).abs().max() < 2e-5
    (picture,) = stock(TEXT, image=images, latents=start[:1], output_type="pil", **asked).images
    decoded = policy.decode(ours[:1], size)[0].numpy()
    assert np.abs(decoded.astype(int) - np.asarray(on_white(picture))).max() <= 1 and decoded.std() > 10
    black = positive | {"image_0": torch.zeros_like(positive["image_0"])}
    assert (denoised(policy, start, sampling, black, negative, steps=STEPS) - ours).abs().max() > 1e-3


def test_the_trainer_replays_an_edit(policy: Any, prompts: Any) -> None:
    sampling = replace(how(FAMILY, cfg=4.0, sde_type="cps", noise_level=0.7), resolution=(32, 64))
    found = trajectory_of(replayed(policy, sampling, prompt=prompts[2], noisy=2))
    assert found.negative is not None
    assert found.conditioning.keys() == {"prompt_embeds", "before_0", "image_0", "before_1", "image_1"}


def test_prompts_with_none_one_and_two_images_share_a_batch(policy: Any, encoded: Any) -> None:
    check_batch(policy, [tuple(encoded[count]) for count in (0, 1, 2)])


def test_every_adapted_layer_has_a_gradient(encoded: Any) -> None:
    policy: Any = policy_of(FAMILY)
    add_lora(policy.transformer, LoraConfig(2, 16.0), policy, seed=0)
    randomise(lora_parameters(policy.transformer))
    x = torch.randn(1, *policy.latent_shape(32), generator=torch.Generator().manual_seed(0))
    policy.velocity(x, torch.tensor([0.5]), encoded[1][0], None, how(FAMILY)).square().sum().backward()
    found = lora_parameters(policy.transformer)
    assert found and [name for name, p in found.items() if p.grad is None or not p.grad.any()] == []


@pytest.mark.extended
def test_the_host_reads_nothing_from_the_device(encoded: Any) -> None:
    """Fake tensors have no values: whatever looked at one would raise."""
    policy: Any = policy_of(FAMILY)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        branch = {name: mode.from_tensor(array) for name, array in encoded[2][0].items()}
        x = mode.from_tensor(torch.zeros(1, *policy.latent_shape(32)))
        assert policy.velocity(x, torch.ones(1), branch, None, how(FAMILY)).shape == x.shape


@pytest.mark.extended
def test_processes_of_parts_and_random_weights_have_the_same_arrays(prompts: Any, encoded: Any) -> None:
    (alone,) = policy_of(FAMILY, parts="text").encode([prompts[1].wording])
    assert all(torch.equal(array, encoded[1][0][name]) for name, array in tensors(alone).items())
    model = resolve_model(replace(model_config(FAMILY), weights="random", dtype="float32"))
    drawn = load_policy(model, dtype="float32", device="cpu", parts="all")
    (arrays,) = drawn.encode([prompts[2].wording])
    assert arrays.keys() == encoded[2][0].keys() and arrays["image_1"].shape == (16, 16, 64)


def test_sizes_are_planned_for_the_most_images() -> None:
    model = resolve_model(model_config(FAMILY))
    none, two = (shapes_of(model, 32, images).conditioning for images in (0, 2))
    assert none.keys() == {"prompt_embeds"}
    assert two.keys() - none.keys() == {"before_0", "image_0", "before_1", "image_1"}


def test_what_it_cannot_do_is_refused(policy: Any, prompts: Any) -> None:
    model = resolve_model(model_config(FAMILY))
    PromptCheck(model)(prompts[2])
    with pytest.raises(ValueError, match="8191 positions"):
        PromptCheck(model)(replace(prompts[1], images=prompts[1].images * 400))
    with pytest.raises(ValueError, match="no text may have it"):
        policy.check_marks("<|image_pad|>")
