"""Tests of rewards with a gradient: scores as those of bytes, gradients as finite differences, and refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from async_flowrl.config.compose import compose_config
from async_flowrl.config.hub import patterns
from async_flowrl.rewards.aesthetic import Aesthetic
from async_flowrl.rewards.clip import ClipScore, PickScore, resized
from async_flowrl.rewards.hps import HPSv2
from async_flowrl.rewards.image_statistics import sharpness
from async_flowrl.rewards.registry import check_differentiable
from async_flowrl.run.precheck import precheck
from async_flowrl.run.prepare import prepare
from async_flowrl.types import Prompt
from tests.unit.rewards.test_upstream_scores import folders as folders

PROMPT = Prompt(0, "a red fox")
BUILT: dict[str, Callable[[dict[str, Path]], Any]] = {
    "sharpness": lambda _: sharpness,
    "clip_score": lambda of: ClipScore(str(of["clip_score"])),
    "pickscore": lambda of: PickScore(str(of["pickscore"]), processor=str(of["pickscore"])),
    "hpsv2": lambda of: HPSv2(str(of["hpsv2"]), checkpoint=str(of["hpsv2"])),
    "aesthetic": lambda of: Aesthetic(str(of["aesthetic"]), head=str(of["aesthetic"])),
}


def smooth(height: int, width: int, count: int = 3) -> np.ndarray:
    """Images uint8 [n, H, W, 3] whose sides differ, as photographs are: neighbours are alike."""
    noise = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3)).astype(np.uint8)
    return np.stack(
        [np.asarray(Image.fromarray(each).resize((width, height), Image.Resampling.BICUBIC)) for each in noise]
    )


@pytest.mark.parametrize("size", [(40, 40), (64, 48)])
@pytest.mark.parametrize("name", BUILT)
def test_a_tensor_gets_the_score_of_its_bytes(name: str, size: tuple[int, int], folders: dict[str, Path]) -> None:
    """But for the rounding of resized images, and of greys, to bytes, which is noise to the Laplacian."""
    reward, images = BUILT[name](folders), smooth(*size)
    near = 2.0 if name == "sharpness" else 2e-3
    pixels = torch.from_numpy(images.astype(np.float32) / 255).permute(0, 3, 1, 2)
    scores = reward.of_tensor(pixels, PROMPT)
    assert scores.tolist() == pytest.approx(list(reward(images, PROMPT)), rel=0.02, abs=near)


@pytest.mark.parametrize("name", BUILT)
def test_the_gradient_is_the_slope_of_the_score(name: str, folders: dict[str, Path]) -> None:
    reward = BUILT[name](folders)
    pixels = torch.from_numpy(smooth(40, 40, 1).astype(np.float32) / 255).permute(0, 3, 1, 2)
    pixels = pixels.clamp(0.1, 0.9).requires_grad_(True)
    (gradient,) = torch.autograd.grad(reward.of_tensor(pixels, PROMPT).sum(), pixels)
    way = 1e-2 * gradient / gradient.abs().max()
    with torch.no_grad():
        ahead, behind = (reward.of_tensor(pixels + sign * way, PROMPT).double() for sign in (1, -1))
    assert float(ahead - behind) == pytest.approx(2 * float((gradient * way).sum()), rel=0.1)
    assert float(ahead - behind) > 0


def test_resizing_is_pillows() -> None:
    """Bicubic with antialiasing, smaller and larger; Pillow rounds to bytes."""
    images = smooth(60, 44, 1)
    pixels = torch.from_numpy(images.astype(np.float32) / 255).permute(0, 3, 1, 2)
    for height, width in ((30, 22), (90, 70)):
        ours = resized(pixels, height, width)[0].clamp(0, 1).permute(1, 2, 0).numpy() * 255
        theirs = np.asarray(Image.fromarray(images[0]).resize((width, height), Image.Resampling.BICUBIC))
        assert np.abs(ours - theirs).max() <= 1.1


def test_rewards_without_a_gradient_and_groups_of_one_are_refused(tmp_path: Path) -> None:
    usual = ("model=tiny", f"output_dir={tmp_path / 'run'}", "group_size=1")
    with pytest.raises(ValueError, match=r"reward\.terms\.ocr.*pickscore"):
        prepare(precheck(compose_config("one_step_off", [*usual, "reward=ocr", "algorithm=direct_align"])))
    with pytest.raises(ValueError, match="group_size"):
        prepare(precheck(compose_config("one_step_off", [*usual, "reward=sharpness"])))
    check_differentiable(compose_config("one_step_off", ["reward=sharpness"]).reward)
    for reward in ("clip_direction", "jpeg_compressibility"):
        with pytest.raises(ValueError, match=rf"reward\.terms\.{reward}"):
            check_differentiable(compose_config("one_step_off", [f"reward={reward}"]).reward)
    settings = ("reward=sharpness", "algorithm=direct_align", "data.curriculum.after=1")
    with pytest.raises(ValueError, match="curriculum"):
        prepare(precheck(compose_config("one_step_off", [*usual, *settings])))


def test_a_vae_alone_needs_no_weights_of_text_encoders() -> None:
    wanted = patterns(["scheduler", "text_encoder", "tokenizer", "transformer", "vae"], "vae")
    assert {"vae/*", "tokenizer/*"} <= set(wanted)
    assert {"text_encoder/*", "transformer/*"}.isdisjoint(wanted)


def test_videos_are_refused(tmp_path: Path) -> None:
    video = ("model=tiny_wan21", f"output_dir={tmp_path / 'run'}", "reward=sharpness", "rollout.frames=5")
    with pytest.raises(ValueError, match=r"direct_align.*5 frames"):
        prepare(precheck(compose_config("one_step_off", [*video, "algorithm=direct_align"])))
