"""Tests of LoRA files that diffusers would load in part, or as memory that nobody has written: refused by name."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from async_flowrl.cli.export import main as exporting
from async_flowrl.cli.generate import open_pipeline, sample, sampling_of, usual
from async_flowrl.policies import trained_file
from async_flowrl.policies.lora_file import FILE_NAME
from async_flowrl.policies.qwen_image import QwenImagePolicy
from tests.integration.exported import LORA
from tests.support.families import pipeline_of
from tests.support.tiny import save_lora

LAYER = "transformer.transformer_blocks.0.attn.to_q"
A, B = f"{LAYER}.lora_A.weight", f"{LAYER}.lora_B.weight"
Tensors = dict[str, Tensor]


def without_b(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != B}


def with_nan(tensors: Tensors) -> Tensors:
    return tensors | {B: torch.full_like(tensors[B], torch.nan)}


def with_dora(tensors: Tensors) -> Tensors:
    return tensors | {f"{LAYER}.dora_scale": torch.ones(1)}


def with_text_encoder(tensors: Tensors) -> Tensors:
    return tensors | {f"text_encoder.layers.0.q.lora_{side}.weight": torch.zeros(4, 4) for side in "AB"}


def with_adapters_name(tensors: Tensors) -> Tensors:
    return {name.replace(".weight", ".v1.0.weight"): tensor for name, tensor in tensors.items()}


def with_another_layer(tensors: Tensors) -> Tensors:
    return tensors | {name.replace("blocks.0", "blocks.7"): tensors[name].clone() for name in (A, B)}


def with_another_shape(tensors: Tensors) -> Tensors:
    return tensors | {A: torch.zeros(tensors[A].shape[0], 3)}


@pytest.mark.parametrize(
    "broken",
    [without_b, with_nan, with_dora, with_text_encoder, with_adapters_name, with_another_layer, with_another_shape],
)
def test_it_is_neither_loaded_nor_exported(
    broken: Callable[[Tensors], Tensors], trained: QwenImagePolicy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = save_lora(tmp_path / "whole", trained.transformer, alpha=LORA.alpha)
    folder = tmp_path / "broken"
    folder.mkdir()
    save_file(broken(load_file(whole / FILE_NAME if whole.is_dir() else whole)), folder / FILE_NAME)
    pipeline = pipeline_of("qwen_image")
    with pytest.raises(ValueError, match="broken"):
        trained_file.apply(pipeline, folder)
    assert exporting([str(folder), str(tmp_path / "out"), "--base", "tiny"]) == 2
    assert "broken" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_pictures_of_values_that_are_not_finite_are_refused() -> None:
    config = usual("tiny")
    how = config.model, sampling_of(config)
    pipeline = open_pipeline(*how, "cpu")
    for parameter in pipeline.vae.decoder.parameters():
        parameter.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        sample(pipeline, *how, "red", [1])


def test_a_lora_of_another_model_than_the_base_that_is_only_named(
    trained: QwenImagePolicy,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A published model is known by its description; of any other, it is said that nobody compared."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    save_lora(tmp_path / "tiny", trained.transformer, alpha=LORA.alpha)
    for base, code in (("Qwen/Qwen-Image", 2), ("me/other", 0)):
        assert exporting([str(tmp_path / "tiny"), str(tmp_path / "out"), "--base", base]) == code
        assert (tmp_path / "out").exists() is (code == 0)
        refused, warned = capsys.readouterr().err, [r.message for r in caplog.records if r.levelname == "WARNING"]
        assert base in "".join([refused, *warned])
