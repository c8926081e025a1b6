"""Tests of PickScore and of the CLIP direction on a tiny random CLIP: the formulas, chunks, and refusals."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

from async_flowrl.policies.tiny import clip_tokenizer
from async_flowrl.rewards.clip import ClipDirection, PickScore
from async_flowrl.types import Prompt

PROMPT = Prompt(0, "a red fox, and then a very long line of words that no CLIP takes in whole when it counts letters")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("clip"), clip_tokenizer()
    tokenizer.model_max_length = 77
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={
            **text,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 77,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={**text, "image_size": 16, "patch_size": 8},
        projection_dim=16,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        CLIPModel(config).save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    CLIPProcessor(images, tokenizer).save_pretrained(folder)
    return folder


def pictures(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (n, 32, 32, 3)).astype(np.uint8)


def test_the_direction_is_the_cosine_of_two_differences(folder: Path) -> None:
    images, captions = pictures(4), {"original_prompt": "a red fox", "edited_prompt": "a blue fox in snow"}
    prompt, reward = Prompt(0, "make it blue", metadata=captions), ClipDirection(str(folder), batch_size=2)
    scores = reward(images[1:], prompt, [images[0], images[1]])
    model, processor = CLIPModel.from_pretrained(folder).eval(), CLIPProcessor.from_pretrained(folder)
    inputs = processor(text=list(captions.values()), images=list(images), padding=True, return_tensors="pt")
    with torch.no_grad():
        out = model(**inputs)
    direction = out.text_embeds[1] - out.text_embeds[0]
    expected = torch.nn.functional.cosine_similarity(out.image_embeds[1:] - out.image_embeds[0], direction[None])
    assert scores == pytest.approx(expected.tolist(), abs=1e-4) and len(set(scores)) == 3
    for size in (1, 2, 4, 16):
        reward.batch_size = size
        unchanged = reward(np.concatenate([images[[0] * 5], images[1:]]), prompt, [images[0]])
        assert unchanged[:5] == [0.0] * 5 and unchanged[5:] == pytest.approx(scores, abs=1e-4)
    assert not ClipDirection.differentiable
    wrong: list[dict[str, object]] = [
        {},
        {"original_prompt": "a"},
        {**captions, "edited_prompt": 3},
        {**captions, "edited_prompt": "a red fox"},
    ]
    for metadata in wrong:
        with pytest.raises(ValueError, match=r"'make it blue'"):
            reward.check(Prompt(0, "make it blue", metadata=metadata))


def test_the_score_is_the_scaled_cosine_of_image_and_text(folder: Path) -> None:
    images = pictures(5)
    scores = PickScore(str(folder), processor=str(folder), scale=2.0, batch_size=2)(images, PROMPT)
    model, processor = CLIPModel.from_pretrained(folder).eval(), CLIPProcessor.from_pretrained(folder)
    inputs = processor(text=[PROMPT.text], images=list(images), truncation=True, max_length=77, return_tensors="pt")
    assert inputs["input_ids"].shape[1] == 77
    with torch.no_grad():
        out = model(**inputs)
        cosine = torch.nn.functional.cosine_similarity(out.image_embeds, out.text_embeds)
    assert scores == pytest.approx((model.logit_scale.exp() * cosine / 2).tolist(), rel=1e-5)
    assert len(set(scores)) == 5
    assert scores == PickScore(str(folder), processor=str(folder), scale=2.0, batch_size=2)(images, PROMPT)
