"""Tests of Qwen-Image 2.1 against diffusers' own pipeline and network, on the tiny model."""

import importlib.metadata
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from async_flowrl.algorithms import sde
from async_flowrl.config.resolution import Resolution, height_width
from async_flowrl.config.schema import ModelConfig, TinyConfig
from async_flowrl.policies import registry
from async_flowrl.policies.pipeline import PipelinePolicy, over_white
from async_flowrl.policies.registry import PromptCheck, family_of, load_pipeline, resolve_model
from async_flowrl.policies.tiny import build_tiny
from async_flowrl.types import ConditionImage, Prompt
from tests.support.families import NAMES, NEGATIVE, how, model_config, on_white, policy_of
from tests.support.shared_models import SharedModels
from tests.support.tiny import tensors

FAMILY = "qwen_image_21"
pytestmark = pytest.mark.skipif(FAMILY not in NAMES, reason="diffusers is older than the family")
TEXTS = ["red", "a blue house beside a long river"]
STEPS = 4


@pytest.fixture(scope="module")
def policy(shared_models: SharedModels) -> PipelinePolicy:
    found = shared_models.policy(FAMILY)
    assert isinstance(found, PipelinePolicy)
    return found


@pytest.fixture(scope="module")
def stock(shared_models: SharedModels) -> Any:
    return shared_models.pipeline(FAMILY)


def noise(policy: PipelinePolicy, size: Resolution, n: int = 1) -> Tensor:
    return torch.randn(n, *policy.latent_shape(size), generator=torch.Generator().manual_seed(0))


def sampled(pipeline: Any, text: str, start: Tensor, size: Resolution, cfg: float, output: str, **more: Any) -> Any:
    height, width = height_width(size)
    guidance = family_of(pipeline).guidance_arguments(how(FAMILY, cfg=cfg))
    sizes = {"height": height, "width": width, "num_inference_steps": STEPS}
    return pipeline(text, latents=start, output_type=output, **sizes, **guidance, **more).images


@pytest.mark.extended
@pytest.mark.parametrize("cfg", [1.0, 4.0])
@pytest.mark.parametrize("size", [32, (64, 96), (128, 32)], ids=str)
def test_prompts_of_unequal_length_in_one_batch_are_the_stock_pipelines_one_by_one(
    policy: PipelinePolicy, stock: Any, size: Resolution, cfg: float
) -> None:
    """Latents and pixels; the stock pipeline itself, given both prompts at once, pads and so moves the image."""
    start, sampling = noise(policy, size, 2), replace(how(FAMILY, cfg=cfg), resolution=size)
    positives = [tensors(found) for found in policy.encode(TEXTS)]
    negative = tensors(policy.encode([NEGATIVE])[0])
    x = start
    with torch.no_grad():
        for sigma, after in itertools.pairwise(policy.sigmas(STEPS, size)):
            v = policy.velocity_of(x, sigma.expand(2), positives, [negative, negative], sampling)
            x = sde.ode_step(x, v, sigma.expand(2), after.expand(2))
    theirs = torch.cat([sampled(stock, t, s[None], size, cfg, "latent") for t, s in zip(TEXTS, start, strict=True)])
    assert (x - theirs).abs().max() < 2e-5
    if cfg == 1:
        padded = sampled(stock, TEXTS, start, size, cfg, "latent")
        assert (padded - theirs).abs()[0].max() > 1e-4 > (padded - theirs).abs()[1].max()
    (picture,) = sampled(stock, TEXTS[0], start[:1], size, cfg, "pil")
    ours = policy.decode(x[:1], size)[0].numpy()
    assert np.abs(ours.astype(int) - np.asarray(on_white(picture))).max() <= 1 and ours.std() > 10


@pytest.mark.extended
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_known_layout_gives_the_bits_of_diffusers_forward(dtype: str) -> None:
    """Times that differ per row, an image that is not square; and in bfloat16 the stock pipeline's own bits."""
    policy, size = policy_of(FAMILY, dtype=dtype), (64, 96)
    theirs = load_pipeline(resolve_model(replace(model_config(FAMILY), dtype=dtype)), dtype=dtype, device="cpu")
    seen: list[dict[str, Any]] = []
    policy.transformer.register_forward_pre_hook(lambda _, __, inputs: seen.append(inputs), with_kwargs=True)
    positive = tensors(policy.encode([TEXTS[1]])[0])
    sampling, x = replace(how(FAMILY), resolution=size), noise(policy, size, 3)  # type: ignore[arg-type]
    with torch.no_grad():
        found = policy.velocity(x, torch.tensor([0.9, 0.5, 0.02]), positive, None, sampling)
        expected = theirs.transformer(**seen[0])[0][:, -x.shape[1] :].float()
    assert torch.equal(found, expected)


@pytest.fixture
def edit(images: list[ConditionImage]) -> Prompt:
    return Prompt(0, TEXTS[0], images=tuple(images))


@pytest.mark.extended
def test_the_host_reads_nothing_from_the_device(edit: Prompt) -> None:
    """Fake tensors have no values: whatever looked at one would raise, as diffusers' own forward does."""
    policy: Any = policy_of(FAMILY)
    arrays = tensors(policy.encode([edit.wording])[0])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        given = {name: mode.from_tensor(array) for name, array in arrays.items()}
        x, sigma = mode.from_tensor(noise(policy, 32, 2)), torch.ones(2)
        assert policy.velocity(x, sigma, given, None, how(FAMILY)).shape == x.shape
        del policy.transformer.forward
        with pytest.raises((DynamicOutputShapeException, DataDependentOutputException)):
            policy.velocity(x, sigma, {"prompt_embeds": given["prompt_embeds"]}, None, how(FAMILY))


def test_an_edit_that_it_cannot_make_is_refused(policy: Any, edit: Prompt) -> None:
    check = PromptCheck(resolve_model(model_config(FAMILY)))
    check(edit)
    with pytest.raises(ValueError, match="8191 positions"):
        check(replace(edit, images=edit.images * 200))
    with pytest.raises(ValueError, match="no text may have it"):
        policy.check_marks("<|image_pad|>")


def test_transparent_pictures_are_laid_over_white_as_pillow_does_it() -> None:
    """All 65,536 pairs of colour and alpha."""
    color, alpha = (part.flatten() for part in np.meshgrid(np.arange(256), np.arange(256)))
    rgba = np.stack([color, color[::-1], color, alpha], axis=-1).astype(np.uint8).reshape(256, 256, 4)
    picture = Image.fromarray(rgba, "RGBA")
    assert np.array_equal(over_white(torch.from_numpy(rgba)).numpy(), np.asarray(on_white(picture)))
    assert torch.equal(over_white(torch.from_numpy(rgba[..., :3])), torch.from_numpy(rgba[..., :3]))


def test_its_folder_is_recognised_and_refused_where_it_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_tiny(TinyConfig(family=FAMILY, heads=4), tmp_path)
    assert resolve_model(ModelConfig(path=str(folder))).family == FAMILY
    index = json.loads((folder / "model_index.json").read_text())
    assert index["processor"] == ["transformers", "Qwen3VLProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index | {"sample_sigmas": [1.0, 0.5]}))
    with pytest.raises(ValueError, match=r"2 noise levels of its own \(sample_sigmas"):
        resolve_model(ModelConfig(path=str(folder)))
    (folder / "model_index.json").write_text(json.dumps(index))
    registry.diffusers_version.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.40.0")
    try:
        for config in (ModelConfig(path=str(folder)), model_config(FAMILY)):
            with pytest.raises(ValueError, match=r"qwen_image_21 needs diffusers 0\.41 or newer, installed is 0\.40"):
                resolve_model(config)
    finally:
        registry.diffusers_version.cache_clear()
