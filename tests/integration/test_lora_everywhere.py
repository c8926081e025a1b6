"""Tests of one LoRA in every format: its target library gets the trained model's output, and others are refused."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from async_flowrl.cli.exported import write_merged
from async_flowrl.config.schema import LoraConfig, ModelConfig
from async_flowrl.policies import lora_file, lora_formats
from async_flowrl.policies.lora import lora_parameters
from async_flowrl.policies.lora_file import LoraFile
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.registry import load_family, resolve_model
from async_flowrl.policies.trained_file import apply_lora
from tests.support.families import (
    NAMES,
    ONE_AND_EXTENDED,
    TWO_AND_SLOW,
    adapted,
    conditioning,
    how,
    model_config,
    pipeline_of,
)
from tests.support.tiny import randomise

RANK, ALPHA = 4, 8.0
RESOLUTION = 32


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def trained(family: str) -> PipelinePolicy:
    return adapted(family, lora=LoraConfig(rank=RANK, alpha=ALPHA))


@pytest.fixture(scope="module")
def lora(trained: PipelinePolicy) -> LoraFile:
    return LoraFile({name: p.detach() for name, p in lora_parameters(trained.transformer).items()}, RANK, ALPHA)


@pytest.fixture
def pipeline(family: str) -> Any:
    return pipeline_of(family)


def output(policy: PipelinePolicy) -> Tensor:
    """What the network says of drawn latents, with the conditioning that the policy's own encoders give."""
    latents = torch.randn(2, *policy.latent_shape(RESOLUTION), generator=torch.Generator().manual_seed(3))
    positive, _ = conditioning(policy)
    with torch.no_grad():
        return policy.velocity(latents, torch.tensor([0.9, 0.4]), positive, None, how(policy.family))


REFUSED = {
    *(("comfyui", family) for family in ("sana", "wan", "flux2_klein")),
    *(("kohya", family) for family in ("sd3", "sana", "flux", "qwen_image_21", "wan", "flux2_klein")),
}
"""No converter is here, or in diffusers, for them; kohya's of FLUX.1 is for its own width only."""


def through(family: str, pipeline: Any) -> Tensor:
    config = model_config(family)
    return output(
        load_family(family).around(pipeline, torch.float32, max_sequence_length=config.max_sequence_length)  # type: ignore[attr-defined]
    )


@pytest.fixture(scope="module")
def expected(trained: PipelinePolicy) -> Tensor:
    return output(trained)


@pytest.mark.extended
@pytest.mark.parametrize("family", TWO_AND_SLOW, indirect=True)
def test_a_runs_folder_is_for_diffusers_and_for_peft(
    family: str, lora: LoraFile, expected: Tensor, pipeline: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two safetensors files lie there: diffusers takes its own without being told, PEFT finds its configuration."""
    lora_file.save(tmp_path, lora.tensors, alpha=lora.alpha)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    base = through(family, pipeline)
    assert (base - expected).abs().max() > 0.01
    with caplog.at_level(logging.WARNING):
        pipeline.load_lora_weights(tmp_path)
    assert "more than one weights file" not in caplog.text
    assert torch.equal(through(family, pipeline), expected)
    pipeline.unload_lora_weights()
    assert torch.equal(through(family, pipeline), base)
    model = PeftModel.from_pretrained(pipeline.transformer, tmp_path)
    # SANA's attention adds up in another order under PEFT's wrapper: the last bits of a few numbers differ.
    assert (through(family, pipeline) - expected).abs().max() <= (1e-5 if family == "sana" else 0.0)
    model.unload()


@pytest.mark.extended
@pytest.mark.parametrize("form", sorted(lora_formats.FORMS))
def test_single_files_load_in_diffusers(
    family: str, form: str, lora: LoraFile, expected: Tensor, pipeline: Any, tmp_path: Path
) -> None:
    if (form, family) in REFUSED:
        with pytest.raises(ValueError, match=f"--format {form}"):
            lora_formats.write(tmp_path / "it.safetensors", lora, family=family, form=form)
        return
    written = lora_formats.write(tmp_path / "it.safetensors", lora, family=family, form=form)
    own = "diffusion_model." if family in ("qwen_image", "z_image") else "transformer."
    assert all(name.startswith(own if form == "comfyui" else "lora_unet_") for name in load_file(written))
    apply_lora(pipeline, written)
    assert torch.equal(through(family, pipeline), expected)


@pytest.mark.parametrize("family", ONE_AND_EXTENDED, indirect=True)
def test_merged_weights_load_without_any_adapter(family: str, lora: LoraFile, expected: Tensor, tmp_path: Path) -> None:
    """Equal but for the rounding of W + BA, which the adapter does not do."""
    config = model_config(family)
    merged = write_merged(config, lora, tmp_path, "pipeline")
    stock = DiffusionPipeline.from_pretrained(merged, **load_family(family).own_parts(str(merged)))  # type: ignore[attr-defined]
    assert torch.allclose(through(family, stock), expected, rtol=1e-4, atol=1e-4)
    base = Path(resolve_model(config).path) / "transformer/diffusion_pytorch_model.safetensors"
    before, after = load_file(base), load_file(merged / "transformer" / base.name)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"{module}.weight" for module in lora_file.modules_of(lora.tensors)}
    with pytest.raises(ValueError, match="merged exists already"):
        write_merged(config, lora, tmp_path, "transformer")
    elsewhere = replace(lora, tensors={f"nowhere.{name}": tensor for name, tensor in lora.tensors.items()})
    with pytest.raises(ValueError, match=r"layer nowhere\."):
        write_merged(config, elsewhere, tmp_path / "elsewhere", "transformer")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_merging_goes_shard_by_shard(tmp_path: Path) -> None:
    """A transformer in several files, in bfloat16: each matrix is rounded once, and nothing else changes."""
    base = tmp_path / "base"
    shutil.copytree(resolve_model(model_config("qwen_image")).path, base)
    network = pipeline_of("qwen_image").transformer.to(torch.bfloat16)
    shutil.rmtree(base / "transformer")
    network.save_pretrained(base / "transformer", max_shard_size="200KB")
    assert len(list((base / "transformer").glob("*.safetensors"))) > 2
    layers, shapes = ("1.attn.to_q", "0.attn.to_k"), {"A": (4, 64), "B": (64, 4)}
    names = {f"transformer_blocks.{layer}.lora_{side}.weight": shapes[side] for layer in layers for side in shapes}
    lora = LoraFile({name: torch.ones(shape) for name, shape in names.items()}, 4, 4.0)
    randomise(lora.tensors)
    merged = write_merged(ModelConfig(path=str(base)), lora, tmp_path / "out", "transformer")
    assert [entry.name for entry in merged.iterdir()] == ["transformer"]
    before = network.state_dict()
    after = type(network).from_pretrained(merged / "transformer", torch_dtype=torch.bfloat16).state_dict()
    for name, weight in before.items():
        a, b = (lora.tensors.get(f"{name.removesuffix('.weight')}.lora_{side}.weight") for side in "AB")
        wanted = weight if a is None or b is None else (weight.float() + b @ a).to(torch.bfloat16)
        assert torch.equal(after[name], wanted), name
