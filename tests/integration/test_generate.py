"""Tests of `generate`: pictures before and after a LoRA, with the settings of its run."""

import logging
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image

from async_flowrl.cli import generate as generating
from async_flowrl.config.schema import Config
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

    config = generating.config_of(lora, None)
    how = config.model, generating.sampling_of(config)
    assert (how[1].num_inference_steps, how[1].resolution) == (4, 32)
    pipeline = generating.open_pipeline(*how, "cpu")
    before = generating.sample(pipeline, *how, RED.text, [5, 6])
    apply_lora(pipeline, lora)
    after = generating.sample(pipeline, *how, RED.text, [5, 6])
    assert np.abs(before.astype(int) - after).max() > 10
    sheet = np.asarray(Image.open(out))
    top, side = 2 * 22, 128
    right = 2 * side + 5 * 4
    for left, images in ((0, before), (right, after)):
        shown = sheet[top : top + side : 4, left : left + side : 4]
        assert np.array_equal(shown, images[0])
