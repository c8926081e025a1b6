"""Tests of whole runs on prompts with images to edit, and of the commands on what they trained."""

import json
from pathlib import Path

import numpy as np
import pytest
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock_rules
from PIL import Image

from async_flowrl.cli import evaluate, generate
from async_flowrl.policies import qwen_image_21
from tests.integration.runs import Run, in_every_way, train
from tests.unit.data.prompt_files import rows

# An image to edit is a thousand tokens, so a test makes few images in few steps.
FEW = ["group_size=2", "trainer.micro_batch_size=2", "evaluate.images_per_prompt=2", "rollout.num_inference_steps=3"]
FAMILIES = ("qwen_image_edit", "qwen_image_21", "flux_kontext", "flux2_klein")
VIDEOS = "tiny_wan_image"
MODES = ("sync", "stream", "one_step_off", "fully_async")
REWARD = "reward=jpeg_compressibility"


@pytest.fixture(autouse=True)
def small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 16th of the tokens of an image for the network, and about a 12th for the text encoder."""
    monkeypatch.setattr(stock_rules, "VAE_IMAGE_SIZE", 256**2)
    monkeypatch.setattr(stock_rules, "CONDITION_IMAGE_SIZE", 112**2)


@pytest.fixture
def edits(tmp_path: Path) -> list[str]:
    """Settings of a tiny model that edits, with two prompts of which one has two images."""
    for seed, (name, size) in enumerate({"a.png": (200, 300), "b.png": (256, 128)}.items()):
        noise = np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / name)
    long = {"prompt": "the house of the first picture in the second", "images": ["a.png", "b.png"]}
    file = rows(tmp_path / "edits.jsonl", {"prompt": "make it red", "image": "a.png"}, long)
    return [
        "model=tiny_qwen_image_edit",
        "model.tiny.layers=1",
        f"data.train={file}",
        "prompts_per_step=2",
        REWARD,
        *FEW,
    ]


def one_image_each(folder: Path) -> str:
    prompts = [{"prompt": f"make {name} red", "image": name} for name in ("a.png", "b.png")]
    return f"data.train={rows(folder / 'single.jsonl', *prompts)}"


def check(run: Run, steps: int) -> None:
    assert len(set(run.digests)) == steps + 1
    assert run.column("log_prob_gap")[0] < 1e-6 and run.column("ratio/mean")[0] == 1.0


@pytest.mark.extended
def test_a_run_and_its_commands(edits: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With guidance, whose negative prompts are encoded with the images and come to the trainer in tickets."""
    small = ["prompts_per_step=1", "evaluate.max_prompts=1", "total_steps=2", "rollout.true_cfg_scale=2.0"]
    run = train(tmp_path / "run", "one_step_off", *edits, *small)
    check(run, 2)
    lora, out = ["--lora", str(run.root / "lora"), "--prompt", "make it red"], tmp_path / "grid.png"
    shown = [*lora, "--images", "1", "--out", str(out)]
    assert generate.main(shown) == 2
    assert "Qwen-Image-Edit needs at least 1 image" in capsys.readouterr().err
    assert generate.main([*shown, "--image", str(tmp_path / "a.png")]) == 0
    assert np.asarray(Image.open(out)).std() > 10
    assert evaluate.main([str(run.root), "--max-prompts", "1", "--images", "2", "--out", str(tmp_path / "scored")]) == 0
    scored = json.loads((tmp_path / "scored" / "evaluation.json").read_text())
    assert scored["prompts"] == ["make it red"] and scored["scored"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "tune", "model"),
    [
        *((mode, "lora", f"tiny_{family}") for mode, family in zip(MODES, FAMILIES, strict=True)),
        *((mode, "full", f"tiny_{family}") for mode, family in zip(MODES, reversed(FAMILIES), strict=True)),
        ("sync", "full", VIDEOS),
        ("fully_async", "lora", VIDEOS),
    ],
)
def test_the_digest_is_one_in_every_mode(
    mode: str, tune: str, model: str, edits: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pools, one that does both, and a run in two parts; prompts with one and with two images share a batch."""
    monkeypatch.setattr(qwen_image_21, "IMAGE_AREA", 256**2)
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", [(320, 192), (192, 320)])
    if model in ("tiny_flux_kontext", VIDEOS):  # They take one image.
        edits = [*edits, one_image_each(tmp_path), "rollout.guidance_scale=2.5"]
    if model == VIDEOS:
        edits = [*edits, "rollout.frames=5", "rollout.guidance_scale=0", "rollout.true_cfg_scale=2.0"]
    if model == "tiny_flux2_klein":  # It also makes images from text alone; negative prompts come both ways.
        plain, two = {"prompt": "a red house"}, {"prompt": "both red", "images": ["a.png", "b.png"]}
        edits = [*edits, f"data.train={rows(tmp_path / 'mixed.jsonl', plain, two)}", "rollout.true_cfg_scale=2.0"]
    settings = [*edits, f"model={model}", f"tune={tune}", "save.every=1", "rollout.tickets_per_batch=2"]
    check(in_every_way(tmp_path, mode, *settings, steps=3, first=1), 3)


def test_a_resume_with_another_image_is_refused(edits: list[str], tmp_path: Path) -> None:
    settings = ["sync", *edits, "prompts_per_step=1", "save.every=1", "evaluate.every=0"]
    train(tmp_path / "run", *settings, "total_steps=1")
    Image.new("RGB", (64, 64), "red").save(tmp_path / "a.png")
    train(tmp_path / "run", *settings, "total_steps=2", "resume=auto", code=2)
