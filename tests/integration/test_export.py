"""Tests of export: which weights are exported, with which card, and what is refused; test_lora_everywhere.py has the
pipelines that load them."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from async_flowrl.cli.export import main as exporting
from async_flowrl.cli.export_source import read_source, write_lora
from async_flowrl.cli.generate import arguments_of, in_diffusers, open_pipeline, sample, sampling_of, usual
from async_flowrl.config.schema import Config, ModelConfig, RewardTerm, TinyConfig
from async_flowrl.observability.evaluations import Curve, Evaluation, EvaluationLog
from async_flowrl.observability.images import write_grid
from async_flowrl.policies import lora_file, trained_file
from async_flowrl.policies.lora_file import FILE_NAME
from async_flowrl.policies.qwen_image import QwenImagePolicy
from async_flowrl.policies.registry import load_pipeline, resolve_model
from async_flowrl.policies.tiny import build_tiny
from async_flowrl.types import Scores
from tests.integration.exported import LORA, run_directory, write_config
from tests.support.families import pipeline_of
from tests.support.tiny import RED, save_lora


@pytest.mark.extended
@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/step_7"])
def test_the_newest_checkpoint_of_a_run_is_exported(trained: QwenImagePolicy, tmp_path: Path, inside: str) -> None:
    weights = run_directory(tmp_path / "run", trained, ema=False)
    assert exporting([str(tmp_path / "run" / inside), str(tmp_path / "out")]) == 0
    found = load_file(tmp_path / "out" / FILE_NAME)
    factors = {name: LORA.alpha / LORA.rank if "lora_B" in name else 1.0 for name in weights}
    assert all(torch.equal(found[f"transformer.{name}"], t * factors[name]) for name, t in weights.items())


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
    file, sound = tmp_path / "run/checkpoints/step_7/weights.safetensors", tmp_path / "run/checkpoints/step_6"
    shutil.copytree(file.parent, sound)
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    for words, named in (
        ([str(file.parent)], f"weights.safetensors .* SOURCE={sound} "),
        ([str(tmp_path / "run"), "--base", "nosuch"], "--base 'nosuch' was not found"),
        ([str(tmp_path / "run"), "--base", "./nosuch"], "--base './nosuch' was not found"),
    ):
        assert exporting([*words, str(tmp_path / "out")]) == 2
        assert re.search(named, capsys.readouterr().err) and not (tmp_path / "out").exists()
    for source, message in ((tmp_path / "nothing", "give a run directory"), (tmp_path, "holds no sound checkpoint")):
        with pytest.raises(ValueError, match=message):
            read_source(source)


NOT_HERE = "me/tuned-qwen-image"
"""A model whose layers nobody can compare with those of the LoRA."""


def published_run(folder: Path, policy: QwenImagePolicy) -> Path:
    """A run as it is left behind, with evaluations of versions 0 and 7, their pictures, metrics and its command."""
    run_directory(folder, policy, ema=False)
    config = Config(name="mine", total_steps=7, lora=LORA, model=ModelConfig(path=NOT_HERE))
    config.reward.terms = {"color": RewardTerm(weight=2.0)}
    config.evaluate.reward.terms = {"jpeg_compressibility": RewardTerm()}
    write_config(folder, config)
    (folder / ".hydra").mkdir()
    typed = ["total_steps=7", "output_dir=/home/me/secret", "reward.terms={color: {weight: 2.0}}", "name=${x}", "~save"]
    (folder / ".hydra/overrides.yaml").write_text("".join(f"- {json.dumps(override)}\n" for override in typed))
    (folder / ".hydra/hydra.yaml").write_text("hydra: {job: {config_name: one_step_off}}\n")
    (folder / "summary.json").write_text(json.dumps({"weights_digest": "abc123"}))
    lines = [json.dumps({"step": step, "reward/mean": step / 10}) for step in range(7)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "images").mkdir()
    for version in (0, 7):
        image = np.full((1, 32, 32, 3), 30 * version, np.uint8)
        write_grid(folder / f"images/step_{version:06d}.png", [RED.text], [image], [Scores((0.5,), {})])
    log = EvaluationLog(folder / "evaluations.jsonl")
    for version, scores in ((0, {0: (1.0, 2.0), 1: (3.0, 3.0)}), (7, {0: (2.0, 3.0), 1: (4.5, 5.5)})):
        kinds = {"reward": "trained", "jpeg_compressibility": "held_out"}
        curves = {name: Curve(kind, 1.0, name, scores) for name, kind in kinds.items()}
        log.add(Evaluation(version, False, "same", 6, 1.0, curves))
    return folder


def test_the_folder_can_be_published(trained: QwenImagePolicy, tmp_path: Path) -> None:
    """Its card says where the LoRA is from and what it does, and nothing of this machine."""
    run, out = published_run(tmp_path / "run", trained), tmp_path / "out"
    assert exporting([str(run), str(out), "--license", "apache-2.0"]) == 0
    card = ModelCard.load(out / "README.md")
    front = card.data.to_dict()
    assert front["base_model"] == NOT_HERE and front["base_model_relation"] == "adapter"
    assert front["license"] == "apache-2.0" and {"lora", "diffusers"} <= set(front["tags"])
    for said in (
        "rank 4, alpha 10",
        "| trained reward | 2 × `color` |",
        "| steps | 7 of 7 |",
        "| `reward` | trained | 2.25 | 3.75 | +1.5 ± 6.4 |",
        "| `jpeg_compressibility` | held out | 2.25 | 3.75 | +1.5 ± 6.4 |",
        "async-flowrl train --config-name one_step_off total_steps=7 'reward.terms={color: {weight: 2.0}}' "
        "'name=${x}' '~save'\n",
        "image = pipe(prompt=PROMPT",
        "async-flowrl verify RUN",
        "`abc123`",
        hashlib.sha256((out / FILE_NAME).read_bytes()).hexdigest(),
        hashlib.sha256((out / "peft/adapter_model.safetensors").read_bytes()).hexdigest(),
    ):
        assert said in card.content, said
    assert str(tmp_path) not in card.content and "secret" not in card.content
    assert np.asarray(Image.open(out / "curve.png")).std() > 1
    grid = np.asarray(Image.open(out / "before_after.png").convert("RGB"))
    assert {0, 210} <= {int(value) for value in np.unique(grid)}
    assert all((out / name).is_file() for name in ("curve.png", "before_after.png"))
    for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", card.content):
        assert (out / name).is_file(), name
    assert lora_file.base_of(out) == NOT_HERE == lora_file.base_of(out / "peft")


def test_the_cards_line_makes_the_image_of_generate(tmp_path: Path) -> None:
    """SANA's pipeline would by default make another size and shrink it."""
    model = build_tiny(TinyConfig(family="sana"))
    sana = load_pipeline(resolve_model(ModelConfig(path=str(model))), dtype="float32", device="cpu")
    config = usual(str(model))
    how = config.model, replace(sampling_of(config), resolution=64, num_inference_steps=2)
    line = in_diffusers(arguments_of(sana, *how), seed=3)
    assert "use_resolution_binning=False" in line
    image = eval(line, {"pipe": sana, "PROMPT": "red", "torch": torch})
    assert (np.asarray(image) == sample(sana, *how, "red", [3])[0]).all()


LAYER = "transformer.transformer_blocks.0.attn.to_q"
A, B = f"{LAYER}.lora_A.weight", f"{LAYER}.lora_B.weight"
Tensors = dict[str, Tensor]


BROKEN: dict[str, Callable[[Tensors], Tensors]] = {
    "without_b": lambda tensors: {name: tensor for name, tensor in tensors.items() if name != B},
    "with_nan": lambda tensors: tensors | {B: torch.full_like(tensors[B], torch.nan)},
    "with_dora": lambda tensors: tensors | {f"{LAYER}.dora_scale": torch.ones(1)},
    "with_text_encoder": lambda tensors: (
        tensors | {f"text_encoder.layers.0.q.lora_{side}.weight": torch.zeros(4, 4) for side in "AB"}
    ),
    "with_adapters_name": lambda tensors: {
        name.replace(".weight", ".v1.0.weight"): tensor for name, tensor in tensors.items()
    },
    "of_another_network": lambda tensors: {
        name.replace("transformer_blocks", "blocks"): tensor for name, tensor in tensors.items()
    },
    "with_another_layer": lambda tensors: (
        tensors | {name.replace("blocks.0", "blocks.7"): tensors[name].clone() for name in (A, B)}
    ),
    "with_another_shape": lambda tensors: tensors | {A: torch.zeros(tensors[A].shape[0], 3)},
}


@pytest.mark.parametrize("broken", BROKEN)
def test_it_is_neither_loaded_nor_exported(
    broken: str, trained: QwenImagePolicy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = save_lora(tmp_path / "whole", trained.transformer, alpha=LORA.alpha)
    folder = tmp_path / "broken"
    folder.mkdir()
    save_file(BROKEN[broken](load_file(whole / FILE_NAME if whole.is_dir() else whole)), folder / FILE_NAME)
    pipeline = pipeline_of("qwen_image")
    with pytest.raises(ValueError, match="broken") as refused:
        trained_file.apply(pipeline, folder)
    assert len(str(refused.value)) < 600
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
    for base, code, named in (("Qwen/Qwen-Image", 2, "Qwen/Qwen-Image"), ("me/other", 0, "--base 'me/other'")):
        assert exporting([str(tmp_path / "tiny"), str(tmp_path / "out"), "--base", base]) == code
        assert (tmp_path / "out").exists() is (code == 0)
        refused, warned = capsys.readouterr().err, [r.message for r in caplog.records if r.levelname == "WARNING"]
        assert named in "".join([refused, *warned])
