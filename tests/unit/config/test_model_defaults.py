"""Tests of the defaults that depend on the model, and of defaults that would contradict each other."""

import json
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from safetensors.numpy import save_file

from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.config.check import ConfigError, check, toy_values
from async_flowrl.config.compose import compose_config
from async_flowrl.config.models import PIPELINES
from async_flowrl.config.paths import config_dir
from async_flowrl.config.schema import Config
from async_flowrl.policies.registry import FAMILIES
from async_flowrl.tickets.arithmetic import check_batching

KEYS = {
    "lora": ("rank",),
    "rollout": ("resolution", "num_inference_steps", "true_cfg_scale", "guidance_scale"),
    "trainer": ("learning_rate",),
}


def defaults(config: Config) -> list[float]:
    return [getattr(getattr(config, section), key) for section, keys in KEYS.items() for key in keys]


def folder(where: Path, pipeline: str, megabytes: int = 0) -> str:
    """A diffusers folder at its published size, or with weights of so few megabytes."""
    (where / "transformer").mkdir(parents=True)
    (where / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    if megabytes:
        save_file({"a": np.zeros(megabytes << 20, np.int8)}, where / "transformer" / "model.safetensors")
    return f"model.path={where}"


TOY = [8, 32, 6, 1.0, 0.0, 3e-3]
RECIPES = {
    "QwenImagePipeline": ("Qwen/Qwen-Image", "qwen_image_ocr"),
    "StableDiffusion3Pipeline": ("stabilityai/stable-diffusion-3.5-large", "sd35_pickscore"),
    "FluxPipeline": ("black-forest-labs/FLUX.1-dev", "flux_pickscore"),
}


@pytest.mark.extended
@pytest.mark.parametrize("pipeline", RECIPES)
def test_a_real_model_alone_has_the_values_of_its_recipe(pipeline: str, tmp_path: Path) -> None:
    name, recipe = RECIPES[pipeline]
    expected = compose_config("one_step_off", [f"experiment={recipe}"])
    for words in (f"model.path={name}", folder(tmp_path, pipeline)):
        config = compose_config("one_step_off", [words])
        assert defaults(config) == defaults(expected) and config.lora.alpha == expected.lora.alpha
        assert config.algorithm.name == "diffusion_nft" and toy_values(config) is None
        check(config)


ALL_ELSE = (
    *("lora.rank=8", "rollout.resolution=256", "rollout.num_inference_steps=4", "trainer.learning_rate=1e-4"),
    *("rollout.true_cfg_scale=2", "rollout.guidance_scale=1"),
)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("words", "images", "sampled"),
    [
        (["model=flux_kontext"], 8, None),
        (["model=flux_kontext", "group_size=12"], 6, None),
        (["model=tiny_flux_kontext"], 16, None),
        (["model=qwen_image_edit_2511"], 2, 8),
        (["model=qwen_image_edit_2511", *ALL_ELSE], 2, 8),
        (["model=tiny_qwen_image_edit"], 16, None),
        (["model=flux_dev"], 16, None),
    ],
)
def test_batches_of_a_family_that_fit_its_card(words: list[str], images: int, sampled: int | None) -> None:
    config = compose_config("one_step_off", words)
    assert (config.trainer.micro_batch_size, config.rollout.batch_size) == (images, sampled)


def test_every_family_has_a_file_with_every_value() -> None:
    files = {path.stem: OmegaConf.load(path) for path in (config_dir() / "family").glob("*.yaml")}
    assert set(files) == {*FAMILIES, "toy", "other"} and set(PIPELINES.values()) == set(FAMILIES)
    for name in {*FAMILIES, "other"}:
        optional = {"batch_size", "micro_batch_size"}
        assert {section: tuple(v for v in each if v not in optional) for section, each in files[name].items()} == KEYS


@pytest.mark.extended
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], TOY),
        (["~experiment"], TOY),
        (["~experiment", "model=tiny_sd3"], TOY),
        (["model=tiny_flux"], [8, 32, 6, 1.0, 3.5, 3e-3]),
        (["model.path=nobody/has-this"], [32, 512, 10, 1.0, 0.0, 1e-4]),
        (["model.path=nobody/has-this", "model.family=flux", "tune=full"], [64, 512, 6, 1.0, 3.5, 3e-6]),
        (["model=qwen_image", "lora.rank=16", "rollout.resolution=768"], [16, 768, 10, 4.0, 0.0, 3e-4]),
        (["model=qwen_image", "experiment=two_prompts"], [8, 32, 6, 4.0, 0.0, 3e-3]),
    ],
)
def test_what_is_given_wins(words: list[str], expected: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = compose_config("one_step_off", words)
    assert defaults(config) == pytest.approx(expected) and config.lora.alpha == 2 * config.lora.rank


@pytest.mark.extended
def test_the_family_of_a_hub_model_is_read_from_its_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--somebody--finetune"
    folder(repository / "snapshots" / "abc", "FluxPipeline")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert compose_config("one_step_off", ["model.path=somebody/finetune"]).rollout.guidance_scale == 3.5


def test_a_folder_with_few_weights_is_a_toy(tmp_path: Path) -> None:
    config = compose_config("one_step_off", [folder(tmp_path, "StableDiffusion3Pipeline", megabytes=4)])
    assert defaults(config) == TOY and config.trainer.timesteps_per_forward is None  # experiment=two_prompts
    assert toy_values(config) is None


def refusal(words: list[str]) -> str | None:
    """The sentence with which a run would refuse the words before it looks at files; None if it takes them."""
    try:
        config = compose_config("one_step_off", words)
        check(config)
        build_algorithm(config)
        check_batching(config)
    except (ConfigError, ValueError) as error:
        return str(error)
    return None


ALONE = [
    *(f"group_size={size}" for size in (2, 17, 40)),
    *(f"prompts_per_step={count}" for count in (1, 64)),
    *(f"{pool}.num_workers={count}" for pool, count in (("trainer", 3), ("rollout", 2), ("reward", 2))),
    *(f"rollout.num_inference_steps={steps}" for steps in (2, 28)),
    *(f"algorithm={path.stem}" for path in (config_dir() / "algorithm").glob("*.yaml")),
    *("hand_over=batch", "placement=shared", "tune=full", "runtime.backend=local", "checkpoint_engine.transport=gloo"),
    *("lora.rank=3", "algorithm.sde_window_size=9", "total_steps=1", "epochs=1"),
]
TOGETHER = [
    *(f"algorithm={name} rollout.num_inference_steps=4" for name in ("flow_cps", "flow_grpo_fast", "flow_dppo")),
    *(f"experiment={recipe} rollout.num_inference_steps=5" for _, recipe in RECIPES.values()),
    "experiment=glyphs_fast rollout.num_inference_steps=2",
    "experiment=glyphs group_size=10",
    "algorithm=dpo group_size=17",
    "trainer=small group_size=6",
]


@pytest.mark.extended
@pytest.mark.parametrize("words", [*ALONE, *TOGETHER])
def test_defaults_follow_what_is_changed_alone(words: str) -> None:
    assert refusal(words.split()) is None
