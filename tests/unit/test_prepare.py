"""Tests of the checks of `prepare`, before anything is started, for every family of models."""

import json
from pathlib import Path
from typing import Any

import pytest

from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.policies.registry import load_policy
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.run import launch
from async_flowrl.run.launch import check_machine, check_stored, describe_run
from async_flowrl.run.prepare import Prepared, prepare
from async_flowrl.tickets import arithmetic
from async_flowrl.tickets.table import TRAIN, Ticket
from separation.placement import StoreTooSmall
from tests.support.video import CHANNELS, FRAMES, build_video


def prepared(folder: Path, *overrides: str) -> Prepared:
    return prepare(compose_config("one_step_off", [f"output_dir={folder / 'run'}", *overrides]))


def prompts(folder: Path, **columns: Any) -> str:
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "red red red red", **columns}) + "\n")
    return f"data.train={folder / 'prompts.jsonl'}"


@pytest.mark.parametrize(
    ("model", "columns", "message"),
    [
        (
            "tiny_sd3",
            {"system_prompt": "Paint."},
            "^Stable Diffusion 3 has no system prompt, prompt 0 brings 'Paint.'$",
        ),
        ("tiny_flux", {"prompt_token_ids": [1, 2]}, r"^FLUX\.1 takes prompts as text, prompt 0 brings token ids$"),
        ("tiny", {"prompt_token_ids": [1, 99999]}, "99999 is not in the text encoder's vocabulary"),
    ],
)
def test_prompts_that_the_model_cannot_encode(tmp_path: Path, model: str, columns: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepared(tmp_path, f"model={model}", prompts(tmp_path, **columns))
    held_out = prompts(tmp_path, **columns).replace("train", "evaluation")
    with pytest.raises(ConfigError, match=message):
        prepared(tmp_path, f"model={model}", held_out)


def test_an_engine_that_cannot_spread_the_network_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^rollout\.gpus_per_worker=3 spreads the network's 8 attention heads"):
        prepared(tmp_path, "model=tiny_sd3", "rollout.engine=vllm_omni", "rollout.gpus_per_worker=3")
    assert prepared(tmp_path, "model=tiny_sd3", "rollout.engine=vllm_omni").model.family == "sd3"


def test_guidance_of_the_baseline_is_checked_under_its_own_name(tmp_path: Path) -> None:
    asked = "evaluate.baseline=true", "evaluate.baseline_guidance=0.5"
    flux = "model=tiny_flux", "rollout.guidance_scale=3.5"
    with pytest.raises(ConfigError, match=r"^evaluate\.baseline_guidance must be above 1, or 0 or 1 for no guidance"):
        prepared(tmp_path, *asked)
    baseline = prepared(tmp_path, *flux, *asked).requests.baseline
    assert baseline is not None and baseline.guidance_scale == 0.5, "FLUX takes any scale above 0, as an input"
    with pytest.raises(ConfigError, match=r"^evaluate\.baseline_guidance must be above 0 for a model that takes"):
        prepared(tmp_path, *flux, "evaluate.baseline=true", "evaluate.baseline_guidance=0")


def test_batches_of_more_tickets_than_a_step_has(tmp_path: Path) -> None:
    assert prepared(tmp_path, "rollout.tickets_per_batch=2").config.rollout.tickets_per_batch == 2
    with pytest.raises(ConfigError, match=r"^rollout\.tickets_per_batch=99, but a step has \d+ tickets, and a batch"):
        prepared(tmp_path, "rollout.tickets_per_batch=99")


@pytest.mark.parametrize("key", ["reward.terms", "evaluate.reward.terms"])
def test_a_term_that_would_wait_longer_than_the_run(tmp_path: Path, key: str) -> None:
    term = f"+{key}.far={{name: http, options: {{url: 'http://127.0.0.1:9', deadline: 400}}}}"
    assert prepared(tmp_path, term, "deadlines.score=400")
    with pytest.raises(
        ConfigError, match=rf"^{key}\.far\.options\.deadline=400 must be at most deadlines\.score=300, "
    ):
        prepared(tmp_path, term)


def test_the_dtype_of_the_files_is_written_down(tmp_path: Path) -> None:
    """A resume compares it, and every worker reads it."""
    found = prepared(tmp_path)
    assert found.config.model.dtype == found.model.dtype == found.requests.config.model.dtype == "float32"
    assert prepared(tmp_path, "model.dtype=bfloat16").model.dtype == "bfloat16"


def test_a_resolution_without_latents(tmp_path: Path) -> None:
    """Which resolutions there are is the family's to say."""
    with pytest.raises(ConfigError, match=r"^resolution must be a multiple of 16, got 40"):
        prepared(tmp_path, "rollout.resolution=40")
    video = build_video(tmp_path / "video")
    own = (f"model.path={video}", "model.family=tests.support.video:VideoFamily", "rollout.resolution=40")
    assert prepared(tmp_path, *own).shapes.latents == (CHANNELS, FRAMES, 5, 10)
    (video / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(ConfigError, match=r"^vae/config\.json of model\.path .* cannot be read: .*No such file"):
        prepared(tmp_path, f"model.path={video}")


@pytest.mark.parametrize("algorithm", ["flow_grpo", "flow_grpo_fast", "diffusion_nft"])
def test_a_videos_payload_is_counted_in_its_own_layout(algorithm: str, tmp_path: Path) -> None:
    """Latents [channels, frames, h, w]: what a plan says is what a ticket's trajectory comes to, byte for byte."""
    model = (f"model.path={build_video(tmp_path / 'video')}", "model.family=tests.support.video:VideoFamily")
    found = prepared(tmp_path, *model, "ticket_size=2", f"algorithm={algorithm}")
    assert found.shapes.latents == (CHANNELS, FRAMES, 4, 8)
    policy = load_policy(found.model, dtype="float32", device="cpu", parts="all")
    made = DiffusersEngine(policy).generate(found.requests.request(Ticket(TRAIN, 0, 0, 0, 0, 0)))
    assert made.trajectory is not None
    told = arithmetic.ticket_bytes(found.config, found.shapes)
    pictures = 2 * 3 * 32 * 32
    assert told - pictures == made.trajectory.nbytes - made.trajectory.sigmas.nbytes
    tickets = found.config.prompts_per_step * found.config.group_size // 2
    whole = arithmetic.stored_bytes(found.config, found.shapes)
    assert whole == 2 * tickets * told
    assert f"at most {whole / 1e6:.1f} MB of payload" in describe_run(found)


def test_the_state_of_a_lora_is_on_its_way_to_the_controller(tmp_path: Path) -> None:
    """In float32: masters, two moments, max_staleness + 1 versions, two of evaluations; a moving average."""
    trained = 1_000_000

    def state(*settings: str) -> int:
        found = prepared(tmp_path, *settings)
        tickets = arithmetic.stored_bytes(found.config, found.shapes)
        return arithmetic.stored_bytes(found.config, found.shapes, trained) - tickets

    two = "trainer.num_workers=2"
    assert state("tune=full") == state(two, "tune=full", "trainer.shard=full") == 0
    assert state() == state(two, "trainer.shard=none") == state(two, "trainer.shard=full") == 4 * (3 + 2 + 2) * trained
    assert state(two, "trainer.ema_decay=0.9") == 4 * (3 + 2 + 2 + 1) * trained
    assert state(two, "algorithm=diffusion_nft", "algorithm.old_policy_decay=half") == 4 * (3 + 2 + 2 + 1) * trained, (
        "the average that samples"
    )


def test_the_store_must_hold_it_when_the_trained_parameters_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster is asked again. The state and the weights on their way need room."""
    monkeypatch.setattr("separation.ray_cluster.living_resources", lambda: [{"object_store_memory": 1e8}])
    found = prepared(tmp_path, "trainer.num_workers=2")
    check_stored(found, trained=1_000_000)
    with pytest.raises(StoreTooSmall, match=r"results and weights lie in the object store, which holds 0\.1 GB"):
        check_stored(found, trained=4_000_000)
    whole = ("tune=full", "trainer.num_workers=2", "trainer.shard=full")
    check_stored(prepared(tmp_path, *whole), trained=4_000_000)
    with pytest.raises(StoreTooSmall, match=r"results and weights lie in the object store"):
        check_stored(prepared(tmp_path, *whole), trained=20_000_000)


def test_a_gpu_that_ray_does_not_find_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVML on its path, Ray counts no GPU, and the pools would train on the CPU."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(launch, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("RAY_OVERRIDE_RESOURCES", raising=False)
    run = prepared(tmp_path)
    with pytest.raises(ConfigError, match=r"nvidia0.*NVML.*\"GPU\": 2"):
        check_machine(run)
    for settings in ({"CUDA_VISIBLE_DEVICES": ""}, {"RAY_OVERRIDE_RESOURCES": '{"GPU": 2}'}):
        with monkeypatch.context() as there:
            for name, value in settings.items():
                there.setenv(name, value)
            check_machine(run)
    check_machine(prepared(tmp_path, "rollout.gpus_per_worker=0", "trainer.gpus_per_worker=0"))
