"""Tests of the edits of the example glyphs: prompt files, rewards, and a small model that is made of trained parts."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from async_flowrl.config.schema import DataConfig
from async_flowrl.data.load import load_data
from async_flowrl.image_file import opened
from async_flowrl.rewards.image_statistics import EditConsistency
from async_flowrl.types import ByteArray, Prompt
from examples.glyphs.edit_pretraining import (
    BLOCK,
    edit_policy,
    embed,
    latents_of,
    of_blocks,
    packed,
    seen_by_network,
    shown_to_text_encoder,
    small_pipeline,
    small_vae,
    train_flow,
)
from examples.glyphs.edited_words import PROMPTS, EditedWord, Kept, draw_picture, edits, write
from examples.glyphs.words import SIDE, TEST, TRAIN

FILES = DataConfig(train="prompts/glyphs_edit_train.jsonl", evaluation="prompts/glyphs_edit_test.jsonl")


def image_of(prompt: Prompt) -> ByteArray:
    return np.asarray(opened(prompt.images[0]))


def test_the_prompt_files_are_those_that_are_written_and_hold_the_words_with_a_source_each(tmp_path: Path) -> None:
    write(tmp_path / "again.jsonl", TEST, 4, seed=22)
    assert (tmp_path / "again.jsonl").read_bytes() == (PROMPTS / "glyphs_edit_test.jsonl").read_bytes()
    data = load_data(FILES, needs_target=True)
    assert {prompt.target for prompt in data.train} == set(TRAIN)
    assert {prompt.target for prompt in data.evaluation} == set(TEST)
    sources = [prompt.images[0] for prompts in (data.train, data.evaluation) for prompt in prompts]
    assert len({source.sha256 for source in sources}) == 4 * (len(TRAIN) + len(TEST))
    assert {source.size for source in sources} == {(SIDE, SIDE)}


@pytest.mark.extended
def test_a_right_edit_gets_the_best_scores_and_the_source_itself_none_for_its_word() -> None:
    asked, old, seen = edits(["HAT"], 1, random.Random(2))[0]
    source, result = (draw_picture(word, seen) for word in (old, asked))
    prompt = Prompt(0, "", target=asked, metadata={"edit_box": [0, 8, 32, 24]})
    images = np.stack([result, source]).repeat(BLOCK, axis=1).repeat(BLOCK, axis=2)
    word = EditedWord(detect=False, line_width=96)(images, prompt)
    assert word[0] == 1.0 and word[1] < 0.7
    assert list(EditConsistency()(images, prompt, [source])) == [1.0, 1.0]


def test_permuted_sources_are_other_pictures_and_results_are_compared_with_the_rows_own(tmp_path: Path) -> None:
    write(tmp_path / "own.jsonl", TEST, 1, seed=5)
    write(tmp_path / "permuted.jsonl", TEST, 1, seed=5, permuted=True)
    own, permuted = (
        load_data(DataConfig(train=str(tmp_path / name), held_out=0.0), needs_target=True).train
        for name in ("own.jsonl", "permuted.jsonl")
    )
    for mine, other in zip(own, permuted, strict=True):
        assert mine.target == other.target and mine.images != other.images
        assert list(Kept()(image_of(mine)[None], other)) == [1.0]
        assert Kept()(image_of(other)[None], other)[0] < 0.99
    assert {prompt.images for prompt in own} == {prompt.images for prompt in permuted}


def test_a_vae_of_blocks_gives_the_latents_and_the_pixels_of_the_one_it_is_made_of() -> None:
    torch.manual_seed(0)
    vae = small_vae()
    blocks = of_blocks(vae)
    picture = torch.rand(1, 3, 1, 8, 8) * 2 - 1
    with torch.no_grad():
        latents = vae.encode(picture).latent_dist.mode()
        large = picture.repeat_interleave(BLOCK, dim=3).repeat_interleave(BLOCK, dim=4)
        torch.testing.assert_close(blocks.encode(large).latent_dist.mode(), latents, atol=1e-4, rtol=1e-4)
        pixels = vae.decode(latents).sample.repeat_interleave(BLOCK, dim=3).repeat_interleave(BLOCK, dim=4)
        torch.testing.assert_close(blocks.decode(latents).sample, pixels, atol=1e-4, rtol=1e-4)


def test_the_pretraining_sees_what_the_policy_encodes_and_moves_both_networks() -> None:
    torch.manual_seed(0)
    vae = small_vae()
    pipeline = small_pipeline(of_blocks(vae))
    watched = [pipeline.transformer.proj_out.weight, pipeline.text_encoder.model.language_model.embed_tokens.weight]
    before = [weight.detach().clone() for weight in watched]
    train_flow(pipeline, vae, 2, ["CAT", "HAT"], copies=2, batch=2)
    assert all(not torch.equal(weight, old) for weight, old in zip(watched, before, strict=True))
    prompt = load_data(FILES, needs_target=True).evaluation[0]
    arrays = edit_policy(pipeline).encode([prompt.wording])[0]
    source = image_of(prompt)
    text = embed(pipeline, [prompt.text], shown_to_text_encoder(pipeline, source[None]))
    np.testing.assert_array_equal(text[0].detach().numpy(), arrays["prompt_embeds"])
    statistics = [torch.tensor(vae.config[name])[:, None, None] for name in ("latents_mean", "latents_std")]
    tokens = packed((latents_of(vae, seen_by_network(source[None])) - statistics[0]) / statistics[1])
    np.testing.assert_allclose(tokens[0].numpy(), arrays["image_0"].reshape(64, 64), atol=0.05)
