"""Tests of `generate`: pictures before and after a LoRA, with the settings of its run."""

import logging
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image

from async_flowrl.cli import generate as generating
from async_flowrl.config.schema import Config
from async_flowrl.policies import lora_file, lora_formats
from async_flowrl.policies.qwen_image import QwenImagePolicy
from async_flowrl.policies.trained_file import apply_lora
from tests.integration.exported import LORA
from tests.support.tiny import RED, save_lora


def finished_run(folder: Path, policy: QwenImagePolicy) -> Path:
    """lora/ and config.yaml as a run leaves them."""
    config = Config()
    config.rollout.num_inference_steps = 4
    save_lora(folder / "lora", policy.transformer, alpha=LORA.alpha)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(config))))
    return folder / "lora"


def test_generate_shows_before_and_after_with_the_runs_own_settings(
    trained: QwenImagePolicy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lora = finished_run(tmp_path / "run", trained)
    out = tmp_path / "grid.png"
    command = ["--lora", str(lora), "--out", str(out), "--images", "2", "--seed", "5"]
    with caplog.at_level(logging.INFO):
        assert generating.main([*command, "--prompt", RED.text, "--prompt", "blue blue blue blue"]) == 0
    assert f"wrote {out}" in caplog.text

    settings = generating.from_config(generating.config_of(lora, None))
    assert (settings.sampling.num_inference_steps, settings.sampling.resolution) == (4, 32)
    pipeline = generating.open_pipeline(settings, "cpu")
    before = generating.sample(pipeline, settings, RED.text, [5, 6])
    apply_lora(pipeline, lora)
    after = generating.sample(pipeline, settings, RED.text, [5, 6])
    assert np.abs(before.astype(int) - after).max() > 10
    sheet = np.asarray(Image.open(out))
    top, side = 2 * 22, 128
    right = 2 * side + 5 * 4
    for left, images in ((0, before), (right, after)):
        shown = sheet[top : top + side : 4, left : left + side : 4]
        assert np.array_equal(shown, images[0])


def test_generate_takes_loras_of_any_format(trained: QwenImagePolicy, tmp_path: Path) -> None:
    """PEFT's folder and a file in kohya's names, whose model is named on the command line."""
    source = lora_file.read(finished_run(tmp_path / "run", trained))
    kohya = lora_formats.write(tmp_path / "alone" / "it.safetensors", source, family="qwen_image", form="kohya")
    peft = lora_file.write_peft(tmp_path / "peft" / "here", source.tensors, alpha=source.alpha).parent
    common = ["--model", "tiny", "--prompt", RED.text, "--images", "1", "--num-inference-steps", "2"]
    sheets = []
    for name, lora in (("kohya", kohya), ("peft", peft), ("none", None)):
        out = tmp_path / f"{name}.png"
        given = [] if lora is None else ["--lora", str(lora)]
        assert generating.main([*common, *given, "--out", str(out)]) == 0
        sheets.append(np.asarray(Image.open(out))[44:, -128:].astype(int))
    assert np.abs(sheets[0] - sheets[1]).max() <= 1 and np.abs(sheets[0] - sheets[2]).max() > 10


def test_generate_with_one_seed_is_the_pipelines_image_of_that_seed() -> None:
    tiny = generating.from_config(generating.config_of(None, "tiny"))
    settings = replace(tiny, sampling=replace(tiny.sampling, true_cfg_scale=4.0, negative_prompt="grey"))
    pipeline = generating.open_pipeline(settings, "cpu")
    (image,) = generating.sample(pipeline, settings, RED.text, [7])
    made = pipeline(
        RED.text,
        negative_prompt="grey",
        true_cfg_scale=4.0,
        height=32,
        width=32,
        num_inference_steps=6,
        generator=torch.Generator().manual_seed(7),
    ).images[0]
    assert np.array_equal(image, np.asarray(made))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "red"], "--model is needed"),
        (["--prompt", "red", "--model", "tinny"], "did you mean 'tiny'"),
        (["--prompt", "red", "--model", "tiny", "--lora", "nowhere"], "LoRA nowhere does not exist"),
        (["--prompt", "red", "--model", "tiny", "--num-inference-steps", "1"], "at least 2"),
        (["--prompt", "red", "--model", "tiny", "--images", "0"], "--images must be at least 1, got 0"),
    ],
)
def test_generate_refuses_in_one_sentence(arguments: list[str], message: str, caplog: pytest.LogCaptureFixture) -> None:
    assert generating.main(arguments) == 2
    assert message in caplog.text
    assert len(caplog.messages[-1].splitlines()) == 1
