"""Tests of shipped recipes: each composes, would run, and has the values that were published."""

import shutil
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest

from async_flowrl.config.check import ConfigError, check
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.memory.devices import gpus_taken
from async_flowrl.run.describe import dry_run_lines
from async_flowrl.run.pools import pools
from async_flowrl.run.prepare import prepare
from tests.support.hub import COMMIT
from tests.support.published import use_published_models

RECIPES = {
    "qwen_image_ocr": "Qwen/Qwen-Image",
    "sd35_ocr": "stabilityai/stable-diffusion-3.5-medium",
    "flux_pickscore": "black-forest-labs/FLUX.1-dev",
}
VARIANTS = {
    "qwen_image_ocr_vlm": "qwen_image_ocr",
    "qwen_image_1x80gb": "qwen_image_ocr",
    "qwen_image_1x24gb": "qwen_image_ocr",
    "qwen_image_8x80gb_shared": "qwen_image_ocr",
    "qwen_image_ocr_full": "qwen_image_ocr",
    "sd35_pickscore": "sd35_ocr",
    "sd35_medium_full": "sd35_ocr",
    "sd35_1x16gb": "sd35_ocr",
    "flux_1x24gb": "flux_pickscore",
}
"""Further recipes, with the one that has the same model."""
VIDEOS = {
    "wan21_1_3b_pickscore": ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", (16, 2, 32, 32)),
    "wan22_a14b_pickscore": ("Wan-AI/Wan2.2-T2V-A14B-Diffusers", (16, 2, 60, 60)),
}
"""Recipes of videos, with their models and latents."""
LATENTS = {
    "q": (1024, 64),
    "s": (16, 48, 48),
    "f": (1024, 64),
    "sd35_pickscore": (16, 64, 64),
    "sd35_1x16gb": (16, 64, 64),
}


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_published_models(tmp_path / "hub", monkeypatch)


def recipe(name: str, tmp_path: Path, *overrides: str) -> Config:
    wanted = [f"experiment={name}", f"output_dir={tmp_path / 'run'}", *overrides]
    return compose_config("one_step_off", wanted)


@pytest.mark.parametrize("name", [*RECIPES, *VARIANTS, *VIDEOS])
def test_it_composes_and_would_run(name: str, tmp_path: Path) -> None:
    model, latents = VIDEOS.get(name) or (RECIPES[VARIANTS.get(name, name)], LATENTS.get(name, LATENTS[name[0]]))
    config = recipe(name, tmp_path)
    check(config)
    prepared = prepare(config)
    assert (prepared.model.path, prepared.model.revision) == (model, COMMIT)
    assert prepared.shapes.latents == latents
    assert model in dry_run_lines(prepared, tmp_path)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


PUBLISHED: dict[str, tuple[object, ...]] = {
    "algorithm.sde_type": ("sde", "cps", "cps", "cps"),
    "algorithm.noise_level": (1.2, 0.8, 0.8, 0.8),
    "algorithm.sde_window_size": (2, 3, 3, 3),
    "algorithm.sde_window_range": ((0, 5), (0, 5), (0, 3), (0, 5)),
    "algorithm.clip_range": (1e-5,) * 4,
    "algorithm.kl_coef": (0,) * 4,
    "algorithm.global_std": (False,) * 4,
    "prompts_per_step": (32, 8, 48, 64),
    "group_size": (16, 8, 24, 18),
    "hand_over": ("batch", "stream", "batch", "batch"),
    "trainer.updates_per_batch": (2, 1, 2, 2),
    "trainer.learning_rate": (3e-4, 1e-4, 3e-4, 3e-4),
    "trainer.eps": (1e-8,) * 4,
    "trainer.weight_decay": (1e-4,) * 4,
    "trainer.ema_decay": (None, None, 0.9, 0.9),
    "rollout.resolution": (512, 384, 512, 512),
    "rollout.num_inference_steps": (10, 10, 6, 10),
    "rollout.true_cfg_scale": (4.0, 1.0, 1.0, 1.0),
    "rollout.guidance_scale": (0.0, 0.0, 3.5, 0.0),
    "evaluate.num_inference_steps": (50, 28, 28, 40),
    "lora.rank": (64, 32, 64, 32),
    "lora.alpha": (128, 64, 128, 64),
    "lora.targets": (None,) * 4,
}
"""Setting → its values in the three recipes and in sd35_pickscore."""


def test_the_published_values(tmp_path: Path) -> None:
    configs = qwen, _, flux, sd35 = [recipe(name, tmp_path) for name in (*RECIPES, "sd35_pickscore")]
    for key, values in PUBLISHED.items():
        found = [attrgetter(key)(config) for config in configs]
        assert tuple(tuple(value) if isinstance(value, list) else value for value in found) == values, key
    assert qwen.rollout.negative_prompt == " " and flux.trainer.ema_every == sd35.trainer.ema_every == 8
    assert [list(config.reward.terms) for config in configs] == [["ocr"], ["ocr"], ["pickscore"], ["pickscore"]]
    assert gpus_taken(sd35) == 4


def test_the_judge_has_servers_on_gpus_of_its_own(tmp_path: Path) -> None:
    prepared = prepare(recipe("qwen_image_ocr_vlm", tmp_path))
    (term,) = prepared.config.reward.terms.values()
    assert term.name == "vlm_judge" and term.options["mode"] == "transcribe"
    servers = next(spec for spec in pools(prepared) if spec.name == "server/vlm_ocr")
    assert (servers.num_workers, servers.gpus_per_worker) == (2, 1.0)
    started = " ".join(servers.arguments["serve"].command)
    assert started.startswith("uv run --isolated --no-project --with vllm==0.30.0 ")
    assert "server/vlm_ocr 2 × " in dry_run_lines(prepared, tmp_path)
    assert "not asked" not in dry_run_lines(prepared, tmp_path)
    elsewhere = {"vlm_ocr": replace(term, serve=None, options={**term.options, "base_url": "http://localhost:1/v1"})}
    config = replace(prepared.config, reward=replace(prepared.config.reward, terms=elsewhere))
    assert "not asked  servers of vlm_ocr" in dry_run_lines(replace(prepared, config=config), tmp_path)
    assert gpus_taken(prepared.config) == 4 + 4 + 2
    plain = recipe("qwen_image_ocr", tmp_path)
    plain.reward, prepared.config.model.dtype = prepared.config.reward, plain.model.dtype
    assert plain == prepared.config


@pytest.mark.extended
def test_one_card_takes_the_same_steps_with_a_quarter_of_the_images(tmp_path: Path) -> None:
    alone, whole = recipe("qwen_image_1x80gb", tmp_path), recipe("qwen_image_ocr", tmp_path)
    assert gpus_taken(alone) == 1 and alone.rollout.text_encoder == "cached" and alone.placement == "shared"
    eight = recipe("qwen_image_8x80gb_shared", tmp_path)
    assert gpus_taken(eight) == gpus_taken(whole) == 8 and eight.prompts_per_step == whole.prompts_per_step
    assert all(getattr(alone, section) == getattr(whole, section) for section in ("algorithm", "lora", "model", "data"))
    assert 4 * alone.prompts_per_step == whole.prompts_per_step and alone.group_size == whole.group_size


@pytest.mark.extended
def test_two_updates_do_not_stream_unless_the_command_line_says_so(tmp_path: Path) -> None:
    wanted = ["experiment=qwen_image_ocr", f"output_dir={tmp_path}"]
    with pytest.raises(ConfigError, match="mode=stream means hand_over=stream, got batch"):
        check(compose_config("stream", wanted))
    check(compose_config("stream", [*wanted, "hand_over=stream", "trainer.updates_per_batch=1"]))
