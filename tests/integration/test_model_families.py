"""Tests of whole runs with every model family, and with a user's family whose latents are videos."""

import shutil
from pathlib import Path

import pytest
import torch

from async_flowrl.cli import export
from async_flowrl.config.compose import read_config
from async_flowrl.config.models import architectures
from async_flowrl.config.schema import LoraConfig, ModelConfig
from async_flowrl.policies.lora import add_lora, lora_parameters
from async_flowrl.policies.lora_file import FILE_NAME, read
from async_flowrl.policies.registry import folder_of, resolve_model, shapes_of
from async_flowrl.policies.stored import StoredWeights
from async_flowrl.policies.trained_file import apply
from tests.integration.forked_ranks import train_with_forked_ranks
from tests.integration.runs import WHOLE, Run, in_every_way, train, train_here_on_ray
from tests.support.families import NAMES, pipeline_of, policy_of, tiny_model
from tests.support.video import CHANNELS, FRAMES, build_video


def options(family: str) -> list[str]:
    model = tiny_model(family)
    own = {"flux": ["rollout.guidance_scale=3.5"], "wan": ["rollout.frames=5"]}
    own["wan22"] = [*own["wan"], "rollout.true_cfg_scale=4", "rollout.true_cfg_scale_2=3"]
    small = ["model.tiny.heads=4", "model.tiny.layers=2", "rollout.num_inference_steps=4"]
    return [f"model={model}", *small, *own.get(family, [])]


def check(run: Run, steps: int) -> None:
    assert run.summary["steps"] == steps
    assert run.summary["staleness_max"] == 1
    assert run.column("staleness/max") == [0, *[1] * (steps - 1)]
    assert len(set(run.digests)) == steps + 1
    assert all(0 < norm < 1e4 for norm in run.column("grad_norm"))
    # Where rollout and trainer compute the same velocity, the fresh batch has a ratio of 1 and nothing is clipped.
    assert run.column("log_prob_gap")[0] < 1e-6


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.extended if name in ("flux", "wan") else pytest.mark.slow)
        for name in NAMES
        if name != "qwen_image"
    ],
)
def test_one_step_off_trains_every_family(family: str, tmp_path: Path) -> None:
    run = train(tmp_path / "run", "one_step_off", "total_steps=2", *options(family))
    check(run, 2)
    pipeline = pipeline_of(family)
    pipeline.load_lora_weights(run.root / "lora")
    assert pipeline.get_list_adapters() == {"transformer": ["default_0"]}


@pytest.mark.extended
def test_steps_of_one_side_train_its_expert_alone(tmp_path: Path) -> None:
    """The other expert's adapter keeps its bits, weight decay included, and both are one version and one folder."""
    only = ["algorithm.window=list", "algorithm.window_list=[0]", "trainer.weight_decay=0.1", "seed=3"]
    run = train(tmp_path / "run", "one_step_off", "total_steps=3", *options("wan22"), *only)
    check(run, 3)
    assert min(run.column("grad_norm/transformer")) > 0 == max(run.column("grad_norm/transformer_2"))
    policy = policy_of("wan22")
    add_lora(policy.transformer, LoraConfig(rank=8, alpha=16.0), policy, seed=3)
    before, after = lora_parameters(policy.transformer), read(run.root / "lora").tensors
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if name.startswith("transformer.")} and len(before) == 2 * 32
    pipeline = pipeline_of("wan22")
    apply(pipeline, run.root / "lora")
    assert pipeline.get_list_adapters() == {"transformer": ["default_0"], "transformer_2": ["default_0"]}


@pytest.mark.slow
def test_ranks_that_share_two_experts_have_the_weights_of_ranks_that_do_not(ray_here: None, tmp_path: Path) -> None:
    """Shares of an expert that no step trains have no gradient."""
    two = (*options("wan22"), "total_steps=2", "trainer.num_workers=2", "algorithm.window_per=step", "seed=3")
    none = train_here_on_ray(tmp_path / "none", "one_step_off", *two, "trainer.shard=none")
    full = train_here_on_ray(tmp_path / "full", "one_step_off", *two, "trainer.shard=full")
    assert none.digests == full.digests and len(set(full.digests)) == 3
    high = ("tune=full", "trainer.shard=full", "algorithm.window=list", "algorithm.window_list=[0]")
    run = train_with_forked_ranks(tmp_path / "run", "one_step_off", *two, *high)
    assert min(run.column("grad_norm/transformer")) > 0 == max(run.column("grad_norm/transformer_2"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mode", "tune"),
    [
        ("qwen_image_21", "sync", "lora"),
        ("wan", "stream", "lora"),
        ("wan22", "one_step_off", "lora"),
        ("wan", "fully_async", "lora"),
        ("wan", "sync", "full"),
        ("wan22", "stream", "full"),
        ("qwen_image_21", "one_step_off", "full"),
        ("wan22", "fully_async", "full"),
    ],
)
def test_the_digest_is_one_in_every_mode(family: str, mode: str, tune: str, tmp_path: Path) -> None:
    """Two pools, one that does both, and a run in two parts. Prompts of two lengths share a batch."""
    settings = [*options(family), f"tune={tune}", "save.every=2", "rollout.tickets_per_batch=2"]
    whole = in_every_way(tmp_path, mode, *settings, steps=4, first=2)
    assert whole.column("log_prob_gap")[0] < 1e-6


def test_videos_with_a_family_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Latents [channels, frames, h, w] pass through steps, log-probs, payloads, batching and delivery."""
    model = [f"model.path={build_video(tmp_path / 'model')}", "model.family=tests.support.video:VideoFamily"]
    run = train(
        tmp_path / "run",
        "one_step_off",
        *WHOLE,
        *model,
        "ticket_size=2",
        "rollout.batch_size=1",
        "reward=jpeg_compressibility",
    )
    check(run, 5)
    out = capsys.readouterr().out
    assert "async-flowrl export" in out and "async-flowrl generate" not in out, "diffusers has no such pipeline"
    assert run.summary["tickets"]["trained"] == run.summary["tickets"]["issued"] == 20
    # Two images, and their latents at the six points of five trained steps.
    sizes = {event["bytes"] for event in run.events if event["event"] == "span" and "bytes" in event}
    assert len(sizes) == 1 and min(sizes) > 2 * 6 * 4 * CHANNELS * FRAMES * 4 * 8
    trained = read(run.root / "lora" / FILE_NAME)
    assert {name.split(".lora")[0] for name in trained.tensors} == {"transformer_blocks.0", "transformer_blocks.1"}
    assert max(float(t.abs().max()) for name, t in trained.tensors.items() if "lora_B" in name) > 0


def test_rollout_and_trainer_draw_the_same_weights(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "one_step_off", "model.weights=random", "total_steps=2")
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


NF4 = ("model.quantize=nf4", "model.quantize_text_encoder=int8", "total_steps=3")


@pytest.mark.extended
def test_placements_workers_and_a_resume_make_the_same_weights(tmp_path: Path) -> None:
    """What is exported is for the model in its files."""
    separate = train(tmp_path / "separate", "one_step_off", *NF4)
    shared = train(tmp_path / "shared", "one_step_off", *NF4, "placement=shared", "total_steps=2")
    assert shared.summary["placement"] == "shared"
    gaps = shared.column("log_prob_gap")
    resumed = train(
        tmp_path / "shared", "one_step_off", *NF4, "rollout.num_workers=2", "rollout.text_encoder=cached", "resume=auto"
    )
    assert resumed.digest == separate.digest and len(set(separate.digests)) == 4
    assert gaps == separate.column("log_prob_gap")[:2] and gaps[0] < 1e-6
    plain = train(tmp_path / "plain", "one_step_off", "total_steps=2")
    assert plain.digests[1] != separate.digests[1]
    assert export.main([str(separate.root), str(tmp_path / "out"), "--merged"]) == 0
    assert "quantised to nf4" in (tmp_path / "out" / "README.md").read_text()
    stored = resolve_model(read_config(separate.root / "config.yaml").model).path
    base, merged = (StoredWeights(path, dtype=torch.float32) for path in (stored, str(tmp_path / "out" / "merged")))
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert base.keys() == merged.keys() and changed
    assert all(".weight" in name and "transformer_blocks" in name for name in changed)
    assert max(float((base[name] - merged[name]).abs().max()) for name in changed) < 0.1
