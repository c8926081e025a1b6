"""Tests of every family that edits images, against diffusers' own pipelines, and of what a trainer replays."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from torch import Tensor

from async_flowrl.cli import generate
from async_flowrl.config.schema import LoraConfig
from async_flowrl.policies import pipeline, qwen_image_21
from async_flowrl.policies.lora import lora_modules, lora_parameters
from async_flowrl.policies.registry import load_policy, resolve_model, shapes_of
from async_flowrl.rollout.text_encoder import encode_one
from async_flowrl.tickets.request import asked_of
from async_flowrl.types import Prompt, Sampling
from tests.support.families import (
    NEGATIVE,
    TEXT,
    adapted,
    denoised,
    how,
    last_latents,
    model_config,
    on_white,
    pipeline_of,
    policy_of,
    runs_here,
    to_edit,
)
from tests.support.tiny import save_lora, tensors
from tests.unit.rollout.trajectories import check_batch, replayed, trajectory_of

STEPS = 3
PUBLISHED = {
    (pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS"): pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS,
    (pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE"): 1024**2,
    (pipeline_qwenimage_edit_plus, "CONDITION_IMAGE_SIZE"): 384**2,
}
"""The stock pipelines' sizes of images, in whose place there are small ones here."""
EDIT_2509 = "qwen_image_edit_2509"
KINDS = [*filter(runs_here, ("flux_kontext", "flux2_klein", "qwen_image_edit", "qwen_image_21")), EDIT_2509]
"""Families, and an earlier model of one of them, which does not give the images a time of their own."""
CHOICES: dict[str, list[tuple[int, ...]]] = {"flux_kontext": [(0,), (1,)], "qwen_image_edit": [(0,), (0, 1)]}
"""Family → images of prompts, of those of the fixture, if they may not be none, one and two."""


@pytest.fixture(scope="module", autouse=True)
def small_images() -> Iterator[None]:
    """A small part of the tokens of an image; of FLUX.1-Kontext's sizes some that are wider, or higher, than long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", [(64, 128), (96, 96), (170, 110)])
        patch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 256**2)
        patch.setattr(pipeline_qwenimage_edit_plus, "CONDITION_IMAGE_SIZE", 112**2)
        for module in (pipeline, qwen_image_21):
            patch.setattr(module, "IMAGE_AREA", 256**2)
        yield


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def family(kind: str) -> str:
    return "qwen_image_edit" if kind == EDIT_2509 else kind


@pytest.fixture(scope="module")
def policy(kind: str, family: str) -> Any:
    return of_kind(kind, policy_of(family))


@pytest.fixture(scope="module")
def stock(kind: str, family: str) -> Any:
    return of_kind(kind, pipeline_of(family))


def of_kind(kind: str, model: Any) -> Any:
    if kind == EDIT_2509:
        for module in (model.transformer, *model.transformer.transformer_blocks):
            module.zero_cond_t = False
    return model


def prompt_of(*images: Any) -> Prompt:
    return Prompt(0, TEXT, negative=NEGATIVE, images=images)


@pytest.fixture(scope="module")
def prompts(family: str, images: list[Any]) -> list[Prompt]:
    """Prompts with different images, or numbers of images."""
    return [prompt_of(*(images[place] for place in places)) for places in CHOICES.get(family, [(), (0,), (0, 1)])]


def encoded(policy: Any, prompt: Prompt, sampling: Sampling) -> list[Any]:
    """The arrays of the prompt, and of its negative prompt or None."""
    found = [tensors(encode_one(policy, key)) for key in asked_of(prompt, sampling)]
    return [*found, None][:2]


def arguments(stock: Any, family: str, sampling: Sampling, prompt: Prompt) -> dict[str, Any]:
    sizes = {"output_resolution": 256} if family == "qwen_image_21" else {}
    given = generate.arguments_of(stock, model_config(family), sampling)
    return {**given, **sizes, "prompt": TEXT, **generate.to_edit(prompt.images)}


def noise(policy: Any, size: Any, n: int = 1) -> Tensor:
    return torch.randn(n, *policy.latent_shape(size), generator=torch.Generator().manual_seed(0))


@pytest.mark.extended
@pytest.mark.parametrize(("size", "cfg"), [((32, 96), 4.0), ((64, 32), 1.0)])
def test_edits_are_the_stock_pipelines(
    size: tuple[int, int], cfg: float, family: str, policy: Any, stock: Any, prompts: list[Prompt]
) -> None:
    """Latents and pixels; also with another image, which changes them."""
    start, sampling = noise(policy, size, 2), replace(how(family, cfg=cfg, steps=STEPS), resolution=size)
    given = {"num_images_per_prompt": 2, "latents": policy.stock_latents(start, size)}
    for prompt in prompts:
        asked = arguments(stock, family, sampling, prompt) | given
        positive, negative = encoded(policy, prompt, sampling)
        ours = denoised(policy, start, sampling, positive, negative, steps=STEPS)
        assert (ours - last_latents(stock, **asked)).abs().max() < 2e-5
        (pictures,) = stock(return_dict=False, **asked)
        decoded = policy.decode(ours, size).numpy()
        shown = np.stack([np.asarray(on_white(picture)) for picture in pictures])
        assert np.abs(decoded.astype(int) - shown).max() <= 1 and decoded.std() > 10
        for place in range(len(prompt.images)):
            black = positive | {f"image_{place}": torch.zeros_like(positive[f"image_{place}"])}
            assert (denoised(policy, start, sampling, black, negative, steps=STEPS) - ours).abs().max() > 1e-3


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "size", "tokens"),
    [
        ("qwen_image_edit", (200, 300), (26, 39)),
        ("flux_kontext", (90, 150), (22, 45)),
        ("flux_kontext", (128, 96), (37, 27)),
        ("flux2_klein", (2100, 700), (110, 36)),
        ("flux2_klein", (67, 500), (4, 31)),
    ],
    indirect=["kind"],
)
def test_images_are_scaled_and_cut_as_by_the_stock_pipeline(
    size: tuple[int, int], tokens: tuple[int, int], family: str, policy: Any, stock: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for (module, name), value in PUBLISHED.items():
        monkeypatch.setattr(module, name, value)
    prompt, sampling, start = prompt_of(*to_edit(tmp_path, size)), how(family, steps=STEPS), noise(policy, 32)
    positive, negative = encoded(policy, prompt, sampling)
    assert positive["image_0"].shape[:2] == tokens
    asked = {**arguments(stock, family, sampling, prompt), "latents": policy.stock_latents(start, 32)}
    ours = denoised(policy, start, sampling, positive, negative, steps=STEPS)
    assert (ours - last_latents(stock, **asked)).abs().max() < 2e-5


def test_the_trainer_replays_an_edit(family: str, policy: Any, images: list[Any]) -> None:
    """What it needs is in the ticket, the negative prompt too, which some families encode with the image."""
    sampling = replace(how(family, cfg=4.0, sde_type="cps", noise_level=0.7), resolution=(32, 64))
    prompt = prompt_of(images[1])
    found = trajectory_of(replayed(policy, sampling, prompt=prompt, noisy=2))
    assert found.negative is not None and "image_0" in found.conditioning
    assert found.conditioning.keys() == encoded(policy, prompt, sampling)[0].keys()
    assert found.nbytes > sum(array.nbytes for array in (*found.conditioning.values(), *found.negative.values()))


def test_prompts_with_other_images_share_a_batch(family: str, policy: Any, prompts: list[Prompt]) -> None:
    check_batch(policy, [tuple(encoded(policy, prompt, how(family, cfg=3.0))) for prompt in prompts])


def test_the_exported_adapter_edits_alike_in_the_stock_pipeline(
    kind: str, family: str, stock: Any, images: list[Any], tmp_path: Path
) -> None:
    """Every layer of it has a gradient."""
    policy = of_kind(kind, adapted(family, lora=LoraConfig(rank=2, alpha=5.0)))
    start, sampling, prompt = noise(policy, 32), how(family, steps=STEPS), prompt_of(images[1])
    positive, _ = encoded(policy, prompt, sampling)
    policy.velocity(start, torch.tensor([0.5]), positive, None, sampling).square().sum().backward()
    layers = lora_parameters(policy.transformer)
    assert lora_modules(policy.transformer)
    assert [name for name, p in layers.items() if p.grad is None or not p.grad.any()] == []
    save_lora(tmp_path, policy.transformer, alpha=5.0)
    asked = {**arguments(stock, family, sampling, prompt), "latents": policy.stock_latents(start, 32)}
    base = last_latents(stock, **asked)
    stock.load_lora_weights(tmp_path)
    try:
        theirs = last_latents(stock, **asked)
    finally:
        stock.unload_lora_weights()
    ours = denoised(policy, start, sampling, positive, None, steps=STEPS)
    assert (ours - theirs).abs().max() < 2e-5 < (base - theirs).abs().max()


def test_processes_of_parts_and_random_weights_have_the_same_arrays(
    family: str, policy: Any, prompts: list[Prompt]
) -> None:
    """A process that only encodes has the VAE, too; one without text encoders decodes."""
    *_, prompt = prompts
    (whole,) = policy.encode([prompt.wording])
    (alone,) = policy_of(family, parts="text").encode([prompt.wording])
    assert whole.keys() == alone.keys() and all(np.array_equal(whole[name], alone[name]) for name in whole)
    without = policy_of(family, parts="cached")
    assert without.text_encoders == [] and without.decode(noise(policy, 32), 32).shape == (1, 32, 32, 3)
    model = resolve_model(replace(model_config(family), weights="random", dtype="float32"))
    random = load_policy(model, dtype="float32", device="cpu", parts="all")
    (drawn,) = random.encode([prompt.wording])
    assert {name: array.shape[-1] for name, array in drawn.items()} == {n: a.shape[-1] for n, a in whole.items()}
    planned = shapes_of(model, 32, len(prompt.images)).conditioning
    assert {name: array.shape for name, array in drawn.items()} == planned
    x = torch.zeros(1, *policy.latent_shape(32))
    assert random.velocity(x, torch.ones(1), tensors(drawn), None, how(family)).shape == x.shape
