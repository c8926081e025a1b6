"""Tests of an export as a folder to publish: its card, its other formats, and what is refused."""

import hashlib
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import ModelCard
from omegaconf import OmegaConf
from PIL import Image

from async_flowrl.cli.export import main as exporting
from async_flowrl.cli.generate import arguments_of, in_diffusers, sample, sampling_of, usual
from async_flowrl.config.schema import Config, ModelConfig, RewardTerm, TinyConfig
from async_flowrl.observability.evaluations import Curve, Evaluation, EvaluationLog
from async_flowrl.observability.images import write_grid
from async_flowrl.policies import lora_file
from async_flowrl.policies.lora_file import FILE_NAME
from async_flowrl.policies.qwen_image import QwenImagePolicy
from async_flowrl.policies.registry import load_pipeline, resolve_model
from async_flowrl.policies.tiny import build_tiny
from async_flowrl.types import Scores
from tests.integration.exported import LORA, run_directory
from tests.support.tiny import RED

NOT_HERE = "me/tuned-qwen-image"
"""A model whose layers nobody can compare with those of the LoRA."""


def published_run(folder: Path, policy: QwenImagePolicy, *, model: str) -> Path:
    """A run as it is left behind, with evaluations of versions 0 and 7, their pictures, metrics and its command."""
    run_directory(folder, policy, ema=False)
    config = Config(name="mine", total_steps=7, lora=LORA, model=ModelConfig(path=model))
    config.reward.terms = {"color": RewardTerm(weight=2.0)}
    config.evaluate.reward.terms = {"jpeg_compressibility": RewardTerm()}
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(config))))
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
    run, out = published_run(tmp_path / "run", trained, model=NOT_HERE), tmp_path / "out"
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
