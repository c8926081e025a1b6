"""Tests of `model.weights=random`: runs of the tiny models without their files, and published architectures."""

import shutil
from pathlib import Path

import pytest

from async_flowrl.config.models import architectures
from async_flowrl.config.schema import ModelConfig
from async_flowrl.policies.registry import folder_of, resolve_model, shapes_of
from tests.integration.runs import train
from tests.support.families import NAMES


def settings(family: str) -> list[str]:
    guidance = ["rollout.guidance_scale=3.5"] if family == "flux" else []
    return ["model.weights=random", f"model.tiny.family={family}", "model.tiny.layers=2", "total_steps=2", *guidance]


@pytest.mark.parametrize(
    "family", [name if name == "qwen_image" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_rollout_and_trainer_draw_the_same_weights(family: str, tmp_path: Path) -> None:
    run = train(tmp_path / "run", "one_step_off", *settings(family))
    assert run.column("log_prob_gap")[0] < 1e-6
    assert len(set(run.digests)) == 3


@pytest.mark.parametrize("name", list(architectures()))
def test_a_published_model_needs_no_files_for_its_shapes(name: str) -> None:
    model = resolve_model(ModelConfig(path=name, weights="random"))
    assert (model.family, model.dtype) == (architectures()[name].family, architectures()[name].dtype)
    shapes = shapes_of(model, (5, 512, 512) if model.family == "wan_image" else 512)  # It makes no single frame.
    assert len(shapes.latents) in (2, 3, 4)
    assert not list(Path(model.path).rglob("*.safetensors"))
    shutil.rmtree(model.path)  # as on another node
    assert (folder_of(model, "structure") / "transformer" / "config.json").is_file()
