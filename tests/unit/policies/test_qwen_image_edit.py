"""Tests of Qwen-Image-Edit: the number of tokens that it takes, tiles of its VAE, and what it cannot do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from async_flowrl.policies.registry import PromptCheck, load_family, resolve_model, shapes_of
from async_flowrl.types import ConditionImage, Prompt, TextWithImages
from tests.support.families import model_config, policy_of
from tests.support.shared_models import SharedModels

FAMILY, TEXT, NEGATIVE = "qwen_image_edit", "make the house blue", "grey"


@pytest.fixture(scope="module")
def prompts(images: list[ConditionImage]) -> list[Prompt]:
    return [Prompt(0, TEXT, negative=NEGATIVE, images=tuple(images[:count])) for count in (1, 2)]


def test_prompts_with_too_many_tokens_are_refused_before_a_worker_reads_them(
    prompts: list[Prompt], shared_models: SharedModels
) -> None:
    """Tokens are counted as the pipeline does, and not before there may be too many."""
    model = resolve_model(model_config(FAMILY))
    tokenizer = AutoTokenizer.from_pretrained(model.path, subfolder="tokenizer")
    family: Any = load_family(FAMILY)
    for prompt in prompts:
        encoded = shared_models.policy(FAMILY).encode([prompt.wording, prompt.negative_wording("")])
        for text, arrays in zip((TEXT, NEGATIVE), encoded, strict=True):
            assert family.tokens(text, prompt.images, tokenizer) == len(arrays["prompt_embeds"])
    check, images = PromptCheck(model), prompts[0].images * 12
    text = "x" * (3584 - family.tokens("", images, tokenizer))  # A token is a byte here.
    check(most := replace(prompts[0], text=text, images=images))
    for long in (replace(most, images=images * 2), replace(most, text="x" + text), replace(most, negative="x" + text)):
        with pytest.raises(ValueError, match="3584 tokens of text and images"):
            check(long)
    with pytest.raises(ValueError, match="3584 tokens of text and images"):
        PromptCheck(replace(model, random=True))(replace(most, text="a", images=images * 2))


def test_sizes_are_planned_for_the_most_images() -> None:
    """Areas of 1024² (here 32 px to a token) for the network and 384² (28 px) for the text encoder."""
    model = resolve_model(model_config(FAMILY))
    one, three = (shapes_of(model, 32, images).conditioning for images in (1, 3))
    assert three.keys() - one.keys() == {"image_1", "image_2"}
    assert one["image_0"] == (32, 32, 64)
    assert abs(three["prompt_embeds"][0] - one["prompt_embeds"][0] - 2 * 14 * 14) < 32


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


def test_what_it_cannot_do_is_refused(shared_models: SharedModels, tmp_path: Path, prompts: list[Prompt]) -> None:
    policy = shared_models.policy(FAMILY)
    with pytest.raises(ValueError, match="needs at least 1 image"):
        policy.encode([TEXT])
    with pytest.raises(ValueError, match=r"leave model\.max_sequence_length out"):
        type(policy)(policy.transformer, None, side=32, dtype=torch.float32, max_sequence_length=24)
    gone = replace(prompts[0].images[0], path=str(tmp_path / "gone.png"))
    with pytest.raises(ValueError, match="cannot be read"):
        policy.encode([TextWithImages(TEXT, (gone,))])
