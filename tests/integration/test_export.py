"""Tests of export: in a fresh diffusers pipeline, the exported LoRA gives the trained model's output."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors.torch import load_file
from torch import Tensor

from async_flowrl.cli.export import main as exporting
from async_flowrl.cli.export_source import read_source, write_lora
from async_flowrl.config.schema import ModelConfig
from async_flowrl.policies.lora_file import FILE_NAME
from async_flowrl.policies.qwen_image import QwenImagePolicy
from async_flowrl.policies.registry import load_pipeline, resolve_model
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.seeds import generator
from async_flowrl.types import EVALUATION
from tests.integration.exported import LORA, run_directory
from tests.support.shared_models import SharedModels
from tests.support.tiny import RED, request, save_lora

N = 3


@pytest.fixture(scope="module")
def expected(trained: QwenImagePolicy) -> Tensor:
    """Final latents through diffusers' own loop, with the trained transformer put into a pipeline."""
    pipeline = fresh_pipeline()
    pipeline.transformer = trained.transformer
    return latents_of(pipeline)


def fresh_pipeline() -> QwenImagePipeline:
    """As a user opens it, but with the weights in aligned memory, so that results may be compared bit for bit."""
    pipeline = load_pipeline(resolve_model(ModelConfig()), dtype="float32", device="cpu")
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def latents_of(pipeline: QwenImagePipeline) -> Tensor:
    start = torch.stack([torch.randn(4, 64, generator=generator(seed)) for seed in request(N).initial_seeds])
    made: Tensor = pipeline(
        RED.text,
        true_cfg_scale=1.0,
        height=32,
        width=32,
        num_inference_steps=6,
        num_images_per_prompt=N,
        latents=start,
        output_type="latent",
    ).images
    return made


def test_the_rollout_engines_images_come_back(
    trained: QwenImagePolicy, shared_models: SharedModels, tmp_path: Path
) -> None:
    made = DiffusersEngine(trained).generate([request(N, kind=EVALUATION)])[0].images
    save_lora(tmp_path, trained.transformer, alpha=LORA.alpha)
    pipeline = QwenImagePipeline.from_pretrained(resolve_model(ModelConfig()).path)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_lora_weights(tmp_path)
    decoded = shared_models.tiny.decode(latents_of(pipeline), 32).numpy()
    assert np.abs(made.astype(int) - decoded).max() <= 1
    plain = DiffusersEngine(shared_models.tiny).generate([request(N, kind=EVALUATION)])[0].images
    assert np.abs(made.astype(int) - plain).max() > 10


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/step_7"])
def test_the_newest_checkpoint_of_a_run_is_exported(
    trained: QwenImagePolicy, expected: Tensor, tmp_path: Path, inside: str
) -> None:
    weights = run_directory(tmp_path / "run", trained, ema=False)
    assert exporting([str(tmp_path / "run" / inside), str(tmp_path / "out")]) == 0
    found = load_file(tmp_path / "out" / FILE_NAME)
    factors = {name: LORA.alpha / LORA.rank if "lora_B" in name else 1.0 for name in weights}
    assert all(torch.equal(found[f"transformer.{name}"], t * factors[name]) for name, t in weights.items())
    pipeline = fresh_pipeline()
    pipeline.load_lora_weights(tmp_path / "out")
    assert torch.allclose(latents_of(pipeline), expected, rtol=1e-4, atol=1e-4)


def test_the_average_is_exported_where_the_run_kept_one(trained: QwenImagePolicy, tmp_path: Path) -> None:
    weights = run_directory(tmp_path / "run", trained, ema=True)
    name, tensor = next((n, t * LORA.alpha / LORA.rank) for n, t in weights.items() if n.endswith("lora_B.weight"))
    average = write_lora(read_source(tmp_path / "run"), tmp_path / "average")
    assert torch.equal(load_file(average)[f"transformer.{name}"], tensor / 2)
    assert exporting([str(tmp_path / "run"), str(tmp_path / "raw"), "--raw"]) == 0
    assert torch.equal(load_file(tmp_path / "raw" / FILE_NAME)[f"transformer.{name}"], tensor)


def test_a_damaged_checkpoint_is_not_exported(
    trained: QwenImagePolicy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_directory(tmp_path / "run", trained, ema=False)
    file = tmp_path / "run/checkpoints/step_7/weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    assert exporting([str(file.parent), str(tmp_path / "out")]) == 2
    assert "weights.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    for source, message in ((tmp_path / "nothing", "give a run directory"), (tmp_path, "holds no sound checkpoint")):
        with pytest.raises(ValueError, match=message):
            read_source(source)
