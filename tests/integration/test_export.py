"""Tests of export: in a fresh diffusers pipeline, the exported LoRA gives the trained model's output."""

import hashlib
import json
import logging
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from huggingface_hub import ModelCard
from omegaconf import OmegaConf
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from async_flowrl import evaluate as evaluating
from async_flowrl import export as exporting
from async_flowrl import generate as generating
from async_flowrl.config.schema import Config
from async_flowrl.config.sections.model import ModelConfig, TinyConfig
from async_flowrl.config.sections.reward import RewardTerm
from async_flowrl.config.sections.tune import LoraConfig
from async_flowrl.export import export, save_lora
from async_flowrl.observability.evaluations import Curve, Evaluation, EvaluationLog
from async_flowrl.observability.images import write_grid
from async_flowrl.policies import lora_file, lora_formats
from async_flowrl.policies.lora import lora_parameters
from async_flowrl.policies.lora_apply import apply_lora
from async_flowrl.policies.lora_file import FILE_NAME
from async_flowrl.policies.qwen_image import QwenImagePolicy
from async_flowrl.policies.registry import load_pipeline, resolve_model
from async_flowrl.policies.tiny.build import build_tiny
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.seeds import generator
from async_flowrl.training.checkpoint import Checkpoint, write_checkpoint
from async_flowrl.types import EVALUATION
from tests.support.shared_models import SharedModels
from tests.support.tiny import RED, adapted_policy, randomise, request, tiny_policy

LORA = LoraConfig(rank=4, alpha=10.0)
N = 3


@pytest.fixture(scope="module")
def trained() -> QwenImagePolicy:
    return adapted_policy(config=LORA)


@pytest.fixture(scope="module")
def expected(trained: QwenImagePolicy) -> Tensor:
    """Final latents of the trained model."""
    return trained_latents(trained)


@pytest.fixture(scope="module")
def untouched() -> Tensor:
    """Final latents without a LoRA."""
    return latents_of(fresh_pipeline())


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


def trained_latents(policy: QwenImagePolicy) -> Tensor:
    """Final latents through diffusers' own loop, with the trained transformer put into a pipeline."""
    pipeline = fresh_pipeline()
    pipeline.transformer = policy.transformer
    return latents_of(pipeline)


def test_a_fresh_pipeline_reproduces_the_trained_model(
    trained: QwenImagePolicy, expected: Tensor, untouched: Tensor, tmp_path: Path
) -> None:
    """Equal but for rounding: PEFT's layers scale B(Ax) in an operation of its own."""
    assert LORA.alpha != LORA.rank
    save_lora(tmp_path, trained.transformer, alpha=LORA.alpha)
    pipeline = fresh_pipeline()
    pipeline.load_lora_weights(tmp_path)
    made = latents_of(pipeline)
    assert torch.allclose(made, expected, rtol=1e-4, atol=1e-4)
    assert (made - untouched).abs().max() > 0.1


def test_it_does_so_bit_for_bit_where_the_scale_is_a_power_of_two(tmp_path: Path) -> None:
    """On the CPU in float32: such a factor rounds nothing, wherever it is multiplied."""
    trained = adapted_policy(config=LoraConfig(rank=4, alpha=8.0))
    save_lora(tmp_path, trained.transformer, alpha=8.0)
    pipeline = fresh_pipeline()
    pipeline.load_lora_weights(tmp_path)
    assert torch.equal(latents_of(pipeline), trained_latents(trained))


def test_named_tensors_without_a_model_export_the_same_file(trained: QwenImagePolicy, tmp_path: Path) -> None:
    masters = {name: p.detach().numpy() for name, p in lora_parameters(trained.transformer).items()}
    one = save_lora(tmp_path / "live", trained.transformer, alpha=LORA.alpha)
    two = save_lora(tmp_path / "arrays", masters, alpha=LORA.alpha)
    assert one.read_bytes() == two.read_bytes()


def test_the_rollout_engines_images_come_back(
    trained: QwenImagePolicy, shared_models: SharedModels, tmp_path: Path
) -> None:
    made = DiffusersEngine(trained).generate(request(N, kind=EVALUATION)).images
    save_lora(tmp_path, trained.transformer, alpha=LORA.alpha)
    pipeline = QwenImagePipeline.from_pretrained(resolve_model(ModelConfig()).path)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_lora_weights(tmp_path)
    decoded = shared_models.tiny.decode(latents_of(pipeline), 32).numpy()
    assert np.abs(made.astype(int) - decoded).max() <= 1
    plain = DiffusersEngine(shared_models.tiny).generate(request(N, kind=EVALUATION)).images
    assert np.abs(made.astype(int) - plain).max() > 10


def test_without_metadata_diffusers_scales_the_adapter_wrongly(
    trained: QwenImagePolicy, expected: Tensor, tmp_path: Path
) -> None:
    """Why the metadata is written: alpha is then taken to be the rank."""
    written = save_lora(tmp_path, trained.transformer, alpha=LORA.alpha)
    save_file(load_file(written), tmp_path / "bare.safetensors")
    pipeline = fresh_pipeline()
    pipeline.load_lora_weights(tmp_path, weight_name="bare.safetensors")
    assert (latents_of(pipeline) - expected).abs().max() > 0.05


def test_a_peft_folder_silently_loads_nothing_and_ours_does_not_share_its_fate(
    untouched: Tensor, tmp_path: Path
) -> None:
    """Its keys start with `base_model.model.`, of which diffusers matches none."""
    policy = tiny_policy(parts="transformer")
    targets = list(policy.lora_targets)
    model = get_peft_model(policy.transformer, PeftConfig(r=4, lora_alpha=10.0, target_modules=targets))
    randomise({name: p for name, p in model.named_parameters() if "lora_" in name})
    model.save_pretrained(tmp_path / "peft")
    pipeline = fresh_pipeline()
    pipeline.load_lora_weights(tmp_path / "peft", weight_name="adapter_model.safetensors")
    assert pipeline.get_list_adapters() == {}
    assert torch.equal(latents_of(pipeline), untouched)
    apply_lora(pipeline, tmp_path / "peft")
    expected = trained_latents(QwenImagePolicy(policy.transformer, None, side=16, dtype=torch.float32))
    assert (latents_of(pipeline) - expected).abs().max() < 1e-5
    assert (expected - untouched).abs().max() > 0.1


def run_directory(folder: Path, policy: QwenImagePolicy, *, ema: bool) -> dict[str, Tensor]:
    """checkpoints/step_3 and step_7 as the trainer writes them; returns the weights of step 7."""
    weights = {name: p.detach().clone() for name, p in lora_parameters(policy.transformer).items()}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    halves = {name: tensor / 2 for name, tensor in weights.items()}
    trainer = {"lora": {"rank": LORA.rank, "alpha": LORA.alpha}}
    for step, tensors in ((3, zeros), (7, weights)):
        parts = {"weights": tensors, **({"ema": halves} if ema else {})}
        write_checkpoint(folder / "checkpoints", step, Checkpoint(parts, trainer, {}), keep=2)
    return weights


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/step_7"])
def test_the_newest_checkpoint_of_a_run_is_exported(
    trained: QwenImagePolicy, expected: Tensor, tmp_path: Path, inside: str
) -> None:
    weights = run_directory(tmp_path / "run", trained, ema=False)
    assert exporting.main([str(tmp_path / "run" / inside), str(tmp_path / "out")]) == 0
    found = load_file(tmp_path / "out" / FILE_NAME)
    assert all(torch.equal(found[f"transformer.{name}"], tensor) for name, tensor in weights.items())
    pipeline = fresh_pipeline()
    pipeline.load_lora_weights(tmp_path / "out")
    assert torch.allclose(latents_of(pipeline), expected, rtol=1e-4, atol=1e-4)


def test_the_average_is_exported_where_the_run_kept_one(trained: QwenImagePolicy, tmp_path: Path) -> None:
    weights = run_directory(tmp_path / "run", trained, ema=True)
    name, tensor = next((n, t) for n, t in weights.items() if n.endswith("lora_B.weight"))
    assert torch.equal(load_file(export(tmp_path / "run", tmp_path / "average"))[f"transformer.{name}"], tensor / 2)
    assert exporting.main([str(tmp_path / "run"), str(tmp_path / "raw"), "--raw"]) == 0
    assert torch.equal(load_file(tmp_path / "raw" / FILE_NAME)[f"transformer.{name}"], tensor)


def test_a_damaged_checkpoint_is_not_exported(
    trained: QwenImagePolicy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_directory(tmp_path / "run", trained, ema=False)
    file = tmp_path / "run/checkpoints/step_7/weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    assert exporting.main([str(file.parent), str(tmp_path / "out")]) == 2
    assert "weights.safetensors" in caplog.text
    assert not (tmp_path / "out").exists()
    for source, message in ((tmp_path / "nothing", "give a run directory"), (tmp_path, "holds no sound checkpoint")):
        with pytest.raises(ValueError, match=message):
            export(source, tmp_path / "out")


def finished_run(folder: Path, policy: QwenImagePolicy) -> Path:
    """lora/ and config.yaml as a run leaves them."""
    config = Config()
    config.rollout.num_inference_steps = 4
    save_lora(folder / "lora", policy.transformer, alpha=LORA.alpha)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(config))))
    return folder / "lora"


def test_generate_shows_before_and_after_with_the_runs_own_settings(
    trained: QwenImagePolicy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lora = finished_run(tmp_path / "run", trained)
    out = tmp_path / "grid.png"
    command = ["--lora", str(lora), "--out", str(out), "--images", "2", "--seed", "5"]
    with caplog.at_level(logging.INFO):
        assert generating.main([*command, "--prompt", RED.text, "--prompt", "blue blue blue blue"]) == 0
    assert f"wrote {out}" in caplog.text

    settings = generating.settings_of(lora, None)
    assert (settings.sampling.num_inference_steps, settings.sampling.resolution) == (4, 32)
    pipeline = generating.open_pipeline(settings, "cpu")
    before = generating.sample(pipeline, settings, RED.text, [5, 6])
    apply_lora(pipeline, lora)
    after = generating.sample(pipeline, settings, RED.text, [5, 6])
    assert np.abs(before.astype(int) - after).max() > 10
    sheet = np.asarray(Image.open(out))
    top, side = 2 * 22, 128
    right = 2 * side + 5 * 4
    for left, images in ((0, before), (right, after)):
        shown = sheet[top : top + side : 4, left : left + side : 4]
        assert np.array_equal(shown, images[0])


def test_generate_takes_loras_of_any_format(trained: QwenImagePolicy, tmp_path: Path) -> None:
    """PEFT's folder and a file in kohya's names, whose model is named on the command line."""
    source = lora_file.read(finished_run(tmp_path / "run", trained))
    kohya = lora_formats.write(tmp_path / "alone" / "it.safetensors", source, family="qwen_image", form="kohya")
    peft = lora_file.write_peft(tmp_path / "peft" / "here", source.tensors, alpha=source.alpha).parent
    common = ["--model", "tiny", "--prompt", RED.text, "--images", "1", "--num-inference-steps", "2"]
    sheets = []
    for name, lora in (("kohya", kohya), ("peft", peft), ("none", None)):
        out = tmp_path / f"{name}.png"
        given = [] if lora is None else ["--lora", str(lora)]
        assert generating.main([*common, *given, "--out", str(out)]) == 0
        sheets.append(np.asarray(Image.open(out))[44:, -128:].astype(int))
    assert np.abs(sheets[0] - sheets[1]).max() <= 1 and np.abs(sheets[0] - sheets[2]).max() > 10


def test_generate_with_one_seed_is_the_pipelines_image_of_that_seed() -> None:
    tiny = generating.settings_of(None, "tiny")
    settings = replace(tiny, sampling=replace(tiny.sampling, true_cfg_scale=4.0, negative_prompt="grey"))
    pipeline = generating.open_pipeline(settings, "cpu")
    (image,) = generating.sample(pipeline, settings, RED.text, [7])
    made = pipeline(
        RED.text,
        negative_prompt="grey",
        true_cfg_scale=4.0,
        height=32,
        width=32,
        num_inference_steps=6,
        generator=torch.Generator().manual_seed(7),
    ).images[0]
    assert np.array_equal(image, np.asarray(made))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "red"], "--model is needed"),
        (["--prompt", "red", "--model", "tinny"], "did you mean 'tiny'"),
        (["--prompt", "red", "--model", "tiny", "--lora", "nowhere"], "LoRA nowhere does not exist"),
        (["--prompt", "red", "--model", "tiny", "--images", "0"], "--images must be at least 1, got 0"),
    ],
)
def test_generate_refuses_in_one_sentence(arguments: list[str], message: str, caplog: pytest.LogCaptureFixture) -> None:
    assert generating.main(arguments) == 2
    assert message in caplog.text
    assert len(caplog.messages[-1].splitlines()) == 1


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
        write_grid(folder / f"images/step_{version:06d}.png", [RED.text], [image], [[0.5]])
    log = EvaluationLog(folder / "evaluations.jsonl")
    for version, scores in ((0, {0: (1.0, 2.0), 1: (3.0, 3.0)}), (7, {0: (2.0, 3.0), 1: (4.5, 5.5)})):
        kinds = {"reward": "trained", "jpeg_compressibility": "held_out"}
        curves = {name: Curve(kind, 1.0, name, scores) for name, kind in kinds.items()}
        log.add(Evaluation(version, False, "same", 6, 1.0, curves))
    return folder


def test_the_folder_can_be_published(trained: QwenImagePolicy, tmp_path: Path) -> None:
    """Its card says where the LoRA is from and what it does, and nothing of this machine."""
    run, out = published_run(tmp_path / "run", trained, model="Qwen/Qwen-Image"), tmp_path / "out"
    assert exporting.main([str(run), str(out), "--license", "apache-2.0"]) == 0
    card = ModelCard.load(out / "README.md")
    front = card.data.to_dict()
    assert front["base_model"] == "Qwen/Qwen-Image" and front["base_model_relation"] == "adapter"
    assert front["license"] == "apache-2.0" and {"lora", "diffusers"} <= set(front["tags"])
    for said in (
        "rank 4, alpha 10",
        "| trained reward | 2 × `color` |",
        "| steps | 7 of 7 |",
        "| `reward` | trained | 2.25 | 3.75 | +1.5 ± 6.4 |",
        "| `jpeg_compressibility` | held out | 2.25 | 3.75 | +1.5 ± 6.4 |",
        "python -m async_flowrl.main --config-name one_step_off total_steps=7 'reward.terms={color: {weight: 2.0}}' "
        "'name=${x}' '~save'\n",
        "python -m async_flowrl.verify RUN",
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
    assert lora_file.base_of(out) == "Qwen/Qwen-Image" == lora_file.base_of(out / "peft")


def test_a_card_takes_what_evaluate_measured(trained: QwenImagePolicy, tmp_path: Path) -> None:
    run = published_run(tmp_path / "run", trained, model="tiny")
    save_lora(run / "lora", trained.transformer, alpha=LORA.alpha)
    common = ["--images", "2", "--steps", "2", "--out", str(tmp_path / "found")]
    assert evaluating.main([str(run), *common]) == 0
    out = tmp_path / "out"
    forms = ["--format", "comfyui", "--format", "kohya", "--merged", "transformer"]
    assert exporting.main([str(run), str(out), "--evaluation", str(tmp_path / "found"), *forms]) == 0
    text = (out / "README.md").read_text()
    row = json.loads((tmp_path / "found/evaluation.json").read_text())["rewards"]["color"]
    means = [f"{row[side]['mean']:.4g}" for side in ("before", "after")]
    assert f"| `color` | {means[0]} | {means[1]} | {row['difference']['mean']:+.4g} [" in text
    assert (out / "before_after.png").read_bytes() == (tmp_path / "found/before_after.png").read_bytes()
    assert "license: unknown" in text and "base_model" not in text.split("---")[1]
    assert [entry.name for entry in (out / "merged").iterdir()] == ["transformer"]
    listed = set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))
    assert {"comfyui.safetensors", "kohya.safetensors", "merged/"} <= listed
    again = tmp_path / "again"
    assert exporting.main([str(out / "kohya.safetensors"), str(again), "--base", "tiny"]) == 0
    ours, theirs = lora_file.read(out), lora_file.read(again)
    assert theirs.alpha == theirs.rank == 4
    assert all(torch.equal(t, ours.tensors[n] * (2.5 if "_A" in n else 1)) for n, t in theirs.tensors.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "--base", "tinny", "--merged"], "did you mean 'tiny'"),
        (["RUN", "--evaluation", "RUN"], "is no folder of python -m async_flowrl.evaluate"),
        (["RUN", "--base", "FLUX", "--format", "kohya"], "no name for FLUX.1's layer transformer_blocks.0.img_mlp"),
        (["LORA", "--merged"], "--base is needed"),
        (["KOHYA"], "with --base it is read as the LoRA of that model"),
        (["KOHYA", "--base", "SD3"], "finds no layer of StableDiffusion3Pipeline in it"),
    ],
)
def test_export_refuses_in_one_sentence(
    arguments: list[str], message: str, trained: QwenImagePolicy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = published_run(tmp_path / "run", trained, model="tiny")
    alone = save_lora(tmp_path / "far" / "from", trained.transformer, alpha=LORA.alpha)
    kohya = tmp_path / "far" / "kohya" / "it.safetensors"
    lora_formats.write(kohya, lora_file.read(alone), family="qwen_image", form="kohya")
    tiny = {name.upper(): build_tiny(TinyConfig(family=name)) for name in ("flux", "sd3")}
    places = {"RUN": run, "LORA": alone, "KOHYA": kohya, **tiny}
    given = [str(places.get(each, each)) for each in arguments]
    assert exporting.main([given[0], str(tmp_path / "out"), *given[1:]]) == 2
    assert message in caplog.messages[-1] and len(caplog.messages[-1].splitlines()) == 1
    assert not (tmp_path / "out").exists()
