"""Tests of the example glyphs: its words, the training of its small model, its curves, and its OCR reward."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline

from async_flowrl.config.schema import DataConfig, ModelConfig, TinyConfig
from async_flowrl.data.load import load_data
from async_flowrl.policies.qwen_image import tiny_pipeline
from async_flowrl.policies.registry import load_policy, resolve_model
from examples.glyphs.audit import before_after, sharpness, template_accuracy
from examples.glyphs.flow import train_flow
from examples.glyphs.pretrain import save
from examples.glyphs.vae import as_frames, single_frames, small_vae
from examples.glyphs.words import LETTERS, SIDE, TEST, TRAIN, draw_many, pretraining_words, prompt


@pytest.fixture(scope="module")
def pipeline() -> QwenImagePipeline:
    torch.manual_seed(0)
    bare = tiny_pipeline(TinyConfig(layers=1, heads=4, contrast=1.0))
    return QwenImagePipeline(**{**bare.components, "vae": small_vae()})


def test_held_out_words_are_in_neither_training_set_and_made_of_the_same_letters() -> None:
    assert not set(TEST) & (set(TRAIN) | set(pretraining_words()))
    assert len(set(TEST)) == len(TEST) and len(set(TRAIN)) == len(TRAIN)
    assert set("".join(TEST)) <= set(LETTERS) == set("".join(TRAIN))
    assert all(len(word) == 3 for word in (*TEST, *TRAIN))


def test_prompt_files_hold_the_words() -> None:
    config = DataConfig(train="prompts/glyphs_train.txt", evaluation="prompts/glyphs_test.txt")
    data = load_data(config, needs_target=True)
    for prompts, words in ((data.train, TRAIN), (data.evaluation, TEST)):
        assert [(p.text, p.target) for p in prompts] == [(prompt(word), word) for word in words]


def test_a_single_frame_convolved_in_two_dimensions_is_the_same_image() -> None:
    torch.manual_seed(1)
    vae = AutoencoderKLQwenImage(base_dim=8, dim_mult=[1, 2, 4], num_res_blocks=1, temperal_downsample=[False, True])
    x = as_frames(draw_many(TEST[:3], random.Random(2)))
    with torch.no_grad():
        expected = vae.decode(vae.encode(x).latent_dist.mode()).sample
        with single_frames():
            got = vae.decode(vae.encode(x).latent_dist.mode()).sample
        after = vae.decode(vae.encode(x).latent_dist.mode()).sample
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(after, expected)


@pytest.mark.extended
def test_training_moves_both_networks_and_the_folder_is_a_model(pipeline: QwenImagePipeline, tmp_path: Path) -> None:
    watched = {
        "transformer": pipeline.transformer.transformer_blocks[0].attn.to_q.weight,
        "text": pipeline.text_encoder.model.language_model.embed_tokens.weight,
    }
    before = {name: weight.detach().clone() for name, weight in watched.items()}
    train_flow(pipeline, 3, copies=1, batch=8)
    assert all(not torch.equal(weight, before[name]) for name, weight in watched.items())
    save(pipeline, tmp_path / "glyphs")
    save(pipeline, tmp_path / "glyphs")
    assert [entry.name for entry in tmp_path.iterdir()] == ["glyphs"]
    resolved = resolve_model(ModelConfig(path=str(tmp_path / "glyphs")))
    policy = load_policy(resolved, dtype="float32", device="cpu", parts="all")
    assert policy.latent_shape(SIDE) == (16, 64) and policy.encode([prompt("CAT")])[0]["prompt_embeds"].any()


@pytest.mark.extended
def test_the_audit_tells_words_apart_without_a_network() -> None:
    drawn = np.stack([np.repeat(draw_many([word] * 2, random.Random(5))[..., None], 3, axis=-1) for word in TEST])
    blank = np.full_like(drawn, 128)
    assert template_accuracy(drawn, TEST) > 0.9
    assert template_accuracy(drawn, TEST[5:] + TEST[:5]) < 0.4
    assert sharpness(drawn) > 0.02 and sharpness(blank) == 0.0
    assert before_after(drawn, blank, scale=1).shape == (4 * SIDE + 4, len(TEST) * SIDE, 3)
