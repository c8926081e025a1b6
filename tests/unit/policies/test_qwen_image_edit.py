"""Tests of Qwen-Image-Edit against diffusers' own pipeline, on the tiny model, and of what a trainer replays."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock_rules
from torch import Tensor
from transformers import AutoTokenizer

from async_flowrl.config.schema import LoraConfig
from async_flowrl.image_file import opened
from async_flowrl.policies.lora import lora_modules, lora_parameters
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.registry import PromptCheck, load_family, load_policy, resolve_model, shapes_of
from async_flowrl.types import Prompt, TextWithImages
from tests.support.families import adapted, denoised, how, model_config, pipeline_of, policy_of, to_edit
from tests.support.tiny import tensors
from tests.unit.rollout.trajectories import check_batch, replayed, trajectory_of

FAMILY, TEXT, NEGATIVE, STEPS = "qwen_image_edit", "make the house blue", "grey", 3


@pytest.fixture(scope="module", autouse=True)
def small_images() -> Iterator[None]:
    """A 16th of the tokens of an image for the network, and about a 12th for the text encoder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stock_rules, "VAE_IMAGE_SIZE", 256**2)
        patch.setattr(stock_rules, "CONDITION_IMAGE_SIZE", 112**2)
        yield


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Prompt]:
    """Number of images → a prompt with so many, of different aspect ratios."""
    images = to_edit(tmp_path_factory.mktemp("images"), (200, 300), (256, 128))
    return {count: Prompt(0, TEXT, negative=NEGATIVE, images=tuple(images[:count])) for count in (1, 2)}


@pytest.fixture(scope="module")
def policy() -> PipelinePolicy:
    return policy_of(FAMILY)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def stock() -> Any:
    return pipeline_of(FAMILY)


@pytest.fixture(scope="module")
def encoded(policy: PipelinePolicy, prompts: dict[int, Prompt]) -> Any:
    """Function of the number of images: the arrays of the prompt and of its negative prompt."""

    @functools.cache
    def encode(count: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        words = prompts[count].wording, prompts[count].negative_wording("")
        return tuple(tensors(found) for found in policy.encode(words))  # type: ignore[return-value]

    return encode


def with_zero_time(monkeypatch: pytest.MonkeyPatch, network: Any, wanted: bool) -> None:
    """As models are, of 2509 (False) and of 2511 (True)."""
    for module in (network, *network.transformer_blocks):
        monkeypatch.setattr(module, "zero_cond_t", wanted)


CASES = [((32, 64), 1, 1.0, True), ((96, 32), 2, 4.0, False)]
MORE = [
    ((32, 64), 1, 4.0, False),
    ((32, 64), 2, 1.0, False),
    ((32, 64), 2, 4.0, True),
    ((96, 32), 1, 1.0, False),
    ((96, 32), 1, 4.0, True),
    ((96, 32), 2, 1.0, True),
]
"""Of `make test-slow`: with CASES, every triple."""


@pytest.mark.extended
@pytest.mark.parametrize(
    ("size", "count", "cfg", "zero"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_edits_are_the_stock_pipelines(
    size: tuple[int, int],
    count: int,
    cfg: float,
    zero: bool,
    policy: Any,
    stock: Any,
    prompts: Any,
    encoded: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Latents and pixels; also with another image, which changes them."""
    for network in (policy.transformer, stock.transformer):
        with_zero_time(monkeypatch, network, zero)
    start = torch.randn(2, *policy.latent_shape(size), generator=torch.Generator().manual_seed(0))
    positive, negative = encoded(count)
    sampling = replace(how(FAMILY, cfg=cfg), resolution=size)
    guidance = {"negative_prompt": NEGATIVE if cfg > 1 else None, "true_cfg_scale": cfg}
    asked = {"height": size[0], "width": size[1], "num_inference_steps": STEPS, **guidance}
    theirs = stock(
        prompt=TEXT,
        image=[opened(image) for image in prompts[count].images],
        latents=start,
        num_images_per_prompt=2,
        output_type="latent",
        **asked,
    ).images
    negative = negative if cfg > 1 else None
    ours = denoised(policy, start, sampling, positive, negative, steps=STEPS)
    assert (ours - theirs).abs().max() < 2e-5
    unpacked = stock._unpack_latents(theirs, *size, stock.vae_scale_factor)
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (stock.vae.config.latents_mean, stock.vae.config.latents_std)
    )
    with torch.no_grad():
        pixels = stock.vae.decode(unpacked * std + mean).sample[:, :, 0]
    pictures = np.stack([np.asarray(picture) for picture in stock.image_processor.postprocess(pixels)])
    decoded = policy.decode(ours, size).numpy()
    assert np.abs(decoded.astype(int) - pictures).max() <= 1 and decoded.std() > 10
    black = positive | {"image_0": torch.zeros_like(positive["image_0"])}
    assert (denoised(policy, start, sampling, black, negative, steps=STEPS) - ours).abs().max() > 1e-3


@pytest.mark.extended
def test_image_sizes_are_those_of_the_stock_rules(
    prompts: Any, policy: PipelinePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Areas of 1024² (here 32 px to a token) for the network and 384² (28 px) for the text encoder."""
    monkeypatch.setattr(stock_rules, "VAE_IMAGE_SIZE", 1024**2)
    monkeypatch.setattr(stock_rules, "CONDITION_IMAGE_SIZE", 384**2)
    one, two = map(tensors, policy.encode([prompts[count].wording for count in (1, 2)]))
    assert {name: tuple(array.shape[:-1]) for name, array in two.items() if name != "prompt_embeds"} == {
        "image_0": (26, 39),
        "image_1": (45, 23),
    }
    assert len(two["prompt_embeds"]) - len(one["prompt_embeds"]) == 19 * 9 + len("Picture 2:")
    policy.planned_images, shapes = 1, policy.conditioning_shapes()
    assert abs(shapes["prompt_embeds"][0] - policy.planned_tokens - 14 * 14) < 16
    assert shapes["image_0"] == (32, 32, 64)


@pytest.mark.extended
@pytest.mark.parametrize(("cfg", "kind", "zero"), [(1.0, "sde", True), (4.0, "cps", False), (4.0, "cps", True)])
def test_the_trainer_replays_an_edit(
    cfg: float, kind: str, zero: bool, policy: Any, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it needs is in the ticket, the negative prompt too, which was encoded with the image."""
    with_zero_time(monkeypatch, policy.transformer, zero)
    sampling = replace(how(FAMILY, cfg=cfg, sde_type=kind, noise_level=0.7), resolution=(32, 64))
    found = trajectory_of(replayed(policy, sampling, prompt=prompts[1], noisy=2))
    assert (found.negative is None) == (cfg == 1)
    assert found.conditioning.keys() == {"prompt_embeds", "image_0"}
    assert found.nbytes > sum(array.nbytes for array in found.conditioning.values()) * (1 if cfg == 1 else 2)


def test_prompts_with_different_images_share_a_batch(policy: PipelinePolicy, encoded: Any) -> None:
    check_batch(policy, [encoded(count) for count in (1, 2)])


def test_every_adapted_layer_has_a_gradient(encoded: Any) -> None:
    policy = adapted(FAMILY, lora=LoraConfig(2, 16.0))
    x = torch.randn(1, *policy.latent_shape(32), generator=torch.Generator().manual_seed(0))
    policy.velocity(x, torch.tensor([0.5]), encoded(1)[0], None, how(FAMILY)).square().sum().backward()
    assert len(lora_modules(policy.transformer)) == 12 * 2 - 4
    layers = lora_parameters(policy.transformer)
    assert [name for name, p in layers.items() if p.grad is None or not p.grad.any()] == []


@pytest.mark.extended
def test_a_process_that_only_encodes_gives_the_same_bits(prompts: Any, encoded: Any) -> None:
    """It has the VAE, too; one without text encoders decodes, and random weights draw arrays of the same shapes."""
    (alone,) = policy_of(FAMILY, parts="text").encode([prompts[1].wording])
    assert all(torch.equal(array, encoded(1)[0][name]) for name, array in tensors(alone).items())
    without = policy_of(FAMILY, parts="cached")
    assert without.text_encoders == [] and without.decode(torch.zeros(1, 1, 64), 32).shape == (1, 32, 32, 3)
    model = resolve_model(replace(model_config(FAMILY), weights="random", dtype="float32"))
    drawn = load_policy(model, dtype="float32", device="cpu", parts="all")
    (arrays,) = drawn.encode([prompts[2].wording])
    assert arrays.keys() == encoded(2)[0].keys() and arrays["image_1"].shape == (32, 32, 64)
    x = torch.zeros(1, 1, 64)
    assert drawn.velocity(x, torch.ones(1), tensors(arrays), None, how(FAMILY)).shape == x.shape


def test_prompts_with_too_many_tokens_are_refused_before_a_worker_reads_them(prompts: Any, encoded: Any) -> None:
    """Tokens are counted as the pipeline does, and not before there may be too many."""
    model = resolve_model(model_config(FAMILY))
    tokenizer = AutoTokenizer.from_pretrained(model.path, subfolder="tokenizer")
    family: Any = load_family(FAMILY)
    for count, prompt in prompts.items():
        for text, arrays in zip((TEXT, NEGATIVE), encoded(count), strict=True):
            assert family.tokens(text, prompt.images, tokenizer) == len(arrays["prompt_embeds"])
    check, images = PromptCheck(model), prompts[1].images * 12
    text = "x" * (3584 - family.tokens("", images, tokenizer))  # A token is a byte here.
    check(most := replace(prompts[1], text=text, images=images))
    for long in (replace(most, images=images * 2), replace(most, text="x" + text), replace(most, negative="x" + text)):
        with pytest.raises(ValueError, match="3584 tokens of text and images"):
            check(long)
    with pytest.raises(ValueError, match="3584 tokens of text and images"):
        PromptCheck(replace(model, random=True))(replace(most, text="a", images=images * 2))


def test_sizes_are_planned_for_the_most_images() -> None:
    model = resolve_model(model_config(FAMILY))
    one, three = (shapes_of(model, 32, images).conditioning for images in (1, 3))
    assert three.keys() - one.keys() == {"image_1", "image_2"}
    assert three["prompt_embeds"][0] > one["prompt_embeds"][0]


def test_tiles_of_decoding_leave_the_tokens_of_images_alone() -> None:
    policy: Any = policy_of(FAMILY)
    image = torch.randn(1, 3, 320, 320, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    with torch.no_grad():
        whole = policy.encode_image(image)
        policy.decode_by_parts(images=False, tiles=True)
        vae = policy.pipeline.vae
        tiled = vae.encode(image.unsqueeze(2)).latent_dist.mode()
        assert torch.equal(policy.encode_image(image), whole) and vae.use_tiling
        vae.disable_tiling()
        assert not torch.equal(vae.encode(image.unsqueeze(2)).latent_dist.mode(), tiled)


def test_what_it_cannot_do_is_refused(policy: PipelinePolicy, tmp_path: Path, prompts: Any) -> None:
    with pytest.raises(ValueError, match="needs at least 1 image"):
        policy.encode([TEXT])
    with pytest.raises(ValueError, match=r"leave model\.max_sequence_length out"):
        type(policy)(policy.transformer, None, side=32, dtype=torch.float32, max_sequence_length=24)
    gone = replace(prompts[1].images[0], path=str(tmp_path / "gone.png"))
    with pytest.raises(ValueError, match="cannot be read"):
        policy.encode([TextWithImages(TEXT, (gone,))])
